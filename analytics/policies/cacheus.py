"""CACHEUS in both forms: a scan-resistant LRU and a churn-resistant LFU propose victims, regret says which is listened to."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from analytics.policies.cursor import CAPACITY, CLOCK, FORM, HIT, KEY, PLAIN, REQUEST, Cursor, Trace, advance, full
from analytics.policies.free import Heap, below, discard, freed_by_turn, freed_parent, least_free, make_heap, push, seeded
from analytics.policies.lists import depart, front_free, store
from analytics.policies.queues import Queues, append, kernel, length, make_queues, pop, queue_of, remove

Bools = npt.NDArray[np.bool_]
F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]
U64 = npt.NDArray[np.uint64]

SCAN, REUSED, LRU_GHOST, LFU_GHOST = range(4)
# Numbers of a walk: weight of the LRU, learning rate, that of the period before, hit ratio of the period before, hits of this one, periods
# without gain; room of SCAN, demoted blocks in it, blocks not used again.
LRU_WEIGHT, RATE, RATE_BEFORE, RATIO_BEFORE, HITS, STALE, SCAN_ROOM, DEMOTED, NEW, NUMBERS = range(10)
LEAST_RATE, PERIODS_TO_RESTART = 1e-3, 10


def cacheus(trace: Trace, cursor: Cursor, capacity: int, seed: int = 1) -> None:
    """CACHEUS: evict what SR-LRU or CR-LFU proposes, drawn by weights that a miss in one's ghost (half the capacity each) lowers.

    SR-LRU keeps blocks used again apart from a scan part whose room moves when demoted blocks are hit or new ones come back. CR-LFU evicts
    the least used, the most recent of equals. The learning rate follows the hit ratio from one cache-full of accesses to the next.
    Source: Rodriguez et al., FAST 2021.
    """
    n, numbers = trace.parent.size, np.zeros(NUMBERS)
    numbers[LRU_WEIGHT], numbers[SCAN_ROOM] = 0.5, max(capacity // 2, 1)
    numbers[RATE] = numbers[RATE_BEFORE] = np.sqrt(2 * np.log(2) / max(capacity, 1))
    heap, queues = make_heap(n, capacity), make_queues(n, capacity + 1)
    _cacheus(trace, cursor, queues, heap, np.zeros(n, np.bool_), np.zeros(n, np.bool_), numbers, seeded(seed))


@kernel
def _cacheus(trace: Trace, cursor: Cursor, queues: Queues, heap: Heap, is_demoted: Bools, is_new: Bools, numbers: F64, random: U64) -> None:
    """`heap.priority` of a block is its uses, ghosts included, 0 for others."""
    before = -1
    while advance(cursor, trace):
        key, queue = cursor.at[KEY], queue_of(queues, cursor.at[KEY])
        push(heap, freed_by_turn(cursor, trace, before))
        before = cursor.at[REQUEST]
        if cursor.at[CLOCK] % max(cursor.at[CAPACITY], 1) == 0:
            _adapt_rate(numbers, cursor.at[CAPACITY], random)
        numbers[HITS] += cursor.at[HIT]
        if queue >= LRU_GHOST:
            remove(queues, key)
            _regret(numbers, queue == LRU_GHOST)
            if queue == LRU_GHOST and is_new[key]:
                _give_scan(cursor, numbers, max(1.0, numbers[DEMOTED] / max(numbers[NEW], 1.0)))
        heap.priority[key] = heap.priority[key] + 1.0 if queue >= 0 else 1.0
        heap.tie[key] = -cursor.at[CLOCK]
        if cursor.at[HIT]:
            _touch(cursor, queues, is_demoted, is_new, numbers, key)
        else:
            while full(cursor):
                _evict(trace, cursor, queues, heap, is_demoted, is_new, numbers, random)
            is_demoted[key], is_new[key] = False, queue < 0
            numbers[NEW] += is_new[key]
            store(cursor, trace, queues, SCAN if queue < 0 else REUSED, key)
        while length(queues, REUSED) > max(cursor.at[CAPACITY] - numbers[SCAN_ROOM], 1):
            demoted = pop(queues, REUSED)
            is_demoted[demoted] = True
            numbers[DEMOTED] += 1
            append(queues, SCAN, demoted)
        if cursor.at[FORM] == PLAIN or heap.where[key] >= 0:
            push(heap, key)


@kernel
def _touch(cursor: Cursor, queues: Queues, is_demoted: Bools, is_new: Bools, numbers: F64, key: int) -> None:
    if is_demoted[key]:
        _give_scan(cursor, numbers, -max(1.0, numbers[NEW] / max(numbers[DEMOTED], 1.0)))
    _forget(is_demoted, is_new, numbers, key)
    is_demoted[key] = is_new[key] = False
    remove(queues, key)
    append(queues, REUSED, key)


@kernel
def _forget(is_demoted: Bools, is_new: Bools, numbers: F64, key: int) -> None:
    numbers[DEMOTED] -= is_demoted[key]
    numbers[NEW] -= is_new[key]


@kernel
def _give_scan(cursor: Cursor, numbers: F64, blocks: float) -> None:
    numbers[SCAN_ROOM] = min(max(numbers[SCAN_ROOM] + blocks, 1.0), float(max(cursor.at[CAPACITY] - 1, 1)))


@kernel
def _regret(numbers: F64, of_lru: bool) -> None:
    """A block that came back should not have gone: who proposed it loses weight."""
    lru, lfu, loss = numbers[LRU_WEIGHT], 1.0 - numbers[LRU_WEIGHT], np.exp(-numbers[RATE])
    lru, lfu = lru * (loss if of_lru else 1.0), lfu * (1.0 if of_lru else loss)
    numbers[LRU_WEIGHT] = min(max(lru / (lru + lfu), 0.01), 0.99)


@kernel
def _adapt_rate(numbers: F64, period: int, random: U64) -> None:
    """Go on in the direction in which the hit ratio rose; after ten periods without gain start from a drawn rate."""
    ratio, rate = numbers[HITS] / period, numbers[RATE]
    gain, moved = ratio - numbers[RATIO_BEFORE], rate - numbers[RATE_BEFORE]
    if moved != 0.0:
        step = abs(rate * moved)
        numbers[RATE] = min(max(rate + (step if gain * moved > 0 else -step), LEAST_RATE), 1.0)
        numbers[STALE] = 0.0
    elif ratio == 0.0 or gain <= 0.0:
        numbers[STALE] += 1.0
        if numbers[STALE] >= PERIODS_TO_RESTART:
            numbers[RATE], numbers[STALE] = max(below(random, 1000) / 1000.0, LEAST_RATE), 0.0
    numbers[RATE_BEFORE], numbers[RATIO_BEFORE], numbers[HITS] = rate, ratio, 0.0


@kernel
def _evict(trace: Trace, cursor: Cursor, queues: Queues, heap: Heap, is_demoted: Bools, is_new: Bools, numbers: F64, random: U64) -> None:
    """Evict; what both propose leaves no ghost."""
    recent = front_free(cursor, queues, SCAN)
    if recent < 0:
        recent = front_free(cursor, queues, REUSED)
    frequent = least_free(cursor, heap)
    by_lru = below(random, 1 << 30) < numbers[LRU_WEIGHT] * (1 << 30)
    victim = recent if by_lru else frequent
    discard(heap, victim)
    remove(queues, victim)
    _forget(is_demoted, is_new, numbers, victim)
    depart(cursor, trace, queues, victim)
    push(heap, freed_parent(cursor, trace, victim))
    ghost, room = LRU_GHOST if by_lru else LFU_GHOST, max(cursor.at[CAPACITY] // 2, 1)
    if recent != frequent:
        if length(queues, ghost) >= room:
            pop(queues, ghost)
        append(queues, ghost, victim)
