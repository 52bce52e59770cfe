"""Engine models against the captured streams of vLLM 0.31.0 and SGLang 0.5.21, and against what any consumer may rely on.

What the captures held (numbers only; the streams are not in this repository): docs/engines.md.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from analytics.fleet.engines import (
    Batch,
    Engine,
    Phase,
    RtpLlmEngine,
    SglangEngine,
    Tally,
    VllmEngine,
    captured_workload,
    first_alone,
    fold,
    play,
    tally,
)

SHARED, ALL_MISS = [0] + [512] * 7, [0] * 8
TRUTH = {"shared": SHARED, "repeat": [624] * 8, "evict": [0] * 120, "recheck": SHARED, "after_reset": [0, 512]}


def stores_by_size(batches: Sequence[Batch]) -> Counter[int]:
    return Counter(len(event.blocks) for batch in batches for event in batch if event.kind == "stored")


def removal_sizes(batch: Batch) -> list[int]:
    return [len(event.blocks) for event in batch if event.kind == "removed"]


# -- the captures -------------------------------------------------------------------------------------------------------------------------


def test_vllm_answers_and_publishes_what_was_captured() -> None:
    played = play(VllmEngine(gpu_blocks=585), captured_workload())
    assert played.cached_tokens == {**TRUTH, "burst": SHARED}
    assert tally(played.batches) == Tally(57, 154, 7392, 1, stored_blocks=8024, removed_blocks=7392)
    assert stores_by_size(played.batches) == {40: 4, 8: 22, 1: 8, 64: 120}
    parents = Counter(event.parent >= 0 for batch in played.batches for event in batch if event.kind == "stored")
    assert parents == {False: 124, True: 30}
    assert max(len(batch) for batch in played.batches) == 260
    assert {size for batch in played.batches for size in removal_sizes(batch)} == {1}


def test_sglang_answers_what_was_captured_and_publishes_it_but_for_one_wave() -> None:
    played = play(SglangEngine(9216 // 16), captured_workload(), first_alone)
    assert played.cached_tokens == {**TRUTH, "burst": ALL_MISS}
    assert tally(played.batches)._replace(removed_blocks=0) == Tally(82, 146, 30, 2, stored_blocks=8016, removed_blocks=0)
    assert stores_by_size(played.batches) == {40: 4, 8: 22, 64: 120}
    assert played.batches[0][0].kind == "cleared"
    assert max(len(batch) for batch in played.batches) == 7
    # The batches with removals whose bytes could be read: one removal of so many pages, then one store.
    readable = [played.batches[seq] for seq in (13, 15, 17, 19, 21, 23, 25)]
    assert [removal_sizes(batch) for batch in readable] == [[136], [312], [256], [256], [256], [256], [256]]
    assert [[len(event.blocks) for event in batch if event.kind == "stored"] for batch in readable] == [[64]] * 7
    # What goes first is what the readable batch before last stored.
    assert readable[2][0].blocks[:64] == readable[0][1].blocks
    assert readable[4][0].blocks[:64] == readable[2][1].blocks


def test_sglangs_first_removal_takes_the_shared_prompts_leaves_first() -> None:
    """Each suffix's last page, split off by the repeat, then its other seven; after all eight their prefix; then the next phase's leaves.

    The captured bytes were compared for the first suffix and for the size; the rest follows from the rule.
    """
    phases = captured_workload()
    played = play(SglangEngine(9216 // 16), phases, first_alone)
    removed = played.batches[13][0].blocks
    expected: list[int] = []
    for prompt in phases[0].prompts:
        expected += [prompt[-1], *prompt[32:-1]]
    expected += phases[0].prompts[0][:32]
    for prompt in phases[2].prompts[:5]:
        expected += prompt[32:]
    assert list(removed) == expected


def test_one_wave_started_in_three_steps_gives_sglangs_captured_counts() -> None:
    def arrivals(phase: Phase, wave: int, size: int) -> Sequence[int]:
        return [1, 1, 2] if phase.name == "evict" and wave == 20 else first_alone(phase, wave, size)

    played = play(SglangEngine(9216 // 16), captured_workload(), arrivals)
    assert tally(played.batches)._replace(removed_blocks=0) == Tally(83, 146, 31, 2, stored_blocks=8016, removed_blocks=0)
    assert played.cached_tokens == {**TRUTH, "burst": ALL_MISS}


def test_arrivals_change_batches_but_no_answers() -> None:
    played = play(VllmEngine(585), captured_workload(), first_alone)
    assert played.cached_tokens == {**TRUTH, "burst": SHARED}
    assert tally(played.batches)[1:] == (154, 7392, 1, 8024, 7392)
    played = play(SglangEngine(576), captured_workload())
    assert played.cached_tokens == {**TRUTH, "burst": ALL_MISS}
    assert tally(played.batches).batches == 51


# -- rules one at a time ------------------------------------------------------------------------------------------------------------------


def run(engine: Engine, *prompts: tuple[Sequence[int], int]) -> list[int]:
    requests = [engine.submit(blocks, tokens) for blocks, tokens in prompts]
    while engine.step():
        pass
    assert all(request.done for request in requests)
    return [request.cached_tokens for request in requests]


def engines(capacity: int, block_size: int = 4, **more: int) -> list[Engine]:
    return [
        VllmEngine(capacity + 1, block_size, **more),
        SglangEngine(capacity, block_size, **more),
        RtpLlmEngine(capacity, block_size, **more),
    ]


@pytest.mark.parametrize("engine", engines(10))
def test_the_last_token_is_always_computed(engine: Engine) -> None:
    assert run(engine, ((1, 2), 8)) == [0]
    assert run(engine, ((1, 2), 8)) == [4]
    assert run(engine, ((1, 2), 9)) == [8]
    assert run(engine, ((), 3)) == [0]


@pytest.mark.parametrize("engine", engines(10))
def test_a_partial_block_is_never_stored(engine: Engine) -> None:
    run(engine, ((), 3), ((1,), 7))
    assert engine.resident() == {1: 1}


def test_vllm_keeps_duplicates_and_removes_each_copy() -> None:
    engine = VllmEngine(4, block_size=4)
    run(engine, ((1,), 4))
    run(engine, ((1,), 4))
    assert engine.resident() == {1: 2}
    run(engine, ((2, 3, 4), 12))
    events = [event for batch in engine.take() for event in batch]
    assert [event.blocks for event in events if event.kind == "removed"] == [(1,), (1,)]


def test_vllm_shares_within_one_step_and_chunks_by_its_budget() -> None:
    engine = VllmEngine(20, block_size=4, max_step_tokens=6)
    requests = [engine.submit((1, 2, 3), 13), engine.submit((1, 2, 5), 13)]
    done = []
    while engine.step():
        done.append([request.done for request in requests])
    assert [request.cached_tokens for request in requests] == [0, 8]
    assert done == [[False, False], [False, False], [True, True]]
    assert [event.blocks for batch in engine.take() for event in batch] == [(1,), (2, 3), (5,)]


def test_sglang_does_not_evict_what_a_prompt_under_way_found() -> None:
    engine = SglangEngine(6, block_size=4)
    run(engine, ((1, 2), 9))
    sharer = engine.submit((1, 2, 3), 13)
    engine.step()
    other = engine.submit((7, 8, 9), 12)
    engine.step()  # wants 4 pages of 6 while the sharer holds 4: waits
    assert sharer.cached_tokens == 8 and sharer.done and other.cached_tokens == -1
    while engine.step():
        pass
    assert other.done and engine.resident() == {1: 1, 2: 1, 7: 1, 8: 1, 9: 1}


def test_sglang_frees_the_second_copy_of_what_sharers_computed_at_once() -> None:
    engine = SglangEngine(8, block_size=4)
    assert run(engine, ((1, 2), 9), ((1, 3), 9)) == [0, 0]
    assert [event.blocks for batch in engine.take() for event in batch if event.kind == "stored"] == [(1, 2), (3,)]
    assert engine.resident() == {1: 1, 2: 1, 3: 1}


def test_rtp_llm_shares_from_step_to_step_and_evicts_a_chain_up_to_its_fork() -> None:
    engine = RtpLlmEngine(8, block_size=4)
    first = engine.submit((1, 2), 9)
    engine.step()
    assert first.done and run(engine, ((1, 2, 3), 12)) == [8]
    run(engine, ((1, 2, 3, 4), 16), ((1, 5), 8))
    engine.take()
    run(engine, ((6, 7, 8, 9), 16))
    events = [event for batch in engine.take() for event in batch]
    assert events[0].blocks == (4, 3, 2)  # one block was short; 1 is the fork that 5 still hangs on
    assert set(engine.resident()) == {1, 5, 6, 7, 8, 9}


def test_rtp_llm_keeps_resident_prompts_until_a_clear() -> None:
    engine = RtpLlmEngine(4, block_size=4)
    run(engine, ((1, 2, 3), 12))
    engine.make_resident((1, 2))
    with pytest.raises(ValueError, match="1 of 2 blocks are not cached"):
        engine.make_resident((1, 9))
    run(engine, ((4, 5), 8), ((6, 7), 8))
    assert set(engine.resident()) == {1, 2, 6, 7}
    assert engine.clear() and not engine.resident()


@pytest.mark.parametrize("engine", engines(10))
def test_clearing_waits_for_requests_under_way(engine: Engine) -> None:
    run(engine, ((1, 2), 8))
    if isinstance(engine, VllmEngine):
        engine.max_step_tokens = 4
    engine.submit((3, 4), 8)
    if not isinstance(engine, RtpLlmEngine):  # which leaves nothing under way between steps
        engine.step()
    assert not engine.clear()
    while engine.step():
        pass
    assert engine.clear() and not engine.resident()
    assert run(engine, ((1, 2), 8)) == [0]
    assert fold(engine.take()) == {1: 1, 2: 1}


@pytest.mark.parametrize("kind", [VllmEngine, SglangEngine, RtpLlmEngine])
def test_impossible_sizes_and_prompts_are_refused(kind: type[Engine]) -> None:
    for sizes in ((0, 16), (1, 0), (-3, 16)):
        with pytest.raises(ValueError, match="at least one block"):
            kind(*sizes)  # type: ignore[call-arg, arg-type]
    engine = kind(5, 4)  # type: ignore[call-arg, arg-type]
    for blocks, tokens, message in [
        ((), 0, "full blocks"),
        ((1,), 3, "full blocks"),
        ((-1,), 4, "full blocks"),
        (range(6), 24, "does not fit"),
    ]:
        with pytest.raises(ValueError, match=message):
            engine.submit(blocks, tokens)


def test_a_stream_that_removes_what_is_not_held_is_refused() -> None:
    engine = SglangEngine(3, block_size=4)
    run(engine, ((1, 2), 8))
    run(engine, ((3, 4), 8))
    with pytest.raises(ValueError, match="removed but not held"):
        fold(engine.take()[1:])


# -- any workload -------------------------------------------------------------------------------------------------------------------------

# A chain, tokens beyond it, and steps of the engine before the next prompt.
prompt = st.tuples(st.lists(st.integers(0, 1), max_size=5), st.integers(0, 3), st.integers(0, 2))


@pytest.mark.parametrize("which", [0, 1, 2])
@settings(max_examples=150, deadline=None)
@given(st.integers(7, 14), st.sampled_from([5, 16, 64]), st.lists(prompt, max_size=25), st.integers(0, 25))
def test_a_consumer_of_the_events_knows_what_is_cached(
    which: int, capacity: int, step_tokens: int, prompts: list[tuple[list[int], int, int]], clear_after: int
) -> None:
    """Folding the events gives the copies held; no prompt starves; trees hold nothing twice, and nothing without its parent."""
    engine = engines(capacity, max_step_tokens=step_tokens)[which]
    names: dict[tuple[int, ...], int] = {}
    requests = []
    for number, (chain, more, steps) in enumerate(prompts):
        blocks = [names.setdefault(tuple(chain[: i + 1]), len(names)) for i in range(len(chain))]
        tokens = 4 * len(chain) + more
        if tokens:
            requests.append(engine.submit(blocks, tokens))
        for _ in range(steps):
            engine.step()
        if number == clear_after:
            engine.clear()
    engine.submit((), 1)  # vLLM publishes a clear with the next step's events
    turns = 0
    while engine.step():
        turns += 1
        assert turns < 2000
        assert sum(engine.resident().values()) <= capacity
    assert fold(engine.take()) == engine.resident()
    assert all(r.done and 0 <= r.cached_tokens < r.prompt_tokens and r.cached_tokens % 4 == 0 for r in requests)
    if which > 0:
        parent = {block: names.get(chain[:-1], -1) for chain, block in names.items()}
        held = engine.resident()
        assert set(held.values()) <= {1}
        assert all(parent[block] < 0 or parent[block] in held for block in held)


@settings(max_examples=100, deadline=None)
@given(capacity=st.integers(7, 14), prompts=st.lists(st.tuples(st.lists(st.integers(0, 1), max_size=5), st.integers(0, 3)), max_size=30))
def test_one_after_the_other_engines_hit_what_stays_resident(capacity: int, prompts: list[tuple[list[int], int]]) -> None:
    """A prompt that has the engine to itself finds exactly its leading blocks in the cache as the events describe it."""
    for engine in engines(capacity):
        names: dict[tuple[int, ...], int] = {}
        for chain, more in prompts:
            blocks = [names.setdefault(tuple(chain[: i + 1]), len(names)) for i in range(len(chain))]
            tokens = 4 * len(chain) + more
            if not tokens:
                continue
            held, run_blocks = engine.resident(), 0
            while run_blocks < (tokens - 1) // 4 and blocks[run_blocks] in held:
                run_blocks += 1
            assert run(engine, (blocks, tokens)) == [4 * run_blocks]
