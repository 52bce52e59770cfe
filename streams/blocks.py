"""Storage behind the causes: one open-addressing row per known block, and a Bloom filter of forgotten ones.

A row is `HOLD + words` int64: the block's hash (as its bit pattern), its state, until when it is asked for, when it was last seen, and one
bit per instance that holds a copy. One row is one or two cache lines, so a probe costs one miss, not one a column.
"""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

KEY, STATE, ASKED, SEEN, HOLD = range(5)
# STATE is 0 in a free row, else (tenant + 1) << 8 | (cause + 1): how the last copy went and for whom; see `state_of`.
BLOOM_BITS = 1 << 23

Rows = NDArray[np.int64]
Filter = NDArray[np.uint64]


def new_rows(capacity: int, words: int) -> Rows:
    """Free rows; `capacity` must be a power of two, `words` is 64 instances each."""
    return np.zeros((capacity, HOLD + words), np.int64)


@njit(cache=True, nogil=True)
def state_of(cause, tenant):  # type: ignore[no-untyped-def]
    """STATE of a block whose last copy went by `cause` for `tenant` (-1: nobody known)."""
    return np.int64(((tenant + 1) << 8) | (cause + 1))


@njit(cache=True, nogil=True)
def mix(x):  # type: ignore[no-untyped-def]
    """splitmix64 finaliser: spreads small integer hashes (public traces have them) over the table."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@njit(cache=True, nogil=True)
def find(rows, key):  # type: ignore[no-untyped-def]
    """Row of a block (uint64), or the free row where it belongs."""
    mask = np.uint64(rows.shape[0] - 1)
    slot, wanted = mix(key) & mask, np.int64(key)
    while rows[slot, STATE] != 0 and rows[slot, KEY] != wanted:
        slot = (slot + np.uint64(1)) & mask
    return np.int64(slot)


@njit(cache=True, nogil=True)
def warm(rows, keys, begin, end):  # type: ignore[no-untyped-def]
    """Read where some blocks' rows should be, so that the probes that follow hit the cache; the sum is of no use but to be computed.

    These loads do not wait for one another, those of a walk with decisions between them do: that is a factor of several on a large table.
    """
    mask, total = np.uint64(rows.shape[0] - 1), np.int64(0)
    for k in range(begin, end):
        total += rows[mix(keys[k]) & mask, STATE]
    return total


@njit(cache=True, nogil=True)
def claim(rows, slot, key, state):  # type: ignore[no-untyped-def]
    """Give a free row to a block; returns how many blocks that adds."""
    if rows[slot, STATE] != 0:
        return 0
    rows[slot, KEY], rows[slot, STATE], rows[slot, ASKED] = np.int64(key), state, -1
    return 1


@njit(cache=True, nogil=True)
def copy_into(fresh, rows, keep):  # type: ignore[no-untyped-def]
    """Insert the rows that `keep` (uint8 a row) marks into an empty table at least as wide; returns their number."""
    copied = 0
    for old in range(rows.shape[0]):
        if keep[old]:
            new = find(fresh, np.uint64(rows[old, KEY]))
            for column in range(rows.shape[1]):
                fresh[new, column] = rows[old, column]
            copied += 1
    return copied


@njit(cache=True, nogil=True)
def holds(rows, slot, instance):  # type: ignore[no-untyped-def]
    """Whether the instance has a copy."""
    return (rows[slot, HOLD + (instance >> 6)] >> (instance & 63)) & 1 != 0


@njit(cache=True, nogil=True)
def is_held(rows, slot):  # type: ignore[no-untyped-def]
    """Whether any instance has a copy."""
    bits = np.int64(0)
    for column in range(HOLD, rows.shape[1]):
        bits |= rows[slot, column]
    return bits != 0


@njit(cache=True, nogil=True)
def lose(rows, slot, instance, state, ts_us):  # type: ignore[no-untyped-def]
    """Take one instance's copy away; if it was the last, remember how it went."""
    rows[slot, HOLD + (instance >> 6)] &= ~(np.int64(1) << (instance & 63))
    if not is_held(rows, slot):
        rows[slot, STATE], rows[slot, SEEN] = state, ts_us


@njit(cache=True, nogil=True)
def lose_all(rows, instance, state, ts_us):  # type: ignore[no-untyped-def]
    """Take every copy of an instance away. Cost: one pass over the table."""
    for slot in range(rows.shape[0]):
        if rows[slot, STATE] != 0 and holds(rows, slot, instance):
            lose(rows, slot, instance, state, ts_us)


@njit(cache=True, nogil=True)
def filter_add(bloom, keys):  # type: ignore[no-untyped-def]
    """Put blocks into a Bloom filter (three probes)."""
    bits = np.uint64(len(bloom) * 64 - 1)
    for key in keys:
        h = mix(key)
        for _ in range(3):
            bit = h & bits
            bloom[bit >> np.uint64(6)] |= np.uint64(1) << (bit & np.uint64(63))
            h = mix(h + np.uint64(0x9E3779B97F4A7C15))


@njit(cache=True, nogil=True)
def filter_has(bloom, key):  # type: ignore[no-untyped-def]
    """Whether a block may be in the filter; an empty array holds nothing."""
    if len(bloom) == 0:
        return False
    bits = np.uint64(len(bloom) * 64 - 1)
    h = mix(key)
    for _ in range(3):
        bit = h & bits
        if not (bloom[bit >> np.uint64(6)] >> (bit & np.uint64(63))) & np.uint64(1):
            return False
        h = mix(h + np.uint64(0x9E3779B97F4A7C15))
    return True
