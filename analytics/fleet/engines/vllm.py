"""vLLM v1: a block pool whose free queue is the LRU, stores at schedule time, duplicates kept."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from analytics.fleet import cache
from analytics.fleet.cache import EVENTS, ID, OBSERVED
from analytics.fleet.engines.engine import Engine, KvEvent, Request


@dataclass(slots=True, eq=False)
class _Running:
    request: Request
    ids: npt.NDArray[np.int32]
    held: npt.NDArray[np.int32]
    named: int  # blocks that carry a hash
    computed_tokens: int


class VllmEngine(Engine):
    """One vLLM v1 instance, on the emulator's cache kernels.

    `gpu_blocks` is what the engine reports; one of them is the null block and holds nothing. A step schedules up to `max_step_tokens`
    prompt tokens: running prompts first, then waiting ones in order; full blocks are named as they are scheduled, so a prompt later in the
    same step hits them. All events of a step are one batch. A store names all new full blocks of a prompt's chunk, also those whose hash
    another block already carries; each block that is taken from the free queue with a hash is one removal.
    A prompt's blocks are all taken when it is admitted (vLLM takes them chunk by chunk and preempts when they run out).
    Cost: O(capacity) a prompt. Source: vLLM v1 `scheduler.py`, `kv_cache_manager.py` and `block_pool.py`.
    """

    def __init__(self, gpu_blocks: int, block_size: int = 16, max_step_tokens: int = 8192, max_running: int = 256) -> None:
        super().__init__(gpu_blocks - 1, block_size, max_step_tokens, max_running)
        self._caches = cache.new_caches(1, self.capacity_blocks, 1, room=2 * self.capacity_blocks + 2)
        cache.reset(self._caches, 0, self.capacity_blocks)
        self._running: list[_Running] = []
        self._now = 0

    def step(self) -> bool:
        if not self._running and not self._waiting:
            return False
        self._now += 1
        left = self.max_step_tokens
        for running in self._running:
            left -= self._compute(running, left)
        while self._waiting and left > 0 and len(self._running) < self.max_running:
            admitted = self._admit(self._waiting[0])
            if admitted is None:
                break
            self._waiting.popleft()
            self._running.append(admitted)
            left -= self._compute(admitted, left)
        self._caches.counters[EVENTS] = self._caches.counters[OBSERVED] = 0
        self._publish()
        self._finish()
        return True

    def clear(self) -> bool:
        if self._running:
            return False
        cache.clear(self._caches, 0)
        self._pending.append(KvEvent("cleared"))  # goes out with the next step's events
        return True

    def resident(self) -> Counter[int]:
        ids = self._caches.blocks[0, :-1, ID]
        return Counter(ids[ids >= 0].tolist())

    def _admit(self, request: Request) -> _Running | None:
        """Look the prompt up and take its blocks; None while the free queue is too short."""
        self._widen(request)
        ids, need = np.array(request.blocks, np.int32), self._blocks_of(request.prompt_tokens)
        run = cache.begin(self._caches, 0, ids, 0, self._reusable(request), need, request.prompt_tokens, self.block_size)
        if run == cache.BLOCKED:
            return None
        held, before = np.empty(need, np.int32), self._caches.blocks[0, :, ID].copy()
        cache.allocate(self._caches, 0, ids, 0, run, 0, self._now, held)
        self._pending.extend(KvEvent("removed", (block,)) for block in before[held[run:]].tolist() if block >= 0)
        request.cached_tokens = run * self.block_size
        return _Running(request, ids, held, run, request.cached_tokens)

    def _compute(self, running: _Running, most_tokens: int) -> int:
        """Schedule the prompt's next tokens, at most `most_tokens`, and name the blocks that they fill."""
        request, named = running.request, running.named
        tokens = min(most_tokens, request.prompt_tokens - running.computed_tokens)
        running.computed_tokens += tokens
        full = running.computed_tokens // self.block_size
        if full > named:
            cache.store(self._caches, 0, running.ids, 0, named, full, self._now, running.held)
            self._pending.append(KvEvent("stored", request.blocks[named:full], request.blocks[named - 1] if named else -1))
            running.named = full
        return tokens

    def _finish(self) -> None:
        for running in self._running:
            if running.computed_tokens == running.request.prompt_tokens:
                cache.release(self._caches, 0, self._now, running.held)
                running.request.done = True
        self._running = [running for running in self._running if not running.request.done]

    def _widen(self, request: Request) -> None:
        """Room for the prompt's ids in the table of dense ids."""
        heads, need = self._caches.heads, max(request.blocks, default=0) + 1
        if need > len(heads):
            wider = np.full((max(need, 2 * len(heads)), 1), -1, np.int32)
            wider[: len(heads)] = heads
            self._caches = self._caches._replace(heads=wider)
