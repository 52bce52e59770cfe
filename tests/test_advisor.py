"""Advice on fleets whose right answer is known."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from analytics.advisor import Advice, ScalePolicy, Service, advise_route, advise_scale, prefill_cost, scale_options
from analytics.frame import FleetWindows, Frame, ReuseTimes
from tests.diagnosis_cases import CASES, frame


def scaled(base: Frame, *, load: float = 1.0, capacity: float = 1.0) -> Frame:
    """The frame with all prefill times scaled by `load` and all capacities by `capacity`."""
    fleet = replace(base.fleet, prefill_s=base.fleet.prefill_s * load, capacity_blocks=base.fleet.capacity_blocks * capacity)
    return replace(base, fleet=fleet)


@pytest.fixture(scope="module")
def steady() -> Frame:
    return frame()


def test_options_are_monotone_and_anchored_at_the_observed_hit_ratio(steady: Frame) -> None:
    options = scale_options(scaled(steady, capacity=0.1), changes=range(-3, 5))
    assert [o.instances for o in options] == list(range(1, 9))
    assert (np.diff([o.hit_ratio for o in options]) >= 0).all()
    assert (np.diff([o.prefill_load for o in options]) <= 1e-12).all()
    assert (np.diff([o.utilisation for o in options]) < 0).all()
    now = options[3]
    fleet = steady.fleet
    assert now.hit_ratio == pytest.approx(fleet.hit_tokens[-15:].sum() / fleet.prompt_tokens[-15:].sum())
    assert now.prefill_load == pytest.approx(fleet.prefill_s[-15:].sum() / 900.0)
    assert now.wait_s == pytest.approx(0.02, rel=1e-6)


def test_lost_hits_are_charged_at_their_depth(steady: Frame) -> None:
    low, now = scale_options(scaled(steady, capacity=0.1), changes=(-1, 0))
    rate = steady.fleet.prompt_tokens[-15:].sum() / 900.0
    assert low.prefill_load - now.prefill_load == pytest.approx(rate * (now.hit_ratio - low.hit_ratio) * (4e-5 + 1e-9 * 2000), rel=0.01)


def test_prefill_cost_is_fitted_where_requests_carry_times(steady: Frame) -> None:
    # Every miss of the case sits at the same depth, so only a + b * depth is determined.
    fit = prefill_cost(steady)
    assert fit is not None and fit[0] + 2000 * fit[1] == pytest.approx(4e-5 + 2000 * 1e-9)
    unknown = replace(steady, fleet=replace(steady.fleet, prefill_known=steady.fleet.prefill_known * 0))
    assert prefill_cost(unknown) is None


def test_roomy_and_idle_gives_scale_down_of_the_instance_worth_least(steady: Frame) -> None:
    advice = advise_scale(scaled(steady, load=0.5, capacity=50.0))
    assert advice is not None and (advice.kind, advice.target) == ("scale_down", "p3")
    assert advice.predicted["instances"] == 3 and advice.predicted["hit_ratio"] == pytest.approx(advice.predicted["hit_ratio_now"])


def test_overload_gives_scale_up_by_enough(steady: Frame) -> None:
    busy = scaled(steady, load=14.5, capacity=50.0)
    options = scale_options(busy)
    assert options[1].utilisation > 0.7
    advice = advise_scale(busy)
    assert advice is not None and advice.kind == "scale_up"
    enough = next(o for o in options if o.utilisation <= 0.7 and o.instances > 4)
    assert advice.target == f"fleet:+{enough.instances - 4}" and advice.predicted["utilisation"] <= 0.7
    assert advice.predicted["ttft_p99_s"] < advice.predicted["ttft_p99_s_now"]


def test_short_capacity_gives_scale_up_for_hits(steady: Frame) -> None:
    advice = advise_scale(scaled(steady, capacity=0.15))
    assert advice is not None and advice.kind == "scale_up"
    assert advice.predicted["hit_ratio"] - advice.predicted["hit_ratio_now"] >= 0.03
    assert advice.predicted["prefill_load"] < advice.predicted["prefill_load_now"]
    low, high = advice.interval["hit_ratio"]
    assert low < advice.predicted["hit_ratio"] < high


def test_hold_says_why_not_down(steady: Frame) -> None:
    tight = advise_scale(scaled(steady, capacity=0.35), policy=ScalePolicy(min_hit_gain=0.5))
    assert tight is not None and (tight.kind, tight.target) == ("scale_hold", "fleet:0")
    assert "would lose" in tight.evidence[0]
    slow = advise_scale(scaled(steady, load=11.0, capacity=50.0))
    assert slow is not None and slow.kind == "scale_hold" and "busy" in slow.evidence[0]


def test_routing_comes_before_scaling() -> None:
    astray = scaled(frame(**CASES["routing_migration"]), capacity=0.15)
    advice = advise_scale(astray)
    assert advice is not None and advice.kind == "scale_hold" and "routing" in advice.evidence[0]
    busy = advise_scale(scaled(astray, load=16.0))
    assert busy is not None and busy.kind == "scale_up"


def test_target_for_ttft_is_met(steady: Frame) -> None:
    busy = scaled(steady, load=9.0, capacity=50.0)
    now = scale_options(busy, changes=(0,))[0]
    advice = advise_scale(busy, policy=ScalePolicy(ttft_p99_target_s=0.95 * now.ttft_p99_s))
    assert advice is not None and advice.kind == "scale_up" and "above the target" in advice.evidence[0]


def test_service_spread_anchors_the_tail_at_what_was_observed(steady: Frame) -> None:
    calm = scale_options(steady, service=Service(100, 0.1, 0.0, 0.1, 0.2), changes=(-1, 0))
    wild = scale_options(steady, service=Service(100, 0.1, 0.3, 1.5, 2.0), changes=(-1, 0))
    assert calm[1].ttft_p99_s == pytest.approx(0.2) and wild[1].ttft_p99_s == pytest.approx(2.0)
    assert calm[0].ttft_p99_s > 0.2 and wild[0].ttft_p99_s > 2.0
    assert calm[1].ttft_mean_s == pytest.approx(wild[1].ttft_mean_s)


def test_fleets_that_say_nothing_give_no_advice(steady: Frame) -> None:
    silent = replace(steady, fleet=FleetWindows.build(steady.windows, (), {}))
    assert advise_scale(silent, np.ones(steady.windows, bool)) is None
    blind = advise_scale(replace(steady, reuse=ReuseTimes.empty()))
    assert blind is not None and blind.confidence <= 0.1


def test_a_request_log_without_capacity_gives_no_scale_advice(steady: Frame) -> None:
    log = replace(steady, fleet=replace(steady.fleet, capacity_blocks=steady.fleet.capacity_blocks * 0))
    assert advise_scale(log) is None


def test_unstable_prediction_is_null_in_json(steady: Frame) -> None:
    swamped = scaled(steady, load=60.0, capacity=50.0)
    advice = advise_scale(swamped)
    assert advice is not None and advice.kind == "scale_up" and advice.target == "fleet:+2"
    document = json.loads(json.dumps(advice.to_json(), allow_nan=False))
    assert document["predicted"]["wait_s_now"] is None and math.isinf(advice.predicted["wait_s_now"])


def row(hit: float, mean: float, p50: float, p99: float, failed: int = 0) -> SimpleNamespace:
    return SimpleNamespace(hit_ratio=hit, ttft_mean_s=mean, ttft_p50_s=p50, ttft_p99_s=p99, failed=failed)


def test_route_takes_the_fastest_and_keeps_what_is_as_good() -> None:
    rows = {"round_robin": row(0.3, 2.0, 1.5, 9.0), "session": row(0.6, 1.2, 0.8, 6.0), "weighted": row(0.62, 1.0, 0.7, 5.0)}
    advice = advise_route(rows, "round_robin", 1000.0)
    assert (advice.kind, advice.target) == ("route", "weighted")
    assert advice.predicted["hit_points"] == pytest.approx(32) and advice.predicted["ttft_mean_ratio"] == pytest.approx(0.5)
    assert advice.expires_at_s == 4600.0 and advice.interval["ttft_mean_ratio"] == (pytest.approx(7 / 15), pytest.approx(5 / 9))
    keep = advise_route(rows, "weighted", 1000.0)
    assert (keep.kind, keep.target, keep.predicted["hit_points"]) == ("route_keep", "weighted", 0.0)


def test_route_shuns_worse_tails_failures_and_the_unserved() -> None:
    now = row(0.5, 1.0, 0.8, 4.0)
    assert advise_route({"now": now, "other": row(0.6, 0.8, 0.5, 6.0)}, "now", 0.0).kind == "route_keep"
    assert advise_route({"now": now, "other": row(0.6, 0.8, 0.5, 4.0, failed=3)}, "now", 0.0).kind == "route_keep"
    assert advise_route({"now": now, "other": row(0.53, 1.02, 0.8, 4.0)}, "now", 0.0).kind == "route"
    assert advise_route({"now": now, "other": row(0.9, math.nan, math.nan, math.nan)}, "now", 0.0).kind == "route_keep"
    with pytest.raises(ValueError, match="current router 'gone'"):
        advise_route({"now": now}, "gone", 0.0)


def test_advice_row_is_stable() -> None:
    advice = Advice("scale_up", "fleet:+1", {"hit_ratio": 0.5}, {"hit_ratio": (0.4, 0.6)}, 0.9, 2000.0, ("because",))
    row_ = advice.row(5)
    assert row_["id"] == advice.row(5)["id"] != advice.row(6)["id"]
    assert row_["expires_at_us"] == 2_000_000_000 and json.loads(row_["predicted"]) == {"hit_ratio": 0.5}
