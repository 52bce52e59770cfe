"""The store: exact values, inserts that land once, schema history, shard checkpoints, and errors that say what to do."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from clickhouse_connect.driver.exceptions import DatabaseError, OperationalError
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import sql
from ingest.address import Address, parse_url
from ingest.errors import KvtideError, UsageError
from ingest.store import CHUNK_BYTES, INSERT_ATTEMPTS, QueryError, Store, StoreError

U64 = st.integers(0, 2**64 - 1)
BORDERS = [0, 1, 2**31, 2**53 + 1, 2**63 - 1, 2**63, 2**64 - 1]


@pytest.fixture
def table(store: Store) -> Store:
    """A store with a small table `t`, deduplicating, and a materialised view of it into `agg`."""
    end = "ENGINE = MergeTree ORDER BY k SETTINGS non_replicated_deduplication_window = 1000"
    store.command(
        f"CREATE TABLE t (k UInt64, name LowCardinality(String), at DateTime('UTC'), note Nullable(String), n Int8 DEFAULT 7) {end}"
    )
    store.command(f"CREATE TABLE agg (k UInt64, n UInt64) {end}")
    store.command("CREATE MATERIALIZED VIEW mv TO agg AS SELECT k, count() AS n FROM t GROUP BY k")
    return store


def rows_of(*keys: int) -> pa.Table:
    return pa.table({"k": pa.array(keys, pa.uint64()), "name": ["x"] * len(keys), "at": [0] * len(keys), "note": [None] * len(keys)})


def count(store: Store, table: str = "t") -> int:
    return int(store.rows(f"SELECT count() AS n FROM {table}")[0]["n"])


# -- addresses ---------------------------------------------------------------------------------------------------------------------


def test_urls() -> None:
    assert parse_url("chdb://.kvtide/store") == Address("chdb://.kvtide/store", "kvtide", path=".kvtide/store")
    assert parse_url("chdb:///a/b?database=x").path == "/a/b" and parse_url("chdb:///a/b?database=x").database == "x"
    served = parse_url("https://me:p%40ss:w@ch.example/db1")
    assert (served.host, served.port, served.user, served.password, served.secure) == ("ch.example", 8443, "me", "p@ss:w", True)
    assert served.shown == "https://me@ch.example:8443/db1"
    assert (parse_url("http://h").port, parse_url("http://h").database, parse_url("http://h:1/x").port) == (8123, "kvtide", 1)


@pytest.mark.parametrize(
    "url", ["", "chdb://", "chdb:///a?database=a;b", "http://", "mysql://u:secret@h/d", "http://u:secret@h/a-b", "folder"]
)
def test_bad_urls_say_the_forms_and_hide_the_password(url: str) -> None:
    with pytest.raises(UsageError, match="chdb://FOLDER") as caught:
        parse_url(url)
    assert "secret" not in str(caught.value)


def test_a_second_folder_in_a_process_is_refused(store_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="one folder per process"):
        Store.open(f"chdb://{tmp_path}/other")


def test_a_folder_open_in_another_process_is_refused(store_folder: Path) -> None:
    code = f"from ingest.store import Store; Store.open('chdb://{store_folder}')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert f"is open in another process (pid {os.getpid()})" in done.stderr.splitlines()[-1]


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="cannot be made"):
        Store.open(f"chdb://{tmp_path}/file/store")


def test_a_server_that_is_not_there() -> None:
    with pytest.raises(StoreError, match="is ClickHouse running at http://default@127.0.0.1:9/kvtide"):
        Store.open("http://127.0.0.1:9/kvtide")


def test_relative_folder_is_the_same_folder(store_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(store_folder.parent)
    with Store.open(f"chdb://{store_folder.name}") as store:
        assert store.rows("SELECT 1 AS one") == [{"one": 1}]


# -- values ------------------------------------------------------------------------------------------------------------------------


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(values=st.lists(st.one_of(U64, st.sampled_from(BORDERS)), min_size=1, max_size=20), text=st.text(max_size=8))
def test_u64_and_text_survive_exactly(store: Store, values: list[int], text: str) -> None:
    store.command("CREATE OR REPLACE TABLE u (v UInt64, a Array(UInt64), m Map(String, UInt64), s String) ENGINE = Memory")
    causes = pa.array([[(text, value)] for value in values], pa.map_(pa.string(), pa.uint64()))
    chain = pa.array([values] * len(values), pa.list_(pa.uint64()))
    store.insert("u", pa.table({"v": pa.array(values, pa.uint64()), "a": chain, "m": causes, "s": [text] * len(values)}))
    for found in (store.rows("SELECT v, a, s, m[s] AS w FROM u"), store.query("SELECT v, a, s, m[s] AS w FROM u").to_pylist()):
        assert sorted(row["v"] for row in found) == sorted(row["w"] for row in found) == sorted(values)
        assert all(row["a"] == values and row["s"] == text for row in found)
    assert len(store.rows("SELECT v FROM u WHERE v = {v:UInt64} AND s = {s:String}", v=values[0], s=text)) == values.count(values[0])


def test_columns_are_reordered_and_cast(table: Store) -> None:
    moment = datetime(2023, 11, 14, 22, 13, 20, tzinfo=UTC)
    data = {
        "note": pa.array([None, "x"]),
        "at": [moment, moment],
        "name": pa.array(["a", "b"]).dictionary_encode(),
        "k": pa.array([1, 2], pa.int16()),
    }
    table.insert("t", pa.table(data))
    assert table.rows("SELECT * FROM t ORDER BY k") == [
        {"k": 1, "name": "a", "at": moment, "note": None, "n": 7},
        {"k": 2, "name": "b", "at": moment, "note": "x", "n": 7},
    ]
    read = table.query("SELECT at, toUInt32(k) AS n FROM t ORDER BY k")
    assert read.column("at").to_pylist() == [moment, moment] and read.column("n").to_pylist() == [1, 2]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"extra": [1]}, "table t has no column extra; its columns: k, name, at, note, n"),
        ({"name": None}, "table t needs column name"),
        ({"k": pa.array([-1])}, "table t, column k: int64 does not fit UInt64"),
        ({"k": pa.array([1.5])}, "table t, column k: double does not fit UInt64"),
        ({"k": pa.array([None], pa.uint64())}, "table t, column k: 1 nulls, but UInt64 has none"),
        ({"n": [128]}, "table t, column n: int64 does not fit Int8"),
        ({"at": [datetime(2023, 1, 1, 0, 0, 0, 1)]}, "table t, column at: .* would lose data"),
        ({"at": ["soon"]}, "table t, column at: string does not fit DateTime"),
    ],
)
def test_data_that_does_not_fit_is_refused_whole(table: Store, change: dict[str, Any], message: str) -> None:
    columns = {**{name: rows_of(1).column(name) for name in rows_of(1).column_names}, **change}
    with pytest.raises(StoreError, match=message):
        table.insert("t", pa.table({name: column for name, column in columns.items() if column is not None}))
    assert count(table) == 0


def test_times_bind_in_utc(store: Store) -> None:
    text = "SELECT {t:DateTime64(6, 'UTC')} AS t"
    moment = datetime(2023, 11, 14, 22, 13, 20, 5, tzinfo=UTC)
    for given_ in (
        moment,
        moment.astimezone(timezone(timedelta(hours=5))),
        "2023-11-14T22:13:20.000005Z",
        "2023-11-15 00:13:20.000005+02:00",
    ):
        assert store.rows(text, t=given_) == [{"t": moment}]
    assert store.rows("SELECT {t:DateTime('UTC')} AS t", t="2023-11-14") == [{"t": datetime(2023, 11, 14, tzinfo=UTC)}]
    with pytest.raises(QueryError, match="t='noon' is not a time"):
        store.rows(text, t="noon")


def test_an_empty_result_has_its_columns_and_types(table: Store) -> None:
    result = table.fetch("-- why\nSELECT k, at FROM t;")
    assert (result.columns, result.types, result.rows) == (["k", "at"], ["UInt64", "DateTime('UTC')"], [])
    assert table.query("SELECT k, at FROM t").schema.names == ["k", "at"]


# -- inserts land once -------------------------------------------------------------------------------------------------------------


def test_the_same_token_lands_once_in_table_and_view(table: Store) -> None:
    for _ in range(3):
        table.insert("t", rows_of(1, 2, 3), "a")
    table.insert("t", rows_of(1, 2, 3), "b")
    assert count(table) == 6
    assert table.rows("SELECT sum(n) AS n FROM agg") == [{"n": 6}]


def test_equal_rows_without_a_token_are_all_kept(table: Store) -> None:
    table.insert("t", rows_of(1))
    table.insert("t", rows_of(1))
    assert count(table) == 2


def test_no_rows_are_no_insert(table: Store) -> None:
    table.insert("t", rows_of(), "a")
    table.insert("t", rows_of(1), "a")
    assert count(table) == 1


def test_a_large_insert_is_one_block(store: Store) -> None:
    n = 1_200_000
    store.command("CREATE TABLE big (k UInt64) ENGINE = MergeTree ORDER BY k SETTINGS non_replicated_deduplication_window = 10")
    data = pa.table({"k": pa.chunked_array([np.arange(n // 4, dtype=np.uint64)] * 4)})
    for _ in range(2):
        store.insert("big", data, "one")
    assert store.rows("SELECT count() AS n, uniqExact(_part) AS parts FROM big") == [{"n": n, "parts": 1}]


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(tries=st.lists(st.tuples(st.integers(0, 9), st.integers(1, 3)), max_size=15))
def test_any_sequence_of_repeats_leaves_each_batch_once(store: Store, tries: list[tuple[int, int]]) -> None:
    store.command("CREATE OR REPLACE TABLE r (k UInt64) ENGINE = MergeTree ORDER BY k SETTINGS non_replicated_deduplication_window = 1000")
    for batch, times in tries:
        for _ in range(times):
            store.insert("r", pa.table({"k": [batch, batch]}), f"batch {batch}")
    found = {row["k"]: row["n"] for row in store.rows("SELECT k, count() AS n FROM r GROUP BY k")}
    assert found == {batch: 2 for batch, _ in tries}


def test_a_token_whose_rows_were_lost_does_not_stop_their_repeat(table: Store) -> None:
    """An embedded engine that is killed between logging a token and moving its part into place has the one and not the other."""
    if table.address.path is None:
        pytest.skip("a server does not die with the worker")
    for _ in range(3):  # lost twice, and the third time for good
        table.insert("t", rows_of(1, 2), "a")
        table.insert("t", rows_of(3), "b")
        assert table.rows("SELECT k FROM t ORDER BY k") == [{"k": 1}, {"k": 2}, {"k": 3}]
        table.command("ALTER TABLE t DELETE WHERE k < 3 SETTINGS mutations_sync = 2")


def test_a_repeat_is_recognised_by_any_row(store: Store) -> None:
    for table, columns in (("access_raw", 29), ("instance_raw", 21)):
        described = store.rows("SELECT name, type FROM system.columns WHERE database = currentDatabase() AND table = {t:String}", t=table)
        assert len(described) == columns
        empty = {"String": "\\'\t\n", "Map(LowCardinality(String), UInt64)": [("a", 1)], "Array(UInt64)": [2**64 - 1]}
        row = {
            c["name"]: None if "Nullable" in c["type"] else empty.get(c["type"].replace("LowCardinality(String)", "String"), 1)
            for c in described
        }
        row = {**row, "causes": [("a", 1)]} if table == "access_raw" else row
        types = {"causes": pa.map_(pa.string(), pa.uint64()), "chain": pa.list_(pa.uint64())}
        data = pa.table({name: pa.array([value], types.get(name)) for name, value in row.items() if name != "inserted_at"})
        for _ in range(3):
            store.insert(table, data, "token")
        assert count(store, table) == 1


class Flaky:
    """A client whose first inserts fail after, or before, the server has done them."""

    def __init__(self, client: Any, failures: list[Exception], done_first: bool) -> None:
        self.client, self.failures, self.done_first, self.inserts = client, failures, done_first, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.client, name)

    def insert_arrow(self, *args: Any, **kwargs: Any) -> None:
        self.inserts += 1
        if self.done_first or not self.failures:
            self.client.insert_arrow(*args, **kwargs)
        if self.failures:
            raise self.failures.pop(0)


def flaky(store: Store, failures: Sequence[Exception], done_first: bool, waits: list[float]) -> tuple[Store, Flaky]:
    client = Flaky(store._client, list(failures), done_first)
    return Store(client, store.address, waits.append), client  # type: ignore[arg-type]


@pytest.mark.parametrize("token", ["a", None])
@pytest.mark.parametrize("done_first", [True, False])
def test_an_insert_of_unknown_fate_is_repeated_and_lands_once(table: Store, done_first: bool, token: str | None) -> None:
    waits: list[float] = []
    trouble = [OperationalError("connection reset"), DatabaseError("Code: 252. DB::Exception: Too many parts", code=252)]
    shaky, client = flaky(table, trouble, done_first, waits)
    shaky.insert("t", rows_of(1, 2), token)
    assert (count(table), client.inserts, waits) == (2, 3, [0.2, 0.4])
    assert table.rows("SELECT sum(n) AS n FROM agg") == [{"n": 2}]


def test_an_insert_gives_up_after_its_attempts(table: Store) -> None:
    waits: list[float] = []
    shaky, client = flaky(table, [OperationalError("connection reset")] * 99, False, waits)
    with pytest.raises(StoreError, match="insert into t: connection reset; is ClickHouse running"):
        shaky.insert("t", rows_of(1), "a")
    assert client.inserts == INSERT_ATTEMPTS and len(waits) == INSERT_ATTEMPTS - 1


def test_a_wrong_insert_is_not_repeated(table: Store) -> None:
    shaky, client = flaky(table, [DatabaseError("Code: 53. DB::Exception: Type mismatch (version 1)", code=53)], False, [])
    with pytest.raises(QueryError, match="insert into t: Type mismatch$"):
        shaky.insert("t", rows_of(1), "a")
    assert client.inserts == 1


# -- errors ------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("run", "kind", "message"),
    [
        (lambda s: s.query("SELECT * FROM nowhere"), QueryError, "query 'SELECT . FROM nowhere': .*run `kvtide migrate`"),
        (lambda s: s.insert("nowhere", rows_of(1), "a"), StoreError, "table nowhere is not in .*; run `kvtide migrate`"),
        (lambda s: s.rows("-- c\nSELEC 1"), QueryError, "^query 'SELEC 1': Syntax error"),
        (lambda s: s.command("DROP TABLE nowhere"), QueryError, "nowhere"),
        (lambda s: s.query("SELECT {x:UInt8}"), QueryError, "parameter x is not set"),
        (lambda s: s.named("nothing"), QueryError, "no query named 'nothing'; there are capacity_curve, "),
        (lambda s: s.named("capacity_curve"), QueryError, "query capacity_curve misses tenant; its parameters: tenant String"),
        (lambda s: s.named("pipeline_audit", x=1), QueryError, "query pipeline_audit does not take x; its parameters: none"),
    ],
)
def test_errors_name_what_failed_and_the_mend(store: Store, run: Callable[[Store], Any], kind: type[KvtideError], message: str) -> None:
    with pytest.raises(kind, match=message) as caught:
        run(store)
    assert "\n" not in str(caught.value) and "DB::Exception" not in str(caught.value)


def test_a_readonly_store_reads_and_does_not_write(store: Store, store_url: str) -> None:
    with Store.open(store_url, readonly=True) as reader:
        assert reader.pending() == []
        assert reader.rows("SELECT count() AS n FROM advice") == [{"n": 0}]
        for text in (
            "DROP TABLE advice",
            "CREATE TABLE x (a Int8) ENGINE = Memory",
            "SET readonly = 0",
            "INSERT INTO advice (id) VALUES ('a')",
        ):
            with pytest.raises(QueryError, match="may only read|only mode"):
                reader.fetch(text)
    assert store.rows("SELECT count() AS n FROM advice") == [{"n": 0}]


# -- schema history ----------------------------------------------------------------------------------------------------------------


def test_migrate_runs_each_migration_once(store_url: str) -> None:
    with Store.open(store_url, create=True) as store:
        names = store.pending()
        assert names[0] == "0001_schema_migrations" and store.applied() == []
        assert store.migrate() == names
        assert store.pending() == store.migrate() == []
        assert [f"{row['number']:04d}_{row['name']}" for row in store.applied()] == names


def test_a_migration_that_died_half_way_is_completed(store: Store) -> None:
    last = store.applied()[-1]
    store.command(f"ALTER TABLE schema_migrations DELETE WHERE number = {last['number']} SETTINGS mutations_sync = 2")
    kind, made = re.findall(r"CREATE (?:OR REPLACE )?(TABLE|VIEW) (?:IF NOT EXISTS )?(\w+)", sql.migrations()[-1].statements[-1])[0]
    store.command(f"DROP {kind} {made}")
    assert store.pending() == [f"{last['number']:04d}_{last['name']}"]
    store.command("ALTER TABLE schema_migrations MODIFY SETTING non_replicated_deduplication_window = 0")
    store.migrate()
    assert store.rows("SELECT name FROM system.tables WHERE database = currentDatabase() AND name = {n:String}", n=made) == [{"name": made}]


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("sha256 = 'x'", "0002_raw.sql was edited after it had been run here; restore it"),
        ("name = 'new', number = 99", "has run migration 0099_new, unknown here; upgrade kvtide"),
    ],
)
def test_an_edited_or_unknown_migration_stops(store_url: str, assignment: str, message: str) -> None:
    with Store.open(store_url, create=True) as store:
        store.migrate()
        store.command("CREATE TABLE history AS schema_migrations ENGINE = Memory")
        store.command("INSERT INTO history SELECT * FROM schema_migrations")
        changed = dict(part.split(" = ") for part in assignment.split(", "))
        columns = ", ".join(f"if(number = 2, {changed[c]}, {c}) AS {c}_" if c in changed else c for c in ("number", "name", "sha256"))
        store.command("TRUNCATE TABLE schema_migrations")
        store.command(f"INSERT INTO schema_migrations (number, name, sha256) SELECT {columns} FROM history")
        for call in (store.pending, store.migrate):
            with pytest.raises(StoreError, match=message):
                call()


# -- checkpoints -------------------------------------------------------------------------------------------------------------------


def test_checkpoints_of_any_size(store: Store) -> None:
    assert store.load_checkpoint("kv.events", 3) is None
    noise = np.random.default_rng(1).bytes(3 * CHUNK_BYTES + 17)
    for next_offset, state in ((5, b""), (9, noise), (2**63 + 1, b"small")):
        store.save_checkpoint("kv.events", 3, next_offset, state)
        store.save_checkpoint("kv.events", 4, 1, b"other")
        assert store.load_checkpoint("kv.events", 3) == (next_offset, state)
    store.command("OPTIMIZE TABLE shard_state FINAL")
    assert store.load_checkpoint("kv.events", 3) == (2**63 + 1, b"small")
    assert store.load_checkpoint("kv.events", 4) == (1, b"other")
    assert store.load_checkpoint("kv.other", 3) is None


def test_a_checkpoint_that_lacks_a_chunk_is_passed_over(store: Store) -> None:
    store.save_checkpoint("t", 0, 5, b"whole")
    part = {"topic": ["t"], "partition": [0], "next_offset": [6], "chunk": [0], "chunks": [2], "state": pa.array([b"x"])}
    store.insert("shard_state", pa.table(part), "torn")
    assert store.load_checkpoint("t", 0) == (5, b"whole")


def test_another_state_for_the_same_offset_replaces_it(store: Store) -> None:
    for state in (b"old format", b"new format", b"new format"):
        store.save_checkpoint("t", 0, 5, state)
    assert store.load_checkpoint("t", 0) == (5, b"new format")
