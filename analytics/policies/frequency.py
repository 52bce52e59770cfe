"""LFU, in O(1) an access. Arguments as in `analytics.policies.fifos`."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from analytics.policies.queues import kernel

Bools = npt.NDArray[np.bool_]
I32 = npt.NDArray[np.int32]

COUNT, BEFORE, AFTER = range(3)


def lfu(ids: I32, n_ids: int, capacity: int, hits: Bools) -> None:
    """Least frequently used while resident; among equals the one that has stood longest at its count.

    One ring a count, headed by node `n_ids + count`; no count can exceed the uses of the most frequent id.
    Source: Shah, Mitra and Matani 2010 for the rings.
    """
    heads = int(np.bincount(ids, minlength=n_ids).max()) + 1
    nodes = np.zeros((n_ids + heads, 3), np.int32)
    nodes[n_ids:, BEFORE] = nodes[n_ids:, AFTER] = np.arange(n_ids, n_ids + heads)
    _lfu(ids, n_ids, capacity, hits, nodes)


@kernel
def _lfu(ids: I32, n_ids: int, capacity: int, hits: Bools, nodes: I32) -> None:
    resident, least = 0, 1
    for i in range(ids.size):
        key = ids[i]
        count = nodes[key, COUNT]
        hits[i] = count > 0
        if hits[i]:
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


@kernel
def _unlink(nodes: I32, node: int) -> None:
    before, after = nodes[node, BEFORE], nodes[node, AFTER]
    nodes[before, AFTER], nodes[after, BEFORE] = after, before


@kernel
def _link_last(nodes: I32, node: int, head: int) -> None:
    last = nodes[head, BEFORE]
    nodes[last, AFTER], nodes[node, BEFORE] = node, last
    nodes[node, AFTER], nodes[head, BEFORE] = head, node
