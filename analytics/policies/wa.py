"""WA, the workload-aware policy of "KVCache in the Wild": evict what is least likely to come back while it would be kept, in both forms.

It is watched in two ways, and falls back to leaf-first LRU request by request: where the fits do not hold (`Mode`), and by a guard that
bounds what it can lose to LRU. The guard runs an LRU of the same capacity beside the cache. Let `lost` be the LRU's hits less the cache's,
and `apart` the blocks that the LRU holds and the cache does not. Evicting by LRU lets the cache grow into the LRU: each block apart is
missed once at most on the way, so `lost + apart` does not grow meanwhile. WA may therefore choose only while `lost + apart` is below the
allowance, `ALLOWED` of the blocks asked for so far; then its hit ratio is never further below the LRU's than that.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from analytics.policies.cursor import CLOCK, FORM, HIT, KEY, REQUEST, Cursor, Trace, advance, enter, full, leave, new_cursor
from analytics.policies.heads import Heads, evict, head, make_heads, offer_freed, older, oldest, tag
from analytics.policies.lists import pop_free
from analytics.policies.queues import Queues, append, kernel, make_queues, remove
from analytics.policies.wa_fit import EVERY, KS_LIMIT, Fits, fit_trace

I32 = npt.NDArray[np.int32]
I8 = npt.NDArray[np.int8]

ALLOWED = 0.004  # of all blocks asked for: half a point of the token hit ratio, less what unequal tails make of blocks
LIFE_WEIGHT = 0.01  # of the newest victim in the mean idle time of victims


WA_CHOOSES, GUARDED = 0, 4


class Mode(IntEnum):
    """Who chooses the victims of a request: WA, or LRU for the reason that the name says."""

    WA = WA_CHOOSES
    ONE_CATEGORY = 1
    FEW_SAMPLES = 2
    POOR_FIT = 3
    GUARD = GUARDED


@dataclass(frozen=True)
class WaReport:
    """How long WA was in fallback: share of the requests (0 to 1) by mode, and the most it was behind LRU, in blocks of all asked for."""

    shares: dict[str, float]
    lost_ratio: float

    @property
    def fallback_ratio(self) -> float:
        """Share of the requests at which LRU chose."""
        return 1.0 - self.shares["wa"]


def wa(trace: Trace, cursor: Cursor, capacity: int) -> None:
    """Workload-aware: the block whose category, age and lifespan make its return least likely leaves; of equals the deepest.

    Per category (type and turn) q of the touches come back, after an exponential time of rate r (`wa_fit`). Of a block idle for an age,
    P(back within a life) = q e^(-r age) (1 - e^(-r life)) / (1 - q + q e^(-r age)), where life is how long blocks lately stayed idle before
    they were evicted. The paper takes the probability mass F(age + life) - F(age); the share q and the condition that it has not come back
    so far are ours. One queue a category by recency, only their heads are compared: O(categories) an eviction. With one category, too few
    samples, or a poor fit (Kolmogorov-Smirnov) LRU chooses, and where the guard says so; `wa_report` tells for how long. In the plain
    form blocks are in order of their touches, as for `lru`. Source: KVCache in the Wild, ATC 2025.
    """
    replay_wa(trace, cursor, capacity)


def wa_report(trace: Trace, capacity: int, form: int) -> WaReport:
    """What `wa` did on a trace: arguments as of `new_cursor`. Cost: that of the policy."""
    capacity = min(capacity, trace.parent.size)
    if not capacity or not trace.ids.size:
        return WaReport({mode.name.lower(): float(mode is Mode.FEW_SAMPLES) for mode in Mode}, 0.0)
    modes, worst = replay_wa(trace, new_cursor(trace, capacity, form), capacity)
    counts = np.bincount(modes, minlength=len(Mode)) / max(modes.size, 1)
    return WaReport({mode.name.lower(): float(counts[mode]) for mode in Mode}, worst)


def replay_wa(trace: Trace, cursor: Cursor, capacity: int, allowed: float = ALLOWED) -> tuple[I8, float]:
    """The walk, the mode of each request, and the most that hits were behind LRU's in shares of the blocks asked for."""
    fits = fit_trace(trace)
    modes = modes_of_fits(fits)
    shadow = new_cursor(trace, capacity, int(cursor.at[FORM]))
    heads, queues = make_heads(trace.parent.size, capacity, fits.groups), make_queues(trace.parent.size, capacity)
    last = np.zeros(trace.parent.size, np.int32)
    worst = _wa(trace, cursor, shadow, heads, queues, last, fits, modes, allowed)
    return modes, float(worst)


def modes_of_fits(fits: Fits) -> I8:
    """Mode of each request as far as the fits decide: LRU unless most of the sample's newest touches are of categories that fit."""
    good = fits.distance[:, :-1] <= KS_LIMIT
    weight = fits.touches[:, :-1].astype(np.float64)
    total = np.maximum(weight.sum(axis=1), 1.0)
    by_fit = np.full(fits.reused.shape[0], Mode.WA, np.int8)
    by_fit[(weight * good).sum(axis=1) / total < 0.5] = Mode.POOR_FIT
    by_fit[(weight * ~np.isnan(fits.distance[:, :-1])).sum(axis=1) / total < 0.5] = Mode.FEW_SAMPLES
    if fits.groups == 1:
        by_fit[:] = Mode.ONE_CATEGORY
    return np.repeat(by_fit, EVERY)[: fits.group.size]


@kernel
def _wa(
    trace: Trace, cursor: Cursor, shadow: Cursor, heads: Heads, queues: Queues, last: I32, fits: Fits, modes: I8, allowed: float,
) -> float:  # fmt: skip
    before, lost, apart, asked, worst, life_s = -1, 0, 0, 0, 0.0, 0.0
    while advance(cursor, trace):
        advance(shadow, trace)
        key, request = cursor.at[KEY], cursor.at[REQUEST]
        if request != before:
            worst = max(worst, lost / max(asked, 1))
            blocks = trace.offsets[request + 1] - trace.offsets[request]
            asked += blocks
            if modes[request] == WA_CHOOSES and lost + apart + blocks > allowed * asked:
                modes[request] = GUARDED
        before = offer_freed(cursor, trace, heads, before)
        apart += _lru_step(trace, shadow, queues, cursor, key)
        lost += int(shadow.at[HIT]) - int(cursor.at[HIT])
        if not cursor.at[HIT]:
            while full(cursor):
                by_wa = modes[request] == WA_CHOOSES
                victim = _least_likely(trace, cursor, heads, fits, last, life_s) if by_wa else oldest(cursor, heads)
                idle_s = (trace.ts_us[request] - trace.ts_us[last[victim]]) / 1e6
                life_s += LIFE_WEIGHT * (idle_s - life_s) if life_s > 0.0 else idle_s
                evict(cursor, trace, heads, victim)
                apart += int(shadow.resident[victim])
            enter(cursor, trace, key)
            apart -= int(shadow.resident[key])
        last[key] = request
        tag(cursor, trace, heads, key, fits.group[request], float(cursor.at[CLOCK]))
    return max(worst, lost / max(asked, 1))


@kernel
def _lru_step(trace: Trace, shadow: Cursor, queues: Queues, cursor: Cursor, key: int) -> int:
    """One access of the LRU beside the cache; returns by how much more they are apart."""
    more = 0
    if shadow.at[HIT]:
        remove(queues, key)
    else:
        while full(shadow):
            victim = pop_free(shadow, queues, 0)
            leave(shadow, trace, victim)
            more -= int(not cursor.resident[victim])
        enter(shadow, trace, key)
        more += int(not cursor.resident[key])
    append(queues, 0, key)
    return more


@kernel
def _least_likely(trace: Trace, cursor: Cursor, heads: Heads, fits: Fits, last: I32, life_s: float) -> int:
    best, least, now_us, fit = -1, np.inf, trace.ts_us[cursor.at[REQUEST]], cursor.at[REQUEST] // EVERY
    pooled = heads.size.size
    for group in range(pooled):
        key = head(cursor, heads, group)
        if key >= 0:
            use = group if fits.distance[fit, group] <= KS_LIMIT or np.isnan(fits.reused[fit, pooled]) else pooled
            idle_s = (now_us - trace.ts_us[last[key]]) / 1e6
            q, rate = fits.reused[fit, use], fits.rate_s[fit, use]
            still = q * np.exp(-rate * idle_s)
            chance = still / (1.0 - q + still) * (1.0 - np.exp(-rate * life_s))
            if best < 0 or chance < least or (chance == least and older(heads, key, best)):
                best, least = key, chance
    return best
