"""Synthetic loads beside the totals they are made after. Parameters were tuned on seed 1 alone; the seeds here are held out."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from analytics.estimators.exact import run_exact
from analytics.fleet.generator import category_mix
from analytics.fleet.mixes import ClientSpec, SessionClass, mix_sessions
from analytics.fleet.presets import CATEGORIES, CLIENT_SHARES, LRU_SHARES, QWEN, burst_load, client_mix, qwen_like
from analytics.fleet.workload import Workload
from analytics.reuse.chains import ChainColumns, densify
from analytics.workload import LabelledChains
from analytics.workload.hits import session_sharing
from analytics.workload.times import arrivals, categories
from analytics.workload.turns import turns

DOCUMENT = Path(__file__).parents[1] / "docs" / "workloads.md"
# How far a generated load may be from the published totals: requests and mean prompt relative, the others in hit ratio.
REQUESTS, IDEAL, LRU, SAME_SESSION, PROMPT = 0.03, 0.02, 0.03, 0.05, 0.15


def labelled(load: Workload) -> LabelledChains:
    assert load.category is not None and load.turn is not None
    chains = ChainColumns(load.arrived_at_us, load.offsets, load.hashes, load.prompt_tokens, load.block_size)
    return LabelledChains(chains, load.tenant, load.tenants, load.session, load.session, load.category, load.categories, load.turn)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [101, 102])
@pytest.mark.parametrize("sample", sorted(QWEN))
def test_qwen_like_loads_have_the_published_totals(sample: str, seed: int) -> None:
    published, load = QWEN[sample], qwen_like(sample, seed)
    assert load.origin == "synthetic" and load.block_size == 16 and load.span_s <= 7200
    assert abs(len(load) / published.requests - 1) < REQUESTS
    chains = labelled(load)
    _, distinct = densify(load.hashes)
    curve = run_exact(chains.chains)
    assert abs(curve.ideal_ratio() - published.ideal_ratio) < IDEAL
    found = curve.hit_ratio([round(share * distinct) for share in LRU_SHARES])
    assert np.abs(found - published.lru_ratio).max() < LRU, found
    if published.same_session_ratio is not None:
        assert abs(session_sharing(chains)["within_session_hits_ratio"] - published.same_session_ratio) < SAME_SESSION
    if published.mean_prompt_tokens is not None:
        assert abs(load.prompt_tokens.mean() / published.mean_prompt_tokens - 1) < PROMPT
    if seed == 101:
        ratios = zip([curve.ideal_ratio(), *found.tolist()], [published.ideal_ratio, *published.lru_ratio], strict=True)
        cells = " | ".join(f"{mine:.3f} ({theirs:.3f})".replace("0.", ".") for mine, theirs in ratios)
        row = f"| {sample if sample in 'AB' else sample.title()} | {len(load):,} ({published.requests:,}) | {cells} |"
        assert row in DOCUMENT.read_text(encoding="utf-8"), row


def test_category_mix_is_rich_in_categories_with_exponential_reuse() -> None:
    load = category_mix(7)
    assert load.origin == "synthetic" and set(load.categories) == {c.category for c in CATEGORIES}
    assert load.session.min() == 0 and load.turn is not None and load.turn.min() == 1
    assert len(load) == pytest.approx(4.0 * 3600, rel=0.08)
    rows = {row["label"]: row for row in categories(labelled(load))}
    for spec in CATEGORIES:
        first = rows[f"{spec.category}/1"]
        # A session's next turn, so the chance of one; blocks weigh, and the trace ends: binomial error and a few points.
        error = 3 * np.sqrt(spec.goes_on[0] * (1 - spec.goes_on[0]) / first["requests"])
        assert abs(first["reuse_ratio"] - spec.goes_on[0]) < error * 1.5 + 0.03, spec.category
    for label, mean in (("chat/2", 60.0), ("chat/5+", 40.0), ("agent/5+", 4.0)):
        assert rows[label]["exponential_mean_s"] == pytest.approx(mean, rel=0.12)
        assert rows[label]["ks_distance_ratio"] < 0.06
    reuse = [row["reuse_ratio"] for row in rows.values() if row["requests"] >= 100]
    assert min(reuse) < 0.1 and max(reuse) > 0.7, "categories differ in how likely they come back"


def test_bursts_have_the_gaps_asked_for() -> None:
    found, _ = arrivals(burst_load(5, minutes=120, gap_cv=3.0).arrived_at_us)
    assert found["gap_cv"] == pytest.approx(3.0, rel=0.08)
    # Renewal process: the index of dispersion tends to gap_cv^2 over long windows. 720 windows: standard error sqrt(2/720) of it.
    assert found["dispersion_10s"] == pytest.approx(9.0, rel=0.2)
    assert found["rate_per_s"] == pytest.approx(5.0, rel=0.06)
    poisson, _ = arrivals(burst_load(5, minutes=120, gap_cv=1.0).arrived_at_us)
    assert poisson["dispersion_10s"] == pytest.approx(1.0, rel=0.2)


def test_clients_are_as_unequal_as_servegen_s() -> None:
    load = client_mix(11)
    share = np.bincount(load.tenant, minlength=len(load.tenants)) / len(load)
    assert len(load.tenants) == len(CLIENT_SHARES) == 73 and sum(CLIENT_SHARES) == pytest.approx(1, abs=0.005)
    assert share[0] == pytest.approx(0.286, abs=0.04) and share[:10].sum() == pytest.approx(0.677, abs=0.04)
    assert len(load) == pytest.approx(8 * 3600, rel=0.06)
    first, _ = arrivals(load.arrived_at_us[load.tenant == 0])
    assert first["gap_cv"] > 1.5, "the largest client sends in bursts"
    assert len({int(load.chain(k)[0]) for k in np.flatnonzero(load.tenant == 2)}) == 3, "heads are a client's own"
    owner = dict(zip(load.hashes[load.offsets[:-1]].tolist(), load.tenant.tolist(), strict=True))
    assert all(owner[int(load.hashes[load.offsets[k]])] == load.tenant[k] for k in range(len(load)))


CLASSES = (
    SessionClass("a", 0.5, heads=4, head_zipf=1.0, head_tokens=64, first_tokens=200, goes_on=(0.6, 0.5), think_s=(30.0, 10.0)),
    SessionClass("b", 0.5, first_tokens=100, sigma=0.0, slow_ratio=1.0, goes_on=(1.0, 0.0), slow_s=5.0),
)


def test_mix_is_a_function_of_its_seed_with_steady_rate() -> None:
    one, again, other = (mix_sessions([ClientSpec("t", 1.0, CLASSES)], minutes=30, requests_per_s=5, seed=s) for s in (1, 1, 2))
    assert np.array_equal(one.hashes, again.hashes) and np.array_equal(one.arrived_at_us, again.arrived_at_us)
    assert not np.array_equal(one.hashes[:100], other.hashes[:100])
    assert len(one) == pytest.approx(9000, rel=0.06)
    minutes = np.bincount(one.arrived_at_us // 60_000_000, minlength=30)
    assert abs(minutes[:5].mean() - minutes[5:].mean()) < 40
    expected = 0.5 * (1 + 0.6 / 0.5) / (0.5 * (1 + 0.6 / 0.5) + 0.5 * 2)
    assert one.category is not None and np.mean(one.category == 0) == pytest.approx(expected, abs=0.02)


def test_sessions_of_a_mix_grow_and_share_heads_only() -> None:
    load = mix_sessions([ClientSpec("t", 1.0, CLASSES)], minutes=20, requests_per_s=5, seed=3)
    assert load.turn is not None and load.category is not None
    for session in range(150):
        rows = np.flatnonzero(load.session == session)
        assert len(set(load.category[rows].tolist())) == 1 and np.all(np.diff(load.turn[rows]) == 1)
        for before, after in zip(rows, rows[1:], strict=False):
            shorter = load.chain(before)
            assert np.array_equal(load.chain(after)[: shorter.size], shorter)
    heads = {tuple(load.chain(k)[:4].tolist()) for k in np.flatnonzero(load.category == 0) if load.prompt_tokens[k] >= 64}
    assert len(heads) == 4
    deep = load.hashes[np.concatenate([np.arange(load.offsets[k] + 4, load.offsets[k + 1]) for k in np.flatnonzero(load.turn == 1)])]
    assert np.unique(deep).size == deep.size, "past the head, first turns share nothing"
    # Class b: always exactly two turns, an exponential 5 s apart.
    sessions = turns(labelled(load))
    assert sessions["turns_max"] > 2 and sessions["next_turn_after_first_ratio"] == pytest.approx(0.8, abs=0.05)


def test_mix_respects_the_longest_prompt_and_refuses_empty_shares() -> None:
    long = (SessionClass("long", 1.0, first_tokens=900, goes_on=(1.0, 0.95), think_s=(1.0,)),)
    load = mix_sessions([ClientSpec("t", 1.0, long)], minutes=5, requests_per_s=2, seed=1, max_prompt_tokens=4000)
    assert load.prompt_tokens.max() <= 4000
    with pytest.raises(ValueError, match="shares above 0"):
        mix_sessions([ClientSpec("t", 1.0, ())], minutes=1, requests_per_s=1)
    with pytest.raises(ValueError, match="shares above 0"):
        mix_sessions([ClientSpec("t", 0.0, long)], minutes=1, requests_per_s=1)
