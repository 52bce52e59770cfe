"""Algebra of curves: merge, decay, hull, value of capacity, knee and cliffs; and what a window's accesses say of its working set.

All but `working_sets` take and give `Curve`s, whatever estimated them: a `Curve` is additive in its hits and totals.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numba as nb
import numpy as np
import numpy.typing as npt

from analytics.curve import Curve, Weight
from analytics.reuse.run_exact import Runs

Bools = npt.NDArray[np.bool_]
F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]

GIB = float(1 << 30)
Cost = tuple[float, float]


def merge(curves: Sequence[Curve], scales: Sequence[float] | None = None, weights: Sequence[float] | None = None) -> Curve:
    """One curve for all: hits and totals added, each curve's capacity axis stretched by its scale, its counts times its weight.

    - windows of one stack: scale 1.
    - hash shards of one stream, k of them: scale k, since a cache of c blocks gives each shard c / k.
    - tenants with fixed shares s of a partitioned pool: scale 1/s. (For a shared LRU compose reuse times instead: `analytics.pool`.)

    Raises `ValueError` without a curve or for scales or weights of another number or sign. Cost: O(k log k) in all points.
    """
    scales = [1.0] * len(curves) if scales is None else scales
    weights = [1.0] * len(curves) if weights is None else weights
    if not curves or len(scales) != len(curves) or len(weights) != len(curves) or min(scales) <= 0 or min(weights) < 0:
        raise ValueError("there must be a curve, and for each a positive scale and a weight that is not negative")
    distances = np.concatenate([scale * curve.distances for scale, curve in zip(scales, curves, strict=True)])
    steps = np.concatenate([weight * _steps(curve) for weight, curve in zip(weights, curves, strict=True)], axis=1)
    kept, place = np.unique(distances, return_inverse=True)
    hits = [np.cumsum(np.bincount(place, row, minlength=kept.size)).astype(np.float64) for row in steps]
    totals = np.sum([w * np.array(_totals(c)) for w, c in zip(weights, curves, strict=True)], axis=0)
    return Curve(kept, hits[0], hits[1], hits[2], *(float(total) for total in totals))


def decay(curves: Sequence[Curve], keep_ratio: float) -> Curve:
    """Curve of windows given oldest first, each counting `keep_ratio` (0 to 1] of the next. Raises `ValueError` for another ratio."""
    if not 0.0 < keep_ratio <= 1.0:
        raise ValueError(f"keep_ratio {keep_ratio} must be above 0 and at most 1")
    return merge(curves, weights=[keep_ratio**age for age in range(len(curves) - 1, -1, -1)])


def _steps(curve: Curve) -> F64:
    return np.diff(np.stack([curve.blocks, curve.tokens, curve.token_context]), axis=1, prepend=0.0)


def _totals(curve: Curve) -> tuple[float, float, float]:
    return curve.total_blocks, curve.total_tokens, curve.total_token_context


# ---------------------------------------------------------------- shape


@dataclass(frozen=True)
class ConcaveHull:
    """Least concave curve that is nowhere below a hit curve: vertices (capacity in blocks, hit ratio), from (0, 0), both float64[k]."""

    capacities: F64
    ratios: F64

    def hit_ratio(self, capacities: Sequence[float] | F64 | I64) -> F64:
        """Hit ratio at capacities, linear between vertices and flat after the last."""
        return np.interp(np.asarray(capacities, np.float64), self.capacities, self.ratios)

    def slope(self, capacities: Sequence[float] | F64 | I64) -> F64:
        """Hit ratio gained by one block more, at capacities; 0 after the last vertex."""
        slopes = np.append(np.diff(self.ratios) / np.diff(self.capacities), 0.0)
        return slopes[np.searchsorted(self.capacities, np.asarray(capacities, np.float64), side="right") - 1]


def hull(curve: Curve, weight: Weight = "blocks", cost: Cost | None = None) -> ConcaveHull:
    """Concave hull of a curve: what a split of the stream by hash can get out of every capacity (`analytics.surfaces` realises it).

    Raises `ValueError` as `Curve.hit_ratio`. Cost: O(points). Source: Beckmann and Sanchez, Talus, HPCA 2015.
    """
    capacities, ratios = _corners(curve, weight, cost)
    kept = _upper(capacities, ratios)
    return ConcaveHull(capacities[kept], ratios[kept])


def _corners(curve: Curve, weight: Weight, cost: Cost | None) -> tuple[F64, F64]:
    """Least capacity of each step of a curve and the ratio that it reaches, (0, 0) first."""
    capacities = np.unique(np.floor(curve.distances) + 1)
    return np.append(0.0, capacities), np.append(0.0, curve.hit_ratio(capacities, weight, cost))


@nb.njit(cache=True, nogil=True)
def _upper(x: F64, y: F64) -> Bools:
    """Which points are vertices of the upper hull (Andrew's chain)."""
    chain, size = np.empty(x.size, np.int64), 0
    for i in range(x.size):
        if size and y[i] <= y[chain[size - 1]]:
            continue
        while size >= 2:
            a, b = chain[size - 2], chain[size - 1]
            if (y[b] - y[a]) * (x[i] - x[a]) > (y[i] - y[a]) * (x[b] - x[a]):
                break
            size -= 1
        chain[size] = i
        size += 1
    kept = np.zeros(x.size, np.bool_)
    kept[chain[:size]] = True
    return kept


def knee(curve: Curve, weight: Weight = "blocks", cost: Cost | None = None) -> float:
    """Capacity in blocks where a curve, scaled to the unit square, stands farthest above its chord; 0 for a curve without hits.

    Beyond it a block of capacity brings less than the mean block did. Raises `ValueError` as `Curve.hit_ratio`. Cost: O(points).
    Source: Satopaa et al., Kneedle, ICDCS workshops 2011.
    """
    capacities, ratios = _corners(curve, weight, cost)
    if ratios[-1] <= 0:
        return 0.0
    return float(capacities[np.argmax(ratios / ratios[-1] - capacities / capacities[-1])])


@dataclass(frozen=True)
class Cliff:
    """A stretch of capacity, between two vertices of the hull, over which a curve lies up to `gap_ratio` (0 to 1) below its hull.

    What is added inside brings little until `end_blocks` is near: give less than `start_blocks`, or all, or split (Talus).
    """

    start_blocks: float
    end_blocks: float
    gap_ratio: float


def cliffs(curve: Curve, least_gap_ratio: float = 0.02, weight: Weight = "blocks", cost: Cost | None = None) -> list[Cliff]:
    """Cliffs of a curve, smallest capacity first. Raises `ValueError` as `Curve.hit_ratio`. Cost: O(points)."""
    capacities, ratios = _corners(curve, weight, cost)
    around = hull(curve, weight, cost)
    below = capacities[1:] - 1
    gaps = around.hit_ratio(below) - ratios[:-1]
    deepest = np.zeros(max(around.capacities.size - 1, 0))
    np.maximum.at(deepest, np.searchsorted(around.capacities, capacities[1:], side="left").clip(1, deepest.size) - 1, gaps)
    found = np.flatnonzero(deepest >= least_gap_ratio)
    return [Cliff(float(around.capacities[i]), float(around.capacities[i + 1]), float(deepest[i])) for i in found]


# ---------------------------------------------------------------- value


def saved_s(curve: Curve, capacities: Sequence[int] | I64, cost: Cost) -> F64:
    """Prefill seconds that an LRU of each capacity (blocks) saves over all that the curve counts; `cost` is (a s/token, b s/token^2)."""
    return curve.hit_ratio(capacities, "cost", cost) * (cost[0] * curve.total_tokens + cost[1] * curve.total_token_context)


def marginal_value_s_per_gib(
    curve: Curve, capacities: Sequence[int] | I64, cost: Cost, bytes_per_block: float, *, step_gib: float = 1.0, on_hull: bool = False
) -> F64:
    """Prefill seconds saved by the next `step_gib`, per GiB of it, at each capacity (blocks); divide by the curve's time for a rate.

    `on_hull` values capacity as a split of the stream by hash can use it, so the value falls steadily and greedy allocation over tenants is
    optimal. Raises `ValueError` for a step or block of no size. Cost: as `Curve.hit_ratio`, or `hull`.
    """
    if step_gib <= 0 or bytes_per_block <= 0:
        raise ValueError(f"step_gib {step_gib} and bytes_per_block {bytes_per_block} must be positive")
    at = np.asarray(capacities, np.int64)
    more = at + round(step_gib * GIB / bytes_per_block)
    whole = cost[0] * curve.total_tokens + cost[1] * curve.total_token_context
    if on_hull:
        around = hull(curve, "cost", cost)
        return (around.hit_ratio(more) - around.hit_ratio(at)) * whole / step_gib
    return (curve.hit_ratio(more, "cost", cost) - curve.hit_ratio(at, "cost", cost)) * whole / step_gib


# ---------------------------------------------------------------- working set


@dataclass(frozen=True)
class WorkingSets:
    """Windows [end - window, end), each: its distinct blocks, its block references, and how old repeats within it were.

    `end_us`, `distinct_blocks`, `accessed_blocks` int64[k] · `repeat_ratio` float64[k], share of the references that repeat a block of the
    same window (0 without any) · `mean_reuse_us` float64[k], mean time since the last touch of those repeats, NaN without any.
    """

    end_us: I64
    distinct_blocks: I64
    accessed_blocks: I64
    repeat_ratio: F64
    mean_reuse_us: F64


def working_sets(runs: Runs, ts_us: I64, window_us: int, step_us: int | None = None) -> WorkingSets:
    """Exact working set of every window of `window_us` that ends on a multiple of `step_us` (default: tumbling), from the runs' ages.

    `ts_us` int64, time of each request that `runs.request` indexes. A reference is its block's first in [T - W, T) iff its last touch lay
    before T - W, so it counts for the ends T of one interval: a difference array, two writes a run. Exact as long as the stack reaches back
    `window_us`. Raises `ValueError` for a length below 1. Cost: O(runs + windows).
    Source: Denning 1968; Gu et al., Cuki, ATC 2023, for the two figures.
    """
    step = window_us if step_us is None else step_us
    if window_us < 1 or step < 1:
        raise ValueError(f"window_us {window_us} and step_us {step} must be at least 1")
    if not len(runs):
        none = np.empty(0, np.int64)
        return WorkingSets(none, none, none, np.empty(0), np.empty(0))
    at, blocks = ts_us[runs.request], runs.length.astype(np.int64)
    first, last = int(at.min()) // step + 1, int(at.max()) // step + 1
    repeats_until = np.where(runs.age_us >= 0, at + window_us - np.minimum(runs.age_us, window_us), at)
    accessed = _spread(at, at + window_us, blocks, step, first, last)
    repeated = _spread(at, repeats_until, blocks, step, first, last)
    ages = _spread(at, repeats_until, blocks * runs.age_us, step, first, last)
    mean_us = np.divide(ages, repeated, out=np.full(ages.size, np.nan), where=repeated > 0)
    ratio = np.divide(repeated, accessed, out=np.zeros(ages.size), where=accessed > 0)
    return WorkingSets(np.arange(first, last + 1) * step, accessed - repeated, accessed, ratio, mean_us)


def _spread(after: I64, until: I64, amount: I64, step: int, first: int, last: int) -> I64:
    """Sum of amounts for each end k * step, k from `first` to `last`, over the rows with after < k * step <= until."""
    change = np.zeros(last - first + 2, np.int64)
    np.add.at(change, np.minimum(after // step + 1 - first, change.size - 1), amount)
    np.subtract.at(change, np.minimum(np.maximum(until // step, after // step) + 1 - first, change.size - 1), amount)
    return np.cumsum(change)[:-1]
