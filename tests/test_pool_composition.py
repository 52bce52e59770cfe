"""Tenants in one shared LRU, from their separate histograms: beside the exact shared stack on real traces, slow oracles and closed forms.

The mixes: WEKA sessions, Mooncake conversation (C) and synthetic (S), RAGPulse (R), none of which has tenants: each stream is one (two
tenants), or is split by conversation (ten tenants, assigned). Times are scaled to one common hour; WEKA sessions start at random within
it. A block is a unit of capacity whatever it holds: 64 tokens (WEKA), 512 (Mooncake), a component (RAGPulse). Hashes are salted by tenant.
The truth is the stack distance of every block in the merged stream. Errors are absolute hit ratios over 20 log-spaced capacities from 1 %
to 100 % of the mix's distinct blocks, the worst tenant and capacity unless said otherwise. `pytest -s` shows the figures.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from analytics.pool import ReuseHistogram, solve
from analytics.pool_windows import NEAR_WINDOWS, PoolWindows, TenantWindows, compose, time_edges_s
from analytics.reuse.bins import N_BINS, edges_of
from analytics.reuse.chains import densify
from analytics.reuse.run_exact import RunStack
from ingest.chaining import mix64_int, scope_key
from ingest.sources import TraceRequest, read_trace

TRACES = Path(__file__).parents[1] / ".." / "shared" / "traces"
PERIOD_S = 3600.0
DISTANCE_EDGES = np.append(edges_of(np.arange(N_BINS, dtype=np.int32))[0], 1 << 41).astype(float)


@dataclass(frozen=True)
class Stream:
    """One tenant: `ts_us` int64[n], `offsets` int64[n+1], `hashes` uint64[m]."""

    ts_us: np.ndarray
    offsets: np.ndarray
    hashes: np.ndarray

    @classmethod
    def of(cls, at_s: Sequence[float], chains: Sequence[np.ndarray], tenant: int) -> Stream:
        order = np.argsort(np.asarray(at_s), kind="stable")
        ts_us = np.round(np.asarray(at_s)[order] * 1e6).astype(np.int64)
        kept = [np.asarray(chains[i], np.uint64) for i in order]
        offsets = np.concatenate([[0], np.cumsum([chain.size for chain in kept])]).astype(np.int64)
        return cls(ts_us, offsets, scope_key(np.concatenate(kept), mix64_int(tenant + 1)))

    @property
    def largest_request_ratio(self) -> float:
        return float(np.diff(self.offsets).max() / self.hashes.size)


class Mix:
    """Streams in one LRU: distances in the merged stream (-1 cold), the tenant of each, and their hit ratios at `capacities`."""

    def __init__(self, streams: Sequence[Stream]) -> None:
        self.streams = list(streams)
        tenant = np.repeat(np.arange(len(streams)), [s.ts_us.size for s in streams])
        ts_us = np.concatenate([s.ts_us for s in streams])
        order = np.argsort(ts_us, kind="stable")
        chains = [chain for s in streams for chain in np.split(s.hashes, s.offsets[1:-1])]
        self.chains, self.tenants = [chains[i] for i in order], tenant[order]
        self.offsets = np.concatenate([[0], np.cumsum([chain.size for chain in self.chains])]).astype(np.int64)
        hashes = np.concatenate(self.chains)
        self.distinct = densify(hashes)[1]
        self.distances, _ = RunStack().touch(ts_us[order], self.offsets, hashes).per_block()
        self.of_block = np.repeat(self.tenants, np.diff(self.offsets))
        self.capacities = np.unique(np.geomspace(0.01 * self.distinct, self.distinct, 20).round().astype(np.int64))
        self.blocks = np.bincount(self.of_block, minlength=len(streams))

    def hit_ratio(self) -> np.ndarray:
        """The truth, float64[tenants, capacities]."""
        rows = [np.sort(self.distances[(self.of_block == i) & (self.distances >= 0)]) for i in range(len(self.streams))]
        return np.array([np.searchsorted(row, self.capacities) / n for row, n in zip(rows, self.blocks, strict=True)])

    def error(self, predicted: np.ndarray) -> np.ndarray:
        return np.asarray(np.abs(predicted - self.hit_ratio()))


def windows_of(stream: Stream, window_s: float, known: str) -> TenantWindows:
    """What is kept of one tenant alone: the joint histogram, its two marginals as the store has them, or reuse times only."""
    count = math.ceil(PERIOD_S / window_s)
    runs = RunStack().touch(stream.ts_us, stream.offsets, stream.hashes)
    joint = TenantWindows.of_runs(runs, np.minimum((stream.ts_us / 1e6 // window_s).astype(np.int64), count - 1), count)
    times = joint.times(time_edges_s(PERIOD_S).size - 1)
    if known == "joint":
        return joint
    if known == "times":
        return TenantWindows.of_times(times, joint.cold_blocks)
    assert joint.distance_from is not None
    bins = np.searchsorted(DISTANCE_EDGES, joint.distance_from)
    distances = np.zeros((count, int(bins.max()) + 1))
    np.add.at(distances, (joint.window, bins), joint.blocks)
    return TenantWindows.of_tables(times, joint.cold_blocks, distances, DISTANCE_EDGES[: distances.shape[1] + 1])


def composed(mix: Mix, window_s: float, known: str) -> PoolWindows:
    tenants = [windows_of(stream, window_s, known) for stream in mix.streams]
    return compose(tenants, time_edges_s(PERIOD_S), window_s, mix.capacities)


# ---------------------------------------------------------------- the mixes


@lru_cache(maxsize=8)
def requests(name: str) -> list[TraceRequest]:
    path, dialect = {
        "C": ("mooncake/conversation_trace.jsonl.zst", "mooncake"),
        "S": ("mooncake/synthetic_trace.jsonl.zst", "mooncake"),
        "R": ("ragpulse/0_trace.jsonl", "ragpulse"),
    }[name]
    if not (TRACES / path).exists():
        pytest.skip(f"{TRACES / path} is absent")
    return list(read_trace([TRACES / path], dialect))


@lru_cache(maxsize=1)
def sessions() -> dict[str, list[TraceRequest]]:
    path = TRACES / "weka-claude-code" / "traces_710.tar.zst"
    if not path.exists():
        pytest.skip(f"{path} is absent")
    found: dict[str, list[TraceRequest]] = {}
    for request in read_trace([path], "weka", order="session", limit=6000):
        found.setdefault(request.parent_session or request.session or "", []).append(request)
    return found


def size_of(request: TraceRequest, unit: str) -> int:
    return len(request.chain) if unit == "blocks" else 1


def weka(tenant: int, amount: float, unit: str, part: tuple[int, int] = (0, 1)) -> Stream:
    """Sessions drawn until `amount` of `unit` fall into the period; `part` (i, n) limits them to every n-th."""
    rng, rows, total = np.random.default_rng(tenant), list[tuple[float, np.ndarray]](), 0
    for name in rng.permutation(sorted(sessions())[part[0] :: part[1]]):
        session = sessions()[name]
        shift = rng.random() * 0.8 * PERIOD_S - session[0].arrived_at_s
        inside = [r for r in session if shift + r.arrived_at_s < PERIOD_S]
        size = sum(size_of(r, unit) for r in inside)
        if total + size > 1.2 * amount:
            continue
        rows += [(shift + r.arrived_at_s, r.chain) for r in inside]
        total += size
        if total >= amount:
            break
    return Stream.of([row[0] for row in rows], [row[1] for row in rows], tenant)


def prefix(name: str, tenant: int, amount: float, unit: str, part: tuple[int, int] = (0, 1)) -> Stream:
    """The trace's first requests until `amount` of `unit`, scaled to the period; `part` (i, n) limits them to conversations i of n."""
    mine = [r for r in requests(name) if len(r.chain) and mix64_int(int(r.chain[min(1, len(r.chain) - 1)])) % part[1] == part[0]]
    upto = np.cumsum([size_of(r, unit) for r in mine])
    mine = mine[: int(np.searchsorted(upto, amount)) + 1]
    scale = 0.9999 * PERIOD_S / (mine[-1].arrived_at_s - mine[0].arrived_at_s)
    return Stream.of([(r.arrived_at_s - mine[0].arrived_at_s) * scale for r in mine], [r.chain for r in mine], tenant)


def stream(name: str, tenant: int, amount: float, unit: str, part: tuple[int, int] = (0, 1)) -> Stream:
    return weka(tenant, amount, unit, part) if name == "W" else prefix(name, tenant, amount, unit, part)


LARGEST = {
    "blocks": {"W": 2_000_000, "C": 288_500, "S": 121_877, "R": 71_583},
    "requests": {"W": 1500, "C": 12_031, "S": 3993, "R": 7106},
}
PAIRS = ("WC", "WS", "WR", "CS", "CR", "SR")
TEN = [("W", (i, 3)) for i in range(3)] + [("C", (i, 3)) for i in range(3)] + [(n, (i, 2)) for n in "SR" for i in range(2)]


def two(pair: str, rate: str, unit: str) -> Mix:
    """Two traces at rates 1:1, 10:1 or 1:10, in blocks or in requests."""
    shares = [float(part) for part in rate.split(":")]
    scale = min(LARGEST[unit][name] / share for name, share in zip(pair, shares, strict=True))
    return Mix([stream(name, i, scale * share, unit) for i, (name, share) in enumerate(zip(pair, shares, strict=True))])


def ten(rate: str, unit: str) -> Mix:
    """Ten tenants (assigned): alike, or at rates that rise tenfold, dealt out in a fixed order."""
    mean = 600 if unit == "requests" else 60_000
    shares = np.ones(10) if rate == "1:1" else np.geomspace(1 / 3, 10 / 3, 10)[[9, 4, 0, 6, 1, 8, 2, 7, 3, 5]]
    return Mix([stream(name, i, mean * shares[i], unit, part) for i, (name, part) in enumerate(TEN)])


def report(label: str, mix: Mix, errors: np.ndarray, note: str = "") -> None:
    worst = " ".join(f"{value:.4f}" for value in errors.max(axis=1))
    print(
        f"\n{label}: {mix.blocks.tolist()} blocks, {mix.distinct} distinct: mean {errors.mean():.4f}, worst by tenant {worst} {note}",
        end="",
    )


# ---------------------------------------------------------------- the truth


def simulated_hits(mix: Mix, capacity: int) -> np.ndarray:
    """Block hits of each tenant in a plain LRU: requests are looked up as a whole, then touched leaf first."""
    cache, hits = OrderedDict[int, None](), np.zeros(len(mix.streams), np.int64)
    for tenant, chain in zip(mix.tenants, mix.chains, strict=True):
        blocks = chain.tolist()
        hits[tenant] += sum(block in cache for block in blocks)
        for block in reversed(blocks):
            cache.pop(block, None)
            cache[block] = None
            if len(cache) > capacity:
                cache.popitem(last=False)
    return hits


@pytest.mark.traces
def test_the_truth_equals_a_plain_simulation() -> None:
    mix = two("CS", "1:1", "blocks")
    for k in (3, 12):
        assert (mix.hit_ratio()[:, k] * mix.blocks).round().tolist() == simulated_hits(mix, int(mix.capacities[k])).tolist()


# ---------------------------------------------------------------- real mixes


@pytest.mark.traces
@pytest.mark.parametrize("pair", ["WC", "SR"])
def test_two_tenants_within_a_point_with_windows_of_ten_seconds(pair: str) -> None:
    """The quick part of the grid below: every trace once."""
    mix = two(pair, "1:1", "blocks")
    errors = mix.error(composed(mix, 10.0, "joint").hit_ratio())
    report(f"{pair} 1:1 blocks", mix, errors)
    assert errors.max() <= 0.01


@pytest.mark.traces
@pytest.mark.slow
@pytest.mark.parametrize("unit", ["blocks", "requests"])
@pytest.mark.parametrize("rate", ["1:1", "10:1", "1:10"])
@pytest.mark.parametrize("pair", PAIRS)
def test_two_tenants_within_a_point(pair: str, rate: str, unit: str) -> None:
    """Every tenant at every capacity, with windows of 2 s, from joint histograms and from their two marginals as the store keeps them."""
    mix = two(pair, rate, unit)
    for known in ("joint", "tables"):
        errors = mix.error(composed(mix, 2.0, known).hit_ratio())
        report(f"{pair} {rate} {unit} {known}", mix, errors)
        assert errors.max() <= 0.01


@pytest.mark.traces
@pytest.mark.slow
@pytest.mark.parametrize("unit", ["blocks", "requests"])
@pytest.mark.parametrize("rate", ["1:1", "1:10"])
def test_ten_assigned_tenants_within_a_point(rate: str, unit: str) -> None:
    """At 1 % of the distinct blocks such a pool holds about one WEKA request and is 3 to 20 s old: windows of 1 s, and of 0.5 s at rates
    in blocks, where a WEKA tenant has 30 to 170 requests, one of them up to 10 % of its blocks.
    """
    mix = ten(rate, unit)
    errors = mix.error(composed(mix, 1.0 if unit == "requests" else 0.5, "joint").hit_ratio())
    report(f"ten tenants (assigned) {rate} {unit}", mix, errors)
    assert errors.max() <= 0.01


@pytest.mark.traces
@pytest.mark.slow
@pytest.mark.parametrize("window_s", [10.0, 60.0, 300.0])
def test_what_coarser_windows_and_less_knowledge_cost(window_s: float) -> None:
    """Figures by window and by what is known of the own distances.

    What holds for the windows that are stored: where the pool is at least two windows old, two points; on average over all capacities, one.
    """
    for label, mix in (("WS 10:1", two("WS", "10:1", "blocks")), ("CS 1:1", two("CS", "1:1", "blocks")), ("ten", ten("1:1", "requests"))):
        for known in ("joint", "tables", "times"):
            pool = composed(mix, window_s, known)
            errors = mix.error(pool.hit_ratio())
            old = np.median(pool.age_s[pool.age_s.shape[0] // 4 :], axis=0) >= 2 * window_s
            report(f"{label} {window_s:.0f} s {known}", mix, errors, f"| where the age is two windows: {errors[:, old].max():.4f}")
            assert known == "times" or (errors[:, old].max() <= 0.02 and errors.mean() <= 0.01)


@pytest.mark.traces
@pytest.mark.slow
def test_the_steady_state_is_two_points_off_at_most_on_short_requests_and_far_off_on_sessions() -> None:
    """One characteristic time from whole histograms: good on Mooncake and RAGPulse; WEKA's long requests come and go by session."""
    edges = time_edges_s(PERIOD_S)
    for pair in ("CR", "CS", "SR", "WC"):
        mix = two(pair, "1:1", "blocks")
        alone = [windows_of(s, PERIOD_S, "times") for s in mix.streams]
        whole = [ReuseHistogram(edges[:-1], edges[1:], one.times(edges.size - 1)[0], float(one.cold_blocks[0]), PERIOD_S) for one in alone]
        errors = mix.error(np.array([solve(whole, float(c)).hit_ratio for c in mix.capacities]).T)
        report(f"{pair} 1:1 steady state", mix, errors)
        assert errors.max() > 0.1 if "W" in pair else errors.max() <= 0.02


# ---------------------------------------------------------------- oracles


def oracle_distinct(histograms: Sequence[ReuseHistogram], window_s: float, window: int, start: float, end: float) -> float:
    """Distinct blocks touched in (start, end), one window after the other, by the occupancy of `analytics.pool`."""

    def first(at: int, since: float) -> float:
        hi, lo = min((at + 1) * window_s, end), max(at * window_s, since)
        return histograms[at].occupancy_blocks(hi - since) - histograms[at].occupancy_blocks(lo - since) if hi > lo else 0.0

    start = max(start, 0.0)
    oldest = min(int(start / window_s), window)
    if window - oldest <= NEAR_WINDOWS:
        return sum(first(at, start) for at in range(oldest, window + 1))
    share = start / window_s - oldest
    near, far = (sum(first(at, edge * window_s) for at in range(edge, window)) for edge in (oldest + 1, oldest))
    return first(window, start) + (1 - share) * far + share * near


def oracle(tenants: Sequence[TenantWindows], edges: np.ndarray, window_s: float, capacities: np.ndarray) -> np.ndarray:
    """Hits [tenants, windows, capacities], cell by cell."""
    points = [((0.25 * p + 0.125) % 1, (0.7549 * p + 0.5) % 1, (0.5698 * p + 0.5) % 1) for p in range(4)]
    out = np.zeros((len(tenants), tenants[0].windows, capacities.size))
    kept = [
        [ReuseHistogram(edges[:-1], edges[1:], row, float(cold), window_s) for row, cold in zip(t.times(edges.size - 1), t.cold_blocks,
         strict=True)] for t in tenants
    ]  # fmt: skip
    for i, tenant in enumerate(tenants):
        known = tenant.distance_from is not None
        for n in range(tenant.blocks.size):
            for f, g, h in points:
                window, at = int(tenant.window[n]), int(tenant.time_bin[n])
                end, reuse = (window + f) * window_s, edges[at] + g * (edges[at + 1] - edges[at])
                distance = 0.0
                if tenant.distance_from is not None and tenant.distance_to is not None:
                    distance = tenant.distance_from[n] + h * (tenant.distance_to[n] - 1 - tenant.distance_from[n])
                for j in range(len(tenants)):
                    if j != i or not known:
                        distance += oracle_distinct(kept[j], window_s, window, end - reuse, end)
                for k, capacity in enumerate(capacities):
                    out[i, window, k] += tenant.blocks[n] / 4 * (distance < capacity)
    return out


@st.composite
def pools(draw: st.DrawFn) -> tuple[list[TenantWindows], np.ndarray, float, np.ndarray]:
    windows, bins = draw(st.integers(1, 14)), draw(st.integers(1, 6))
    window_s = draw(st.sampled_from([0.7, 1.0, 5.3]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    edges = np.concatenate([[0.0], np.cumsum(rng.random(bins) * 2.5 * window_s * windows / bins + 0.01)])
    tenants = []
    for _ in range(draw(st.integers(1, 3))):
        times = rng.integers(0, 4, (windows, bins)) * (rng.random((windows, bins)) < 0.4) * 1.37
        cold = rng.integers(0, 6, windows).astype(float)
        distances = np.where(rng.random((windows, 4)) < 0.5, rng.random((windows, 4)), 0.0)
        distances[:, 0] += 0.1
        known = draw(st.booleans())
        edges_blocks = np.array([0.0, 1, 5, 20, 60])
        tables = TenantWindows.of_tables(times, cold, distances, edges_blocks)
        tenants.append(tables if known else TenantWindows.of_times(times, cold))
    return tenants, edges, window_s, 120 * rng.random(draw(st.integers(1, 5)))


@settings(deadline=None, max_examples=60)
@given(pools())
def test_the_kernel_equals_its_oracle(pool: tuple[list[TenantWindows], np.ndarray, float, np.ndarray]) -> None:
    """At capacities that no distance equals by design, so that rounding cannot move one across."""
    tenants, edges, window_s, capacities = pool
    assert compose(tenants, edges, window_s, capacities).hit_blocks == pytest.approx(oracle(tenants, edges, window_s, capacities), abs=1e-9)


@st.composite
def spaced(draw: st.DrawFn) -> list[tuple[int, list[int]]]:
    """Up to twelve requests: tenant, and a chain of a small prefix tree (its ids say their path)."""
    out = []
    for _ in range(draw(st.integers(1, 12))):
        branch = draw(st.integers(0, 2))
        out.append((draw(st.integers(0, 2)), [branch * 10 + depth for depth in range(draw(st.integers(1, 4)))]))
    return out


@settings(deadline=None, max_examples=150)
@given(spaced())
def test_composed_equals_the_shared_stack_where_windows_and_bins_tell_all_requests_apart(rows: list[tuple[int, list[int]]]) -> None:
    """Requests 10 ms apart, windows of 1 ms and bins of at most 2 ms: nothing is left to average, so the model must be exact."""
    at_s = np.arange(len(rows)) * 0.010 + 0.0005
    mine = [[k for k, (tenant, _) in enumerate(rows) if tenant == i] for i in range(3)]
    streams = [Stream.of(at_s[ks], [np.array(rows[k][1], np.uint64) for k in ks], i) for i, ks in enumerate(mine) if ks]
    mix = Mix(streams)
    mix.capacities = np.arange(0, mix.distinct + 2)
    tenants = [TenantWindows.of_runs(RunStack().touch(s.ts_us, s.offsets, s.hashes), s.ts_us // 1000, 10 * len(rows)) for s in streams]
    result = compose(tenants, time_edges_s(0.2), 0.001, mix.capacities - 0.5)  # as good for whole distances, and rounding cannot matter
    assert result.hit_ratio() == pytest.approx(mix.hit_ratio(), abs=1e-9)
    assert result.blocks.sum(axis=1).tolist() == mix.blocks.tolist()


# ---------------------------------------------------------------- closed forms


def loop(blocks_per_window: float, reuse_bin: int, bins: int, windows: int) -> tuple[np.ndarray, np.ndarray]:
    """Reuse times of a loop over its blocks, already going round."""
    times = np.zeros((windows, bins))
    times[:, reuse_bin] = blocks_per_window
    return times, np.zeros(windows)


@pytest.mark.parametrize("known", [False, True])
def test_two_loops_share_a_pool(known: bool) -> None:
    """300 blocks round in 3 s and 1,000 in 10 s, both at 100 blocks/s: a block of the first comes back after 300 of its own and 300 of
    the other, one of the second after all 1,300."""
    edges = np.array([0, 2.999, 3.001, 9.999, 10.001])
    first, second = loop(100.0, 1, 4, 40), loop(100.0, 3, 4, 40)
    tenants = [TenantWindows.of_times(*first), TenantWindows.of_times(*second)]
    if known:
        tenants = [
            TenantWindows.of_tables(*first, np.full((40, 1), 100.0), np.array([299.0, 300.0])),
            TenantWindows.of_tables(*second, np.full((40, 1), 100.0), np.array([999.0, 1000.0])),
        ]
    result = compose(tenants, edges, 1.0, [590, 610, 1290, 1310])
    assert result.hit_ratio_by_window()[:, 20:].mean(axis=1) == pytest.approx(np.array([[0, 1, 1, 1], [0, 0, 0, 1]]))


def test_age_of_a_pool_of_blocks_that_never_come_back() -> None:
    """50 new blocks a second: nothing is evicted before 200 of them, and then the oldest of 200 is 4 s old."""
    tenant = TenantWindows.of_times(np.zeros((10, 2)), np.full(10, 50.0))
    result = compose([tenant], np.array([0.0, 1.0, 2.0]), 1.0, [1000, 200])
    assert result.age_s[:, 1].tolist() == pytest.approx([math.inf] * 4 + [4.0] * 6)
    assert np.isinf(result.age_s[:, 0]).all()
    assert not result.hit_ratio().any() and result.blocks.tolist() == [[50.0] * 10]


def test_a_pool_warms_up() -> None:
    """A block is served although the pool could not hold a period of its reuse time, while the pool is not full yet."""
    times, cold = np.zeros((8, 2)), np.full(8, 40.0)
    times[2, 1], times[7, 1] = 10.0, 10.0
    result = compose([TenantWindows.of_times(times, cold)], np.array([0.0, 1.9, 2.1]), 1.0, [100])
    assert result.hit_ratio_by_window()[0, :, 0].tolist() == pytest.approx([0, 0, 0.2, 0, 0, 0, 0, 0.2])
    result = compose([TenantWindows.of_times(times, cold)], np.array([0.0, 1.9, 2.1]), 1.0, [70])
    assert result.hit_ratio_by_window()[0, :, 0].tolist() == pytest.approx([0, 0, 0, 0, 0, 0, 0, 0])


def test_tables_give_the_longer_reuse_time_the_greater_distance() -> None:
    times, distances = np.array([[3.0, 0, 5.0], [0, 2.0, 0]]), np.array([[4.0, 4.0], [0.0, 1.0]])
    cells = TenantWindows.of_tables(times, np.array([1.0, 0.0]), distances, np.array([0.0, 10.0, 20.0]))
    assert cells.distance_from is not None
    rows = list(zip(cells.window, cells.time_bin, cells.distance_from, cells.blocks.round(6), strict=True))
    assert rows == [(0, 0, 0, 3), (0, 2, 0, 1), (0, 2, 10, 4), (1, 1, 10, 2)]
    assert cells.blocks_by_window().tolist() == [9.0, 2.0] and cells.times(3).tolist() == times.tolist()


def failing() -> list[tuple[Callable[[], object], str]]:
    one = TenantWindows.of_times(np.ones((2, 2)), np.ones(2))
    edges = np.array([0.0, 1, 2])
    return [
        (lambda: compose([], edges, 1.0, [1]), "tenants"),
        (lambda: compose([one, TenantWindows.of_times(np.ones((3, 2)), np.ones(3))], edges, 1.0, [1]), "same windows"),
        (lambda: compose([one], edges, 0.0, [1]), "positive"),
        (lambda: compose([one], edges[:2], 1.0, [1]), "outside"),
        (lambda: TenantWindows.of_times(np.ones((2, 2)), np.ones(3)), "fit"),
        (lambda: TenantWindows.of_tables(np.ones((2, 2)), np.ones(2), np.zeros((2, 1)), np.array([0.0, 1.0])), "fit"),
    ]


def test_what_does_not_fit_is_refused() -> None:
    for call, message in failing():
        with pytest.raises(ValueError, match=message):
            call()
