"""From the store to a verdict: an emulated fleet's events through the shard into tables, back as a frame, and the commands on top."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from analytics.advisor import prefill_cost
from analytics.diagnosis import diagnose
from analytics.fleet.emulator import EPOCH_US
from analytics.fleet.scenarios import SCENARIOS
from analytics.frame import CAUSE_INDEX, Span
from ingest.errors import UsageError
from ingest.store import Store
from kvtide.commands import advise as advise_command
from kvtide.commands import diagnose as diagnose_command
from kvtide.frames import EmptyStore, load_curves, load_frame, load_service, parse_time, save_diagnosis
from kvtide.pipeline import run_embedded

MINUTES = 16.0
START_S = EPOCH_US / 1e6


@pytest.fixture(scope="module")
def filled(store_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """URL of a store with 16 minutes of the instance_change scenario (rolling restarts from minute 8)."""
    url = f"chdb://{store_folder}?database=diagnosis_store"
    with Store.open(url) as store:
        store.migrate()
        run_embedded(
            SCENARIOS["instance_change"](seed=3, minutes=MINUTES).fleet(with_truth=False).run(), store, tmp_path_factory.mktemp("log")
        )
    return url


def test_frame_holds_what_the_tables_hold(filled: str) -> None:
    with Store.open(filled) as store:
        frame = load_frame(store)
        traffic = store.rows("SELECT sum(requests) AS n, sum(prompt_tokens) AS prompt, sum(hit_tokens) AS hit FROM traffic_1m")[0]
        late = store.rows("SELECT sum(tokens) AS n FROM cause_1m WHERE tenant = 'chat' AND cause = 'instance'")[0]["n"]
        stored = store.rows("SELECT sum(blocks) AS n FROM residency_1m WHERE kind = 'stored'")[0]["n"]
        reused = store.rows("SELECT sum(blocks) AS n FROM reuse_time_1m")[0]["n"]
        some = load_frame(store, Span(START_S + 120, START_S + 300))
    assert frame.tokens.sum() == traffic["prompt"] == frame.fleet.prompt_tokens.sum()
    assert frame.tokens[:, :, 0].sum() == traffic["hit"] == frame.fleet.hit_tokens.sum()
    assert frame.requests.sum() == traffic["n"] == frame.fleet.requests.sum()
    assert frame.tokens[:, frame.tenants.index("chat"), CAUSE_INDEX["instance"]].sum() == late > 0
    assert frame.stored_blocks.sum() == stored and frame.reuse.blocks.sum() == reused
    assert frame.windows == int(MINUTES) or frame.windows == int(MINUTES) + 1
    assert (some.windows, some.window_s[0]) == (3, START_S + 120)
    assert (some.tokens == frame.tokens[2:5]).all() and (some.fleet.capacity_blocks == frame.fleet.capacity_blocks[2:5]).all()


def test_fleet_state_follows_the_events(filled: str) -> None:
    with Store.open(filled) as store:
        frame = load_frame(store)
    assert frame.fleet.instances == ("p0", "p1", "p2", "p3")
    assert (frame.fleet.capacity_blocks[:8] == 8000).all()
    assert frame.fleet.lost[:8].sum() == 0 and frame.fleet.lost[8:].sum() >= 10
    covered = np.nansum(frame.fleet.engine_query_tokens) / frame.fleet.prompt_tokens.sum()
    assert 0.95 < covered <= 1.0 + 1e-9


def test_prefill_cost_curves_and_service(filled: str) -> None:
    with Store.open(filled) as store:
        frame = load_frame(store)
        curves, service = load_curves(store), load_service(store, frame.span(0, frame.windows))
    assert prefill_cost(frame) == pytest.approx((2e-4, 2e-8), rel=0.02)
    assert {(c.tenant, c.scope) for c in curves} == {(t, s) for t in frame.tenants for s in ("fleet", "placed")}
    for curve in curves:
        assert (np.diff(curve.hit_ratio) >= 0).all() and (np.diff(curve.capacity_blocks) > 0).all() and curve.hit_ratio[-1] <= 1
    by = {(c.tenant, c.scope): c for c in curves}
    assert all(by[t, "fleet"].hit_ratio[-1] >= by[t, "placed"].hit_ratio[-1] - 1e-12 for t in frame.tenants)
    assert service.requests == frame.requests.sum() and 0 < service.prefill_mean_s < service.prefill_p99_s <= service.ttft_p99_s


def test_verdict_and_rows_kept_once(filled: str) -> None:
    with Store.open(filled) as store:
        found = diagnose(load_frame(store))
        assert found.verdict == "instance_change" and abs(found.onset_s - (START_S + 480)) <= 60  # type: ignore[operator]
        for _ in range(2):
            identity = save_diagnosis(store, found, 1_700_000_000_000_000)
        kept = store.rows("SELECT * FROM diagnosis WHERE id = {id:String}", id=identity)
    assert len(kept) == 1 and kept[0]["verdict"] == "instance_change"
    assert kept[0]["contributions"] == found.contributions
    assert kept[0]["current_from"].timestamp() == found.current.from_s


def test_diagnose_command(filled: str, tmp_path: Path) -> None:
    page = tmp_path / "sub" / "report.html"
    result = CliRunner().invoke(diagnose_command.command, ["--store", filled, "--json", "--html", str(page)], catch_exceptions=False)
    document = json.loads(result.stdout)
    assert document["verdict"] == "instance_change" and page.stat().st_size > 1_000_000
    assert sum(document["contributions"].values()) == pytest.approx(document["change_points"], abs=1e-9)
    words = CliRunner().invoke(diagnose_command.command, ["--store", filled, "--tenant", "rag", "--from", "2025-01-01T00:09:00"])
    assert words.exit_code == 0 and words.stdout.startswith("verdict: ") and "sum" in words.stdout


def test_advise_command(filled: str) -> None:
    result = CliRunner().invoke(advise_command.command, ["--store", filled, "--json", "--minutes", "6"], catch_exceptions=False)
    kinds = [item["kind"] for item in json.loads(result.stdout)["advice"]]
    assert len(kinds) == 2 and kinds[0].startswith("scale_") and kinds[1].startswith("route")
    with Store.open(filled) as store:
        assert {row["kind"] for row in store.rows("SELECT kind FROM advice")} == set(kinds)
    words = CliRunner().invoke(advise_command.command, ["--store", filled, "--no-route"], catch_exceptions=False)
    assert words.stdout.startswith("scale_") and "TTFT" in words.stdout


def test_empty_stores_and_wrong_options_say_what_to_do(store: Store, store_url: str, filled: str) -> None:
    with pytest.raises(EmptyStore, match="run `kvtide demo`"):
        load_frame(store)
    for arguments, message in (
        (["--from", "yesterday"], "--from 'yesterday' is not an ISO 8601 time"),
        (["--to", "2025-01-01"], "--to needs --from"),
        (["--baseline-from", "2025-01-01"], "go together"),
        (["--tenant", "nobody"], "no tenant 'nobody'"),
    ):
        result = CliRunner().invoke(diagnose_command.command, ["--store", filled, *arguments])
        assert isinstance(result.exception, UsageError) and message in str(result.exception)
    unmigrated = store_url.replace("test_", "never_")
    with Store.open(unmigrated) as blank, pytest.raises(EmptyStore):
        load_frame(blank)


def test_times_are_utc_unless_they_say_otherwise() -> None:
    assert parse_time("2025-01-01T00:00:00") == START_S == parse_time("2025-01-01T01:00:00+01:00")
