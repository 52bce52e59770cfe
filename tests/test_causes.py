"""The cause kernel against a slow oracle on random, even inconsistent, event sequences; and its own right answers."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from analytics.causes import CAUSES
from streams.causes import (
    BEYOND,
    BROKEN_PREFIX,
    CAPACITY_OTHER,
    CAPACITY_RESIZE,
    CAPACITY_SELF,
    COLD,
    FOREVER,
    GRANULARITY,
    HIT,
    IN_FLIGHT,
    INSTANCE,
    NOT_STORED,
    OP_ACCESS,
    OP_CLEARED,
    OP_DOWN,
    OP_DRAIN,
    OP_EVICTED,
    OP_GAP,
    OP_LIVE,
    OP_MUTE,
    OP_REPORTS,
    OP_STORED,
    OP_UP,
    ROUTING,
    UNOBSERVED,
    Accesses,
    CauseTable,
    Fleet,
    Ops,
)

BLOCK = 4


@dataclass
class Known:
    """What the oracle remembers of one block."""

    holders: set[int] = field(default_factory=set)
    gone: int = COLD
    gone_tenant: int = -1
    asked_until: int | None = None


@dataclass
class Oracle:
    """Section 5 of docs/design.md read aloud, with dicts and sets."""

    own: int
    instances: int
    blocks: dict[int, Known] = field(default_factory=dict)

    def __post_init__(self) -> None:
        n = self.instances
        self.touched: set[int] = set()
        self.up, self.gap, self.reports, self.life = [False] * n, [False] * n, [False] * n, [0] * n

    def lose(self, instance: int, cause: int, tenant: int) -> None:
        for known in self.blocks.values():
            if instance in known.holders:
                known.holders.discard(instance)
                if not known.holders:
                    known.gone, known.gone_tenant = cause, tenant

    def run(self, instance: int, chain: list[int]) -> int:
        n = 0
        while n < len(chain) and instance in self.blocks.get(chain[n], Known()).holders:
            n += 1
        return n

    def why(self, instance: int, block: int, ts: int) -> tuple[int, int]:
        known = self.blocks.get(block)
        if self.gap[instance]:
            return UNOBSERVED, -1
        if not self.reports[instance]:
            return (UNOBSERVED if block in self.touched else COLD), -1
        if known is None:
            return COLD, -1
        if any(self.up[i] for i in known.holders):
            return BROKEN_PREFIX, -1
        if known.asked_until is not None:
            return (IN_FLIGHT if ts < known.asked_until else NOT_STORED), -1
        if known.holders:
            return INSTANCE, -1
        if known.gone == CAPACITY_SELF and known.gone_tenant != self.own:
            return CAPACITY_OTHER, known.gone_tenant
        return known.gone, -1

    def access(self, instance: int, prompt: int, hit: int, chain: list[int], ts: int, end: int) -> list[tuple[int, int]]:
        usable = max((prompt - 1) // BLOCK * BLOCK, hit)
        others = [i for i in range(self.instances) if self.up[i] and i != instance]
        longest = 0 if self.gap[instance] else max((self.run(i, chain) for i in others), default=0)
        causes: list[tuple[int, int]] = []
        for token in range(prompt):
            k = token // BLOCK
            if token < hit:
                causes.append((HIT, -1))
            elif token >= usable:
                causes.append((GRANULARITY, -1))
            elif k >= len(chain):
                causes.append((UNOBSERVED, -1))
            elif k < longest and longest > hit // BLOCK:
                causes.append((ROUTING, -1))
            else:
                causes.append(self.why(instance, chain[k], ts))
        self.touched.update(chain)
        for block in chain[hit // BLOCK :] if self.reports[instance] else []:
            known = self.blocks.setdefault(block, Known())
            if instance in known.holders:
                continue
            known.asked_until = end if known.asked_until is None else max(known.asked_until, end)
        return causes


def chain_of(path: list[int]) -> list[int]:
    """Chain-hashed ids: an id commits to everything before it."""
    ids, h = [], 0
    for step in path:
        h = hash((h, step)) & (2**64 - 1)
        ids.append(h)
    return ids


paths = st.lists(st.integers(0, 2), min_size=0, max_size=6)
steps = st.one_of(
    st.tuples(st.just("access"), st.integers(0, 2), paths, st.integers(0, 30), st.integers(0, 30), st.integers(-1, 4)),
    st.tuples(st.just("stored"), st.integers(0, 2), paths),
    st.tuples(
        st.just("evicted"), st.integers(0, 2), paths, st.sampled_from([CAPACITY_SELF, CAPACITY_RESIZE, INSTANCE]), st.integers(-1, 2)
    ),
    st.tuples(st.just("cleared"), st.integers(0, 2)),
    st.tuples(st.sampled_from(["up", "down", "drain", "gap", "live", "mute", "reports"]), st.integers(0, 2)),
)
LIFE = {"up": OP_UP, "down": OP_DOWN, "drain": OP_DRAIN, "gap": OP_GAP, "live": OP_LIVE, "mute": OP_MUTE, "reports": OP_REPORTS}


class Script:
    """Builds kernel columns and runs the oracle beside them."""

    def __init__(self, instances: int = 3, spread: int = 1) -> None:
        self.oracle, self.spread = Oracle(0, instances), spread
        self.rows: list[tuple[int, ...]] = []
        self.accesses: list[tuple[int, int, int, int, list[int]]] = []
        self.expected: list[list[tuple[int, int]]] = []

    def add(self, op: int, instance: int, *, block: int = 0, cause: int = 0, tenant: int = -1, access: int = -1) -> None:
        life = self.oracle.life[instance]
        self.rows.append((op, instance * self.spread, life, len(self.rows), block, cause, tenant, access))

    def step(self, name: str, instance: int, *rest: object) -> None:
        oracle, now = self.oracle, len(self.rows)
        if name == "access":
            path, prompt, hit, ends = rest
            chain = chain_of(path)[: prompt // BLOCK]  # type: ignore[arg-type,operator]
            hit = min(hit, prompt)  # type: ignore[type-var]
            end = now + ends if ends >= 0 else int(FOREVER)  # type: ignore[operator]
            self.add(OP_ACCESS, instance, access=len(self.accesses))
            known = sum(block in oracle.touched for block in chain)
            self.accesses.append((prompt, hit, end, known, chain))  # type: ignore[arg-type]
            self.expected.append(oracle.access(instance, prompt, hit, chain, now, end))  # type: ignore[arg-type]
        elif name in ("stored", "evicted"):
            for block in chain_of(rest[0])[-1:]:  # type: ignore[arg-type]
                self.residency(name, instance, block, *rest[1:])
        elif name == "cleared":
            self.add(OP_CLEARED, instance, cause=INSTANCE)
            oracle.lose(instance, INSTANCE, -1)
        else:
            self.life(name, instance)

    def residency(self, name: str, instance: int, block: int, cause: int = 0, tenant: int = -1) -> None:
        if name == "stored":
            self.add(OP_STORED, instance, block=block)
            known = self.oracle.blocks.setdefault(block, Known())
            known.holders.add(instance)
            known.asked_until = None
            return
        self.add(OP_EVICTED, instance, block=block, cause=cause, tenant=tenant)
        known = self.oracle.blocks.get(block, Known())
        known.holders.discard(instance)
        if not known.holders:
            known.gone, known.gone_tenant = cause, tenant

    def life(self, name: str, instance: int) -> None:
        self.add(LIFE[name], instance)
        oracle = self.oracle
        if name == "down":
            oracle.lose(instance, INSTANCE, -1)
        flags = {"up": oracle.up, "down": oracle.up, "drain": oracle.up, "gap": oracle.gap, "live": oracle.gap}
        flags.get(name, oracle.reports)[instance] = name in ("up", "gap", "reports")

    def kernel(self, cuts: list[int], table: CauseTable | None = None, reload: bool = False) -> list[list[tuple[int, int]]]:
        """Per access the cause of every token, from a table that gets the rows cut at `cuts` (and is rebuilt from its state between)."""
        table = table or CauseTable(0, BLOCK, capacity=4)
        n = self.oracle.instances * self.spread
        fleet = Fleet(*(np.zeros(n, np.uint8) for _ in range(3)), np.zeros(n, np.int64), np.zeros(1, np.int64))  # type: ignore[call-arg]
        got: list[list[tuple[int, int]]] = []
        for begin, end in zip([0, *cuts], [*cuts, len(self.rows)], strict=True):
            got += self.part(table, fleet, begin, end)
            if reload:
                table = CauseTable.from_state(0, BLOCK, table.state())
        return got

    def part(self, table: CauseTable, fleet: Fleet, begin: int, end: int) -> list[list[tuple[int, int]]]:
        rows = self.rows[begin:end]
        used = [row[7] for row in rows if row[7] >= 0]
        renumber = {old: new for new, old in enumerate(used)}
        types = (np.uint8, np.int32, np.int64, np.int64, np.uint64, np.uint8, np.int32)
        columns = [np.array([row[c] for row in rows], t) for c, t in enumerate(types)]
        ops = Ops(*columns, np.array([renumber.get(row[7], -1) for row in rows], np.int32))  # type: ignore[call-arg]
        mine = [self.accesses[a] for a in used]
        offsets = np.cumsum([0, *(len(a[4]) for a in mine)])
        flat = np.array([h for a in mine for h in a[4]], np.uint64)
        numbers = (np.array([a[i] for a in mine], np.int64) for i in range(4))
        accesses = Accesses(*numbers, np.zeros(len(mine), np.int64), offsets, flat)  # type: ignore[call-arg]
        segments = table.apply(ops, accesses, fleet)
        tokens: list[list[tuple[int, int]]] = [[] for _ in mine]
        for i in range(len(segments.cause)):
            out = tokens[segments.access[i]]
            assert segments.start[i] == len(out)
            out += [(int(segments.cause[i]), int(segments.tenant[i]))] * int(segments.end[i] - segments.start[i])
        return tokens


@settings(max_examples=300, deadline=None)
@given(st.lists(steps, max_size=60), st.lists(st.integers(0, 60), max_size=3), st.sampled_from([1, 40]), st.booleans())
def test_kernel_equals_oracle(script_steps: list[tuple], cuts: list[int], spread: int, reload: bool) -> None:
    script = Script(spread=spread)
    for step in script_steps:
        script.step(*step)
    got = script.kernel(sorted(min(cut, len(script.rows)) for cut in cuts), reload=reload)
    assert got == script.expected
    for access, tokens in zip(script.accesses, got, strict=True):
        assert len(tokens) == access[0]


def started(instances: int = 2) -> Script:
    script = Script(instances)
    for i in range(instances):
        script.step("up", i)
        script.step("reports", i)
    return script


def shares(tokens: list[tuple[int, int]]) -> dict[str, int]:
    return {CAUSES[c]: sum(1 for got, _ in tokens if got == c) for c in sorted({c for c, _ in tokens})}


def test_eviction_by_another_tenant_names_it() -> None:
    script = started()
    path = [0, 1, 2]
    for n in (1, 2, 3):
        script.step("stored", 0, path[:n])
    for n in (3, 2, 1):
        script.step("evicted", 0, path[:n], CAPACITY_SELF, 2)
    script.step("access", 0, path, 13, 0, 0)
    (tokens,) = script.kernel([])
    assert shares(tokens) == {"granularity": 1, "capacity_other": 12}
    assert {tenant for cause, tenant in tokens if cause == CAPACITY_OTHER} == {2}


def test_routing_is_the_part_between_the_two_runs() -> None:
    script = started()
    path = [0, 1, 2, 0]
    for n in (1, 2, 3):
        script.step("stored", 1, path[:n])
    script.step("stored", 0, path[:1])
    script.step("access", 0, path, 17, 4, 0)
    (tokens,) = script.kernel([])
    assert shares(tokens) == {"hit": 4, "granularity": 1, "routing": 8, "cold": 4}


def test_forgotten_blocks_read_as_beyond() -> None:
    script = started(1)
    for branch in range(400):
        script.step("access", 0, [branch], 5, 0, 0)
    table = CauseTable(0, BLOCK, capacity=4)
    script.kernel([], table)
    assert table.forget(100) == 300
    assert table.count == 100
    again = started(1)
    again.step("access", 0, [0], 5, 0, 0)
    again.step("access", 0, [100_000], 5, 0, 0)
    old, new = again.kernel([], table)
    assert old[0][0] == BEYOND and new[0][0] == COLD
