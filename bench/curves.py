"""The run-level exact stack beside every reference, on a real trace with 64-token blocks, in one process on the same arrays.

Figures are processor seconds, all warm: each piece of work was compiled and run once on a prefix before. Ratios are of one run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numba as nb
import numpy as np
import numpy.typing as npt

from analytics.estimators import ESTIMATORS
from analytics.policies import POLICIES
from analytics.reuse.chains import ChainBuilder, ChainColumns, densify
from analytics.reuse.olken import OlkenTree
from analytics.reuse.run_exact import Runs, RunStack
from bench.peers import libcachesim, lru_passes
from bench.scaling import scaling
from bench.timing import Took, best_of, machine, peak_rss_bytes, took
from ingest.errors import UsageError
from ingest.sources import read_trace

F64 = npt.NDArray[np.float64]
I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]
U64 = npt.NDArray[np.uint64]

TRACES = Path(__file__).parent.parent.parent / "shared" / "traces"
WEKA = TRACES / "weka-claude-code" / "traces_710.tar.zst"
CONVERSATION = TRACES / "mooncake" / "conversation_trace.jsonl.zst"

PREFIX_BLOCKS = 4_000_000  # libcachesim and the estimators see this much of the trace; the whole takes libcachesim 20 passes of 94 M blocks
SCALING_BLOCKS = 3_000_000
STEP_REQUESTS = 256
SIZES_OF_A_CURVE = 20
GRID_POINTS = 40
SIMULATED = {"minisim": "lru", "kosmo": "lfu"}  # estimators of a policy, and the one that they take where none is named
GOES = {"run_exact": 7, "run_exact_without_merging": 7, "olken": 2, "densify": 2, "copy": 7, "compare": 7}
TARGETS = {"run_exact_over_olken": 20.0, "run_exact_over_libcachesim": 200.0, "merging_over_none": 1.5}


def run(trace: str | None = None, limit: int | None = None) -> dict[str, Any]:
    """Speed, memory and limits of the exact curve on a WEKA archive, or a Mooncake trace where the name holds `.jsonl`.

    All of the trace unless `limit` says less; libcachesim and the estimators see its first `PREFIX_BLOCKS`. `kvtide bench --help` says
    what the keys mean. Raises `UsageError` when the trace or libcachesim is not there. Cost: some 4 GB for the whole archive and 2 minutes.
    """
    path = Path(trace) if trace else WEKA
    if not path.exists():
        raise UsageError(f"{path} is not there; name a WEKA archive with --trace PATH")
    libcachesim()
    chains = load(path, "mooncake" if ".jsonl" in path.name else "weka", limit)
    prefix = first_blocks(chains, PREFIX_BLOCKS)
    result = {"trace": path.name, "block_size": chains.block_size, **machine(), **speeds(chains)}
    peer = beside_libcachesim(prefix)
    result["libcachesim"] = peer
    result["ratios"]["run_exact_over_libcachesim"] = peer["ratio"]
    result["targets"] = TARGETS
    result["estimators"] = whole_curves(prefix)
    copied = {path.name: first_blocks(chains, SCALING_BLOCKS)}
    if CONVERSATION.exists() and path != CONVERSATION:
        copied[CONVERSATION.name] = load(CONVERSATION, "mooncake", limit)
    result["scaling"] = scaling(copied)
    result["memory"]["peak_rss_bytes"] = peak_rss_bytes()
    return result


def load(path: Path = WEKA, format: str = "weka", limit: int | None = None) -> ChainColumns:
    """Columns of a trace in time order. Memory: 8 bytes a block. Raises `InputError` for a file that cannot be read."""
    builder: ChainBuilder | None = None
    for request in read_trace(path, format, limit=limit):
        builder = builder or ChainBuilder(request.block_size)
        builder.append(round(request.arrived_at_s * 1e6), request.chain, request.prompt_tokens, request.block_tokens)
    return (builder or ChainBuilder(1)).build()


def first_blocks(chains: ChainColumns, blocks: int) -> ChainColumns:
    """The leading requests that hold at most so many blocks, one request at least."""
    return chains.slice(0, max(int(np.searchsorted(chains.offsets, blocks, side="right")) - 1, 1))


def speeds(chains: ChainColumns) -> dict[str, Any]:
    """Speeds of the stack with and without merging, of per-block Olken, and of copying and comparing the same bytes; ratios; memory."""
    stacks: dict[str, RunStack] = {}
    runs: dict[str, Runs] = {}

    def touch(name: str, part: ChainColumns = chains) -> None:
        stacks[name] = RunStack(merge=name == "run_exact")
        runs[name] = stacks[name].touch(part.ts_us, part.offsets, part.hashes)

    touch("run_exact", chains.slice(0, 8))
    ids, distinct = densify(chains.hashes)
    best = best_of(
        {name: partial(touch, name) for name in ("run_exact", "run_exact_without_merging")} | _references(chains, ids, distinct), GOES
    )
    return {
        "requests": chains.requests,
        "blocks": chains.blocks,
        "distinct_blocks": distinct,
        "runs_per_request": len(runs["run_exact"]) / max(chains.requests, 1),
        "same_distances": _all_agree(list(runs.values()), chains, ids, distinct),
        "speeds": _table(best, chains.blocks),
        "ratios": _ratios(best),
        "limits": _limits(best, chains.blocks),
        "memory": _memory(stacks, runs["run_exact"], chains, distinct),
    }


def _references(chains: ChainColumns, ids: I32, distinct: int) -> dict[str, Callable[[], object]]:
    """What runs beside the stack, compiled before; the copy goes to memory that has been touched."""
    list(olken_steps(chains.slice(0, 8), ids, distinct))
    target = chains.hashes.copy()
    _differ(target[:8], chains.hashes[:8])
    return {
        "olken": lambda: deque(olken_steps(chains, ids, distinct), maxlen=0),
        "densify": partial(densify, chains.hashes),
        "copy": partial(np.copyto, target, chains.hashes),
        "compare": partial(_differ, target, chains.hashes),
    }


def _table(best: dict[str, Took], blocks: int) -> dict[str, Any]:
    """Speeds, Olken also with the hashing that it needs before."""
    kept = {name: best[name] for name in ("run_exact", "run_exact_without_merging", "olken")}
    kept["olken_with_hashing"] = best["olken"] + best["densify"]
    return {name: {**seconds.speed(blocks), "goes": GOES[name.removesuffix("_with_hashing")]} for name, seconds in kept.items()}


def _ratios(best: dict[str, Took]) -> dict[str, float]:
    """How many times faster the stack is than each reference, by processor seconds; `_user`: by those outside the kernel."""
    ours, olken = best["run_exact"], best["olken"]
    return {
        "run_exact_over_olken": olken.cpu_s / ours.cpu_s,
        "run_exact_over_olken_user": olken.user_s / ours.user_s,
        "run_exact_over_olken_with_hashing": (olken.cpu_s + best["densify"].cpu_s) / ours.cpu_s,
        "merging_over_none": best["run_exact_without_merging"].cpu_s / ours.cpu_s,
        "merging_over_none_user": best["run_exact_without_merging"].user_s / ours.user_s,
    }


def _limits(best: dict[str, Took], blocks: int) -> dict[str, Any]:
    """What the memory allows: the same hash bytes copied (counted once) and compared, into or with an array that is resident already."""
    limits: dict[str, Any] = {}
    for name in ("copy", "compare"):
        limits[name] = {
            "gigabytes_per_second": 8e-9 * blocks / best[name].cpu_s,
            "blocks_per_second": blocks / best[name].cpu_s,
            "run_exact_share": best[name].cpu_s / best["run_exact"].cpu_s,
            "run_exact_share_user": best[name].user_s / best["run_exact"].user_s,
        }
    return limits


def _memory(stacks: dict[str, RunStack], runs: Runs, chains: ChainColumns, distinct: int) -> dict[str, Any]:
    """Bytes held at the end of the trace. Olken: tree and owners by slot, last slot and time by block; answers if all are kept."""
    slots = 2 * distinct + int(np.diff(chains.offsets).max(initial=0)) + 1
    columns = (runs.request, runs.position, runs.length, runs.distance, runs.age_us, runs.beyond)
    return {
        "hashes_bytes": chains.hashes.nbytes,
        "run_exact_bytes": stacks["run_exact"].nbytes,
        "run_exact_without_merging_bytes": stacks["run_exact_without_merging"].nbytes,
        "run_exact_answers_bytes": sum(column.nbytes for column in columns),
        "olken_bytes": 8 * slots + 12 * distinct,
        "olken_ids_bytes": 4 * chains.blocks,
        "olken_answers_bytes": 16 * chains.blocks,
    }


def olken_steps(chains: ChainColumns, ids: I32, distinct: int) -> Iterator[tuple[slice, I64, I64]]:
    """Olken's answers, a step of requests at a time, into the same memory: it then waits for no page to be touched first, in its favour."""
    tree = OlkenTree(distinct, int(np.diff(chains.offsets).max(initial=0)))
    for start in range(0, chains.requests, STEP_REQUESTS):
        part = chains.slice(start, start + STEP_REQUESTS)
        blocks = slice(chains.offsets[start], chains.offsets[start] + part.blocks)
        yield slice(start, start + part.requests), *tree.touch(part.ts_us, part.offsets, ids[blocks])


def _all_agree(answers: list[Runs], chains: ChainColumns, ids: I32, distinct: int) -> bool:
    """Whether distance and age of every block are Olken's."""
    return all(
        np.array_equal(ours, olken)
        for requests, *right in olken_steps(chains, ids, distinct)
        for runs in answers
        for ours, olken in zip(_of(runs, requests).per_block(), right, strict=True)
    )


def _of(runs: Runs, requests: slice) -> Runs:
    """The runs of some requests."""
    rows = slice(*np.searchsorted(runs.request, [requests.start, requests.stop]))
    return Runs(runs.request[rows], runs.position[rows], runs.length[rows], runs.distance[rows], runs.age_us[rows], runs.beyond[rows])


@nb.njit(cache=True, nogil=True)
def _differ(a: U64, b: U64) -> np.uint64:
    bits = np.uint64(0)
    for i in range(a.size):
        bits |= a[i] ^ b[i]
    return bits


def beside_libcachesim(chains: ChainColumns, sizes: int = SIZES_OF_A_CURVE) -> dict[str, Any]:
    """`lru_passes` at log-spaced sizes from a thousandth of the distinct blocks to all of them, and the stack on the same blocks."""
    runs = best_of({"run_exact": lambda: RunStack().touch(chains.ts_us, chains.offsets, chains.hashes)}, {"run_exact": GOES["run_exact"]})
    passes = lru_passes(chains, capacity_grid(densify(chains.hashes)[1], sizes))
    ours = runs["run_exact"].speed(chains.blocks)
    return {"requests": chains.requests, **passes, "run_exact_blocks_per_second": ours["blocks_per_second"],
            "ratio": ours["blocks_per_second"] / passes["blocks_per_second"], **machine()}  # fmt: skip


def capacity_grid(distinct: int, points: int = GRID_POINTS) -> I64:
    """Capacities in blocks, log-spaced from a thousandth of the distinct blocks to all of them; fewer where they round to the same."""
    return np.unique(np.geomspace(max(distinct / 1000, 1), max(distinct, 1), points).round().astype(np.int64))


def whole_curves(chains: ChainColumns) -> dict[str, Any]:
    """Blocks per second of every registered estimator from hashes to curve, compiled before, and its mean error on `capacity_grid`.

    The truth is the exact leaf-first LRU curve; for estimators of a policy, block by block in forward order, full simulation of it.
    """
    ids, distinct = densify(chains.hashes)
    grid = capacity_grid(distinct)
    exact = ESTIMATORS["run_exact"](chains).hit_ratio(grid)
    out: dict[str, Any] = {"blocks": chains.blocks, "grid": f"{grid.size} capacities, log-spaced {grid[0]} to {grid[-1]} blocks"}
    for name, estimate in ESTIMATORS.items():
        estimate(chains.slice(0, 32))
        (seconds, curve), (again, _) = took(partial(estimate, chains)), took(partial(estimate, chains))
        policy = SIMULATED.get(name)
        truth = exact if policy is None else np.array([POLICIES[policy](ids, distinct, size).mean() for size in grid.tolist()])
        out[name] = {
            **seconds.least(again).speed(chains.blocks),
            "mae": float(np.abs(curve.hit_ratio(grid) - truth).mean()),
            "against": f"full {policy} simulation" if policy else "exact LRU",
        }
    return out


def run_exact_beside_olken(path: Path = WEKA, format: str = "weka", limit: int | None = 8000) -> dict[str, Any]:
    """`speeds` of the first `limit` requests of a trace (None: all)."""
    return {"trace": path.name, **speeds(load(path, format, limit))}
