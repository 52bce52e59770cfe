from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from analytics.fleet.generator import TenantSpec, change_prompt_head, generate, scan
from analytics.fleet.workload import Workload, concat

SPECS = (
    TenantSpec("big", 0.7, heads=2, head_blocks=4, turns=4, think_s=20),
    TenantSpec("small", 0.3, heads=1, head_blocks=8, turns=2, think_s=10),
)


@pytest.fixture(scope="module")
def load() -> Workload:
    return generate(SPECS, minutes=30, requests_per_s=5, block_size=16, seed=3)


def equal(a: Workload, b: Workload) -> bool:
    names = ("arrived_at_us", "tenant", "prompt_tokens", "output_tokens", "offsets", "hashes", "session", "turn")
    return all(np.array_equal(getattr(a, name), getattr(b, name)) for name in names)


def test_generate_is_a_function_of_its_seed(load: Workload) -> None:
    assert equal(load, generate(SPECS, minutes=30, requests_per_s=5, block_size=16, seed=3))
    assert not equal(load, generate(SPECS, minutes=30, requests_per_s=5, block_size=16, seed=4))
    assert load.origin == "synthetic"


@pytest.mark.parametrize("arrivals", ["poisson", "paced"])
def test_generated_load_has_the_asked_rate_and_shares_from_the_first_minute(arrivals: str) -> None:
    load = generate(SPECS, minutes=60, requests_per_s=5, block_size=16, seed=1, arrivals=arrivals)  # type: ignore[arg-type]
    minute = load.arrived_at_us // 60_000_000
    requests = np.bincount(minute, minlength=60)
    # Requests of a session arrive in bunches, so counts spread more than Poisson's sqrt(300) = 17.
    assert abs(requests.mean() - 300) < 20
    assert abs(requests[:5].mean() - requests[5:].mean()) < 45
    assert abs(np.mean(load.tenant == 0) - 0.7) < 0.03
    tokens = np.bincount(minute, load.prompt_tokens, minlength=60)
    assert abs(tokens[:15].mean() / tokens[15:].mean() - 1) < 0.15


def test_prompts_of_a_session_grow_and_share_their_beginning(load: Workload) -> None:
    seen = 0
    for session in range(200):
        turns = np.flatnonzero(load.session == session)
        assert len(np.unique(load.tenant[turns])) == 1
        assert np.all(np.diff(load.turn[turns]) > 0)
        for before, after in zip(turns[:-1], turns[1:], strict=True):
            assert load.prompt_tokens[after] > load.prompt_tokens[before] + load.output_tokens[before] * (
                load.turn[after] == load.turn[before] + 1
            )
            shorter = load.chain(before)
            assert np.array_equal(load.chain(after)[: len(shorter)], shorter)
            seen += 1
    assert seen > 100


def test_sessions_share_exactly_their_prompt_head(load: Workload) -> None:
    of_small = np.flatnonzero((load.tenant == 1) & (load.turn == 1))[:2]
    first, second = load.chain(of_small[0]), load.chain(of_small[1])
    assert np.array_equal(first[:8], second[:8])
    assert first[8] != second[8]
    heads = {int(load.chain(k)[0]) for k in np.flatnonzero(load.tenant == 0)}
    assert len(heads) == 2
    assert len(np.diff(load.offsets)) == len(load) and np.array_equal(np.diff(load.offsets), load.prompt_tokens // 16)


def test_dense_ids_are_the_distinct_tenant_hash_pairs(load: Workload) -> None:
    blocks = load.blocks
    owner = np.repeat(load.tenant, np.diff(load.offsets))
    pairs = {(int(t), int(h)) for t, h in zip(owner, load.hashes, strict=True)}
    assert len(blocks.hashes) == len(pairs) == blocks.ids.max() + 1
    assert np.array_equal(blocks.hashes[blocks.ids], load.hashes)
    assert np.array_equal(blocks.tenants[blocks.ids], owner)
    position = np.arange(len(load.hashes)) - np.repeat(load.offsets[:-1], np.diff(load.offsets))
    assert np.array_equal(blocks.positions[blocks.ids], position)
    _, first = np.unique(blocks.ids, return_index=True)
    assert np.all(np.diff(first) > 0), "numbered by first appearance"


def test_one_hash_of_two_tenants_is_two_blocks() -> None:
    chain = np.array([5, 2**63 + 1], np.uint64)
    two = Workload(
        arrived_at_us=np.array([0, 1]),
        tenant=np.array([0, 1], np.int32),
        tenants=("a", "b"),
        prompt_tokens=np.array([8, 8]),
        output_tokens=np.array([1, 1]),
        block_size=4,
        offsets=np.array([0, 2, 4]),
        hashes=np.concatenate([chain, chain]),
        session=np.array([-1, -1], np.int32),
    )
    assert two.blocks.ids.tolist() == [0, 1, 2, 3]
    assert int(two.blocks.hashes[3]) == 2**63 + 1


@pytest.mark.parametrize("mutate", [change_prompt_head, scan])
def test_faulty_loads_keep_times_and_lengths_and_break_all_reuse(load: Workload, mutate) -> None:  # type: ignore[no-untyped-def]
    broken = mutate(load, "big", 900.0)
    for name in ("arrived_at_us", "tenant", "prompt_tokens", "output_tokens", "offsets", "session", "turn"):
        assert getattr(broken, name) is getattr(load, name)
    hit = (load.tenant == 0) & (load.arrived_at_us >= 900_000_000)
    changed = np.repeat(hit, np.diff(load.offsets))
    assert np.array_equal(broken.hashes[~changed], load.hashes[~changed])
    after = broken.hashes[changed]
    assert len(np.unique(after)) == len(after) and not np.isin(after, load.hashes).any()


def test_slice_scale_and_concat_keep_the_requests(load: Workload) -> None:
    parts = [load.slice_time(0, 600), load.slice_time(600, 1200), load.slice_time(1200)]
    assert sum(map(len, parts)) == len(load)
    joined = concat(parts)
    assert equal(replace(joined, session=load.session), load)
    assert [joined.sessions[k] for k in joined.session] == [load.sessions[k] for k in load.session]
    assert joined.request_id(len(load) - 1) == load.request_id(len(load) - 1)
    assert parts[1].request_id(0) == f"r{len(parts[0])}"
    middle = load.slice_time(600, 1200, rebase=True)
    assert 0 <= middle.arrived_at_us[0] < 10_000_000
    faster = load.scale_rate(2.0)
    assert abs(faster.span_s * 2 - load.span_s) < 1e-5


def test_concat_merges_tenants_by_name(load: Workload) -> None:
    other = generate((TenantSpec("new", 0.5), TenantSpec("small", 0.5)), minutes=5, requests_per_s=2, block_size=16, seed=9)
    both = concat([load, other])
    assert both.tenants == ("big", "small", "new")
    assert len(both) == len(load) + len(other) and np.all(np.diff(both.arrived_at_us) >= 0)
    assert np.sum(both.tenant == 1) == np.sum(load.tenant == 1) + np.sum(other.tenant == 1)
    with pytest.raises(ValueError, match="one block size"):
        concat([load, generate(SPECS, minutes=1, requests_per_s=1, block_size=64)])


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("arrived_at_us", np.array([5, 4]), "backwards"),
        ("prompt_tokens", np.array([3, 8]), "full ones"),
        ("offsets", np.array([0, 1, 2]), "end at len"),
        ("tenant", np.array([0], np.int32), "length"),
    ],
)
def test_columns_that_disagree_are_refused(field: str, value: np.ndarray, message: str) -> None:
    columns = {
        "arrived_at_us": np.array([0, 1]),
        "tenant": np.zeros(2, np.int32),
        "tenants": ("a",),
        "prompt_tokens": np.array([8, 8]),
        "output_tokens": np.array([1, 1]),
        "block_size": 4,
        "offsets": np.array([0, 1, 3]),
        "hashes": np.arange(3, dtype=np.uint64),
        "session": np.full(2, -1, np.int32),
    }
    Workload(**columns)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=message):
        Workload(**{**columns, field: value})  # type: ignore[arg-type]
