"""Hit ratio against capacity, exact at every capacity, weighted in blocks, tokens or prefill cost.

An LRU of c blocks serves exactly the blocks whose stack distance is below c. Along a chain the distance rises from block to block under
leaf-first order, so what is served is a leading run at every capacity, which is what an engine's prefix cache can use.
Source: Mattson et al., IBM Systems Journal 9(2), 1970.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numba as nb
import numpy as np
import numpy.typing as npt

from analytics.reuse.chains import ChainColumns, tail_tokens
from analytics.reuse.run_exact import Runs

F64 = npt.NDArray[np.float64]
I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]
Weight = Literal["blocks", "tokens", "cost"]
WEIGHTS: tuple[Weight, ...] = ("blocks", "tokens", "cost")


@dataclass(frozen=True)
class Curve:
    """Hits accumulated over stack distance, and what they are a share of.

    `distances` float64[k] rise; `blocks`, `tokens` and `token_context` float64[k] are the hits at all distances up to and including each.
    The totals count everything asked for: block references, prompt tokens, and token_context of whole prompts.
    """

    distances: F64
    blocks: F64
    tokens: F64
    token_context: F64
    total_blocks: float
    total_tokens: float
    total_token_context: float

    def hit_ratio(self, capacities: Sequence[int] | I64, weight: Weight = "blocks", cost: tuple[float, float] | None = None) -> F64:
        """Hit ratio of an LRU of each capacity (blocks), 0 to 1, never falling with capacity.

        `cost` is (a seconds/token, b seconds/token^2) of the prefill cost, for weight `cost`. Raises `ValueError` for an unknown weight or
        a missing cost. Cost: O(log k) a capacity.
        """
        hits, total = self._weighted(weight, cost)
        below = np.searchsorted(self.distances, np.asarray(capacities, np.float64), side="left")
        return np.concatenate([[0.0], hits])[below] / total if total else np.zeros(below.shape)

    def ideal_ratio(self, weight: Weight = "blocks", cost: tuple[float, float] | None = None) -> float:
        """Hit ratio of an infinite cache; input-only, since blocks that decode adds are not in the chains."""
        hits, total = self._weighted(weight, cost)
        return float(hits[-1] / total) if total and hits.size else 0.0

    def _weighted(self, weight: Weight, cost: tuple[float, float] | None) -> tuple[F64, float]:
        if weight == "blocks":
            return self.blocks, self.total_blocks
        if weight == "tokens":
            return self.tokens, self.total_tokens
        if weight != "cost":
            raise ValueError(f"weight {weight!r} is unknown; choose one of {', '.join(WEIGHTS)}")
        if cost is None:
            raise ValueError("weight 'cost' needs the cost model's (a, b)")
        a, b = cost
        return a * self.tokens + b * self.token_context, a * self.total_tokens + b * self.total_token_context


class DistanceHistogram:
    """Exact histogram of stack distances in blocks, tokens and token_context, filled run by run.

    A run takes two writes an array whatever its length, as if every block held `block_size` tokens; blocks that do not (a prompt's tail,
    components of unequal length) are corrected one by one. Memory: four int64 a block of the greatest distance.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._counts = np.zeros((4, 1 << 10), np.int64)
        self._blocks = self._tokens = self._squares = 0

    def add(self, runs: Runs, chains: ChainColumns) -> None:
        """Count the runs of one `touch` of `chains`. Raises `ValueError` for chains of another block size."""
        if chains.block_size != self._block_size:
            raise ValueError(f"chains have block_size {chains.block_size}, this histogram {self._block_size}")
        self._reach(int(np.max(runs.distance + runs.length, initial=0)) + 1)
        self._blocks += chains.blocks
        self._tokens += int(chains.prompt_tokens.sum())
        self._squares += int((chains.prompt_tokens**2).sum())
        starts = chains.offsets
        where = (runs.request, runs.position, runs.length, runs.distance)
        _count_runs(self._counts, *where[1:])
        if chains.block_tokens is None:
            tails = tail_tokens(np.diff(starts), chains.prompt_tokens, self._block_size)
            _correct_tails(self._counts, *where, starts, tails, self._block_size)
        else:
            ends = np.concatenate([[0], np.cumsum(chains.block_tokens, dtype=np.int64)])
            _correct_blocks(self._counts, *where, starts, ends, self._block_size)

    def curve(self) -> Curve:
        """The curve of what has been added so far. Cost: O(greatest distance)."""
        steps, shifts, tokens, doubled = self._counts
        size, blocks = self._block_size, np.cumsum(steps)
        positions = np.arange(blocks.size) * blocks + np.cumsum(shifts)
        tokens = tokens + size * blocks
        context = (doubled + size * size * (2 * positions + blocks)) / 2
        seen = np.flatnonzero(blocks)
        hits = [np.cumsum(values[seen]).astype(np.float64) for values in (blocks, tokens, context)]
        return Curve(seen.astype(np.float64), hits[0], hits[1], hits[2], float(self._blocks), float(self._tokens), self._squares / 2)

    def _reach(self, size: int) -> None:
        have = self._counts.shape[1]
        if size > have:
            self._counts = np.concatenate([self._counts, np.zeros((4, 2 * size - have), np.int64)], axis=1)


@nb.njit(cache=True, nogil=True)
def _count_runs(counts: I64, position: I32, length: I32, distance: I64) -> None:
    """Blocks by difference, and positions by difference of position - distance, which is constant along a run."""
    for run in range(length.size):
        at, end = distance[run], distance[run] + length[run]
        if at >= 0:
            counts[0, at] += 1
            counts[0, end] -= 1
            counts[1, at] += position[run] - at
            counts[1, end] -= position[run] - at


@nb.njit(cache=True, nogil=True)
def _correct(counts: I64, at: int, start: int, end: int, position: int, block_size: int) -> None:
    """Make the block at distance `at` hold tokens [start, end) of its prompt in place of [position, position + 1) * block_size."""
    lo, hi = position * block_size, (position + 1) * block_size
    counts[2, at] += (end - start) - (hi - lo)
    counts[3, at] += (end * end - start * start) - (hi * hi - lo * lo)


@nb.njit(cache=True, nogil=True)
def _correct_tails(counts: I64, request: I32, position: I32, length: I32, distance: I64, starts: I64, tails: I64, block_size: int) -> None:
    for run in range(request.size):
        row, last = request[run], position[run] + length[run] - 1
        if distance[run] >= 0 and last == starts[row + 1] - starts[row] - 1:
            start = last * block_size
            _correct(counts, distance[run] + length[run] - 1, start, start + tails[row], last, block_size)


@nb.njit(cache=True, nogil=True)
def _correct_blocks(counts: I64, request: I32, position: I32, length: I32, distance: I64, starts: I64, ends: I64, block_size: int) -> None:
    """`ends` int64[m+1]: tokens up to each block, over all requests."""
    for run in range(request.size):
        if distance[run] >= 0:
            origin = starts[request[run]]
            for i in range(length[run]):
                block = origin + position[run] + i
                start, end = ends[block] - ends[origin], ends[block + 1] - ends[origin]
                _correct(counts, distance[run] + i, start, end, position[run] + i, block_size)
