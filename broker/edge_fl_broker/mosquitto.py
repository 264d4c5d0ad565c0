"""Run mosquitto as a child process: write its configuration, keep its log, wait until it accepts connections, stop it."""

import contextlib
import errno
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import BinaryIO, Self

from edge_fl.errors import ConnectError, DeadlineError
from edge_fl.files import atomic
from edge_fl.files.paths import text
from edge_fl.wire.endpoint import Endpoint
from edge_fl_broker import child
from edge_fl_broker.config import BrokerSettings, render, render_access
from edge_fl_broker.find import Program, find

log = logging.getLogger(__name__)

START_S = 10.0
STOP_S = 5.0
PAUSE_S = 0.02
STEADY_S = 0.05
TERMINATE_S = 0.5
FREE_PORT_ATTEMPTS = 3
RELOADS = (2, 1, 0)
"""Older versions corrupt their list of sessions when they reload their configuration while a client with a session is offline and
certificates name the clients: returning clients are disconnected every second until mosquitto crashes."""
DATABASE = "mosquitto.db"
DAMAGED = f"{DATABASE}.damaged-"
KEPT_DAMAGED = 3
STAMP = re.compile(r"^\d{4}-\d\d-\d\dT[\d:]+: ")
RUNNING = re.compile(r"mosquitto version \S+ running")
UNREADABLE = re.compile(
    r"open database|persistent database|Unsupported chunk|Incompatible database", re.IGNORECASE
)
"""What mosquitto logs about a database that it cannot read, or cannot read all of."""
LOST = "server and devices publish their states and releases again when they reconnect; messages that waited for offline clients are lost"


class Mosquitto:
    """One broker, as a context manager or with `start` and `stop`; port 0 chooses a free one, available in `settings`.

    It ends with the thread that started it. A second start on the same folder continues with the retained messages. A database that
    mosquitto cannot read, as after a power cut, is set aside; `notify` receives one line about it.
    """

    def __init__(
        self,
        settings: BrokerSettings,
        program: Program | None = None,
        notify: Callable[[str], None] = log.warning,
    ) -> None:
        self.settings = settings
        self.program = program or find()
        self._notify = notify
        self._any_port = settings.port == 0
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def endpoint(self) -> Endpoint:
        """Endpoint for clients, without their certificates."""
        any_host = {"0.0.0.0": "127.0.0.1", "::": "::1"}
        files = self.settings.certificates
        host = any_host.get(self.settings.host, self.settings.host)
        return Endpoint(host, self.settings.port, files.ca if files else None)

    @property
    def pid(self) -> int:
        """Process id. Raises ConnectError if mosquitto is not running."""
        if self._process is None:
            raise ConnectError("mosquitto: not started")
        return self._process.pid

    @property
    def log_path(self) -> Path:
        return self.settings.log_path

    def start(self, deadline_s: float = START_S) -> None:
        """Start and wait until it accepts connections.

        Raises ConnectError if the port is taken or mosquitto stops at once, DeadlineError.
        """
        _put_aside(self.log_path)
        for attempt in range(FREE_PORT_ATTEMPTS):
            if self._any_port:
                self.settings = replace(self.settings, port=free_port(self.settings.host))
            require_free(self.settings.host, self.settings.port)
            write_files(self.settings, self.program)
            try:
                self.restart(deadline_s)
            except ConnectError:
                # another program may have taken the port
                if not self._any_port or attempt == FREE_PORT_ATTEMPTS - 1:
                    raise
            else:
                self._any_port = False  # a restart must keep the port that clients know
                return

    def reload(self, settings: BrokerSettings) -> None:
        """Replace the access list and reload the revocation list. Raises ConnectError, DeadlineError.

        Since version 2.1 clients stay connected; an older version is restarted, so all clients reconnect.
        """
        write_files(settings, self.program, "the previous access list stays in force")
        self.settings = settings
        if self.reloads:
            os.kill(self.pid, signal.SIGHUP)
        else:
            self.stop()
            self.restart()

    @property
    def reloads(self) -> bool:
        """Whether clients stay connected while it reloads."""
        return self.program.version >= RELOADS

    def save(self) -> None:
        """Save sessions and retained messages to disk now. Raises ConnectError if mosquitto is not running."""
        os.kill(self.pid, signal.SIGUSR1)

    def stop(self, deadline_s: float = STOP_S) -> None:
        """Stop mosquitto, which saves its database; kill it after `deadline_s`."""
        until = time.monotonic() + deadline_s
        while (process := self._process) and process.poll() is None:
            if time.monotonic() > until:
                self.kill()
                return
            process.terminate()  # repeated: a starting mosquitto ignores the first signal
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(TERMINATE_S)
        self._process = None

    def kill(self) -> None:
        """Kill mosquitto, like a power cut."""
        if process := self._process:
            process.kill()
            process.wait()
            self._process = None

    def has_ended(self) -> bool:
        """Whether it ended without `stop`."""
        return self._process is None or self._process.poll() is not None

    def end_reason(self) -> str:
        """Exit status or signal of a mosquitto that ended, and the end of its log since it ran."""
        code = self._process.returncode if self._process else None
        if code is None:
            return self.log_tail()
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
        return f"{how}; {self.log_tail(since=RUNNING)}"

    def log_tail(self, lines: int = 3, since: re.Pattern[str] | None = None) -> str:
        """The last lines of the log, in one line: all equal ones once, and only those after the last that matches `since`."""
        try:
            logged = self.log_path.read_text(errors="replace").splitlines()
        except OSError:
            return "no log"
        begin = max(
            (place for place, line in enumerate(logged, 1) if since and since.search(line)), default=0
        )
        different = dict.fromkeys(STAMP.sub("", line) for line in logged[begin:])
        return " | ".join([*different][-lines:]) or "nothing in its log"

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def restart(self, deadline_s: float = START_S) -> None:
        """Start with the files that are there, so after a crash also on a full disk. Raises ConnectError, DeadlineError."""
        database = self.settings.folder / DATABASE
        # mosquitto would start without it, and replace it
        if database.exists() and not os.access(database, os.R_OK):
            raise ConnectError(
                f"{database}: not readable by this user; expected its own file ('sudo chown $USER {database}')",
                "mosquitto was not started",
            )
        was_empty = database.is_file() and not database.stat().st_size
        begin = self.log_path.stat().st_size if self.log_path.exists() else 0
        try:
            self._start(deadline_s)
        except ConnectError:
            if not (damage := self._damage(begin)) or not database.is_file():
                raise
            aside = _set_aside(database)
            try:
                self._start(deadline_s)
            except (ConnectError, DeadlineError):
                os.replace(aside, database)  # it was not the reason
                raise
            self._notify(
                f"{database}: mosquitto cannot read it ({damage}), after a power cut for example; it was set aside as {text(aside.name)},"
                f" and mosquitto started with an empty one: {LOST}"
            )
        else:
            if damage := "it was empty" if was_empty else self._damage(begin):
                self._notify(f"{database}: {damage}; mosquitto started without what it cannot read: {LOST}")

    def _start(self, deadline_s: float) -> None:
        command = [str(self.program.path), "-c", str(self.settings.config_path)]
        with self._opened_log() as log_file:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", child.__file__, str(os.getpid()), *command],
                stdin=subprocess.DEVNULL,
                stdout=log_file,
                stderr=log_file,
                env={**os.environ, **self.program.environment},
                start_new_session=True,
            )
        until = time.monotonic() + deadline_s
        while not self._answers():
            if (code := self._process.poll()) is not None:
                self._process = None
                how = f" ({signal.Signals(-code).name})" if code < 0 else ""
                raise ConnectError(
                    f"mosquitto on {self.settings.host}:{self.settings.port} stopped at once{how}: {self.log_tail()};"
                    f" log {self.log_path}"
                )
            if time.monotonic() > until:
                self.kill()
                raise DeadlineError(
                    f"mosquitto did not accept connections within {deadline_s:g} s; log {self.log_path}",
                    "stopped",
                )
            time.sleep(PAUSE_S)

    def _damage(self, begin: int) -> str:
        """What mosquitto logged about an unreadable database since the log had `begin` bytes; "" for nothing."""
        with contextlib.suppress(OSError), self.log_path.open("rb") as file:
            file.seek(begin)
            for line in file.read().decode(errors="replace").splitlines():
                if UNREADABLE.search(line):
                    return line.partition(": ")[2].strip()
        return ""

    def _opened_log(self) -> BinaryIO:
        try:
            return self.log_path.open("ab")
        except OSError as error:
            raise ConnectError(
                f"{self.log_path}: {error.strerror}; expected a writable folder", "mosquitto was not started"
            ) from error

    def _answers(self) -> bool:
        """Whether it accepts a connection and keeps it: with an invalid configuration mosquitto listens for a moment."""
        try:
            with socket.create_connection((self.endpoint.host, self.endpoint.port), timeout=STEADY_S) as sock:
                return sock.recv(1) != b""
        except TimeoutError:  # mosquitto waits for our first packet
            return True
        except OSError:
            return False


def write_files(
    settings: BrokerSettings, program: Program, consequence: str = "no broker was started"
) -> None:
    """Write configuration and access list to the folder. Raises ConnectError, which ends in `consequence`."""
    try:
        settings.folder.mkdir(parents=True, exist_ok=True)
        atomic.write(settings.config_path, render(settings, program))
        # mosquitto warns about a file that others can read
        atomic.write(settings.access_path, render_access(settings), private=True)
    except OSError as error:
        raise ConnectError(
            f"{settings.folder}: {error.strerror}; expected a writable folder", consequence
        ) from error


def replace_process(
    settings: BrokerSettings, program: Program, notify: Callable[[str], None] = log.warning
) -> None:
    """Replace this process by mosquitto, with its log on the terminal, for systemd and containers. Returns only by raising ConnectError."""
    require_free(settings.host, settings.port)
    # started once, on another port, to set a damaged database aside
    if (settings.folder / DATABASE).exists():
        trial = Mosquitto(replace(settings, host="127.0.0.1", port=0), program, notify)
        trial.start()
        trial.kill()  # `stop` would write the database
    write_files(settings, program)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    command = [str(program.path), "-c", str(settings.config_path)]
    os.execve(program.path, command, {**os.environ, **program.environment})


def unusable(program: Program, folder: Path) -> str:
    """Why a mosquitto cannot run in `folder`: a confined one, such as a snap's, cannot read or write every folder. "" if it can.

    Started with a configuration in a temporary folder inside `folder`, or inside the folder above that exists.
    """
    above = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.is_dir())
    try:
        scratch = tempfile.TemporaryDirectory(prefix="broker-probe-", dir=above)
    except OSError:  # reported when files are written
        return ""
    with scratch as name:
        broker = Mosquitto(BrokerSettings(Path(name), port=0), program, lambda line: None)
        try:
            broker.start()
            broker.stop()
        except (ConnectError, DeadlineError) as error:
            reason = broker.log_tail(1) if broker.log_path.exists() else error.message
            return f"it does not start with files in {text(above)} ({reason})"
        return "" if (Path(name) / DATABASE).exists() else f"it does not write to {text(above)}"


def choose(settings: BrokerSettings, notify: Callable[[str], None]) -> Program:
    """Find a mosquitto that can use the folders of `settings`; `notify` receives a line about each that is passed over.

    Raises ConnectError if there is none.
    """
    folders = {settings.folder}
    if settings.certificates:
        folders.add(settings.certificates.cert.parent)

    def reason(program: Program) -> str:
        return next((why for folder in sorted(folders) if (why := unusable(program, folder))), "")

    return find(unusable=reason, notify=notify)


def free_port(host: str) -> int:
    """A free port of `host`."""
    with _bound(host, 0) as sock:
        return int(sock.getsockname()[1])


def require_free(host: str, port: int) -> None:
    """Raise ConnectError with the reason if `port` cannot be bound."""
    _bound(host, port).close()


def _bound(host: str, port: int) -> socket.socket:
    try:
        family, kind, *_, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        sock = socket.socket(family, kind)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(address)
        except OSError:
            sock.close()
            raise
    except OSError as error:
        if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
            raise ConnectError(
                f"host {host}: {error.strerror}, expected a name or address of this machine (choose with --host)",
                "no broker was started",
            ) from error
        why = "taken by another program" if error.errno == errno.EADDRINUSE else error.strerror
        raise ConnectError(
            f"port {port} on {host}: {why}, expected a free port (choose with --port)",
            "no broker was started",
        ) from error
    return sock


def _put_aside(log: Path) -> None:
    """Keep the log of the previous run."""
    if log.exists():
        with contextlib.suppress(OSError):  # reported when files are written
            os.replace(log, log.with_name(log.name + ".1"))


def _set_aside(database: Path) -> Path:
    """Rename a damaged database; the newest KEPT_DAMAGED are kept."""
    aside = database.with_name(f"{DAMAGED}{datetime.now(UTC):%Y%m%dT%H%M%S.%fZ}")
    os.replace(database, aside)
    for old in sorted(database.parent.glob(f"{DAMAGED}*"))[:-KEPT_DAMAGED]:
        old.unlink(missing_ok=True)
    return aside
