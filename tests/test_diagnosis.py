"""The verdict on frames whose cause is known, and the promises that every diagnosis keeps."""

from __future__ import annotations

import json

import numpy as np
import pytest

from analytics.causes import CAUSES
from analytics.diagnosis import CAUSE_VERDICT, VERDICTS, diagnose
from analytics.frame import Frame, Span
from tests.diagnosis_cases import CASES, ONSET, START_S, frame


@pytest.fixture(scope="module")
def frames() -> dict[str, Frame]:
    return {name: frame(**case) for name, case in CASES.items()}


@pytest.mark.parametrize("name", CASES)
def test_verdict_names_the_injected_cause(frames: dict[str, Frame], name: str) -> None:
    found = diagnose(frames[name])
    assert found.verdict == name, found.groups
    if name != "none":
        assert found.onset_s == START_S + 60 * ONSET
        assert found.hit_ratio_after < found.hit_ratio_before
        assert found.change_high < 0
        assert found.load.flat


@pytest.mark.parametrize(
    ("name", "target"),
    [("noisy_neighbour", "scan"), ("tenant_reuse_shift", "chat"), ("instance_change", "p2"), ("tenant_mix_shift", "scan"),
     ("capacity_pressure", "fleet")],
)  # fmt: skip
def test_verdict_names_who(frames: dict[str, Frame], name: str, target: str) -> None:
    found = diagnose(frames[name])
    if name == "tenant_mix_shift":
        assert found.tenants[0].contributions["mix"] == min(t.contributions["mix"] for t in found.tenants)
    assert found.target == target


@pytest.mark.parametrize("name", CASES)
def test_contributions_groups_and_tenants_each_sum_to_the_change(frames: dict[str, Frame], name: str) -> None:
    found = diagnose(frames[name], prefill_cost=(4e-5, 1e-9))
    assert sum(found.contributions.values()) == pytest.approx(found.change_points, abs=1e-10)
    assert sum(g.points for g in found.groups) == pytest.approx(found.change_points, abs=1e-10)
    assert sum(sum(t.contributions.values()) for t in found.tenants) == pytest.approx(found.change_points, abs=1e-10)
    assert set(found.contributions) == {"mix", *CAUSES[1:]} == set(found.prefill_contributions)
    assert all(g.low <= g.points + 1e-9 and g.points <= g.high + 1e-9 for g in found.groups if abs(g.points) > 0.5)


def test_interval_covers_the_true_loss(frames: dict[str, Frame]) -> None:
    group = diagnose(frames["routing_migration"]).groups[0]
    assert group.low <= -100 * 0.95 * 0.14 <= group.high
    assert group.high - group.low < 1.0


def test_capacity_cut_is_not_blamed_on_a_neighbour(frames: dict[str, Frame]) -> None:
    found = diagnose(frames["capacity_pressure"])
    assert "noisy_neighbour" not in {g.verdict for g in found.groups}
    assert any("-60.0 %" in line for line in found.evidence)


def test_noisy_neighbour_keeps_the_scanners_own_loss_apart(frames: dict[str, Frame]) -> None:
    groups = {g.verdict: g.points for g in diagnose(frames["noisy_neighbour"]).groups}
    assert groups["noisy_neighbour"] < -10 < groups["tenant_reuse_shift"] < 0


def test_a_lost_instance_explains_the_capacity_it_took_along(frames: dict[str, Frame]) -> None:
    groups = {g.verdict: g.points for g in diagnose(frames["instance_change"]).groups}
    assert groups["instance_change"] < -9.4


def test_given_spans_and_tenant(frames: dict[str, Frame]) -> None:
    baseline, current = Span(START_S + 300, START_S + 1200), Span(START_S + 1500, START_S + 2400)
    shift = diagnose(frames["tenant_reuse_shift"], baseline, current, tenant="chat")
    assert (shift.verdict, shift.target, shift.tenant) == ("tenant_reuse_shift", "chat", "chat")
    assert shift.change_points == pytest.approx(-20, abs=1)
    assert diagnose(frames["tenant_reuse_shift"], baseline, current, tenant="code").verdict == "none"
    assert diagnose(frames["none"], baseline, current).verdict == "none"


def test_a_rise_is_no_decline() -> None:
    better = {name: dict(parts) for name, parts in CASES["routing_migration"]["after"].items()}
    for parts in better.values():
        parts["hit"], parts["routing"] = parts["hit"] + 0.25, 0.0
    assert diagnose(frame(after=better)).verdict == "none"


def test_load_that_moves_is_reported(frames: dict[str, Frame]) -> None:
    found = diagnose(frame(**{**CASES["routing_migration"], "load_after": 1.5}))
    assert not found.load.flat and found.load.prompt_tokens == pytest.approx(0.5, abs=0.01)
    assert found.verdict == "routing_migration"


def test_empty_spans_and_unknown_tenants_are_refused(frames: dict[str, Frame]) -> None:
    with pytest.raises(ValueError, match="holds no traffic"):
        diagnose(frames["none"], current=Span(0.0, 60.0))
    with pytest.raises(KeyError):
        diagnose(frames["none"], tenant="nobody")


def test_json_and_row_carry_everything(frames: dict[str, Frame]) -> None:
    found = diagnose(frames["noisy_neighbour"])
    document = json.loads(json.dumps(found.to_json(), allow_nan=False))
    assert document["verdict"] == "noisy_neighbour" and document["queries"]
    row = found.row(1_700_000_000_000_000)
    assert row["id"] == found.row(1_700_000_000_000_000)["id"] != found.row(1)["id"]
    assert json.loads(row["evidence"])["groups"][0]["verdict"] == "noisy_neighbour"


def test_same_seed_same_diagnosis_and_every_cause_has_a_verdict(frames: dict[str, Frame]) -> None:
    assert diagnose(frames["noisy_neighbour"]) == diagnose(frames["noisy_neighbour"])
    capacity = {c for c in CAUSES if c.startswith("capacity")}
    assert set(CAUSE_VERDICT) | capacity | {"hit"} == {"mix", *CAUSES}
    assert set(CAUSE_VERDICT.values()) < set(VERDICTS)


def test_without_reuse_times_the_observed_causes_divide_capacity() -> None:
    from dataclasses import replace

    from analytics.frame import ReuseTimes

    for name in ("noisy_neighbour", "capacity_pressure"):
        assert diagnose(replace(frame(**CASES[name]), reuse=ReuseTimes.empty())).verdict == name


@pytest.mark.parametrize("seed", range(20))
def test_no_false_alarm_on_a_steady_fleet(seed: int) -> None:
    assert diagnose(frame(noise=0.03, seed=seed)).verdict == "none"


def test_short_dip_that_recovers_is_found() -> None:
    dipped, steady = frame(**CASES["instance_change"]), frame()
    tokens = dipped.tokens.copy()
    tokens[ONSET + 4 :] = steady.tokens[ONSET + 4 :]
    from dataclasses import replace

    found = diagnose(replace(dipped, tokens=tokens))
    assert found.verdict == "instance_change"
    assert np.isclose(found.current.to_s, START_S + 60 * (ONSET + 4))
