"""The fleet emulator: Prefill instances with vLLM's cache, FIFO queues, a router and faults, event by event and deterministic.

Python walks the events (arrivals, ends of prefills, releases, faults); njit kernels do all that costs per block. Each instance runs one
prefill at a time. Look-up, allocation and (as vLLM does) stores happen when a prefill starts; if free blocks do not suffice, the request
waits at the head of its queue until pinned ones are released.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from analytics.fleet import cache, truth
from analytics.fleet.cache import CAPACITY, EVENTS, EVICTABLE, FREE, HIT_TOKENS, INCARNATION, LIVE, NEXT_SEQ, OBSERVED, QUERY_TOKENS
from analytics.fleet.chunks import (
    LIFECYCLE_REASONS,
    LIFECYCLES,
    Chunk,
    Vocabulary,
    access_columns,
    instance_columns,
    residency_columns,
)
from analytics.fleet.config import FleetConfig as FleetConfig
from analytics.fleet.config import prefill_us as prefill_us
from analytics.fleet.faults import Fault, extent
from analytics.fleet.result import FleetResult
from analytics.fleet.routers import RouteRequest, RouterSpec, View
from analytics.fleet.routing.view import emptied, finished, placed, started
from analytics.fleet.workload import Workload

EPOCH_US = 1_735_689_600_000_000  # 2025-01-01T00:00:00Z
CLOSING_US = 180_000_000  # the last heartbeat comes this much after the last event, so that every window closes
_FINISH, _RELEASE, _UP, _FAULT = range(4)  # order among events of one microsecond; arrivals and heartbeats come after them
_SERVED, _FAILED = 0, 1


@dataclass(slots=True)
class _Instance:
    queue: deque[int] = field(default_factory=deque)
    running: int = -1
    run_blocks: int = 0
    held: dict[int, npt.NDArray[np.int32]] = field(default_factory=dict)
    alive: bool = False
    closing: Fault | None = None
    removed: bool = False
    capacity_blocks: int = 0


class Fleet:
    """One run of a workload through a fleet. Use once: `run()` yields chunks, `run_all()` only the result.

    Raises `ValueError` for a fault schedule that cannot be carried out (see `faults.extent`). Cost: about 30 us a request on 24-block
    chains and 4 instances, truth included. Memory: 56 B a physical block, 4 B an instance and 24 B per distinct block.
    """

    def __init__(
        self,
        config: FleetConfig,
        workload: Workload,
        router: RouterSpec,
        faults: Sequence[Fault] = (),
        seed: int | None = None,
        *,
        epoch_us: int = EPOCH_US,
        with_truth: bool = True,
    ) -> None:
        size = extent(faults, config.instances, config.capacity_blocks)
        self.config, self.workload, self.epoch_us = config, workload, epoch_us
        self._seed = config.seed if seed is None else seed
        self._router, self._routers = router.build(self._seed), [router.label]
        blocks = workload.blocks
        self._ids = blocks.ids
        self._caches = cache.new_caches(size.instances, size.slots, len(blocks.hashes))
        self._truth = truth.new_truth(len(blocks.hashes), len(workload), size.instances, len(workload.tenants))
        self._with_truth = with_truth
        self._nodes = [_Instance(capacity_blocks=config.capacity_blocks) for _ in range(size.instances)]
        idle = View.idle(size.instances, workload.block_size, len(workload), (config.cost_a_s, config.cost_b_s))
        self._view = idle._replace(engine=self._caches.instances, blocks=self._caches.blocks)
        self._known = 0  # instances that exist by now
        self._open = 0  # instances that take requests
        self._default_blocks = config.capacity_blocks
        self._vocabulary = Vocabulary(
            workload.tenants, tuple(f"p{i}" for i in range(size.instances)), workload.sessions, workload.categories, (router.label,),
            workload.model, workload.block_size,
        )  # fmt: skip
        self._columns_to_lists()
        self._router_of = [0] * len(workload)
        self._homeless: list[int] = []  # requests that no instance could take
        self._heap: list[tuple[int, int, int, int, Any]] = []
        self._serial = 0
        for fault in faults:
            self._push(fault.at_us, _FAULT, -1, fault)
        self._access: list[tuple[int, ...]] = []
        self._lifecycle: list[tuple[int, ...]] = []
        self._done: list[npt.NDArray[np.int64]] = []
        self._keep_rows = True
        self.result: FleetResult | None = None

    def _columns_to_lists(self) -> None:
        w = self.workload
        self._arrived = w.arrived_at_us.tolist()
        self._tenant = w.tenant.tolist()
        self._session = w.session.tolist()
        assert w.category is not None and w.turn is not None  # filled on construction
        self._category, self._turn = w.category.tolist(), w.turn.tolist()
        self._prompt = w.prompt_tokens.tolist()
        self._start = w.offsets.tolist()
        self._usable = np.minimum(np.diff(w.offsets), np.maximum(w.prompt_tokens - 1, 0) // w.block_size).tolist()
        self._need = (-(-w.prompt_tokens // w.block_size)).tolist()

    # -- the walk over events ---------------------------------------------------------------------------------------------------------

    def run(self, chunk_s: float = 2.0) -> Iterator[Chunk]:
        """Chunks of `chunk_s` of event time, in order, empty ones left out; afterwards `result` is set."""
        step = max(1, round(chunk_s * 1e6))
        cut = step
        for _ in range(self.config.instances):
            self._add(0)
        beat_us = round(self.config.heartbeat_s * 1e6)
        next_beat, arrival, n, now = beat_us, 0, len(self.workload), 0
        while arrival < n or self._heap:
            due = self._heap[0][0] if self._heap else self._arrived[arrival]
            is_arrival = arrival < n and (not self._heap or self._arrived[arrival] < due)
            now = self._arrived[arrival] if is_arrival else due
            is_beat = next_beat < now
            now = next_beat if is_beat else now
            if now >= cut:
                yield from self._flush(cut - step, cut)
                cut = (now // step + 1) * step
            if is_beat:
                self._beat(now)
                next_beat += beat_us
            elif is_arrival:
                self._route(arrival, now)
                arrival += 1
            else:
                _, kind, _, i, what = heapq.heappop(self._heap)
                self._happen(kind, i, what, now)
        yield from self._flush(cut - step, cut)
        now += CLOSING_US
        self._beat(now)
        yield from self._flush(now // step * step, (now // step + 1) * step)
        self.result = self._gather()

    def run_all(self) -> FleetResult:
        """Run to the end without building chunks; the result per request."""
        self._keep_rows = False
        for _ in self.run(chunk_s=60.0):
            pass
        assert self.result is not None
        return self.result

    def _push(self, at_us: int, kind: int, i: int, what: Any) -> None:
        self._serial += 1
        heapq.heappush(self._heap, (at_us, kind, self._serial, i, what))

    def _happen(self, kind: int, i: int, what: Any, now: int) -> None:
        if kind == _FINISH:
            self._finish(i, what, now)
        elif kind == _RELEASE:
            if what in self._nodes[i].held:  # else the instance went down meanwhile
                self._release(i, what, now)
        elif kind == _UP:
            self._up(i, now)
        else:
            self._fault(what, now)

    # -- requests ---------------------------------------------------------------------------------------------------------------------

    def _route(self, r: int, now: int) -> None:
        view, start = self._view, self._start[r]
        if not self._open:
            self._homeless.append(r)
            return
        cache.leading_runs(self._caches, self._ids, start, self._usable[r], view.hit_blocks)
        chain = self._ids[start : self._start[r + 1]]
        head = int(chain[0]) if len(chain) else -1
        i = self._router.choose(
            RouteRequest(r, self._tenant[r], self._session[r], self._prompt[r], head, self._category[r], self._turn[r], now, chain), view
        )
        self._router_of[r] = len(self._routers) - 1
        self._nodes[i].queue.append(r)
        placed.py_func(view, r, i, self._prompt[r])
        self._serve(i, now)

    def _serve(self, i: int, now: int) -> None:
        """Start the request at the head of the queue, if the instance is idle and has room for it."""
        node, config = self._nodes[i], self.config
        while node.running < 0 and node.queue and node.alive and node.closing is None:
            r = node.queue[0]
            prompt, start, need = self._prompt[r], self._start[r], self._need[r]
            self._make_room(2 * need)
            seq = int(self._caches.counters[NEXT_SEQ])
            run = cache.begin(self._caches, i, self._ids, start, self._usable[r], need, prompt, self.workload.block_size)
            if run == cache.BLOCKED:
                return
            node.queue.popleft()
            started.py_func(self._view, r, i, prompt, now, run != cache.TOO_BIG)
            hit = max(run, 0) * self.workload.block_size
            busy_us = 0 if run == cache.TOO_BIG else prefill_us(config.cost_a_s, config.cost_b_s, hit, prompt)
            if self._with_truth:
                truth.account(
                    self._caches, self._truth, r, i, self._ids, start, self._start[r + 1] - start, max(run, 0), prompt,
                    self.workload.block_size, self._tenant[r], now, now + busy_us,
                )  # fmt: skip
            self._looked_up(r, i, now, seq, hit, -1 if run == cache.TOO_BIG else busy_us)
            if run != cache.TOO_BIG:
                self._prefill(r, i, now, run, busy_us)

    def _looked_up(self, r: int, i: int, now: int, seq: int, hit: int, busy_us: int) -> None:
        """Note the access row; `busy_us` is -1 for a request that failed."""
        queue_us, incarnation = now - self._arrived[r], int(self._caches.instances[i, INCARNATION])
        end = (0, -1, _FAILED) if busy_us < 0 else (busy_us, queue_us + busy_us, _SERVED)
        self._access.append((r, now, seq, i, incarnation, hit, queue_us, *end, self._router_of[r]))

    def _prefill(self, r: int, i: int, now: int, run: int, busy_us: int) -> None:
        node, start = self._nodes[i], self._start[r]
        held = np.empty(self._need[r], np.int32)
        cache.allocate(self._caches, i, self._ids, start, run, self._tenant[r], now, held)
        if self.config.store_when == "schedule":
            cache.store(self._caches, i, self._ids, start, run, self._start[r + 1] - start, now, held)
        node.running, node.run_blocks, node.held[r] = r, run, held
        self._push(now + busy_us, _FINISH, i, r)

    def _finish(self, i: int, r: int, now: int) -> None:
        node = self._nodes[i]
        if self.config.store_when == "finish":
            start = self._start[r]
            self._make_room(len(node.held[r]))
            cache.store(self._caches, i, self._ids, start, node.run_blocks, self._start[r + 1] - start, now, node.held[r])
        node.running = -1
        finished.py_func(self._view, r, i)
        self._router.served(r, now - self._arrived[r])
        if self.config.hold_s > 0:
            hold_us = round(self.config.hold_s * 1e6)
            self._push(now + hold_us, _RELEASE, i, r)
        else:
            self._release(i, r, now)
        if node.closing is not None:
            self._down(i, node.closing, now)
        self._serve(i, now)

    def _release(self, i: int, r: int, now: int) -> None:
        held = self._nodes[i].held.pop(r)
        self._view.held[i] -= 1
        self._make_room(len(held))
        cache.release(self._caches, i, now, held)
        self._serve(i, now)

    def _make_room(self, events: int) -> None:
        buffer = self._caches.events
        used = int(self._caches.counters[EVENTS])
        if used + events > len(buffer):
            larger = np.zeros((2 * (used + events), buffer.shape[1]), np.int64)
            larger[:used] = buffer[:used]
            self._caches = self._caches._replace(events=larger)

    # -- instances and faults ---------------------------------------------------------------------------------------------------------

    def _fault(self, fault: Fault, now: int) -> None:
        if fault.kind == "route":
            assert fault.router is not None  # extent() checked it
            self._router = fault.router.build(self._seed)
            self._routers.append(fault.router.label)
            self._vocabulary = Vocabulary(**{**self._vocabulary.__dict__, "routers": tuple(self._routers)})
        elif fault.kind == "add":
            self._add(now, fault.blocks)
        else:
            if fault.kind == "capacity" and fault.instance is None:
                self._default_blocks = fault.capacity_of(self.config.capacity_blocks)
            which = range(self._known) if fault.instance is None else [fault.instance]
            for i in which:
                if i < self._known and not self._nodes[i].removed:
                    self._strike(i, fault, now)

    def _strike(self, i: int, fault: Fault, now: int) -> None:
        node = self._nodes[i]
        if fault.kind == "capacity":
            node.capacity_blocks = fault.capacity_of(self.config.capacity_blocks)
            if node.alive:
                self._make_room(int(self._caches.instances[i, LIVE]))
                cache.resize(self._caches, i, node.capacity_blocks, now)
                self._view.capacity_blocks[i] = node.capacity_blocks
                self._serve(i, now)
        elif fault.kind == "clear":
            if node.alive:
                truth.lose(self._caches, self._truth, i)
                cache.clear(self._caches, i)
                self._row(i, now, "cleared", "clear")
                state = self._caches.instances[i]
                state[INCARNATION] += 1
                state[QUERY_TOKENS] = state[HIT_TOKENS] = 0
                self._row(i, now, "up")
        else:
            self._close(i, fault, now)

    def _close(self, i: int, fault: Fault, now: int) -> None:
        node = self._nodes[i]
        node.removed = fault.kind == "remove"
        if not node.alive:
            return
        node.closing = fault
        self._open -= bool(self._view.up[i])
        self._view.up[i] = False
        waiting, node.queue = node.queue, deque()
        emptied.py_func(self._view, i, node.running)
        if node.running < 0:
            self._down(i, fault, now)
        for r in waiting:
            self._route(r, now)

    def _down(self, i: int, fault: Fault, now: int) -> None:
        node = self._nodes[i]
        truth.lose(self._caches, self._truth, i)
        self._row(i, now, "down", "removal" if fault.kind == "remove" else "restart")
        cache.clear(self._caches, i)
        node.alive, node.closing, node.held = False, None, {}
        self._view.held[i] = 0
        if not node.removed:
            self._push(now + round(fault.down_s * 1e6), _UP, i, None)

    def _add(self, now: int, blocks: int | None = None) -> None:
        i = self._known
        self._known += 1
        self._nodes[i].capacity_blocks = self._default_blocks if blocks is None else blocks
        self._up(i, now)

    def _up(self, i: int, now: int) -> None:
        node = self._nodes[i]
        if node.removed:
            return
        cache.reset(self._caches, i, node.capacity_blocks)
        node.alive = True
        self._open += 1
        self._view.up[i] = True
        self._view.capacity_blocks[i] = node.capacity_blocks
        self._row(i, now, "up")
        homeless, self._homeless = self._homeless, []
        for r in homeless:
            self._route(r, now)

    def _beat(self, now: int) -> None:
        for i in range(self._known):
            if self._nodes[i].alive:
                self._row(i, now, "heartbeat")

    def _row(self, i: int, now: int, lifecycle: str, reason: str = "") -> None:
        state, node, seq = self._caches.instances[i].tolist(), self._nodes[i], int(self._caches.counters[NEXT_SEQ])
        self._caches.counters[NEXT_SEQ] += 1
        pinned = state[LIVE] - state[FREE]
        self._lifecycle.append((
            now, seq, i, state[INCARNATION], LIFECYCLES.index(lifecycle), LIFECYCLE_REASONS.index(reason), state[CAPACITY],
            pinned + state[EVICTABLE], pinned, state[EVICTABLE], int(node.running >= 0), len(node.queue),
            int(self._view.queued_tokens[i]), state[QUERY_TOKENS], state[HIT_TOKENS],
        ))  # fmt: skip

    # -- rows out ---------------------------------------------------------------------------------------------------------------------

    def _flush(self, from_us: int, to_us: int) -> Iterator[Chunk]:
        truth.observe(self._caches, self._truth)
        counters = self._caches.counters
        used = int(counters[EVENTS])
        access = np.array(self._access, np.int64).reshape(-1, 11)
        lifecycle = np.array(self._lifecycle, np.int64).reshape(-1, 15)
        if len(access):
            self._done.append(access)
        if self._keep_rows and (used or len(access) or len(lifecycle)):
            yield Chunk(
                from_us + self.epoch_us,
                to_us + self.epoch_us,
                self._vocabulary,
                access_columns(access, self.workload, self.epoch_us),
                residency_columns(self._caches.events[:used], self.workload, self.epoch_us),
                instance_columns(lifecycle, self.epoch_us),
            )
        counters[EVENTS] = counters[OBSERVED] = 0
        self._access, self._lifecycle = [], []

    def _gather(self) -> FleetResult:
        n = len(self.workload)
        rows = np.concatenate(self._done) if self._done else np.zeros((0, 11), np.int64)
        assert len(rows) == n, "every request is looked up exactly once"
        out = np.empty((n, 11), np.int64)
        out[rows[:, 0]] = rows
        return FleetResult(
            self.workload, out[:, 1], out[:, 3], out[:, 5], out[:, 6], out[:, 7], out[:, 8], out[:, 9], self._truth.tokens,
            self._truth.cause_tenant,
        )  # fmt: skip
