"""What several tenants do in one shared LRU, from each tenant's reuse times alone (AET).

Distances are for one tenant alone, reuse times compose: tenants with block rates r_i and reuse-time tails P_i share an LRU of c blocks
with one characteristic time A, the solution of sum_i r_i * integral_0^A P_i(t) dt = c. Tenant i then hits 1 - P_i(A) of its blocks and
occupies r_i * integral_0^A P_i. Streams that are not steady, or whose requests are large beside the pool, need `analytics.pool_windows`.
Source: Hu et al., AET, ATC 2016 / ToS 2018; on independent references it equals Che's approximation.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq

from analytics.identity import shapley

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class ReuseHistogram:
    """Reuse times of one tenant's block accesses over `duration_s`: `blocks` in each [from_s, to_s), uniform inside a bin.

    `cold_blocks` were never seen before (or too long ago to know): their reuse time is infinite.
    """

    from_s: Floats
    to_s: Floats
    blocks: Floats
    cold_blocks: float
    duration_s: float

    @property
    def total_blocks(self) -> float:
        """All block accesses."""
        return float(self.blocks.sum() + self.cold_blocks)

    @property
    def cold_ratio(self) -> float:
        """Share of accesses that no capacity serves; 0 for an empty histogram."""
        return self.cold_blocks / self.total_blocks if self.total_blocks else 0.0

    def hit_blocks(self, time_s: float) -> float:
        """Accesses whose reuse time is at most `time_s`. Cost: O(bins)."""
        width = np.maximum(self.to_s - self.from_s, 1e-12)
        return float((self.blocks * np.clip((time_s - self.from_s) / width, 0.0, 1.0)).sum())

    def occupancy_blocks(self, time_s: float) -> float:
        """Mean blocks of this tenant touched within the last `time_s`: sum over accesses of min(reuse, time) / duration. Cost: O(bins)."""
        if not self.total_blocks or self.duration_s <= 0:
            return 0.0
        width = np.maximum(self.to_s - self.from_s, 1e-12)
        inside = np.clip(time_s, self.from_s, self.to_s)
        below = (inside * inside - self.from_s * self.from_s) / 2.0
        mean = np.where(np.isinf(inside), self.to_s, (below + inside * (self.to_s - inside)) / width)
        lived = np.where(time_s <= self.from_s, min(time_s, 1e300), mean)
        cold = self.cold_blocks * time_s if self.cold_blocks else 0.0
        return float((float((self.blocks * lived).sum()) + cold) / self.duration_s)


@dataclass(frozen=True)
class Pool:
    """A shared LRU in its steady state: characteristic time, and per histogram given its hit ratio and mean occupancy."""

    time_s: float
    hit_ratio: Floats
    occupancy_blocks: Floats


def characteristic_time_s(histograms: Sequence[ReuseHistogram], capacity_blocks: float) -> float:
    """Time after which an untouched block leaves an LRU of `capacity_blocks` shared by these tenants; inf if all of it fits.

    Cost: O(bins) per step of a bracketing root search, about 50 steps.
    """
    if capacity_blocks <= 0:
        return 0.0

    def short(time_s: float) -> float:
        return sum(h.occupancy_blocks(time_s) for h in histograms) - capacity_blocks

    longest = max((float(h.to_s.max()) for h in histograms if h.to_s.size), default=0.0)
    if short(longest) < 0:
        cold_rate = sum(h.cold_blocks / h.duration_s for h in histograms if h.duration_s > 0)
        return longest - short(longest) / cold_rate if cold_rate > 0 else math.inf
    if longest == 0.0:
        return 0.0
    return float(brentq(short, 0.0, longest, xtol=1e-9 * longest, rtol=1e-12))


def solve(histograms: Sequence[ReuseHistogram], capacity_blocks: float) -> Pool:
    """Steady state of an LRU of `capacity_blocks` shared by these tenants. Hit ratios are by blocks; 0 for an empty histogram."""
    time_s = characteristic_time_s(histograms, capacity_blocks)
    hits = [h.hit_blocks(time_s) / h.total_blocks if h.total_blocks else 0.0 for h in histograms]
    occupancy = [h.occupancy_blocks(min(time_s, 1e18)) if math.isfinite(time_s) else _distinct(h) for h in histograms]
    return Pool(time_s, np.array(hits), np.array(occupancy))


def _distinct(histogram: ReuseHistogram) -> float:
    longest = float(histogram.to_s.max()) if histogram.to_s.size else 0.0
    return histogram.occupancy_blocks(longest)


def pooled_hit_ratio(histograms: Sequence[ReuseHistogram], capacity_blocks: float) -> float:
    """Block hit ratio of all tenants together in one LRU of `capacity_blocks`; 0 without accesses."""
    total = sum(h.total_blocks for h in histograms)
    if not total:
        return 0.0
    time_s = characteristic_time_s(histograms, capacity_blocks)
    return sum(h.hit_blocks(time_s) for h in histograms) / total


def instances_hit_ratio(
    placed: Mapping[str, Sequence[ReuseHistogram]], capacity_blocks: Mapping[str, float], instances_after: int
) -> tuple[float, Floats]:
    """Predicted block hit ratio of the fleet, and of each tenant, if it had `instances_after` instances of the present capacity.

    `placed` holds one histogram per tenant for every instance, `capacity_blocks` its capacity. Assumes that a resize re-hashes whole
    sessions, so a placed reuse time stays what it is and an instance's rate scales with N0/N1, which is the same as scaling its capacity
    with N1/N0. What it leaves out: prefixes shared between sessions are copied per instance, so with more instances their placed reuse
    times grow (the prediction is then too good), with fewer they shrink (too bad); and the transient while caches re-warm.
    Cost: one root search per instance.
    """
    if instances_after <= 0 or not placed:
        return 0.0, np.zeros(len(next(iter(placed.values()))) if placed else 0)
    factor = instances_after / len(placed)
    tenants = len(next(iter(placed.values())))
    hits, totals = np.zeros(tenants), np.zeros(tenants)
    for instance, histograms in placed.items():
        time_s = characteristic_time_s(histograms, capacity_blocks[instance] * factor)
        hits += [h.hit_blocks(time_s) for h in histograms]
        totals += [h.total_blocks for h in histograms]
    ratio = np.divide(hits, totals, out=np.zeros(tenants), where=totals > 0)
    return (float(hits.sum() / totals.sum()) if totals.sum() else 0.0), ratio


class PoolChange:
    """One pool before and after a change, for counterfactuals: any mix of old and new capacity and old and new histograms.

    `before` and `after` hold one histogram per tenant. The fleet is one mean-field instance: histograms summed over instances against the
    total capacity, since rate and capacity scale alike. Curves are tabulated at 600 times and interpolated. Cost: O(tenants * bins * 600).
    A tenant's capacity-miss share is that of its blocks that were seen before but not within the pool's characteristic time.
    """

    def __init__(
        self, before: Sequence[ReuseHistogram], after: Sequence[ReuseHistogram], capacity_before: float, capacity_after: float
    ) -> None:
        longest = max([1.0, *(float(h.to_s.max()) for h in (*before, *after) if h.to_s.size)])
        self.grid = np.concatenate([[0.0], np.geomspace(1e-3, longest, 560), longest * np.geomspace(1.1, 1e6, 40)])
        self.capacity = (capacity_before, capacity_after)
        self.occupancy = np.array([[[h.occupancy_blocks(t) for t in self.grid] for h in side] for side in (before, after)])
        self.missed = np.array([[[_capacity_miss(h, t) for t in self.grid] for h in side] for side in (before, after)])
        self.total = self.occupancy.sum(axis=1)

    def players(self) -> Floats:
        """Change of every tenant's capacity-miss share [3, T], split between (less capacity, its own reuse, its neighbours) by Shapley."""

        def value(players: frozenset[int]) -> Floats:
            space, own, others = (int(player in players) for player in range(3))
            out = np.zeros(self.occupancy.shape[1])
            for tenant in range(out.size):
                filled = self.total[others] - self.occupancy[others, tenant] + self.occupancy[own, tenant]
                out[tenant] = self._missed(own, self._time_s(filled, space))[tenant]
            return out

        return shapley(3, value)

    def influence(self) -> Floats:
        """What each tenant's change alone does to each tenant's capacity-miss share [culprit, victim].

        The mean of two counterfactuals: the culprit changes first (all else as before), and last (all else as after).
        """
        tenants = self.occupancy.shape[1]
        out = np.zeros((tenants, tenants))
        for side, sign in ((0, 1.0), (1, -1.0)):
            unchanged = self._missed(side, self._time_s(self.total[side], side))
            for culprit in range(tenants):
                swapped = self.total[side] - self.occupancy[side, culprit] + self.occupancy[1 - side, culprit]
                out[culprit] += sign * (self._missed(side, self._time_s(swapped, side)) - unchanged) / 2.0
        return out

    def _time_s(self, filled: Floats, space: int) -> float:
        return float(np.interp(self.capacity[space], filled, self.grid))

    def _missed(self, side: int, time_s: float) -> Floats:
        place = np.interp(time_s, self.grid, np.arange(self.grid.size))
        low = min(int(place), self.grid.size - 2)
        columns = self.missed[side]
        return columns[:, low] + (place - low) * (columns[:, low + 1] - columns[:, low])


def _capacity_miss(histogram: ReuseHistogram, time_s: float) -> float:
    total = histogram.total_blocks
    return (float(histogram.blocks.sum()) - histogram.hit_blocks(time_s)) / total if total else 0.0
