"""Spatial sampling: a block is in or out for good, by a hash of its own hash, so every touch of a tracked block is seen.

Source: Waldspurger et al., SHARDS, FAST 2015. Hash values have 32 bits (there 24), so ties, which are dropped together, are rare.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numba as nb
import numpy as np
import numpy.typing as npt

from analytics.estimators.points import request_of
from analytics.reuse.chains import ChainColumns

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]
U64 = npt.NDArray[np.uint64]

P = 1 << 32
_CHUNK_BLOCKS = 1 << 18


@dataclass(frozen=True)
class Fold:
    """Leave out one of `count` hash shards of the sampled blocks, for a delete-one-shard jackknife (`analytics.bands`)."""

    index: int
    count: int

    @property
    def share(self) -> float:
        """Share of the blocks that stay."""
        return 1.0 - 1.0 / self.count


def folding(fold: Fold | None) -> tuple[int, int, float]:
    """Index, count and share that stays, as the kernels want them; count 0 leaves nothing out."""
    return (0, 0, 1.0) if fold is None else (fold.index, fold.count, fold.share)


def salt_of(seed: int) -> Any:
    """64 bits that make one draw of the sample out of a seed."""
    return np.uint64(np.random.SeedSequence(seed).generate_state(1, np.uint64)[0])


def threshold_of(rate: float) -> int:
    """Hash value below which a block is sampled. Raises `ValueError` for a rate outside (0, 1]."""
    if not 0.0 < rate <= 1.0:
        raise ValueError(f"rate {rate} must be above 0 and at most 1")
    return max(round(rate * P), 1)


@nb.njit(cache=True, nogil=True, inline="always")
def mixed(key: Any, salt: Any) -> Any:
    """64 well mixed bits of a key under a salt (the finaliser of splitmix64)."""
    x = np.uint64(key) ^ np.uint64(salt)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@nb.njit(cache=True, nogil=True, inline="always")
def value_of(bits: Any) -> Any:
    """Hash value in [0, P) of mixed bits: their upper half."""
    return np.int64(np.uint64(bits) >> np.uint64(32))


@nb.njit(cache=True, nogil=True, inline="always")
def left_out(bits: Any, index: int, count: int) -> bool:
    """Whether the fold leaves out a block of these bits: decided by the lower half, so independent of its value."""
    return count > 0 and np.int64(((np.uint64(bits) & np.uint64(0xFFFFFFFF)) * np.uint64(count)) >> np.uint64(32)) == index


def sampled_blocks(hashes: U64, threshold: int, seed: int, fold: Fold | None) -> I64:
    """Indices of the references whose block is sampled, rising. Cost: one hash a block."""
    index, count, _ = folding(fold)
    kept, salt, found = np.empty(_CHUNK_BLOCKS, np.int32), salt_of(seed), [np.empty(0, np.int64)]
    for start in range(0, hashes.size, _CHUNK_BLOCKS):
        n = _keep(hashes[start : start + _CHUNK_BLOCKS], kept, salt, threshold, index, count)
        found.append(kept[:n].astype(np.int64) + start)
    return np.concatenate(found)


@nb.njit(cache=True, nogil=True)
def _keep(hashes: U64, kept: I32, salt: Any, threshold: int, index: int, count: int) -> int:
    n = 0
    for i in range(hashes.size):
        bits = mixed(hashes[i], salt)
        kept[n] = i
        n += (value_of(bits) < threshold) & (not left_out(bits, index, count))
    return n


def spread_blocks(ids: I32, n_ids: int, rate: float, seed: int) -> I64:
    """Indices of the references to a sample spread evenly over the blocks by how often, then by when they were first asked for; rising.

    `ids` int32[m] in [0, n_ids), numbered by first appearance, as `densify` does. Of every 1/rate blocks in that order one is drawn (their
    number deviates by less than one where 1/rate is no integer), each with probability `rate`. Blocks first asked for together mostly come
    back together, so every popularity and every such run is in the sample by its share, where a hash leaves that to chance.
    Cost: O(m + n_ids log n_ids); it needs the ids of all blocks, which a hash does not.
    Source: one draw a stratum, Cochran, Sampling Techniques, chapter 5.
    """
    stratum = int(np.ceil(1.0 / rate))
    phase = np.repeat(np.random.default_rng(seed).random(-(-n_ids // stratum)), stratum)[:n_ids]
    place = np.arange(n_ids) % stratum
    drawn = np.zeros(n_ids, np.bool_)
    order = np.argsort(-np.bincount(ids, minlength=n_ids), kind="stable")
    drawn[order] = np.floor((place + 1) * rate + phase) > np.floor(place * rate + phase)
    return np.flatnonzero(drawn[ids])


def requests_of(chains: ChainColumns, blocks: I64) -> tuple[I64, I64]:
    """Time and offsets of the requests that the references at `blocks` belong to, those without any left out: (ts_us[n], offsets[n+1])."""
    request = request_of(chains.offsets, blocks)
    first = np.flatnonzero(np.append(True, request[1:] != request[:-1])[: request.size])
    return chains.ts_us[request[first]], np.append(first, blocks.size)
