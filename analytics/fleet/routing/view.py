"""What a router sees: the request, the fleet, and the book-keeping that keeps the fleet's arrays up to date.

The book-keeping functions run compiled inside the replay and as plain Python in the emulator (`placed.py_func`): the same lines.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from numba import njit

from analytics.fleet.cache import BLOCK_FIELDS, CAPACITY, EVICTABLE, FREE, FREED_US, ID, INSTANCE_FIELDS, LIVE, NEXT

NO_CHAIN = np.zeros(0, np.int32)


class RouteRequest(NamedTuple):
    """What a router may know of a request.

    `number` is its index in the workload; `session`, `category` and `head` (dense id of the first block) are -1 where unknown, `turn`
    counts from 1 and is 0 where unknown. `chain` holds the dense ids of its full blocks.
    """

    number: int
    tenant: int
    session: int
    prompt_tokens: int
    head: int
    category: int = -1
    turn: int = 0
    now_us: int = 0
    chain: npt.NDArray[np.int32] = NO_CHAIN


class View(NamedTuple):
    """The fleet as a router sees it: arrays over instances, live (the engine updates them in place).

    `queued_tokens` are prompt tokens that wait, `running_tokens` those of the prefill that runs (`running` is 0 or 1), `waiting` the
    requests that wait and `held` those prefilled whose KV is still being transferred. `hit_blocks` is this request's leading run on each
    instance. What is left to compute is a gateway's own estimate, made when a request is placed: `new_tokens` (waiting or running,
    without hits), `work_us` (time to prefill what waits), `until_us` (when the running prefill ends). `engine` and `blocks` are the
    instances' own counters and free queues (as their residency events tell), `cost` their prefill cost (a, b) in s.
    """

    up: npt.NDArray[np.bool_]
    queued_tokens: npt.NDArray[np.int64]
    running_tokens: npt.NDArray[np.int64]
    running: npt.NDArray[np.int64]
    hit_blocks: npt.NDArray[np.int64]
    capacity_blocks: npt.NDArray[np.int64]
    block_size: int
    waiting: npt.NDArray[np.int64]
    held: npt.NDArray[np.int64]
    new_tokens: npt.NDArray[np.int64]
    work_us: npt.NDArray[np.int64]
    until_us: npt.NDArray[np.int64]
    speed: npt.NDArray[np.float64]
    cost: npt.NDArray[np.float64]
    engine: npt.NDArray[np.int64]
    blocks: npt.NDArray[np.int64]
    estimate: npt.NDArray[np.int64]  # [requests, 2]: new tokens and us of every request, as estimated when it was placed

    @classmethod
    def idle(cls, instances: int, block_size: int, requests: int = 1, cost: tuple[float, float] = (4e-5, 4e-9)) -> View:
        """A fleet of instances that are not up yet."""
        counts: dict[str, Any] = {name: np.zeros(instances, np.int64) for name in cls._fields}
        return cls(**{
            **counts,
            "up": np.zeros(instances, bool),
            "block_size": block_size,
            "speed": np.ones(instances),
            "cost": np.array(cost, np.float64),
            "engine": np.zeros((instances, INSTANCE_FIELDS), np.int64),
            "blocks": np.full((instances, 1, BLOCK_FIELDS), -1, np.int64),
            "estimate": np.zeros((requests, 2), np.int64),
        })  # fmt: skip

    @property
    def load_tokens(self) -> npt.NDArray[np.int64]:
        """Prompt tokens placed on each instance and not yet prefilled."""
        return self.queued_tokens + self.running_tokens


@njit(cache=True, nogil=True)
def cost_us(cost: Any, speed: Any, start: Any, end: Any) -> Any:
    """Microseconds to prefill tokens [start, end) on an instance of relative `speed`; equals `config.prefill_us` at speed 1."""
    return int(np.rint(1e6 * (cost[0] * (end - start) + cost[1] * (end * end - start * start) / 2.0) / speed))


@njit(cache=True, nogil=True)
def placed(v: Any, r: Any, i: Any, prompt: Any) -> None:
    """Request `r` joins the queue of instance `i`; `v.hit_blocks` must be its own."""
    hit = v.hit_blocks[i] * v.block_size
    v.estimate[r, 0] = prompt - hit
    v.estimate[r, 1] = cost_us(v.cost, v.speed[i], hit, prompt)
    v.queued_tokens[i] += prompt
    v.waiting[i] += 1
    v.new_tokens[i] += v.estimate[r, 0]
    v.work_us[i] += v.estimate[r, 1]


@njit(cache=True, nogil=True)
def started(v: Any, r: Any, i: Any, prompt: Any, now: Any, served: Any) -> None:
    """Request `r` leaves the queue of instance `i`, to be prefilled or (not `served`) because it can never be."""
    v.queued_tokens[i] -= prompt
    v.waiting[i] -= 1
    v.work_us[i] -= v.estimate[r, 1]
    if served:
        v.running[i] = 1
        v.running_tokens[i] = prompt
        v.until_us[i] = now + v.estimate[r, 1]
    else:
        v.new_tokens[i] -= v.estimate[r, 0]


@njit(cache=True, nogil=True)
def finished(v: Any, r: Any, i: Any) -> None:
    """The prefill of request `r` ends on instance `i`; its KV stays held."""
    v.running[i] = v.running_tokens[i] = v.until_us[i] = 0
    v.new_tokens[i] -= v.estimate[r, 0]
    v.held[i] += 1


@njit(cache=True, nogil=True)
def emptied(v: Any, i: Any, running: Any) -> None:
    """The queue of instance `i` is taken away; request `running` (-1: none) goes on."""
    v.queued_tokens[i] = v.waiting[i] = v.work_us[i] = 0
    v.new_tokens[i] = v.estimate[running, 0] if running >= 0 else 0


@njit(cache=True, nogil=True)
def wait_us(v: Any, i: Any, now: Any) -> Any:
    """Time until instance `i` has prefilled all that was placed on it, as estimated: what runs, then what waits."""
    left = max(v.until_us[i] - now, 0) if v.running[i] else 0
    return left + v.work_us[i]


@njit(cache=True, nogil=True)
def own_us(v: Any, i: Any, prompt: Any) -> Any:
    """Time to prefill this request on instance `i` with what it holds now."""
    return cost_us(v.cost, v.speed[i], v.hit_blocks[i] * v.block_size, prompt)


@njit(cache=True, nogil=True)
def pinned_ratio(v: Any, i: Any) -> Any:
    """Part of the KV that requests hold, as vLLM's `kv_cache_usage` counts."""
    state = v.engine[i]
    return (state[LIVE] - state[FREE]) / state[CAPACITY] if state[CAPACITY] > 0 else 0.0


@njit(cache=True, nogil=True)
def eviction_age_us(v: Any, i: Any, now: Any) -> Any:
    """How long the block that instance `i` would take next has been idle; -1 where it has room that was never used."""
    if v.engine[i, EVICTABLE] == 0:
        return -1
    blocks = v.blocks[i]
    front = blocks[blocks[blocks.shape[0] - 1, NEXT]]
    return -1 if front[ID] < 0 and front[FREED_US] == 0 else now - front[FREED_US]


@njit(cache=True, nogil=True)
def displaced_blocks(v: Any, i: Any, fresh: Any, now: Any) -> Any:
    """Blocks that somebody could still hit which `fresh` new ones push out of instance `i`: their share of its free queue."""
    if eviction_age_us(v, i, now) < 0:
        return 0.0
    return fresh * v.engine[i, EVICTABLE] / v.engine[i, FREE]
