"""Eviction policies: a registry of simulators of one cache. A new one is a function, a line and a right answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
import numpy.typing as npt

from analytics.policies.fifos import fifo, s3fifo, sieve
from analytics.policies.frequency import lfu
from analytics.policies.offline import belady
from analytics.policies.recency import arc, lru, two_q

Bools = npt.NDArray[np.bool_]
I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]
Fill = Callable[[I32, int, int, Bools], None]


class Policy(Protocol):
    """Which accesses hit a cache of `capacity` blocks that starts empty.

    `ids` int32[n] in [0, n_ids), as `analytics.reuse.chains.densify` gives them. Every miss but one that the policy refuses is stored, and
    every block counts as one. Capacity 0 never hits. Raises `ValueError` for a negative capacity or ids out of range.
    Always the same for the same input. Cost: O(n), memory O(n_ids + n).
    """

    def __call__(self, ids: I32, n_ids: int, capacity: int) -> Bools: ...


def _policy(fill: Fill) -> Policy:
    def simulate(ids: I32, n_ids: int, capacity: int) -> Bools:
        ids = np.ascontiguousarray(ids, np.int32)
        if capacity < 0:
            raise ValueError(f"capacity is {capacity} blocks; it cannot be negative")
        if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < n_ids:
            raise ValueError(f"ids lie in [{ids.min()}, {ids.max()}], outside [0, {n_ids})")
        hits = np.zeros(ids.size, np.bool_)
        if capacity and ids.size:
            fill(ids, n_ids, min(capacity, n_ids), hits)
        return hits

    simulate.__doc__ = fill.__doc__
    return simulate


POLICIES: dict[str, Policy] = {
    "fifo": _policy(fifo),
    "lru": _policy(lru),
    "lfu": _policy(lfu),
    "2q": _policy(two_q),
    "arc": _policy(arc),
    "sieve": _policy(sieve),
    "s3fifo": _policy(s3fifo),
    "belady": _policy(belady),
}


def leading_hits(hits: Bools, offsets: I64) -> Bools:
    """Hits that a prefix cache can use: those of each chain's leading run. `offsets` int64[requests+1] into `hits`. Cost: O(n)."""
    misses = np.concatenate([[0], np.cumsum(~hits)])
    before = np.repeat(misses[offsets[:-1]], np.diff(offsets))
    return hits & (misses[1:] == before)
