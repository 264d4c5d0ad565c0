"""Open a registry: one engine with up-to-date tables, safe to use from any thread and from several processes."""

import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import unquote, urlsplit

from sqlalchemy import (
    BigInteger,
    ColumnElement,
    Connection,
    Engine,
    Executable,
    RowMapping,
    Table,
    UpdateBase,
    cast,
    create_engine,
    event,
    func,
    inspect,
    text,
)
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, NoSuchModuleError, OperationalError
from sqlalchemy.pool import StaticPool

from edge_fl.errors import ConfigError, ConnectError, RunError
from edge_fl.untrusted import converted

FILE = "registry.sqlite"
IN_MEMORY = "sqlite://"
BUSY_MS = 10_000  # how long one process waits for another one's write
CONNECT_S = 10  # a PostgreSQL that does not answer
FAILED = {"read": "nothing was read", "write": "the operation is not acknowledged"}
LOCK = 0xEDFE  # advisory lock of PostgreSQL: servers that start at the same time create or upgrade tables one after the other
MIGRATIONS = Path(__file__).parent / "migrations"

T = TypeVar("T")
_INSERT = {"sqlite": sqlite.insert, "postgresql": postgresql.insert}


def location(where: str, home: Path) -> str:
    """`where`, or by default a file in the folder `server` next to `home`, the folder of releases."""
    return where or os.fspath(home.parent / "server" / FILE)


class Database:
    """An open registry. `reading` and `writing` give a connection for the functions of this package."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        # A database in memory has a single connection, which threads may only use one at a time.
        single = isinstance(engine.pool, StaticPool)
        self._lock: AbstractContextManager[object] = threading.RLock() if single else nullcontext()

    @classmethod
    def open(cls, where: str | Path = IN_MEMORY) -> "Database":
        """Open a path (SQLite) or a URL such as postgresql://user@host/name; create and upgrade tables.

        Raises ConfigError, and ConnectError for a PostgreSQL that cannot be reached.
        """
        engine = _engine(where)
        with (
            _opening(where, engine, "expected a registry or an empty database, that can be written"),
            engine.begin() as connection,
        ):
            _migrate(connection, where)
        return cls(engine)

    @classmethod
    def existing(cls, where: str | Path) -> "Database":
        """Open a registry that a server has created, instead of an empty one under a mistyped name. Raises like `open`."""
        if str(where) == IN_MEMORY:
            return cls.open(where)
        engine = _engine(where, create=False)
        expected = "expected the one that 'edge-fl server run' or 'server up' writes (--database)"
        with _opening(where, engine, expected):
            file = Path(unquote(urlsplit(engine.url.database or "").path))
            if engine.dialect.name == "sqlite" and not file.is_file():
                raise ConfigError(f"registry {shown(where)}: not there; {expected}")
            with engine.begin() as connection:
                if not inspect(connection).has_table("alembic_version"):
                    raise ConfigError(f"registry {shown(where)}: not a registry of edge-fl; {expected}")
                _migrate(connection, where)
        return cls(engine)

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        """A read-only connection. Raises RunError when the database fails."""
        with _reporting("read"), self._lock, self._engine.connect() as connection:
            yield connection.execution_options(only_reads=True)

    @contextmanager
    def writing(self) -> Iterator[Connection]:
        """A transaction: committed when the block ends, rolled back on an error. Raises RunError."""
        with _reporting("write"), self._lock, self._engine.begin() as connection:
            yield connection

    def upsert(
        self, connection: Connection, table: Table, rows: Sequence[Mapping[str, Any]], *keep: str
    ) -> None:
        """Insert rows; replace rows with the same key, except for the columns `keep`."""
        if not rows:
            return
        keys = {column.name for column in table.primary_key}
        insert = self._insert(table)
        changes = {name: insert.excluded[name] for name in rows[0] if name not in keys and name not in keep}
        statement = (
            insert.on_conflict_do_update(index_elements=sorted(keys), set_=changes)
            if changes
            else insert.on_conflict_do_nothing()
        )
        connection.execute(statement, [*map(dict, rows)])

    def insert_new(self, connection: Connection, table: Table, row: Mapping[str, Any]) -> bool:
        """Insert a row unless its key exists; return whether it was new."""
        insert = self._insert(table).values(dict(row)).on_conflict_do_nothing()
        return connection.execute(insert.returning(*table.primary_key)).first() is not None

    def put(self, table: Table, rows: Sequence[Mapping[str, Any]], *keep: str) -> None:
        """Like `upsert`, in a transaction of its own."""
        with self.writing() as connection:
            self.upsert(connection, table, rows, *keep)

    def change(self, statement: UpdateBase) -> int:
        """Execute an UPDATE or DELETE in a transaction of its own -> the number of rows that it changed."""
        with self.writing() as connection:
            return connection.execute(statement).rowcount

    def rows(self, query: Executable) -> Sequence[Any]:
        """The rows of a query."""
        with self.reading() as connection:
            return connection.execute(query).all()

    def pairs(self, query: Executable) -> dict[Any, Any]:
        """The rows of a query with two columns: first -> second."""
        return {row[0]: row[1] for row in self.rows(query)}

    def find(self, query: Executable, kind: type[T]) -> list[T]:
        """The rows of a query as values."""
        return [value(row._mapping, kind) for row in self.rows(query)]

    def one(self, query: Executable, kind: type[T]) -> T | None:
        """The first row of a query as a value, None without one."""
        return next(iter(self.find(query, kind)), None)

    @property
    def clock(self) -> ColumnElement[int]:
        """Seconds since 1970 by the database's clock."""
        sqlite = self._engine.dialect.name == "sqlite"
        return cast(
            func.strftime("%s", "now") if sqlite else func.floor(func.extract("epoch", func.now())),
            BigInteger,
        )

    def close(self) -> None:
        self._engine.dispose()

    def _insert(self, table: Table) -> Any:
        # INSERT with conflict clauses differs by dialect.
        return _INSERT[self._engine.dialect.name](table)


def value(row: RowMapping, kind: type[T]) -> T:
    """A row as a value; columns that are none of its fields are left out."""
    return converted({str(name): content for name, content in row.items()}, kind)


def now() -> str:
    """UTC to the millisecond; displayed, never compared."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def _engine(where: str | Path, *, create: bool = True) -> Engine:
    text = str(where)
    if "://" not in text:
        try:
            if create:
                Path(text).parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"registry {text}: {error.strerror}; expected a folder to write to") from error
        text = f"sqlite:///{text}"
    try:
        url = make_url(text)
        if url.drivername in ("postgresql", "postgres"):
            url = url.set(drivername="postgresql+psycopg")
        if url.get_backend_name() not in _INSERT:
            raise ConfigError(f"registry {shown(where)}: expected a path, sqlite:// or postgresql://")
        if (
            url.get_backend_name() == "sqlite" and not create
        ):  # also no new file where the old one disappears later
            file = Path(url.database or "").absolute().as_uri()
            url = url.set(database=file, query={"mode": "rw", "uri": "true"})
        in_memory = text == IN_MEMORY
        if url.get_backend_name() == "postgresql" and "connect_timeout" not in url.query:
            url = url.update_query_dict({"connect_timeout": str(CONNECT_S)})
        engine = (
            create_engine(url, poolclass=StaticPool, connect_args={"check_same_thread": False})
            if in_memory
            else create_engine(url, pool_pre_ping=url.get_backend_name() == "postgresql")
        )
    except (ArgumentError, NoSuchModuleError) as error:
        raise ConfigError(f"registry {shown(where)}: {error}") from error
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"registry {shown(where)}: PostgreSQL needs 'pip install edge-fl[postgres]'"
        ) from error
    if engine.dialect.name == "sqlite":
        event.listen(engine, "connect", _tune)
        event.listen(engine, "begin", _begin)
    return engine


@contextmanager
def _opening(where: str | Path, engine: Engine, expected: str) -> Iterator[None]:
    """Close the engine if the block fails. ConnectError for a database server that is not there or does not let us in, else ConfigError."""
    try:
        yield
    except (DBAPIError, ConfigError) as error:
        engine.dispose()
        if isinstance(error, ConfigError):
            raise
        message = f"registry {shown(where)}: {_reason(error)}"
        sqlstate = getattr(error.orig, "sqlstate", None) or ""
        unreachable = isinstance(error, OperationalError) and sqlstate[:2] in ("", "08", "28", "3D", "57")
        if "://" in str(where) and unreachable:
            raise ConnectError(
                f"{message}; expected a PostgreSQL that runs there, with this database, and lets this user in",
                consequence="nothing was changed",
            ) from error
        raise ConfigError(f"{message}; {expected}") from error


def _tune(connection: Any, _: object) -> None:
    """Allow readers during a write; a crash of the process loses no committed data."""
    connection.isolation_level = None  # `_begin` starts transactions, not the driver
    for pragma in ("journal_mode=WAL", "synchronous=NORMAL", f"busy_timeout={BUSY_MS}", "foreign_keys=ON"):
        connection.execute(f"PRAGMA {pragma}")


def _begin(connection: Connection) -> None:
    """Take the write lock at the start: SQLite fails at once, without waiting, when a read transaction becomes a write."""
    reads = connection.get_execution_options().get("only_reads")
    connection.exec_driver_sql("BEGIN" if reads else "BEGIN IMMEDIATE")


def _migrate(connection: Connection, where: str | Path) -> None:
    """Apply the migrations that a database lacks: to a new one all. Raises ConfigError for one with other tables than these."""
    from alembic import command  # imported late: it is slow to import
    from alembic.config import Config
    from alembic.migration import MigrationContext
    from alembic.script import ScriptDirectory

    config = Config()
    config.set_main_option("script_location", os.fspath(MIGRATIONS))
    config.attributes["connection"] = connection
    if connection.dialect.name == "postgresql":
        connection.execute(text(f"SELECT pg_advisory_xact_lock({LOCK})"))
    version = MigrationContext.configure(connection).get_current_revision()
    known = [script.revision for script in ScriptDirectory.from_config(config).walk_revisions()]
    if version not in (None, *known):
        raise ConfigError(
            f"registry {shown(where)}: tables of version {version!r}, expected {known[0]!r}: a development version before the first"
            " release wrote it, or a newer edge-fl",
            "nothing was changed; open it with the edge-fl that wrote it, or give a new --database and 'edge-fl server up --adopt'",
        )
    command.upgrade(config, "head")


def shown(where: str | Path) -> str:
    """The location without a password."""
    try:
        return make_url(str(where)).render_as_string() if "://" in str(where) else str(where)
    except ArgumentError:
        return "URL"


def _reason(error: DBAPIError) -> str:
    return str(error.orig).strip().splitlines()[0] if error.orig else str(error)


@contextmanager
def _reporting(action: str) -> Iterator[None]:
    try:
        yield
    except DBAPIError as error:
        raise RunError(f"registry: {action} failed ({_reason(error)})", consequence=FAILED[action]) from error
