"""The curve views on what real shards stored: equal to the Python curves, both of the same binned rows and of the chains themselves."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from analytics.curve import Curve, DistanceHistogram, Weight
from analytics.curve_algebra import marginal_value_s_per_gib, merge, saved_s
from analytics.fleet import faults
from analytics.fleet.config import FleetConfig
from analytics.fleet.emulator import EPOCH_US, Fleet
from analytics.fleet.routers import RouterSpec
from analytics.fleet.scenarios import mixed_load
from analytics.frame import Frame
from analytics.pool import ReuseHistogram, solve
from analytics.reuse.chains import ChainBuilder
from analytics.reuse.run_exact import RunStack
from ingest.store import QueryError, Store
from kvtide.frames import load_frame
from kvtide.pipeline import run_embedded
from kvtide.prefill_cost import DEFAULT_COST, parse_cost
from streams.shard import ShardConfig

MINUTES, CAPACITY, DEPTH = 5, 400, 400
COST = parse_cost(DEFAULT_COST)  # what weight 'cost' counts with
OTHER_COST, BLOCK_BYTES = (1e-4, 7e-8), 2_097_152.0
WEIGHTS: tuple[Weight, ...] = ("blocks", "tokens", "cost")
TENANTS = ("agent", "batch", "chat", "code", "rag", "support")
WINDOWS = [(0, MINUTES + 1), (1, 3), (MINUTES - 1, MINUTES + 1)]


@pytest.fixture(scope="module")
def url(store_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A store with five minutes of six tenants on two instances whose stacks are cut at 400 blocks, so that some touches read beyond."""
    load = mixed_load(5, float(MINUTES), 3.0)
    config = FleetConfig(instances=2, capacity_blocks=CAPACITY, cost_a_s=2e-4, cost_b_s=2e-8, seed=5)
    fleet = Fleet(config, load, RouterSpec("session_affinity"), (faults.restart(170.0, 1, down_s=5.0),), with_truth=False)
    address = f"chdb://{store_folder}?database=mrc_view"
    with Store.open(address) as store:
        shards = ShardConfig(depth_factor=1, min_depth_blocks=DEPTH)
        run_embedded(fleet.run(), store, tmp_path_factory.mktemp("log"), config=shards)
    return address


@pytest.fixture
def worked(url: str) -> Iterator[Store]:
    with Store.open(url) as store:
        yield store


def between(window: tuple[int, int]) -> dict[str, str]:
    at = [np.datetime64(EPOCH_US // 1_000_000 + 60 * minute, "s").astype(str).replace("T", " ") for minute in window]
    return {"from": at[0], "to": at[1]}


def view(store: Store, name: str, **arguments: object) -> list[dict[str, Any]]:
    """Rows of a view with parameters, its arguments bound as the query's."""
    kinds: dict[type, str] = {str: "String", float: "Float64"}
    called = ", ".join(f"{key} = {{{key}:{kinds[type(value)]}}}" for key, value in arguments.items())
    return store.rows(f"SELECT * FROM {name}({called})", **arguments)


def binned(store: Store, tenant: str, window: tuple[int, int], scope: str, instance: str) -> Curve:
    """The analytics' curve of the rows that the shard stored."""
    where = "tenant = {tenant:String} AND window_start >= {from:DateTime('UTC')} AND window_start < {to:DateTime('UTC')}"
    given = {"tenant": tenant, "instance": instance, **between(window)}
    rows = store.rows(
        "SELECT kind, distance_to AS edge, sum(r.blocks) AS blocks, sum(r.positions) AS positions, any(r.block_size) AS size "
        f"FROM reuse_1m AS r WHERE {where} AND scope = {{scope:String}} AND instance = {{instance:String}} "
        "GROUP BY kind, edge ORDER BY edge",
        scope=scope,
        **given,
    )
    placed = "AND instance = {instance:String}" if scope == "placed" else "AND {instance:String} = ''"
    asked = store.rows(
        f"SELECT sum(c.tokens) AS tokens, sum(c.token_context) AS context FROM cause_1m AS c WHERE {where} {placed}", **given
    )
    hit = [row for row in rows if row["kind"] == "reuse"]
    edge, blocks, positions, size = (np.array([row[name] for row in hit], np.float64) for name in ("edge", "blocks", "positions", "size"))
    hits = [np.cumsum(values) for values in (blocks, blocks * size, size**2 * (positions + blocks / 2))]
    total = float(sum(row["blocks"] for row in rows))
    return Curve(edge - 1, hits[0], hits[1], hits[2], total, float(asked[0]["tokens"]), asked[0]["context"])


def from_chains(store: Store, tenant: str, window: tuple[int, int], instance: str) -> Curve:
    """The exact per-block curve of the window's requests, from the chains themselves, the stack warm from before and never cut."""
    where = "tenant = {tenant:String} AND ({instance:String} = '' OR instance = {instance:String})"
    table = store.query(
        "SELECT toUnixTimestamp64Micro(ts) AS ts_us, prompt_tokens, block_size, chain FROM access_raw "
        f"WHERE {where} AND outcome = 'served' ORDER BY ts, source, seq",
        tenant=tenant,
        instance=instance,
    ).to_pydict()
    minute = (np.array(table["ts_us"]) - EPOCH_US) // 60_000_000
    stack, curves = RunStack(), []
    for now in range(window[1]):
        mine = np.flatnonzero(minute == now)
        builder = ChainBuilder(table["block_size"][0])
        for row in mine:
            builder.append(table["ts_us"][row], np.array(table["chain"][row], np.uint64), table["prompt_tokens"][row])
        chains, histogram = builder.build(), DistanceHistogram(table["block_size"][0])
        histogram.add(stack.touch(chains.ts_us, chains.offsets, chains.hashes), chains)
        curves.append(histogram.curve())
    return merge(curves[window[0] :])


def test_rows_hold_all_kinds(worked: Store) -> None:
    kinds = worked.rows("SELECT scope, kind, sum(blocks) AS n FROM reuse_1m GROUP BY scope, kind ORDER BY scope, kind")
    assert [(row["scope"], row["kind"]) for row in kinds] == [(s, k) for s in ("fleet", "placed") for k in ("beyond", "cold", "reuse")]
    assert {row["tenant"] for row in worked.rows("SELECT DISTINCT tenant FROM reuse_1m")} == set(TENANTS)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("tenant", TENANTS)
def test_mrc_equals_the_python_curve(worked: Store, tenant: str, window: tuple[int, int]) -> None:
    same_rows, chains = binned(worked, tenant, window, "fleet", ""), from_chains(worked, tenant, window, "")
    for weight in WEIGHTS:
        rows = view(worked, "mrc", tenant=tenant, weight=weight, **between(window))
        check(rows, weight, same_rows, chains)
        assert rows[-1]["hits"] / rows[-1]["asked"] == pytest.approx(same_rows.ideal_ratio(weight, COST), rel=1e-9)
    assert rows[-1]["hits"] == pytest.approx(saved_s(same_rows, [1 << 40], COST)[0], rel=1e-9)  # in seconds


@pytest.mark.parametrize("window", WINDOWS)
def test_placed_curves_equal_the_python_curves(worked: Store, window: tuple[int, int]) -> None:
    for tenant in TENANTS[:3]:
        for weight in WEIGHTS:
            rows = view(worked, "mrc_placed", tenant=tenant, weight=weight, **between(window))
            assert {row["instance"] for row in rows} == {"p0", "p1"}
            for instance in ("p0", "p1"):
                same_rows, chains = (binned(worked, tenant, window, "placed", instance), from_chains(worked, tenant, window, instance))
                check([row for row in rows if row["instance"] == instance], weight, same_rows, chains)


def check(rows: list[dict[str, Any]], weight: Weight, same_rows: Curve, chains: Curve) -> None:
    capacities = np.array([row["capacity_blocks"] for row in rows])
    ratios = np.array([row["hit_ratio"] for row in rows])
    assert len(rows) > 50 and (np.diff(capacities) > 0).all()
    np.testing.assert_allclose(ratios, same_rows.hit_ratio(capacities, weight, COST), rtol=1e-9, atol=0)
    below = capacities <= DEPTH  # deeper touches read beyond, once the shard knows the capacity
    assert below.sum() > 50
    np.testing.assert_allclose(ratios[below], chains.hit_ratio(capacities[below], weight, COST), rtol=1e-9, atol=0)


@pytest.mark.parametrize("window", WINDOWS[:2])
def test_capacity_value_equals_the_python_value(worked: Store, window: tuple[int, int]) -> None:
    for tenant in TENANTS[:3]:
        for scope, instance in (("fleet", ""), ("placed", "p0"), ("placed", "p1")):
            given = {"a_s": OTHER_COST[0], "b_s": OTHER_COST[1], "block_bytes": BLOCK_BYTES}
            rows = view(worked, "capacity_value", tenant=tenant, scope=scope, **between(window), **given)
            rows = [row for row in rows if row["instance"] == instance]
            curve = binned(worked, tenant, window, scope, instance)
            capacities = np.array([row["capacity_blocks"] for row in rows], np.int64)
            np.testing.assert_allclose([row["saved_s"] for row in rows], saved_s(curve, capacities, OTHER_COST), rtol=1e-9)
            np.testing.assert_allclose([row["hit_ratio_blocks"] for row in rows], curve.hit_ratio(capacities), rtol=1e-9)
            np.testing.assert_allclose([row["hit_ratio_cost"] for row in rows], curve.hit_ratio(capacities, "cost", OTHER_COST), rtol=1e-9)
            for before, row in zip(rows, rows[1:], strict=False):
                step_gib = (row["capacity_blocks"] - before["capacity_blocks"]) * BLOCK_BYTES / 2**30
                value = marginal_value_s_per_gib(curve, [before["capacity_blocks"]], OTHER_COST, BLOCK_BYTES, step_gib=step_gib)[0]
                assert row["value_s_per_gib"] == pytest.approx(value, rel=1e-9, abs=1e-9)


def histograms(frame: Frame, window: tuple[int, int], instance: str | None = None) -> dict[str, ReuseHistogram]:
    minutes = (frame.window_s - EPOCH_US / 1e6) / 60
    found = frame.histograms((minutes >= window[0]) & (minutes < window[1]), instance)
    return dict(zip(frame.tenants, found, strict=True))


@pytest.mark.parametrize("window", [(0, MINUTES), (1, 3)])
def test_working_set_equals_the_pool_model(worked: Store, window: tuple[int, int]) -> None:
    for tenant, model in histograms(load_frame(worked), window).items():
        rows = view(worked, "working_set", tenant=tenant, **between(window))
        assert len(rows) == len(model.to_s) > 20
        at = [row["time_s"] for row in rows]
        expected = [(model.occupancy_blocks(t), model.hit_blocks(t) / model.total_blocks) for t in at]
        np.testing.assert_allclose([(row["working_set_blocks"], row["reused_ratio"]) for row in rows], expected, rtol=1e-9)


@pytest.mark.parametrize("window", [(0, MINUTES), (1, 3)])
@pytest.mark.parametrize("instance", ["p0", "p1"])
def test_pooled_curve_equals_the_pool_model(worked: Store, window: tuple[int, int], instance: str) -> None:
    models = histograms(load_frame(worked), window, instance)
    rows = view(worked, "pooled_curve", instance=instance, **between(window))
    assert {row["tenant"] for row in rows} == set(TENANTS)
    for row in rows:
        model = models[row["tenant"]]
        assert row["tenant_blocks"] == pytest.approx(model.occupancy_blocks(row["time_s"]), rel=1e-9)
        assert row["hit_ratio_blocks"] == pytest.approx(model.hit_blocks(row["time_s"]) / model.total_blocks, rel=1e-9)
        assert row["capacity_blocks"] == pytest.approx(sum(m.occupancy_blocks(row["time_s"]) for m in models.values()), rel=1e-9)
    for row in rows[:: 6 * 40]:  # the solver finds the time from the capacity to a part in 10^9 of the longest reuse time
        pool = solve(list(models.values()), row["capacity_blocks"])
        which = list(models).index(row["tenant"])
        assert pool.time_s == pytest.approx(row["time_s"], rel=1e-6)
        assert (pool.hit_ratio[which], pool.occupancy_blocks[which]) == pytest.approx(
            (row["hit_ratio_blocks"], row["tenant_blocks"]), rel=1e-6
        )


# ---------------------------------------------------------------- how a view with parameters is called


def test_nothing_stored_gives_no_row(worked: Store) -> None:
    whole, empty = between(WINDOWS[0]), between((400, 500))
    for name in ("mrc", "mrc_placed"):
        for weight in WEIGHTS:
            assert view(worked, name, tenant="nobody", weight=weight, **whole) == []
            assert view(worked, name, tenant="chat", weight=weight, **empty) == []
            assert view(worked, name, tenant="chat", weight=weight, **between((3, 3))) == []
            assert view(worked, name, tenant="chat", weight=weight, **between((3, 1))) == []
    for tenant, window in (("nobody", whole), ("chat", empty)):
        assert view(worked, "capacity_value", tenant=tenant, scope="fleet", a_s=1.0, b_s=1.0, block_bytes=1.0, **window) == []
        assert view(worked, "working_set", tenant=tenant, **window) == []
    assert view(worked, "pooled_curve", instance="p9", **whole) == view(worked, "pooled_curve", instance="p0", **empty) == []


RANGE = "from = '2025-01-01 00:00:00', to = '2025-01-01 00:06:00'"


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (f"mrc(tenant = 'chat', {RANGE}, weight = 'bytes')", "Unknown element 'bytes'"),
        (f"mrc(tenant = 'nobody', {RANGE}, weight = 'Blocks')", "maybe you meant: .'blocks'"),
        (f"mrc(tenant = 'chat', {RANGE}, weight = '')", "Unknown element ''"),
        (f"mrc(tenant = 'chat', {RANGE}, scope = 'fleet')", "`weight` is not set"),
        (f"mrc(tenant = 'chat', {RANGE})", "`weight` is not set"),
        (f"mrc({RANGE}, weight = 'blocks')", "`tenant` is not set"),
        ("mrc(tenant = 'chat', from = 'yesterday', to = '2025-01-02 00:00:00', weight = 'blocks')", "yesterday"),
        (f"mrc_placed(tenant = 'chat', {RANGE}, weight = 'bytes')", "Unknown element 'bytes'"),
        (f"capacity_value(tenant = 'chat', {RANGE}, scope = 'all', a_s = 1, b_s = 1, block_bytes = 1)", "Unknown element 'all'"),
        (f"capacity_value(tenant = 'chat', {RANGE}, scope = 'fleet', b_s = 1, block_bytes = 1)", "`a_s` is not set"),
    ],
)
def test_a_wrong_call_says_what_is_wrong(worked: Store, call: str, reason: str) -> None:
    with pytest.raises(QueryError, match=reason):
        worked.rows(f"SELECT * FROM {call}")


def test_calls_in_one_query_do_not_mix_their_arguments(worked: Store) -> None:
    calls = [(tenant, weight) for tenant in ("chat", "rag") for weight in WEIGHTS]
    united = " UNION ALL ".join(
        f"SELECT '{tenant}' AS t, '{weight}' AS w, max(hit_ratio) AS most FROM mrc(tenant = '{tenant}', {RANGE}, weight = '{weight}')"
        for tenant, weight in calls
    )
    got = {(row["t"], row["w"]): row["most"] for row in worked.rows(united)}
    alone = {(t, w): view(worked, "mrc", tenant=t, weight=w, **between((0, 6)))[-1]["hit_ratio"] for t, w in calls}
    assert got == pytest.approx(alone, rel=1e-12) and len(set(alone.values())) == len(calls)
    joined = worked.rows(
        "SELECT capacity_blocks AS c, a.hit_ratio AS a, b.hit_ratio AS b "
        f"FROM mrc(tenant = 'chat', {RANGE}, weight = 'blocks') AS a "
        f"INNER JOIN mrc(tenant = 'rag', {RANGE}, weight = 'tokens') AS b USING (capacity_blocks) ORDER BY c"
    )
    rows = (view(worked, "mrc", tenant=t, weight=w, **between((0, 6))) for t, w in (("chat", "blocks"), ("rag", "tokens")))
    one, other = ({row["capacity_blocks"]: row["hit_ratio"] for row in curve} for curve in rows)
    both = [{"c": c, "a": one[c], "b": other[c]} for c in sorted(one.keys() & other.keys())]
    assert len(both) > 20 and same(joined, both)


def same(left: list[dict[str, Any]], right: list[dict[str, Any]]) -> bool:
    """Whether rows agree, floats to a part in 10^12: ClickHouse adds them up in the order in which its threads come."""
    floats = [[{k: v for k, v in row.items() if isinstance(v, float)} for row in rows] for rows in (left, right)]
    rest = [[{k: v for k, v in row.items() if not isinstance(v, float)} for row in rows] for rows in (left, right)]
    return rest[0] == rest[1] and all(a == pytest.approx(b, rel=1e-12) for a, b in zip(*floats, strict=True))


def test_a_condition_on_capacity_cuts_the_curve_but_not_its_sums(worked: Store) -> None:
    whole = view(worked, "mrc", tenant="chat", weight="cost", **between((0, 6)))
    some = worked.rows(
        f"SELECT * FROM mrc(tenant = 'chat', {RANGE}, weight = 'cost') WHERE capacity_blocks > 100 AND model = '{whole[0]['model']}' "
        "ORDER BY capacity_blocks"
    )
    wanted = [row for row in whole if row["capacity_blocks"] > 100]
    assert wanted and same(some, wanted)


def test_views_answer_from_another_database_and_under_other_settings(worked: Store, url: str) -> None:
    calls = [
        f"mrc(tenant = 'chat', {RANGE}, weight = 'tokens')",
        f"mrc_placed(tenant = 'chat', {RANGE}, weight = 'cost')",
        f"capacity_value(tenant = 'chat', {RANGE}, scope = 'placed', a_s = 1, b_s = 1, block_bytes = 1)",
        f"working_set(tenant = 'chat', {RANGE})",
        f"pooled_curve(instance = 'p0', {RANGE})",
    ]
    with Store.open(url.replace("mrc_view", "mrc_elsewhere")) as elsewhere:
        for call in calls:
            here = worked.rows(f"SELECT * FROM {call}")
            assert here and same(elsewhere.rows(f"SELECT * FROM mrc_view.{call}"), here)
            assert same(worked.rows(f"SELECT * FROM {call} SETTINGS join_use_nulls = 1"), here)


def insert(store: Store, table: str, **columns: list[Any]) -> None:
    """Rows of one tenant's minute, one a value of each column; the others as they are most often."""
    rows = len(next(iter(columns.values())))
    usual: dict[str, dict[str, Any]] = {
        "reuse_1m": {"block_size": 16, "scope": "fleet", "instance": "", "kind": "reuse", "distance_from": 0, "positions": 0},
        "cause_1m": {
            "instance": "p0",
            "cause": "cold",
            "cause_tenant": "",
            "inferred": 0,
            "requests": 1,
            "blocks": 1,
            "token_context": 0.0,
        },
    }
    both: dict[str, Any] = {"window_start": EPOCH_US // 1_000_000, "tenant": "a", "model": "m", **usual[table]}
    store.insert(table, pa.table({**{name: [value] * rows for name, value in both.items()}, **columns}))


def test_tenants_with_any_name_have_a_curve(store: Store) -> None:
    names = ["it's", 'a"b', "back\\slash", "多租户", "", "x' OR 1 = 1 --"]
    edges = [3 + i for i in range(len(names))]
    insert(store, "reuse_1m", tenant=names, distance_to=edges, blocks=[5] * len(names))
    for name, edge in zip(names, edges, strict=True):
        rows = view(store, "mrc", tenant=name, weight="blocks", **between((0, 1)))
        assert [(row["capacity_blocks"], row["hit_ratio"]) for row in rows] == [(edge, 1.0)]


def test_block_sizes_and_models_are_apart_and_failed_requests_are_asked_for(store: Store) -> None:
    """Two models, one with two block sizes; half of the prompt tokens of `one` never touched a stack."""
    rows = [("one", 16, "reuse", 4, 10), ("one", 16, "cold", 0, 30), ("two", 16, "reuse", 2, 8), ("two", 64, "reuse", 2, 3)]
    columns = ("model", "block_size", "kind", "distance_to", "blocks")
    insert(store, "reuse_1m", **{name: list(values) for name, values in zip(columns, zip(*rows, strict=True), strict=True)})
    insert(store, "cause_1m", model=["one", "two"], tokens=[40 * 16 * 2, 8 * 16 + 3 * 64])
    got = view(store, "mrc", tenant="a", weight="tokens", **between((0, 1)))
    shares = [(row["model"], row["block_size"], row["capacity_blocks"], row["hit_ratio"]) for row in got]
    # Curves of one model's block sizes are shares of that model's prompts, so they add up.
    assert shares == [("one", 16, 0, 0.0), ("one", 16, 4, 0.125), ("two", 16, 2, 0.4), ("two", 64, 2, 0.6)]
    blocks = view(store, "mrc", tenant="a", weight="blocks", **between((0, 1)))
    assert [row["hit_ratio"] for row in blocks] == [0.0, 0.25, 1.0, 1.0]
