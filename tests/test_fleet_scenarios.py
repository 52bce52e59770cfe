from __future__ import annotations

import numpy as np
import pytest

from analytics.fleet.result import contributions, loss
from analytics.fleet.scenarios import SCENARIOS

SEEDS = (0, 1, 2)
FAULTY = [name for name in SCENARIOS if name != "none"]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", SCENARIOS)
def test_load_is_flat_and_the_truth_names_the_injected_cause(name: str, seed: int) -> None:
    scenario = SCENARIOS[name](seed)
    result = scenario.fleet().run_all()
    workload, onset_s = scenario.workload, scenario.onset_s
    seconds = workload.arrived_at_us / 1e6
    before, after = (seconds >= onset_s - 900) & (seconds < onset_s), seconds >= onset_s + 120
    span_s = seconds[-1] - onset_s - 120
    assert abs(after.sum() / span_s / (before.sum() / 900) - 1) < 0.05
    assert abs(workload.prompt_tokens[after].sum() / span_s / (workload.prompt_tokens[before].sum() / 900) - 1) < 0.06
    assert np.array_equal(result.tokens.sum(axis=1), workload.prompt_tokens) and not result.outcome.any()

    moved = contributions(result, onset_s)
    assert abs(sum(moved.values())) < 1e-12
    halves = [result.hit_ratio(onset_s - 900, onset_s - 450), result.hit_ratio(onset_s - 450, onset_s)]
    assert abs(halves[0] - halves[1]) < 0.035, "steady before the onset"
    if name == "none":
        assert abs(loss(moved)) < 0.01 and scenario.injected == "none"
        return
    assert scenario.injected == name
    assert loss(moved) > 0.05
    named = sum(moved[cause] for cause in scenario.causes)
    others = [points for cause, points in moved.items() if cause not in (*scenario.causes, "hit")]
    assert named > 1.3 * max(others) and named > 0.5 * loss(moved)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_noisy_neighbour_is_the_one_that_evicts(seed: int) -> None:
    scenario = SCENARIOS["noisy_neighbour"](seed)
    result = scenario.fleet().run_all()
    spans = (scenario.onset_s - 900, scenario.onset_s), (scenario.onset_s + 120, float("inf"))
    shares = []
    for span in spans:
        prompt = scenario.workload.prompt_tokens[result.between(*span)].sum()
        shares.append({tenant: lost / prompt for tenant, lost in result.interference(*span).items()})
    grown = {tenant: shares[1][tenant] - shares[0][tenant] for tenant in shares[0]}
    assert max(grown, key=lambda tenant: grown[tenant]) == scenario.target
    for victim in ("chat", "agent", "code", "support"):
        assert result.hit_ratio(*spans[1], tenant=victim) < result.hit_ratio(*spans[0], tenant=victim) - 0.05


@pytest.mark.parametrize("seed", SEEDS)
def test_the_reuse_shift_is_of_the_target_tenant_alone(seed: int) -> None:
    scenario = SCENARIOS["tenant_reuse_shift"](seed)
    result = scenario.fleet().run_all()
    assert result.hit_ratio(scenario.onset_s + 120, tenant=scenario.target) == 0.0
    for tenant in set(scenario.workload.tenants) - {scenario.target}:
        before = result.hit_ratio(scenario.onset_s - 900, scenario.onset_s, tenant)
        assert abs(result.hit_ratio(scenario.onset_s + 120, tenant=tenant) - before) < 0.06


@pytest.mark.parametrize("name", FAULTY)
def test_scenarios_share_their_load_before_the_onset(name: str) -> None:
    scenario = SCENARIOS[name](3, minutes=10)
    plain = SCENARIOS[name](4, minutes=10)
    assert scenario.onset_s == 300 and scenario.workload.origin == "synthetic" and scenario.description
    assert len(scenario.workload.tenants) in (5, 6)
    assert not np.array_equal(scenario.workload.hashes, plain.workload.hashes)
    again = SCENARIOS[name](3, minutes=10)
    assert np.array_equal(scenario.workload.hashes, again.workload.hashes) and scenario.faults == again.faults
