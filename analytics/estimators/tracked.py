"""A weighted LRU stack of the blocks that a sampler tracks, in arrays that numba can walk: find, touch, reweigh, drop, weight above.

Chained hash table from block to entry, one slot an entry in touch order, and a Fenwick tree of weights over the slots. Memory is bounded by
the room it is made with; `wider` gives it more between calls.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numba as nb
import numpy as np
import numpy.typing as npt

from analytics.estimators.sampling import value_of

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]
U64 = npt.NDArray[np.uint64]

# Scalars in `at`: first free entry, highest slot in use, entries in use, slot up to which entries have been demoted.
FREE, TOP, LIVE, BOUND = range(4)


class Tracked(NamedTuple):
    """`heads`, `nexts` chain entries with one hash (-1 ends) · `bits` mixed bits and `keys` of an entry · its `slots` and `weights` ·
    `owners` of a slot · `tree` Fenwick over slots · `at` the scalars above · `total` weight of all.
    """

    heads: I64
    nexts: I64
    keys: U64
    bits: U64
    slots: I64
    weights: F64
    owners: I64
    tree: F64
    at: I64
    total: F64


def empty(room: int) -> Tracked:
    """A stack with room for `room` blocks."""
    nexts = np.arange(1, room + 1)
    nexts[-1] = -1
    return Tracked(
        heads=np.full(1 << room.bit_length(), -1, np.int64),
        nexts=nexts,
        keys=np.zeros(room, np.uint64),
        bits=np.zeros(room, np.uint64),
        slots=np.zeros(room, np.int64),
        weights=np.zeros(room, np.float64),
        owners=np.full(4 * room + 4, -1, np.int64),
        tree=np.zeros(4 * room + 4, np.float64),
        at=np.zeros(4, np.int64),
        total=np.zeros(1, np.float64),
    )


def wider(t: Tracked, more: int) -> Tracked:
    """The same stack with room for `more` further blocks; itself where it has that already. Cost: O(room) when it grows."""
    room = t.keys.size
    if t.at[LIVE] + more <= room:
        return t
    new = empty(2 * (int(t.at[LIVE]) + more))
    copy(t, new)
    return new


@nb.njit(cache=True, nogil=True)
def copy(t: Tracked, new: Tracked) -> None:
    """Put the entries of `t`, oldest first, into the empty `new`."""
    for slot in range(1, t.at[TOP] + 1):
        entry = t.owners[slot]
        if entry >= 0:
            touch(new, insert(new, t.keys[entry], t.bits[entry]), t.weights[entry])
            if slot <= t.at[BOUND]:
                new.at[BOUND] = new.at[TOP]


@nb.njit(cache=True, nogil=True)
def find(t: Tracked, key: Any, bits: Any) -> int:
    """Entry of a block, -1 where it is not tracked."""
    entry = t.heads[np.int64(np.uint64(bits) & np.uint64(t.heads.size - 1))]
    while entry >= 0 and t.keys[entry] != key:
        entry = t.nexts[entry]
    return entry


@nb.njit(cache=True, nogil=True)
def insert(t: Tracked, key: Any, bits: Any) -> int:
    """New entry of a block that is not tracked; it has no place in the stack until touched."""
    entry, home = t.at[FREE], np.int64(np.uint64(bits) & np.uint64(t.heads.size - 1))
    t.at[FREE] = t.nexts[entry]
    t.keys[entry], t.bits[entry], t.slots[entry], t.weights[entry] = key, bits, 0, 0.0
    t.nexts[entry], t.heads[home] = t.heads[home], entry
    t.at[LIVE] += 1
    return entry


@nb.njit(cache=True, nogil=True)
def drop(t: Tracked, entry: int) -> None:
    """Forget a block."""
    reweigh(t, entry, 0.0)
    home = np.int64(t.bits[entry] & np.uint64(t.heads.size - 1))
    if t.heads[home] == entry:
        t.heads[home] = t.nexts[entry]
    else:
        before = t.heads[home]
        while t.nexts[before] != entry:
            before = t.nexts[before]
        t.nexts[before] = t.nexts[entry]
    if t.slots[entry] > 0:
        t.owners[t.slots[entry]] = -1
    t.nexts[entry], t.at[FREE] = t.at[FREE], entry
    t.at[LIVE] -= 1


@nb.njit(cache=True, nogil=True)
def add(t: Tracked, slot: int, delta: float) -> None:
    """Add a weight at a slot."""
    t.total[0] += delta
    while slot < t.tree.size:
        t.tree[slot] += delta
        slot += slot & -slot


@nb.njit(cache=True, nogil=True)
def above(t: Tracked, entry: int) -> float:
    """Weight of all blocks touched after this one."""
    slot, below = t.slots[entry], 0.0
    while slot > 0:
        below += t.tree[slot]
        slot -= slot & -slot
    return max(t.total[0] - below, 0.0)  # sums of unequal floats do not cancel to the last bit


@nb.njit(cache=True, nogil=True)
def reweigh(t: Tracked, entry: int, weight: float) -> None:
    """Give a block another weight where it stands."""
    if t.slots[entry] > 0:
        add(t, t.slots[entry], weight - t.weights[entry])
    t.weights[entry] = weight


@nb.njit(cache=True, nogil=True)
def touch(t: Tracked, entry: int, weight: float) -> None:
    """Make a block the most recent, at a new weight."""
    if t.at[TOP] + 1 == t.owners.size:
        renumber(t)
    if t.slots[entry] > 0:
        add(t, t.slots[entry], -t.weights[entry])
        t.owners[t.slots[entry]] = -1
    t.at[TOP] += 1
    slot = t.at[TOP]
    t.slots[entry], t.weights[entry], t.owners[slot] = slot, weight, entry
    add(t, slot, weight)


@nb.njit(cache=True, nogil=True)
def renumber(t: Tracked) -> None:
    """Close the gaps between slots, and sum the tree anew. Cost: O(room)."""
    live, bound, total = 0, 0, 0.0
    t.tree[:] = 0.0
    for slot in range(1, t.at[TOP] + 1):
        entry = t.owners[slot]
        if entry >= 0:
            live += 1
            t.owners[live], t.slots[entry], t.tree[live] = entry, live, t.weights[entry]
            total += t.weights[entry]
        if slot == t.at[BOUND]:
            bound = live
    t.owners[live + 1 :] = -1
    t.at[TOP], t.at[BOUND], t.total[0] = live, bound, total
    for slot in range(1, t.tree.size):
        parent = slot + (slot & -slot)
        if parent < t.tree.size:
            t.tree[parent] += t.tree[slot]


@nb.njit(cache=True, nogil=True)
def hash_value(t: Tracked, entry: int) -> int:
    """Sampling hash value of an entry."""
    return value_of(t.bits[entry])
