"""Routers that keep what belongs together in one place: by session, by workflow, or by class of prompt."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from analytics.fleet.routing.memory import EXPIRED, NOTICED, RING, WRITTEN, least
from analytics.fleet.routing.view import own_us, wait_us

SESSIONS, HEADS, TENANTS = 0, 1, 2
CLASS_WINDOW = 256  # requests over which LMetric's detector takes class shares
SEEN, STREAK, REQUESTS = 0, 1, 2  # columns of `classes`: requests in the window, consecutive ones that prefer a holder, all
STEPS = 16  # Pythia: turns that are told apart


@njit(cache=True, nogil=True)
def _key(q: Any) -> Any:
    """Table and row of what stands for the session: the session, else the first block, else the tenant."""
    if q.session >= 0:
        return SESSIONS, q.session
    return (HEADS, q.head) if q.head >= 0 else (TENANTS, q.tenant)


@njit(cache=True, nogil=True)
def _by_load(v: Any, m: Any) -> Any:
    for i in range(m.score.size):
        m.score[i] = v.queued_tokens[i] + v.running_tokens[i]
    return least(v, m)


@njit(cache=True, nogil=True)
def session_sticky(q: Any, v: Any, m: Any) -> Any:
    """A session stays where its first request went (least load then), unless that instance's load exceeds `limit` x the average.

    Without a session, tenant and first block stand for one. A session that has to leave is placed by load and stays there. Load is the
    prompt tokens waiting or running. Source: hybrid sticky rule of agentic-kvc (limit 2); `session_affinity` is the same without a limit.
    """
    table, row = _key(q)
    home = m.home[table, row]
    if home >= 0 and v.up[home]:
        total = 0
        for i in range(v.up.size):
            total += (v.queued_tokens[i] + v.running_tokens[i]) * v.up[i]
        load = (v.queued_tokens[home] + v.running_tokens[home]) * v.up.sum()
        if not load > m.params[0] * total:  # no limit is inf, and inf * 0 compares false
            return home
    home = _by_load(v, m)
    m.home[table, row] = home
    return home


@njit(cache=True, nogil=True)
def smetric(q: Any, v: Any, m: Any) -> Any:
    """The first request of a session goes by load, later ones stay; requests without a session go by load.

    Built from a one-line description; the paper was not read. The global KV tier that it needs is not there: a session whose instance
    goes starts anew.
    """
    if q.session < 0:
        return _by_load(v, m)
    home = m.home[SESSIONS, q.session]
    if home < 0 or not v.up[home]:
        home = _by_load(v, m)
        m.home[SESSIONS, q.session] = home
    return home


@njit(cache=True, nogil=True)
def lmetric(q: Any, v: Any, m: Any) -> Any:
    """Least (queued prefill tokens + own new tokens) x (batch size + 1), with the detector of hot prefixes.

    The batch is what waits, runs, or is still held after its prefill. With M the instances that hold a request's first block and M' the
    others, a class whose share x/x' of the last 256 requests exceeds |M|/|M'| and whose last 2|M| requests all preferred M is hot: M is
    masked for this request, which so gains a holder. Source: LMetric (OSDI'26, arXiv 2603.15202), read in a full-text review.
    """
    n = m.score.size
    for i in range(n):
        tokens = v.new_tokens[i] + q.prompt_tokens - v.hit_blocks[i] * v.block_size
        m.score[i] = float(tokens) * (v.waiting[i] + v.running[i] + v.held[i] + 1)
    if q.head < 0:
        return least(v, m)
    _count_class(q, m)
    last = m.counters[0]
    best = least(v, m)
    holders, others = 0, 0
    for i in range(n):
        holders += v.up[i] and v.hit_blocks[i] > 0
        others += v.up[i] and v.hit_blocks[i] == 0
    own = m.classes[q.head]
    own[STREAK] = own[STREAK] + 1 if v.hit_blocks[best] > 0 else 0
    rest = m.counters[WRITTEN] - m.counters[EXPIRED] - own[SEEN]
    if others and holders and own[STREAK] >= 2 * holders and own[SEEN] * others > holders * rest:
        m.counters[NOTICED] += 1
        own[STREAK] = 0
        for i in range(n):
            if v.hit_blocks[i] > 0:
                m.score[i] = np.inf
        m.counters[0] = last
        best = least(v, m)
    return best


@njit(cache=True, nogil=True)
def _count_class(q: Any, m: Any) -> None:
    if m.counters[WRITTEN] - m.counters[EXPIRED] == CLASS_WINDOW:
        m.classes[m.ring[m.counters[EXPIRED] % RING, 0], SEEN] -= 1
        m.counters[EXPIRED] += 1
    m.ring[m.counters[WRITTEN] % RING, 0] = q.head
    m.counters[WRITTEN] += 1
    m.classes[q.head, SEEN] += 1


@njit(cache=True, nogil=True)
def pythia(q: Any, v: Any, m: Any) -> Any:
    """Least wait + own prefill + the work that sessions at home there are about to bring, where sessions and turns are known.

    A table over turns (a probabilistic automaton of one path) learns online how probable a next step is, after how long, and how
    much it computes. A session reserves that work at its instance until it comes, fading over twice the mean gap; of the reserved work the
    part that falls into this request's wait counts. Without sessions or turns nothing can be predicted: what remains, wait + own prefill,
    equals `mooncake`. Built from the abstract (arXiv 2604.25899); the paper was not read.
    """
    known = q.session >= 0 and q.turn > 0
    step = min(q.turn, STEPS - 1)
    if known:
        _step_came(q, m, step)
    gap = max(m.rates[-1, 1], 1.0)
    for i in range(m.score.size):
        busy = wait_us(v, i, q.now_us) + own_us(v, i, q.prompt_tokens)
        m.score[i] = busy + m.rates[i, 0] * min(1.0, busy / gap)
    best = least(v, m)
    if known:
        _reserve(q, v, m, step, best)
    return best


@njit(cache=True, nogil=True)
def _step_came(q: Any, m: Any, step: Any) -> None:
    """Reservations fade; what a session reserved is released when its next step comes, and the step before counts as continued."""
    own, fleet = m.classes[q.session], m.rates[-1]
    home = m.home[SESSIONS, q.session]
    fading = 2.0 * max(fleet[1], 1e6)
    factor = np.exp(-(q.now_us - fleet[2]) / fading)
    fleet[2] = q.now_us
    for i in range(m.score.size):
        m.rates[i, 0] *= factor
    if home >= 0:
        gap = float(q.now_us - own[1])
        m.rates[home, 0] = max(m.rates[home, 0] - own[0] * np.exp(-gap / fading), 0.0)
        m.ring[max(step - 1, 0), 1] += 1
        m.counters[NOTICED] += 1
        fleet[1] += (gap - fleet[1]) / min(m.counters[NOTICED], 1000)
    own[0] = 0


@njit(cache=True, nogil=True)
def _reserve(q: Any, v: Any, m: Any, step: Any, home: Any) -> None:
    own, learned = m.classes[q.session], m.ring[step]
    learned[0] += 1
    learned[2] += own_us(v, home, q.prompt_tokens)
    following = m.ring[min(step + 1, STEPS - 1)]
    ahead = following[2] / following[0] if following[0] else 0.0
    own[0] = int(ahead * min(learned[1] / learned[0], 1.0))
    own[1] = q.now_us
    m.rates[home, 0] += own[0]
    m.home[SESSIONS, q.session] = home
