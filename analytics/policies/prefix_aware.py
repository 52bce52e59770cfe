"""Policies of papers that know what a prefix cache holds: T-LRU, LPC, KVFlow and CachedAttention, in both forms.

Each needs something of the requests beyond their blocks. Where the trace does not have it (`absent`), each is leaf-first LRU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from analytics.policies.cursor import FORM, HIT, KEY, PLAIN, REQUEST, Cursor, Trace, advance, enter, full, leave
from analytics.policies.engines import vllm_lru
from analytics.policies.free import Pool, discard, drop, freed_by_turn, freed_parent, make_pool, offer, push
from analytics.policies.heads import Heads, evict, head, heap_of, make_heads, offer_freed, tag
from analytics.policies.queues import kernel

Bools = npt.NDArray[np.bool_]
F64 = npt.NDArray[np.float64]
I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]
Predictor = Callable[[Trace], F64]

SAFE, NEEDED = range(2)
APART, AWAITED = range(2)
CHANCES = 32
NEVER = 1 << 62
FIRST_GAP_S = 60.0


def absent(trace: Trace, needs: tuple[str, ...]) -> tuple[str, ...]:
    """Which of the columns that a policy needs the trace does not have; `workflow` no trace has, it is given to the policy itself."""
    there = {
        "session": bool((trace.session >= 0).any()),
        "category": bool((trace.category >= 0).any()),
        "turn": bool((trace.turn > 0).any()),
    }
    return tuple(name for name in needs if not there.get(name, False))


def tail_optimized(trace: Trace, cursor: Cursor, capacity: int, recompute_tokens: float = 2048.0, next_tokens: float = 256.0) -> None:
    """T-LRU: first the blocks without which the session's next prompt still prefills in time, the oldest first; then LRU.

    A session with a history of L tokens (the longest prompt so far; answers are not in a trace) will ask for about L + `next_tokens`, and
    `recompute_tokens` of that can be prefilled within the target. So a block is safe to lose if L + next_tokens - recompute_tokens tokens
    or more stand before it, as its session stood when it was touched last. Without sessions: LRU. Source: arXiv 2510.15152, NeurIPS 2025.
    """
    sessions = int(trace.session.max(initial=-1)) + 1
    heads = make_heads(trace.parent.size, capacity, 2)
    _tail_optimized(trace, cursor, heads, np.zeros(max(sessions, 1), np.int64), next_tokens - recompute_tokens)


@kernel
def _tail_optimized(trace: Trace, cursor: Cursor, heads: Heads, history: I64, margin: float) -> None:
    before = -1
    while advance(cursor, trace):
        key, request = cursor.at[KEY], cursor.at[REQUEST]
        before = offer_freed(cursor, trace, heads, before)
        if not cursor.at[HIT]:
            while full(cursor):
                safe = head(cursor, heads, SAFE)
                evict(cursor, trace, heads, safe if safe >= 0 else head(cursor, heads, NEEDED))
            enter(cursor, trace, key)
        session, group = trace.session[request], NEEDED
        if session >= 0:
            history[session] = max(history[session], trace.prompt_tokens[request])
            if trace.depth[key] * trace.block_size >= history[session] + margin:
                group = SAFE
        tag(cursor, trace, heads, key, group, float(request))


def continuation_rate(trace: Trace) -> F64:
    """Probability that a session goes on after each request, from what was seen before it: the default predictor of `lpc`.

    Per category and turn (counted up to 8): (sessions that went on + 1) / (requests + 2). Requests without a session get 0.5.
    """
    out = np.full(trace.session.size, 0.5)
    went_on: dict[tuple[int, int], int] = {}
    asked: dict[tuple[int, int], int] = {}
    latest: dict[int, tuple[int, int]] = {}
    columns = (trace.session.tolist(), trace.category.tolist(), np.minimum(trace.turn, 8).tolist())
    for request, (session, category, turn) in enumerate(zip(*columns, strict=True)):
        if session < 0:
            continue
        if session in latest:
            went_on[latest[session]] = went_on.get(latest[session], 0) + 1
        group = latest[session] = (category, turn)
        out[request] = (went_on.get(group, 0) + 1) / (asked.get(group, 0) + 2)
        asked[group] = asked.get(group, 0) + 1
    return np.minimum(out, 1.0)


def session_gaps(trace: Trace) -> F64:
    """Mean seconds from a request to the next of its session, over what was seen up to each request; a minute before anything was."""
    following = next_of_session(trace)
    again = following[following < trace.session.size]
    gap_s = np.zeros(trace.session.size)
    gap_s[again] = (trace.ts_us[again] - trace.ts_us[np.flatnonzero(following < trace.session.size)]) / 1e6
    counted = np.zeros(trace.session.size)
    counted[again] = 1
    return (np.cumsum(gap_s) + FIRST_GAP_S) / (np.cumsum(counted) + 1)


def next_of_session(trace: Trace) -> I64:
    """Index of the next request of the same session, `NEVER` where there is none."""
    out, latest = np.full(trace.session.size, NEVER, np.int64), dict[int, int]()
    for request, session in enumerate(trace.session.tolist()):
        if session >= 0:
            if session in latest:
                out[latest[session]] = request
            latest[session] = request
    return out


def lpc(trace: Trace, cursor: Cursor, capacity: int, predictor: Predictor = continuation_rate) -> None:
    """Learned prefix caching: evict the least probability that the session goes on, fading with idle time.

    `predictor` gives a probability for each request, from what may be known then (LPC's own is a small model that reads the prompt, which
    no trace has). Value = probability * exp(-idle / mean time between a session's requests); the paper's exact formula was not found.
    Blocks of nearly one probability stand in one of 32 groups by recency, and the groups' heads are compared. Without sessions: LRU.
    Source: LPC, NeurIPS 2025. Raises `ValueError` unless the predictor gives one probability a request.
    """
    chance = np.asarray(predictor(trace), np.float64)
    if chance.shape != trace.session.shape or not ((chance >= 0) & (chance <= 1)).all():
        raise ValueError("a predictor gives one probability, 0 to 1, for each request")
    _lpc(trace, cursor, make_heads(trace.parent.size, capacity, CHANCES), chance, session_gaps(trace))


@kernel
def _lpc(trace: Trace, cursor: Cursor, heads: Heads, chance: F64, gap_s: F64) -> None:
    before = -1
    while advance(cursor, trace):
        key, request = cursor.at[KEY], cursor.at[REQUEST]
        before = offer_freed(cursor, trace, heads, before)
        if not cursor.at[HIT]:
            while full(cursor):
                evict(cursor, trace, heads, _least_likely(trace, cursor, heads, chance, gap_s[request]))
            enter(cursor, trace, key)
        tag(cursor, trace, heads, key, min(int(chance[request] * CHANCES), CHANCES - 1), float(request))


@kernel
def _least_likely(trace: Trace, cursor: Cursor, heads: Heads, chance: F64, gap_s: float) -> int:
    best, least, now_us = -1, np.inf, trace.ts_us[cursor.at[REQUEST]]
    for group in range(CHANCES):
        key = head(cursor, heads, group)
        if key >= 0:
            last = int(heads.priority[key])
            value = np.log(max(chance[last], 1e-9)) - (now_us - trace.ts_us[last]) / 1e6 / gap_s
            if value < least:
                best, least = key, value
    return best


def kvflow(trace: Trace, cursor: Cursor, capacity: int, steps: F64 | None = None) -> None:
    """KVFlow: evict what is the most steps of its workflow away from being used again; of equals, the least recent, the deepest.

    `steps` float64[requests] is the workflow's metadata: requests of its session until this one's blocks are used again (1 for the next
    one), inf for never. Steps count down as the session goes on; what is overdue counts as never. A block is of the request that touched
    it last. Without `steps`, which no trace has: LRU. KVFlow also prefetches; there is one tier here. Cost: O(blocks that may leave) an
    eviction. Source: arXiv 2507.07400. Raises `ValueError` unless there is one number a request.
    """
    if steps is None:
        vllm_lru(trace, cursor, capacity)
        return
    if np.shape(steps) != trace.session.shape:
        raise ValueError("steps must hold one number for each request")
    n_ids, n = trace.parent.size, trace.session.size
    turn, done = np.zeros(n, np.int64), np.zeros(int(trace.session.max(initial=-1)) + 2, np.int64)
    _kvflow(trace, cursor, make_pool(n_ids, capacity), np.asarray(steps, np.float64), turn, done, np.zeros(n_ids, np.int64))


@kernel
def _kvflow(trace: Trace, cursor: Cursor, pool: Pool, steps: F64, turn: I64, done: I64, last: I64) -> None:
    before = -1
    while advance(cursor, trace):
        key, request = cursor.at[KEY], cursor.at[REQUEST]
        offer(pool, freed_by_turn(cursor, trace, before))
        for step in range(before + 1, request + 1):  # requests without blocks are steps as well
            done[trace.session[step]] += 1  # -1 counts in the last place
            turn[step] = done[trace.session[step]]
        before = request
        if not cursor.at[HIT]:
            while full(cursor):
                victim = _farthest(trace, cursor, pool, steps, turn, done, last)
                drop(pool, victim)
                leave(cursor, trace, victim)
                offer(pool, freed_parent(cursor, trace, victim))
            enter(cursor, trace, key)
        last[key] = request
        if cursor.at[FORM] == PLAIN:
            offer(pool, key)


@kernel
def _farthest(trace: Trace, cursor: Cursor, pool: Pool, steps: F64, turn: I64, done: I64, last: I64) -> int:
    best, most = -1, -1.0
    for i in range(pool.size[0]):
        key = pool.keys[i]
        if cursor.held[key] > 0:
            continue
        request = last[key]
        left = steps[request] - (done[trace.session[request]] - turn[request])
        if left < 0 or np.isnan(left):
            left = np.inf
        if best >= 0 and left == most:
            older = request < last[best] or (request == last[best] and trace.depth[key] > trace.depth[best])
            if not older:
                continue
        elif left < most:
            continue
        best, most = int(key), left
    return best


class Aside(NamedTuple):
    """Blocks set aside for a session in the window, as linked lists: `first` int32[sessions], `after` int32[n_ids] (-1: none), `listed`."""

    first: I32
    after: I32
    listed: Bools


def cached_attention(trace: Trace, cursor: Cursor, capacity: int, window: int = 64) -> None:
    """CachedAttention: evict what belongs to no session in the job queue, the least recent first; then the session whose turn is last.

    A trace has no job queue: the policy is GIVEN the sessions of the next `window` requests, as if those had arrived and waited, so it
    knows more than others do. A block is of the session that touched it last. Prefetch between tiers is not here. Without sessions: LRU.
    Source: CachedAttention, ATC 2024.
    """
    sessions = int(trace.session.max(initial=-1)) + 1
    heads = make_heads(trace.parent.size, capacity, 2)
    n_ids, latest = trace.parent.size, np.full(max(sessions, 1), -1, np.int64)
    aside = Aside(np.full(max(sessions, 1), -1, np.int32), np.full(n_ids, -1, np.int32), np.zeros(n_ids, np.bool_))
    _cached_attention(trace, cursor, heads, aside, next_of_session(trace), latest, np.zeros(n_ids, np.int64), window)


@kernel
def _cached_attention(
    trace: Trace, cursor: Cursor, heads: Heads, aside: Aside, following: I64, latest: I64, last: I64, window: int
) -> None:
    before = -1
    while advance(cursor, trace):
        key, request = cursor.at[KEY], cursor.at[REQUEST]
        for one in range(before + 1, request + 1):
            if trace.session[one] >= 0:
                latest[trace.session[one]] = one
                _served(cursor, heads, aside, trace.session[one], last)
        before = offer_freed(cursor, trace, heads, before)
        if not cursor.at[HIT]:
            while full(cursor):
                evict(cursor, trace, heads, _not_awaited(trace, cursor, heads, aside, following, latest, last, window))
            enter(cursor, trace, key)
        last[key] = request
        tag(cursor, trace, heads, key, APART, float(request))


@kernel
def _served(cursor: Cursor, heads: Heads, aside: Aside, session: int, last: I64) -> None:
    """A session's turn has come: what was set aside for it is as others are, until it is seen to be awaited again."""
    key = aside.first[session]
    while key >= 0:
        aside.listed[key] = False
        if heads.where[key] >= 0 and heads.group[key] == AWAITED:
            discard(heap_of(heads, AWAITED), key)
            heads.group[key], heads.priority[key] = APART, last[key]
            push(heap_of(heads, APART), key)
        key = aside.after[key]
    aside.first[session] = -1


@kernel
def _not_awaited(trace: Trace, cursor: Cursor, heads: Heads, aside: Aside, following: I64, latest: I64, last: I64, window: int) -> int:
    """Blocks of sessions that have come into the window are set aside as they are met, and looked at only when there are no others."""
    while True:
        key = head(cursor, heads, APART)
        if key < 0:
            return head(cursor, heads, AWAITED)
        session = trace.session[last[key]]
        due = following[latest[session]] if session >= 0 else NEVER
        if due > cursor.at[REQUEST] + window:
            return key
        tag(cursor, trace, heads, key, AWAITED, float(-due))
        push(heap_of(heads, AWAITED), key)
        if not aside.listed[key]:
            aside.after[key], aside.first[session], aside.listed[key] = aside.first[session], key, True
