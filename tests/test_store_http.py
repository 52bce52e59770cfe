"""The served store: the same client code over a real HTTP connection."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from ingest.store import QueryError, Store, StoreError
from kvtide import cli
from tests.clickhouse_http import Server, serving

_numbers = itertools.count(1)


@pytest.fixture(scope="module")
def server(store_folder: Path) -> Iterator[Server]:
    with serving(str(store_folder)) as server:
        yield server


@pytest.fixture
def url(server: Server) -> Iterator[str]:
    url = f"{server.url}/http_{next(_numbers)}"
    yield url
    with Store.open(url, create=True) as store:
        store.command(f"DROP DATABASE {store.address.database}")


def test_a_new_database_is_made_by_migrate_only(url: str) -> None:
    with pytest.raises(StoreError, match="run `kvtide migrate`") as caught:
        Store.open(url)
    assert "p@ss" not in str(caught.value) and "p%40ss" not in str(caught.value)
    with Store.open(url, create=True) as store:
        assert store.migrate() and store.pending() == []
    with Store.open(url) as store:
        assert store.pending() == []


def test_a_wrong_password(server: Server) -> None:
    with pytest.raises(StoreError, match="Authentication failed; check user and password in KVTIDE_STORE"):
        Store.open(server.url.replace("p%40ss", "wrong") + "/x")


def test_values_parameters_and_checkpoints(url: str) -> None:
    with Store.open(url, create=True) as store:
        store.migrate()
        store.command("CREATE TABLE u (v UInt64, at DateTime('UTC'), s String) ENGINE = MergeTree ORDER BY v")
        store.insert("u", pa.table({"s": ["a'b", "é"], "v": pa.array([2**64 - 1, 2**63], pa.uint64()), "at": [0, 60]}))
        assert store.rows("SELECT v FROM u WHERE s = {s:String}", s="a'b") == [{"v": 2**64 - 1}]
        read = store.query("SELECT at, v FROM u WHERE v >= {v:UInt64} ORDER BY v", v=2**63)
        assert read.schema.field("at").type == pa.timestamp("s", "UTC") and read.column("v").to_pylist() == [2**63, 2**64 - 1]
        state = bytes(range(256)) * 9000
        store.save_checkpoint("t", 0, 2**63 + 1, state)
        assert store.load_checkpoint("t", 0) == (2**63 + 1, state)
        assert store.named("capacity_curve", tenant="a").num_rows == 0


def test_a_connection_lost_after_an_insert_does_not_double_it(url: str, server: Server) -> None:
    waits: list[float] = []
    with Store.open(url, create=True, sleep=waits.append) as store:
        store.migrate()
        data = pa.table(
            {"at": [0], "topic": ["t"], "partition": [0], "offset": [7], "reason": ["r"], "detail": ["d"], "raw": [b"\xff\x00"]}
        )
        server.inserts.clear()
        server.drop = 3
        store.insert("dead_letter_raw", data, "token")
        assert server.drop == 0 and len(server.inserts) > len(waits) >= 1
        assert {inserted["insert_deduplication_token"] for inserted in server.inserts} == {"token"}
        assert {(i["insert_deduplicate"], i["async_insert"]) for i in server.inserts} == {("1", "0")}
        assert store.rows("SELECT offset, hex(raw) AS raw FROM dead_letter_raw") == [{"offset": 7, "raw": "FF00"}]


def test_errors_and_reading_only(url: str) -> None:
    with Store.open(url, create=True) as store:
        store.migrate()
        with pytest.raises(QueryError, match="^query 'SELECT nope': Unknown expression identifier `nope`"):
            store.query("SELECT nope")
    with Store.open(url, readonly=True) as reader:
        assert reader.rows("SELECT 1 AS one") == [{"one": 1}]
        with pytest.raises(QueryError, match="may only read"):
            reader.fetch("DROP TABLE advice")


def test_the_sql_command(url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with Store.open(url, create=True) as store:
        store.migrate()
    monkeypatch.setattr(sys, "argv", ["kvtide", "sql", "--json", "--store", url, "SELECT tenant, hit_ratio FROM hit_ratio"])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    assert not stopped.value.code
    assert json.loads(capsys.readouterr().out) == {"columns": ["tenant", "hit_ratio"], "rows": []}
