"""Policies that draw a few blocks and evict the one worth least: Hyperbolic, LA-Cache, RFB and LHD, in both forms.

Draws are of blocks that are not held, by a counter that starts at `seed`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from analytics.policies.cursor import CAPACITY, CLOCK, FORM, HIT, KEY, PLAIN, REQUEST, Cursor, Trace, advance, enter, full, leave
from analytics.policies.free import Pool, draw, drop, freed_by_turn, freed_parent, make_pool, offer, seeded
from analytics.policies.queues import kernel

F64 = npt.NDArray[np.float64]
I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]
U64 = npt.NDArray[np.uint64]

HYPERBOLIC, LA_CACHE, RFB, LHD = range(4)
SAMPLE, LHD_SAMPLE, LHD_FIRST_SAMPLE, LHD_FIRST_ESTIMATES = 64, 32, 8, 50
# LHD: classes by the ages at the last two hits, ages in steps of the capacity over AGE_STEPS.
CLASSES, AGES, AGE_STEPS, DECAY = 16, 512, 32, 0.9


class Uses(NamedTuple):
    """What is known of a block: `times` int32 uses while resident · `entered`, `last` int64 clocks · LHD: `group` int32 class, `age`
    int64 of the last hit."""

    times: I32
    entered: I64
    last: I64
    group: I32
    age: I64


class Densities(NamedTuple):
    """LHD's tables, float64[CLASSES, AGES]: `hits` and `evictions` at an age, decayed, and the hit `density` that follows from them."""

    hits: F64
    evictions: F64
    density: F64


def hyperbolic(trace: Trace, cursor: Cursor, capacity: int, per_position: float = 0.0, seed: int = 1) -> None:
    """Evict the least uses over time in the cache of 64 drawn; `per_position` weighs them by prefill cost as in `gdsf`.

    Source: Blankstein, Sen and Freedman, ATC 2017.
    """
    _run(trace, cursor, capacity, HYPERBOLIC, SAMPLE, per_position, seed)


def la_cache(trace: Trace, cursor: Cursor, capacity: int, per_position: float = 0.02, seed: int = 1) -> None:
    """Latency-aware: evict the least miss latency saved per unit of time of 64 drawn.

    That is (uses + 1) * cost / (time in the cache + time since the last use), where a miss costs the block's prefill,
    1 + per_position * position heads' worth. Built from its one-line description; the paper was not read.
    """
    _run(trace, cursor, capacity, LA_CACHE, SAMPLE, per_position, seed)


def rfb(trace: Trace, cursor: Cursor, capacity: int, per_position: float = 0.0, seed: int = 1) -> None:
    """An analytic value between Hyperbolic and LHD: evict the least expected rate of hits of 64 drawn.

    Uses are taken for a Poisson process that may have ended: rate = uses / (time from entry to last use + the mean of that), times the
    probability exp(-rate * idle) that it would have been silent since. Built from its one-line description; the paper was not read.
    """
    _run(trace, cursor, capacity, RFB, SAMPLE, per_position, seed)


def lhd(trace: Trace, cursor: Cursor, capacity: int, interval: int = 1 << 20, seed: int = 1) -> None:
    """Evict the least hit density of 32 drawn: hits expected per block and access of life left, by age and class, learned from events.

    A class is the octave of the sum of the ages at the last two hits, the younger the higher; there are no application classes and no
    explorers, and sizes are one. Ages run in steps of 1/32 of the capacity up to 16 capacities. As in the authors' code densities are
    estimated every `interval` accesses, old events fading by 0.9, 8 are drawn until 50 estimates were made, and the first guess is
    (class + 17) / (age + 1): a short trace sees no more than that. Source: Beckmann, Chen and Cidon, NSDI 2018.
    """
    _run(trace, cursor, capacity, LHD, LHD_FIRST_SAMPLE, 0.0, seed, interval)


def _run(trace: Trace, cursor: Cursor, capacity: int, rule: int, sample: int, per_position: float, seed: int, interval: int = 1) -> None:
    n = trace.parent.size
    uses = Uses(np.zeros(n, np.int32), np.zeros(n, np.int64), np.zeros(n, np.int64), np.zeros(n, np.int32), np.zeros(n, np.int64))
    tables = Densities(*np.zeros((3, CLASSES, AGES)))
    tables.density[:] = np.arange(CLASSES + 1, 2 * CLASSES + 1)[:, None] / np.arange(1, AGES + 1)
    _walk(trace, cursor, make_pool(n, capacity), uses, tables, seeded(seed), rule, sample, per_position, max(interval, 1))


@kernel
def _walk(
    trace: Trace, cursor: Cursor, pool: Pool, uses: Uses, tables: Densities, random: U64, rule: int, sample: int, per_position: float,
    interval: int,
) -> None:  # fmt: skip
    before, span, estimates = -1, 1.0, 0
    step = max(1, cursor.at[CAPACITY] // AGE_STEPS)
    while advance(cursor, trace):
        key, now = cursor.at[KEY], cursor.at[CLOCK]
        offer(pool, freed_by_turn(cursor, trace, before))
        before = cursor.at[REQUEST]
        if rule == LHD and now % interval == 0:
            _estimate(tables)
            estimates += 1
            if estimates == LHD_FIRST_ESTIMATES:
                sample = LHD_SAMPLE
        if cursor.at[HIT]:
            age = min((now - uses.last[key]) // step, AGES - 1)
            tables.hits[uses.group[key], age] += 1.0
            uses.group[key] = _octave(age + uses.age[key])
            uses.age[key] = age
            uses.times[key] += 1
            uses.last[key] = now
            span += 0.01 * (now - uses.entered[key] - span)
            continue
        while full(cursor):
            victim = _worst(trace, cursor, pool, uses, tables, random, rule, sample, per_position, span, step)
            tables.evictions[uses.group[victim], min((now - uses.last[victim]) // step, AGES - 1)] += 1.0
            drop(pool, victim)
            leave(cursor, trace, victim)
            offer(pool, freed_parent(cursor, trace, victim))
        enter(cursor, trace, key)
        uses.times[key], uses.entered[key], uses.last[key], uses.group[key], uses.age[key] = 1, now, now, 0, 0
        if cursor.at[FORM] == PLAIN:
            offer(pool, key)


@kernel
def _worst(
    trace: Trace, cursor: Cursor, pool: Pool, uses: Uses, tables: Densities, random: U64, rule: int, sample: int, per_position: float,
    span: float, step: int,
) -> int:  # fmt: skip
    """The least valuable of `sample` drawn, the first drawn of equals."""
    now, worst, least = cursor.at[CLOCK], np.int64(-1), np.inf
    for _ in range(sample):
        key = draw(cursor, pool, random)
        life, idle = now - uses.entered[key], now - uses.last[key]
        if rule == LHD:
            value = tables.density[uses.group[key], min(idle // step, AGES - 1)]
        elif rule == HYPERBOLIC:
            value = uses.times[key] / life
        elif rule == LA_CACHE:
            value = (uses.times[key] + 1) / (life + idle)
        else:
            rate = uses.times[key] / (life - idle + span)
            value = rate * np.exp(-rate * idle)
        value *= 1.0 + per_position * trace.depth[key]
        if value < least:
            worst, least = np.int64(key), value
    return worst  # type: ignore[return-value]


@kernel
def _octave(age: int) -> int:
    """Class of a block whose last two hits came at ages of this sum: the younger the higher, from 1."""
    out = CLASSES - 1
    while age > 0 and out > 1:
        age >>= 1
        out -= 1
    return out


@kernel
def _estimate(tables: Densities) -> None:
    """Hit density of each class and age from the events at it and later, from the oldest down; then the events fade.

    With H the hits and L the lifetime still to come of all that reached an age, density = H / L.
    """
    for group in range(CLASSES):
        hits = events = life = 0.0
        for age in range(AGES - 1, -1, -1):
            hits += tables.hits[group, age]
            events += tables.hits[group, age] + tables.evictions[group, age]
            life += events
            if events > 1e-3:
                tables.density[group, age] = hits / life
            tables.hits[group, age] *= DECAY
            tables.evictions[group, age] *= DECAY
