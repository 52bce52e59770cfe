"""The SQL files: how they are read, and what views and queries answer on rows whose sums are known."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import sql
from ingest.store import Store

M0 = datetime(2023, 11, 14, 22, 13, tzinfo=UTC)
M1 = datetime(2023, 11, 14, 22, 14, tzinfo=UTC)
RANGE = {"from": "2023-11-14 22:13:00", "to": "2023-11-14 22:15:00"}

# Landed migrations are never edited: a change is a new file, and a new line here.
LANDED = {
    "0001_schema_migrations": "d6f342239f9b74c4",
    "0002_raw": "ff1990a674c1eeeb",
    "0003_windows": "3236554772b2a470",
    "0004_state": "6a30c25c4ec52067",
    "0005_views": "93ef420a2fd79446",
    "0006_value_views": "9c74cf74b4745f15",
    "0007_weighted_mrc": "4223b53878071e11",
    "0008_workload": "585c057371033e6d",
    "0009_lab": "0486f6d1e6da8305",
}

COLUMNS = {
    "access_raw": "ts tenant model instance incarnation request_id session parent_session category turn prompt_tokens hit_tokens "
    "hit_dram_tokens hit_disk_tokens block_size chain output_tokens queue_ms prefill_ms ttft_ms router outcome late causes partition "
    "offset source seq inserted_at",
    "advice": "id made_at kind target predicted confidence expires_at evidence status",
    "cause_1m": "window_start tenant model instance cause cause_tenant inferred requests blocks tokens token_context",
    "dead_letter_raw": "at topic partition offset reason detail raw inserted_at",
    "diagnosis": "id made_at tenant baseline_from baseline_to current_from current_to verdict target hit_ratio_before hit_ratio_after "
    "contributions evidence",
    "instance_raw": "ts instance incarnation lifecycle reason capacity_blocks used_blocks pinned_blocks evictable_blocks running waiting "
    "queued_tokens query_tokens hit_tokens source_state reports_residency source seq partition offset inserted_at",
    "residency_1m": "window_start tenant model instance kind reason cause_tenant blocks idle_ms idle_known",
    "lab_policy": "id made_at trace policy form capacity_blocks hit_ratio_blocks hit_ratio_tokens saved_prefill_s",
    "lab_router": "id made_at workload router instances load seed ttft_p50_s ttft_p99_s ttft_mean_s hit_ratio_tokens",
    "lab_tier": "id made_at trace hbm_blocks dram_blocks hbm_hit_ratio_tokens dram_hit_ratio_tokens hit_ratio_tokens saved_prefill_s",
    "reuse_1m": "window_start tenant model block_size scope instance kind distance_from distance_to blocks positions",
    "reuse_time_1m": "window_start tenant model block_size instance category kind reuse_ms_from reuse_ms_to blocks positions",
    "schema_migrations": "number name sha256 applied_at",
    "shard_state": "topic partition next_offset chunk chunks state written_at",
    "traffic_1m": "window_start tenant model instance category requests failed_requests late_requests prompt_tokens hit_tokens "
    "output_tokens queue_us queue_known prefill_us prefill_known ttft_us ttft_known",
    "workload_profile": "id made_at trace format tenant metric label value unit reason",
    "hit_ratio": "window_start tenant requests prompt_tokens hit_tokens hit_ratio",
    "hit_ratio_instance": "window_start instance requests prompt_tokens hit_tokens hit_ratio",
    "interference": "window_start instance tenant cause_tenant evicted_blocks idle_s share_ratio",
    "miss_cause": "window_start tenant cause cause_tenant tokens share_ratio",
}


def test_split_respects_quotes_and_comments() -> None:
    text = "-- a; b\nSELECT 'x;''y', \"a;b\", `c;d` /* e;f */; \n\n/* only; a comment */;\nSELECT 4 - 2 / 1 -- tail; \n;"
    assert sql.split(text) == ["SELECT 'x;''y', \"a;b\", `c;d` /* e;f */", "SELECT 4 - 2 / 1 -- tail;"]


@given(
    st.lists(st.sampled_from(["SELECT 1", "SELECT ';'", "SELECT '\\';'", "SELECT `a;b` /* ; */", 'SELECT "--;" -- x;\n+ 1']), max_size=6)
)
def test_split_joins_back(statements: list[str]) -> None:
    assert sql.split(";\n".join(statements)) == statements


def test_parameters_of_nested_types() -> None:
    assert sql.parameters("{from:DateTime64(6, 'UTC')} { x : Map(String, Array(UInt8)) }") == {
        "from": "DateTime64(6, 'UTC')",
        "x": "Map(String, Array(UInt8))",
    }


def test_migrations_can_be_run_twice_and_every_table_deduplicates() -> None:
    for migration in sql.migrations():
        for statement in migration.statements:
            assert re.match(r"CREATE TABLE IF NOT EXISTS|CREATE OR REPLACE VIEW", statement), f"{migration.name}: {statement[:60]}"
            if statement.startswith("CREATE TABLE"):
                assert "non_replicated_deduplication_window = 100000" in statement


def test_landed_migrations_are_not_edited() -> None:
    assert {f"{m.number:04d}_{m.name}": m.sha256[:16] for m in sql.migrations()} == LANDED


def test_every_query_has_a_title_and_documents_its_parameters() -> None:
    for name, query in sql.queries().items():
        assert query.title.endswith("."), name
        assert set(query.meanings) == set(query.types), name


def test_schema_is_what_is_declared(store: Store) -> None:
    found: dict[str, list[str]] = {}
    for row in store.rows("SELECT table, name FROM system.columns WHERE database = currentDatabase() ORDER BY table, position"):
        found.setdefault(row["table"], []).append(row["name"])
    found.pop("mrc", None)
    assert found == {table: columns.split() for table, columns in COLUMNS.items()}


def test_every_query_runs_on_an_empty_store(store: Store) -> None:
    for name, query in sql.queries().items():
        needed = {parameter: "a" for parameter in query.types if parameter not in query.defaults}
        assert store.named(name, **needed).num_rows <= 1, name  # an aggregate without keys has one row
        assert store.fetch(query.text, **{**query.defaults, **needed}).columns, name


def test_every_query_runs_on_a_filled_store(filled: Store) -> None:
    for name, query in sql.queries().items():
        filled.named(name, **{parameter: "a" for parameter in query.types if parameter not in query.defaults})


def insert(store: Store, table: str, rows: list[dict[str, Any]], defaults: dict[str, Any]) -> None:
    store.insert(table, pa.Table.from_pylist([{**defaults, **row} for row in rows]))


TRAFFIC: dict[str, Any] = dict.fromkeys(COLUMNS["traffic_1m"].split(), 0) | {"model": "m", "instance": "i0", "category": "", "requests": 1}
CAUSE = {"model": "m", "instance": "i0", "cause_tenant": "", "inferred": 0, "requests": 1, "blocks": 1, "token_context": 0.0}
REUSE = {"window_start": M0, "tenant": "a", "model": "m", "block_size": 16, "scope": "fleet", "instance": "", "kind": "reuse",
         "distance_from": 0, "distance_to": 0, "positions": 0}  # fmt: skip
RESIDENCY = {"window_start": M0, "model": "m", "instance": "i0", "kind": "evicted", "reason": "pressure", "idle_ms": 0, "idle_known": 0}
ACCESS: dict[str, Any] = {"model": "m", "instance": "i0", "incarnation": 1,
          "session": None, "parent_session": None, "category": None, "turn": None,
          "hit_dram_tokens": None, "hit_disk_tokens": None, "block_size": 16, "chain": [2**64 - 1], "output_tokens": None,
          "queue_ms": None, "prefill_ms": None, "ttft_ms": None, "router": None, "outcome": "served", "late": 0, "partition": 0,
          "offset": 0, "source": "s"}  # fmt: skip


def access(rows: list[dict[str, Any]]) -> pa.Table:
    """`access_raw` rows; `causes` are lists of pairs."""
    full: list[dict[str, Any]] = [{**ACCESS, **row} for row in rows]
    types = {"causes": pa.map_(pa.string(), pa.uint64()), "chain": pa.list_(pa.uint64())}
    return pa.table({name: pa.array([row[name] for row in full], types.get(name)) for name in full[0]})


@pytest.fixture
def filled(store: Store) -> Store:
    """Two tenants, two minutes: tenant a hits 60 of 100 then 10 of 50 prompt tokens, tenant b 0 of 50."""
    insert(
        store,
        "traffic_1m",
        [
            {"window_start": M0, "tenant": "a", "prompt_tokens": 80, "hit_tokens": 50},
            {"window_start": M0, "tenant": "a", "prompt_tokens": 20, "hit_tokens": 10, "instance": "i1", "category": "chat"},
            {"window_start": M1, "tenant": "a", "prompt_tokens": 50, "hit_tokens": 10},
            {"window_start": M1, "tenant": "b", "prompt_tokens": 50, "hit_tokens": 0},
        ],
        TRAFFIC,
    )
    insert(
        store,
        "cause_1m",
        [
            {"window_start": M0, "tenant": "a", "cause": "hit", "tokens": 50},
            {"window_start": M0, "tenant": "a", "cause": "hit", "tokens": 10, "instance": "i1"},
            {"window_start": M0, "tenant": "a", "cause": "cold", "tokens": 30},
            {"window_start": M0, "tenant": "a", "cause": "granularity", "tokens": 10, "instance": "i1"},
            {"window_start": M1, "tenant": "a", "cause": "hit", "tokens": 10},
            {"window_start": M1, "tenant": "a", "cause": "capacity_other", "cause_tenant": "b", "tokens": 40},
            {"window_start": M1, "tenant": "b", "cause": "cold", "tokens": 50},
        ],
        CAUSE,
    )
    insert(
        store,
        "residency_1m",
        [
            {"tenant": "a", "cause_tenant": "b", "blocks": 30, "idle_ms": 60_000, "idle_known": 20},
            {"tenant": "a", "cause_tenant": "a", "blocks": 10},
            {"tenant": "a", "cause_tenant": "b", "blocks": 10, "idle_ms": 40_000, "idle_known": 5, "instance": "i1"},
            {"tenant": "a", "cause_tenant": "", "blocks": 99, "reason": "restart"},
            {"tenant": "a", "cause_tenant": "", "blocks": 99, "kind": "stored", "reason": ""},
        ],
        RESIDENCY,
    )
    store.insert(
        "access_raw",
        access(
            [
                {"ts": M0, "tenant": "a", "request_id": "r0", "prompt_tokens": 80, "hit_tokens": 50, "seq": 0, "causes": [("cold", 30)]},
                {"ts": M1, "tenant": "a", "request_id": "r1", "prompt_tokens": 50, "hit_tokens": 10, "seq": 1,
                 "causes": [("capacity_other", 40)]},
                {"ts": M1, "tenant": "b", "request_id": "r2", "prompt_tokens": 50, "hit_tokens": 0, "seq": 2, "session": "s",
                 "causes": [("cold", 20), ("routing", 28), ("granularity", 2)]},
            ]
        ),
    )  # fmt: skip
    return store


def test_hit_ratio_views(filled: Store) -> None:
    assert filled.rows("SELECT * FROM hit_ratio ORDER BY window_start, tenant") == [
        {"window_start": M0, "tenant": "a", "requests": 2, "prompt_tokens": 100, "hit_tokens": 60, "hit_ratio": 0.6},
        {"window_start": M1, "tenant": "a", "requests": 1, "prompt_tokens": 50, "hit_tokens": 10, "hit_ratio": 0.2},
        {"window_start": M1, "tenant": "b", "requests": 1, "prompt_tokens": 50, "hit_tokens": 0, "hit_ratio": 0.0},
    ]
    by_instance = filled.rows("SELECT instance, sum(prompt_tokens) AS prompt FROM hit_ratio_instance GROUP BY instance ORDER BY instance")
    assert by_instance == [{"instance": "i0", "prompt": 180}, {"instance": "i1", "prompt": 20}]
    assert filled.named("hit_ratio_by_tenant").to_pylist() == [
        {"tenant": "a", "requests": 3, "prompt_tokens": 150, "hit_tokens": 70, "hit_ratio": 70 / 150},
        {"tenant": "b", "requests": 1, "prompt_tokens": 50, "hit_tokens": 0, "hit_ratio": 0.0},
    ]
    assert filled.named("hit_ratio_by_tenant", **{"from": M0, "to": M1}).column("prompt_tokens").to_pylist() == [100]


def test_hit_ratio_of_no_tokens_is_unknown(store: Store) -> None:
    insert(store, "traffic_1m", [{"window_start": M0, "tenant": "a"}], TRAFFIC)
    assert store.rows("SELECT hit_ratio FROM hit_ratio") == [{"hit_ratio": None}]


def test_miss_causes_add_up_to_one_minus_the_hit_ratio(filled: Store) -> None:
    assert filled.rows("SELECT * FROM miss_cause ORDER BY window_start, tenant, cause") == [
        {"window_start": M0, "tenant": "a", "cause": "cold", "cause_tenant": "", "tokens": 30, "share_ratio": 0.3},
        {"window_start": M0, "tenant": "a", "cause": "granularity", "cause_tenant": "", "tokens": 10, "share_ratio": 0.1},
        {"window_start": M1, "tenant": "a", "cause": "capacity_other", "cause_tenant": "b", "tokens": 40, "share_ratio": 0.8},
        {"window_start": M1, "tenant": "b", "cause": "cold", "cause_tenant": "", "tokens": 50, "share_ratio": 1.0},
    ]
    shares = filled.rows("SELECT window_start, tenant, sum(share_ratio) AS share FROM miss_cause GROUP BY ALL ORDER BY ALL")
    ratios = filled.rows("SELECT window_start, tenant, 1 - hit_ratio AS share FROM hit_ratio ORDER BY ALL")
    assert [{**row, "share": round(row["share"], 12)} for row in shares] == ratios


def test_cause_shares_of_a_minute_add_up_to_one(filled: Store) -> None:
    rows = filled.named("cause_shares").to_pylist()
    assert [(r["window_start"], r["cause"], r["tokens"], r["share_ratio"]) for r in rows] == [
        (M0, "cold", 30, 0.3), (M0, "granularity", 10, 0.1), (M0, "hit", 60, 0.6),
        (M1, "capacity_other", 40, 0.4), (M1, "cold", 50, 0.5), (M1, "hit", 10, 0.1),
    ]  # fmt: skip
    one = filled.named("cause_shares", tenant="b").to_pylist()
    assert [(r["cause"], r["share_ratio"]) for r in one] == [("cold", 1.0)]


def test_top_misses(filled: Store) -> None:
    rows = filled.named("top_misses", limit=2).to_pylist()
    assert [(r["tenant"], r["cause"], r["cause_tenant"], r["tokens"], r["share_ratio"]) for r in rows] == [
        ("b", "cold", "", 50, 0.25),
        ("a", "capacity_other", "b", 40, 0.2),
    ]


def test_interference(filled: Store) -> None:
    rows = filled.rows("SELECT * FROM interference ORDER BY instance, cause_tenant")
    assert [(r["instance"], r["cause_tenant"], r["evicted_blocks"], r["idle_s"], r["share_ratio"]) for r in rows] == [
        ("i0", "a", 10, None, 0.25),
        ("i0", "b", 30, 3.0, 0.75),
        ("i1", "b", 10, 8.0, 1.0),
    ]
    matrix = filled.named("interference_matrix").to_pylist()
    assert [(r["tenant"], r["cause_tenant"], r["evicted_blocks"], r["idle_s"], r["share_ratio"]) for r in matrix] == [
        ("a", "b", 40, 4.0, 0.8),
        ("a", "a", 10, None, 0.2),
    ]


def test_mrc_equals_the_curve_counted_by_hand(store: Store) -> None:
    """4 blocks at distance 0, 2 in [1, 3), 3 in [8, 16), 5 cold, 1 beyond, of 16 tokens; prompts hold 25 tokens in tails."""
    insert(
        store,
        "reuse_1m",
        [
            {"distance_from": 0, "distance_to": 1, "blocks": 3, "positions": 1},
            {"distance_from": 0, "distance_to": 1, "blocks": 1, "positions": 1, "window_start": M1},
            {"distance_from": 8, "distance_to": 16, "blocks": 3, "positions": 9, "window_start": M1},
            {"distance_from": 1, "distance_to": 3, "blocks": 2, "positions": 3},
            {"kind": "cold", "blocks": 5, "positions": 11},
            {"kind": "beyond", "blocks": 1, "positions": 4},
            {"distance_from": 0, "distance_to": 1, "blocks": 1000, "scope": "placed", "instance": "i0"},
            {"distance_from": 0, "distance_to": 1, "blocks": 1000, "tenant": "b"},
            {"distance_from": 0, "distance_to": 1, "blocks": 1000, "window_start": datetime(2023, 11, 14, 22, 15, tzinfo=UTC)},
        ],
        REUSE,
    )
    insert(store, "cause_1m", [{"window_start": M0, "tenant": "a", "cause": c, "tokens": n, "token_context": n * 10.0}
                               for c, n in (("hit", 15 * 16), ("granularity", 25))], CAUSE)  # fmt: skip
    curves = {
        weight: store.query(
            "SELECT * FROM mrc(tenant = 'a', from = {from:DateTime('UTC')}, to = {to:DateTime('UTC')}, weight = {weight:String})",
            weight=weight,
            **RANGE,
        ).to_pydict()
        for weight in ("blocks", "tokens", "cost")
    }
    seconds = [0.0, *(2e-4 * 16 * n + 2e-8 * 256 * (spots + n / 2) for n, spots in ((4, 2), (6, 5), (9, 14)))]
    for weight, hits, asked in (
        ("blocks", [0, 4, 6, 9], 15),
        ("tokens", [0, 64, 96, 144], 265),
        ("cost", seconds, 2e-4 * 265 + 2e-8 * 2650),
    ):
        curve = curves[weight]
        assert curve["capacity_blocks"] == [0, 1, 3, 16]
        assert curve["hits"] == pytest.approx(hits, rel=1e-12) and curve["asked"] == pytest.approx([asked] * 4, rel=1e-12)
        assert curve["hit_ratio"] == pytest.approx([value / asked for value in hits], rel=1e-12)
    placed = store.named("capacity_curve_placed", tenant="a").to_pylist()
    assert [(r["instance"], r["capacity_blocks"], r["hits"], r["asked"]) for r in placed] == [("i0", 1, 1000, 1000)]


@pytest.mark.parametrize("weight", ["blocks", "tokens", "cost"])
def test_mrc_without_prompts_counts_block_tokens(store: Store, weight: str) -> None:
    insert(store, "reuse_1m", [{"distance_from": 0, "distance_to": 1, "blocks": 1}, {"kind": "cold", "blocks": 3}], REUSE)
    rows = store.named("capacity_curve", tenant="a", weight=weight).to_pylist()
    assert [(r["capacity_blocks"], r["hit_ratio"]) for r in rows] == [(0, 0.0), (1, pytest.approx(0.25))]


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_mrc_equals_direct_counting(store_folder: Any, seed: int) -> None:
    """An LRU of c blocks hits iff distance < c: counted on the distances themselves, at every bin edge."""
    rng = np.random.default_rng(seed)
    distances = np.sort(rng.integers(0, 40, size=rng.integers(1, 60)))
    cold = int(rng.integers(0, 20))
    edges = np.concatenate(([0], np.sort(rng.choice(np.arange(1, 41), size=5, replace=False)), [41]))
    rows = [
        {"distance_from": int(lo), "distance_to": int(hi), "blocks": int(((distances >= lo) & (distances < hi)).sum())}
        for lo, hi in zip(edges[:-1], edges[1:], strict=True)
    ]
    with Store.open(f"chdb://{store_folder}?database=mrc_property") as store:
        store.migrate()
        store.command("TRUNCATE TABLE reuse_1m")
        insert(store, "reuse_1m", [row for row in rows if row["blocks"]] + [{"kind": "cold", "blocks": cold}], REUSE)
        for point in store.named("capacity_curve", tenant="a").to_pylist():
            hits = int((distances < point["capacity_blocks"]).sum())
            assert point["hits"] == hits
            assert point["hit_ratio"] == hits / (len(distances) + cold)


def test_request_queries(filled: Store) -> None:
    recent = filled.named("recent_requests", limit=2).to_pylist()
    assert [r["request_id"] for r in recent] == ["r2", "r1"]
    assert dict(recent[0]["causes"]) == {"cold": 20, "routing": 28, "granularity": 2}
    assert [r["request_id"] for r in filled.named("recent_requests", tenant="a").to_pylist()] == ["r1", "r0"]
    worst = filled.named("worst_requests").to_pylist()
    assert [(r["request_id"], r["recomputed_tokens"]) for r in worst] == [("r1", 40), ("r2", 28)]


def test_instance_load_counts_rows_of_several_partitions_once(store: Store) -> None:
    base = {"instance": "i0", "incarnation": 7, "reason": None, "pinned_blocks": None, "evictable_blocks": None, "query_tokens": None,
            "hit_tokens": None, "source_state": "live", "reports_residency": 1, "source": "s", "offset": 0, "partition": 0}  # fmt: skip
    up = {"ts": M0, "seq": 0, "lifecycle": "up", "capacity_blocks": 100, "used_blocks": 0, "running": 0, "waiting": 0, "queued_tokens": 0}
    beat = {"ts": M1, "seq": 1, "lifecycle": "heartbeat", "capacity_blocks": 100, "used_blocks": 50, "running": 4, "waiting": 2,
            "queued_tokens": 600}  # fmt: skip
    insert(store, "instance_raw", [up, beat], base)
    insert(store, "instance_raw", [beat], {**base, "partition": 1})
    assert store.named("instance_load").to_pylist() == [
        {
            "instance": "i0", "last_seen": M1, "incarnation": 7, "lifecycle": "up", "source_state": "live", "capacity_blocks": 100,
            "used_ratio": 0.25, "running_mean": 2.0, "waiting_mean": 1.0, "queued_tokens_mean": 300.0, "queued_tokens_max": 600,
        }
    ]  # fmt: skip


def test_audits_are_quiet_until_something_is_wrong(filled: Store) -> None:
    assert filled.named("pipeline_audit").num_rows == 0
    assert filled.named("cause_audit").num_rows == 0
    again = {"ts": M0, "tenant": "a", "request_id": "r0", "prompt_tokens": 80, "hit_tokens": 50, "seq": 0, "causes": [("cold", 30)]}
    filled.insert("access_raw", access([again]))
    insert(filled, "cause_1m", [{"window_start": M1, "tenant": "b", "cause": "cold", "tokens": 1}], CAUSE)
    assert filled.named("pipeline_audit").to_pylist() == [{"partition": 0, "source": "s", "rows": 4, "distinct_rows": 3, "duplicates": 1}]
    assert filled.named("cause_audit").to_pylist() == [
        {"window_start": M1, "tenant": "b", "prompt_tokens": 50, "cause_tokens": 51, "hit_tokens": 0, "cause_hit_tokens": 0}
    ]
