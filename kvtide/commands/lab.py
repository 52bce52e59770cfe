"""`kvtide lab`: eviction policies, routers and tiers side by side on traces."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any, TypeVar, get_args

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from analytics.fleet.lab import cells
from analytics.fleet.routers import ROUTERS
from analytics.policies import POLICIES, Form
from ingest.errors import UsageError
from ingest.sources import SOURCES, TraceRequest
from kvtide.emulation import workload_from_trace
from kvtide.lab import (
    Job,
    Lab,
    LabTrace,
    PolicyJob,
    RouterJob,
    capacities_of,
    check_prefixes,
    chosen,
    fallbacks,
    lab_trace,
    tier_rows,
    wins,
)
from kvtide.lab_report import plot_policies, plot_tiers, print_policies, print_rows, store_rows
from kvtide.mrcplot import plot_format
from kvtide.prefill_cost import parse_cost, prefill_cost_option
from kvtide.settings import Settings
from kvtide.tracefiles import TraceInput, plain_console, plain_table
from kvtide.workload_input import load

CAPACITIES = "1%,2%,5%,10%,20%,50%"
F = TypeVar("F", bound=Callable[..., Any])


@click.group(invoke_without_command=True)
@click.option("--list", "listed", is_flag=True, help="List the policies and routers.")
@click.pass_context
def command(ctx: click.Context, listed: bool) -> None:
    """Every eviction policy, router or split into tiers on the same traces, side by side.

    Finished cells are kept in a run folder and not run again, so a run that was cut goes on where it stopped.
    """
    if listed:
        for what, members in (("policies", POLICIES), ("routers", ROUTERS)):
            table = plain_table(what, "")
            for name, member in members.items():
                table.add_row(name, (getattr(member, "doc", None) or member.__doc__ or "").strip().split("\n")[0])
            table.columns[1].justify = "left"
            plain_console().print(table)
    elif ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


def lab_options(command: F) -> F:
    """TRACE... with a format each, how much of them, and where results go."""
    for option in reversed(
        (
            click.argument("paths", nargs=-1, required=True, metavar="TRACE..."),
            click.option(
                "--format", "-f", "formats", multiple=True, required=True, type=click.Choice(list(SOURCES)),
                help="Dialect of the traces; once, or once for each TRACE in order.",
            ),
            click.option("--limit", type=click.IntRange(min=1), help="Only the first so many requests of each trace."),
            click.option("--sessions", type=click.IntRange(min=1), help="Only the first N sessions of traces without a common clock."),
            click.option("--skip-bad", is_flag=True, help="Exit with 0 although lines could not be read."),
            click.option("--run", "folder", default=".kvtide/lab", show_default=True, help="Folder of finished cells."),
            click.option("--processes", type=click.IntRange(min=1), default=os.cpu_count() or 1, show_default="all cores"),
            click.option("--store", "store_url", metavar="URL", help="Write the table to this store as well."),
            click.option("--json", "as_json", is_flag=True, help="Print one JSON document."),
        )
    ):  # fmt: skip
        command = option(command)
    return command


@command.command("policies")
@lab_options
@click.option("--capacities", default=CAPACITIES, show_default=True, help="Blocks, or per cent of a trace's distinct blocks.")
@click.option("--policies", "names", metavar="A,B", help="Only these; all of the registry otherwise.")
@click.option(
    "--form", type=click.Choice(list(get_args(Form))), default="prefix", show_default=True, help="Blocks as objects, or prefix-safe."
)
@click.option("--plot", metavar="FILE.png|html", help="Draw hit ratio against capacity; one file a trace.")
@prefill_cost_option
def policies(
    capacities: str, names: str | None, form: Form, plot: str | None, prefill_cost: str, folder: str, processes: int,
    store_url: str | None, as_json: bool, **options: Any,
) -> None:  # fmt: skip
    """Hit ratio and prefill saved by every eviction policy at every capacity; hits are prefix-contiguous in either form."""
    cost, wanted = parse_cost(prefill_cost), chosen(names, POLICIES, "policy")
    if plot:
        plot_format(plot)
    inputs = traces_of(**options)
    lab, jobs, held = Lab(folder), list[Job](), list[LabTrace]()
    for name, one in inputs:
        held.append(read(name, one, options["sessions"]))
        if form == "prefix":
            check_prefixes(held[-1])
        path = lab.keep(held[-1])
        sizes = capacities_of(capacities, held[-1].distinct)
        jobs += [PolicyJob(path, held[-1].name, policy, form, size, cost) for policy, size in product(wanted, sizes)]
    rows = run_all(lab, jobs, processes)
    result = {"rows": rows, "wins": wins(rows), "fallbacks": [row for one in held for row in fallbacks(one, wanted)]}
    deliver("policies", result, store_url, as_json, print_policies)
    for drawn in plot_policies(plot, held, rows) if plot else []:
        click.echo(f"plot: {drawn}", err=True)
    finish(inputs)


@command.command("tiers")
@lab_options
@click.option("--capacities", default=CAPACITIES, show_default=True, help="Of HBM: blocks, or per cent of the distinct blocks.")
@click.option("--dram", default="0,10%,20%,50%,100%", show_default=True, help="Of DRAM below it, likewise.")
@click.option("--inclusive", is_flag=True, help="DRAM holds what HBM holds as well.")
@click.option("--plot", metavar="FILE.png|html", help="Draw hit ratio against HBM; of the first trace.")
@prefill_cost_option
def tiers(
    capacities: str, dram: str, inclusive: bool, plot: str | None, prefill_cost: str, folder: str, processes: int,
    store_url: str | None, as_json: bool, **options: Any,
) -> None:  # fmt: skip
    """What HBM and DRAM serve at every pair of capacities under LRU: exact, from one pass over each trace."""
    del folder, processes  # one pass a trace: nothing to take up again
    cost = parse_cost(prefill_cost)
    if plot:
        plot_format(plot)
    inputs, held, rows = traces_of(**options), list[LabTrace](), list[dict[str, Any]]()
    for name, one in inputs:
        held.append(read(name, one, options["sessions"]))
        hbm, below = (capacities_of(text, held[-1].distinct) for text in (capacities, dram))
        rows += tier_rows(held[-1], hbm, below, cost, inclusive)
    deliver("tiers", {"rows": rows}, store_url, as_json, lambda console, result: print_rows(console, result["rows"]))
    for drawn in plot_tiers(plot, held[0], rows) if plot else []:
        click.echo(f"plot: {drawn}", err=True)
    finish(inputs)


@command.command("routers")
@lab_options
@click.option("--routers", "names", metavar="A,B", help="Only these; all of the registry otherwise.")
@click.option("--instances", default="4,8,16", show_default=True, help="Numbers of instances.")
@click.option("--loads", default="0.6,0.8,0.9", show_default=True, help="Shares of what the fleet could just bear.")
@click.option("--seeds", default="0,1,2,3,4", show_default=True, help="Of the arrivals' jitter and the routers' draws.")
@click.option("--block-size", type=click.IntRange(min=1), help="Cut a ragpulse trace into blocks of so many tokens.")
def routers(
    names: str | None, instances: str, loads: str, seeds: str, block_size: int | None, folder: str, processes: int,
    store_url: str | None, as_json: bool, **options: Any,
) -> None:  # fmt: skip
    """TTFT and hit ratio under every router, on a fleet at a stated share of what it could just bear."""
    wanted, lab, jobs = chosen(names, ROUTERS, "router"), Lab(folder), list[Job]()
    sizes, shares, draws = (
        numbers(instances, int, "--instances", 1),
        numbers(loads, float, "--loads", 1e-6),
        numbers(seeds, int, "--seeds", 0),
    )
    inputs = traces_of(**options, source_options={} if block_size is None else {"block_size": block_size})
    for name, one in inputs:
        requests, told = sampled(name, one, options["sessions"])
        path = lab.keep(workload_from_trace(requests, name))
        jobs += [RouterJob(path, router, cell) for cell in cells([told()], sizes, shares, draws) for router in wanted]
    result = {"rows": run_all(lab, jobs, processes)}
    deliver("routers", result, store_url, as_json, lambda console, found: print_rows(console, found["rows"]))
    finish(inputs)


# ---------------------------------------------------------------- traces in, results out


def traces_of(
    paths: Sequence[str], formats: Sequence[str], limit: int | None, skip_bad: bool, sessions: int | None,
    source_options: dict[str, Any] | None = None,
) -> list[tuple[str, TraceInput]]:  # fmt: skip
    """Each trace by a name of its own: its file's name, its path where two files are called alike. Raises `UsageError`."""
    del sessions
    if len(formats) not in (1, len(paths)):
        raise UsageError(f"{len(formats)} formats for {len(paths)} traces: give --format once, or once for each trace")
    words = [Path(path).name.split(".")[0] or path for path in paths]
    names = words if len(set(words)) == len(words) else list(paths)
    each = list(formats) * len(paths) if len(formats) == 1 else list(formats)
    return [
        (name, TraceInput((path,), format_, None, None, limit, skip_bad, False, **(source_options or {})))
        for name, path, format_ in zip(names, paths, each, strict=True)
    ]


def read(name: str, one: TraceInput, sessions: int | None) -> LabTrace:
    """A trace as the lab holds it, its name saying what was taken of it."""
    requests, told = sampled(name, one, sessions)
    held = load(requests, one.source)
    return lab_trace(told(), held.labelled)


def sampled(name: str, one: TraceInput, sessions: int | None) -> tuple[Iterator[TraceRequest], Callable[[], str]]:
    """The requests to use, and (once they are read) the trace's name with what was sampled.

    `sessions` counts conversations, sub-agents with the session that started them, in the order of the file.
    """
    if sessions is None or one.source.clock != "session":
        return one.requests(), lambda: name
    seen: set[str | None] = set()

    def first() -> Iterator[TraceRequest]:
        for request in one.requests("session"):
            seen.add(request.parent_session or request.session)
            if len(seen) > sessions:
                return
            yield request

    return first(), lambda: f"{name} (sampled: first {min(len(seen), sessions)} sessions)"


def numbers(text: str, kind: Callable[[str], Any], option: str, least: float) -> list[Any]:
    """Numbers of `1,2,...`. Raises `UsageError` for what is none, or below `least`."""
    try:
        found = [kind(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or min(found) < least:
        raise UsageError(f"{option} {text!r} is not a list of numbers from {least:g} up, for example 4,8")
    return found


def run_all(lab: Lab, jobs: Sequence[Job], processes: int) -> list[dict[str, Any]]:
    """Rows of all jobs, with a bar on stderr over those that are not finished."""
    todo = len(lab.missing(jobs))
    if todo < len(jobs):
        click.echo(f"{len(jobs) - todo} of {len(jobs)} cells were finished before", err=True)
    with bar(todo) as step:
        return lab.run(jobs, processes, step)


@contextmanager
def bar(total: int) -> Iterator[Callable[[], None]]:
    """A bar on stderr, where that is a terminal."""
    columns = (TextColumn("cells"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task("", total=total)
        yield lambda: progress.advance(task)


def deliver(
    what: str, result: dict[str, Any], store_url: str | None, as_json: bool, show: Callable[[Console, dict[str, Any]], None]
) -> None:
    """Print the result, and store its rows where told to."""
    if as_json:
        click.echo(json.dumps(result, allow_nan=False))
    else:
        show(plain_console(), result)
    if store_url is not None:
        click.echo(f"stored as {store_rows(Settings.from_env(store=store_url).store, what, result['rows'])}", err=True)


def finish(inputs: Sequence[tuple[str, TraceInput]]) -> None:
    """Exit with 2 where something could not be read, unless told to skip that."""
    for _, one in inputs:
        one.finish()
