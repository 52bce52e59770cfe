"""Policies that learn online when a block will be asked for next, or which of two sooner: LRB, 3L-Cache and HALP, in both forms.

Models are small and trained inside the walk on examples that it saw itself; until the first is trained, the longest idle candidate goes.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from analytics.policies.boosting import BINS, Forest, bin_of, fit, make_forest, predict
from analytics.policies.cursor import CAPACITY, CLOCK, FORM, HIT, KEY, PLAIN, REQUEST, Cursor, Trace, advance, full
from analytics.policies.free import Pool, below, draw, drop, freed_by_turn, freed_parent, make_pool, offer, seeded
from analytics.policies.lists import depart, front_free, store
from analytics.policies.queues import BACK, FRONT, QUEUES, Queues, append, kernel, make_queues, remove

F64 = npt.NDArray[np.float64]
I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]
U8 = npt.NDArray[np.uint8]
U64 = npt.NDArray[np.uint64]

LRB, THREE_L, HALP = range(3)
GAPS, FEATURES = 3, 7
SAMPLE, HALP_SAMPLE, LOOK_AT = 64, 4, 256
EXAMPLES, BATCH_EXAMPLES, PENDING, WINDOW_OVER_CAPACITY = 2048, 16, 8192, 4
HIDDEN, STEP = 8, 0.05
FILLED, OLDEST, NEWEST, TRAINED, BATCH, NEXT, NUMBERS = range(7)


class History(NamedTuple):
    """Per id, kept when it leaves: `last` int64 clock of its last use · `gaps` int64[GAPS] between its last uses, newest first (0: none) ·
    `times` int32 uses · `decayed` float64 uses, halved every capacity of accesses · `example` int64 pending example, -1 for none."""

    last: I64
    gaps: I64
    times: I32
    decayed: F64
    example: I64


class Learner(NamedTuple):
    """A model and what it will learn from: examples wait in a ring (`key`, `since`, `x`) for their key's next use.

    `numbers`: FILLED examples with an answer, OLDEST and NEWEST pending ones, TRAINED times; BATCH and NEXT of the victims chosen ahead.
    """

    forest: Forest
    key: I32
    since: I64
    x: U8
    numbers: I64
    batch: I32
    chosen_at: I64
    scores: F64
    row: U8
    rival: I32
    inner: F64
    outer: F64


def lrb(trace: Trace, cursor: Cursor, capacity: int, seed: int = 1) -> None:
    """Learning relaxed Belady: of 64 drawn evict the one whose next use is predicted farthest away.

    Boosted trees predict log2 of the time to the next use from the gaps between uses, idle time, uses, decayed uses and position, and are
    trained anew every 2,048 examples; one candidate of each eviction becomes an example, answered at its next use or, as twice that, after
    a memory window of 4 capacities. The paper has 32 gaps, 10 decayed counters, LightGBM and a tuned window. Cost: 0.1 M/s.
    Source: Song et al., NSDI 2020.
    """
    _run(trace, cursor, capacity, LRB, seed)


def three_l_cache(trace: Trace, cursor: Cursor, capacity: int, seed: int = 1) -> None:
    """3L-Cache: as LRB, but 64 candidates, half from the old end of an LRU queue and half drawn, give a batch of 32 victims.

    One that was used since it was chosen, or is held, is passed over; 16 of the candidates become examples. So two predictions are made an
    eviction, not 64. The paper's pruning of training data and adaptive sampling are left out. Source: 3L-Cache, FAST 2025.
    """
    _run(trace, cursor, capacity, THREE_L, seed)


def halp(trace: Trace, cursor: Cursor, capacity: int, seed: int = 1) -> None:
    """HALP: four of the 32 longest idle blocks meet in a knock-out decided by a small neural network, and the loser goes.

    One hidden layer of 8 scores a block; it learns from pairs of loser and last rival: the one that is used first should have stayed.
    The paper's features of content and its sampled candidates are left out. Source: Song et al., NSDI 2023.
    """
    _run(trace, cursor, capacity, HALP, seed)


def _run(trace: Trace, cursor: Cursor, capacity: int, rule: int, seed: int) -> None:
    n = trace.parent.size
    zeros = np.zeros(n, np.int64)
    history = History(zeros, np.zeros((n, GAPS), np.int64), np.zeros(n, np.int32), np.zeros(n), np.full(n, -1, np.int64))
    pending = np.zeros(PENDING, np.int32), np.zeros(PENDING, np.int64), np.zeros((PENDING, 2, FEATURES), np.uint8)
    inner = np.random.default_rng(seed).normal(0, 0.3, (HIDDEN, FEATURES + 1))
    learner = Learner(
        make_forest(EXAMPLES, FEATURES), *pending, np.zeros(NUMBERS, np.int64), np.zeros(SAMPLE, np.int32), np.zeros(SAMPLE, np.int64),
        np.zeros(SAMPLE), np.zeros(FEATURES, np.uint8), np.full(PENDING, -1, np.int32), inner, np.zeros(HIDDEN),
    )  # fmt: skip
    _walk(trace, cursor, make_queues(n, capacity), make_pool(n, capacity), history, learner, seeded(seed), rule)


@kernel
def _walk(trace: Trace, cursor: Cursor, queues: Queues, pool: Pool, history: History, learner: Learner, random: U64, rule: int) -> None:
    before = -1
    while advance(cursor, trace):
        key, now = cursor.at[KEY], cursor.at[CLOCK]
        offer(pool, freed_by_turn(cursor, trace, before))
        before = cursor.at[REQUEST]
        _answer(cursor, history, learner, key)
        if history.times[key] > 0:
            for i in range(GAPS - 1, 0, -1):
                history.gaps[key, i] = history.gaps[key, i - 1]
            history.gaps[key, 0] = now - history.last[key]
            history.decayed[key] *= 0.5 ** ((now - history.last[key]) / cursor.at[CAPACITY])
        history.times[key] += 1
        history.decayed[key] += 1.0
        history.last[key] = now
        if cursor.at[HIT]:
            remove(queues, key)
            append(queues, 0, key)
            continue
        while full(cursor):
            victim = _victim(trace, cursor, queues, pool, history, learner, random, rule)
            drop(pool, victim)
            remove(queues, victim)
            depart(cursor, trace, queues, victim)
            offer(pool, freed_parent(cursor, trace, victim))
        store(cursor, trace, queues, 0, key)
        if cursor.at[FORM] == PLAIN:
            offer(pool, key)


@kernel
def _victim(trace: Trace, cursor: Cursor, queues: Queues, pool: Pool, history: History, learner: Learner, random: U64, rule: int) -> int:
    numbers, batch = learner.numbers, learner.batch
    if rule == THREE_L:
        while numbers[NEXT] < numbers[BATCH]:
            key = batch[numbers[NEXT]]
            numbers[NEXT] += 1
            if cursor.resident[key] and cursor.held[key] == 0 and history.last[key] <= learner.chosen_at[0]:
                return key
    found = 0
    if rule != LRB:
        found = _longest_idle(cursor, queues, batch, SAMPLE // 2)
    if rule == HALP and found > 0:
        return _knock_out(trace, cursor, history, learner, found)
    while found < SAMPLE:
        batch[found] = draw(cursor, pool, random)
        found += 1
    for i in range(found):
        _describe(trace, cursor, history, batch[i], learner.row)
        idle = np.log2(cursor.at[CLOCK] - history.last[batch[i]] + 1.0)
        learner.scores[i] = predict(learner.forest, learner.row) if numbers[TRAINED] > 0 else idle
    for _ in range(BATCH_EXAMPLES if rule == THREE_L else 1):
        _remember(trace, cursor, history, learner, batch[below(random, found)], -1)
    _farthest_first(learner, found, 1 if rule == LRB else found // 2)
    numbers[BATCH], numbers[NEXT], learner.chosen_at[0] = found // 2, 1, cursor.at[CLOCK]
    return batch[0]


@kernel
def _longest_idle(cursor: Cursor, queues: Queues, into: I32, most: int) -> int:
    """Number of blocks found that are not held, at the old end of the queue; few entries are looked at, so that it may be none."""
    front_free(cursor, queues, 0)
    found, at = 0, queues.ends[0, FRONT]
    last = min(queues.ends[0, BACK], at + LOOK_AT)
    while at < last and found < most:
        key = queues.entries[0, at]
        if queues.at[key] == at * QUEUES and cursor.held[key] == 0:
            into[found] = key
            found += 1
        at += 1
    return found


@kernel
def _farthest_first(learner: Learner, found: int, wanted: int) -> None:
    """Bring the `wanted` candidates of the highest scores to the front, in order; of equals the first found."""
    for i in range(wanted):
        best = i
        for j in range(i + 1, found):
            if learner.scores[j] > learner.scores[best]:
                best = j
        learner.scores[i], learner.scores[best] = learner.scores[best], learner.scores[i]
        learner.batch[i], learner.batch[best] = learner.batch[best], learner.batch[i]


@kernel
def _describe(trace: Trace, cursor: Cursor, history: History, key: int, row: U8) -> None:
    """Features of a block now, binned."""
    now, unit = cursor.at[CLOCK], 256.0 / cursor.at[CAPACITY]
    row[0] = bin_of(unit * (now - history.last[key]))
    for i in range(GAPS):
        row[1 + i] = bin_of(unit * history.gaps[key, i]) if history.gaps[key, i] > 0 else BINS - 1
    row[4] = bin_of(float(history.times[key]))
    row[5] = bin_of(16.0 * history.decayed[key] * 0.5 ** ((now - history.last[key]) / cursor.at[CAPACITY]))
    row[6] = bin_of(float(trace.depth[key]))


@kernel
def _make_way(cursor: Cursor, history: History, learner: Learner, answer: bool) -> int:
    """Place in the ring for a new example. Those that waited too long go (with twice the window for an answer, if they get one)."""
    numbers, window = learner.numbers, WINDOW_OVER_CAPACITY * cursor.at[CAPACITY]
    while numbers[OLDEST] < numbers[NEWEST]:
        at = numbers[OLDEST] % PENDING
        if cursor.at[CLOCK] - learner.since[at] <= window and numbers[NEWEST] - numbers[OLDEST] < PENDING:
            break
        for key in (learner.key[at], learner.rival[at]):
            if key >= 0 and history.example[key] == numbers[OLDEST]:
                history.example[key] = -1
                if answer:
                    _learn(learner, at, np.log2(2.0 * window))
        numbers[OLDEST] += 1
    numbers[NEWEST] += 1
    return (numbers[NEWEST] - 1) % PENDING


@kernel
def _remember(trace: Trace, cursor: Cursor, history: History, learner: Learner, key: int, rival: int) -> None:
    """Make a block, or a pair, an example that waits for the next use. A lone block that waits already is left to wait."""
    if rival < 0 and history.example[key] >= 0:
        return
    at = _make_way(cursor, history, learner, rival < 0)
    learner.key[at], learner.rival[at], learner.since[at] = key, rival, cursor.at[CLOCK]
    _describe(trace, cursor, history, key, learner.x[at, 0])
    history.example[key] = learner.numbers[NEWEST] - 1
    if rival >= 0:
        _describe(trace, cursor, history, rival, learner.x[at, 1])
        history.example[rival] = learner.numbers[NEWEST] - 1


@kernel
def _answer(cursor: Cursor, history: History, learner: Learner, key: int) -> None:
    """The block of a pending example is used: its time is the answer, or of a pair it is the one that should have stayed."""
    number = history.example[key]
    if number < 0:
        return
    history.example[key] = -1
    at = number % PENDING
    rival = learner.rival[at]
    if rival < 0:
        _learn(learner, at, np.log2(cursor.at[CLOCK] - learner.since[at] + 1.0))
        return
    other, kept = (rival, 0) if key == learner.key[at] else (learner.key[at], 1)
    if history.example[other] == number:
        history.example[other] = -1
    _prefer(learner, learner.x[at, kept], learner.x[at, 1 - kept])


@kernel
def _learn(learner: Learner, at: int, answer: float) -> None:
    numbers, forest = learner.numbers, learner.forest
    for i in range(FEATURES):
        forest.x[numbers[FILLED], i] = learner.x[at, 0, i]
    forest.y[numbers[FILLED]] = answer
    numbers[FILLED] += 1
    if numbers[FILLED] == EXAMPLES:
        fit(forest, EXAMPLES)
        numbers[FILLED] = 0
        numbers[TRAINED] += 1


@kernel
def _knock_out(trace: Trace, cursor: Cursor, history: History, learner: Learner, found: int) -> int:
    """The candidate that the network finds least worth keeping; the first, longest idle, until it has learned something."""
    worst = 0
    for i in range(1, HALP_SAMPLE):
        rival = i * found // HALP_SAMPLE
        _describe(trace, cursor, history, learner.batch[worst], learner.row)
        score = _score(learner, learner.row)
        _describe(trace, cursor, history, learner.batch[rival], learner.row)
        lower = _score(learner, learner.row) < score
        loser, winner = (rival, worst) if lower else (worst, rival)
        if i == HALP_SAMPLE - 1 and learner.batch[loser] != learner.batch[winner]:
            _remember(trace, cursor, history, learner, learner.batch[loser], learner.batch[winner])
        worst = loser
    return learner.batch[worst]


@kernel
def _hidden(learner: Learner, x: U8, unit: int) -> float:
    total = learner.inner[unit, FEATURES]
    for i in range(FEATURES):
        total += learner.inner[unit, i] * x[i] * (2.0 / BINS)
    return np.tanh(total)


@kernel
def _score(learner: Learner, x: U8) -> float:
    out = 0.0
    for unit in range(HIDDEN):
        out += learner.outer[unit] * _hidden(learner, x, unit)
    return out


@kernel
def _prefer(learner: Learner, kept: U8, gone: U8) -> None:
    """One step of stochastic gradient on the logistic loss of score(kept) - score(gone)."""
    pull = STEP / (1.0 + np.exp(_score(learner, kept) - _score(learner, gone)))
    for unit in range(HIDDEN):
        a, b, weight = _hidden(learner, kept, unit), _hidden(learner, gone, unit), learner.outer[unit]
        learner.outer[unit] += pull * (a - b)
        for i in range(FEATURES):
            learner.inner[unit, i] += pull * weight * (2.0 / BINS) * ((1.0 - a * a) * kept[i] - (1.0 - b * b) * gone[i])
        learner.inner[unit, FEATURES] += pull * weight * ((1.0 - a * a) - (1.0 - b * b))
