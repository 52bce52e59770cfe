"""Does a block cost the same however long the trace? Copies of one trace behind one another through one stack, as new content or old."""

from __future__ import annotations

from dataclasses import replace
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
    seconds of their `touch` calls (one a copy) on one stack that began empty: the best of `goes`, making the copies not counted.
    `spread_ratio` is the fastest of the three readings over the slowest.
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
    best: dict[int, Took] = {}
    stack_bytes: dict[int, int] = {}
    for _ in range(goes):
        for copies in COPIES:
            seconds, stack = repeated(chains, copies, new_content, depth)
            stack_bytes[copies] = stack.nbytes
            best[copies] = best.get(copies, seconds).least(seconds)
    speeds = {copies: copies * chains.blocks / seconds.cpu_s for copies, seconds in best.items()}
    return {
        "blocks": chains.blocks,
        "new_content": new_content,
        "max_depth_blocks": depth,
        **{f"blocks_per_second_{copies}x": speed for copies, speed in speeds.items()},
        "spread_ratio": max(speeds.values()) / min(speeds.values()),
        **{f"stack_bytes_{copies}x": size for copies, size in stack_bytes.items()},
        "load_average": machine()["load_average"],
    }


def repeated(chains: ChainColumns, copies: int, new_content: bool, depth: int | None) -> tuple[Took, RunStack]:
    """Seconds of `touch` over so many copies of a trace behind one another in time, and the stack at the end."""
    salts = np.random.default_rng(SEED).integers(0, 1 << 63, copies).astype(np.uint64)
    period_us = int(chains.ts_us[-1] - chains.ts_us[0]) + 1
    stack, total = RunStack(depth), Took()
    copy = replace(chains, hashes=np.empty_like(chains.hashes))
    for i in range(copies):
        np.bitwise_xor(chains.hashes, salts[i] if new_content else np.uint64(0), out=copy.hashes)
        ts_us = chains.ts_us + i * period_us
        total += took(partial(stack.touch, ts_us, copy.offsets, copy.hashes))[0]
    return total, stack
