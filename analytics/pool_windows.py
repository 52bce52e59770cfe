"""What several tenants do in one shared LRU, window by window, from each tenant's own histograms alone: no steady state is assumed.

A block asked for at s with reuse time r is served by an LRU of c blocks iff fewer than c distinct blocks were touched within (s - r, s).
Those of its own tenant are its own stack distance. Those of a neighbour j are all touches in that interval whose own reuse time reaches
back before s - r, the first touches in it, which j's reuse times by window tell: D_j(s, r). So the shared distance is
d + sum_{j != i} D_j(s, r), for every capacity at once. Bursts, drift and the warming up of an empty cache are in it, since nothing is
averaged over more than a window; within one, touches are taken as spread evenly. Without own distances the sum runs over all tenants,
and a block is served iff its reuse time is at most the pool's age A(s), where sum_j D_j(s, A) = c. Sources: Hu et al., AET, ATC 2016, for
composing by reuse time; by window and with own distances is this project's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

import numba as nb
import numpy as np
import numpy.typing as npt

from analytics.reuse.bins import N_BINS, bins_of, edges_of
from analytics.reuse.run_exact import Runs

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]

# Where in its window, time bin and distance bin each quarter of a cell is taken to lie: a low-discrepancy set, so that no two agree.
_POINTS = (np.arange(4)[:, None] * np.array([0.25, 0.7549, 0.5698]) + [0.125, 0.5, 0.5]) % 1.0
# Intervals over more windows than this read the touches since a window's edge from a table, linearly between edges.
NEAR_WINDOWS = 8


@dataclass(frozen=True)
class TenantWindows:
    """Blocks of one tenant by window, reuse time and own stack distance: a sparse joint histogram.

    One row a cell: `window` int64[n], rising · `time_bin` int64[n] · `distance_from`, `distance_to` float64[n], own distances (half-open
    bin of whole numbers), or None where they are not known · `blocks` float64[n]. `cold_blocks` float64[windows] were never seen before.
    """

    window: I64
    time_bin: I64
    distance_from: F64 | None
    distance_to: F64 | None
    blocks: F64
    cold_blocks: F64

    @property
    def windows(self) -> int:
        """Number of windows, empty ones included."""
        return int(self.cold_blocks.size)

    def blocks_by_window(self) -> F64:
        """All block accesses, float64[windows]."""
        return np.bincount(self.window, self.blocks, self.windows) + self.cold_blocks

    def times(self, bins: int) -> F64:
        """Reuse-time histogram, float64[windows, bins]."""
        flat = np.bincount(self.window * bins + self.time_bin, self.blocks, self.windows * bins).astype(np.float64)
        return flat.reshape(self.windows, bins)

    @classmethod
    def of_times(cls, blocks: F64, cold_blocks: F64) -> TenantWindows:
        """From reuse times alone, float64[windows, bins]: the pool's age decides.

        Too good or too bad by half a request's blocks of capacity, since an access does not stand at an arbitrary moment of its own
        tenant's stream. Raises `ValueError` for shapes that do not fit.
        """
        _check(blocks, cold_blocks)
        window, time_bin = np.nonzero(blocks)
        return cls(window, time_bin, None, None, blocks[window, time_bin], cold_blocks)

    @classmethod
    def of_tables(cls, blocks: F64, cold_blocks: F64, distances: F64, distance_edges: F64) -> TenantWindows:
        """From reuse times float64[windows, bins] and own stack distances float64[windows, k] (edges float64[k+1]) of the same accesses.

        Within a window the longer reuse time is given the greater distance, as it is at any one moment of a stack; the finer the window,
        the nearer to the joint histogram. Distances are scaled to the windows' reuse times. Raises `ValueError` for shapes that do not
        fit, or a window with reuse times and no distances. Cost: O(windows * (bins + k)).
        """
        _check(blocks, cold_blocks)
        reused, known = blocks.sum(axis=1), distances.sum(axis=1)
        if distances.shape != (blocks.shape[0], distance_edges.size - 1) or (known[reused > 0] <= 0).any():
            raise ValueError(f"distances of shape {distances.shape} do not fit reuse times of shape {blocks.shape} and their edges")
        scale = np.divide(reused, known, out=np.zeros_like(reused), where=known > 0)
        upto = [np.cumsum(blocks.ravel()), np.cumsum((distances * scale[:, None]).ravel())]
        upto[1][-1] = upto[0][-1]
        steps = np.unique(np.concatenate([[0.0], *upto]).round(6))
        middle, weight = (steps[1:] + steps[:-1]) / 2, np.diff(steps)
        at_time, at_distance = (np.minimum(np.searchsorted(sums, middle), sums.size - 1) for sums in upto)
        window, time_bin = np.divmod(at_time, blocks.shape[1])
        bin_ = at_distance % distances.shape[1]
        return cls(window, time_bin, distance_edges[bin_], distance_edges[bin_ + 1], weight, cold_blocks)

    @classmethod
    def of_runs(cls, runs: Runs, window: I64, windows: int) -> TenantWindows:
        """The joint histogram of one exact stack of the tenant alone, in the bins of `time_edges_s` and of `analytics.reuse.bins`.

        `window` int64[requests], rising, of each request of the call that gave `runs`. Cost: one sort of the reused blocks.
        """
        distance, age_us = runs.per_block()
        at = np.repeat(window[runs.request], runs.length)
        reused = distance >= 0
        keys = (at[reused] * N_BINS + bins_of(age_us[reused] // 1000)) * N_BINS + bins_of(distance[reused])
        cells, count = np.unique(keys, return_counts=True)
        lo, hi = edges_of((cells % N_BINS).astype(np.int32))
        rest = cells // N_BINS
        cold = np.bincount(at[~reused], minlength=windows).astype(np.float64)
        return cls(rest // N_BINS, rest % N_BINS, lo.astype(np.float64), hi.astype(np.float64), count.astype(np.float64), cold)


@dataclass(frozen=True)
class PoolWindows:
    """A shared LRU by window: `hit_blocks` float64[tenants, windows, capacities] of `blocks` float64[tenants, windows].

    `age_s` float64[windows, capacities]: at the window's end, seconds since the last touch of the oldest block held, inf while all fits.
    """

    hit_blocks: F64
    blocks: F64
    age_s: F64

    def hit_ratio(self) -> F64:
        """Block hit ratio over all windows, float64[tenants, capacities]; 0 for a tenant without accesses."""
        return self.hit_blocks.sum(axis=1) / np.maximum(self.blocks.sum(axis=1), 1e-12)[:, None]

    def hit_ratio_by_window(self) -> F64:
        """Block hit ratio of each window, float64[tenants, windows, capacities]; NaN in windows without accesses."""
        blocks = self.blocks[:, :, None]
        return np.divide(self.hit_blocks, blocks, out=np.full(self.hit_blocks.shape, np.nan), where=blocks > 0)


def time_edges_s(longest_s: float) -> F64:
    """Edges in seconds of the bins in which reuse times are stored, as many as reach `longest_s`: float64[bins+1], from 0."""
    lo, _ = edges_of(np.arange(N_BINS, dtype=np.int32))
    return lo[: int(np.searchsorted(lo, longest_s * 1000)) + 2] / 1000.0


def compose(tenants: Sequence[TenantWindows], edges_s: F64, window_s: float, capacities_blocks: Sequence[int] | I64) -> PoolWindows:
    """Hits of every tenant in one LRU of each capacity that they share, by window, from their separate histograms.

    `tenants` cover the same windows of `window_s` seconds, one after another; `edges_s` float64[bins+1] from 0 of their time bins;
    `capacities_blocks` in blocks, whatever a block of each tenant holds. The cache is empty before the first window: of a range cut out of
    a longer stream, windows younger than the age are too good. With windows of 1 to 2 s and own distances, within 0.01 of the exact shared
    stack on the tests' mixes and 0.011 on other draws of them, for tenants of 100 requests or more; with longer ones, within 0.02 where
    the pool's age is at least two of them. What is left is where in its window a request stood, which matters as long as the pool holds
    few requests (figures: `tests/test_pool_composition.py`).
    Raises `ValueError` without a tenant, for unequal windows, a time bin outside the edges, or a window that is not positive.
    Cost: O(windows^2 + cells) a tenant, memory O(windows * bins).
    """
    if not tenants or len({tenant.windows for tenant in tenants}) != 1 or window_s <= 0:
        raise ValueError("there must be tenants, over the same windows, of positive length")
    bins = edges_s.size - 1
    if any(tenant.time_bin.size and int(tenant.time_bin.max()) >= bins for tenant in tenants):
        raise ValueError(f"a time bin lies outside the {bins} that edges_s has")
    capacities = np.asarray(capacities_blocks, np.float64)
    order = np.argsort(capacities, kind="stable")
    times = [tenant.times(bins) for tenant in tenants]
    blocks, cold = reduce(np.add, times), reduce(np.add, [tenant.cold_blocks for tenant in tenants])
    hits = np.zeros((len(tenants), tenants[0].windows, capacities.size))
    for i, tenant in enumerate(tenants):
        own = tenant.distance_from is not None
        rest = _survival(blocks - times[i], cold - tenant.cold_blocks, edges_s) if own else _survival(blocks, cold, edges_s)
        hits[i][:, order] = _hits(tenant, *rest, edges_s, window_s, capacities[order])
    age_s = np.empty((tenants[0].windows, capacities.size))
    age_s[:, order] = _ages(*_survival(blocks, cold, edges_s), edges_s, window_s, capacities[order])
    return PoolWindows(hits, np.stack([tenant.blocks_by_window() for tenant in tenants]), age_s)


def _check(blocks: F64, cold_blocks: F64) -> None:
    if blocks.ndim != 2 or cold_blocks.shape != blocks.shape[:1]:
        raise ValueError(f"reuse times of shape {blocks.shape} and cold blocks of shape {cold_blocks.shape} do not fit")


def _survival(blocks: F64, cold: F64, edges_s: F64) -> tuple[F64, F64]:
    """Accesses whose reuse time exceeds each edge, and the integral of that from 0 to the edge: float64[windows, bins+1] each."""
    longer = np.concatenate([np.zeros((cold.size, 1)), np.cumsum(blocks[:, ::-1], axis=1)], axis=1)[:, ::-1] + cold[:, None]
    area = (longer[:, 1:] + longer[:, :-1]) / 2 * np.diff(edges_s)
    return np.ascontiguousarray(longer), np.concatenate([np.zeros((cold.size, 1)), np.cumsum(area, axis=1)], axis=1)


def _hits(tenant: TenantWindows, longer: F64, area: F64, edges_s: F64, window_s: float, capacities: F64) -> F64:
    starts = np.searchsorted(tenant.window, np.arange(tenant.windows + 1))
    nothing = np.zeros(tenant.blocks.size)
    lo = nothing if tenant.distance_from is None else tenant.distance_from
    # The greatest whole number of a bin [lo, hi) is hi - 1.
    hi = nothing if tenant.distance_to is None else tenant.distance_to - 1.0
    served = np.zeros((tenant.windows, capacities.size + 1))
    _serve(longer, area, edges_s, window_s, starts, tenant.time_bin, lo, hi, tenant.blocks, _POINTS, capacities, served)
    return np.cumsum(served[:, :-1], axis=1)


@nb.njit(cache=True, nogil=True)
def _lived_in(longer: F64, area: F64, edges: F64, window: int, at: int, time: float) -> float:
    """Integral over [0, time] of the window's accesses with a longer reuse time, uniform within a bin; `time` lies in bin `at`."""
    inside = time - edges[at]
    if at == edges.size - 1:
        return area[window, at] + longer[window, at] * inside
    slope = (longer[window, at + 1] - longer[window, at]) / (edges[at + 1] - edges[at])
    return area[window, at] + inside * (longer[window, at] + slope * inside / 2)


@nb.njit(cache=True, nogil=True)
def _lived(longer: F64, area: F64, edges: F64, window: int, time: float) -> float:
    if time <= 0.0:
        return 0.0
    return _lived_in(longer, area, edges, window, int(np.searchsorted(edges, time, side="right")) - 1, time)


@nb.njit(cache=True, nogil=True)
def _first_touches(longer: F64, area: F64, edges: F64, window_s: float, window: int, start: float, end: float) -> float:
    """Touches of one window up to `end` whose block was not touched in (start, its touch): distinct blocks that the window adds."""
    hi, lo = min((window + 1) * window_s, end), max(window * window_s, start)
    if hi <= lo:
        return 0.0
    return (_lived(longer, area, edges, window, hi - start) - _lived(longer, area, edges, window, lo - start)) / window_s


@nb.njit(cache=True, nogil=True)
def _distinct(longer: F64, area: F64, edges: F64, window_s: float, since: F64, window: int, start: float, end: float) -> float:
    """Distinct blocks touched in (start, end), `end` within `window`; `since` holds those from each edge to the start of `window`."""
    start = max(start, 0.0)
    first = min(int(start / window_s), window)
    total = _first_touches(longer, area, edges, window_s, window, start, end)
    if window - first > NEAR_WINDOWS:
        share = start / window_s - first
        return total + since[first] * (1 - share) + since[first + 1] * share
    for earlier in range(first, window):
        total += _first_touches(longer, area, edges, window_s, earlier, start, end)
    return total


@nb.njit(cache=True, nogil=True)
def _advance(longer: F64, area: F64, edges: F64, window_s: float, since: F64, window: int) -> None:
    """Let `since` reach to the end of `window`: from each edge, the window adds its first touches. Times rise, so bins are walked."""
    at, before = 0, 0.0
    for edge in range(window, -1, -1):
        time = (window + 1 - edge) * window_s
        while at < edges.size - 1 and edges[at + 1] <= time:
            at += 1
        upto = _lived_in(longer, area, edges, window, at, time)
        since[edge] += (upto - before) / window_s
        before = upto


@nb.njit(cache=True, nogil=True)
def _serve(
    longer: F64, area: F64, edges: F64, window_s: float, starts: I64, time_bin: I64, lo: F64, hi: F64, blocks: F64, points: F64,
    capacities: F64, served: F64,
) -> None:  # fmt: skip
    """Add every cell's blocks at the smallest capacity (ascending) that serves them, column `capacities.size` for none."""
    since = np.zeros(starts.size)
    for window in range(starts.size - 1):
        for cell in range(starts[window], starts[window + 1]):
            at = time_bin[cell]
            for p in range(points.shape[0]):
                end = (window + points[p, 0]) * window_s
                reuse = edges[at] + points[p, 1] * (edges[at + 1] - edges[at])
                distance = lo[cell] + points[p, 2] * (hi[cell] - lo[cell])
                distance += _distinct(longer, area, edges, window_s, since, window, end - reuse, end)
                served[window, np.searchsorted(capacities, distance, side="right")] += blocks[cell] / points.shape[0]
        _advance(longer, area, edges, window_s, since, window)


@nb.njit(cache=True, nogil=True)
def _ages(longer: F64, area: F64, edges: F64, window_s: float, capacities: F64) -> F64:
    """Age of the pool at every window's end: the longest interval before it that touched no more than each capacity."""
    windows = longer.shape[0]
    ages, since = np.full((windows, capacities.size), np.inf), np.zeros(windows + 1)
    for window in range(windows):
        _advance(longer, area, edges, window_s, since, window)
        edge = 0
        for k in range(capacities.size - 1, -1, -1):
            if since[0] > capacities[k]:
                while since[edge + 1] > capacities[k]:
                    edge += 1
                share = (since[edge] - capacities[k]) / (since[edge] - since[edge + 1])
                ages[window, k] = (window + 1 - edge - share) * window_s
    return ages
