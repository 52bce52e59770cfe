"""Slow, readable oracles of the fleet emulator: vLLM's block pool on lists and dicts, and causes worked out from the emitted events."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from analytics.fleet.chunks import LIFECYCLES, OUTCOMES, REASONS, RESIDENCY_KINDS, Chunk
from analytics.fleet.truth import CAUSES
from analytics.fleet.workload import Workload

Event = tuple[str, int, str, int, int]  # kind, dense id, reason, cause tenant, idle us


@dataclass
class PoolOracle:
    """One instance's block pool; blocks are numbers, `free` is the queue with its front first."""

    capacity: int
    free: list[int] = field(default_factory=list)
    name: dict[int, int] = field(default_factory=dict)
    copies: dict[int, list[int]] = field(default_factory=dict)
    holders: dict[int, int] = field(default_factory=dict)
    freed_us: dict[int, int] = field(default_factory=dict)
    live: int = 0
    events: list[Event] = field(default_factory=list)
    made: int = 0

    def __post_init__(self) -> None:
        self.grow(self.capacity, at_front=False)

    def grow(self, capacity: int, at_front: bool = True) -> None:
        while self.live < capacity:
            self.free.insert(0 if at_front else len(self.free), self.made)
            self.made += 1
            self.live += 1

    def run(self, chain: list[int], usable: int) -> int:
        run = 0
        while run < usable and chain[run] in self.copies:
            run += 1
        return run

    def pop(self, now: int, reason: str, tenant: int) -> int:
        block = self.free.pop(0)
        d = self.name.pop(block, None)
        if d is not None:
            self.copies[d].remove(block)
            if not self.copies[d]:
                del self.copies[d]
                self.events.append(("evicted", d, reason, tenant, now - self.freed_us[block]))
        return block

    def allocate(self, chain: list[int], run: int, need: int, tenant: int, now: int) -> list[int] | None:
        reused = [self.copies[d][0] for d in chain[:run]]
        if need - run > len(self.free) - sum(self.holders.get(block, 0) == 0 for block in reused):
            return None
        for block in reused:
            if self.holders.get(block, 0) == 0:
                self.free.remove(block)
            self.holders[block] = self.holders.get(block, 0) + 1
        fresh = [self.pop(now, "pressure", tenant) for _ in range(need - run)]
        self.holders.update(dict.fromkeys(fresh, 1))
        return reused + fresh

    def store(self, chain: list[int], run: int, held: list[int]) -> None:
        for d, block in list(zip(chain, held, strict=False))[run:]:
            self.name[block] = d
            if d not in self.copies:
                self.events.append(("stored", d, "", -1, -1))
            self.copies.setdefault(d, []).append(block)

    def release(self, held: list[int], now: int) -> None:
        for block in reversed(held):
            self.holders[block] -= 1
            if self.holders[block] == 0:
                self.free.append(block)
                self.freed_us[block] = now
        self.shrink(now)

    def shrink(self, now: int) -> None:
        while self.live > self.capacity and self.free:
            self.pop(now, "resize", -1)
            self.live -= 1

    def resize(self, capacity: int, now: int) -> None:
        self.capacity = capacity
        self.grow(capacity)
        self.shrink(now)

    def clear(self) -> None:
        self.name.clear()
        self.copies.clear()


def causes_from_events(chunks: list[Chunk], workload: Workload) -> tuple[np.ndarray, list[int]]:
    """Tokens per request and cause, and the main evictor, from nothing but the emitted rows, one by one in order of `seq`."""
    rows = []
    for chunk in chunks:
        for kind in ("access", "residency", "instance"):
            columns = getattr(chunk, kind)
            rows += [(int(seq), kind, columns, k) for k, seq in enumerate(columns.seq)]
    rows.sort(key=lambda row: row[0])
    assert [row[0] for row in rows] == list(range(len(rows))), "one gapless sequence"
    state = _Attribution(workload)
    last = -(1 << 62)
    for _, kind, columns, k in rows:
        assert columns.ts_us[k] >= last, "time must not run backwards along seq"
        last = int(columns.ts_us[k])
        getattr(state, kind)(columns, k)
    return state.tokens, state.evictor


class _Attribution:
    def __init__(self, workload: Workload) -> None:
        self.block_size = workload.block_size
        self.tokens = np.zeros((len(workload), len(CAUSES)), np.int64)
        self.evictor = [-1] * len(workload)
        self.where: dict[tuple[int, int], set[int]] = {}
        self.asked_end: dict[tuple[int, int], int] = {}
        self.removed: dict[tuple[int, int], tuple[str, int]] = {}
        self.up: dict[int, int] = {}

    def instance(self, columns, k: int) -> None:  # type: ignore[no-untyped-def]
        i, lifecycle = int(columns.instance[k]), LIFECYCLES[columns.lifecycle[k]]
        if lifecycle == "up":
            self.up[i] = int(columns.incarnation[k])
            assert not any(i in held for held in self.where.values()), "an incarnation starts empty"
        elif lifecycle in ("down", "cleared"):
            del self.up[i]
            for block, held in self.where.items():
                if i in held:
                    held.remove(i)
                    self.removed[block] = ("instance", -1)
        else:
            assert columns.used_blocks[k] == columns.pinned_blocks[k] + columns.evictable_blocks[k]

    def residency(self, columns, k: int) -> None:  # type: ignore[no-untyped-def]
        block, i = (int(columns.tenant[k]), int(columns.block[k])), int(columns.instance[k])
        assert self.up[i] == columns.incarnation[k]
        held = self.where.setdefault(block, set())
        if RESIDENCY_KINDS[columns.kind[k]] == "stored":
            assert i not in held, "only the first copy is stored"
            held.add(i)
            self.asked_end.pop(block, None)
        else:
            held.remove(i)
            assert columns.idle_ms[k] >= 0
            self.removed[block] = (REASONS[columns.reason[k]], int(columns.cause_tenant[k]))

    def access(self, columns, k: int) -> None:  # type: ignore[no-untyped-def]
        i, tenant, now, bs = int(columns.instance[k]), int(columns.tenant[k]), int(columns.ts_us[k]), self.block_size
        assert self.up[i] == columns.incarnation[k]
        chain = [(tenant, int(h)) for h in columns.hashes[columns.offsets[k] : columns.offsets[k + 1]]]
        prompt, hit = int(columns.prompt_tokens[k]), int(columns.hit_tokens[k]) // bs
        usable = min(len(chain), max(prompt - 1, 0) // bs)
        if OUTCOMES[columns.outcome[k]] == "served":
            assert hit == self._run(chain[:usable], i), "the hit is the leading run of the resident blocks"
        elsewhere = max([self._run(chain[:usable], j) for j in self.up if j != i], default=0)
        row = self.tokens[columns.request[k]]
        row[CAUSES.index("hit")] = hit * bs
        row[CAUSES.index("granularity")] = (prompt - 1) % bs + 1 if prompt else 0
        row[CAUSES.index("unobserved")] = prompt - hit * bs - row[CAUSES.index("granularity")] - (usable - hit) * bs
        evictors: dict[int, int] = {}
        for b in range(hit, usable):
            cause = "routing" if b < elsewhere else self._cause(chain[b], tenant, now)
            row[CAUSES.index(cause)] += bs
            if cause == "capacity_other":
                evictors[self.removed[chain[b]][1]] = evictors.get(self.removed[chain[b]][1], 0) + 1
        if evictors:
            self.evictor[columns.request[k]] = min(evictors, key=lambda t: (-evictors[t], t))
        end = now + round(float(columns.prefill_ms[k]) * 1e3)
        for block in chain[hit:]:
            if i not in self.where.get(block, set()):
                self.asked_end[block] = max(end, self.asked_end.get(block, end))

    def _run(self, chain: list[tuple[int, int]], i: int) -> int:
        run = 0
        while run < len(chain) and i in self.where.get(chain[run], set()):
            run += 1
        return run

    def _cause(self, block: tuple[int, int], tenant: int, now: int) -> str:
        if self.where.get(block):
            return "broken_prefix"
        if block in self.asked_end:
            return "in_flight" if now < self.asked_end[block] else "not_stored"
        reason, by = self.removed.get(block, ("cold", -1))
        if reason == "pressure":
            return "capacity_self" if by == tenant else "capacity_other"
        return {"resize": "capacity_resize"}.get(reason, reason)
