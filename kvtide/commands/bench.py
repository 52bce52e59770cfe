"""`kvtide bench`: measurements beside named references, each a module of `bench/`."""

from __future__ import annotations

import importlib
import json
import sys

import click
from rich.console import Console
from rich.table import Table

# Name -> module of bench/ whose `run(trace, limit) -> dict` measures, and what it measures.
BENCHES = {
    "shard": ("bench.shard", "Shard blocks/s on an agent trace, beside a per-block Fenwick tree."),
    "curves": ("bench.curves", "Exact curve blocks/s on an agent trace, beside per-block Olken on dense ids."),
    "pipeline": ("bench.pipeline", "Records/s through Kafka, Faust and ClickHouse, beside a bare consume-and-decode."),
}


@click.command(epilog="Benches: " + " ".join(f"{name}: {text}" for name, (_, text) in BENCHES.items()))
@click.argument("name", type=click.Choice([*BENCHES, "all"]))
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document on stdout and nothing else there.")
@click.option("--trace", metavar="PATH", help="Trace to measure on, where the bench reads one.")
@click.option("--limit", type=click.IntRange(min=1), help="Use only this many requests.")
def command(name: str, as_json: bool, trace: str | None, limit: int | None) -> None:
    """Measure kvtide beside a reference in the same run; ratios travel between machines, absolute figures do not."""
    results = {}
    for each in BENCHES if name == "all" else [name]:
        module = importlib.import_module(BENCHES[each][0])
        results[each] = module.run(trace=trace, limit=limit)
        print(f"{each}: done", file=sys.stderr)
    if as_json:
        click.echo(json.dumps(results if name == "all" else results[name], indent=2))
        return
    for each, result in results.items():
        table = Table(title=each, show_header=False)
        for key, value in result.items():
            table.add_row(key, f"{value:,.3f}" if isinstance(value, float) else str(value))
        Console().print(table)
