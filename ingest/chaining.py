"""Mixing and chaining of 64-bit block hashes: session-local ids become global keys, component ids become chained positions."""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

Hashes = NDArray[np.uint64]

_MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def mix64(values: Hashes) -> Hashes:
    """Bijective scrambling of u64 values, elementwise; a new array. The finaliser of splitmix64 (Steele, Lea, Flood, OOPSLA 2014)."""
    x = values ^ (values >> np.uint64(30))
    x *= np.uint64(_FIRST)
    x ^= x >> np.uint64(27)
    x *= np.uint64(_SECOND)
    x ^= x >> np.uint64(31)
    return x


def mix64_int(value: int) -> int:
    """`mix64` of one integer, taken modulo 2^64."""
    x = value & _MASK
    x = ((x ^ (x >> 30)) * _FIRST) & _MASK
    x = ((x ^ (x >> 27)) * _SECOND) & _MASK
    return x ^ (x >> 31)


def text_hash(text: str) -> int:
    """u64 hash of a name, the same in every run and on every machine (BLAKE2b)."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def scope_key(ids: Hashes, scope: int) -> Hashes:
    """Global keys of ids that are unique only within `scope` (a u64): no two ids of a scope collide, ids of two scopes practically never.

    Cost: one vectorised pass, about 2 ns an id.
    """
    return mix64(ids + np.uint64(scope & _MASK))


def chain_hashes(ids: Hashes) -> Hashes:
    """Chained hashes of content ids: entry i commits to ids 0..i and their order, so it can stand for a block of prefix KV.

    A running sum of scrambled ids, each times an odd weight of its position, scrambled again: chains that differ in one id never agree
    behind it, others practically never. Cost: vectorised, about 10 ns an id.
    """
    positions = np.arange(1, len(ids) + 1, dtype=np.uint64) * np.uint64(GOLDEN)
    weights = mix64(positions) | np.uint64(1)
    return mix64(np.cumsum(mix64(ids + np.uint64(GOLDEN)) * weights, dtype=np.uint64) + positions)


def recut(chain: Hashes, component_tokens: NDArray[np.int32], prompt_tokens: int, block_size: int) -> Hashes:
    """Hashes of fixed-size blocks cut through a chain of unequal components; the last block may be partial.

    `chain` and `component_tokens` describe the components, whose tokens sum to `prompt_tokens`. Two prompts share the hash of a
    block iff every component up to the one holding the block's last token is equal, so a block commits to everything before it.
    Cost: vectorised, O(blocks * log(components)).
    """
    blocks = -(-prompt_tokens // block_size)
    ends = np.minimum(np.arange(1, blocks + 1, dtype=np.int64) * block_size, prompt_tokens)
    last = np.searchsorted(np.cumsum(component_tokens, dtype=np.int64), ends, side="left")
    return mix64(chain[last] + ends.astype(np.uint64) * np.uint64(GOLDEN))
