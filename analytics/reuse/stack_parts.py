"""Parts of the run-level stack: comparing and copying, hash table, Fenwick tree over slots, filter of blocks that were cut off.

numba caches a compiled function by the file it stands in: after a change here, touch `stack_kernel.py` too.
"""

from __future__ import annotations

import numba as nb
import numpy as np
import numpy.typing as npt

from analytics.reuse.compiling import uncounted

I64 = npt.NDArray[np.int64]
U64 = npt.NDArray[np.uint64]

COMPARED = 64

# ---------------------------------------------------------------- stretches of hashes


@uncounted
def matching(arena: U64, start: int, hashes: U64, first: int, length: int) -> int:
    """How many leading hashes agree; 64 at a time and on slices, which the compiler turns into vector code (16 at a time it does not)."""
    a, b = arena[start : start + length], hashes[first : first + length]
    done = 0
    while done + COMPARED <= length:
        differ = np.uint64(0)
        for i in range(done, done + COMPARED):
            differ |= a[i] ^ b[i]
        if differ != 0:
            break
        done += COMPARED
    while done < length and a[done] == b[done]:
        done += 1
    return done


@uncounted
def copy(target: U64, at: int, source: U64, start: int, length: int) -> None:
    """Copy a stretch between arrays that do not overlap."""
    a, b = target[at : at + length], source[start : start + length]
    for i in range(length):
        a[i] = b[i]


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


# ---------------------------------------------------------------- Bloom filter of two generations, three probes

# Blocks that a generation takes for each of its words: 8 bits a block fill 31 % of it, and 6 % of strangers pass one or the other.
REMEMBERED_A_WORD = 8


@uncounted
def _probe(key: int) -> tuple[np.uint64, np.uint64]:
    mixed = _mix(key)
    return mixed, (mixed >> np.uint64(32)) | np.uint64(1)


@uncounted
def filter_add(known: U64, young: int, key: int) -> None:
    """Enter a block in generation `young`, 0 or 1: the first or the second half of `known`."""
    half = known.size // 2
    mixed, step = _probe(key)
    for _ in range(3):
        bit = mixed & np.uint64(64 * half - 1)
        known[young * half + np.int64(bit >> np.uint64(6))] |= np.uint64(1) << (bit & np.uint64(63))
        mixed += step


@uncounted
def filter_clear(known: U64, generation: int) -> None:
    """Forget one generation."""
    half = known.size // 2
    for i in range(generation * half, (generation + 1) * half):
        known[i] = 0


@uncounted
def filter_has(known: U64, key: int) -> bool:
    """Whether a block is in either generation; it may be said of one that is not."""
    half = known.size // 2
    mixed, step = _probe(key)
    first = second = np.uint64(1)
    for _ in range(3):
        bit = mixed & np.uint64(64 * half - 1)
        word, shift = np.int64(bit >> np.uint64(6)), bit & np.uint64(63)
        first &= known[word] >> shift
        second &= known[half + word] >> shift
        mixed += step
    return (first | second) != 0


@nb.njit(cache=True, nogil=True)
def filter_has_each(known: U64, hashes: U64) -> npt.NDArray[np.bool_]:
    """Which hashes the filter of trimmed blocks knows."""
    out = np.empty(hashes.size, np.bool_)
    for i in range(hashes.size):
        out[i] = filter_has(known, hashes[i])
    return out
