"""From weighted points to a curve: what a sampled or modelled estimator knows is some references, each at a distance with a weight.

Two ways to make a sample stand for the whole. `adj` (SHARDS-adj) puts what the weights miss of the whole at distance 0: right where the
deviation is a hot block that fell in or out of the sample, since hot blocks have small distances. Raw scales all weights to the whole:
right where there is no hot head. Source: Waldspurger et al., SHARDS, FAST 2015.
"""

from __future__ import annotations

from dataclasses import dataclass

import numba as nb
import numpy as np
import numpy.typing as npt

from analytics.curve import Curve
from analytics.reuse.chains import ChainColumns, tail_tokens

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Sample:
    """References that were tracked, first touches included.

    `blocks` int64[k] rise and index the hashes · `distances` float64[k] in capacity units, below 0 where never seen before ·
    `weights` float64[k], how many references each stands for.
    """

    blocks: I64
    distances: F64
    weights: F64

    def curve(self, chains: ChainColumns, adj: bool, sure: npt.NDArray[np.bool_] | None = None) -> Curve:
        """Curve of the whole from this sample of `chains`; raw scales all but the references that are `sure` to be tracked.

        Cost: O(k log k) and one pass over the requests.
        """
        values = np.vstack([np.ones(self.blocks.size), *block_values(chains, self.blocks)])
        values *= self.weights
        whole, seen = covered(chains), values.sum(axis=1)
        if not adj:
            certain = values[:, sure].sum(axis=1) if sure is not None else np.zeros(3)
            scale = np.divide(whole - certain, seen - certain, out=np.ones(3), where=seen > certain)[:, None]
            values *= scale if sure is None else np.where(sure, 1.0, scale)
        reused = self.distances >= 0
        distances, hits = self.distances[reused], values[:, reused]
        if adj and distances.size:  # where nothing came back, nothing says that there is a hot head
            distances = np.concatenate([[0.0], distances])
            hits = np.concatenate([(whole - seen)[:, None], hits], axis=1)
        return accumulate(chains, distances, hits)


def accumulate(chains: ChainColumns, distances: F64, hits: F64) -> Curve:
    """Curve of `hits` float64[3, k] (blocks, tokens, token_context) at `distances` float64[k] in any order.

    Negative hits are corrections: the sums are held between 0 and the whole, and never fall. Cost: O(k log k).
    """
    named, squares, asked, asked_squares = _totals(chains)
    whole = np.array([float(chains.blocks), float(named), squares / 2])
    ranked, sums = np.empty(distances.size), np.empty((3, distances.size))
    n = _accumulate(np.argsort(distances), distances, hits, whole, ranked, sums)
    blocks, tokens, context = sums[:, :n].copy()
    return Curve(ranked[:n].copy(), blocks, tokens, context, float(chains.blocks), float(asked), asked_squares / 2)


@nb.njit(cache=True, nogil=True)
def _accumulate(order: I64, distances: F64, hits: F64, whole: F64, ranked: F64, sums: F64) -> int:
    """Sums up to each distinct distance, in rising order, into `ranked` and `sums`; how many there are."""
    n, running, reached = 0, np.zeros(3), np.zeros(3)
    for i in range(order.size):
        at = order[i]
        if i > 0 and distances[at] != ranked[n]:
            n += 1
        ranked[n] = distances[at]
        for row in range(3):
            running[row] += hits[row, at]
            sums[row, n] = running[row]
    n += order.size > 0
    for i in range(n):
        for row in range(3):
            reached[row] = max(reached[row], min(sums[row, i], whole[row]))
            sums[row, i] = reached[row]
    return n


def block_values(chains: ChainColumns, blocks: I64) -> tuple[F64, F64]:
    """Tokens and token_context of the block references at the given indices, float64[k] each. Cost: O(k + requests)."""
    request = request_of(chains.offsets, blocks)
    origin = chains.offsets[request]
    if chains.block_tokens is not None:
        ends = np.concatenate([[0], np.cumsum(chains.block_tokens, dtype=np.int64)])
        start, tokens = ends[blocks] - ends[origin], chains.block_tokens[blocks].astype(np.int64)
    else:
        start, lengths = (blocks - origin) * chains.block_size, chains.offsets[request + 1] - origin
        tails = tail_tokens(lengths, chains.prompt_tokens[request], chains.block_size)
        tokens = np.where(blocks - origin == lengths - 1, tails, chains.block_size)
    return tokens.astype(np.float64), tokens * (start + tokens / 2)


@nb.njit(cache=True, nogil=True)
def request_of(offsets: I64, blocks: I64) -> I64:
    """Index of the request of every reference; `blocks` int64[k] rise. Cost: O(k + requests)."""
    out, request = np.empty(blocks.size, np.int64), 0
    for i in range(blocks.size):
        while offsets[request + 1] <= blocks[i]:
            request += 1
        out[i] = request
    return out


def block_sizes(chains: ChainColumns) -> I64:
    """Tokens of every block reference, int64[m]."""
    if chains.block_tokens is not None:
        return chains.block_tokens.astype(np.int64)
    sizes, lengths = np.full(chains.blocks, chains.block_size, np.int64), np.diff(chains.offsets)
    filled = lengths > 0
    sizes[chains.offsets[1:][filled] - 1] = tail_tokens(lengths, chains.prompt_tokens, chains.block_size)[filled]
    return sizes


def covered(chains: ChainColumns) -> F64:
    """Blocks, tokens and token_context that the chains name, float64[3]: less than the prompts where chains leave out their tails."""
    named, squares, _, _ = _totals(chains)
    return np.array([float(chains.blocks), float(named), squares / 2])


def _totals(chains: ChainColumns) -> tuple[int, int, int, int]:
    """Sums over the requests: tokens that chains name, their squares, prompt tokens, their squares. Cost: O(requests)."""
    if chains.block_tokens is None:
        return _sums(chains.offsets, chains.prompt_tokens, chains.block_size)
    ends = np.concatenate([[0], np.cumsum(chains.block_tokens, dtype=np.int64)])[chains.offsets]
    named, prompts = np.diff(ends), chains.prompt_tokens
    return int(named.sum()), int((named**2).sum()), int(prompts.sum()), int((prompts**2).sum())


@nb.njit(cache=True, nogil=True)
def _sums(offsets: I64, prompts: I64, block_size: int) -> tuple[int, int, int, int]:
    tokens = squares = asked = asked_squares = 0
    for request in range(prompts.size):
        blocks = offsets[request + 1] - offsets[request]
        if blocks > 0:
            before = (blocks - 1) * block_size
            named = before + min(max(prompts[request] - before, 1), block_size)
            tokens, squares = tokens + named, squares + named * named
        asked, asked_squares = asked + prompts[request], asked_squares + prompts[request] * prompts[request]
    return tokens, squares, asked, asked_squares
