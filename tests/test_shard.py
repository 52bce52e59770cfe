"""The shard against the emulator's own truth, and its promises: exact sums, no dependence on cuts, restores that change nothing."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pyarrow as pa
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from analytics.causes import CAUSES
from analytics.fleet.truth import CAUSES as TRUE_CAUSES
from ingest.events import KINDS, Kind
from kvtide.emulation import contract_batches
from streams.shard import Rows, Shard, ShardConfig
from tests.fleet_cases import Case, cases, small_workload

# A failing fleet is small already, and shrinking one takes minutes.
PHASES = (Phase.explicit, Phase.reuse, Phase.generate)
Stream = list[tuple[Kind, pa.RecordBatch]]


def stream_of(case: Case) -> Stream:
    return [pair for chunk in case.fleet().run() for pair in contract_batches(chunk) if pair[1].num_rows]


def run(stream: Stream, *, reload_every: int = 0, config: ShardConfig | None = None) -> dict[str, pa.Table]:
    """Rows per table of one shard over a stream, in the order in which they came out."""
    shard, out = Shard(0, config), list[Rows]()
    for offset, (kind, batch) in enumerate(stream):
        if reload_every and offset % reload_every == 0:
            shard = Shard.restore(0, config, shard.snapshot())
        out += shard.apply(kind, batch, offset)
    assert shard.late_rows == 0
    tables = sorted({rows.table for rows in out})
    return {table: pa.concat_tables([rows.data for rows in out if rows.table == table]) for table in tables}


@settings(max_examples=40, deadline=None, phases=PHASES)
@given(cases())
def test_attribution_equals_the_emulators_truth(case: Case) -> None:
    assert TRUE_CAUSES == CAUSES
    fleet = case.fleet()
    stream = [pair for chunk in fleet.run() for pair in contract_batches(chunk) if pair[1].num_rows]
    truth = fleet.result
    rows = run(stream)["access_raw"].select(["request_id", "prompt_tokens", "hit_tokens", "causes"]).to_pylist()
    assert len(rows) == len(case.workload)
    index = {case.workload.request_id(i): i for i in range(len(case.workload))}
    for row in rows:
        i = index[row["request_id"]]
        causes = dict(row["causes"])
        assert row["hit_tokens"] + sum(causes.values()) == row["prompt_tokens"]
        expected = {cause: int(truth.tokens[i, c]) for c, cause in enumerate(CAUSES) if truth.tokens[i, c] and cause != "hit"}
        assert causes == expected, (i, row["instance"], row["outcome"], row["prompt_tokens"], row["hit_tokens"], str(row["ts"]))


@settings(max_examples=10, deadline=None, phases=PHASES)
@given(cases())
def test_bounded_memory_only_turns_causes_into_beyond(case: Case) -> None:
    stream = stream_of(case)
    full, bounded = (run(stream, config=ShardConfig(depth_factor=1, min_depth_blocks=depth)) for depth in (1 << 16, 1))
    for free, tight in zip(
        full["access_raw"].column("causes").to_pylist(), bounded["access_raw"].column("causes").to_pylist(), strict=True
    ):
        free, tight = Counter(dict(free)), Counter(dict(tight))
        beyond = tight.pop("beyond", 0)
        assert sum(free.values()) == sum(tight.values()) + beyond
        assert all(tokens <= free[cause] for cause, tokens in tight.items())


@settings(max_examples=15, deadline=None, phases=PHASES)
@given(cases(), st.integers(0, 1000), st.integers(0, 7))
def test_cuts_and_restores_change_nothing(case: Case, seed: int, reload_every: int) -> None:
    stream = stream_of(case)
    whole, cut = run(stream), run(recut(stream, random.Random(seed)), reload_every=reload_every)
    assert whole.keys() == cut.keys()
    for table, expected in whole.items():
        drop = [name for name in ("offset",) if name in expected.schema.names]
        same(cut[table].drop_columns(drop), expected.drop_columns(drop), table)


def same(got: pa.Table, expected: pa.Table, table: str) -> None:
    assert got.schema == expected.schema, table
    if not got.equals(expected):
        a, b = got.to_pylist(), expected.to_pylist()
        first = next(i for i in range(len(a) + 1) if a[i : i + 1] != b[i : i + 1])
        raise AssertionError(f"{table}: {len(a)} and {len(b)} rows, first difference {a[first : first + 1]} / {b[first : first + 1]}")


def recut(stream: Stream, rng: random.Random) -> Stream:
    """The same rows in other records: batches split at random points, neighbours of different kinds swapped within the grace."""
    out: Stream = []
    for kind, batch in stream:
        start = 0
        while start < batch.num_rows:
            size = rng.randint(1, batch.num_rows - start)
            out.append((kind, batch.slice(start, size)))
            start += size
    for i in range(len(out) - 1):
        (kind, here), (other, there) = out[i], out[i + 1]
        apart_us = there.column("ts_us").to_numpy().max() - here.column("ts_us").to_numpy().min()
        if kind != other and apart_us < 4_000_000 and rng.random() < 0.3:
            out[i], out[i + 1] = out[i + 1], out[i]
    return out


def test_tables_agree_with_each_other() -> None:
    """Windows are sums of the raw rows: tokens per cause, hits, requests, reused plus cold blocks."""
    from analytics.fleet.emulator import FleetConfig
    from analytics.fleet.routers import RouterSpec

    case = Case(FleetConfig(instances=3, capacity_blocks=200), small_workload(5), RouterSpec("random"), ())
    rows = run(stream_of(case))
    raw = rows["access_raw"]
    by_cause: Counter[str] = Counter()
    for causes in raw.column("causes").to_pylist():
        by_cause.update(dict(causes))
    by_cause["hit"] = pa.compute.sum(raw.column("hit_tokens")).as_py()
    windows: Counter[str] = Counter()
    for cause, tokens in zip(rows["cause_1m"].column("cause").to_pylist(), rows["cause_1m"].column("tokens").to_pylist(), strict=True):
        windows[cause] += tokens
    assert +windows == +by_cause
    assert sum(windows.values()) == case.workload.prompt_tokens.sum()
    assert np.sum(rows["traffic_1m"].column("requests")) == len(case.workload)
    blocks = int(case.workload.offsets[-1])
    reuse = rows["reuse_1m"].to_pydict()
    for scope in ("fleet", "placed"):
        assert sum(n for n, s in zip(reuse["blocks"], reuse["scope"], strict=True) if s == scope) == blocks
    assert np.sum(rows["reuse_time_1m"].column("blocks")) == blocks
    chain_positions = sum(n * (n - 1) // 2 for n in np.diff(case.workload.offsets).tolist())
    assert sum(p for p, s in zip(reuse["positions"], reuse["scope"], strict=True) if s == "fleet") == chain_positions
    assert set(KINDS) == {"access", "residency", "instance"}
