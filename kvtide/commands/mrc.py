"""`kvtide mrc`: hit ratio against capacity of a trace, by any estimator, weighted, drawn, and beside the exact curve."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from analytics.curve import WEIGHTS, Curve
from analytics.estimators import ESTIMATORS, SAMPLED, parameters
from ingest.errors import UsageError
from kvtide import curves
from kvtide.curves import Compared, TraceChains, Weighing
from kvtide.mrcplot import GIB, WEIGHED, Line, Plot, capacities_drawn, plot_format, write_plot
from kvtide.prefill_cost import parse_cost, prefill_cost_option
from kvtide.tracefiles import TraceInput, clock_note, plain_console, plain_table, trace_options

if TYPE_CHECKING:
    from analytics.bands import Band

WIDTH = 100  # columns that a table may take
_DEFAULT_POINTS = 20
_BAND_BLOCKS = 20_000_000  # up to so many a band, which takes 33 estimates, is a matter of seconds
_MOST_LINES = 24
_ALL = "all"
# Kinds of estimators that are of another cache than run_exact's.
_OTHER_CACHES = {"sized": "counted capacity in tokens", "policy": "went block by block in forward order"}
_KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a word"}


@click.command()
@trace_options
@click.option("--estimator", type=click.Choice(list(ESTIMATORS)), default="run_exact", show_default=True, help="How the curve is found.")
@click.option("--param", "-p", "params", multiple=True, metavar="NAME=VALUE", help="Parameter of the estimator, for example rate=0.01.")
@click.option("--weight", type=click.Choice(WEIGHTS), default="blocks", show_default=True, help="What hits count: cost is prefill seconds.")
@prefill_cost_option
@click.option("--capacities", metavar="N,N,...", help="Capacities in blocks, rising.")
@click.option(
    "--points", "--bins", type=click.IntRange(min=2),
    help=f"That many capacities, spaced evenly in logarithm.  [default: {_DEFAULT_POINTS}]",
)  # fmt: skip
@click.option("--block-bytes", type=click.FloatRange(min=0, min_open=True), metavar="BYTES", help="KV of one block: shows GiB as well.")
@click.option(
    "--plot", metavar="FILE", type=click.Path(dir_okay=False), help="Draw the curves into FILE.png, or FILE.html (one page, no network)."
)
@click.option(
    "--band/--no-band", "wants_band", default=None,
    help=f"95 % band of a sampled estimator; 33 estimates.  [default: up to {_BAND_BLOCKS // 10**6} M blocks]",
)  # fmt: skip
@click.option(
    "--compare", is_flag=False, flag_value=_ALL, metavar="[NAME,...]",
    help="Error and speed of all estimators (or those named) beside run_exact. Write it behind PATH.",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def command(
    estimator: str, params: tuple[str, ...], weight: Any, prefill_cost: str, capacities: str | None, points: int | None,
    block_bytes: float | None, plot: str | None, wants_band: bool | None, compare: str | None, as_json: bool, **options: Any,
) -> None:  # fmt: skip
    """Hit ratio against capacity of an LRU prefix cache (leaf first), for the trace as a whole and for each tenant by itself.

    With several tenants the whole is one pool that all of them share, none of them seeing another's blocks.

    \b
    What is a cache of 10,000 blocks worth, in prompt tokens?
      kvtide mrc trace.jsonl -f mooncake --weight tokens --capacities 1000,10000,100000
    Seconds of prefill saved, drawn, with GiB beside blocks (512 tokens of 160 KiB each):
      kvtide mrc trace.jsonl -f mooncake --weight cost --block-bytes 83886080 --plot curve.html
    How good and how fast is a 1 % sample?
      kvtide mrc trace.jsonl -f mooncake --estimator shards_hot -p rate=0.01 --compare run_exact,aet
    """
    wanted = None if capacities is None else parse_capacities(capacities)
    if wanted is not None and points is not None:
        raise UsageError("give --capacities or --points, not both")
    given, by = parse_parameters(estimator, params), Weighing(weight, parse_cost(prefill_cost))
    compared = None if compare is None else parse_compare(compare, estimator, given)
    if plot is not None:
        plot_format(plot)
    if wants_band and estimator not in SAMPLED:
        raise UsageError(f"{estimator} draws no sample, so it has no band; those that do: {', '.join(SAMPLED)}")
    trace = TraceInput(**options)
    if not trace.source.has_blocks:
        raise UsageError(f"{trace.source.name} traces have no block hashes, so no curve can be made of them")
    work = Work(curves.collect(trace.requests()), estimator, given, by)
    result = work.result(wanted, points or _DEFAULT_POINTS, wants_band, compared)
    result = {"trace": trace.name, **result, "bad_records": trace.bad_records}
    if block_bytes is not None:
        result |= {"block_bytes": block_bytes, "capacities_gib": [size * block_bytes / GIB for size in result["capacities"]]}
    if plot is not None:
        result["plot"] = str(write_plot(plot, work.plot(trace.name, block_bytes)))
    if as_json:
        click.echo(json.dumps(result, allow_nan=False))
    else:
        _print(result, work, clock_note(trace.source))
    trace.finish()


# ---------------------------------------------------------------- what was typed


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


def parse_compare(text: str, estimator: str, given: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Estimators to compare with their parameters, in the registry's order: those named, `run_exact`, and the one of --estimator as given.

    Raises `UsageError` for a name that is none.
    """
    named = list(ESTIMATORS) if text == _ALL else text.split(",")
    for name in named:
        if name not in ESTIMATORS:
            raise UsageError(f"--compare {name!r} is no estimator; there are {', '.join(ESTIMATORS)} (write --compare behind PATH)")
    asked = {name: curves.with_defaults(name, {}) for name in ESTIMATORS if name in {*named, "run_exact", estimator}}
    return asked | {estimator: curves.with_defaults(estimator, given)}


def _value(text: str, type_: type) -> Any:
    if type_ is bool and text not in ("true", "false"):
        raise ValueError(text)
    return text == "true" if type_ is bool else type_(text)


# ---------------------------------------------------------------- what is worked out


class Work:
    """The curves of one run of the command: `result` works them out and gives the JSON document, `plot` what is drawn."""

    def __init__(self, trace: TraceChains, estimator: str, given: dict[str, Any], by: Weighing) -> None:
        self.trace, self.estimator, self.given, self.by = trace, estimator, given, by
        self.pool = trace.pool()
        self.curve, self.seconds = curves.timed(partial(ESTIMATORS[estimator], **given), self.pool)
        self.tenants: dict[str, Curve] = {}
        self.band: tuple[list[int], Band] | None = None
        self.compared: list[Compared] = []

    def result(
        self, wanted: list[int] | None, points: int, wants_band: bool | None, compared: dict[str, dict[str, Any]] | None
    ) -> dict[str, Any]:
        """Curves of the pool and of each tenant at capacities, the band, and the comparison."""
        sizes = wanted or curves.spaced(self.curve, points)
        out: dict[str, Any] = {
            "estimator": self.estimator,
            "parameters": self.given,
            "requests": self.pool.requests,
            "blocks": self.pool.blocks,
            "block_size": self.pool.block_size,
            "blocks_per_second": self.pool.blocks / self.seconds,
            "weight": self.by.weight,
            "prefill_cost": {"a_s": self.by.cost[0], "b_s": self.by.cost[1]},
            "capacities": sizes,
            **self._ratios(self.curve, sizes),
            "tenants": self._by_tenant(sizes),
            "band": self._band(sizes, wants_band),
        }
        return out | ({} if compared is None else {"compare": self._compare(compared)})

    def _ratios(self, curve: Curve, sizes: list[int]) -> dict[str, Any]:
        """Hit ratios at each capacity and of an infinite cache, in every weight; knee and cliffs in the one asked for."""
        ideal = {weight: curve.ideal_ratio(weight, self.by.cost) for weight in WEIGHTS}
        at = {f"hit_ratio_{weight}": curve.hit_ratio(sizes, weight, self.by.cost).tolist() for weight in WEIGHTS}
        return {**at, "ideal": ideal, **curves.shape(curve, self.by)}

    def _by_tenant(self, sizes: list[int]) -> list[dict[str, Any]]:
        """Each tenant's curve were a cache of that capacity its own."""
        rows = []
        for name in self.trace.names:
            own = self.trace.of(name)
            self.tenants[name] = self.curve if len(self.trace.names) == 1 else ESTIMATORS[self.estimator](own, **self.given)
            counts = {"tenant": name, "assigned": self.trace.assigned, "requests": own.requests, "blocks": own.blocks}
            rows.append({**counts, **self._ratios(self.tenants[name], sizes)})
        return rows

    def _band(self, sizes: list[int], wants: bool | None) -> dict[str, Any] | None:
        """The band at the capacities of the table; kept at those of a plot too, since more of them cost nothing."""
        if self.estimator not in SAMPLED or wants is False or (wants is None and self.pool.blocks > _BAND_BLOCKS):
            return None
        every = sorted({*sizes, *self._drawn()})
        given = curves.with_defaults(self.estimator, self.given)
        found = curves.band(self.estimator, given, self.pool, self.curve, every, self.by)
        self.band = every, found
        at = np.searchsorted(every, sizes)
        low, high = ([value if np.isfinite(value) else None for value in edge[at].tolist()] for edge in (found.low, found.high))
        return {"level": curves.BAND_LEVEL, "shards": curves.BAND_SHARDS, "low": low, "high": high}

    def _compare(self, compared: dict[str, dict[str, Any]]) -> dict[str, Any]:
        exact = (self.curve, self.seconds) if self.estimator == "run_exact" else curves.timed(ESTIMATORS["run_exact"], self.pool)
        with _steps(len(compared)) as step:
            grid, self.compared = curves.compare(self.pool, compared, exact, self.by, step)
        return {"capacities": grid, "weight": self.by.weight, "estimators": [_compared_json(row) for row in self.compared]}

    def _drawn(self) -> list[int]:
        return capacities_drawn(curves.distinct_blocks(self.curve))

    def plot(self, name: str, block_bytes: float | None) -> Plot:
        """The pool's curve first, then each tenant's (the largest ones), or those of the compared estimators where there are any."""
        sizes, several = self._drawn(), len(self.tenants) > 1
        first = "pool" if several else self.estimator
        others = {row.name: row.curve for row in self.compared if row.curve is not None and row.name != self.estimator}
        if not self.compared and several:
            largest = sorted(self.tenants, key=lambda tenant: -self.tenants[tenant].total_blocks)[: _MOST_LINES - 1]
            others = {tenant + " (assigned)" * self.trace.assigned: self.tenants[tenant] for tenant in sorted(largest)}
        at = np.array(sizes, np.float64)
        edges: dict[str, Any] = {}
        if self.band is not None:
            drawn = np.searchsorted(self.band[0], sizes)
            edges = {"low": self.band[1].low[drawn], "high": self.band[1].high[drawn]}
        lines = [Line(first, at, self.by.ratio(self.curve, sizes), **edges)]
        lines += [Line(label, at, self.by.ratio(curve, sizes)) for label, curve in others.items()]
        shape = curves.shape(self.curve, self.by)
        knee = shape["knee_blocks"]
        return Plot(
            title=f"{_short(Path(name).name, 60)}: hit ratio against capacity, {self.estimator}",
            weight=self.by.weight,
            block_size=self.pool.block_size,
            lines=lines,
            ideal=self.curve.ideal_ratio(self.by.weight, self.by.cost),
            knee=(knee, float(self.by.ratio(self.curve, [knee])[0])) if knee else None,
            cliffs=[(cliff["start_blocks"], cliff["end_blocks"]) for cliff in shape["cliffs"]],
            block_bytes=block_bytes,
        )


def _compared_json(row: Compared) -> dict[str, Any]:
    figures = ("mean_error", "max_error", "max_error_at_blocks", "blocks_per_second", "speed_ratio")
    words = {"estimator": row.name, "kind": row.kind, "policy": row.policy, "parameters": row.parameters}
    return {**words, **{name: None if row.failed else getattr(row, name) for name in figures}, "failed": row.failed}


@contextmanager
def _steps(total: int) -> Iterator[Callable[[str], None]]:
    """A bar on stderr, where that is a terminal, that names what is being measured."""
    columns = (TextColumn("comparing"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task("", total=total)
        done = iter(range(total))
        yield lambda name: bar.update(task, description=name, completed=next(done))


# ---------------------------------------------------------------- what is printed


def _print(result: dict[str, Any], work: Work, note: str | None) -> None:
    console = plain_console()
    size = f"{result['requests']:,} requests, {result['blocks']:,} blocks of {result['block_size']} tokens"
    console.print(f"{result['trace']}: {size}", markup=False)
    given = "".join(f" {name}={value}" for name, value in result["parameters"].items())
    console.print(f"{result['estimator']}{given}: {result['blocks_per_second'] / 1e6:,.1f} M blocks/s", markup=False)
    if note:
        console.print(f"note: {note}", markup=False)
    if work.trace.assigned:
        console.print("note: tenants were assigned by kvtide, the trace names none", markup=False)
    _print_curves(console, result)
    _print_band(console, result)
    _print_shape(console, result)
    if "compare" in result:
        _print_compared(console, result["compare"])
    if "plot" in result:
        console.print(f"plot: {result['plot']}", markup=False)


def _print_curves(console: Console, result: dict[str, Any]) -> None:
    """One table, or several below one another where the tenants do not fit beside each other."""
    weight, several = result["weight"], len(result["tenants"]) > 1
    rows = [result, *result["tenants"]] if several else [result]
    columns = [
        (_short(row.get("tenant", "pool" if several else "hit_ratio"), 30), [*row[f"hit_ratio_{weight}"], row["ideal"][weight]])
        for row in rows
    ]
    if result["band"]:
        columns[1:1] = [(edge, [*result["band"][edge], None]) for edge in ("low", "high")]
    sizes = [*(f"{size:,}" for size in result["capacities"]), "infinite"]
    places = [("capacity_blocks", sizes)]
    if "capacities_gib" in result:
        places.append(("GiB", [*map(_gib, result["capacities_gib"]), ""]))
    room = min(WIDTH, console.width) - sum(2 + max(map(len, [name, *cells])) for name, cells in places)
    for i, part in enumerate(_parts(columns, room)):
        title = f"hit ratio in {weight} ({WEIGHED[weight]}){', continued' if i else ''}"
        table = plain_table(*(name for name, _ in places), *(name for name, _ in part))
        for at in range(len(sizes)):
            table.add_row(*(cells[at] for _, cells in places), *(_ratio(values[at]) for _, values in part))
        console.print(title, table, markup=False)


def _parts(columns: list[tuple[str, list[float | None]]], room: int) -> Iterator[list[tuple[str, list[float | None]]]]:
    """Columns cut into stretches that are at most `room` wide, one column at least."""
    part: list[tuple[str, list[float | None]]] = []
    used = 0
    for column in columns:
        width = 2 + max(len(column[0]), 6)
        if part and used + width > room:
            yield part
            part, used = [], 0
        part.append(column)
        used += width
    yield part


def _print_band(console: Console, result: dict[str, Any]) -> None:
    """What a reader must know of the band, if there is one."""
    if not result["band"]:
        return
    known = [size for size, low in zip(result["capacities"], result["band"]["low"], strict=True) if low is not None]
    if len(known) < len(result["capacities"]):
        console.print(
            f"low, high: 95 % band{f' from {known[0]:,} blocks on' if known else ''}; smaller caches hold too little of the sample"
        )
    if result["estimator"] != "shards_hot":
        console.print("note: this band does not know what few hot blocks beside the sample carry; that of shards_hot does", markup=False)


def _print_shape(console: Console, result: dict[str, Any]) -> None:
    if result["knee_blocks"]:
        console.print(f"knee at {result['knee_blocks']:,} blocks: beyond it a block brings less than the mean block does", markup=False)
    for cliff in result["cliffs"]:
        below = f"up to {100 * cliff['gap_ratio']:.1f} points below a straight rise"
        console.print(f"cliff from {cliff['start_blocks']:,.0f} to {cliff['end_blocks']:,.0f} blocks: {below}", markup=False)


def _print_compared(console: Console, compared: dict[str, Any]) -> None:
    grid = compared["capacities"]
    title = f"error of the hit ratio in {compared['weight']} against run_exact, {len(grid)} capacities, {grid[0]:,} to {grid[-1]:,} blocks"
    names = ("estimator", "kind", "policy", "mean_error", "max_error", "at_blocks", "M blocks/s", "x run_exact")
    table = plain_table(*names)
    rows = compared["estimators"]
    for row in rows:
        if row["failed"]:
            table.add_row(row["estimator"], row["kind"], row["policy"], *["-"] * 5)
            continue
        speed = (f"{row['blocks_per_second'] / 1e6:,.2f}", f"{row['speed_ratio']:.3g}")
        errors = (f"{row['mean_error']:.5f}", f"{row['max_error']:.5f}", f"{row['max_error_at_blocks']:,}")
        table.add_row(row["estimator"], row["kind"], row["policy"], *errors, *speed)
    console.print(title, table, markup=False)
    for row in rows:
        if row["failed"]:
            console.print(f"{row['estimator']} gives no curve of this trace: {row['failed']}", markup=False)
    for kind, how in _OTHER_CACHES.items():
        if those := [row["estimator"] for row in rows if row["kind"] == kind]:
            console.print(f"note: {' and '.join(those)} {how}, so not all of the distance is error", markup=False)


def _gib(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def _short(text: str, width: int) -> str:
    """The text, its middle left out where it is too wide."""
    return text if len(text) <= width else f"{text[: width // 2 - 1]}...{text[-(width // 2 - 2) :]}"
