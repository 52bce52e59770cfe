"""`kvtide emulate`: a trace or a scenario through an emulated fleet, published as events."""

from __future__ import annotations

import json
import math
from typing import Any

import click
import numpy as np
from click.core import ParameterSource
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from analytics.fleet import faults
from analytics.fleet.config import FleetConfig
from analytics.fleet.emulator import Fleet
from analytics.fleet.faults import Fault
from analytics.fleet.result import FleetResult
from analytics.fleet.routers import ROUTERS, RouterSpec
from analytics.fleet.scenarios import SCENARIOS
from ingest.batching import Batcher
from ingest.errors import UsageError
from ingest.sources import SOURCES
from kvtide.emulation import publish, workload_from_trace
from kvtide.eventlog import log_options, log_settings, open_sink, refuse_used, shown
from kvtide.tracefiles import TraceInput

TRACE_ONLY = ("format_", "tenant", "assign_tenants", "limit", "block_size", "rate", "instances", "capacity_blocks", "router", "fault_texts")
FAULT_FORMS = "restart:AT:I[:DOWN_S]  remove:AT:I  add:AT  clear:AT:I  capacity:AT:RATIO  route:AT:ROUTER"


@click.command(epilog="A router is a name with parameters: weighted_sum:w=0.7. A fault is one of " + FAULT_FORMS + ", times in seconds.")
@click.argument("paths", nargs=-1, metavar="[PATH...]")
@click.option("--format", "-f", "format_", type=click.Choice(list(SOURCES)), help="Dialect of the trace files.")
@click.option("--scenario", type=click.Choice(list(SCENARIOS)), help="Run a scenario instead of a trace (synthetic load).")
@click.option("--minutes", type=click.FloatRange(min=2), default=40.0, show_default=True, help="Length of a scenario.")
@click.option("--tenant", help="Name of the tenant of all requests of the trace.")
@click.option("--assign-tenants", metavar="zipf:N", help="Draw one of N tenants for each conversation; marked as assigned.")
@click.option("--limit", type=click.IntRange(min=1), help="Use only this many requests of the trace.")
@click.option("--block-size", type=click.IntRange(1), help="Re-cut blocks of unequal length (RAGPulse) into blocks of this many tokens.")
@click.option("--rate", type=click.FloatRange(min=0.0, min_open=True), default=1.0, show_default=True, help="Factor on the arrival rate.")
@click.option("--instances", type=click.IntRange(1), default=4, show_default=True, help="Prefill instances.")
@click.option("--capacity-blocks", type=click.IntRange(1), default=8192, show_default=True, help="KV blocks of each instance.")
@click.option("--router", default="session_affinity", show_default=True, metavar="NAME[:P=V]", help=f"One of {', '.join(ROUTERS)}.")
@click.option("--fault", "fault_texts", multiple=True, metavar="FAULT", help="What is done to the fleet, and when; may be repeated.")
@click.option("--seed", type=int, default=0, show_default=True, help="A seed always gives the same events.")
@click.option("--skip-bad", is_flag=True, help="Exit with 0 although lines could not be read.")
@click.option("--ignore-unknown-fields", is_flag=True, help="Read past fields that the dialect does not have.")
@click.option("--append", is_flag=True, help="Publish although the log holds events already.")
@log_options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document on stdout and nothing else there.")
def command(
    paths: tuple[str, ...],
    format_: str | None,
    scenario: str | None,
    minutes: float,
    kafka: str | None,
    log: str | None,
    topic: str | None,
    partitions: int | None,
    as_json: bool,
    append: bool,
    skip_bad: bool,
    **given: Any,
) -> None:
    """Run a trace (or a scenario) through an emulated fleet of Prefill instances and publish its access and residency events.

    Then run `kvtide work` on the same log or Kafka, and ask with `kvtide sql`, `kvtide diagnose` and `kvtide advise`.
    """
    settings = log_settings(kafka, log, topic, partitions)
    if (scenario is None) == (not paths):
        raise UsageError("give trace files with --format, or --scenario NAME, and not both")
    if scenario:
        _refuse_trace_options()
    trace = None if scenario else _trace(paths, format_, skip_bad, given)
    fleet = _scenario_fleet(scenario, given["seed"], minutes) if scenario else _trace_fleet(trace, given)
    if not append:
        refuse_used(settings)
    sink = open_sink(settings)
    try:
        sent = _publish(fleet, Batcher(sink, settings.partitions))
    finally:
        sink.close()
    assert fleet.result is not None  # the run has been exhausted
    summary = {"where": shown(settings), "load": fleet.workload.origin, "rows": sent, **_summary(fleet.result)}
    if trace:
        summary["bad_records"] = trace.bad_records
    if as_json:
        click.echo(json.dumps(summary))
    else:
        click.echo(f"{summary['requests']} requests ({summary['load']}) to {summary['where']}", err=True)
        click.echo(
            f"hit ratio {summary['hit_ratio']:.4f}, TTFT {summary['ttft_p50_s']:.3f} s median, {summary['ttft_p99_s']:.3f} s p99", err=True
        )
    if trace:
        trace.finish()


def _trace(paths: tuple[str, ...], format_: str | None, skip_bad: bool, given: dict[str, Any]) -> TraceInput:
    if format_ is None:
        raise UsageError(f"--format is missing; it names the dialect of the files: {', '.join(SOURCES)}")
    options = {} if given["block_size"] is None else {"block_size": given["block_size"]}
    return TraceInput(paths, format_, given["tenant"], given["assign_tenants"], given["limit"], skip_bad, given["ignore_unknown_fields"],
                      **options)  # fmt: skip


def _trace_fleet(trace: TraceInput | None, given: dict[str, Any]) -> Fleet:
    assert trace is not None
    workload = workload_from_trace(trace.requests("time"), trace.name).scale_rate(given["rate"])
    config = FleetConfig(instances=given["instances"], capacity_blocks=given["capacity_blocks"], seed=given["seed"])
    schedule = [parse_fault(text) for text in given["fault_texts"]]
    try:
        return Fleet(config, workload, parse_router(given["router"]), schedule, with_truth=False)
    except ValueError as error:
        raise UsageError(str(error)) from error


def _refuse_trace_options() -> None:
    """A scenario brings its own load, fleet and faults: an option that it would pass over is a mistake."""
    context = click.get_current_context()
    given = [item for item in context.command.params if context.get_parameter_source(item.name or "") is ParameterSource.COMMANDLINE]
    foreign = [item.opts[-1] for item in given if item.name in TRACE_ONLY]
    if foreign:
        raise UsageError(
            f"{', '.join(foreign)}: a scenario brings its own load and fleet; drop it, or give trace files instead of --scenario"
        )


def _scenario_fleet(name: str, seed: int, minutes: float) -> Fleet:
    return SCENARIOS[name](seed, minutes).fleet(with_truth=False)


def parse_router(text: str) -> RouterSpec:
    """`NAME` or `NAME:P=V,P=V`. Raises `UsageError` that names the routers."""
    name, _, rest = text.partition(":")
    try:
        params = {key: float(value) for key, value in (pair.split("=") for pair in rest.split(",") if pair)}
        RouterSpec(name, params).build(seed=0)  # only this looks at the parameters
        return RouterSpec(name, params)
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"router {text!r}: {error}; write NAME or NAME:PARAMETER=VALUE with one of {', '.join(ROUTERS)}") from error


def parse_fault(text: str) -> Fault:
    """One fault of `--fault`. Raises `UsageError` that shows the forms."""
    kind, *parts = text.split(":", 2 if text.startswith("route:") else -1)
    try:
        at_s = _number(parts[0])
        if kind == "restart":
            return faults.restart(at_s, int(parts[1]), *(_number(part) for part in parts[2:]))
        if kind in ("remove", "clear"):
            return (faults.remove if kind == "remove" else faults.clear)(at_s, int(parts[1]))
        if kind == "add":
            return faults.add(at_s)
        if kind == "capacity":
            return faults.capacity(at_s, ratio=_number(parts[1]))
        if kind == "route":
            return faults.route(at_s, parse_router(parts[1]))
    except IndexError as error:
        raise UsageError(f"fault {text!r}: a part is missing; write one of {FAULT_FORMS}") from error
    except (ValueError, TypeError) as error:
        raise UsageError(f"fault {text!r}: {error}; write one of {FAULT_FORMS}") from error
    raise UsageError(f"fault {text!r}: unknown kind {kind!r}; write one of {FAULT_FORMS}")


def _number(text: str) -> float:
    """A finite number. Raises `ValueError` for anything else."""
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text!r} is not a finite number")
    return value


def _publish(fleet: Fleet, batcher: Batcher) -> dict[str, int]:
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("emulating", total=len(fleet.workload))
        rows = publish(fleet.run(), batcher, lambda chunk: bar.advance(task, len(chunk.access.ts_us)))
    return {str(kind): count for kind, count in rows.items()}


def _summary(result: FleetResult) -> dict[str, float]:
    ttft_s = result.ttft_us[result.ttft_us >= 0] / 1e6
    p50, p99 = np.quantile(ttft_s, [0.5, 0.99]) if len(ttft_s) else (0.0, 0.0)
    return {
        "requests": len(result.ttft_us),
        "failed": int((result.ttft_us < 0).sum()),
        "hit_ratio": float(result.hit_ratio()),
        "ttft_p50_s": float(p50),
        "ttft_p99_s": float(p99),
    }
