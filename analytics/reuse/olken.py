"""Per-block exact stack distances (Olken's tree in Bennett and Kruskal's form): the reference beside which the run-level stack is checked.

One Fenwick tree over time slots counts the blocks whose last touch lies in each slot; a block's distance is the number of blocks
whose slot lies above its own. Requests are looked up as a whole and touched leaf first, as in `run_exact`.
Sources: Olken 1993 (LBL-32370); Bennett and Kruskal, IBM J. R&D 1975.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from analytics.reuse.compiling import uncounted

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]


class OlkenTree:
    """The tree between calls, so that a long trace needs room for the distances of one part only.

    `n_ids`: ids are dense in [0, n_ids) · `longest` blocks of a request at most. Memory: 28 bytes an id.
    """

    def __init__(self, n_ids: int, longest: int) -> None:
        slots = 2 * n_ids + longest + 1
        self._tree, self._owner = np.zeros(slots, np.int32), np.full(slots, -1, np.int32)
        self._last, self._touched_us = np.zeros(n_ids, np.int32), np.zeros(n_ids, np.int64)
        self._top = self._live = 0

    def touch(self, ts_us: I64, offsets: I64, ids: I32) -> tuple[I64, I64]:
        """`olken_distances` of the next requests."""
        distances, ages = np.empty(ids.size, np.int64), np.empty(ids.size, np.int64)
        arrays = self._tree, self._owner, self._last, self._touched_us
        self._top, self._live = _olken(ts_us, offsets, ids, *arrays, self._top, self._live, distances, ages)
        return distances, ages


def olken_distances(ts_us: I64, offsets: I64, ids: I32, n_ids: int) -> tuple[I64, I64]:
    """Exact LRU stack distance and reuse time of every block reference.

    `ts_us` int64[n], never falling · `offsets` int64[n+1] into `ids` int32[m], dense in [0, n_ids). Returns `(distances, ages_us)`,
    int64[m] each, -1 for a first touch. Distances are those at the request's look-up, before any of its own blocks move.
    Cost: three walks of a Fenwick tree of at least 2*n_ids slots a block, O(m log n_ids); memory O(n_ids + m).
    """
    return OlkenTree(n_ids, int(np.max(np.diff(offsets), initial=0))).touch(ts_us, offsets, ids)


@uncounted
def _add(tree: I32, slot: int, delta: int) -> None:
    while slot < tree.size:
        tree[slot] += delta
        slot += slot & -slot


@uncounted
def _prefix(tree: I32, slot: int) -> int:
    total = 0
    while slot > 0:
        total += tree[slot]
        slot -= slot & -slot
    return total


@uncounted
def _renumber(tree: I32, last: I32, owner: I32, top: int) -> int:
    """Move live slots together, keeping their order; returns the highest slot in use."""
    live = 0
    for slot in range(1, top + 1):
        key = owner[slot]
        if key >= 0 and last[key] == slot:
            live += 1
            owner[live], last[key] = key, live
    for slot in range(1, tree.size):
        tree[slot] = 1 if slot <= live else 0
    for slot in range(1, tree.size):
        parent = slot + (slot & -slot)
        if parent < tree.size:
            tree[parent] += tree[slot]
    return live


@uncounted
def _olken(
    ts_us: I64, offsets: I64, ids: I32, tree: I32, owner: I32, last: I32, touched_us: I64, top: int, live: int, distances: I64, ages: I64
) -> tuple[int, int]:
    for request in range(ts_us.size):
        lo, hi = offsets[request], offsets[request + 1]
        for i in range(lo, hi):
            slot = last[ids[i]]
            distances[i] = live - _prefix(tree, slot) if slot > 0 else -1
            ages[i] = max(ts_us[request] - touched_us[ids[i]], 0) if slot > 0 else -1
        if top + hi - lo >= tree.size:
            top = _renumber(tree, last, owner, top)
        for i in range(hi - 1, lo - 1, -1):
            key, top = ids[i], top + 1
            if last[key] > 0:
                _add(tree, last[key], -1)
            else:
                live += 1
            _add(tree, top, 1)
            last[key], owner[top], touched_us[key] = top, key, ts_us[request]
    return top, live
