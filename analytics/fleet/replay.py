"""The what-if engine: a whole load through a fleet and a router in one kernel, without event rows or truth.

It gives, request by request, exactly what the emulator gives for a fleet without faults; the property test is the proof. Beyond it,
instances may differ in capacity and speed, and a queue may be served in another order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from numba import njit

from analytics.fleet import cache
from analytics.fleet.cache import EVENTS, Caches
from analytics.fleet.config import FleetConfig
from analytics.fleet.routers import RouterSpec
from analytics.fleet.routing.dispatch import choose, served
from analytics.fleet.routing.memory import NOTICED, Memory, Sizes
from analytics.fleet.routing.view import RouteRequest, View, cost_us, finished, placed, started
from analytics.fleet.workload import Ints, Workload

DISCIPLINES = ("fifo", "shortest_prefill", "priority")
_INSTANCE, _LOOKED_UP, _HIT, _QUEUE, _PREFILL, _TTFT, _FIELDS = range(7)
_NEVER = 1 << 62
_int: Any = np.int64  # one type for the fields of a request, whatever the columns'


class Load(NamedTuple):
    """A workload as the kernel reads it; `usable` and `need` are blocks a request can reuse and must hold."""

    arrived_us: Ints
    tenant: npt.NDArray[np.int32]
    session: npt.NDArray[np.int32]
    category: npt.NDArray[np.int32]
    turn: npt.NDArray[np.int32]
    prompt: Ints
    offsets: Ints
    ids: npt.NDArray[np.int32]
    usable: Ints
    need: Ints
    priority: npt.NDArray[np.float64]


class _Engine(NamedTuple):
    """What runs: queues as linked lists, one prefill an instance, and the releases to come in order of time."""

    first: npt.NDArray[np.int64]  # [instances]: head of the queue, -1 if empty
    last: npt.NDArray[np.int64]
    following: npt.NDArray[np.int64]  # [requests]
    running: npt.NDArray[np.int64]  # [instances]
    end_us: npt.NDArray[np.int64]
    serial: npt.NDArray[np.int64]  # order among prefills that end in one microsecond; the last entry is the next serial
    releases: npt.NDArray[np.int64]  # [requests]: in order; `ends` holds first and past-last
    ends: npt.NDArray[np.int64]
    run_blocks: npt.NDArray[np.int64]  # [requests]
    held_at: npt.NDArray[np.int64]  # [requests]: where the held blocks of a request stand in `held`
    held: npt.NDArray[np.int32]
    hold_us: int
    at_finish: bool
    discipline: int


@dataclass(frozen=True)
class Replay:
    """Outcome per request, by index in the workload; times in us, `ttft_us` -1 for failed requests."""

    workload: Workload
    instance: Ints
    looked_up_us: Ints
    hit_tokens: Ints
    queue_us: Ints
    prefill_us: Ints
    ttft_us: Ints
    noticed: int = 0  # what the router counted: for `lmetric` the hot prefixes that it masked

    @property
    def failed(self) -> npt.NDArray[np.bool_]:
        """Requests larger than the instance that they were sent to."""
        return self.ttft_us < 0

    def hit_ratio(self, from_s: float = 0.0) -> float:
        """Hit tokens over prompt tokens of the requests that arrived from `from_s` on; NaN without requests."""
        mask = self.workload.arrived_at_us >= from_s * 1e6
        prompt = int(self.workload.prompt_tokens[mask].sum())
        return float(self.hit_tokens[mask].sum()) / prompt if prompt else float("nan")


def load_of(workload: Workload, priority: npt.NDArray[np.float64] | None = None) -> Load:
    """The kernel's columns of a workload. Cost: O(requests), after `workload.blocks`."""
    assert workload.category is not None and workload.turn is not None  # filled on construction
    usable = np.minimum(np.diff(workload.offsets), np.maximum(workload.prompt_tokens - 1, 0) // workload.block_size)
    return Load(
        workload.arrived_at_us, workload.tenant.astype(np.int32), workload.session.astype(np.int32), workload.category.astype(np.int32),
        workload.turn.astype(np.int32), workload.prompt_tokens.astype(np.int64), workload.offsets.astype(np.int64), workload.blocks.ids,
        usable.astype(np.int64), (-(-workload.prompt_tokens // workload.block_size)).astype(np.int64),
        np.zeros(len(workload)) if priority is None else np.asarray(priority, np.float64),
    )  # fmt: skip


def replay(
    workload: Workload,
    config: FleetConfig,
    router: RouterSpec,
    *,
    seed: int | None = None,
    capacity_blocks: npt.NDArray[np.int64] | None = None,
    speed: npt.NDArray[np.float64] | None = None,
    discipline: str = "fifo",
    priority: npt.NDArray[np.float64] | None = None,
) -> Replay:
    """Run a load through a fleet.

    `capacity_blocks` and `speed` [instances] make instances unlike (speed 2 prefills twice as fast). `discipline` says who is next in a
    queue: the first (`fifo`), the one with the shortest prefill as estimated when it was placed, or the one with the least `priority`
    [requests]; equals in order of arrival. Raises `ValueError` for an unknown discipline, a wrong router parameter or arrays of the
    wrong length.
    Cost: O(events * instances + blocks); memory 64 B a physical block, 4 B an instance and distinct block.
    """
    n = config.instances
    capacity = np.full(n, config.capacity_blocks, np.int64) if capacity_blocks is None else np.asarray(capacity_blocks, np.int64)
    speeds = np.ones(n) if speed is None else np.asarray(speed, np.float64)
    if discipline not in DISCIPLINES:
        raise ValueError(f"unknown discipline {discipline!r}, have {', '.join(DISCIPLINES)}")
    if capacity.shape != (n,) or speeds.shape != (n,) or (capacity < 1).any() or (speeds <= 0).any():
        raise ValueError("capacity_blocks and speed need one positive value an instance")
    if priority is not None and len(priority) != len(workload):
        raise ValueError("priority needs one value a request")
    load = load_of(workload, priority)
    distinct = len(workload.blocks.hashes)
    caches = cache.new_caches(n, int(capacity.max()), distinct, room=2 * int(load.need.max(initial=1)) + 1)
    for i in range(n):
        cache.reset(caches, i, int(capacity[i]))
    view = View.idle(n, workload.block_size, len(workload), (config.cost_a_s, config.cost_b_s))
    view = view._replace(engine=caches.instances, blocks=caches.blocks, speed=speeds, capacity_blocks=capacity)
    view.up[:] = True
    keys = max(distinct, len(workload.sessions), int(workload.session.max(initial=0)) + 1, len(workload.tenants), 1)
    memory = router.memory(n, config.seed if seed is None else seed, Sizes(max(len(workload), 1), keys, max(distinct, 1)))
    rows = _run(router.rule.code, load, view, memory, caches, _engine(load, config, n, DISCIPLINES.index(discipline)))
    names = ("instance", "looked_up_us", "hit_tokens", "queue_us", "prefill_us", "ttft_us")  # in the order of the fields of `rows`
    columns = {name: np.ascontiguousarray(rows[:, k]) for k, name in enumerate(names)}
    return Replay(workload, **columns, noticed=int(memory.counters[NOTICED]))


def _engine(load: Load, config: FleetConfig, n: int, discipline: int) -> _Engine:
    requests = len(load.prompt)
    held_at = np.concatenate([[0], np.cumsum(load.need)]).astype(np.int64)
    return _Engine(
        np.full(n, -1, np.int64), np.full(n, -1, np.int64), np.full(requests, -1, np.int64), np.full(n, -1, np.int64),
        np.full(n, _NEVER, np.int64), np.zeros(n + 1, np.int64), np.zeros(requests, np.int64), np.zeros(2, np.int64),
        np.zeros(requests, np.int64), held_at, np.zeros(int(held_at[-1]), np.int32), round(config.hold_s * 1e6),
        config.store_when == "finish", discipline,
    )  # fmt: skip


@njit(cache=True, nogil=True)
def _run(code: Any, load: Load, v: View, m: Memory, c: Caches, e: _Engine) -> Any:
    """The walk over events: at one microsecond ends of prefills come first, then releases, then arrivals."""
    rows = np.full((load.prompt.size, _FIELDS), -1, np.int64)
    arrival = 0
    while True:
        i = _next_end(e)
        end = e.end_us[i]
        release = _release_us(e, rows)
        due = min(end, release)
        if arrival < load.prompt.size and load.arrived_us[arrival] < due:
            _route(code, load, v, m, c, e, rows, arrival)
            arrival += 1
        elif due == _NEVER:
            return rows
        elif end <= release:
            _finish(code, load, v, m, c, e, rows, i)
        else:
            _release(load, v, c, e, rows, release)


@njit(cache=True, nogil=True)
def _next_end(e: Any) -> Any:
    best = 0
    for i in range(1, e.end_us.size):
        if e.end_us[i] < e.end_us[best] or (e.end_us[i] == e.end_us[best] and e.serial[i] < e.serial[best]):
            best = i
    return best


@njit(cache=True, nogil=True)
def _release_us(e: Any, rows: Any) -> Any:
    if e.ends[0] == e.ends[1]:
        return _NEVER
    r = e.releases[e.ends[0]]
    return rows[r, _LOOKED_UP] + rows[r, _PREFILL] + e.hold_us


@njit(cache=True, nogil=True)
def _route(code: Any, load: Any, v: Any, m: Any, c: Any, e: Any, rows: Any, r: Any) -> None:
    start, stop, prompt, now = load.offsets[r], load.offsets[r + 1], load.prompt[r], load.arrived_us[r]
    cache.leading_runs(c, load.ids, start, load.usable[r], v.hit_blocks)
    head = _int(load.ids[start]) if stop > start else _int(-1)
    q = RouteRequest(
        _int(r), _int(load.tenant[r]), _int(load.session[r]), prompt, head, _int(load.category[r]),
        _int(load.turn[r]), now, load.ids[start:stop],
    )  # fmt: skip
    i = choose(code, q, v, m)
    rows[r, _INSTANCE] = i
    placed(v, r, i, prompt)
    if e.first[i] < 0:
        e.first[i] = r
    else:
        e.following[e.last[i]] = r
    e.last[i] = r
    _serve(load, v, c, e, rows, i, now)


@njit(cache=True, nogil=True)
def _pick(load: Any, v: Any, e: Any, i: Any) -> Any:
    """The request that is next on instance `i`, and the one before it in the queue (-1: it is the first)."""
    best, before = e.first[i], np.int64(-1)
    if e.discipline == 0:
        return best, before
    previous, r = best, e.following[best]
    while r >= 0:
        shorter = v.estimate[r, 1] < v.estimate[best, 1]
        if shorter if e.discipline == 1 else load.priority[r] < load.priority[best]:
            best, before = r, previous
        previous, r = r, e.following[r]
    return best, before


@njit(cache=True, nogil=True)
def _leave(e: Any, i: Any, r: Any, before: Any) -> None:
    if before < 0:
        e.first[i] = e.following[r]
    else:
        e.following[before] = e.following[r]
    if e.last[i] == r:
        e.last[i] = before
    e.following[r] = -1


@njit(cache=True, nogil=True)
def _serve(load: Any, v: Any, c: Any, e: Any, rows: Any, i: Any, now: Any) -> None:
    """Start the next request of the queue, if the instance is idle and has room for it."""
    while e.running[i] < 0 and e.first[i] >= 0:
        r, before = _pick(load, v, e, i)
        start, prompt, need = load.offsets[r], load.prompt[r], load.need[r]
        run = cache.begin(c, i, load.ids, start, load.usable[r], need, prompt, v.block_size)
        if run == cache.BLOCKED:
            return
        _leave(e, i, r, before)
        started(v, r, i, prompt, now, run != cache.TOO_BIG)
        row = rows[r]
        row[_LOOKED_UP], row[_QUEUE], row[_HIT], row[_PREFILL] = now, now - load.arrived_us[r], max(run, 0) * v.block_size, 0
        if run != cache.TOO_BIG:
            c.counters[EVENTS] = 0  # nobody reads them: the buffer is used again for every request
            held = e.held[e.held_at[r] : e.held_at[r + 1]]
            cache.allocate(c, i, load.ids, start, run, load.tenant[r], now, held)
            if not e.at_finish:
                cache.store(c, i, load.ids, start, run, load.offsets[r + 1] - start, now, held)
            row[_PREFILL] = cost_us(v.cost, v.speed[i], row[_HIT], prompt)
            row[_TTFT] = row[_QUEUE] + row[_PREFILL]
            e.running[i], e.run_blocks[r], e.end_us[i], e.serial[i] = r, run, now + row[_PREFILL], e.serial[-1]
            e.serial[-1] += 1


@njit(cache=True, nogil=True)
def _finish(code: Any, load: Any, v: Any, m: Any, c: Any, e: Any, rows: Any, i: Any) -> None:
    r, now = e.running[i], e.end_us[i]
    if e.at_finish:
        start = load.offsets[r]
        c.counters[EVENTS] = 0
        held = e.held[e.held_at[r] : e.held_at[r + 1]]
        cache.store(c, i, load.ids, start, e.run_blocks[r], load.offsets[r + 1] - start, now, held)
    e.running[i], e.end_us[i] = -1, _NEVER
    finished(v, r, i)
    served(code, r, rows[r, _TTFT], m)
    e.releases[e.ends[1]] = r
    e.ends[1] += 1
    if e.hold_us == 0:
        _release(load, v, c, e, rows, now)
    _serve(load, v, c, e, rows, i, now)


@njit(cache=True, nogil=True)
def _release(load: Any, v: Any, c: Any, e: Any, rows: Any, now: Any) -> None:
    r = e.releases[e.ends[0]]
    e.ends[0] += 1
    i = rows[r, _INSTANCE]
    v.held[i] -= 1
    c.counters[EVENTS] = 0
    cache.release(c, i, now, e.held[e.held_at[r] : e.held_at[r + 1]])
    _serve(load, v, c, e, rows, i, now)
