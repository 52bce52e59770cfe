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
        values = np.vstack([np.ones(self.blocks.size), *block_values(chains, self.blocks)]) * self.weights
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
    order = np.argsort(distances)
    ranked = distances[order]
    last = np.append(ranked[1:] != ranked[:-1], True)[: ranked.size]
    whole = covered(chains)
    sums = np.cumsum(hits[:, order], axis=1)[:, last]
    sums = np.maximum.accumulate(np.clip(sums, 0.0, whole[:, None]), axis=1) if sums.size else sums
    prompts = chains.prompt_tokens.astype(np.float64)
    return Curve(ranked[last], sums[0], sums[1], sums[2], float(chains.blocks), float(prompts.sum()), float((prompts**2).sum() / 2))


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
    lengths = np.diff(chains.offsets)
    if chains.block_tokens is not None:
        ends = np.concatenate([[0], np.cumsum(chains.block_tokens, dtype=np.int64)])[chains.offsets]
        named = np.diff(ends).astype(np.float64)
    else:
        tails = tail_tokens(lengths, chains.prompt_tokens, chains.block_size)
        named = np.where(lengths > 0, (lengths - 1) * chains.block_size + tails, 0).astype(np.float64)
    return np.array([float(chains.blocks), named.sum(), (named**2).sum() / 2])
