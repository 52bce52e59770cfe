"""`kvtide bench`: measurements beside named references, each a module of `bench/`."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import click
from rich.table import Table

from kvtide.tracefiles import plain_console

# Name -> module of bench/ whose `run(trace, limit) -> dict` measures, and what it measures.
BENCHES = {
    "shard": ("bench.shard", "Shard blocks/s on an agent trace, beside a per-block Fenwick tree."),
    "curves": ("bench.curves", "Exact curve blocks/s on an agent trace, beside Olken, libcachesim and the memory's own speed."),
    "billion": ("bench.billion", "Resident memory over a billion accesses of endless new content, through a stack of bounded depth."),
    "lab": ("bench.lab", "Requests/s of a compiled 16-instance fleet for every router; policies' accesses/s beside libcachesim."),
    "pipeline": ("bench.pipeline", "Records/s through Kafka, Faust and ClickHouse, beside a bare consume-and-decode."),
}

EPILOG = f"""\b
Benches:
{chr(10).join(f"  {name:<9} {text}" for name, (_, text) in BENCHES.items())}
  all       Each of them.

\b
Keys of `curves` and `billion`: *_per_second are of processor seconds (cpu_s; user_s is their part outside the
kernel, so without page faults; wall_s the clock). load_average is the machine's at that point.

\b
Keys of `curves` (one process, one core, compiled and run once before; references in turn with it):
  speeds       from hashes, with and without merging; olken on ids made dense for free; olken_with_hashing.
               Least of so many goes. Olken gives its answers step by step into the same memory, in its favour.
  same_distances  distance and age of every block agree with Olken's, with and without merging.
  ratios       run_exact over each reference by cpu_s, and by user_s; targets are what we hold ourselves to.
  limits       numpy copying, and a loop comparing, the same hashes; run_exact_share is its part of that speed.
  memory       bytes of each structure at the end; *_answers are all distances and ages; peak RSS of the whole process.
  libcachesim  leading blocks only: a curve of 20 sizes is 20 passes, so its blocks/s are those of the sum;
               same_misses: all 20 agree with the stack; run_exact on the same blocks, and the ratio.
  estimators   leading blocks only, hashes to curve; mae over 40 capacities, log-spaced from a thousandth of
               the distinct blocks to all, against what is named.
  scaling      1, 4 and 16 copies of a trace (leading blocks) through one stack, as new content or the same
               again, with and without a depth limit; spread_ratio is the fastest of the three by the slowest.
               Growing arrays is part of a reading; the last 4 copies see the largest state and seldom grow.

\b
Keys of `billion`: readings after 10, 50 and 100 %: RSS and its growth, what the stack holds, and, since the reading
before, speed and share of cold blocks (which costs most, and rises until the sessions have grown); generator apart.
"""


@click.command(epilog=EPILOG)
@click.argument("name", type=click.Choice([*BENCHES, "all"]))
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document on stdout and nothing else there.")
@click.option("--trace", metavar="PATH", help="Trace to measure on, where the bench reads one.")
@click.option("--limit", type=click.IntRange(min=1), help="Use only this many requests.")
def command(name: str, as_json: bool, trace: str | None, limit: int | None) -> None:
    """Measure kvtide beside a reference in the same run; ratios travel between machines, absolute figures do not."""
    results = {}
    for each in BENCHES if name == "all" else [name]:
        module = importlib.import_module(BENCHES[each][0])
        results[each] = module.run(trace=None if name == "all" and each == "billion" else trace, limit=limit)
        print(f"{each}: done", file=sys.stderr)
    if as_json:
        click.echo(json.dumps(results if name == "all" else results[name], indent=2))
        return
    console = plain_console()
    for each, result in results.items():
        for table in tables(each, result):
            console.print(table)


def tables(title: str, result: Mapping[str, Any]) -> list[Table]:
    """A table of the plain values, then one for each value that holds several."""
    plain = {key: value for key, value in result.items() if not isinstance(value, Mapping) and not _rows(value)}
    out = [_two_columns(title, plain)]
    for key, value in result.items():
        if _rows(value):
            out.append(_matrix(f"{title}: {key}", value))
        elif isinstance(value, Mapping):
            named = {name: row for name, row in value.items() if isinstance(row, Mapping)}
            rest = {name: row for name, row in value.items() if name not in named}
            if rest:
                out.append(_two_columns(f"{title}: {key}", rest))
            if named:
                out.append(_matrix(f"{title}: {key}", [{"": name, **row} for name, row in named.items()]))
    return out


def _rows(value: Any) -> bool:
    return isinstance(value, Sequence) and bool(value) and all(isinstance(row, Mapping) for row in value)


def _two_columns(title: str, values: Mapping[str, Any]) -> Table:
    table = Table(title=title, show_header=False)
    for key, value in values.items():
        table.add_row(key, _text(value))
    return table


def _matrix(title: str, rows: Sequence[Mapping[str, Any]]) -> Table:
    names = list(dict.fromkeys(name for row in rows for name in row))
    table = Table(title=title)
    for name in names:
        table.add_column(name.replace("_", " "), justify="left" if isinstance(rows[0].get(name), str) else "right")
    for row in rows:
        table.add_row(*(_text(row.get(name, "")) for name in names))
    return table


def _text(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "none"}[value]
    if isinstance(value, (list, tuple)):
        return " ".join(_text(each) for each in value)
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:,.4g}"
    return f"{value:,}" if isinstance(value, int) else str(value)
