"""Routers that keep their own picture of where prefixes are: a tree for each instance, or a window of decisions."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from analytics.fleet.routing.memory import EXPIRED, RING, WRITTEN, least
from analytics.fleet.routing.view import displaced_blocks, own_us

AT_US, WHERE, COST_US, TOKENS = 0, 1, 2, 3  # columns of `ring`
LOAD_US, ASKED, HIT = 0, 1, 2  # columns of `window`


@njit(cache=True, nogil=True)
def sglang_cache_aware(q: Any, v: Any, m: Any) -> Any:
    """Shortest queue if out of balance, else the longest match in its own trees if it is long enough, else the shortest queue.

    Out of balance: max - min > `abs_threshold` and max > `rel_threshold` x min, in requests. The match must exceed `cache_threshold` of the
    prompt. Every decision enters the chosen instance's tree, which holds `max_tree_tokens` and loses its least recently used leaf first.
    The picture is the router's own: it does not see evictions. Source: code of the SGLang gateway.
    """
    n = m.score.size
    lowest, highest = np.int64(1) << 60, 0
    for i in range(n):
        load = v.waiting[i] + v.running[i]
        m.score[i] = load
        if v.up[i]:
            lowest, highest = min(lowest, load), max(highest, load)
    best = -1
    if not (highest - lowest > m.params[0] and highest > m.params[1] * lowest):
        longest = 0
        for i in range(n):
            run = _matched(q, m, i) if v.up[i] else 0
            if run > longest:
                longest, best = run, i
        if longest * v.block_size <= m.params[2] * q.prompt_tokens:
            best = -1
    if best < 0:
        best = least(v, m)
    _enter(q, m, best, max(int(m.params[3] / v.block_size), 1))
    return best


@njit(cache=True, nogil=True)
def _matched(q: Any, m: Any, i: Any) -> Any:
    run = 0
    while run < q.chain.size and m.older[q.chain[run] + 1, i] >= 0:
        run += 1
    return run


@njit(cache=True, nogil=True)
def _enter(q: Any, m: Any, i: Any, room: Any) -> None:
    """Bring the chain to the young end of the list, leaf first, so that leaves leave before the blocks they stand on."""
    older, newer = m.older, m.newer
    for b in range(q.chain.size - 1, -1, -1):
        node = q.chain[b] + 1
        if older[node, i] >= 0:
            _cut(older, newer, node, i)
        else:
            m.tree[i] += 1
        youngest = older[0, i]
        older[node, i], newer[node, i] = youngest, 0
        newer[youngest, i] = node
        older[0, i] = node
    while m.tree[i] > room:
        _cut(older, newer, newer[0, i], i)
        m.tree[i] -= 1


@njit(cache=True, nogil=True)
def _cut(older: Any, newer: Any, node: Any, i: Any) -> None:
    before, after = older[node, i], newer[node, i]
    newer[before, i] = after
    older[after, i] = before
    older[node, i] = newer[node, i] = -1


@njit(cache=True, nogil=True)
def preble_e2(q: Any, v: Any, m: Any) -> Any:
    """Exploit where the prefix is if more of the prompt is cached than missing, else explore by load + eviction + prefill cost.

    Exploit: among the instances with the longest hit, the one least loaded over the last `window_s`. Explore: least L + M + P, with L the
    prefill time placed there in the window, M the prefill time of what must be evicted times the hit ratio of the window, P the prefill of
    what is missing. If the target is loaded `rebalance` times as much as the lightest, the lightest takes the request (and with it a copy
    of the subtree). Source: Preble (ICLR'25) and its code; cost names from general knowledge.
    """
    _expire(m, q.now_us - int(m.params[0] * 1e6))
    n = m.score.size
    longest, lightest, heaviest = 0, -1, -1
    for i in range(n):
        if v.up[i]:
            longest = max(longest, v.hit_blocks[i])
            if lightest < 0 or m.window[i, LOAD_US] < m.window[lightest, LOAD_US]:
                lightest = i
            if heaviest < 0 or m.window[i, LOAD_US] > m.window[heaviest, LOAD_US]:
                heaviest = i
    exploit = 2 * longest * v.block_size > q.prompt_tokens
    for i in range(n):
        if exploit:
            m.score[i] = m.window[i, LOAD_US] if v.hit_blocks[i] == longest else np.inf
        else:
            m.score[i] = m.window[i, LOAD_US] + _eviction_us(q, v, m, i) + own_us(v, i, q.prompt_tokens)
    best = least(v, m)
    if exploit and best == heaviest and m.window[best, LOAD_US] > m.params[1] * m.window[lightest, LOAD_US]:
        best = lightest
    _decided(q, v, m, best)
    return best


@njit(cache=True, nogil=True)
def _eviction_us(q: Any, v: Any, m: Any, i: Any) -> Any:
    evicted = displaced_blocks(v, i, -(-q.prompt_tokens // v.block_size) - v.hit_blocks[i], q.now_us)
    ratio = m.window[i, HIT] / m.window[i, ASKED] if m.window[i, ASKED] else 0.0
    return 1e6 * v.cost[0] / v.speed[i] * evicted * v.block_size * ratio


@njit(cache=True, nogil=True)
def _decided(q: Any, v: Any, m: Any, i: Any) -> None:
    if m.counters[WRITTEN] - m.counters[EXPIRED] == RING:
        _drop(m)
    row = m.ring[m.counters[WRITTEN] % RING]
    hit = v.hit_blocks[i] * v.block_size
    row[AT_US], row[WHERE], row[COST_US], row[TOKENS] = q.now_us, i, own_us(v, i, q.prompt_tokens), q.prompt_tokens << 32 | hit
    m.counters[WRITTEN] += 1
    m.window[i, LOAD_US] += row[COST_US]
    m.window[i, ASKED] += q.prompt_tokens
    m.window[i, HIT] += hit


@njit(cache=True, nogil=True)
def _drop(m: Any) -> None:
    row = m.ring[m.counters[EXPIRED] % RING]
    sums = m.window[row[WHERE]]
    sums[LOAD_US] -= row[COST_US]
    sums[ASKED] -= row[TOKENS] >> 32
    sums[HIT] -= row[TOKENS] & 0xFFFFFFFF
    m.counters[EXPIRED] += 1


@njit(cache=True, nogil=True)
def _expire(m: Any, before_us: Any) -> None:
    while m.counters[EXPIRED] < m.counters[WRITTEN] and m.ring[m.counters[EXPIRED] % RING, AT_US] < before_us:
        _drop(m)
