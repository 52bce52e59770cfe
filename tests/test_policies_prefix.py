"""Prefix-aware policies beside slow readable twins and hand-worked examples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from analytics.policies import POLICIES
from analytics.policies.cursor import Trace
from tests.test_policy_forms import chains, trace_from

capacities = st.integers(1, 40)


class Twin:
    """A prefix-safe cache in plain Python: a request pins what it finds, then touches or stores its blocks from the deepest to the head.

    `last` is the request that touched a block last, `order` counts touches. A policy is `victims(free)`: whom to evict of what may leave.
    """

    def __init__(self, trace: Trace, capacity: int) -> None:
        self.trace, self.capacity = trace, capacity
        self.last: dict[int, int] = {}
        self.order: dict[int, int] = {}
        self.request, self.pinned, self.hits = -1, set[int](), list[bool]()

    def chain(self, request: int) -> list[int]:
        return self.trace.ids[self.trace.offsets[request] : self.trace.offsets[request + 1]].tolist()

    def free(self) -> list[int]:
        parents = {int(self.trace.parent[key]) for key in self.last}
        return [key for key in self.last if key not in parents and key not in self.pinned]

    def victims(self, free: list[int]) -> list[int]:
        return [min(free, key=lambda key: self.order[key])]

    def touch(self, key: int, hit: bool) -> None:
        pass

    def began(self, chain: list[int], run: int) -> None:
        pass

    def run(self) -> list[bool]:
        for request in range(self.trace.offsets.size - 1):
            self.request, chain = request, self.chain(request)
            run = next((i for i, key in enumerate(chain) if key not in self.last), len(chain))
            self.hits += [i < run for i in range(len(chain))]
            self.pinned, looked_at = set(chain[:run]), chain[: self.capacity]
            self.began(looked_at, min(run, self.capacity))
            for key in reversed(looked_at):
                hit = key in self.last
                while not hit and len(self.last) >= self.capacity:
                    for victim in self.victims(self.free()):
                        del self.last[victim], self.order[victim]
                self.last[key], self.order[key] = self.request, 1 + max(self.order.values(), default=0)
                self.pinned.add(key)
                self.touch(key, hit)
            self.pinned = set()
        return self.hits


class NodeTwin(Twin):
    """Evicts whole radix nodes (`ends`: last blocks of nodes), or, without ends, all up to a fork."""

    def __init__(self, trace: Trace, capacity: int, nodes: bool) -> None:
        super().__init__(trace, capacity)
        self.ends, self.nodes = set[int](), nodes

    def began(self, chain: list[int], run: int) -> None:
        self.ends |= set(chain[-1:]) | set(chain[run - 1 : run] if run else [])

    def victims(self, free: list[int]) -> list[int]:
        out = super().victims(free)
        while True:
            self.ends.discard(out[-1])
            up = int(self.trace.parent[out[-1]])
            children = [key for key in self.last if self.trace.parent[key] == up and key not in out]
            if up not in self.last or up in self.pinned or children or (self.nodes and up in self.ends):
                return out
            out.append(up)


class MooncakeTwin(Twin):
    """Leases of 10 s (requests are a second apart), batches of a 5.6 % of the capacity."""

    def __init__(self, trace: Trace, capacity: int) -> None:
        super().__init__(trace, capacity)
        self.lease: dict[int, float] = {}

    def touch(self, key: int, hit: bool) -> None:
        self.lease[key] = self.request + (10 if hit else 0)

    def victims(self, free: list[int]) -> list[int]:
        held, out = dict(self.last), list[int]()
        while len(out) < int(np.ceil(self.capacity * 0.05 / 0.9)):
            parents = {int(self.trace.parent[key]) for key in held}
            able = [key for key in held if key not in parents and key not in self.pinned]
            best = min(able, key=lambda key: (self.lease[key], -self.trace.depth[key]), default=-1)
            if best < 0 or (out and self.lease[best] > self.request):
                break
            out.append(best)
            del held[best]
        return out


class CostTwin(Twin):
    """LMCache's values, in groups of a quarter of an octave."""

    def __init__(self, trace: Trace, capacity: int) -> None:
        super().__init__(trace, capacity)
        self.value: dict[int, float] = {}

    def touch(self, key: int, hit: bool) -> None:
        after = float(self.trace.prompt_tokens[self.request] - 16 * self.trace.depth[key])
        self.value[key] = self.value[key] + 0.2 * (after - self.value[key]) if hit else after

    def victims(self, free: list[int]) -> list[int]:
        groups: dict[int, list[int]] = {}
        for key in free:
            groups.setdefault(int(4 * np.log2(self.value[key])), []).append(key)
        heads = [min(groups[g], key=lambda key: (self.last[key], -self.trace.depth[key])) for g in sorted(groups)]
        return [min(heads, key=lambda key: self.value[key] / (1 + (self.request - self.last[key]) / 60))]


TWINS: dict[str, Callable[[Trace, int], Twin]] = {
    "vllm_lru": Twin,
    "sglang_leaf_lru": lambda trace, capacity: NodeTwin(trace, capacity, nodes=True),
    "rtp_llm": lambda trace, capacity: NodeTwin(trace, capacity, nodes=False),
    "mooncake_lease": MooncakeTwin,
    "lmcache_cost": CostTwin,
}


@pytest.mark.parametrize("name", sorted(TWINS))
@settings(max_examples=150, deadline=None)
@given(chains=chains, capacity=capacities)
def test_the_prefix_form_equals_its_twin(name: str, chains: list[list[int]], capacity: int) -> None:
    trace, _ = trace_from(chains)
    room = min(capacity, trace.parent.size)  # policies never get more than all
    assert POLICIES[name].replay(trace, capacity).tolist() == TWINS[name](trace, max(room, 1)).run()


@settings(max_examples=100, deadline=None)
@given(chains=chains, capacity=capacities)
def test_plain_vllm_frees_the_deepest_block_of_a_request_first(chains: list[list[int]], capacity: int) -> None:
    """A list of free blocks, the next to leave first; a request takes out what it uses and gives it back deepest first."""
    trace, _ = trace_from(chains)
    queue: list[int] = []
    used: list[int] = []
    hits = []
    for request in range(len(chains)):
        for key in trace.ids[trace.offsets[request] : trace.offsets[request + 1]].tolist():
            hits.append(key in queue)
            if hits[-1]:
                queue.remove(key)
            elif len(queue) + len(used) == min(capacity, trace.parent.size):
                queue.pop(0) if queue else used.pop()
            used.append(key)
        queue, used = queue + used[::-1], []
    assert POLICIES["vllm_lru"].replay(trace, capacity, "plain").tolist() == hits


@settings(max_examples=60, deadline=None)
@given(chains=chains, capacity=capacities)
def test_vllm_is_leaf_first_lru(chains: list[list[int]], capacity: int) -> None:
    trace, _ = trace_from(chains)
    assert np.array_equal(POLICIES["vllm_lru"].replay(trace, capacity), POLICIES["lru"].replay(trace, capacity))


def hits_of(name: str, token_chains: list[list[int]], capacity: int, form: Any = "prefix", **parameters: Any) -> list[list[int]]:
    """Positions that hit, request by request."""
    trace, _ = trace_from(token_chains)
    hits = POLICIES[name].replay(trace, capacity, form, **parameters)
    return [np.flatnonzero(part).tolist() for part in np.split(hits, trace.offsets[1:-1])]


def test_sglang_evicts_a_whole_leaf_and_rtp_all_up_to_the_fork() -> None:
    """[1 2 3 4] and [1 2 5]: nodes 12, 34 and 5. One block too many: vLLM loses 4, SGLang 34, and RTP-LLM from a lone chain everything."""
    asked = [[1, 2, 3, 4], [1, 2, 5], [9], [1, 2, 3, 4]]
    assert hits_of("vllm_lru", asked, 5)[-1] == [0, 1, 2]
    assert hits_of("sglang_leaf_lru", asked, 5)[-1] == [0, 1]
    lone = [[1, 2, 3, 4], [1, 2], [9, 8], [1, 2, 3, 4]]
    assert hits_of("sglang_leaf_lru", lone, 5)[-1] == [0, 1]
    assert hits_of("rtp_llm", lone, 5)[-1] == []


def test_rtp_resident_blocks_stay() -> None:
    asked = [[1, 2], [3], [4], [5], [6], [1, 2]]
    assert hits_of("rtp_llm", asked, 4)[-1] == []
    assert hits_of("rtp_llm", asked, 4, resident_requests=1)[-1] == [0, 1]
    assert hits_of("rtp_llm", asked, 4, "plain", resident_requests=1)[-1] == [0, 1]


def test_mooncake_passes_over_leases_and_soft_pins() -> None:
    """Requests are a second apart. 1 is read at second 1 and leased to 11: 2, 3, 4 and 5 leave before it, though used later."""
    asked = [[1], [1], [2], [3], [4], [5], [1]]
    assert hits_of("mooncake_lease", asked, 2)[-1] == [0]
    assert hits_of("mooncake_lease", asked, 2, lease_s=1.0)[-1] == []
    deep = [[1, 2], [3, 4], [5, 6], [1, 2]]
    assert hits_of("mooncake_lease", deep, 4, soft_pin_blocks=1)[-1] == [0]
    assert hits_of("mooncake_lease", deep, 4)[-1] == []


def test_mooncake_evicts_a_twentieth_of_the_store_at_once() -> None:
    """At 36 blocks below the watermark (a store of 40), the 37th block drives out 2, not 1."""
    asked = [[i] for i in range(37)]
    assert hits_of("mooncake_lease", [*asked, [1]], 36)[-1] == []
    assert hits_of("mooncake_lease", [*asked, [2]], 36)[-1] == [0]


def test_lmcache_keeps_what_is_dear_to_recompute() -> None:
    """The head of a prompt of six blocks is worth 96 tokens, a lone block 16: idle for a few seconds, the lone one goes first."""
    asked = [[1, 2, 3, 4, 5, 6], [7], [8], [9], [1, 2, 3, 4, 5]]
    assert hits_of("lmcache_cost", asked, 7)[-1] == [0, 1, 2, 3, 4]
    assert hits_of("lru", asked, 7)[-1] == [0, 1, 2, 3]
