"""The run-level exact stack beside per-block references on a real trace with 64-token blocks, in one process on the same arrays."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from analytics.estimators import ESTIMATORS
from analytics.reuse.chains import ChainBuilder, ChainColumns, densify
from analytics.reuse.olken import olken_distances
from analytics.reuse.run_exact import RunStack
from ingest.errors import UsageError
from ingest.sources import read_trace

WEKA = Path(__file__).parent.parent.parent / "shared" / "traces" / "weka-claude-code" / "traces_710.tar.zst"


def run(trace: str | None = None, limit: int | None = None) -> dict[str, Any]:
    """Blocks per second of the run-level stack and of per-block Olken on a WEKA archive; all of it unless `limit` says less.

    Raises `UsageError` when the trace is not there.
    """
    path = Path(trace) if trace else WEKA
    if not path.exists():
        raise UsageError(f"{path} is not there; name a WEKA archive with --trace PATH")
    return run_exact_beside_olken(path, "weka", limit, goes=2)


def load(path: Path = WEKA, format: str = "weka", limit: int | None = None) -> ChainColumns:
    """Columns of a trace in time order. Memory: 8 bytes a block. Raises `InputError` for a file that cannot be read."""
    builder: ChainBuilder | None = None
    for request in read_trace(path, format, limit=limit):
        builder = builder or ChainBuilder(request.block_size)
        builder.append(round(request.arrived_at_s * 1e6), request.chain, request.prompt_tokens, request.block_tokens)
    return (builder or ChainBuilder(1)).build()


def run_exact_beside_olken(path: Path = WEKA, format: str = "weka", limit: int | None = 8000, goes: int = 3) -> dict[str, Any]:
    """Blocks per second of `RunStack.touch` and of per-block Olken on dense ids (dense beforehand, so in the reference's favour).

    Both are compiled before, both start empty, the best of `goes` counts; the distances are compared block by block. `limit` requests of
    the trace are read (None: all).
    """
    chains = load(path, format, limit)
    ids, distinct = densify(chains.hashes)

    def by_run(part: ChainColumns = chains) -> RunStack:
        stack = RunStack()
        stack.touch(part.ts_us, part.offsets, part.hashes)
        return stack

    by_run(chains.slice(0, 8))
    olken_distances(chains.ts_us[:8], chains.offsets[:9], ids, distinct)
    run_s, olken_s = best_s(by_run, goes), best_s(lambda: olken_distances(chains.ts_us, chains.offsets, ids, distinct), goes)
    densify_s = best_s(lambda: densify(chains.hashes), goes)
    runs = RunStack().touch(chains.ts_us, chains.offsets, chains.hashes)
    same = np.array_equal(runs.per_block()[0], olken_distances(chains.ts_us, chains.offsets, ids, distinct)[0])
    return {
        "trace": path.name,
        "requests": chains.requests,
        "blocks": chains.blocks,
        "distinct_blocks": distinct,
        "runs_per_request": len(runs) / max(chains.requests, 1),
        "run_exact_blocks_per_second": chains.blocks / run_s,
        "olken_blocks_per_second": chains.blocks / olken_s,
        "olken_with_hashing_blocks_per_second": chains.blocks / (olken_s + densify_s),
        "ratio": olken_s / run_s,
        "same_distances": bool(same),
    }


def whole_curves(chains: ChainColumns, goes: int = 3) -> dict[str, float]:
    """Blocks per second of every registered estimator from hashes to curve, compiled before."""
    out = {}
    for name, estimate in ESTIMATORS.items():
        estimate(chains.slice(0, 8))
        out[name] = chains.blocks / best_s(lambda estimate=estimate: estimate(chains), goes)  # type: ignore[misc]
    return out


def best_s(work: Callable[[], object], goes: int) -> float:
    """Seconds of the fastest of several goes."""
    seconds = []
    for _ in range(goes):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return min(seconds)
