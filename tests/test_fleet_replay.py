"""The compiled replay gives what the emulator gives, request by request; where it goes beyond it, answers worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from analytics.fleet.config import FleetConfig
from analytics.fleet.emulator import Fleet
from analytics.fleet.replay import replay
from analytics.fleet.routers import ROUTERS, RouterSpec
from analytics.fleet.workload import Workload

BS = 4
COLUMNS = ("instance", "looked_up_us", "hit_tokens", "queue_us", "prefill_us", "ttft_us")
Row = tuple[float, int, str, int, int]


def load(rows: list[Row]) -> Workload:
    """Requests (second, tenant, chain as a string of block names, prompt tokens past the chain, session or -1)."""
    rows = sorted(rows)
    names: dict[str, int] = {}
    hashes = [names.setdefault(chain[: b + 1], len(names) + 1) for _, _, chain, _, _ in rows for b in range(len(chain))]
    turns: dict[int, int] = {}
    turn = [turns.setdefault(s, 0) for _, _, _, _, s in rows]
    for k, (_, _, _, _, s) in enumerate(rows):
        turns[s] += 1
        turn[k] = turns[s] if s >= 0 else 0
    return Workload(
        arrived_at_us=np.array([round(at * 1e6) for at, *_ in rows], np.int64),
        tenant=np.array([tenant for _, tenant, *_ in rows], np.int32),
        tenants=("a", "b", "c"),
        prompt_tokens=np.array([len(chain) * BS + tail for _, _, chain, tail, _ in rows], np.int64),
        output_tokens=np.ones(len(rows), np.int64),
        block_size=BS,
        offsets=np.cumsum([0, *(len(chain) for _, _, chain, _, _ in rows)], dtype=np.int64),
        hashes=np.array(hashes, np.uint64),
        session=np.array([s for *_, s in rows], np.int32),
        sessions=tuple(f"s{k}" for k in range(4)),
        turn=np.array(turn, np.int32),
    )


rows = st.lists(
    st.tuples(
        st.floats(0, 8).map(lambda at: round(at, 1)), st.integers(0, 2), st.text("xy", max_size=6), st.integers(0, 2 * BS),
        st.integers(-1, 3),
    ),
    max_size=60,
)  # fmt: skip
config = st.builds(
    FleetConfig,
    instances=st.integers(1, 4),
    capacity_blocks=st.integers(2, 30),
    cost_a_s=st.sampled_from([0.0, 0.002, 0.05]),
    cost_b_s=st.sampled_from([0.0, 1e-4]),
    hold_s=st.sampled_from([0.0, 0.1, 0.4]),
    store_when=st.sampled_from(["schedule", "finish"]),
)


@pytest.mark.parametrize("router", ROUTERS)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(rows=rows, config=config, seed=st.integers(0, 9))
def test_replay_equals_the_emulator(router: str, rows: list[Row], config: FleetConfig, seed: int) -> None:
    workload = load(rows)
    fleet = Fleet(config, workload, RouterSpec(router), seed=seed, with_truth=False).run_all()
    fast = replay(workload, config, RouterSpec(router), seed=seed)
    for name in COLUMNS:
        assert getattr(fast, name).tolist() == getattr(fleet, name).tolist(), name
    assert fast.failed.tolist() == (fleet.outcome == 1).tolist()


def test_an_empty_load_gives_an_empty_result() -> None:
    result = replay(load([]), FleetConfig(), RouterSpec("kvtide"))
    assert len(result.instance) == 0 and np.isnan(result.hit_ratio())


ONE = FleetConfig(instances=1, capacity_blocks=50, cost_a_s=0.01, cost_b_s=0.0, hold_s=0.0)


def test_queue_disciplines() -> None:
    # 21 tokens run for 0.21 s; then 13 (0.13 s), 5 (0.05 s) and 9 (0.09 s) wait.
    three = load([(0.0, 0, "xxxxx", 1, -1), (0.01, 0, "yyy", 1, -1), (0.02, 0, "z", 1, -1), (0.03, 0, "ww", 1, -1)])
    assert replay(three, ONE, RouterSpec("random")).looked_up_us.tolist() == [0, 210_000, 340_000, 390_000]
    short = replay(three, ONE, RouterSpec("random"), discipline="shortest_prefill")
    assert short.looked_up_us.tolist() == [0, 350_000, 210_000, 260_000]
    urgent = replay(three, ONE, RouterSpec("random"), discipline="priority", priority=np.array([0.0, 2.0, 2.0, 1.0]))
    assert urgent.looked_up_us.tolist() == [0, 300_000, 430_000, 210_000]


def test_unlike_instances() -> None:
    two = replace(ONE, instances=2)
    work = load([(0.0, 0, "xx", 2, -1), (1.0, 0, "yy", 2, -1), (2.0, 0, "zzzz", 0, -1)])
    fast = replay(work, two, RouterSpec("mooncake"), speed=np.array([1.0, 4.0]))
    assert fast.instance.tolist() == [1, 1, 1] and fast.prefill_us.tolist() == [25_000, 25_000, 40_000]
    small = replay(work, two, RouterSpec("round_robin"), capacity_blocks=np.array([3, 2]))
    assert small.failed.tolist() == [False, True, True]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"discipline": "lifo"}, "unknown discipline"),
        ({"speed": np.array([1.0])}, "one positive value"),
        ({"capacity_blocks": np.array([5, 0])}, "one positive value"),
        ({"priority": np.zeros(7)}, "one value a request"),
    ],
)
def test_wrong_arguments_are_refused(wrong: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replay(load([(0.0, 0, "x", 1, -1)]), replace(ONE, instances=2), RouterSpec("random"), **wrong)  # type: ignore[arg-type]
