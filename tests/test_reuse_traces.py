"""The run-level stack beside per-block Olken on every public trace that names blocks, whole: distances and reuse times, block by block."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from analytics.reuse.chains import ChainBuilder, ChainColumns, densify
from analytics.reuse.olken import OlkenTree
from analytics.reuse.run_exact import Runs, RunStack
from ingest.errors import InputError
from ingest.sources import read_trace

TRACES = Path(__file__).parent.parent.parent / "shared" / "traces"
PART_BLOCKS = 2_000_000


@dataclass(frozen=True)
class Trace:
    """A trace and how much of it must be there; `bad_lines` are those that the reader cannot read (a head's last line is cut)."""

    path: str
    format: str
    requests: int
    blocks: int
    distinct: int
    bad_lines: int = 0


SMALL = [
    Trace("mooncake/conversation_trace.jsonl.zst", "mooncake", 12_031, 288_500, 182_790),
    Trace("mooncake/synthetic_trace.jsonl.zst", "mooncake", 3_993, 121_877, 43_924),
    Trace("mooncake/mooncake_trace_1000.jsonl.zst", "mooncake", 1_000, 19_686, 12_207),
    Trace("mooncake/toolagent.head.jsonl", "mooncake", 45, 0, 0, bad_lines=1),
    Trace("mooncake/mooncake_fast25.head.jsonl", "mooncake", 45, 0, 0, bad_lines=1),
    Trace("ragpulse/0_trace.jsonl", "ragpulse", 7_106, 71_583, 58_727),
    Trace("dynamo/pi_request_trace.jsonl.gz", "dynamo", 17, 4_163, 1_183),
    Trace("qwen-bailian-head/qwen_traceA_first7.jsonl", "qwen", 7, 0, 0),
]
WEKA = Trace("weka-claude-code/traces_710.tar.zst", "weka", 49_334, 94_310_647, 3_450_959)


def load(trace: Trace) -> ChainColumns:
    """Columns of a trace in time order; what the reader cannot read must be just what is known to be bad."""
    if not (TRACES / trace.path).exists():
        pytest.skip(f"the public trace {trace.path} is not beside the checkout")
    bad: list[InputError] = []
    builder: ChainBuilder | None = None
    for request in read_trace(TRACES / trace.path, trace.format, on_bad=bad.append):
        builder = builder or ChainBuilder(request.block_size)
        builder.append(round(request.arrived_at_s * 1e6), request.chain, request.prompt_tokens, request.block_tokens)
    assert builder is not None and len(bad) == trace.bad_lines
    return builder.build()


def parts(chains: ChainColumns, blocks: int = PART_BLOCKS) -> Iterator[tuple[ChainColumns, slice]]:
    """Consecutive requests of about so many blocks, and where their blocks lie in the whole."""
    start = 0
    while start < chains.requests:
        stop = max(int(np.searchsorted(chains.offsets, chains.offsets[start] + blocks)), start + 1)
        part = chains.slice(start, stop)
        yield part, slice(int(chains.offsets[start]), int(chains.offsets[start]) + part.blocks)
        start = stop


def check(trace: Trace, limits: list[int | None], chains: ChainColumns, part_blocks: int = PART_BLOCKS) -> None:
    """Compare stacks of all limits, with and without merging, with Olken's tree part by part."""
    ids, distinct = densify(chains.hashes)
    assert chains.requests == trace.requests
    if trace.blocks:
        assert (chains.blocks, distinct) == (trace.blocks, trace.distinct)
    tree = OlkenTree(distinct, int(np.diff(chains.offsets).max()))
    remember_all = (16 * chains.blocks).bit_length()
    stacks = [RunStack(limit, merge=merge, filter_bits=remember_all) for limit in limits for merge in (True, False)]
    for part, where in parts(chains, part_blocks):
        distances, ages = tree.touch(part.ts_us, part.offsets, ids[where])
        for stack in stacks:
            check_runs(stack.touch(part.ts_us, part.offsets, part.hashes), distances, ages, stack.max_depth_blocks)
    for stack in stacks:
        assert stack.depth_blocks == min(distinct, stack.max_depth_blocks or distinct)


def check_runs(runs: Runs, distances: npt.NDArray[np.int64], ages: npt.NDArray[np.int64], limit: int | None) -> None:
    """Below the limit all agree; at or above it a block reads as cold, and in its run it stands first and is perhaps beyond."""
    by_run = runs.per_block()
    if limit is None:
        assert np.array_equal(by_run[0], distances) and np.array_equal(by_run[1], ages)
        return
    cut = distances >= limit
    assert np.array_equal(by_run[0], np.where(cut, -1, distances)) and np.array_equal(by_run[1], np.where(cut, -1, ages))
    starts = np.cumsum(runs.length, dtype=np.int64) - runs.length
    begins = np.flatnonzero(cut & ~np.concatenate([[False], cut[:-1]]))
    assert np.isin(begins, starts).all()
    cut_of_run = np.add.reduceat(cut, starts, dtype=np.int64) if starts.size else starts
    assert np.all(runs.beyond >= cut_of_run) and np.all(runs.beyond <= runs.length)


@pytest.mark.traces
@pytest.mark.parametrize("trace", SMALL, ids=lambda trace: Path(trace.path).name)
def test_distances_and_ages_of_a_whole_trace_equal_olkens(trace: Trace) -> None:
    chains = load(trace)
    longest, distinct = int(np.diff(chains.offsets).max()), densify(chains.hashes)[1]
    limits = [None, 1, longest, max(distinct // 10, 1), max(distinct // 2, 1), distinct]
    check(trace, limits, chains, part_blocks=max(chains.blocks // 7, 1))


@pytest.mark.traces
@pytest.mark.parametrize("name", ["conversation", "synthetic"])
def test_mooncake_in_blocks_of_16_tokens_equals_olken(name: str) -> None:
    trace = next(t for t in SMALL if name in t.path)
    chains = load(trace)
    pieces = np.arange(32, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    hashes = (chains.hashes[:, None] * np.uint64(0xD1B54A32D192ED03) + pieces).ravel()
    fine = ChainColumns(chains.ts_us, 32 * chains.offsets, hashes, chains.prompt_tokens, 16)
    finer = Trace(trace.path, trace.format, trace.requests, 32 * trace.blocks, 32 * trace.distinct)
    check(finer, [None, 32 * 10_000 + 5], fine)


@pytest.mark.traces
@pytest.mark.slow
def test_the_whole_of_weka_equals_olken() -> None:
    """94 million blocks, with and without merging; about a minute and 2 GB, since distances are held for one part at a time."""
    check(WEKA, [None], load(WEKA))
