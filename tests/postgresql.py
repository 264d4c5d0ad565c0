"""A PostgreSQL of our own: Debian's programs, a cluster in a temporary folder, a free port, trusted on loopback alone."""

import os
import pwd
import shutil
import subprocess
import time
from pathlib import Path

from edge_fl_broker.mosquitto import free_port

START_S = 30.0


class PostgresqlMissingError(Exception):
    """There is no PostgreSQL that could be run here."""


def programs() -> Path:
    """The folder of initdb and postgres. Raises PostgresqlMissingError."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: float(path.parts[-3]))
    if found:
        return found[-1].parent
    if initdb := shutil.which("initdb"):
        return Path(initdb).resolve().parent
    raise PostgresqlMissingError("no initdb, expected Debian's package 'postgresql'")


class Postgresql:
    """One cluster, as a context manager; `url(name)` makes a database and names it."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._programs, self._port = folder, programs(), free_port("127.0.0.1")
        self._user = self._unprivileged()
        self._server: subprocess.Popen[bytes] | None = None

    def url(self, name: str) -> str:
        self._run("createdb", "-h", "127.0.0.1", "-p", str(self._port), "-U", "tester", name)
        return f"postgresql://tester@127.0.0.1:{self._port}/{name}"

    def __enter__(self) -> "Postgresql":
        self._folder.mkdir(parents=True, exist_ok=True)
        if self._user:
            shutil.chown(self._folder, self._user)
        data = self._folder / "data"
        self._run(
            "initdb", "-D", str(data), "-U", "tester", "--auth=trust", "--no-sync", "-E", "UTF8", "--locale=C"
        )
        self.start()
        return self

    def start(self) -> None:
        """Start the server of the cluster."""
        data = self._folder / "data"
        options = ["-D", str(data), "-h", "127.0.0.1", "-p", str(self._port), "-k", str(self._folder), "-F"]
        with (self._folder.parent / "postgresql.log").open("wb") as log:
            self._server = subprocess.Popen(
                [str(self._programs / "postgres"), *options],
                stdout=log, stderr=log, user=self._user, cwd=self._folder, start_new_session=True,
            )  # fmt: skip
        until = time.monotonic() + START_S
        while (
            subprocess.run(
                [
                    str(self._programs / "pg_isready"),
                    "-q",
                    "-h",
                    "127.0.0.1",
                    "-p",
                    str(self._port),
                    "-U",
                    "tester",
                ],
                check=False,
            ).returncode
            != 0
        ):
            if self._server.poll() is not None or time.monotonic() > until:
                raise PostgresqlMissingError("postgres did not start")
            time.sleep(0.1)

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Stop the server; `start` continues with the same databases."""
        if self._server:
            self._server.terminate()  # in order: connections that stay open are waited for
            try:
                self._server.wait(1)
            except subprocess.TimeoutExpired:
                self._server.send_signal(2)  # a fast stop ends them
                self._server.wait(10)

    def _run(self, program: str, *arguments: str) -> None:
        command = [str(self._programs / program), *arguments]
        subprocess.run(command, check=True, capture_output=True, user=self._user, cwd="/", timeout=60)

    def _unprivileged(self) -> str | None:
        """postgres does not run as root: then somebody else does it."""
        if os.geteuid() != 0:
            return None
        for name in ("postgres", "nobody"):
            try:
                return pwd.getpwnam(name).pw_name
            except KeyError:
                continue
        raise PostgresqlMissingError("this is root, and there is no user 'postgres' to run it as")
