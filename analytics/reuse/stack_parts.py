"""Parts of the run-level stack: hash table, Fenwick tree over slots, filter of blocks that were cut off.

numba caches a compiled function by the file it stands in: after a change here, touch `stack_kernel.py` too.
"""

from __future__ import annotations

import numba as nb
import numpy as np
import numpy.typing as npt

from analytics.reuse.compiling import uncounted

I64 = npt.NDArray[np.int64]
U64 = npt.NDArray[np.uint64]

# ---------------------------------------------------------------- hash table


@uncounted
def _mix(key: int) -> np.uint64:
    mixed = np.uint64(key)
    mixed = (mixed ^ (mixed >> np.uint64(32))) * np.uint64(0x9E3779B97F4A7C15)
    return mixed ^ (mixed >> np.uint64(29))


@uncounted
def _home(key: int, mask: int) -> np.int64:
    return np.int64(_mix(key) & np.uint64(mask))


@uncounted
def find(table: U64, key: int) -> np.int64:
    """Place of a key's entry, or -1 - the free place where it would go."""
    mask = table.size // 2 - 1
    place = _home(key, mask)
    while table[2 * place + 1] != 0:
        if table[2 * place] == key:
            return place
        place = (place + 1) & mask
    return -1 - place


@uncounted
def insert(table: U64, key: int, node: int) -> bool:
    """Enter a node under its first hash; false, and nothing done, where another node holds that hash."""
    place = find(table, key)
    if place >= 0:
        return False
    place = -1 - place
    table[2 * place] = key
    table[2 * place + 1] = np.uint64(node + 1)
    return True


@uncounted
def remove(table: U64, key: int) -> None:
    """Take an entry out and close the gap, so that no tombstones pile up."""
    mask = table.size // 2 - 1
    gap = find(table, key)
    place = gap
    while True:
        place = (place + 1) & mask
        if table[2 * place + 1] == 0:
            break
        home = _home(table[2 * place], mask)
        if (place - home) & mask >= (place - gap) & mask:
            table[2 * gap], table[2 * gap + 1] = table[2 * place], table[2 * place + 1]
            gap = place
    table[2 * gap + 1] = 0


# ---------------------------------------------------------------- Fenwick tree over slots, kept up to TOP only


@uncounted
def append_weight(fenwick: I64, slot: int, weight: int) -> None:
    """Set a new highest slot. Cost: one addition on average."""
    step, bound = 1, slot & -slot
    while step < bound:
        weight += fenwick[slot - step]
        step <<= 1
    fenwick[slot] = weight


@uncounted
def add_weight(fenwick: I64, top: int, slot: int, delta: int) -> None:
    while slot <= top:
        fenwick[slot] += delta
        slot += slot & -slot


@uncounted
def weight_up_to(fenwick: I64, slot: int) -> int:
    total = 0
    while slot > 0:
        total += fenwick[slot]
        slot &= slot - 1
    return total


# ---------------------------------------------------------------- Bloom filter, three probes


@uncounted
def filter_add(known: U64, key: int) -> None:
    mixed, bits = _mix(key), np.uint64(64 * known.size - 1)
    step = (mixed >> np.uint64(32)) | np.uint64(1)
    for _ in range(3):
        bit = mixed & bits
        known[bit >> np.uint64(6)] |= np.uint64(1) << (bit & np.uint64(63))
        mixed += step


@uncounted
def filter_has(known: U64, key: int) -> bool:
    mixed, bits = _mix(key), np.uint64(64 * known.size - 1)
    step = (mixed >> np.uint64(32)) | np.uint64(1)
    for _ in range(3):
        bit = mixed & bits
        if (known[bit >> np.uint64(6)] >> (bit & np.uint64(63))) & np.uint64(1) == 0:
            return False
        mixed += step
    return True


@nb.njit(cache=True, nogil=True)
def filter_has_each(known: U64, hashes: U64) -> npt.NDArray[np.bool_]:
    """Which hashes the filter of trimmed blocks knows; it may know too many, never too few."""
    out = np.empty(hashes.size, np.bool_)
    for i in range(hashes.size):
        out[i] = filter_has(known, hashes[i])
    return out
