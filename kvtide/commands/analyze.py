"""`kvtide analyze`: what a trace holds, what an infinite prefix cache could serve of it, and its characterisation."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import click
import numpy as np
from rich.console import Console
from rich.text import Text

from analytics.workload import LabelledChains, characterise
from analytics.workload.labels import prefix_tokens
from analytics.workload.measures import ratio
from ingest.errors import UsageError
from kvtide.settings import Settings
from kvtide.tracefiles import TraceInput, clock_note, plain_console, plain_table, trace_options
from kvtide.workload_input import TraceLoad, load
from kvtide.workload_report import store_profile, write_workload_report

# Tenants with a characterisation of their own, the largest ones; all are in `tenants`.
MAX_TENANTS = 20
DEFAULT_COST = "2e-4,2e-8"


@click.command()
@trace_options
@click.option("--report", metavar="FILE.html", type=click.Path(dir_okay=False), help="Write the characterisation as one HTML page.")
@click.option("--store", "store_url", metavar="URL", help="Write the characterisation to table workload_profile of this store.")
@click.option(
    "--prefill-cost",
    metavar="A,B",
    default=DEFAULT_COST,
    show_default=True,
    help="Prefill seconds per token and per token squared, for what is weighted by cost.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def command(as_json: bool, report: str | None, store_url: str | None, prefill_cost: str, **options: Any) -> None:
    """Say what a trace holds: load, blocks, the ideal hit ratio, and when, where and for whom blocks are reused.

    The ideal hit ratio is that of an infinite cache serving the leading run of each prompt that was seen before, tenant by tenant, from
    input blocks only: an engine that also reuses decoded blocks can exceed it.
    """
    cost = parse_cost(prefill_cost)
    trace = TraceInput(**options)
    result = analysis(trace, cost)
    if as_json:
        click.echo(json.dumps(result, allow_nan=False))
    else:
        _print(result, clock_note(trace.source))
    if store_url is not None:
        store_profile(Settings.from_env(store=store_url).store, result)
    if report is not None:
        click.echo(f"report: {write_workload_report(report, result)}", err=True)
    trace.finish()


def analysis(trace: TraceInput, cost: tuple[float, float]) -> dict[str, Any]:
    """The JSON document of a trace: totals, tenants and characterisation. Raises `InputError` where nothing can be read."""
    held = load(trace.requests(), trace.source)
    head = {"trace": trace.name, "format": trace.source.name, "clock": trace.source.clock}
    result = {**head, **totals(held), "bad_records": trace.bad_records, "unsorted_requests": held.unsorted}
    with trace_steps() as step:
        result["characterisation"] = characterise(held.labelled, cost, step=step)
        result["characterisation"]["tenants"] = tenants_apart(held.labelled, cost)
    return result


def parse_cost(text: str) -> tuple[float, float]:
    """(a, b) of `A,B`. Raises `UsageError` unless they are two numbers, neither negative nor both 0."""
    try:
        a, b = (float(part) for part in text.split(","))
    except ValueError:
        a = b = -1.0
    if not (a >= 0 and b >= 0 and 0 < a + b < float("inf")):
        raise UsageError(f"--prefill-cost {text!r} is not A,B in seconds per token and per token squared, for example {DEFAULT_COST}")
    return a, b


def totals(held: TraceLoad) -> dict[str, Any]:
    """Counts of the whole trace and of each tenant. Tenants share no block: the same hash under two tenants is two blocks."""
    labelled, chains = held.labelled, held.labelled.chains
    rows, requests = tenant_rows(labelled), chains.requests
    prompt_tokens = int(chains.prompt_tokens.sum())
    hit_tokens = int(prefix_tokens(chains, labelled.hit_blocks).sum())
    span_s = float(chains.ts_us[-1] - chains.ts_us[0]) / 1e6
    return {
        "requests": requests,
        "blocks": chains.blocks,
        "distinct_blocks": labelled.private[1],
        "block_size": held.block_size,
        "ideal_hit_ratio": ideal(int(labelled.hit_blocks.sum()), chains.blocks, hit_tokens, prompt_tokens) if labelled.has_blocks else None,
        "reported_hit_ratio": ratio(held.reported_hit_tokens, held.reported_prompt_tokens),
        "prompt_tokens": prompt_tokens,
        "output_tokens": held.output_tokens if held.outputs else None,
        "mean_prompt_tokens": ratio(prompt_tokens, requests),
        "mean_output_tokens": ratio(held.output_tokens, held.outputs),
        "span_s": span_s,
        "tenants": rows,
    }


def tenant_rows(labelled: LabelledChains) -> list[dict[str, Any]]:
    """One line a tenant, by name."""
    chains, codes = labelled.chains, labelled.tenant
    ids, distinct = labelled.private
    owner = np.zeros(distinct, np.int32)
    owner[ids] = np.repeat(codes, labelled.lengths)
    count = len(labelled.tenants)
    sums = [
        np.bincount(codes, values, minlength=count).astype(np.int64).tolist()
        for values in (
            np.ones(codes.size),
            labelled.lengths,
            chains.prompt_tokens,
            labelled.hit_blocks,
            prefix_tokens(chains, labelled.hit_blocks),
        )
    ]
    apart = np.bincount(owner, minlength=count).tolist()
    rows = []
    for code in sorted(range(count), key=lambda code: labelled.tenants[code]):
        requests, blocks, prompt_tokens, hit_blocks, hit_tokens = (column[code] for column in sums)
        rows.append(
            {
                "tenant": labelled.tenants[code],
                "assigned": labelled.tenants_assigned,
                "requests": requests,
                "blocks": blocks,
                "distinct_blocks": apart[code],
                "prompt_tokens": prompt_tokens,
                "ideal_hit_ratio": ideal(hit_blocks, blocks, hit_tokens, prompt_tokens) if labelled.has_blocks else None,
            }
        )
    return rows


def ideal(hit_blocks: int, blocks: int, hit_tokens: int, prompt_tokens: int) -> dict[str, float | None]:
    """Hit ratio of an infinite cache that serves leading runs; input blocks only."""
    return {"blocks": ratio(hit_blocks, blocks), "tokens": ratio(hit_tokens, prompt_tokens)}


def tenants_apart(labelled: LabelledChains, cost: tuple[float, float]) -> list[dict[str, Any]]:
    """The characterisation of each of the largest tenants by itself; empty where there is one alone."""
    if len(labelled.tenants) == 1:
        return []
    sizes = np.bincount(labelled.tenant, minlength=len(labelled.tenants))
    largest = np.argsort(-sizes, kind="stable")[:MAX_TENANTS].tolist()
    return [{"tenant": labelled.tenants[code], **characterise(labelled.of_tenant(code), cost)} for code in largest]


@contextmanager
def trace_steps() -> Iterator[Callable[[str], None]]:
    """A line on stderr, where that is a terminal, that says what is being worked out."""
    if not sys.stderr.isatty():
        yield lambda name: None
        return
    with Console(stderr=True).status("looking up") as status:
        yield lambda name: status.update(name.replace("_", " "))


def _print(result: dict[str, Any], note: str | None) -> None:
    console = plain_console()
    for name, value in result.items():
        if name == "ideal_hit_ratio" and value:
            value = f"blocks {_shown(value['blocks'])}  tokens {_shown(value['tokens'])}  (infinite cache, input blocks only)"
        if name not in ("tenants", "characterisation") and value is not None:
            console.print(f"{name:<20}{_shown(value)}", markup=False)
    if note:
        console.print(f"note: {note}", markup=False)
    table = plain_table("tenant", "requests", "blocks", "distinct_blocks", "prompt_tokens", "ideal_blocks", "ideal_tokens")
    for row in result["tenants"]:
        name = f"{row['tenant']} (assigned)" if row["assigned"] else row["tenant"]
        best = row["ideal_hit_ratio"] or {"blocks": None, "tokens": None}
        counts = (row[key] for key in ("requests", "blocks", "distinct_blocks", "prompt_tokens"))
        table.add_row(Text(name), *(_shown(value) for value in (*counts, best["blocks"], best["tokens"])))
    console.print(table)
    console.print("--report FILE.html or --json: reuse in time and place, sessions, capacity needed, templates", markup=False)


def _shown(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:,.4f}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)
