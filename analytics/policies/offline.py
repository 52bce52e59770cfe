"""Belady's MIN: what no policy can beat. Arguments as in `analytics.policies.fifos`."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from analytics.policies.cursor import CAPACITY, Cursor, Trace
from analytics.policies.queues import kernel

Bools = npt.NDArray[np.bool_]
I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]
U64 = npt.NDArray[np.uint64]

_LEVELS = 6  # 64^6 accesses


def belady(ids: I32, n_ids: int, capacity: int, hits: Bools) -> None:
    """MIN with bypass: of the cached blocks and the one just used, drop the one whose next use is farthest, if there is no room for all.

    Bypass makes it an upper bound for policies that refuse admission as well. No two blocks have their next use at the same access, so the
    cache is the set of its next uses: a bitmap over the trace, six levels deep, in which the farthest is the highest set bit.
    Source: Belady, IBM Systems Journal 5(2), 1966; Mattson et al. 1970.
    """
    following = np.empty(ids.size, np.int32)
    _next_uses(ids, following, np.full(n_ids, ids.size, np.int32))
    _belady(ids, capacity, hits, following, *_empty_set(ids.size))


def belady_walk(trace: Trace, cursor: Cursor, capacity: int) -> None:
    """MIN in either form: it keeps a block at least as long as those behind it, whose next uses come later, so both are one.

    With sizes it is no optimum: whatever fits is stored, in the place of those whose next uses are farthest, as libCacheSim has it.
    """
    if trace.sizes is None:
        belady(trace.ids, trace.parent.size, capacity, cursor.hits)
        return
    following = np.empty(trace.ids.size, np.int32)
    _next_uses(trace.ids, following, np.full(trace.parent.size, trace.ids.size, np.int32))
    _belady_sized(trace.ids, trace.sizes, int(cursor.at[CAPACITY]), cursor.hits, following, *_empty_set(trace.ids.size))


@kernel
def _belady(ids: I32, capacity: int, hits: Bools, following: I32, uses: U64, starts: I64) -> None:
    resident = 0
    for i in range(ids.size):
        hits[i] = _has(uses, i)
        if hits[i]:
            _drop(uses, starts, i)
            resident -= 1
        if following[i] < ids.size:
            _add(uses, starts, following[i])
            resident += 1
        if resident > capacity:
            _drop(uses, starts, _highest(uses, starts))
            resident -= 1


@kernel
def _belady_sized(ids: I32, sizes: I64, capacity: int, hits: Bools, following: I32, uses: U64, starts: I64) -> None:
    """What is never used again takes no room: it would be the first to go."""
    taken = 0
    for i in range(ids.size):
        size = sizes[ids[i]]
        hits[i] = _has(uses, i)
        if hits[i]:
            _drop(uses, starts, i)
            taken -= size
        while taken + size > capacity >= size:
            victim = _highest(uses, starts)
            _drop(uses, starts, victim)
            taken -= sizes[ids[victim]]
        if following[i] < ids.size and size <= capacity:
            _add(uses, starts, following[i])
            taken += size


@kernel
def _next_uses(ids: I32, following: I32, seen: I32) -> None:
    """Index of the next access of the same id, or their number where there is none."""
    for i in range(ids.size - 1, -1, -1):
        following[i] = seen[ids[i]]
        seen[ids[i]] = i


def _empty_set(size: int) -> tuple[U64, I64]:
    """A set over [0, size): words of 64 members, then of 64 words, and so on; and where each level begins."""
    starts, words = [0], size
    for _ in range(_LEVELS):
        words = (words + 63) // 64
        starts.append(starts[-1] + words)
    return np.zeros(starts[-1], np.uint64), np.array(starts, np.int64)


@kernel
def _has(words: U64, member: int) -> bool:
    return (words[member >> 6] >> np.uint64(member & 63)) & np.uint64(1) != 0


@kernel
def _add(words: U64, starts: I64, member: int) -> None:
    for level in range(_LEVELS):
        word = starts[level] + (member >> 6)
        before = words[word]
        words[word] = before | (np.uint64(1) << np.uint64(member & 63))
        if before != 0:
            return
        member >>= 6


@kernel
def _drop(words: U64, starts: I64, member: int) -> None:
    for level in range(_LEVELS):
        word = starts[level] + (member >> 6)
        words[word] &= ~(np.uint64(1) << np.uint64(member & 63))
        if words[word] != 0:
            return
        member >>= 6


@kernel
def _highest(words: U64, starts: I64) -> int:
    """Highest member of a set that is not empty."""
    member = np.int64(0)
    for level in range(_LEVELS - 1, -1, -1):
        member = (member << 6) + _top_bit(words[starts[level] + member])
    return int(member)


@kernel
def _top_bit(word: np.uint64) -> np.int64:
    top = np.int64(0)
    for step in (32, 16, 8, 4, 2, 1):
        if word >> np.uint64(step) != 0:
            word >>= np.uint64(step)
            top += step
    return top
