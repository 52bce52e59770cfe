"""Does a block cost the same however long the trace? Copies of one trace behind one another through one stack, as new content or old."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

from analytics.reuse.chains import ChainColumns
from analytics.reuse.run_exact import RunStack
from bench.timing import Took, machine, took

COPIES = (1, 4, 16)
DEPTH_BLOCKS = 1 << 16
SEED = 1


def scaling(traces: dict[str, ChainColumns], goes: int = 7) -> list[dict[str, Any]]:
    """Blocks per second at 1, 4 and 16 copies of each trace: new or old content, with and without a depth limit.

    `new_content`: each copy's hashes are salted, so that the stack grows with every copy. Otherwise the same blocks come back: the state
    stays, but everything is a hit, cut where sessions lie between one another. A reading is the blocks of all copies over the processor
    seconds of their `touch` calls (one a copy) on one stack that began empty. Each call's least over `goes` counts, so that long readings
    find a quiet moment as easily as short ones; making the copies does not count. `spread_ratio` is the fastest reading over the slowest.
    Growing the stack's arrays belongs to a reading: it comes in doublings, so a reading soon after one looks slow and the last four copies,
    where the state is largest, show what a block costs in between.
    """
    rows = []
    for name, chains in traces.items():
        warm_up = chains.slice(0, 8)
        RunStack(DEPTH_BLOCKS).touch(warm_up.ts_us, warm_up.offsets, warm_up.hashes)
        for new_content in (True, False):
            for depth in (None, DEPTH_BLOCKS):
                rows.append({"trace": name, **_row(chains, new_content, depth, goes)})
    return rows


def _row(chains: ChainColumns, new_content: bool, depth: int | None, goes: int) -> dict[str, Any]:
    calls, held = [], [0]
    for _ in range(goes):
        stack = RunStack(depth)
        made = [(go.cpu_s, stack.nbytes) for go in touched(stack, chains, COPIES[-1], new_content)]
        calls.append([cpu_s for cpu_s, _ in made])
        held = [size for _, size in made]
    call_s = np.min(calls, axis=0)
    least_s = np.cumsum(call_s)
    speeds = {copies: copies * chains.blocks / float(least_s[copies - 1]) for copies in COPIES}
    return {
        "blocks": chains.blocks,
        "new_content": new_content,
        "max_depth_blocks": depth,
        **{f"blocks_per_second_{copies}x": speed for copies, speed in speeds.items()},
        "blocks_per_second_of_the_last_4": 4 * chains.blocks / float(call_s[-4:].sum()),
        "spread_ratio": max(speeds.values()) / min(speeds.values()),
        **{f"stack_bytes_{copies}x": held[copies - 1] for copies in COPIES},
        "load_average": machine()["load_average"],
    }


def touched(stack: RunStack, chains: ChainColumns, copies: int, new_content: bool) -> Iterator[Took]:
    """Let `stack` touch so many copies of a trace behind one another in time; the seconds of each."""
    salts = np.random.default_rng(SEED).integers(0, 1 << 63, copies).astype(np.uint64)
    period_us = int(chains.ts_us[-1] - chains.ts_us[0]) + 1
    hashes = np.empty_like(chains.hashes)
    for copy in range(copies):
        np.bitwise_xor(chains.hashes, salts[copy] if new_content else np.uint64(0), out=hashes)
        yield took(partial(stack.touch, chains.ts_us + copy * period_us, chains.offsets, hashes))[0]
