"""Belady's MIN: what no policy can beat. Kernel as in `analytics.policies.fifos`."""

from __future__ import annotations

import numba as nb
import numpy as np
import numpy.typing as npt

Bools = npt.NDArray[np.bool_]
I32 = npt.NDArray[np.int32]
U64 = npt.NDArray[np.uint64]

_LEVELS = 6  # 64^6 accesses


@nb.njit(cache=True, nogil=True)
def belady_kernel(ids: I32, n_ids: int, capacity: int, hits: Bools) -> None:
    """MIN with bypass: of the cached blocks and the one just used, drop the one whose next use is farthest, if there is no room for all.

    Bypass makes it an upper bound for policies that refuse admission as well. No two blocks have their next use at the same access, so the
    cache is the set of its next uses: a bitmap over the trace, six levels deep, in which the farthest is the highest set bit.
    Source: Belady, IBM Systems Journal 5(2), 1966; Mattson et al. 1970.
    """
    following = _next_uses(ids, n_ids)
    uses, starts = _empty_set(ids.size)
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


@nb.njit(cache=True, nogil=True)
def _next_uses(ids: I32, n_ids: int) -> I32:
    """Index of the next access of the same id, or their number where there is none."""
    following, seen = np.empty(ids.size, np.int32), np.full(n_ids, ids.size, np.int32)
    for i in range(ids.size - 1, -1, -1):
        following[i] = seen[ids[i]]
        seen[ids[i]] = i
    return following


@nb.njit(cache=True, nogil=True)
def _empty_set(size: int):  # type: ignore[no-untyped-def]
    """A set over [0, size): words of 64 members, then of 64 words, and so on; `starts` says where each level begins."""
    starts, words = np.zeros(_LEVELS + 1, np.int64), size
    for level in range(_LEVELS):
        words = (words + 63) // 64
        starts[level + 1] = starts[level] + words
    return np.zeros(starts[_LEVELS], np.uint64), starts


@nb.njit(cache=True, nogil=True)
def _has(words: U64, member: int) -> bool:
    return (words[member >> 6] >> np.uint64(member & 63)) & np.uint64(1) != 0


@nb.njit(cache=True, nogil=True)
def _add(words, starts, member):  # type: ignore[no-untyped-def]
    for level in range(_LEVELS):
        word = starts[level] + (member >> 6)
        before = words[word]
        words[word] = before | (np.uint64(1) << np.uint64(member & 63))
        if before != 0:
            return
        member >>= 6


@nb.njit(cache=True, nogil=True)
def _drop(words, starts, member):  # type: ignore[no-untyped-def]
    for level in range(_LEVELS):
        word = starts[level] + (member >> 6)
        words[word] &= ~(np.uint64(1) << np.uint64(member & 63))
        if words[word] != 0:
            return
        member >>= 6


@nb.njit(cache=True, nogil=True)
def _highest(words, starts):  # type: ignore[no-untyped-def]
    """Highest member of a set that is not empty."""
    member = np.int64(0)
    for level in range(_LEVELS - 1, -1, -1):
        member = (member << 6) + _top_bit(words[starts[level] + member])
    return member


@nb.njit(cache=True, nogil=True)
def _top_bit(word):  # type: ignore[no-untyped-def]
    top = np.int64(0)
    for step in (32, 16, 8, 4, 2, 1):
        if word >> np.uint64(step) != 0:
            word >>= np.uint64(step)
            top += step
    return top
