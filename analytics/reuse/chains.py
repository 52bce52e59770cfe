"""Chains as columns: what an estimator reads. One row is one request; hashes of all rows stand behind one another."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numba as nb
import numpy as np
import numpy.typing as npt

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]
U64 = npt.NDArray[np.uint64]


@dataclass(frozen=True)
class ChainColumns:
    """Requests in the order in which they are looked up.

    `ts_us` int64[n] · `offsets` int64[n+1] from 0 into `hashes` uint64[m] · `prompt_tokens` int64[n] · `block_size` tokens ·
    `block_tokens` int32[m], or None where every block holds `block_size` tokens but the last, which holds the prompt's rest.
    """

    ts_us: I64
    offsets: I64
    hashes: U64
    prompt_tokens: I64
    block_size: int
    block_tokens: I32 | None = None

    @property
    def requests(self) -> int:
        """Number of requests."""
        return int(self.ts_us.size)

    @property
    def blocks(self) -> int:
        """Number of block references."""
        return int(self.offsets[-1])

    @classmethod
    def pack(
        cls,
        ts_us: Sequence[int],
        chains: Sequence[U64],
        prompt_tokens: Sequence[int],
        block_size: int,
        block_tokens: Sequence[I32] | None = None,
    ) -> ChainColumns:
        """Columns of chains held one array each. Cost: one copy of the hashes."""
        offsets = np.zeros(len(chains) + 1, np.int64)
        np.cumsum([chain.size for chain in chains], out=offsets[1:])
        hashes = np.concatenate(chains).astype(np.uint64, copy=False) if chains else np.empty(0, np.uint64)
        tokens = np.concatenate(block_tokens).astype(np.int32, copy=False) if block_tokens else None
        return cls(np.asarray(ts_us, np.int64), offsets, hashes, np.asarray(prompt_tokens, np.int64), block_size, tokens)

    def slice(self, start: int, stop: int) -> ChainColumns:
        """Requests start..stop, as views; offsets of the slice begin at 0."""
        stop = min(stop, self.requests)
        lo, hi = self.offsets[start], self.offsets[stop]
        return ChainColumns(
            self.ts_us[start:stop],
            self.offsets[start : stop + 1] - lo,
            self.hashes[lo:hi],
            self.prompt_tokens[start:stop],
            self.block_size,
            None if self.block_tokens is None else self.block_tokens[lo:hi],
        )

    def select(self, requests: I64) -> ChainColumns:
        """The requests at the given indices, as copies (the columns themselves where all of them are wanted)."""
        if requests.size == self.requests:
            return self
        lengths = np.diff(self.offsets)[requests]
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        blocks = np.arange(offsets[-1]) + np.repeat(self.offsets[requests] - offsets[:-1], lengths)
        tokens = None if self.block_tokens is None else self.block_tokens[blocks]
        return ChainColumns(self.ts_us[requests], offsets, self.hashes[blocks], self.prompt_tokens[requests], self.block_size, tokens)


class ChainBuilder:
    """Collects requests one by one into columns; the hashes grow in place, so that a trace is held once. Cost: about 1 us a request."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._hashes = np.empty(1 << 16, np.uint64)
        self._ends, self._ts_us, self._prompt_tokens = [0], array("q"), array("q")
        self._tokens: dict[int, I32] = {}

    def append(self, ts_us: int, chain: U64, prompt_tokens: int, block_tokens: I32 | None = None) -> None:
        """Add one request; `block_tokens` where its blocks are unequal."""
        end = self._ends[-1] + chain.size
        if end > self._hashes.size:
            self._hashes.resize(max(2 * self._hashes.size, end), refcheck=False)
        self._hashes[self._ends[-1] : end] = chain
        if block_tokens is not None:
            self._tokens[len(self._ts_us)] = block_tokens
        self._ends.append(end)
        self._ts_us.append(ts_us)
        self._prompt_tokens.append(prompt_tokens)

    def build(self) -> ChainColumns:
        """The columns so far; further requests must go to another builder."""
        self._hashes.resize(self._ends[-1], refcheck=False)
        offsets, prompts = np.array(self._ends, np.int64), np.array(self._prompt_tokens, np.int64)
        return ChainColumns(
            np.array(self._ts_us, np.int64), offsets, self._hashes, prompts, self._block_size, self._all_tokens(offsets, prompts)
        )

    def _all_tokens(self, offsets: I64, prompts: I64) -> I32 | None:
        if not self._tokens:
            return None
        tokens = np.full(offsets[-1], self._block_size, np.int32)
        blocks = np.diff(offsets)
        filled = blocks > 0
        tokens[offsets[1:][filled] - 1] = tail_tokens(blocks, prompts, self._block_size)[filled]
        for request, given in self._tokens.items():
            tokens[offsets[request] : offsets[request + 1]] = given
        return tokens


def tail_tokens(blocks: I64, prompt_tokens: I64, block_size: int) -> I64:
    """Tokens in the last block of each chain of equal blocks: the prompt's rest, at least 1 and at most `block_size`."""
    return np.clip(prompt_tokens - (blocks - 1) * block_size, 1, block_size)


def concat(parts: Iterable[ChainColumns]) -> ChainColumns:
    """Columns of all parts behind one another. Raises `ValueError` without a part or where the block sizes differ."""
    kept = list(parts)
    if not kept or len({part.block_size for part in kept}) != 1:
        raise ValueError("columns to join must exist and share one block_size")
    ends = np.cumsum([0] + [part.blocks for part in kept])
    offsets = [part.offsets[:-1] + end for part, end in zip(kept, ends, strict=False)]
    given = all(part.block_tokens is not None for part in kept)
    tokens = [part.block_tokens for part in kept if part.block_tokens is not None]
    return ChainColumns(
        np.concatenate([part.ts_us for part in kept]),
        np.concatenate([*offsets, ends[-1:]]),
        np.concatenate([part.hashes for part in kept]),
        np.concatenate([part.prompt_tokens for part in kept]),
        kept[0].block_size,
        np.concatenate(tokens) if given else None,
    )


def densify(hashes: U64) -> tuple[I32, int]:
    """Ids 0, 1, 2, ... in order of first appearance for any uint64 keys, and how many there are.

    Cost: one probe a key in an open-addressing table that doubles at half load (24 to 70 M keys/s).
    """
    ids = np.empty(hashes.size, np.int32)
    table, keys, done, distinct = np.full(1 << 12, -1, np.int32), np.empty(1 << 11, np.uint64), 0, 0
    while True:
        done, distinct = _densify(hashes, ids, table, keys, done, distinct)
        if done == hashes.size:
            return ids, distinct
        keys = np.concatenate([keys, np.empty_like(keys)])
        table = np.full(2 * table.size, -1, np.int32)
        _refill(table, keys, distinct)


@nb.njit(cache=True, nogil=True)
def _home(key: int, size: int) -> np.int64:
    mixed = np.uint64(key) ^ (np.uint64(key) >> np.uint64(32))
    mixed *= np.uint64(0x9E3779B97F4A7C15)
    return np.int64((mixed ^ (mixed >> np.uint64(32))) & np.uint64(size - 1))


@nb.njit(cache=True, nogil=True)
def _densify(hashes: U64, ids: I32, table: I32, keys: U64, done: int, distinct: int) -> tuple[int, int]:
    """Number keys from `done` on until the table is half full."""
    mask = table.size - 1
    for i in range(done, hashes.size):
        at = _home(hashes[i], table.size)
        while table[at] >= 0 and keys[table[at]] != hashes[i]:
            at = (at + 1) & mask
        if table[at] < 0:
            if distinct == keys.size:
                return i, distinct
            table[at] = distinct
            keys[distinct] = hashes[i]
            distinct += 1
        ids[i] = table[at]
    return hashes.size, distinct


@nb.njit(cache=True, nogil=True)
def _refill(table: I32, keys: U64, distinct: int) -> None:
    for key in range(distinct):
        at = _home(keys[key], table.size)
        while table[at] >= 0:
            at = (at + 1) & (table.size - 1)
        table[at] = key
