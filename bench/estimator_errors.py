"""Errors of all estimators beside the exact curve, as the Markdown tables of docs/estimators.md: `python -m bench.estimator_errors`.

The error of a draw is the mean absolute error of the block hit ratio over 40 capacities, evenly spaced in logarithm: for LRU from a
thousandth of the distinct blocks to all of them, for other policies from 1,000 blocks. Shown are mean and worst of several draws.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from analytics.estimators import ESTIMATORS
from analytics.policies import POLICIES
from analytics.reuse.chains import ChainBuilder, ChainColumns, densify
from ingest.sources import read_trace

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]

TRACES = Path(__file__).parents[1] / ".." / "shared" / "traces"
POINTS = 40
# label, estimator, parameters, number of draws
LRU: list[tuple[str, str, dict[str, Any], int]] = [
    ("aet", "aet", {}, 1),
    ("aet, 10 % of touches", "aet", {"rate": 0.1}, 8),
    ("statstack, 10 % of touches", "statstack", {}, 8),
    ("statstack, all touches", "statstack", {"rate": 1.0}, 1),
    ("counter_stacks", "counter_stacks", {}, 8),
    ("shards 10 %", "shards", {"rate": 0.1}, 8),
    ("shards 10 %, raw", "shards", {"rate": 0.1, "adj": False}, 8),
    ("shards 1 %", "shards", {"rate": 0.01}, 8),
    ("shards_fixed 8192", "shards_fixed", {"s_max": 8192}, 8),
    ("shards_hot 10 %, 4096 hot", "shards_hot", {"rate": 0.1}, 8),
    ("shards_hot 1 %, 4096 hot", "shards_hot", {"rate": 0.01}, 8),
    ("shards_hot 1 %, 4096 hot of the whole stream", "shards_hot", {"rate": 0.01, "head": 1.0}, 8),
    ("shards_hot 1 %, no hot block", "shards_hot", {"rate": 0.01, "hot": 0}, 8),
    ("lashards, 1024 keys", "lashards", {}, 8),
    ("flows 10 %", "flows", {"rate": 0.1}, 8),
]
MINISIM = ("lru", "fifo", "s3fifo", "sieve", "arc", "lfu", "2q", "belady")
FORMS: dict[str, dict[str, bool]] = {
    "as published": {"control": False, "spread": False},
    "with control": {"control": True, "spread": False},
    "with both": {},
}
KOSMO = ("lfu", "2q", "fifo")


def mooncake(name: str) -> ChainColumns:
    """A Mooncake FAST'25 trace in blocks of 512 tokens."""
    return _read(TRACES / "mooncake" / f"{name}_trace.jsonl.zst", "mooncake", 512)


def ragpulse() -> ChainColumns:
    """RAGPulse, a component a block."""
    return _read(TRACES / "ragpulse" / "0_trace.jsonl", "ragpulse", 1)


def weka(requests: int = 600) -> ChainColumns:
    """First requests of the Claude Code sessions, in blocks of 64 tokens."""
    return _read(TRACES / "weka-claude-code" / "traces_710.tar.zst", "weka", 64, requests)


def zipf(distinct: int = 571_000, count: int = 5_000_000, exponent: float = 1.0, seed: int = 1) -> ChainColumns:
    """Independent references, each a request of one block."""
    cumulated = np.cumsum(1 / np.arange(1, distinct + 1) ** exponent)
    keys = np.searchsorted(cumulated / cumulated[-1], np.random.default_rng(seed).random(count)).astype(np.uint64)
    return ChainColumns(np.arange(count), np.arange(count + 1), keys, np.ones(count, np.int64), 1)


STREAMS: dict[str, Callable[[], ChainColumns]] = {
    "conversation": lambda: mooncake("conversation"),
    "synthetic": lambda: mooncake("synthetic"),
    "ragpulse": ragpulse,
    "weka": weka,
    "zipf": zipf,
}


def _read(path: Path, format: str, block_size: int, limit: int | None = None) -> ChainColumns:
    builder = ChainBuilder(block_size)
    for request in read_trace([str(path)], format, limit=limit):
        builder.append(round(request.arrived_at_s * 1e6), request.chain, request.prompt_tokens, request.block_tokens)
    return builder.build()


def _grid(smallest: float, distinct: int) -> I64:
    return np.unique(np.geomspace(max(smallest, 1), distinct, POINTS).round().astype(np.int64))


def _errors(chains: ChainColumns, name: str, given: dict[str, Any], truth: F64, sizes: I64, draws: int) -> str:
    """Mean and worst error of an estimator over seeds, or its one error where it draws nothing."""
    seeds: list[dict[str, int]] = [{"seed": seed} for seed in range(draws)] if draws > 1 else [{}]
    errors = [float(np.abs(ESTIMATORS[name](chains, **given, **seed).hit_ratio(sizes) - truth).mean()) for seed in seeds]
    return f"{np.mean(errors):.4f}" + (f" ({max(errors):.4f})" if draws > 1 else "")


def lru_rows(chains: ChainColumns) -> dict[str, str]:
    """Errors for LRU by label; those of `flows`, whose capacity holds tokens, are beside `weighted`."""
    distinct = np.unique(chains.hashes).size
    sizes = _grid(distinct / 1000, distinct)
    exact = {name: ESTIMATORS[name](chains).hit_ratio(sizes) for name in ("run_exact", "weighted")}
    return {
        label: _errors(chains, name, given, exact["weighted" if name == "flows" else "run_exact"], sizes, draws)
        for label, name, given, draws in LRU
    }


def policy_rows(chains: ChainColumns, draws: int) -> dict[str, str]:
    """Errors of `minisim` at 10 % and of `kosmo` beside full simulation, by label."""
    ids, distinct = densify(chains.hashes)
    sizes, rows = _grid(1000, distinct), {}
    for policy in MINISIM:
        truth = np.array([POLICIES[policy](ids, distinct, int(size)).mean() for size in sizes])
        for form, given in FORMS.items():
            rows[f"minisim {policy}, {form}"] = _errors(chains, "minisim", {"policy": policy, **given}, truth, sizes, draws)
        if policy in KOSMO:
            rows[f"kosmo {policy}"] = _errors(chains, "kosmo", {"policy": policy}, truth, sizes, 2)
    return rows


def main(names: list[str]) -> None:
    """Print one table of two columns a stream."""
    for name in names or list(STREAMS):
        chains = STREAMS[name]()
        print(f"\n{name}: {chains.blocks:,} references, {np.unique(chains.hashes).size:,} distinct\n\n| estimator | error |\n|---|---|")
        for rows in (lru_rows(chains), policy_rows(chains, 2 if name == "zipf" else 8)):
            for label, error in rows.items():
                print(f"| {label} | {error} |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
