"""The views over the histograms equal the Python that computes the same from the same rows."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import numpy as np
import pyarrow as pa
import pytest

from analytics.pool import ReuseHistogram
from analytics.reuse.bins import bin_edges, bin_of
from ingest.store import Store

START = datetime(2023, 11, 14, 22, 0, tzinfo=UTC)
RANGE = "from = '2023-11-14 22:00:00', to = '2023-11-14 23:00:00'"
A_S, B_S, BLOCK_BYTES, BLOCK_SIZE = 2e-4, 2e-8, 2_097_152.0, 64


@pytest.fixture
def filled(store: Store) -> Store:
    """Ten minutes of two tenants on two instances, drawn once."""
    rng = np.random.default_rng(3)
    reuse, times = [], []
    for minute in range(10):
        at = START + timedelta(minutes=minute)
        for tenant in ("a", "b"):
            for value in rng.integers(0, 5000, 12):
                lo, hi = bin_edges(bin_of(int(value)))
                count = int(rng.integers(1, 50))
                reuse.append((at, tenant, "reuse", lo, hi, count, count * int(rng.integers(0, 30))))
                instance = ("p0", "p1")[int(rng.integers(0, 2))]
                times.append((at, tenant, instance, "reuse", lo, hi, count))
            reuse.append((at, tenant, "cold", 0, 0, 40, 400))
            times.append((at, tenant, "p0", "cold", 0, 0, 40))
    window, who, kind, lo, hi, blocks, spots = zip(*reuse, strict=True)
    store.insert("reuse_1m", pa.table({
        "window_start": list(window), "tenant": list(who), "model": ["m"] * len(who), "block_size": [BLOCK_SIZE] * len(who),
        "scope": ["fleet"] * len(who), "instance": [""] * len(who), "kind": list(kind), "distance_from": list(lo), "distance_to": list(hi),
        "blocks": list(blocks), "positions": list(spots),
    }))  # fmt: skip
    window, who, instance, kind, lo, hi, blocks = zip(*times, strict=True)
    store.insert("reuse_time_1m", pa.table({
        "window_start": list(window), "tenant": list(who), "model": ["m"] * len(who), "block_size": [BLOCK_SIZE] * len(who),
        "instance": list(instance), "category": [""] * len(who), "kind": list(kind), "reuse_ms_from": list(lo), "reuse_ms_to": list(hi),
        "blocks": list(blocks), "positions": [0] * len(who),
    }))  # fmt: skip
    return store


def histogram(store: Store, where: str, duration_s: float) -> ReuseHistogram:
    rows = store.rows(
        f"SELECT kind, reuse_ms_from AS lo, reuse_ms_to AS hi, sum(blocks) AS n FROM reuse_time_1m WHERE {where} GROUP BY 1, 2, 3"
    )
    finite = [row for row in rows if row["kind"] == "reuse"]
    lo, hi, n = (np.array([row[name] for row in finite], np.float64) for name in ("lo", "hi", "n"))
    return ReuseHistogram(lo / 1000, hi / 1000, n, float(sum(row["n"] for row in rows if row["kind"] != "reuse")), duration_s)


def test_capacity_value_is_the_derivative_of_what_is_saved(filled: Store) -> None:
    arguments = f"tenant = 'a', {RANGE}, scope = 'fleet', a_s = {A_S}, b_s = {B_S}, block_bytes = {BLOCK_BYTES}"
    got = filled.rows(f"SELECT * FROM capacity_value({arguments})")
    raw = filled.rows(
        "SELECT distance_to AS edge, sum(blocks) AS n, sum(positions) AS p FROM reuse_1m WHERE tenant = 'a' AND kind = 'reuse' GROUP BY 1"
    )
    saved, previous = {0: 0.0}, 0.0
    for row in sorted(raw, key=lambda row: row["edge"]):
        previous += A_S * row["n"] * BLOCK_SIZE + B_S * BLOCK_SIZE**2 * (row["p"] + row["n"] / 2)
        saved[row["edge"]] = previous
    assert [row["capacity_blocks"] for row in got] == sorted(saved)
    np.testing.assert_allclose([row["saved_s"] for row in got], [saved[c] for c in sorted(saved)], rtol=1e-9)
    gib = np.diff(sorted(saved)) * BLOCK_BYTES / 2**30
    slope = np.diff([saved[c] for c in sorted(saved)]) / gib
    np.testing.assert_allclose([row["value_s_per_gib"] for row in got[1:]], slope, rtol=1e-9)
    assert got[0]["value_s_per_gib"] is None


def test_working_set_equals_the_pool_model(filled: Store) -> None:
    got = filled.rows(f"SELECT * FROM working_set(tenant = 'a', {RANGE})")
    model = histogram(filled, "tenant = 'a'", 600.0)
    assert len(got) == len(model.to_s)
    for row in got:
        assert row["working_set_blocks"] == pytest.approx(model.occupancy_blocks(row["time_s"]), rel=1e-9)
        assert row["reused_ratio"] == pytest.approx(model.hit_blocks(row["time_s"]) / model.total_blocks, rel=1e-9)


def test_pooled_curve_equals_the_pool_model(filled: Store) -> None:
    got = filled.rows(f"SELECT * FROM pooled_curve(instance = 'p0', {RANGE})")
    models = {tenant: histogram(filled, f"tenant = '{tenant}' AND instance = 'p0'", 600.0) for tenant in ("a", "b")}
    assert {row["tenant"] for row in got} == {"a", "b"} and len(got) > 50
    for row in got:
        at, model = row["time_s"], models[row["tenant"]]
        assert row["tenant_blocks"] == pytest.approx(model.occupancy_blocks(at), rel=1e-9)
        assert row["hit_ratio_blocks"] == pytest.approx(model.hit_blocks(at) / model.total_blocks, rel=1e-9)
        assert row["capacity_blocks"] == pytest.approx(sum(m.occupancy_blocks(at) for m in models.values()), rel=1e-9)


def test_views_are_empty_on_an_empty_store(store: Store) -> None:
    assert store.rows(f"SELECT * FROM working_set(tenant = 'a', {RANGE})") == []
    assert store.rows(f"SELECT * FROM pooled_curve(instance = 'p0', {RANGE})") == []
