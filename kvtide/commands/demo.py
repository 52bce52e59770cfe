"""`kvtide demo`: the main job on an emulated fleet whose decline has a known cause."""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.padding import Padding
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from analytics.advisor import Advice, advise_scale
from analytics.diagnosis import Diagnosis, diagnose
from analytics.fleet.scenarios import SCENARIOS, Scenario
from analytics.frame import Frame
from ingest.errors import UsageError
from ingest.store import Store
from kvtide.frames import load_frame, load_service, save_advice, save_diagnosis
from kvtide.pipeline import run_embedded
from kvtide.replay import route_advice
from kvtide.report import report_data, write_report

TARGETS = {"fleet:0": "at its size"}


@click.command()
@click.option("--scenario", type=click.Choice(list(SCENARIOS)), default="routing_migration", show_default=True, help="Fault to inject.")
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the load and the fleet; a seed always gives the same run.")
@click.option(
    "--minutes", type=click.FloatRange(min=12), default=40.0, show_default=True, help="Event time to emulate; the fault comes at half."
)
@click.option("--report", "report_path", default="out/demo.html", show_default=True, metavar="FILE", help="HTML report to write.")
@click.option("--folder", metavar="FOLDER", help="Keep the event log and the store here (default: a temporary folder).")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document on stdout and nothing else there.")
def command(scenario: str, seed: int, minutes: float, report_path: str, folder: str | None, as_json: bool) -> None:
    """Emulate a fleet of four Prefill instances under flat load, inject a cause of hit-ratio decline half way, and let kvtide find it.

    Events go through the contract, a local log and the shards into an embedded ClickHouse; the diagnosis and the advice see only what is
    stored there. All load is synthetic. With --folder the store stays, for `kvtide sql` and `kvtide diagnose`.
    """
    _writable(report_path)
    case = SCENARIOS[scenario](seed, minutes)
    place = Path(folder) if folder else Path(tempfile.mkdtemp(prefix="kvtide-demo-"))
    try:
        with Store.open(f"chdb://{place / 'store'}", create=True) as store:
            _run(case, store, place / "log", quiet=as_json)
            frame, found, advice = investigate(store, seed)
            page = write_report(
                report_path,
                report_data(
                    store, frame, found, advice, injected=case.injected, title=f"kvtide demo: {scenario}, synthetic load, seed {seed}"
                ),
            )
    finally:
        if not folder:
            shutil.rmtree(place, ignore_errors=True)
    if as_json:
        click.echo(json.dumps(document(case, found, advice)))
    else:
        _print(case, found, advice, page, folder)


def _writable(report: str) -> None:
    """Fail before the work rather than after it."""
    try:
        Path(report).parent.mkdir(parents=True, exist_ok=True)
        Path(report).touch()
    except OSError as error:
        raise UsageError(f"--report {report}: {error.strerror}; name a file that can be written") from error


def investigate(store: Store, seed: int = 0) -> tuple[Frame, Diagnosis, list[Advice]]:
    """Diagnosis of what the store holds, and scale and route advice on its current stretch; both are saved."""
    frame = load_frame(store)
    found = diagnose(frame, seed=seed)
    now_us = time.time_ns() // 1000
    save_diagnosis(store, found, now_us)
    scale = advise_scale(frame, frame.mask(found.current), load_service(store, found.current))
    route = route_advice(store, found.current, seed=seed)
    advice = [item for item in (scale, route) if item is not None]
    save_advice(store, [item.row(now_us) for item in advice])
    return frame, found, advice


def document(case: Scenario, found: Diagnosis, advice: list[Advice]) -> dict[str, Any]:
    """What `--json` prints."""
    whole = found.to_json()
    return {
        "injected": case.injected,
        "verdict": found.verdict,
        "hit_ratio": whole["hit_ratio"],
        "contributions": found.contributions,
        "advice": [item.to_json() for item in advice],
        "scenario": case.name,
        "seed": case.seed,
        "load": whole["load"],
        "onset_s": found.onset_s,
        "target": found.target,
        "groups": whole["groups"],
        "evidence": whole["evidence"],
        "synthetic_load": True,
    }


def _predicted(item: Advice) -> str:
    """What the advice brings, beside what there is now."""
    shown = (("hit_ratio", "hit ratio", "{:.1%}"), ("ttft_mean_s", "TTFT mean", "{:.2f} s"), ("ttft_p99_s", "p99", "{:.2f} s"))
    parts = [
        f"{name} {form.format(item.predicted[key])}"
        + (f" (now {form.format(item.predicted[key + '_now'])})" if key + "_now" in item.predicted else "")
        for key, name, form in shown
        if key in item.predicted
    ]
    return "Predicted: " + ", ".join(parts) + "."


def _run(case: Scenario, store: Store, log: Path, quiet: bool) -> None:
    fleet = case.fleet(with_truth=False)
    total_us = int(case.workload.arrived_at_us[-1])
    console = Console(stderr=True, quiet=quiet or not Console(stderr=True).is_terminal)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("emulating and analysing", total=total_us)
        start: list[int] = []

        def advance(chunk: Any) -> None:
            start[:] = start or [chunk.from_us]
            progress.update(task, completed=min(chunk.to_us - start[0], total_us))

        run_embedded(fleet.run(), store, log, on_chunk=advance)


def _print(case: Scenario, found: Diagnosis, advice: list[Advice], page: Path, folder: str | None) -> None:
    out = Console()
    load = "flat" if found.load.flat else "not flat"
    requests, tokens = found.load.requests, found.load.prompt_tokens
    out.print(f"[bold]Injected[/] (synthetic load, seed {case.seed}): {case.injected}. {case.description}")
    out.print(f"Load is {load}: requests per minute {requests:+.1%}, prompt tokens per minute {tokens:+.1%}.")
    out.print(f"Hit ratio {found.hit_ratio_before:.1%} -> {found.hit_ratio_after:.1%} ({found.change_points:+.1f} points).")
    target = f" ({found.target})" if found.target else ""
    out.print(f"[bold]Verdict[/]: {found.verdict}{target}")
    out.print("Contributions to the change, in percentage points:")
    table = Table("cause", "points")
    for cause, points in sorted(found.contributions.items(), key=lambda item: item[1]):
        if abs(points) >= 0.05:
            table.add_row(cause, f"{points:+.2f}")
    out.print(table)
    for item in advice:
        out.print(f"[bold]Advice[/] {item.kind} {TARGETS.get(item.target, item.target)} (confidence {item.confidence:.0%})")
        for line in (_predicted(item), *item.evidence[:2]):
            out.print(Padding(line, (0, 0, 0, 2)))
    out.print(f"Report: {page}" + (f"   Ask more: kvtide sql --store chdb://{folder}/store --list" if folder else ""))
