"""Routers that score every instance from what they see now and take the least score; they remember nothing but whose turn it is."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from analytics.fleet.routing.memory import DRAWS, LAST, draw, least
from analytics.fleet.routing.view import own_us, pinned_ratio, wait_us


@njit(cache=True, nogil=True)
def any_at_random(q: Any, v: Any, m: Any) -> Any:
    """Any instance that is up, all alike."""
    nth = draw(m, v.up.sum())
    for i in range(v.up.size):
        nth -= v.up[i]
        if nth < 0:
            return i
    return -1


@njit(cache=True, nogil=True)
def round_robin(q: Any, v: Any, m: Any) -> Any:
    """The instances that are up, in turn."""
    last = m.counters[LAST] if m.counters[DRAWS] else -1
    m.counters[DRAWS] = 1
    first, following = -1, -1
    for i in range(v.up.size):
        if v.up[i]:
            first = i if first < 0 else first
            following = i if following < 0 and i > last else following
    m.counters[LAST] = following if following >= 0 else first
    return m.counters[LAST]


@njit(cache=True, nogil=True)
def least_load(q: Any, v: Any, m: Any) -> Any:
    """The instance with the fewest prompt tokens waiting or running."""
    for i in range(m.score.size):
        m.score[i] = v.queued_tokens[i] + v.running_tokens[i]
    return least(v, m)


@njit(cache=True, nogil=True)
def weighted_sum(q: Any, v: Any, m: Any) -> Any:
    """Least `w * (1 - hit ratio) + (1 - w) * load / largest load`: the fixed weighted sum that most gateways use.

    `w` is the cache weight, 0 to 1: with 1 only hits count, with 0 only load.
    """
    w = m.params[0]
    heaviest = 0
    for i in range(m.score.size):
        if v.up[i]:
            heaviest = max(heaviest, v.queued_tokens[i] + v.running_tokens[i])
    gain = -w * v.block_size / max(q.prompt_tokens, 1)
    for i in range(m.score.size):
        m.score[i] = gain * v.hit_blocks[i]
        if heaviest:
            m.score[i] += ((1.0 - w) / heaviest) * (v.queued_tokens[i] + v.running_tokens[i])
    return least(v, m)


@njit(cache=True, nogil=True)
def llm_d(q: Any, v: Any, m: Any) -> Any:
    """Largest weighted sum of scorers in [0, 1]: prefix = matched / total, queue = (max - q) / (max - min), KV = 1 - usage.

    Default weights are the chart's: queue 2, KV 2, prefix 3. Source: llm-d inference scheduler.
    """
    lowest, highest = np.int64(1) << 60, 0
    for i in range(m.score.size):
        if v.up[i]:
            lowest, highest = min(lowest, v.waiting[i]), max(highest, v.waiting[i])
    for i in range(m.score.size):
        queue = (highest - v.waiting[i]) / (highest - lowest) if highest > lowest else 1.0
        prefix = v.hit_blocks[i] * v.block_size / max(q.prompt_tokens, 1)
        m.score[i] = -(m.params[0] * queue + m.params[1] * (1.0 - pinned_ratio(v, i)) + m.params[2] * prefix)
    return least(v, m)


@njit(cache=True, nogil=True)
def dynamo(q: Any, v: Any, m: Any) -> Any:
    """Least `prefill_load_scale * max(active prefill blocks + prompt blocks - overlap, 0) + active decode blocks + new blocks`.

    Temperature 0. An instance that only prefills has no decode; the KV that it still holds for transfer stands for its active blocks.
    Source: NVIDIA Dynamo router documentation.
    """
    prompt = -(-q.prompt_tokens // v.block_size)
    for i in range(m.score.size):
        new = prompt - v.hit_blocks[i]
        prefill = max(v.new_tokens[i] / v.block_size + new, 0.0)
        m.score[i] = m.params[0] * prefill + pinned_ratio(v, i) * v.capacity_blocks[i] + new
    return least(v, m)


@njit(cache=True, nogil=True)
def mooncake(q: Any, v: Any, m: Any) -> Any:
    """Least estimated TTFT: queue time plus prefill time with the instance's own prefix.

    Conductor's Algorithm 1 (Mooncake, FAST'25) without its transfer branch: these instances read no KV but their own.
    """
    for i in range(m.score.size):
        m.score[i] = wait_us(v, i, q.now_us) + own_us(v, i, q.prompt_tokens)
    return least(v, m)


@njit(cache=True, nogil=True)
def lmetric_prefill(q: Any, v: Any, m: Any) -> Any:
    """LMetric for Prefill instances of a P/D-split fleet: (new tokens ahead + own) x (requests waiting or running + 1), least wins.

    The batch size of the colocated form counts decodes, which these instances do not run; the queue stands in its place. That is
    kvtide's reading: the paper leaves the form open.
    """
    for i in range(m.score.size):
        tokens = v.new_tokens[i] + q.prompt_tokens - v.hit_blocks[i] * v.block_size
        m.score[i] = float(tokens) * (v.waiting[i] + v.running[i] + 1)
    return least(v, m)
