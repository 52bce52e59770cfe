"""Prefix-aware policies beside slow readable twins and hand-worked examples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from analytics.fleet.generator import category_mix
from analytics.policies import POLICIES
from analytics.policies.cursor import PLAIN, PREFIX, Trace, new_cursor, trace_of
from analytics.policies.prefix_aware import absent, continuation_rate, session_gaps
from analytics.policies.wa import Mode, replay_wa, wa_report
from analytics.policies.wa_fit import KS_LIMIT, fit_trace, ks_distance
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


class TailTwin(Twin):
    """T-LRU with 40 tokens to recompute and a next prompt of 8: what stands 32 tokens before the end of its session is needed."""

    def __init__(self, trace: Trace, capacity: int) -> None:
        super().__init__(trace, capacity)
        self.history: dict[int, int] = {}
        self.safe = set[int]()

    def touch(self, key: int, hit: bool) -> None:
        session = int(self.trace.session[self.request])
        self.history[session] = max(self.history.get(session, 0), int(self.trace.prompt_tokens[self.request]))
        self.safe.discard(key)
        if 16 * self.trace.depth[key] >= self.history[session] + 8 - 40:
            self.safe.add(key)

    def victims(self, free: list[int]) -> list[int]:
        return super().victims([key for key in free if key in self.safe] or free)


class LpcTwin(Twin):
    """LPC's values with the default predictor, in 32 groups."""

    def victims(self, free: list[int]) -> list[int]:
        chance, gap_s = continuation_rate(self.trace), session_gaps(self.trace)[self.request]
        groups: dict[int, list[int]] = {}
        for key in free:
            groups.setdefault(min(int(32 * chance[self.last[key]]), 31), []).append(key)
        heads = [min(groups[g], key=lambda key: (self.last[key], -self.trace.depth[key])) for g in sorted(groups)]
        return [min(heads, key=lambda key: np.log(chance[self.last[key]]) - (self.request - self.last[key]) / gap_s)]


class AwaitedTwin(Twin):
    """CachedAttention that is given the next 2 requests."""

    def due(self, key: int) -> int:
        session = self.trace.session[self.last[key]]
        return next(
            (r for r in range(self.request + 1, self.request + 3) if r < len(self.trace.session) and self.trace.session[r] == session), 0
        )

    def victims(self, free: list[int]) -> list[int]:
        apart = [key for key in free if not self.due(key)]
        if apart:
            return super().victims(apart)
        return [max(free, key=lambda key: (self.due(key), self.trace.depth[key]))]


class StepsTwin(Twin):
    """KVFlow where a request of session s comes back after s of its session's requests (session 0: never)."""

    def left(self, key: int) -> float:
        last, session = self.last[key], self.trace.session[self.last[key]]
        since = int((self.trace.session[last + 1 : self.request + 1] == session).sum())
        return np.inf if session == 0 or since > session else float(session - since)

    def victims(self, free: list[int]) -> list[int]:
        return [max(free, key=lambda key: (self.left(key), -self.last[key], self.trace.depth[key]))]


TWINS: dict[str, Callable[[Trace, int], Twin]] = {
    "vllm_lru": Twin,
    "sglang_leaf_lru": lambda trace, capacity: NodeTwin(trace, capacity, nodes=True),
    "rtp_llm": lambda trace, capacity: NodeTwin(trace, capacity, nodes=False),
    "mooncake_lease": MooncakeTwin,
    "lmcache_cost": CostTwin,
    "tail_optimized": TailTwin,
    "lpc": LpcTwin,
    "kvflow": StepsTwin,
    "cached_attention": AwaitedTwin,
}
PARAMETERS: dict[str, Callable[[Trace], dict[str, Any]]] = {
    "tail_optimized": lambda trace: {"recompute_tokens": 40, "next_tokens": 8},
    "cached_attention": lambda trace: {"window": 2},
    "kvflow": lambda trace: {"steps": np.where(trace.session == 0, np.inf, trace.session)},
}


@pytest.mark.parametrize("name", sorted(TWINS))
@settings(max_examples=150, deadline=None)
@given(chains=chains, capacity=capacities)
def test_the_prefix_form_equals_its_twin(name: str, chains: list[list[int]], capacity: int) -> None:
    trace, _ = trace_from(chains)
    room = min(capacity, trace.parent.size)  # policies never get more than all
    given_to_it = PARAMETERS[name](trace) if name in PARAMETERS else {}
    assert POLICIES[name].replay(trace, capacity, **given_to_it).tolist() == TWINS[name](trace, max(room, 1)).run()


@settings(max_examples=100, deadline=None)
@given(order=st.lists(st.integers(0, 4), min_size=1, max_size=40), capacity=capacities)
def test_cached_attention_equals_its_twin_on_growing_sessions(order: list[int], capacity: int) -> None:
    """Session s asks for [s, 0, 0, ...], one block more at each turn."""
    asked = [[s] + [0] * order[:i].count(s) for i, s in enumerate(order)]
    trace = trace_from(asked)[0]._replace(session=np.array(order, np.int32))
    room = min(capacity, trace.parent.size)
    assert POLICIES["cached_attention"].replay(trace, capacity, window=2).tolist() == AwaitedTwin(trace, room).run()


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


def test_tail_optimized_trims_what_can_be_recomputed_in_time() -> None:
    """With 32 tokens to recompute in time the last two blocks of every session may be lost: they go before the older heads."""
    asked = [[7, 7, 7, 7], [1, 2, 3, 4, 5, 6], [9], [10], [11], [12], [7, 7, 7, 7], [1, 2, 3, 4, 5, 6]]
    tuned: Any = {"recompute_tokens": 32, "next_tokens": 0}
    sessions = np.array([0, 1, 2, 3, 4, 5, 0, 1], np.int32)
    trace = trace_from(asked)[0]._replace(session=sessions)
    kept = POLICIES["tail_optimized"].replay(trace, 10, **tuned)[-10:]
    assert np.flatnonzero(kept).tolist() == [0, 1, 4, 5, 6, 7]
    assert hits_of("lru", asked, 10)[-2:] == [[], [0, 1]]


@pytest.mark.parametrize("recompute_tokens", [0, 1e9])
@settings(max_examples=40, deadline=None)
@given(chains=chains, capacity=capacities)
def test_tail_optimized_at_its_ends_is_lru(recompute_tokens: float, chains: list[list[int]], capacity: int) -> None:
    """Nothing is safe, or everything."""
    trace, _ = trace_from(chains)
    hits = POLICIES["tail_optimized"].replay(trace, capacity, recompute_tokens=recompute_tokens)
    assert np.array_equal(hits, POLICIES["lru"].replay(trace, capacity))


def test_lpc_takes_any_predictor() -> None:
    """The predictor knows that the session of [1 2] goes on and those of the others do not."""
    asked = [[1, 2], [3], [4], [5], [1, 2]]
    sure: Any = {"predictor": lambda trace: np.array([0.9, 0.1, 0.1, 0.1, 0.9])}
    assert hits_of("lpc", asked, 3, **sure)[-1] == [0, 1]
    assert hits_of("lru", asked, 3)[-1] == []
    with pytest.raises(ValueError, match="probability"):
        hits_of("lpc", asked, 3, predictor=lambda trace: np.array([2.0]))


def test_continuation_rate_knows_only_the_past() -> None:
    trace, _ = trace_from([[1]] * 4)
    trace = trace._replace(session=np.array([0, 1, 0, -1], np.int32), category=np.zeros(4, np.int32), turn=np.array([1, 1, 2, 1], np.int32))
    assert continuation_rate(trace).tolist() == [1 / 2, 1 / 3, 1 / 2, 1 / 2]


def test_kvflow_without_a_workflow_is_lru_and_says_so() -> None:
    asked = [[1, 2], [3], [4, 5], [1, 2], [3]]
    trace, _ = trace_from(asked)
    assert absent(trace, POLICIES["kvflow"].needs) == ("workflow",)
    assert np.array_equal(POLICIES["kvflow"].replay(trace, 3), POLICIES["lru"].replay(trace, 3))
    with pytest.raises(ValueError, match="one number"):
        POLICIES["kvflow"].replay(trace, 3, steps=np.zeros(2))  # type: ignore[arg-type]


def test_absent_columns_are_named() -> None:
    trace, _ = trace_from([[1]])
    bare = trace._replace(session=np.array([-1], np.int32), turn=np.zeros(1, np.int32))
    assert absent(trace, ("session", "turn", "category")) == ()
    assert absent(bare, ("session", "turn", "category")) == ("session", "turn")


@pytest.mark.parametrize("name", ["tail_optimized", "lpc", "cached_attention"])
@settings(max_examples=30, deadline=None)
@given(chains=chains, capacity=capacities)
def test_without_sessions_they_are_lru(name: str, chains: list[list[int]], capacity: int) -> None:
    trace, _ = trace_from(chains)
    trace = trace._replace(session=np.full(len(chains), -1, np.int32))
    assert np.array_equal(POLICIES[name].replay(trace, capacity), POLICIES["lru"].replay(trace, capacity))


# ---------------------------------------------------------------- WA


def exponential_trace(seed: int, requests: int = 3000, mean_s: float = 20.0, share: float = 0.6, flips: bool = False) -> Trace:
    """Sessions of one category that go on with probability `share` after exponential gaps, among others (category 1) that never do.

    With `flips` the two change places halfway: what was learned is then wrong.
    """
    rng = np.random.default_rng(seed)
    asked: list[tuple[float, int, int, int]] = []
    for session in range(requests):
        at_s, turn, kind = float(session), 1, int(rng.integers(0, 2))
        lives = kind == (flips and session > requests // 2)
        while True:
            asked.append((at_s, session, turn, kind))
            if not lives or rng.random() > share:
                break
            at_s, turn = at_s + rng.exponential(mean_s), turn + 1
    asked.sort()
    trace, _ = trace_from([[session, *[7] * turn] for _, session, turn, _ in asked])
    return trace._replace(
        ts_us=np.array([round(1e6 * row[0]) for row in asked], np.int64), session=np.array([row[1] for row in asked], np.int32),
        turn=np.array([row[2] for row in asked], np.int32), category=np.array([row[3] for row in asked], np.int32),
    )  # fmt: skip


def test_fits_find_the_share_and_the_mean_that_the_trace_was_made_with() -> None:
    fits = fit_trace(exponential_trace(1))
    first = int(fits.group[np.flatnonzero(exponential_trace(1).category == 0)[0]])
    assert fits.reused[-1, first] == pytest.approx(0.6, abs=0.08)
    assert 1 / fits.rate_s[-1, first] == pytest.approx(20.0, rel=0.2)
    assert fits.distance[-1, first] < KS_LIMIT


@pytest.mark.parametrize(("shape", "most", "least"), [("exponential", 0.08, 0.0), ("fixed", 1.0, 0.5)])
def test_ks_distance_tells_an_exponential_from_a_timer(shape: str, most: float, least: float) -> None:
    rng = np.random.default_rng(2)
    gap = (1e6 * (rng.exponential(10.0, 1000) if shape == "exponential" else np.full(1000, 10.0))).astype(np.int64)
    distance = ks_distance(np.zeros(1000, np.int64), gap, 1000, 10**9, 1.0, 0.1)
    assert least <= distance <= most


@pytest.mark.parametrize("form", [PREFIX, PLAIN])
@pytest.mark.parametrize(("flips", "allowed"), [(False, 0.004), (True, 0.004), (True, 0.02)])
def test_wa_is_never_further_behind_lru_than_allowed(form: int, flips: bool, allowed: float) -> None:
    """At every request, in both forms, also where the future is the opposite of what was learned."""
    trace = exponential_trace(3, 1500, flips=flips)
    for capacity in (20, 60, 200):
        cursor = new_cursor(trace, capacity, form)
        modes, lost_ratio = replay_wa(trace, cursor, capacity, allowed)
        lru = POLICIES["lru"].replay(trace, capacity, "prefix" if form == PREFIX else "plain")
        behind = np.cumsum(lru.astype(int) - cursor.hits.astype(int))[trace.offsets[1:] - 1]
        assert (behind <= allowed * trace.offsets[1:]).all()
        assert lost_ratio <= allowed
        assert (modes == Mode.WA).any() or capacity == 200


def test_wa_without_a_guard_can_lose_to_lru() -> None:
    """Else the test above would prove nothing."""
    trace = exponential_trace(3, 1500, flips=True)
    cursor = new_cursor(trace, 200, PREFIX)
    assert replay_wa(trace, cursor, 200, allowed=1.0)[1] > 0.004


def test_wa_keeps_what_comes_back() -> None:
    trace = exponential_trace(4)
    for capacity in (20, 40, 80):
        assert POLICIES["wa"].replay(trace, capacity).sum() > 1.05 * POLICIES["lru"].replay(trace, capacity).sum()
    report = wa_report(trace, 40, PREFIX)
    assert sum(report.shares.values()) == pytest.approx(1.0)
    assert report.fallback_ratio < 0.5


@settings(max_examples=40, deadline=None)
@given(chains=chains, capacity=capacities)
def test_wa_of_one_category_is_lru_and_says_so(chains: list[list[int]], capacity: int) -> None:
    trace, _ = trace_from(chains)
    trace = trace._replace(category=trace.category * 0 - 1, turn=trace.turn * 0)
    for form in ("plain", "prefix"):
        assert np.array_equal(POLICIES["wa"].replay(trace, capacity, form), POLICIES["lru"].replay(trace, capacity, form))
    assert wa_report(trace, capacity, PREFIX).fallback_ratio == 1.0


def test_wa_falls_back_where_times_are_not_exponential() -> None:
    """Every session comes back after a minute sharp: categories by turn, none of which fits."""
    trace = exponential_trace(5)
    again = np.bincount(trace.session)[trace.session] > 1
    timed = trace._replace(ts_us=np.where(again, trace.session + 60 * trace.turn, trace.session) * 10**6)
    order = np.argsort(timed.ts_us, kind="stable")
    asked = [[int(timed.session[r]), *[7] * int(timed.turn[r])] for r in order]
    columns = {name: getattr(timed, name)[order] for name in ("ts_us", "session", "turn")}
    trace = trace_from(asked)[0]._replace(**columns, category=np.zeros(order.size, np.int32))
    assert wa_report(trace, 60, PREFIX).shares["poor_fit"] > 0.5


def test_wa_beats_lru_on_category_rich_traffic_and_the_less_the_more_fits() -> None:
    """One held-out draw; docs/policies.md has the figures over seeds."""
    trace = trace_of(category_mix(101, minutes=30.0))
    gains = []
    for share in (0.02, 0.08, 0.32):
        capacity = int(share * trace.parent.size)
        gains.append(float(POLICIES["wa"].replay(trace, capacity).mean() - POLICIES["lru"].replay(trace, capacity).mean()))
    assert gains[0] > 0.015
    assert gains[0] > gains[1] > gains[2] >= -0.005
