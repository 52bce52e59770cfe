from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from analytics.fleet.routers import ROUTERS, RouteRequest, RouterSpec, View


def view(up: list[bool], queued: list[int], hits: list[int]) -> View:
    fleet = View.idle(len(up), 16)
    fleet.up[:], fleet.queued_tokens[:], fleet.hit_blocks[:] = up, queued, hits
    return fleet


@pytest.mark.parametrize("name", ROUTERS)
@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_every_router_chooses_an_instance_that_is_up_and_repeats_itself(name: str, data: st.DataObject) -> None:
    n = data.draw(st.integers(1, 5))
    steps = []
    for k in range(data.draw(st.integers(1, 12))):
        up = data.draw(st.lists(st.booleans(), min_size=n, max_size=n).filter(any))
        queued = data.draw(st.lists(st.integers(0, 5000), min_size=n, max_size=n))
        hits = data.draw(st.lists(st.integers(0, 9), min_size=n, max_size=n))
        session, head = data.draw(st.integers(-1, 3)), data.draw(st.integers(-1, 3))
        steps.append((RouteRequest(k, 0, session, 200, head), view(up, queued, hits)))
    chosen = []
    for _ in range(2):
        router = RouterSpec(name).build(seed=7)
        chosen.append([router.choose(request, fleet) for request, fleet in steps])
        assert all(fleet.up[i] for i, (_, fleet) in zip(chosen[-1], steps, strict=True))
    assert chosen[0] == chosen[1]


def test_weighted_sum_weighs_hits_against_load() -> None:
    fleet = view([True, True, True], [1000, 0, 500], [9, 0, 9])
    request = RouteRequest(0, 0, -1, 160, -1)  # hit ratio estimates 0.9, 0, 0.9
    # w * (1 - hit) + (1 - w) * load: w=0.3: 0.03+0.7, 0.3, 0.03+0.35; w=0.9: 0.09+0.1, 0.9, 0.09+0.05
    assert RouterSpec("weighted_sum", {"w": 0.0}).build(0).choose(request, fleet) == 1
    assert RouterSpec("weighted_sum", {"w": 0.3}).build(0).choose(request, fleet) == 1
    assert RouterSpec("weighted_sum", {"w": 0.9}).build(0).choose(request, fleet) == 2
    fleet.up[2] = False
    assert RouterSpec("weighted_sum", {"w": 0.9}).build(0).choose(request, fleet) == 0
    with pytest.raises(ValueError, match="0..1"):
        RouterSpec("weighted_sum", {"w": 1.5}).build(0)


def test_sessions_stick_until_their_instance_goes() -> None:
    router = RouterSpec("session_affinity").build(0)
    idle = view([True, True], [500, 0], [0, 0])
    busy = view([True, True], [0, 9000], [0, 0])
    request = RouteRequest(0, 0, 4, 100, 1)
    assert [router.choose(request, idle), router.choose(request, busy)] == [1, 1]
    assert router.choose(request, view([True, False], [0, 0], [0, 0])) == 0
    assert router.choose(request, idle) == 0, "it stays where it was moved"
    unknown = RouteRequest(0, 0, -1, 100, 77)
    assert router.choose(unknown, idle) == router.choose(unknown, busy) == 1, "tenant and head stand for a session"


def test_equals_take_turns() -> None:
    router = RouterSpec("least_load").build(5)
    idle = view([True] * 4, [0] * 4, [0] * 4)
    chosen = [router.choose(RouteRequest(k, 0, -1, 1, -1), idle) for k in range(8)]
    assert np.bincount(chosen).tolist() == [2, 2, 2, 2]


def test_labels_and_names() -> None:
    assert RouterSpec("weighted_sum", {"w": 0.7}).label == "weighted_sum(w=0.7)"
    assert RouterSpec("random").label == "random"
    with pytest.raises(ValueError, match="unknown router"):
        RouterSpec("nobody")
