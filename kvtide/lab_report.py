"""What the lab found, as tables, plots and rows of the store."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from rich.console import Console

from ingest.store import Store
from kvtide.lab import BOUNDS, LabTrace, Row
from kvtide.mrcplot import Line, Plot, write_plot
from kvtide.tracefiles import plain_table

TABLES = {"policies": "lab_policy", "routers": "lab_router", "tiers": "lab_tier"}
NOT_STORED = {"failed"}


def store_rows(url: str, what: str, rows: Sequence[Row]) -> str:
    """Write rows of `policies`, `routers` or `tiers` to their table under one new id, which is returned. Tables are made where missing."""
    made_at_us = time.time_ns() // 1000
    id_ = hashlib.sha256(json.dumps([made_at_us, list(rows)]).encode()).hexdigest()[:16]
    names = [name for name in rows[0] if name not in NOT_STORED]
    columns: dict[str, Any] = {name: [row[name] for row in rows] for name in names}
    columns["id"] = [id_] * len(rows)
    columns["made_at"] = pa.array([made_at_us] * len(rows), pa.timestamp("us", "UTC"))
    with Store.open(url, create=True) as store:
        store.migrate()
        store.insert(TABLES[what], pa.table(columns), f"{TABLES[what]}:{id_}")
    return id_


def print_policies(console: Console, result: dict[str, Any]) -> None:
    """Per trace and form one table of token hit ratios, the best of each capacity starred, then who wins where and by how much."""
    rows, best = result["rows"], {(win["trace"], win["form"], win["capacity_blocks"]): win for win in result["wins"]}
    for trace, form in dict.fromkeys((row["trace"], row["form"]) for row in rows):
        here = [row for row in rows if (row["trace"], row["form"]) == (trace, form)]
        capacities = sorted({row["capacity_blocks"] for row in here})
        title = f"{trace}, {form} form: % of prompt tokens in leading hits (saved prefill s) by capacity in blocks"
        console.print(title, style="bold", markup=False)
        table = plain_table("policy", *(f"{capacity:,}" for capacity in capacities))
        for policy in dict.fromkeys(row["policy"] for row in here):
            cells = {row["capacity_blocks"]: row for row in here if row["policy"] == policy}
            shown = []
            for capacity in capacities:
                won = policy in best.get((trace, form, capacity), {}).get("best", [])
                shown.append(
                    f"{'*' if won else ''}{100 * cells[capacity]['hit_ratio_tokens']:.2f} ({cells[capacity]['saved_prefill_s']:,.0f})"
                )
            table.add_row(policy + (f" ({BOUNDS[policy]})" if policy in BOUNDS else ""), *shown)
        console.print(table)
    for win in result["wins"]:
        console.print(f"best {win['trace']} {win['form']} {win['capacity_blocks']:,}: {_named(win)}", markup=False)
    for one in result["fallbacks"]:
        console.print(f"note: {one['trace']}: {_why_lru(one)}", markup=False)


def _why_lru(one: Row) -> str:
    if one["reasons"]:
        reasons = ", ".join(f"{name.replace('_', ' ')} {100 * share:.0f} %" for name, share in one["reasons"].items())
        return f"{one['policy']} left the choice to LRU at {100 * one['lru_ratio']:.0f} % of the requests ({reasons})"
    return f"{one['policy']} is LRU, since the trace has no {', no '.join(one['absent'])}"


def _named(win: Row) -> str:
    if len(win["best"]) > 3:
        return f"{len(win['best'])} policies alike, {100 * win['hit_ratio_tokens']:.2f} %"
    over = "" if win["over_lru"] is None else f", {100 * win['over_lru']:+.2f} points to lru"
    return f"{', '.join(win['best'])} {100 * win['hit_ratio_tokens']:.2f} %{over}, {100 * win['over_next']:+.2f} to the next"


def print_rows(console: Console, rows: Sequence[Row]) -> None:
    """One table of all rows as they are."""
    table = plain_table(*rows[0])
    for row in rows:
        table.add_row(*(f"{value:.4f}" if isinstance(value, float) else str(value) for value in row.values()))
    console.print(table)


def plot_policies(path: str, held: Sequence[LabTrace], rows: Sequence[Row]) -> list[str]:
    """One picture a trace and form, of token hit ratio against capacity; several get the trace's number and the form in their names."""
    drawn = list(dict.fromkeys((row["trace"], row["form"]) for row in rows))
    out = []
    for number, (trace, form) in enumerate(drawn):
        one = next(one for one in held if one.name == trace)
        here = [row for row in rows if (row["trace"], row["form"]) == (trace, form) and row["capacity_blocks"] > 0]
        lines = [_line(policy, [row for row in here if row["policy"] == policy]) for policy in dict.fromkeys(row["policy"] for row in here)]
        ideal = float(one.tokens.sum() - _first_tokens(one)) / max(float(one.trace.prompt_tokens.sum()), 1.0)
        if not lines:
            continue
        target = Path(path) if len(drawn) == 1 else Path(path).with_stem(f"{Path(path).stem}-{number + 1}-{form}")
        plot = Plot(f"{trace}, {form} form", "tokens", one.chains.block_size, lines, ideal)
        out.append(str(write_plot(str(target), plot)))
    return out


def plot_tiers(path: str, held: LabTrace, rows: Sequence[Row]) -> list[str]:
    """One picture of a trace: token hit ratio against HBM capacity, a line for each DRAM capacity."""
    here = [row for row in rows if row["trace"] == held.name and row["hbm_blocks"] > 0]
    lines = []
    for dram in dict.fromkeys(row["dram_blocks"] for row in here):
        some = [row for row in here if row["dram_blocks"] == dram]
        at, ratio = (np.array([row[name] for row in some], np.float64) for name in ("hbm_blocks", "hit_ratio_tokens"))
        lines.append(Line(f"DRAM {dram:,} blocks", at, ratio))
    if not lines:
        return []
    ideal = float(held.tokens.sum() - _first_tokens(held)) / max(float(held.trace.prompt_tokens.sum()), 1.0)
    return [str(write_plot(path, Plot(f"{held.name}, HBM and DRAM", "tokens", held.chains.block_size, lines, ideal)))]


def _line(policy: str, rows: Sequence[Row]) -> Line:
    at = np.array([row["capacity_blocks"] for row in rows], np.float64)
    return Line(policy, at, np.array([row["hit_ratio_tokens"] for row in rows], np.float64))


def _first_tokens(held: LabTrace) -> float:
    """Tokens of first touches, which no cache serves."""
    return float(held.tokens[np.unique(held.trace.ids, return_index=True)[1]].sum())
