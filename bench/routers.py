"""The routers' experiment: every router on real and generated loads, at three loads, on three fleets, over seeds.

Run it with `python -m bench.routers`. Nothing is left out: every cell is in the rows, and `summary` names the cells in which kvtide's
router does worse.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import numpy as np
from scipy.stats import t

from analytics.fleet.generator import TenantSpec, generate
from analytics.fleet.lab import BOUND, router_table
from analytics.fleet.routers import ROUTERS, RouterSpec
from analytics.fleet.scenarios import LOOPS, MIXED
from analytics.fleet.workload import Workload, take
from ingest.sources import read_trace
from kvtide.emulation import workload_from_trace

TRACES = Path(__file__).parent.parent.parent / "shared" / "traces"
WEIGHTS = (0.1, 0.3, 0.5, 0.6, 0.7, 0.8, 0.9)
CONVERSATION_LIKE = (
    TenantSpec("c", 1, heads=1, head_blocks=1, turns=2.2, think_s=90, user_tokens=5000, user_sigma=1.1, output_tokens=350,
               max_prompt_tokens=126_000),
)  # fmt: skip
AGENT_LIKE = tuple(
    TenantSpec(name, 1, heads=3, head_blocks=head, turns=turns, think_s=30, user_tokens=1200, user_sigma=1.0, output_tokens=600,
               max_prompt_tokens=400_000)
    for name, head, turns in (("a", 20, 40), ("b", 10, 4))
)  # fmt: skip


def field_loads() -> dict[str, Workload]:
    """The six loads of the experiment: two generated mixes and four real traces (read from the folder beside the checkout).

    WEKA: 100 sessions, drawn with seed 0 from those of the first 12,000 requests, in blocks of 512 tokens (every eighth hash, which commits
    to the seven before it). RAGPulse: re-cut into blocks of 64 tokens. None has tenants. Cost: some seconds.
    """
    weka = workload_from_trace(read_trace(TRACES / "weka-claude-code" / "traces_710.tar.zst", "weka", limit=12_000), "weka")
    chosen = np.random.default_rng(0).choice(len(weka.sessions), 100, replace=False)
    rag = read_trace(TRACES / "ragpulse" / "0_trace.jsonl", "ragpulse", block_size=64)
    return {
        "mixed": generate(MIXED, minutes=25, requests_per_s=6, block_size=64, seed=100),
        "loops": generate(LOOPS, minutes=25, requests_per_s=6, block_size=64, seed=100),
        "ragpulse": workload_from_trace(rag, "ragpulse"),
        **{name: mooncake(name) for name in ("synthetic", "conversation")},
        "weka": take(coarser(weka, 8), np.flatnonzero(np.isin(weka.session, chosen))),
    }


def tuning_loads() -> dict[str, Workload]:
    """The loads that kvtide's router was chosen on: generated, none of them in the experiment."""
    return {
        "conv_t": generate(CONVERSATION_LIKE, minutes=60, requests_per_s=3, block_size=512, seed=5),
        "agent_t": generate(AGENT_LIKE, minutes=60, requests_per_s=1.2, block_size=512, seed=6),
        "mixed_t": generate(MIXED, minutes=25, requests_per_s=6, block_size=64, seed=7),
        "loops_t": generate(LOOPS, minutes=25, requests_per_s=6, block_size=64, seed=7),
    }


def mooncake(name: str) -> Workload:
    """One of the Mooncake FAST'25 traces that are here whole."""
    return workload_from_trace(read_trace(TRACES / "mooncake" / f"{name}_trace.jsonl.zst", "mooncake"), name)


def coarser(workload: Workload, factor: int) -> Workload:
    """The same load in blocks `factor` times as long; what is left of a chain past its last long block is dropped."""
    lengths = np.diff(workload.offsets) // factor
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    first = np.repeat(workload.offsets[:-1] - offsets[:-1] * factor, lengths)
    where = first + (np.arange(offsets[-1]) + 1) * factor - 1
    return replace(workload, block_size=workload.block_size * factor, offsets=offsets, hashes=workload.hashes[where])


def all_routers() -> list[RouterSpec]:
    """Every router with its defaults, and weighted_sum over its weight."""
    return [RouterSpec(name) for name in ROUTERS if name != "weighted_sum"] + [RouterSpec("weighted_sum", {"w": w}) for w in WEIGHTS]


Cells = dict[tuple[str, int, float], dict[str, dict[str, float]]]


def by_cell(rows: Iterable[dict[str, Any]]) -> Cells:
    """Mean over the seeds of every figure, by (workload, instances, load) and router."""
    sums: dict[Any, dict[str, list[dict[str, float]]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        sums[row["workload"], row["instances"], row["load"]][row["router"]].append(row)
    figures = ("ttft_p50_s", "ttft_p99_s", "ttft_mean_s", "hit_ratio_tokens")
    return {
        cell: {name: {f: float(np.mean([row[f] for row in seeds])) for f in figures} for name, seeds in routers.items()}
        for cell, routers in sums.items()
    }


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """kvtide's router beside the others, in every reading.

    `best_single`: the other router whose mean P99 over all cells is least (and, apart, whose geometric mean is), with the ratio kvtide / it
    of P99 and mean TTFT, each with a 95 % interval over the seeds (Student's t over per-seed ratios). `worse_cells`: where kvtide's P99 or
    mean, averaged over the seeds, exceeds 1.05 x that router's. `best_of_all`: the same against whichever other router is best in each
    cell, chosen afterwards for each cell and figure. `bound` is the shared-KV row in the same terms. `best_w` is the weight of weighted_sum
    with the least mean TTFT, by workload (geometric mean over its cells).
    """
    cells = by_cell(rows)
    others = [name for name in next(iter(cells.values())) if name not in ("kvtide", BOUND)]
    arithmetic = min(others, key=lambda name: float(np.mean([cell[name]["ttft_p99_s"] for cell in cells.values()])))
    geometric = min(others, key=lambda name: float(np.mean([np.log(cell[name]["ttft_p99_s"]) for cell in cells.values()])))
    return {
        "cells": len(cells),
        "best_single": _against(rows, cells, arithmetic),
        "best_single_geometric": _against(rows, cells, geometric),
        "best_of_all": {
            **{f"{figure}_geometric_ratio": _geometric(cells, "kvtide", others, figure) for figure in ("ttft_p99_s", "ttft_mean_s")},
            **{f"bound_{figure}_geometric_ratio": _geometric(cells, BOUND, others, figure) for figure in ("ttft_p99_s", "ttft_mean_s")},
            "worse_cells": _worse(cells, others),
        },
        "best_w": _best_weights(cells),
    }


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    """Every cell, averaged over seeds: TTFT in s of kvtide, of the best single other router, of each cell's best other and the bound."""
    cells = by_cell(rows)
    single = summary(rows)["best_single"]["router"]
    four = f"kvtide | {single} | best other | bound"
    head = f"| load | n | share | P99: {four} | mean: {four} | hits: kvtide | bound |"
    lines = [head, "|---|" + "---|" * 12]
    for (workload, instances, load), cell in cells.items():
        others = {name: figures for name, figures in cell.items() if name not in ("kvtide", BOUND)}
        parts = [workload, str(instances), f"{load:g}"]
        for figure in ("ttft_p99_s", "ttft_mean_s"):
            best = min(others, key=lambda name: others[name][figure])  # noqa: B023 - used at once
            parts += [
                f"{cell['kvtide'][figure]:.3g}",
                f"{cell[single][figure]:.3g}",
                f"{cell[best][figure]:.3g} {best}",
                f"{cell[BOUND][figure]:.3g}",
            ]
        parts += [f"{cell[name]['hit_ratio_tokens']:.3f}" for name in ("kvtide", BOUND)]
        lines.append("| " + " | ".join(parts) + " |")
    return "\n".join(lines)


def ranking(rows: Sequence[dict[str, Any]]) -> str:
    """Every router over all cells: mean of P99 and of mean TTFT, and both as geometric mean over kvtide's; the least P99 first."""
    cells = by_cell(rows)
    lines = ["| router | mean of P99, s | mean of means, s | P99 / kvtide's | mean / kvtide's |", "|---|---|---|---|---|"]
    found = []
    for name in next(iter(cells.values())):
        p99, mean = (float(np.mean([c[name][f] for c in cells.values()])) for f in ("ttft_p99_s", "ttft_mean_s"))
        ratios = [_geometric(cells, name, ["kvtide"], f) for f in ("ttft_p99_s", "ttft_mean_s")]
        found.append((p99, f"| {name} | {p99:.1f} | {mean:.1f} | {ratios[0]:.2f} | {ratios[1]:.2f} |"))
    return "\n".join([*lines, *(line for _, line in sorted(found))])


def _against(rows: Sequence[dict[str, Any]], cells: Cells, other: str) -> dict[str, Any]:
    out: dict[str, Any] = {"router": other}
    per_seed = {seed: by_cell(row for row in rows if row["seed"] == seed) for seed in sorted({row["seed"] for row in rows})}
    for figure in ("ttft_p99_s", "ttft_mean_s"):
        for name, mean in (("mean", _mean_ratio), ("geometric", lambda c, f, o: _geometric(c, "kvtide", [o], f))):
            out[f"{figure}_{name}_ratio"] = mean(cells, figure, other)
            out[f"{figure}_{name}_ratio_95"] = _interval([mean(one, figure, other) for one in per_seed.values()])
    out["worse_cells"] = _worse(cells, [other])
    return out


def _mean_ratio(cells: Cells, figure: str, other: str) -> float:
    return float(np.mean([c["kvtide"][figure] for c in cells.values()]) / np.mean([c[other][figure] for c in cells.values()]))


def _geometric(cells: Cells, name: str, others: Sequence[str], figure: str) -> float:
    return float(np.exp(np.mean([np.log(c[name][figure] / min(c[o][figure] for o in others)) for c in cells.values()])))


def _interval(values: Sequence[float]) -> list[float]:
    half = t.ppf(0.975, len(values) - 1) * np.std(values, ddof=1) / np.sqrt(len(values)) if len(values) > 1 else np.nan
    return [float(np.mean(values) - half), float(np.mean(values) + half)]


def _worse(cells: Cells, others: Sequence[str], tolerance: float = 1.05) -> list[str]:
    found = []
    for (workload, instances, load), cell in cells.items():
        for figure in ("ttft_p99_s", "ttft_mean_s"):
            best = min(others, key=lambda name: cell[name][figure])  # noqa: B023 - used at once
            ratio = cell["kvtide"][figure] / cell[best][figure]
            if ratio > tolerance:
                found.append(f"{workload} n={instances} load={load} {figure}: {ratio:.2f} x {best}")
    return found


def _best_weights(cells: Cells) -> dict[str, str]:
    weights = [RouterSpec("weighted_sum", {"w": w}).label for w in WEIGHTS]
    out = {}
    for workload in dict.fromkeys(name for name, _, _ in cells):
        mine = {cell: figures for cell, figures in cells.items() if cell[0] == workload}
        out[workload] = min(weights, key=lambda w: float(np.mean([np.log(c[w]["ttft_mean_s"]) for c in mine.values()])))  # noqa: B023
    return out


@click.command()
@click.option("--seeds", default=5, show_default=True)
@click.option("--processes", default=2, show_default=True)
@click.option("--tuning", is_flag=True, help="The loads that the router was chosen on.")
@click.option("--rows", "path", type=click.Path(path_type=Path), default=Path("routers.jsonl"), show_default=True, help="Where rows go.")
@click.option("--tables", is_flag=True, help="Print every cell and every router as Markdown, too.")
@click.option("--again", is_flag=True, help="Only sum up the rows that are there.")
def main(seeds: int, processes: int, tuning: bool, path: Path, tables: bool, again: bool) -> None:
    """Run the experiment (a quarter of an hour of processor time) and print the summary as JSON."""
    if not again:
        with path.open("w") as out:
            for seed in range(seeds):
                loads = tuning_loads() if tuning else field_loads()
                for row in router_table(loads, all_routers(), seeds=[seed], processes=processes, bound=True):
                    out.write(json.dumps(row) + "\n")
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    click.echo(json.dumps(summary(rows), indent=2))
    if tables:
        click.echo(f"\n{ranking(rows)}\n\n{markdown(rows)}")


if __name__ == "__main__":
    main()
