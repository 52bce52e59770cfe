"""The store: ClickHouse, served over HTTP or embedded through chDB, behind one client.

StoreError              the store cannot be reached, or does not hold what was asked for; names table or query and the mend
  `-- QueryError        the SQL or its parameters are wrong

Inserts are effectively once: a table goes out as one block under one token, so it lands whole or not at all, and a repeat under the same
token is dropped by the server. That holds as long as the same token always means the same rows: a token with other rows loses them.
"""

from __future__ import annotations

import os
import re
import time
import uuid
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import clickhouse_connect
import pyarrow as pa
import zstandard
from clickhouse_connect.driver.client import Client
from clickhouse_connect.driver.exceptions import ClickHouseError, Error, OperationalError

import sql
from ingest.address import Address, parse_url
from ingest.columns import bind, fit, identify
from ingest.errors import KvtideError

CHUNK_BYTES = 1 << 20
INSERT_ATTEMPTS = 6
FIRST_WAIT_S = 0.2
# Server codes after which the same insert under the same token may be tried again: timeouts, network, too many parts or queries,
# memory, read-only replica, unknown status of an insert, Keeper and object storage trouble.
TRANSIENT = frozenset({32, 159, 202, 203, 209, 210, 225, 236, 241, 242, 252, 279, 319, 499, 999})
UNKNOWN_TABLE, UNKNOWN_DATABASE, READONLY, AUTHENTICATION = 60, 81, 164, frozenset({192, 193, 194, 497, 516})
SELECTING = frozenset({"SELECT", "WITH", "("})
READING = SELECTING | {"SHOW", "DESCRIBE", "DESC", "EXPLAIN", "EXISTS", "CHECK"}


class StoreError(KvtideError):
    """The store cannot be reached, is not migrated, or refuses what was asked."""


class QueryError(StoreError):
    """An SQL text or its parameters are wrong."""


@dataclass(frozen=True, slots=True)
class Result:
    """Rows of a query with their column names and ClickHouse types; values are Python ones (u64 exact, times aware in UTC)."""

    columns: list[str]
    types: list[str]
    rows: list[tuple[Any, ...]]


class Store:
    """One connection to one database. Not for use by several threads at once; open one each.

    `sleep` is called between attempts of an insert.
    """

    def __init__(self, client: Client, address: Address, sleep: Callable[[float], None] = time.sleep) -> None:
        self.address = address
        self._client = client
        self._sleep = sleep
        self._columns: dict[str, dict[str, tuple[str, bool]]] = {}
        self._duplicates = 0

    @classmethod
    def open(cls, url: str, *, create: bool = False, readonly: bool = False, sleep: Callable[[float], None] = time.sleep) -> Store:
        """Connect to `chdb://FOLDER[?database=NAME]` or `http(s)://user:pw@host:port/NAME`.

        An embedded folder and its database are made when absent; a served database only with `create`. `readonly` lets the server refuse
        everything but reading. Raises `StoreError` when the store cannot be reached, is open in another process, or is the second
        folder opened in this process (an embedded engine has one folder per process).
        """
        address = parse_url(url)
        settings: dict[str, Any] = {"session_timezone": "UTC"}
        if create or address.path is not None:
            admin = _connect(address, "default", settings)
            try:
                admin.command(f"CREATE DATABASE IF NOT EXISTS `{address.database}`")
            except ClickHouseError as error:
                _raise(error, f"database {address.database}", address)
            finally:
                admin.close()
        if readonly:
            settings["readonly"] = 2
        return cls(_connect(address, address.database, settings), address, sleep)

    @property
    def version(self) -> str:
        """ClickHouse's own version."""
        return str(self._client.server_version)

    def close(self) -> None:
        self._client.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # -- reading ---------------------------------------------------------------------------------------------------------------

    def query(self, text: str, /, **params: object) -> pa.Table:
        """Arrow table of a SELECT whose `{name:Type}` placeholders are `params`; `DateTime` columns are `timestamp[s, UTC]`.

        Raises `QueryError` for wrong SQL or parameters or a missing table. Cost: the query plus a zero-copy read.
        """
        bound = _bind(text, params)
        try:
            table = self._client.query_arrow(text, parameters=bound)
            if any(field.type == pa.uint32() for field in table.schema):
                table = self._restore_times(table, text, bound)
        except ClickHouseError as error:
            _raise(error, sql.label(text), self.address)
        return table

    def fetch(self, text: str, /, **params: object) -> Result:
        """Rows of any statement with names and types, as `query` binds and fails; for people, not for bulk. A statement that reads
        nothing gives no columns."""
        bound = _bind(text, params)
        word = next(iter(re.findall(r"\w+|\(", sql.body(text))), "").upper()
        try:
            if word not in READING:
                self._client.command(text, parameters=bound)
                return Result([], [], [])
            result = self._client.query(text, parameters=bound)
            names, types = list(result.column_names), [kind.name for kind in result.column_types]
            if not names and word in SELECTING:  # the embedded engine names no columns where there are no rows
                names, types = self._described(text, bound)
        except ClickHouseError as error:
            _raise(error, sql.label(text), self.address)
        return Result(names, types, [tuple(row) for row in result.result_rows])

    def rows(self, text: str, /, **params: object) -> list[dict[str, Any]]:
        """Rows of a SELECT as dicts of Python values; `Map` columns are dicts."""
        result = self.fetch(text, **params)
        return [dict(zip(result.columns, row, strict=True)) for row in result.rows]

    def named(self, name: str, /, **params: object) -> pa.Table:
        """Arrow table of `sql/queries/<name>.sql`; parameters not given take the defaults of its header.

        Raises `QueryError` for an unknown name or parameter, or a missing one.
        """
        try:
            query, full = sql.complete(name, params)
        except ValueError as error:
            raise QueryError(str(error)) from error
        return self.query(query.text, **full)

    def command(self, text: str) -> None:
        """Run one statement that returns nothing."""
        try:
            self._client.command(text)
        except ClickHouseError as error:
            _raise(error, sql.label(text), self.address)
        self._columns.clear()

    def _restore_times(self, table: pa.Table, text: str, bound: dict[str, Any] | None) -> pa.Table:
        # ClickHouse writes DateTime to Arrow as bare uint32 seconds; only the query's own types tell them from counts.
        for index, kind in enumerate(self._described(text, bound)[1]):
            if kind.removeprefix("Nullable(").startswith("DateTime") and table.schema.field(index).type == pa.uint32():
                seconds = table.column(index).cast(pa.int64()).cast(pa.timestamp("s", "UTC"))
                table = table.set_column(index, table.schema.field(index).name, seconds)
        return table

    def _described(self, text: str, bound: dict[str, Any] | None) -> tuple[list[str], list[str]]:
        """Names and types of a SELECT's columns, without running it."""
        described = self._client.query(f"DESCRIBE (\n{text.strip().rstrip(';')}\n)", parameters=bound).result_rows
        return [row[0] for row in described], [row[1] for row in described]

    # -- writing ---------------------------------------------------------------------------------------------------------------

    def insert(self, table: str, data: pa.Table, token: str | None = None) -> None:
        """Insert all rows of `data` as one block: they land together, once per `token` (None: once per call).

        Columns may be in any order and are cast without loss to the table's types; integers for a time are in the column's own unit
        (s for DateTime, us for DateTime64(6)). Columns with a default may be left out. Transient failures are retried with the same token.
        Raises `StoreError` that names table and column for a missing, unknown or unfit column, or when all attempts failed.
        Cost: about 5 ms and the bytes.
        """
        if data.num_rows == 0:
            return
        block = self._fit(table, data)
        token = token or str(uuid.uuid4())
        self._send(table, block, token)
        repeat = 0
        while self._saw_duplicate() and not self._holds(table, block):
            repeat += 1
            self._send(table, block, f"{token}#{repeat}")

    def _send(self, table: str, block: pa.Table, token: str) -> None:
        settings = {
            "insert_deduplication_token": token,
            "insert_deduplicate": 1,
            "async_insert": 0,
            "deduplicate_blocks_in_dependent_materialized_views": 1,
        }
        for attempt in range(INSERT_ATTEMPTS):
            try:
                self._client.insert_arrow(table, block, settings=settings)
                return
            except ClickHouseError as error:
                if attempt + 1 == INSERT_ATTEMPTS or not _is_transient(error):
                    _raise(error, f"insert into {table}", self.address)
            self._sleep(FIRST_WAIT_S * 2**attempt)

    def _saw_duplicate(self) -> bool:
        """Whether an embedded engine has dropped a block as a duplicate since the last call.

        ClickHouse writes a token to its log before it moves the part into place. An embedded engine dies with the worker, so a kill
        between the two leaves a token without rows, and the repeat that should mend it would be dropped. (No table here feeds a
        materialised view, whose rows such a mending could double.)
        """
        if self.address.path is None:
            return False
        before = self._duplicates
        # Past `rows`, which would first ask for the result's types: this follows every insert.
        found = self._client.query("SELECT value FROM system.events WHERE event = 'DuplicatedInsertedBlocks'").result_rows
        self._duplicates = int(found[0][0]) if found else 0
        return self._duplicates > before

    def _holds(self, table: str, block: pa.Table) -> bool:
        """Whether the table has the first row of a block, and so, a block being atomic, all of it."""
        condition, params = identify(block, {name: kind for name, (kind, _) in self._columns_of(table).items()})
        return bool(self.rows(f"SELECT 1 FROM {table} WHERE {condition} LIMIT 1", **params))

    def _fit(self, table: str, data: pa.Table) -> pa.Table:
        columns = self._columns_of(table)
        unknown = [name for name in data.column_names if name not in columns]
        missing = [name for name, (_, default) in columns.items() if name not in data.column_names and not default]
        if unknown or missing:
            what = f"has no column {', '.join(unknown)}" if unknown else f"needs column {', '.join(missing)}"
            raise StoreError(f"table {table} {what}; its columns: {', '.join(columns)}")
        fitted = {}
        for name in (name for name in columns if name in data.column_names):
            try:
                fitted[name] = fit(data.column(name), columns[name][0])
            except ValueError as error:
                raise StoreError(f"table {table}, column {name}: {error}") from error
        return pa.table(fitted).combine_chunks()

    def _columns_of(self, table: str) -> dict[str, tuple[str, bool]]:
        """ClickHouse type of each column, in order, and whether it has a default."""
        if table not in self._columns:
            described = self.rows(
                "SELECT name, type, default_kind FROM system.columns WHERE database = currentDatabase() AND table = {t:String} "
                "ORDER BY position",
                t=table,
            )
            if not described:
                raise StoreError(f"table {table} is not in {self.address.shown}; run `kvtide migrate`")
            self._columns[table] = {row["name"]: (row["type"], bool(row["default_kind"])) for row in described}
        return self._columns[table]

    # -- schema ----------------------------------------------------------------------------------------------------------------

    def pending(self) -> list[str]:
        """Names of the migrations that this database has not run, in order.

        Raises `StoreError` when a migration was edited after this database ran it, or when the database is newer than this program.
        """
        return [f"{m.number:04d}_{m.name}" for m in self._pending()]

    def migrate(self) -> list[str]:
        """Run the pending migrations and return their names. A run that died half-way is completed by the next one."""
        applied = []
        for migration in self._pending():
            for statement in migration.statements:
                self.command(statement)
            row = {"number": [migration.number], "name": [migration.name], "sha256": [migration.sha256]}
            self.insert("schema_migrations", pa.table(row), f"schema_migrations:{migration.number}")
            applied.append(f"{migration.number:04d}_{migration.name}")
        return applied

    def applied(self) -> list[dict[str, Any]]:
        """Migrations that this database has run: number, name, sha256, applied_at."""
        if not self.rows("SELECT 1 FROM system.tables WHERE database = currentDatabase() AND name = 'schema_migrations'"):
            return []
        return self.rows("SELECT number, name, sha256, applied_at FROM schema_migrations ORDER BY number, applied_at LIMIT 1 BY number")

    def _pending(self) -> list[sql.Migration]:
        try:
            return sql.pending({row["number"]: (row["name"], row["sha256"]) for row in self.applied()})
        except ValueError as error:
            raise StoreError(f"store {self.address.shown}: {error}") from error

    # -- shard checkpoints -----------------------------------------------------------------------------------------------------

    def save_checkpoint(self, topic: str, partition: int, next_offset: int, state: bytes) -> None:
        """Keep the state of a shard as of `next_offset` (all records below it applied). Atomic; compressed here. Cost: O(bytes)."""
        packed = zstandard.ZstdCompressor(level=3).compress(state)
        chunks = [packed[start : start + CHUNK_BYTES] for start in range(0, len(packed), CHUNK_BYTES)]
        n = len(chunks)
        data = pa.table(
            {
                "topic": [topic] * n,
                "partition": pa.array([partition] * n, pa.uint16()),
                "next_offset": pa.array([next_offset] * n, pa.uint64()),
                "chunk": pa.array(range(n), pa.uint32()),
                "chunks": pa.array([n] * n, pa.uint32()),
                "state": pa.array(chunks, pa.binary()),
            }
        )
        # The content stands in the token: a newer program may write another state for the same offset, and that one must land.
        self.insert("shard_state", data, f"shard_state:{topic}:{partition}:{next_offset}:{zlib.crc32(packed):08x}")

    def load_checkpoint(self, topic: str, partition: int) -> tuple[int, bytes] | None:
        """`(next_offset, state)` of the newest checkpoint whose chunks are all there; None when there is none."""
        newest = self.rows(
            "SELECT next_offset, written_at, chunks FROM shard_state WHERE topic = {topic:String} AND partition = {partition:UInt16} "
            "GROUP BY next_offset, written_at, chunks HAVING uniqExact(chunk) = chunks ORDER BY next_offset DESC, written_at DESC LIMIT 1",
            topic=topic,
            partition=partition,
        )
        if not newest:
            return None
        table = self.query(
            "SELECT chunk, state FROM shard_state WHERE topic = {topic:String} AND partition = {partition:UInt16} "
            "AND next_offset = {next_offset:UInt64} AND written_at = {written_at:DateTime64(6, 'UTC')} ORDER BY chunk LIMIT 1 BY chunk",
            topic=topic,
            partition=partition,
            next_offset=newest[0]["next_offset"],
            written_at=newest[0]["written_at"],
        )
        packed = b"".join(table.column("state").cast(pa.binary()).to_pylist())
        return newest[0]["next_offset"], zstandard.ZstdDecompressor().decompress(packed)


def _connect(address: Address, database: str, settings: dict[str, Any]) -> Client:
    """A client of either backend. Raises `StoreError` with what to do about it."""
    try:
        if address.path is not None:
            return _connect_embedded(address.path, database, settings)
        return clickhouse_connect.get_client(
            host=address.host,
            port=address.port,
            username=address.user,
            password=address.password,
            interface="https" if address.secure else "http",
            database=database,
            settings=settings,
            tz_mode="aware",
            autogenerate_session_id=False,
        )
    except ClickHouseError as error:
        _raise(error, f"store {address.shown}", address)


def _connect_embedded(path: str, database: str, settings: dict[str, Any]) -> Client:
    try:
        os.makedirs(path, exist_ok=True)
        if not os.access(path, os.W_OK):
            raise StoreError(f"store folder {path} cannot be written; choose another in KVTIDE_STORE")
        return clickhouse_connect.get_client(interface="chdb", path=path, database=database, settings=settings, tz_mode="aware")
    except ImportError as error:
        raise StoreError("an embedded store needs chdb; run `pip install 'kvtide[embedded]'`, or set KVTIDE_STORE to a server") from error
    except OSError as error:
        raise StoreError(f"store folder {path} cannot be made: {error.strerror}; choose another in KVTIDE_STORE") from error
    except ClickHouseError as error:
        text = str(error)
        if "different path" in text:
            opened = re.search(r"with path '([^']*)'", text)
            other = opened[1] if opened else "another folder"
            mend = "an engine has one folder per process; use ?database=NAME in that one"
            raise StoreError(f"store folder {path} cannot be opened beside {other}: {mend}") from error
        if "Error initializing" in text:
            holder = _holder(path)
            why = f"is open in another process (pid {holder})" if holder else "does not open; another process may have it"
            raise StoreError(f"store folder {path} {why}; stop that one, or use a served store (http://...)") from error
        raise


def _holder(path: str) -> str:
    """Id of the process that holds an embedded store, where the engine's status file says so."""
    try:
        with open(os.path.join(path, "status"), encoding="utf-8") as status:
            match = re.match(r"PID: (\d+)", status.read(64))
    except OSError:
        return ""
    return match[1] if match else ""


def _is_transient(error: ClickHouseError) -> bool:
    code = error.code if isinstance(error, Error) else None
    return code in TRANSIENT if code else isinstance(error, OperationalError)


def _raise(error: ClickHouseError, what: str, address: Address) -> NoReturn:
    """Turn a client error into one line that says what failed and what to do."""
    code = error.code if isinstance(error, Error) else None
    line = _server_line(str(error))
    if code in (UNKNOWN_TABLE, UNKNOWN_DATABASE):
        kind = QueryError if code == UNKNOWN_TABLE else StoreError
        raise kind(f"{what}: {line}; run `kvtide migrate` if {address.shown} is new or old") from error
    if code in AUTHENTICATION:
        raise StoreError(f"{what}: {line}; check user and password in KVTIDE_STORE") from error
    if code == READONLY:
        raise QueryError(f"{what}: {line}; this connection may only read") from error
    if code is None:
        raise StoreError(f"{what}: {line}; is ClickHouse running at {address.shown}? `kvtide doctor` checks it") from error
    if code in TRANSIENT:
        raise StoreError(f"{what}: {line}; the server is overloaded or unwell, try again later") from error
    raise QueryError(f"{what}: {line}") from error


def _server_line(text: str) -> str:
    """First line of the server's own words in a client's message, without its version."""
    words = re.split(r"DB::Exception:\s*", text)[-1].strip() or text.strip() or "unknown error"
    return re.sub(r"\s*\((?:version|for url) .*$", "", words.splitlines()[0])


def _bind(text: str, params: Mapping[str, object]) -> dict[str, Any] | None:
    try:
        return bind(sql.parameters(text), params) or None
    except ValueError as error:
        raise QueryError(f"{sql.label(text)}: {error}") from error
