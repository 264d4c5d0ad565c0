"""Opening a registry: one engine, upgraded to the newest tables, safe to use from any thread and from several processes."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from sqlalchemy import Connection, Engine, Select, Table, create_engine, event
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, NoSuchModuleError
from sqlalchemy.pool import StaticPool

from edge_fl.errors import ConfigError, RunError
from server.registry.tables import metadata

FILE = "registry.sqlite"
IN_MEMORY = "sqlite://"
BUSY_MS = 10_000  # how long one process waits for another one's write
MIGRATIONS = Path(__file__).parent / "migrations"

T = TypeVar("T")
_INSERT = {"sqlite": sqlite.insert, "postgresql": postgresql.insert}


def place(where: str, home: Path) -> str:
    """Where the registry is: as said, or a file in the folder `server` beside the `home` of releases."""
    return where or str(home.parent / "server" / FILE)


class Database:
    """One open registry. `reading` and `writing` give a connection for the functions of this package."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        # A database in memory is one connection, which threads must take in turns.
        alone = isinstance(engine.pool, StaticPool)
        self._turn: AbstractContextManager[object] = threading.RLock() if alone else nullcontext()

    @classmethod
    def open(cls, where: str | Path = IN_MEMORY) -> Database:
        """A path (SQLite), or a URL such as postgresql://user@host/name; made and upgraded where needed. Raises ConfigError."""
        engine = _engine(where)
        try:
            with engine.begin() as connection:
                if str(where) == IN_MEMORY:
                    metadata.create_all(connection)
                else:
                    _upgrade(connection)
        except DBAPIError as error:
            engine.dispose()
            raise ConfigError(
                f"registry {_shown(where)}: {_reason(error)}; expected a database that can be written"
            ) from error
        return cls(engine)

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        """A connection to read through. Raises RunError when the database does not answer."""
        with _reporting("read"), self._turn, self._engine.connect() as connection:
            yield connection.execution_options(only_reads=True)

    @contextmanager
    def writing(self) -> Iterator[Connection]:
        """A connection whose changes all stand when the block ends, or none of them. Raises RunError."""
        with _reporting("written"), self._turn, self._engine.begin() as connection:
            yield connection

    def put(
        self, connection: Connection, table: Table, rows: Sequence[Mapping[str, Any]], *keep: str
    ) -> None:
        """Inserts rows; one whose key is there already replaces that row, but for the columns `keep`."""
        if not rows:
            return
        keys = {column.name for column in table.primary_key}
        insert = self._insert(table)
        changes = {name: insert.excluded[name] for name in rows[0] if name not in keys and name not in keep}
        connection.execute(
            insert.on_conflict_do_update(index_elements=sorted(keys), set_=changes), [*map(dict, rows)]
        )

    def add(self, connection: Connection, table: Table, row: Mapping[str, Any]) -> bool:
        """Inserts a row unless its key is there already; whether it was new."""
        insert = self._insert(table).values(dict(row)).on_conflict_do_nothing()
        return connection.execute(insert.returning(*table.primary_key)).first() is not None

    def find(self, wanted: Select[Any], kind: type[T]) -> list[T]:
        """The rows of a query as values."""
        with self.reading() as connection:
            rows = connection.execute(wanted).mappings()
            return [msgspec.convert({str(name): value for name, value in row.items()}, kind) for row in rows]

    def close(self) -> None:
        """Lets go of every connection."""
        self._engine.dispose()

    def _insert(self, table: Table) -> Any:
        """Each dialect has an INSERT of its own, which knows what to do about conflicts."""
        return _INSERT[self._engine.dialect.name](table)


def now() -> str:
    """UTC to the millisecond, for people."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def _engine(where: str | Path) -> Engine:
    text = str(where)
    if "://" not in text:
        try:
            Path(text).parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"registry {text}: {error.strerror}; expected a folder to write to") from error
        text = f"sqlite:///{text}"
    try:
        url = make_url(text)
        if url.drivername in ("postgresql", "postgres"):
            url = url.set(drivername="postgresql+psycopg")
        if url.get_backend_name() not in _INSERT:
            raise ConfigError(f"registry {_shown(where)}: expected a path, sqlite:// or postgresql://")
        alone = text == IN_MEMORY
        engine = (
            create_engine(url, poolclass=StaticPool, connect_args={"check_same_thread": False})
            if alone
            else create_engine(url, pool_pre_ping=url.get_backend_name() == "postgresql")
        )
    except (ArgumentError, NoSuchModuleError) as error:
        raise ConfigError(f"registry {_shown(where)}: {error}") from error
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"registry {_shown(where)}: PostgreSQL needs 'pip install edge-fl[postgres]'"
        ) from error
    if engine.dialect.name == "sqlite":
        event.listen(engine, "connect", _tune)
        event.listen(engine, "begin", _begin)
    return engine


def _tune(connection: Any, _: object) -> None:
    """Readers and one writer at a time do not disturb each other; a crash of a process loses nothing."""
    connection.isolation_level = None  # transactions begin where `_begin` says, not where the driver guesses
    for pragma in ("journal_mode=WAL", "synchronous=NORMAL", f"busy_timeout={BUSY_MS}", "foreign_keys=ON"):
        connection.execute(f"PRAGMA {pragma}")


def _begin(connection: Connection) -> None:
    """Who is going to write takes the lock first: a reader that turns writer would be refused instead of waiting."""
    reads = connection.get_execution_options().get("only_reads")
    connection.exec_driver_sql("BEGIN" if reads else "BEGIN IMMEDIATE")


def _upgrade(connection: Connection) -> None:
    from alembic import command  # here, because half of its price is paid by whoever only imports it
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS))
    config.attributes["connection"] = connection
    command.upgrade(config, "head")


def _shown(where: str | Path) -> str:
    """Without a password."""
    try:
        return make_url(str(where)).render_as_string() if "://" in str(where) else str(where)
    except ArgumentError:
        return "URL"


def _reason(error: DBAPIError) -> str:
    return str(error.orig).strip().splitlines()[0] if error.orig else str(error)


@contextmanager
def _reporting(done: str) -> Iterator[None]:
    try:
        yield
    except DBAPIError as error:
        raise RunError(
            f"registry: cannot be {done} ({_reason(error)}); what was under way is not acknowledged"
        ) from error
