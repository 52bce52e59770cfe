"""LFU, in O(1) an access. Kernel as in `analytics.policies.fifos`."""

from __future__ import annotations

import numba as nb
import numpy as np
import numpy.typing as npt

Bools = npt.NDArray[np.bool_]
I32 = npt.NDArray[np.int32]

COUNT, BEFORE, AFTER = range(3)


@nb.njit(cache=True, nogil=True)
def lfu_kernel(ids: I32, n_ids: int, capacity: int, hits: Bools) -> None:
    """Least frequently used while resident; among equals the one that has stood longest at its count.

    One ring a count, headed by node `n_ids + count`; counts above what the most frequent id can reach need no ring.
    Source: Shah, Mitra and Matani 2010 for the rings.
    """
    nodes = np.zeros((n_ids + _most_frequent(ids, n_ids) + 1, 3), np.int32)
    for head in range(n_ids, nodes.shape[0]):
        nodes[head, BEFORE] = nodes[head, AFTER] = head
    resident, least = 0, 1
    for i in range(ids.size):
        key = ids[i]
        count = nodes[key, COUNT]
        hits[i] = count > 0
        if count > 0:
            _unlink(nodes, key)
            if count == least and nodes[n_ids + count, AFTER] == n_ids + count:
                least += 1
        else:
            if resident == capacity:
                victim = nodes[n_ids + least, AFTER]
                _unlink(nodes, victim)
                nodes[victim, COUNT] = 0
            else:
                resident += 1
            least = 1
        nodes[key, COUNT] = count + 1
        _link_last(nodes, key, n_ids + count + 1)


@nb.njit(cache=True, nogil=True)
def _most_frequent(ids: I32, n_ids: int) -> int:
    counts, most = np.zeros(n_ids, np.int32), 1
    for i in range(ids.size):
        counts[ids[i]] += 1
        most = max(most, counts[ids[i]])
    return most


@nb.njit(cache=True, nogil=True)
def _unlink(nodes: I32, node: int) -> None:
    before, after = nodes[node, BEFORE], nodes[node, AFTER]
    nodes[before, AFTER], nodes[after, BEFORE] = after, before


@nb.njit(cache=True, nogil=True)
def _link_last(nodes: I32, node: int, head: int) -> None:
    last = nodes[head, BEFORE]
    nodes[last, AFTER], nodes[node, BEFORE] = node, last
    nodes[node, AFTER], nodes[head, BEFORE] = head, node
