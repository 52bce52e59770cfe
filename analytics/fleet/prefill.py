"""The start of one prefill as one kernel call: look up, account, allocate, store."""

from __future__ import annotations

import numpy as np
from numba import njit

from analytics.fleet import cache, truth
from analytics.fleet.cache import CAPACITY, HIT_TOKENS, NEXT_SEQ, QUERY_TOKENS

BLOCKED, TOO_BIG = -1, -2


@njit(cache=True, nogil=True)
def prefill_us(cost_a_s, cost_b_s, start, end):  # type: ignore[no-untyped-def]
    """Microseconds to prefill tokens [start, end) of a prompt: docs/design.md section 1, prefill cost."""
    return np.int64(np.rint(1e6 * (cost_a_s * (end - start) + cost_b_s * (end * end - start * start) / 2.0)))


@njit(cache=True, nogil=True)
def begin(c, t, with_truth, r, ids, start, full, prompt, block_size, i, tenant, now, a, b, at_schedule, held):  # type: ignore[no-untyped-def]
    """Look up, account, allocate and store for one request; leading run in blocks, BLOCKED or TOO_BIG."""
    usable = min(full, max(prompt - 1, 0) // block_size)
    too_big = held.size > c.instances[i, CAPACITY]
    run = 0 if too_big else cache.lookup(c, i, ids, start, usable)
    if not too_big and not cache.fits(c, i, ids, start, run, held.size):
        return BLOCKED
    c.counters[NEXT_SEQ] += 1  # the access row itself
    c.instances[i, QUERY_TOKENS] += prompt
    c.instances[i, HIT_TOKENS] += run * block_size
    if with_truth:
        truth.observe(c, t)
        truth.attribute(c, t, r, i, ids, start, run, usable, prompt, block_size, tenant, now)
        end_us = now if too_big else now + prefill_us(a, b, run * block_size, prompt)
        truth.ask(c, t, i, ids, start, run, full, end_us)
    if too_big:
        return TOO_BIG
    cache.allocate(c, i, ids, start, run, held.size, tenant, now, held)
    if at_schedule:
        cache.store(c, i, ids, start, run, full, now, held)
    return run
