"""`kvtide bench`: every bench runs on a little input and says what it compared; figures themselves are never asserted."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from bench.shard import WEKA
from kvtide.commands.bench import BENCHES, command

needs_weka = pytest.mark.skipif(not WEKA.exists(), reason="the WEKA archive is not beside the checkout")


def result(*arguments: str) -> dict[str, object]:
    run = CliRunner().invoke(command, [*arguments, "--json"], catch_exceptions=False)
    assert run.exit_code == 0
    return dict(json.loads(run.stdout))


@needs_weka
@pytest.mark.traces
def test_shard_bench_compares_the_same_blocks() -> None:
    got = result("shard", "--limit", "300")
    assert got["requests"] == 300 and got["blocks"] > 100_000
    for job, speed in (("accesses", "shard"), ("with_residency", "shard_with_residency")):
        ours = got[f"{speed}_blocks_per_second"]
        assert got[f"ratio_{job}"] == pytest.approx(ours / got["fenwick_blocks_per_second"])
        assert got[f"ratio_{job}_one_scope_dense"] == pytest.approx(ours / got["fenwick_one_scope_dense_blocks_per_second"])


@needs_weka
@pytest.mark.traces
def test_curves_bench_compares_equal_distances() -> None:
    assert result("curves", "--limit", "300")["same_distances"] is True


@pytest.mark.kafka
@pytest.mark.slow
def test_pipeline_bench_reads_back_what_it_published(kafka: str) -> None:
    got = result("pipeline", "--limit", "2000")
    assert got["published"]["rows"] >= 4000
    assert 0 < got["whole_over_bare_ratio"] < 1


def test_a_missing_trace_is_named() -> None:
    run = CliRunner().invoke(command, ["shard", "--trace", "nowhere.tar.zst"])
    assert run.exit_code != 0 and "nowhere.tar.zst" in str(run.exception)


def test_every_bench_says_what_it_measures() -> None:
    text = CliRunner().invoke(command, ["--help"]).stdout
    assert all(name in text for name in BENCHES)
