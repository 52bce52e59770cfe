"""Hit and cost surfaces over the sizes of two or three tiers (HBM, DRAM, SSD or remote), from one exact stack pass, and their convex hull.

In an LRU stack the top c1 blocks stand in tier 1. Exclusive tiers hold the next c2 in tier 2 and so on: a block at distance d is in the
first tier whose cumulated capacity exceeds d. Inclusive tiers that see every touch each hold the top of the same stack: the first tier
with capacity above d serves it. So no surface needs a simulation. Source: Mattson et al. 1970; Liu et al., eMRC, FAST 2021, for the hull.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.optimize import linprog

from analytics.curve import Curve, Weight
from analytics.estimators.points import block_values
from analytics.reuse.chains import ChainColumns
from analytics.reuse.run_exact import Runs

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]
Grids = Sequence[Sequence[int] | I64]


def tier_edges(grids: Grids, inclusive: bool = False) -> I64:
    """Distance below which tiers 1..k together serve, int64[tiers, len(grid 1), len(grid 2), ...].

    `grids` are capacities in blocks, one a tier. Raises `ValueError` without a grid or for a negative capacity.
    """
    axes = [np.asarray(grid, np.int64) for grid in grids]
    if not axes or any(axis.size and int(axis.min()) < 0 for axis in axes):
        raise ValueError("a surface needs at least one tier, and capacities that are not negative")
    capacities = np.stack(np.meshgrid(*axes, indexing="ij"))
    return np.maximum.accumulate(capacities, axis=0) if inclusive else np.cumsum(capacities, axis=0)


def tier_hit_ratios(
    curve: Curve, grids: Grids, *, inclusive: bool = False, weight: Weight = "blocks", cost: tuple[float, float] | None = None
) -> F64:
    """Share that each tier serves, 0 to 1, float64[tiers, len(grid 1), ...]; their sum over tiers is the hit ratio of the whole.

    Inclusive means that every tier sees every touch; a lower tier that sees misses only ages differently. `weight` and `cost` as in
    `Curve.hit_ratio`. Raises `ValueError` as that and `tier_edges`. Cost: one binary search a point and tier.
    """
    edges = tier_edges(grids, inclusive)
    served = curve.hit_ratio(edges.ravel(), weight, cost).reshape(edges.shape)
    return np.diff(served, axis=0, prepend=0.0)


@dataclass(frozen=True)
class Tier:
    """Where KV lies and what it takes to bring one block from there to the device: latency of each block, and bytes over the bandwidth."""

    name: str
    bandwidth_bytes_s: float = math.inf
    latency_s: float = 0.0

    def load_s(self, size_bytes: F64) -> F64:
        """Seconds to load blocks of these sizes."""
        return self.latency_s + size_bytes / self.bandwidth_bytes_s


class TierCosts:
    """Seconds spent on prompts by the sizes of the tiers: a block that a tier holds is loaded iff that is cheaper than to recompute it.

    Exact and block by block, since recomputing gets dearer with position: `a*tokens + b*token_context` against the tier's load time. Any
    mix of loaded and recomputed blocks is possible, because a block's KV is the same either way. Fill with the runs of an exact stack.
    Cost: a few vectorised passes over the blocks and tiers; memory 8 bytes a tier and block of the greatest distance.
    """

    def __init__(self, tiers: Sequence[Tier], bytes_per_token: float, cost: tuple[float, float]) -> None:
        """`cost` is (a s/token, b s/token^2) of the prefill. Raises `ValueError` without a tier or for a bandwidth that is not positive."""
        if not tiers or any(tier.bandwidth_bytes_s <= 0 for tier in tiers):
            raise ValueError("there must be a tier, and every bandwidth must be positive")
        self._tiers, self._bytes_per_token, self._cost = list(tiers), bytes_per_token, cost
        self._saved_s = np.zeros((len(self._tiers), 1))
        self.recompute_s = 0.0

    def add(self, runs: Runs, chains: ChainColumns) -> None:
        """Count the runs of one `touch` of `chains`; `recompute_s` grows by what these prompts would take without any tier."""
        a, b = self._cost
        prompts = chains.prompt_tokens.astype(np.float64)
        self.recompute_s += float((a * prompts + b * prompts * prompts / 2).sum())
        distances, _ = runs.per_block()
        reused = np.flatnonzero(distances >= 0)
        tokens, context = block_values(chains, reused)
        compute_s, at = a * tokens + b * context, distances[reused]
        size = max(self._saved_s.shape[1], int(at.max(initial=-1)) + 1)
        saved_s = np.zeros((len(self._tiers), size))
        saved_s[:, : self._saved_s.shape[1]] = self._saved_s
        for row, tier in zip(saved_s, self._tiers, strict=True):
            gain_s = np.maximum(compute_s - tier.load_s(tokens * self._bytes_per_token), 0.0)
            row += np.bincount(at, gain_s, minlength=size)
        self._saved_s = saved_s

    def surface_s(self, grids: Grids, *, inclusive: bool = False) -> F64:
        """Seconds to prefill and load all prompts added, float64[len(grid 1), ...], `grids` of capacities in blocks, one a tier in order.

        Raises `ValueError` unless there is one grid a tier. Cost: O(greatest distance) and one look-up a point and tier.
        """
        if len(grids) != len(self._tiers):
            raise ValueError(f"{len(grids)} grids for {len(self._tiers)} tiers")
        edges = np.minimum(tier_edges(grids, inclusive), self._saved_s.shape[1])
        sums = np.concatenate([np.zeros((len(self._tiers), 1)), np.cumsum(self._saved_s, axis=1)], axis=1)
        left = np.full(edges.shape[1:], self.recompute_s)
        for k, row in enumerate(sums):
            left -= row[edges[k]] - (row[edges[k - 1]] if k else 0.0)
        return left


@dataclass(frozen=True)
class Split:
    """Partitions of one cache that together realise a point of the hull: hash `shares[i]` of the stream to tiers of `capacities[i]` blocks.

    `shares` float64[k] sum to 1 · `capacities` float64[k, tiers] · `value` is what the whole then has (miss ratio, or mean cost).
    """

    shares: F64
    capacities: F64
    value: float


@dataclass(frozen=True)
class Hull:
    """Lower convex hull of a surface: `vertices` float64[points, tiers] of capacities, `values` float64[points], lower is better.

    A stream split by hash over partitions, each with its share of a vertex's capacity, behaves in each as the whole does at that vertex
    (Talus, HPCA 2015): so every point of the hull can be had although the surface itself lies above it, up to the sampling error of
    `split`. To keep prefixes whole, hash the first block or the session of a chain, not every block.
    """

    vertices: F64
    values: F64

    @classmethod
    def of(cls, grids: Grids, surface: F64) -> Hull:
        """Hull of float64[len(grid 1), ...]; a grid with a 0 lets a capacity mix with none. Raises `ValueError` for another shape."""
        axes = [np.asarray(grid, np.float64) for grid in grids]
        if surface.shape != tuple(axis.size for axis in axes):
            raise ValueError(f"a surface of shape {surface.shape} does not fit grids of {[axis.size for axis in axes]}")
        return cls(np.stack([axis.ravel() for axis in np.meshgrid(*axes, indexing="ij")], axis=1), surface.ravel())

    def split(self, capacities: Sequence[float], margin_ratio: float = 0.0, units: float | None = None) -> Split:
        """The split of these capacities (one a tier, blocks) with the lowest value; at most tiers + 1 partitions.

        A partition just below a cliff loses all of it when the hash happens to give it too many blocks, so each gets more than its share
        of its vertex: by `margin_ratio` (Talus has 5 %), and with `units` by what sampling can do, three times the deviation of a share s,
        which is sqrt((1-s)/(s*units)) of it. `units` are what is hashed apart, blocks or whole chains; where they carry unequal load w,
        the effective number sum(w)^2 / sum(w^2). The margin is taken from what is promised. Raises `ValueError` where even the smallest
        vertex is larger than what is given, or for units below 1. Cost: some small linear programs.
        """
        if units is not None and units < 1:
            raise ValueError(f"units is {units}; at least 1 must be hashed")
        target = np.asarray(capacities, np.float64)
        left = target
        while True:
            used, weights = self._mix(left)
            reserve = 3.0 * np.sqrt((1.0 - weights) / (weights * units)) if units else np.zeros(weights.size)
            needed = (weights * (1.0 + margin_ratio) * (1.0 + reserve))[:, None] * self.vertices[used]
            over = float((needed.sum(axis=0)[target > 0] / target[target > 0]).max(initial=1.0))
            if over <= 1.0 + 1e-6:
                return Split(weights, needed / over, float(weights @ self.values[used]))
            left = left / over

    def _mix(self, capacities: F64) -> tuple[I64, F64]:
        """Vertices (smallest first) and weights of the lowest value that fit into these capacities on average."""
        scale = np.maximum(self.vertices.max(axis=0), 1.0)
        found = linprog(
            self.values, A_ub=(self.vertices / scale).T, b_ub=capacities / scale, A_eq=np.ones((1, self.values.size)), b_eq=[1.0],
            method="highs-ds",
        )  # fmt: skip
        if found.status != 0:
            raise ValueError(f"no mix of the surface's points fits into {capacities.tolist()} blocks: {found.message}")
        used = np.flatnonzero(found.x > 1e-9)
        used = used[np.argsort((self.vertices[used] / scale).sum(axis=1), kind="stable")]
        return used, found.x[used] / found.x[used].sum()

    def value(self, capacities: Sequence[float]) -> float:
        """Value of the hull at these capacities, without a margin. Raises `ValueError` and costs as `split`."""
        return self.split(capacities).value
