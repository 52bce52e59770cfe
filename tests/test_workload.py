"""The characterisation of a trace beside slow readable oracles, on hand-made cases with known answers, and on closed forms."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from analytics.estimators.exact import olken
from analytics.reuse.chains import ChainBuilder
from analytics.workload import LabelledChains, characterise, flatten
from analytics.workload.hits import capacity, ideal, link_tokens, one_touch, session_sharing, skew, tenant_sharing
from analytics.workload.labels import group_counts, group_hits, prefix_tokens, touches
from analytics.workload.measures import fewest_share, quantiles, top_share
from analytics.workload.places import any_position, positions, templates
from analytics.workload.times import arrivals, categories, category_codes, exponential_fit, lifespans, reuse_times
from analytics.workload.turns import turn_numbers, turns

COST = (2e-4, 2e-8)
# Kernels compile within the first example.
patient = settings(deadline=None)


def trace(
    chains: list[list[int]],
    *,
    at_s: list[float] | None = None,
    tenant: list[int] | None = None,
    session: list[int] | None = None,
    conversation: list[int] | None = None,
    category: list[str | None] | None = None,
    turn: list[int] | None = None,
    tail: list[int] | None = None,
    block_size: int = 4,
    **more: Any,
) -> LabelledChains:
    """Requests one second apart unless told; `tail` is the tokens that each prompt's last block is short of."""
    n = len(chains)
    builder = ChainBuilder(block_size)
    for k, chain in enumerate(chains):
        prompt = max(len(chain) * block_size - (tail[k] if tail else 0), 0)
        builder.append(round((at_s[k] if at_s else k) * 1e6), np.array(chain, np.uint64), prompt)
    kinds = sorted({c for c in category or [] if c is not None})

    def codes(values: list[int] | None, default: int) -> Any:
        return np.full(n, default, np.int32) if values is None else np.array(values, np.int32)

    tenants = codes(tenant, 0)
    return LabelledChains(
        chains=builder.build(),
        tenant=tenants,
        tenants=tuple(f"t{k}" for k in range(int(tenants.max(initial=0)) + 1)),
        session=codes(session, -1),
        conversation=codes(conversation if conversation is not None else session, -1),
        category=codes(None if category is None else [-1 if c is None else kinds.index(c) for c in category], -1),
        categories=tuple(kinds),
        turn=codes(turn, 0),
        **more,
    )


@st.composite
def labelled(draw: st.DrawFn) -> LabelledChains:
    """Chains of a small tree (a block names its whole prefix), rising times, labels some of which are unknown."""
    paths = draw(st.lists(st.lists(st.integers(0, 2), max_size=6), min_size=1, max_size=25))
    chains = [[hash(tuple(path[: k + 1])) & (2**64 - 1) for k in range(len(path))] for path in paths]
    n = len(chains)
    gaps = draw(st.lists(st.sampled_from([0.0, 0.25, 1.0, 30.0, 4000.0]), min_size=n, max_size=n))
    session = draw(st.lists(st.integers(-1, 4), min_size=n, max_size=n))
    return trace(
        chains,
        at_s=np.cumsum(gaps).tolist(),
        tenant=draw(st.lists(st.integers(0, 2), min_size=n, max_size=n)),
        session=session,
        conversation=[s // 2 if s >= 0 else -1 for s in session],
        category=draw(st.lists(st.sampled_from([None, "chat", "code"]), min_size=n, max_size=n)),
        turn=draw(st.lists(st.integers(0, 8), min_size=n, max_size=n)),
        tail=draw(st.lists(st.integers(0, 3), min_size=n, max_size=n)),
    )


def chain_of(t: LabelledChains, k: int) -> list[int]:
    return t.chains.hashes[t.chains.offsets[k] : t.chains.offsets[k + 1]].tolist()


def oracle_sources(t: LabelledChains) -> list[list[int]]:
    """The request that touched each reference's block last, tenant by tenant, -1 for none: a plain dictionary."""
    last: dict[tuple[int, int], int] = {}
    found = []
    for k in range(t.chains.requests):
        keys = [(int(t.tenant[k]), block) for block in chain_of(t, k)]
        found.append([last.get(key, -1) for key in keys])
        last.update(dict.fromkeys(keys, k))
    return found


def leading(flags: list[bool]) -> int:
    return next((k for k, flag in enumerate(flags) if not flag), len(flags))


# ---------------------------------------------------------------- kernels beside oracles


@patient
@given(labelled())
def test_links_name_the_last_toucher_of_every_reference(t: LabelledChains) -> None:
    found = [[-2] * int(length) for length in t.lengths]
    for request, source, position, length in zip(t.links.request, t.links.source, t.links.position, t.links.length, strict=True):
        found[request][position : position + length] = [int(source)] * int(length)
    expected = oracle_sources(t)
    assert found == expected
    assert t.hit_blocks.tolist() == [leading([source >= 0 for source in row]) for row in expected]


@patient
@given(labelled())
def test_group_hits_and_counts(t: LabelledChains) -> None:
    ids, distinct = t.private
    seen: dict[int, set[int]] = defaultdict(set)
    groups: dict[int, set[int]] = defaultdict(set)
    expected = []
    for k in range(t.chains.requests):
        own, group = ids[t.chains.offsets[k] : t.chains.offsets[k + 1]].tolist(), int(t.session[k])
        expected.append(leading([block in seen[group] for block in own]) if group >= 0 else 0)
        seen[group].update(own)
        if group >= 0:
            for block in own:
                groups[block].add(group)
    assert group_hits(ids, t.chains.offsets, distinct, t.session).tolist() == expected
    assert group_counts(ids, t.chains.offsets, distinct, t.session).tolist() == [len(groups[block]) for block in range(distinct)]


@patient
@given(labelled())
def test_touches_and_lifespans(t: LabelledChains) -> None:
    ids, distinct = t.private
    times: dict[int, list[int]] = defaultdict(list)
    for k in range(t.chains.requests):
        for block in set(ids[t.chains.offsets[k] : t.chains.offsets[k + 1]].tolist()):
            times[block].append(int(t.chains.ts_us[k]))
    touched = touches(ids, t.chains.offsets, distinct, t.chains.ts_us)
    assert touched.requests.tolist() == [len(times[block]) for block in range(distinct)]
    assert t.chains.ts_us[touched.first].tolist() == [times[block][0] for block in range(distinct)]
    assert touched.life_us.tolist() == [times[block][-1] - times[block][0] for block in range(distinct)]
    found = lifespans(touched)
    reused = sorted((ts[-1] - ts[0]) / 1e6 for ts in times.values() if len(ts) > 1)
    assert found["reused_p50_s"] == (reused[math.ceil(len(reused) / 2) - 1] if reused else None)


@patient
@given(labelled())
def test_tokens_of_prefixes_and_links(t: LabelledChains) -> None:
    def tokens(k: int, start: int, stop: int) -> int:
        prompt = int(t.chains.prompt_tokens[k])
        return min(stop * 4, prompt) - min(start * 4, prompt)

    hits = t.hit_blocks
    assert prefix_tokens(t.chains, hits).tolist() == [tokens(k, 0, int(hits[k])) for k in range(t.chains.requests)]
    rows = zip(t.links.request.tolist(), t.links.position.tolist(), t.links.length.tolist(), strict=True)
    assert link_tokens(t, t.links).tolist() == [tokens(k, start, start + length) for k, start, length in rows]


@patient
@given(labelled())
def test_hit_themes_beside_plain_loops(t: LabelledChains) -> None:
    sources, n = oracle_sources(t), t.chains.requests
    blocks = sum(len(row) for row in sources)
    hits = [leading([s >= 0 for s in row]) for row in sources]
    if not blocks:
        return
    found = ideal(t, COST)
    served = [min(4 * h, int(p)) for h, p in zip(hits, t.chains.prompt_tokens, strict=True)]
    assert found["hit_blocks_ratio"] == sum(hits) / blocks
    assert found["hit_tokens_ratio"] == sum(served) / int(t.chains.prompt_tokens.sum())

    def cost(x: float) -> float:
        return COST[0] * x + COST[1] * x * x / 2

    whole = sum(cost(int(p)) for p in t.chains.prompt_tokens)
    assert found["hit_prefill_cost_ratio"] == pytest.approx(sum(map(cost, served)) / whole)
    touched = Counter((int(t.tenant[k]), block) for k in range(n) for block in set(chain_of(t, k)))
    once = one_touch(touches(*_ids(t))[0], blocks)
    assert once["distinct_ratio"] == sum(c == 1 for c in touched.values()) / len(touched)
    assert once["references_ratio"] == sum(c == 1 for c in touched.values()) / blocks
    by_position = positions(t)
    assert sum(row["references"] for row in by_position) == blocks
    assert sum((row["hit_blocks_ratio"] or 0) * row["references"] for row in by_position) == pytest.approx(sum(hits))
    for row in by_position:
        lo = row["from_position"]
        hi = max(2 * lo, 1)
        inside = [(k, p) for k, chain in enumerate(sources) for p in range(lo, min(hi, len(chain)))]
        assert row["references"] == len(inside)
        assert row["hit_blocks_ratio"] == pytest.approx(sum(p < hits[k] for k, p in inside) / len(inside))


def _ids(t: LabelledChains) -> tuple[Any, Any, int, Any]:
    ids, distinct = t.private
    return ids, t.chains.offsets, distinct, t.chains.ts_us


@patient
@given(labelled())
def test_sharing_beside_plain_loops(t: LabelledChains) -> None:
    own: dict[tuple[str, int], set[tuple[int, int]]] = defaultdict(set)
    anyone: set[int] = set()
    served, shared = Counter[str](), 0
    for k in range(t.chains.requests):
        chain, tenant = chain_of(t, k), int(t.tenant[k])
        shared += leading([block in anyone for block in chain])
        keys = [(tenant, block) for block in chain]
        for kind, group in (("tenant", tenant), ("session", int(t.session[k])), ("conversation", int(t.conversation[k]))):
            if group >= 0:
                served[kind] += leading([key in own[kind, group] for key in keys])
                own[kind, group].update(keys)
        anyone.update(chain)
    tenants, sessions = tenant_sharing(t), session_sharing(t)
    assert tenants["cross_tenant_hits_ratio"] == ((shared - served["tenant"]) / shared if shared else None)
    assert tenants["shared_hit_blocks_ratio"] == (shared / t.chains.blocks if t.chains.blocks else None)
    total = served["tenant"]
    assert sessions["within_session_hits_ratio"] == (served["session"] / total if total else None)
    assert sessions["cross_conversation_hits_ratio"] == ((total - served["conversation"]) / total if total else None)


@patient
@given(labelled())
def test_reuse_times_and_categories_beside_plain_loops(t: LabelledChains) -> None:
    label, names = category_codes(t)
    ages: list[float] = []
    by_name: dict[str, list[float]] = defaultdict(list)
    touched = Counter[str]()
    for k, row in enumerate(oracle_sources(t)):
        kind = "?" if t.category[k] < 0 else t.categories[t.category[k]]
        turn = int(t.turn[k])
        name = f"{kind}/{'?' if turn == 0 else '5+' if turn >= 5 else turn}"
        assert names[label[k]] == name
        touched[name] += len(row)
        for source in row:
            if source >= 0:
                age = float(t.chains.ts_us[k] - t.chains.ts_us[source]) / 1e6
                ages.append(age)
                by_name[names[label[source]]].append(age)
    ages.sort()
    found = reuse_times(t)
    assert found["p80_s"] == (ages[math.ceil(0.8 * len(ages)) - 1] if ages else None)
    assert found["mean_s"] == (pytest.approx(sum(ages) / len(ages)) if ages else None)
    assert sum(row["reuses_ratio"] or 0 for row in found["histogram"]) == pytest.approx(1.0 if ages else 0.0)
    for row in categories(t):
        mine = by_name[row["label"]]
        assert row["blocks"] == touched[row["label"]]
        assert row["reuse_ratio"] == (len(mine) / row["blocks"] if row["blocks"] else None)
        assert row["exponential_mean_s"] == (pytest.approx(np.mean(mine)) if mine else None)


@patient
@given(labelled())
def test_templates_beside_a_trie(t: LabelledChains) -> None:
    named = bool((t.conversation >= 0).any())
    group = t.conversation.tolist() if named else list(range(t.chains.requests))
    who: dict[tuple[int, ...], set[int]] = defaultdict(set)
    requests = Counter[tuple[int, ...]]()
    for k in range(t.chains.requests):
        chain = chain_of(t, k)
        for end in range(1, len(chain) + 1):
            prefix = (int(t.tenant[k]), *chain[:end])
            requests[prefix] += 1
            if group[k] >= 0:
                who[prefix].add(group[k])
    least = max(math.ceil(0.01 * len({g for g in group if g >= 0})), 2)
    heavy = {prefix for prefix, groups in who.items() if len(groups) >= least}
    ends = {prefix for prefix in heavy if not any(other[:-1] == prefix for other in heavy)}
    found = templates(t)
    assert found["found"] == len(ends)
    expected = sorted((len(prefix) - 1, requests[prefix] / t.chains.requests) for prefix in ends)
    shown = sorted((head["length_blocks"], head["requests_ratio"]) for head in found["heads"])
    assert shown == expected if len(ends) <= 10 else len(shown) == 10


@patient
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 5)), max_size=30), st.sampled_from([0.01, 0.1, 0.5, 0.9, 1.0]))
def test_measures_beside_plain_lists(pairs: list[tuple[int, int]], share: float) -> None:
    values, weights = (np.array([pair[k] for pair in pairs], np.int64) for k in (0, 1))
    flat = sorted(value for value, weight in pairs for _ in range(weight))
    assert quantiles(values, [share], weights) == [float(flat[math.ceil(share * len(flat) - 1e-9) - 1]) if flat else None]
    largest = sorted(values.tolist(), reverse=True)
    total = sum(largest)
    top = math.ceil(share * len(largest) - 1e-9)
    assert top_share(values, share) == (pytest.approx(sum(largest[: max(top, 1)]) / total) if total else None)
    fewest = next((k for k in range(len(largest) + 1) if sum(largest[:k]) >= share * total - 1e-9), 0)
    assert fewest_share(values, share) == (fewest / len(largest) if total else None)


# ---------------------------------------------------------------- by hand and in closed form


def test_one_small_trace_by_hand() -> None:
    chains = [[1, 2], [1, 2, 3], [1, 9], [1, 2, 3, 4], [7]]
    found = characterise(trace(chains, at_s=[0, 1, 3, 11, 12], session=[0, 0, 1, 0, 2]), COST)
    assert found["ideal"]["hit_blocks_ratio"] == 6 / 12
    assert found["one_touch"] == {"distinct_ratio": 3 / 6, "references_ratio": 3 / 12, "top_block_references_ratio": 4 / 12}
    # Reuses: block 1 three, 2 two, 3 one. Getting: requests 1 (2), 2 (1), 3 (3); 90 % of 6 needs all three.
    # Giving: request 0 made blocks 1 and 2 (5 reuses), request 1 block 3.
    assert found["skew"]["reuses_of_top_1pct_blocks_ratio"] == 3 / 6
    assert (found["skew"]["requests_getting_90pct_ratio"], found["skew"]["requests_giving_90pct_ratio"]) == (3 / 5, 2 / 5)
    assert found["session_sharing"]["within_session_hits_ratio"] == 5 / 6
    assert found["turns"]["single_turn_requests_ratio"] == 2 / 5 and found["turns"]["single_turn_hits_ratio"] == 1 / 6
    assert found["turns"]["next_turn_after_first_ratio"] == 1 / 3 and found["turns"]["next_turn_after_later_ratio"] == 1 / 2
    # Ages in blocks: 1 s x2 (request 1), 2 s x1 (request 2), 8 s x1 (block 1) and 10 s x2 (blocks 2, 3).
    assert (found["reuse_time"]["p50_s"], found["reuse_time"]["p80_s"], found["reuse_time"]["mean_s"]) == (2.0, 10.0, 32 / 6)
    # Block 1 lives 11 s, block 2 11 s, block 3 10 s.
    assert (found["lifespan"]["reused_p50_s"], found["lifespan"]["all_p50_s"], found["lifespan"]["max_s"]) == (11.0, 0.0, 11.0)
    assert [(h["length_blocks"], h["requests_ratio"]) for h in found["templates"]["heads"]] == [(1, 4 / 5)]
    assert found["capacity"]["distinct_blocks"] == 6


def test_cyclic_scan_needs_all_of_it() -> None:
    blocks, laps = 20, 5
    t = trace([[100 + b] for _ in range(laps) for b in range(blocks)])
    found = characterise(t, COST)
    assert found["ideal"]["hit_blocks_ratio"] == 1 - 1 / laps
    assert all(found["capacity"][f"for_{part}pct_of_ideal_blocks"] == blocks for part in (90, 95, 99))
    assert found["capacity"]["hit_blocks_at_50pct_of_distinct_ratio"] == 0
    assert found["reuse_time"]["p50_s"] == found["reuse_time"]["p90_s"] == blocks
    assert found["lifespan"]["all_p99_s"] == (laps - 1) * blocks and found["one_touch"]["distinct_ratio"] == 0


@patient
@given(labelled())
def test_capacity_is_the_least_that_suffices(t: LabelledChains) -> None:
    curve, distinct = olken(t.private_chains), t.private[1]
    if not curve.blocks.size:
        return
    found = capacity(curve, distinct)
    for part in (0.9, 0.95, 0.99):
        need = found[f"for_{100 * part:.0f}pct_of_ideal_blocks"]
        below, at = curve.hit_ratio([need - 1, need]).tolist()
        assert below < part * curve.ideal_ratio() <= at + 1e-12


def test_exponential_fit_finds_its_own_kind() -> None:
    rng = np.random.default_rng(5)
    weights = np.ones(20_000, np.int64)
    mean, distance = exponential_fit(rng.exponential(40.0, weights.size), weights)
    # The mean's standard error is 40/sqrt(n) = 0.28; the fitted Kolmogorov-Smirnov distance is below 1.1/sqrt(n) at 1 %.
    assert mean == pytest.approx(40, abs=1.2) and distance is not None and distance < 1.1 / math.sqrt(weights.size)
    # A constant: the model has 1 - 1/e of its mass below it, the data none.
    assert exponential_fit(np.full(7, 3.0), np.ones(7)) == (pytest.approx(3.0), pytest.approx(1 - 1 / math.e))
    assert exponential_fit(np.empty(0), np.empty(0)) == (None, None)


def test_arrivals_closed_forms() -> None:
    rng = np.random.default_rng(2)
    poisson, _ = arrivals((np.cumsum(rng.exponential(0.1, 100_000)) * 1e6).astype(np.int64))
    # Windows of 1 s: 10,000 counts, so the index of dispersion has standard error sqrt(2/10,000) = 0.014.
    assert poisson["dispersion_1s"] == pytest.approx(1, abs=0.06) and poisson["dispersion_10s"] == pytest.approx(1, abs=0.15)
    assert poisson["gap_cv"] == pytest.approx(1, abs=0.015) and poisson["rate_per_s"] == pytest.approx(10, rel=0.015)
    even, _ = arrivals(np.arange(1000, dtype=np.int64) * 500_000)
    assert even["gap_cv"] == 0 and even["dispersion_10s"] == 0 and even["peak_to_mean_10s"] == 1
    # Ten together every 10 s: within windows of 1 s the count is 10 with probability 1/10, so variance/mean is 9.
    bursts, _ = arrivals(np.repeat(np.arange(101, dtype=np.int64) * 10_000_000, 10) + np.tile(np.arange(10), 101))
    assert bursts["dispersion_1s"] == pytest.approx(9) and bursts["peak_to_mean_1s"] == pytest.approx(10)
    assert sum(row["requests"] for row in bursts["series"]) == 1010


def test_arrivals_say_what_their_clock_cannot_tell() -> None:
    coarse, why = arrivals(np.repeat(np.arange(100, dtype=np.int64) * 3_000_000, 5))
    assert coarse["dispersion_1s"] is None and "steps of 3 s" in why["arrivals.dispersion_1s"] and why["arrivals.gap_cv"]
    assert coarse["dispersion_10s"] is not None
    short, why = arrivals(np.array([0, 1_500_000], np.int64))
    assert short["dispersion_10s"] is None and "fewer than 10 windows" in why["arrivals.dispersion_10s"]
    alone, why = arrivals(np.array([5], np.int64))
    assert alone["rate_per_s"] is None and why


def test_content_at_another_position_is_not_prefix_reuse() -> None:
    # Contents a b | b a: nothing of the second request is a prefix hit, all of it was seen.
    t = trace([[11, 12], [21, 22], [11, 13]], content=np.array([1, 2, 2, 1, 1, 3], np.uint64))
    found = any_position(t)
    assert (found["prefix_blocks_ratio"], found["any_position_blocks_ratio"]) == (1 / 6, 3 / 6)
    with pytest.raises(ValueError, match="does not name"):
        any_position(trace([[1]]))


def test_turn_numbers_are_given_or_counted() -> None:
    session, turn = np.array([0, 1, 0, -1, 1], np.int32), np.array([0, 7, 0, 0, 0], np.int32)
    assert turn_numbers(session, turn).tolist() == [1, 7, 2, 0, 2]
    # A session seen once whose turn is 3 began before the trace: it is not single-turn.
    found = turns(trace([[1], [2], [3]], session=[0, 1, 2], turn=[1, 3, 1]))
    assert found["single_turn_requests_ratio"] == 2 / 3 and found["sessions"] == 3


def test_what_cannot_be_told_is_none_with_a_reason() -> None:
    bare = characterise(trace([[1], [1]]), COST)
    for name in ("tenant_sharing", "session_sharing", "turns", "categories", "any_position"):
        assert bare[name] is None and bare["unknown"][name]
    load = characterise(trace([[], []], has_blocks=False, session=[0, 0]), COST)
    assert load["ideal"] is None and "no block hashes" in load["unknown"]["capacity"]
    assert load["turns"]["turns_max"] == 2 and load["turns"]["multi_turn_hits_ratio"] is None and "turns" not in load["unknown"]
    local = characterise(trace([[1], [1]], session=[0, 0], local_ids=True, has_clock=False), COST)
    assert local["arrivals"] is None and local["templates"] is None
    assert local["session_sharing"]["within_session_hits_ratio"] == 1 and local["session_sharing"]["cross_conversation_hits_ratio"] is None
    with pytest.raises(ValueError, match="without requests"):
        characterise(trace([]), COST)


@patient
@given(labelled())
def test_every_none_has_a_reason_and_no_figure_is_off_its_scale(t: LabelledChains) -> None:
    found = characterise(t, COST)
    for row in flatten(found):
        if row.value is None:
            assert row.metric in found["unknown"] or row.metric.partition(".")[0] in found["unknown"], row
        elif row.unit == "ratio":
            assert 0 <= row.value <= 1, row
        else:
            assert row.value >= 0 and math.isfinite(row.value), row


def test_chains_that_loop_or_have_one_block_have_defined_answers() -> None:
    # A block repeated within one prompt is no reuse: the prompt is looked up before it touches anything.
    loop = trace([[1, 2, 1, 2], [1, 2, 1, 2], [2]])
    assert loop.hit_blocks.tolist() == [0, 4, 1]
    assert touches(*_ids(loop)).requests.tolist() == [2, 3]
    assert characterise(loop, COST)["ideal"]["hit_blocks_ratio"] == 5 / 9
    single = characterise(trace([[5]] * 4, block_size=1), COST)
    assert single["ideal"]["hit_blocks_ratio"] == 3 / 4 and single["capacity"]["for_99pct_of_ideal_blocks"] == 1
    assert skew(trace([[5]] * 4), touches(*_ids(trace([[5]] * 4))))["reuses_of_top_1pct_blocks_ratio"] == 1


def test_a_tenant_alone_is_its_requests_and_contents() -> None:
    t = trace([[1, 2], [3], [1, 4, 5], []], tenant=[0, 1, 0, 0], session=[0, 1, 2, 3], content=np.arange(6, dtype=np.uint64))
    own = t.of_tenant(0)
    assert own.tenants == ("t0",) and own.lengths.tolist() == [2, 3, 0] and own.session.tolist() == [0, 2, 3]
    assert own.content is not None and own.content.tolist() == [0, 1, 3, 4, 5]
    assert own.hit_blocks.tolist() == [0, 1, 0]
