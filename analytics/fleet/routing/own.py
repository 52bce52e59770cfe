"""kvtide's own router: the placement that costs the whole fleet the least expected time."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from analytics.fleet.routing.memory import BINS, least
from analytics.fleet.routing.view import cost_us, displaced_blocks, eviction_age_us, own_us, wait_us

WAIT, PREFILL, DELAYS, DISPLACED, COPIES = range(5)
TERM_NAMES = ("wait_s", "prefill_s", "delays_s", "displaced_s", "copies_s")
LAST_US, GAP_US, WORK_US, COLD_US, COUNT = range(5)  # columns of the fleet's row of `rates`
TO_OCTAVE = 8  # bins of reuse time to the octave
MEMORY = 512.0  # requests an instance over which rates and the reuse curve are averaged


@njit(cache=True, nogil=True)
def kvtide(q: Any, v: Any, m: Any) -> Any:
    """Least expected prefill time for the fleet, all in seconds: this request's, and what its placement costs the others.

    wait + prefill: this request's own time to its first token, counting as hits what requests waiting there will have stored by then.
    delays: its prefill time there times the requests that it is expected to delay. Those that are bound to the instance by their KV (a part
    of the arrivals as large as the part of the prefill time that hits save) come up behind it while its queue lasts, wait + prefill / 2,
    drained at 1 - utilisation; the others would go where the wait is least, and are delayed while that lasts.
    displaced: the blocks that it makes the instance evict times what a block of capacity is worth there: with T the instance's eviction age
    and f the density of reuse times weighed by prefill seconds, one inserted block costs T f(T) / (blocks inserted) seconds of later hits.
    copies: the same price for the blocks that another instance holds already.

    Nothing is weighed by hand. The estimates are its own: arrival rate, utilisation and reuse times of what it routed, eviction ages of
    the instances' residency events. Cost: O(instances + blocks of the chain).
    """
    _arrived(q, v, m)
    _expect_hits(q, v, m)
    delayed_s = _delays_per_s(q, v, m)
    longest = (v.hit_blocks * v.up).max()
    for i in range(m.score.size):
        term = m.terms[i]
        wait, own = wait_us(v, i, q.now_us) / 1e6, own_us(v, i, q.prompt_tokens) / 1e6
        term[WAIT], term[PREFILL] = wait, own
        term[DELAYS] = own * (delayed_s[0] * (wait + own / 2.0) + delayed_s[1])
        fresh = -(-q.prompt_tokens // v.block_size) - v.hit_blocks[i]
        evicted = displaced_blocks(v, i, fresh, q.now_us)
        copied = min(evicted, float(longest - v.hit_blocks[i]))
        price = _block_price_s(v, m, i, q.now_us) if evicted else 0.0
        term[DISPLACED], term[COPIES] = price * (evicted - copied), price * copied
        m.score[i] = term[WAIT] + term[PREFILL] + term[DELAYS] + term[DISPLACED] + term[COPIES]
    best = least(v, m)
    _chosen(q, v, m, best)
    return best


@njit(cache=True, nogil=True)
def _delays_per_s(q: Any, v: Any, m: Any) -> Any:
    """Requests delayed by one more second of work: for each second of the instance's own queue, and wherever the work goes."""
    fleet, up = m.rates[-1], v.up.sum()
    if fleet[GAP_US] <= 0 or fleet[COLD_US] <= 0:
        return 0.0, 0.0
    rate = 1e6 / fleet[GAP_US] / up
    utilisation = min(fleet[WORK_US] / fleet[GAP_US] / up, 0.95)  # beyond, a queue has no mean
    bound = 1.0 - fleet[WORK_US] / fleet[COLD_US]
    least_wait = np.inf
    for i in range(v.up.size):
        if v.up[i]:
            least_wait = min(least_wait, wait_us(v, i, q.now_us) / 1e6)
    behind = rate / (1.0 - utilisation)
    return behind * bound, behind * (1.0 - bound) * least_wait


@njit(cache=True, nogil=True)
def _arrived(q: Any, v: Any, m: Any) -> None:
    """Arrival gaps, and the reuse times of the chain, weighed by the prefill time of each block that came back."""
    fleet = m.rates[-1]
    keep = 1.0 - 1.0 / min(fleet[COUNT] + 1.0, MEMORY * m.score.size)
    if fleet[COUNT]:
        fleet[GAP_US] = keep * fleet[GAP_US] + (1.0 - keep) * (q.now_us - fleet[LAST_US])
    fleet[LAST_US] = q.now_us
    fleet[COUNT] += 1
    _fade(m, keep)
    last, bin_ = np.int64(-2), 0
    for b in range(q.chain.size):
        seen = m.touched[q.chain[b]]
        if seen >= 0:
            if seen != last:
                bin_ = _bin(q.now_us - seen)
                last = seen
            m.reuse[bin_, 0] += cost_us(v.cost, 1.0, b * v.block_size, (b + 1) * v.block_size) / 1e6
        m.touched[q.chain[b]] = q.now_us


@njit(cache=True, nogil=True)
def _expect_hits(q: Any, v: Any, m: Any) -> None:
    """Add to every instance's leading run the blocks that requests still waiting there will have stored before this one starts.

    A queue is served in order, so a placement still waits if its serial exceeds placements minus waiting.
    """
    usable = min(q.chain.size, max(q.prompt_tokens - 1, 0) // v.block_size)
    for i in range(m.score.size):
        begun, b = m.placements[i] - v.waiting[i], v.hit_blocks[i]
        while b < usable and m.expected[q.chain[b], i] > begun:
            b += 1
        v.hit_blocks[i] = b


@njit(cache=True, nogil=True)
def _fade(m: Any, keep: Any) -> None:
    """Exponential forgetting of the histogram and of the inserted blocks, requests as the clock."""
    for b in range(BINS):
        m.reuse[b, 0] *= keep
    m.reuse[0, 1] *= keep


@njit(cache=True, nogil=True)
def _bin(us: Any) -> Any:
    return min(int(TO_OCTAVE * np.log2(us / 1e4 + 1.0)), BINS - 1)


@njit(cache=True, nogil=True)
def _block_price_s(v: Any, m: Any, i: Any, now: Any) -> Any:
    """Seconds of later hits that one more inserted block costs instance `i`: reuse per unit of ln time at its eviction age."""
    age = eviction_age_us(v, i, now)
    if age < 0 or m.reuse[0, 1] <= 0:
        return 0.0
    at, half = _bin(age), TO_OCTAVE // 2
    total = 0.0
    for b in range(max(at - half, 0), min(at + half + 1, BINS)):
        total += m.reuse[b, 0]
    width = (2 * half + 1) / TO_OCTAVE * np.log(2.0)
    return total / width / m.reuse[0, 1] / v.speed[i]


@njit(cache=True, nogil=True)
def _chosen(q: Any, v: Any, m: Any, i: Any) -> None:
    """Prefill time placed, with and without hits, and the blocks that the placement inserts."""
    fleet = m.rates[-1]
    new = 1.0 / min(fleet[COUNT], MEMORY * m.score.size)
    fleet[WORK_US] += new * (own_us(v, i, q.prompt_tokens) - fleet[WORK_US])
    fleet[COLD_US] += new * (cost_us(v.cost, v.speed[i], 0, q.prompt_tokens) - fleet[COLD_US])
    m.placements[i] += 1
    for b in range(q.chain.size):
        m.expected[q.chain[b], i] = m.placements[i]
    m.reuse[0, 1] += max(-(-q.prompt_tokens // v.block_size) - v.hit_blocks[i], 0)
