"""An ejabberd for tests: an MQTT 5 broker other than mosquitto, over TLS with user name and password, on loopback."""

import os
import shutil
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from edge_fl_broker.mosquitto import free_port

START_S = 60.0
CONFIG = """
hosts: [localhost]
certfiles: ["{certificate}"]
listen: [{{port: {port}, ip: "127.0.0.1", module: mod_mqtt, tls: true}}]
modules: {{mod_mqtt: {{}}}}
"""
REGISTER = """
Wait = fun Again() ->
    case catch ejabberd_auth:try_register(<<"{user}">>, <<"localhost">>, <<"{password}">>) of
        ok -> io:format("user registered~n");
        _ -> timer:sleep(100), Again()
    end
end, Wait().
"""


class EjabberdMissingError(Exception):
    """ejabberd is not installed."""


class Ejabberd:
    """A context manager: starts in `folder`, without root, node name or epmd."""

    def __init__(self, folder: Path, certificate: Path, key: Path, user: str, password: str) -> None:
        libraries = next(Path("/usr/lib").glob("*/ejabberd-*"), None)
        self._erl = shutil.which("erl")
        if libraries is None or self._erl is None:
            raise EjabberdMissingError("not installed (Debian package ejabberd)")
        self._libraries, self._folder = libraries.parent, folder
        self._register = REGISTER.format(user=user, password=password)
        self.port = free_port("127.0.0.1")
        pem = folder / "certificate.pem"
        pem.write_bytes(certificate.read_bytes() + key.read_bytes())
        (folder / "ejabberd.yml").write_text(CONFIG.format(certificate=pem, port=self.port))

    def __enter__(self) -> Self:
        environment = {
            **os.environ,
            "ERL_LIBS": str(self._libraries),
            "EJABBERD_CONFIG_PATH": str(self._folder / "ejabberd.yml"),
            "EJABBERD_LOG_PATH": str(self._folder / "ejabberd.log"),
            "HOME": str(self._folder),
        }
        spool = f'"{self._folder / "spool"}"'
        options = ["-noinput", "-mnesia", "dir", spool, "-s", "ejabberd", "-eval", self._register]
        output = self._folder / "output"
        with output.open("wb") as file:
            self._process = subprocess.Popen(
                [str(self._erl), *options], stdout=file, stderr=file, cwd=self._folder, env=environment
            )
        until = time.monotonic() + START_S
        while not ("user registered" in (said := output.read_text()) and "Start accepting" in said):
            if self._process.poll() is not None or time.monotonic() > until:
                self.__exit__(None, None, None)
                raise AssertionError(f"ejabberd did not start: {said[-2000:]}")
            time.sleep(0.1)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
