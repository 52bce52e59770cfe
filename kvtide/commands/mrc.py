"""`kvtide mrc`: hit ratio against capacity of a trace, by any estimator, with the estimator's own speed."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import click
import numpy as np

from analytics.curve import Curve
from analytics.estimators import ESTIMATORS, Estimator, parameters
from analytics.reuse.chains import ChainBuilder, ChainColumns
from ingest.chaining import mix64_int, text_hash
from ingest.errors import UsageError
from ingest.sources import TraceRequest
from kvtide.tracefiles import TraceInput, clock_note, plain_console, plain_table, trace_options

_WARM_UP_REQUESTS = 32
_GOES, _ENOUGH_S = 5, 0.5
_DEFAULT_POINTS = 20
_KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a word"}


@click.command()
@trace_options
@click.option("--estimator", type=click.Choice(list(ESTIMATORS)), default="run_exact", show_default=True, help="How the curve is found.")
@click.option("--param", "-p", "params", multiple=True, metavar="NAME=VALUE", help="Parameter of the estimator, for example rate=0.01.")
@click.option("--capacities", metavar="N,N,...", help="Capacities in blocks, rising.")
@click.option(
    "--points", type=click.IntRange(min=2), help=f"That many capacities, spaced evenly in logarithm.  [default: {_DEFAULT_POINTS}]"
)
@click.option("--weight", type=click.Choice(["blocks", "tokens"]), default="blocks", show_default=True, help="What the table counts.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def command(
    estimator: str, params: tuple[str, ...], capacities: str | None, points: int | None, weight: str, as_json: bool, **options: Any
) -> None:
    """Hit ratio against capacity of an LRU prefix cache (leaf first), for the trace as a whole and for each tenant by itself.

    With several tenants the whole is one pool that all of them share, none of them seeing another's blocks.
    """
    wanted = None if capacities is None else parse_capacities(capacities)
    if wanted is not None and points is not None:
        raise UsageError("give --capacities or --points, not both")
    given = parse_parameters(estimator, params)
    estimate = partial(ESTIMATORS[estimator], **given)
    trace = TraceInput(**options)
    if not trace.source.has_blocks:
        raise UsageError(f"{trace.source.name} traces have no block hashes, so no curve can be made of them")
    chains, tenants, assigned = collect(trace.requests())
    curve, seconds = timed(estimate, pooled(chains, tenants))
    sizes = wanted or spaced(curve, points or _DEFAULT_POINTS)
    result = {
        "trace": trace.name,
        "estimator": estimator,
        "parameters": given,
        "requests": chains.requests,
        "blocks": chains.blocks,
        "block_size": chains.block_size,
        "blocks_per_second": chains.blocks / seconds,
        "capacities": sizes,
        **ratios(curve, sizes),
        "tenants": by_tenant(estimate, chains, tenants, sizes, assigned),
        "bad_records": trace.bad_records,
    }
    if as_json:
        click.echo(json.dumps(result))
    else:
        _print(result, weight, clock_note(trace.source))
    trace.finish()


def parse_capacities(text: str) -> list[int]:
    """Capacities of `1000,2000,...`. Raises `UsageError` unless they are rising positive integers."""
    try:
        sizes = [int(part) for part in text.split(",")]
    except ValueError:
        sizes = []
    if not sizes or sizes[0] < 1 or any(b <= a for a, b in zip(sizes, sizes[1:], strict=False)):
        raise UsageError(f"--capacities {text!r} must be rising positive whole numbers of blocks, for example 1000,10000,100000")
    return sizes


def parse_parameters(estimator: str, texts: Iterable[str]) -> dict[str, Any]:
    """Keywords for an estimator from NAME=VALUE texts. Raises `UsageError` for a name or value that does not fit."""
    known, given = parameters(estimator), {}
    for text in texts:
        name, _, value = text.partition("=")
        if name not in known:
            raise UsageError(f"--param {text!r}: {estimator} has {', '.join(known) or 'no parameters'}")
        try:
            given[name] = _value(value, known[name])
        except ValueError as error:
            raise UsageError(f"--param {text!r} is not {_KINDS[known[name]]}") from error
    return given


def _value(text: str, type_: type) -> Any:
    if type_ is bool and text not in ("true", "false"):
        raise ValueError(text)
    return text == "true" if type_ is bool else type_(text)


def collect(requests: Iterable[TraceRequest]) -> tuple[ChainColumns, list[str], bool]:
    """Columns of a trace, each request's tenant, and whether tenants were assigned. Raises `UsageError` where block sizes differ."""
    builder: ChainBuilder | None = None
    tenants: list[str] = []
    assigned, block_size = False, 0
    for request in requests:
        if builder is None:
            builder, block_size = ChainBuilder(request.block_size), request.block_size
        elif request.block_size != block_size:
            raise UsageError(f"the trace mixes blocks of {block_size} and {request.block_size} tokens; give each block size by itself")
        builder.append(round(request.arrived_at_s * 1e6), request.chain, request.prompt_tokens, request.block_tokens)
        tenants.append(request.tenant)
        assigned = assigned or request.tenant_assigned
    if builder is None:
        raise UsageError("no request was read")
    return builder.build(), tenants, assigned


def pooled(chains: ChainColumns, tenants: list[str]) -> ChainColumns:
    """The chains as one pool sees them: hashes of different tenants never meet."""
    names = sorted(set(tenants))
    if len(names) == 1:
        return chains
    keys = {name: mix64_int(text_hash(name)) for name in names}
    salt = np.array([keys[name] for name in tenants], np.uint64)
    return replace(chains, hashes=chains.hashes ^ np.repeat(salt, np.diff(chains.offsets)))


def timed(estimate: Estimator, chains: ChainColumns) -> tuple[Curve, float]:
    """The curve and the seconds it took: compiled before, on arrays in memory, the best of a few goes where one is short.

    Raises `UsageError` where the estimator refuses its parameters.
    """
    try:
        estimate(chains.slice(0, _WARM_UP_REQUESTS))
    except ValueError as error:
        raise UsageError(str(error)) from error
    seconds: list[float] = []
    while len(seconds) < _GOES and sum(seconds) < _ENOUGH_S:
        start = time.perf_counter()
        curve = estimate(chains)
        seconds.append(time.perf_counter() - start)
    return curve, max(min(seconds), 1e-9)


def spaced(curve: Curve, points: int) -> list[int]:
    """Capacities from a thousandth of the distinct blocks to all of them, evenly in logarithm."""
    distinct = max(round(curve.total_blocks * (1 - curve.ideal_ratio())), 2)
    sizes = np.geomspace(max(distinct / 1000, 1), distinct, points).round().astype(np.int64)
    return [int(size) for size in np.unique(sizes)]


def ratios(curve: Curve, sizes: list[int]) -> dict[str, Any]:
    """Hit ratios at each capacity and of an infinite cache."""
    return {
        "hit_ratio_blocks": curve.hit_ratio(sizes, "blocks").tolist(),
        "hit_ratio_tokens": curve.hit_ratio(sizes, "tokens").tolist(),
        "ideal": {"blocks": curve.ideal_ratio("blocks"), "tokens": curve.ideal_ratio("tokens")},
    }


def by_tenant(estimate: Estimator, chains: ChainColumns, tenants: list[str], sizes: list[int], assigned: bool) -> list[dict[str, Any]]:
    """Each tenant's curve were a cache of that capacity its own."""
    of = np.array(tenants)
    rows = []
    for name in sorted(set(tenants)):
        own = chains.select(np.flatnonzero(of == name))
        rows.append(
            {
                "tenant": name,
                "assigned": assigned,
                "requests": own.requests,
                "blocks": own.blocks,
                **ratios(estimate(own), sizes),
            }
        )
    return rows


def _print(result: dict[str, Any], weight: str, note: str | None) -> None:
    console = plain_console()
    console.print(
        f"{result['trace']}: {result['requests']:,} requests, {result['blocks']:,} blocks of {result['block_size']} tokens", markup=False
    )
    console.print(f"{result['estimator']}: {result['blocks_per_second'] / 1e6:,.1f} M blocks/s")
    if note:
        console.print(f"note: {note}", markup=False)
    shown = [result, *result["tenants"]] if len(result["tenants"]) > 1 else [result]
    names = [row.get("tenant", "pool" if len(shown) > 1 else "hit_ratio") + (" (assigned)" if row.get("assigned") else "") for row in shown]
    table = plain_table("capacity_blocks", *names, title=f"hit ratio in {weight}")
    for i, size in enumerate(result["capacities"]):
        table.add_row(f"{size:,}", *(f"{row[f'hit_ratio_{weight}'][i]:.4f}" for row in shown))
    table.add_row("infinite", *(f"{row['ideal'][weight]:.4f}" for row in shown))
    console.print(table)
