"""libcachesim on the very block stream that the run-level stack saw: its fastest exact path to a curve, and a check that both agree.

The Python package exposes no profiler of stack distances, so an exact curve of n sizes takes n LRU simulations, each one C++ pass over a
trace file (`process_trace`). libcachesim is GPL-3.0-or-later: it is a bench and test tool, imported here alone and only when asked for.
"""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from analytics.reuse.chains import ChainColumns
from analytics.reuse.run_exact import RunStack
from bench.timing import Took, took
from ingest.errors import UsageError

I64 = npt.NDArray[np.int64]
U64 = npt.NDArray[np.uint64]

# One request of the oracleGeneral format, as libCacheSim's documentation gives it.
RECORD = np.dtype([("clock_s", "<u4"), ("obj_id", "<u8"), ("obj_size", "<u4"), ("next_access_vtime", "<i8")])
NEVER = -2
STEP_REQUESTS = 2048
LEAST_POWER = 8
SPARE_POWERS = (0, 1, 2)  # hash tables tried for each size: 2^(log2(size) + this) buckets; the package's default of 2^24 is far slower


def libcachesim() -> Any:
    """The package. Raises `UsageError` with the way to install it where it is not there."""
    try:
        import libcachesim as package
    except ImportError as error:
        raise UsageError("libcachesim is not installed; pip install 'kvtide[bench]' (GPL-3.0-or-later, used by the bench alone)") from error
    return package


def lru_passes(chains: ChainColumns, capacities: I64) -> dict[str, Any]:
    """Blocks per second of the curve at `capacities` by libcachesim, and whether its misses are those that the run-level stack says.

    The stream is each request's blocks leaf first, the order in which the stack touches them. Blocks per second are its length over the
    summed processor seconds of one pass a size, each with its fastest hash table; making the file, the reader and the cache is free.
    """
    package, passes = libcachesim(), []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "stream.oracleGeneral.bin"
        write_stream(path, chains)
        for capacity in capacities.tolist():
            passes.append(_pass(package, path, capacity))
    total_s = sum(seconds.cpu_s for seconds, _ in passes)
    misses = np.array([round(miss_ratio * chains.blocks) for _, miss_ratio in passes])
    return {
        "path": f"{len(passes)} LRU simulations by process_trace (the package exposes no profiler)",
        "version": str(package.__version__),
        "blocks": chains.blocks,
        "capacities": capacities.tolist(),
        "blocks_per_second": chains.blocks / total_s,
        "cpu_s": total_s,
        "wall_s": sum(seconds.wall_s for seconds, _ in passes),
        "blocks_per_second_of_one_size": chains.blocks * len(passes) / total_s,
        "same_misses": bool(np.array_equal(misses, stream_misses(chains, capacities))),
    }


def write_stream(path: Path, chains: ChainColumns) -> None:
    """The block stream, leaf first, as an oracleGeneral file. Cost: 24 bytes a block on the disk, one step of requests in memory."""
    with path.open("wb") as file:
        for start in range(0, chains.requests, STEP_REQUESTS):
            part = chains.slice(start, start + STEP_REQUESTS)
            records = np.zeros(part.blocks, RECORD)
            records["obj_id"], records["obj_size"], records["next_access_vtime"] = leaf_first(part), 1, NEVER
            records.tofile(file)


def leaf_first(chains: ChainColumns) -> U64:
    """Hashes with each chain turned round."""
    lengths = np.diff(chains.offsets)
    return chains.hashes[np.repeat(chains.offsets[:-1] + chains.offsets[1:] - 1, lengths) - np.arange(chains.blocks)]


def stream_misses(chains: ChainColumns, capacities: I64) -> I64:
    """Misses of an LRU of each capacity on the leaf-first stream block by block, from the stack distances at look-up.

    When a block's turn comes, the deeper blocks of its chain have been touched already; all of them lay below it at look-up or were cold.
    So its distance in the stream is that at look-up plus the blocks behind it in its chain.
    """
    runs = RunStack().touch(chains.ts_us, chains.offsets, chains.hashes)
    reused = runs.distance >= 0
    # Distance at look-up rises by one a block along a run, and the blocks behind fall by one: one value a run.
    behind = np.diff(chains.offsets)[runs.request] - 1 - runs.position
    distance, length = (runs.distance + behind)[reused], runs.length[reused]
    return np.array([chains.blocks - length[distance < capacity].sum() for capacity in capacities.tolist()], np.int64)


def _pass(package: Any, path: Path, capacity: int) -> tuple[Took, float]:
    """The fastest pass at one capacity over the hash tables tried, and its miss ratio."""
    passes = []
    for spare in SPARE_POWERS:
        reader = package.TraceReader(str(path), package.TraceType.ORACLE_GENERAL_TRACE)
        cache = package.LRU(capacity, hashpower=max(capacity.bit_length() + spare, LEAST_POWER))
        seconds, (miss_ratio, _) = took(partial(cache.process_trace, reader))
        passes.append((seconds, float(miss_ratio)))
    return min(passes, key=lambda one: one[0].cpu_s)
