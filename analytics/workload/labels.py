"""Chains with what the trace says of each request, and the links from every block back to the request that touched it last.

Everything here sees an infinite cache: a block is reused iff an earlier request held it. A request looks up as a whole, then touches.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numba as nb
import numpy as np
import numpy.typing as npt

from analytics.reuse.chains import ChainColumns, densify, tail_tokens

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]
U64 = npt.NDArray[np.uint64]


@dataclass(frozen=True)
class Links:
    """Stretches of chains whose blocks were last touched by one and the same request; one row a stretch, in stream order.

    `request` int32, who asks · `source` int32, the earlier request that touched the blocks last, -1 for blocks never seen ·
    `position` int32 of the first block in the chain · `length` int32 blocks. Together they cover every block reference once.
    """

    request: I32
    source: I32
    position: I32
    length: I32

    @cached_property
    def reused(self) -> Links:
        """The stretches that were seen before."""
        kept = self.source >= 0
        return Links(self.request[kept], self.source[kept], self.position[kept], self.length[kept])


@dataclass(frozen=True)
class LabelledChains:
    """Requests in order of arrival with the labels of each: codes int32[n] into the names beside them, -1 where the trace does not say.

    `conversation` is the outermost session (a sub-agent's is its parent's), `turn` counts from 1 within a session, 0 where unknown.
    `content` uint64[m] names what stands in each block whatever stands before it, None where the trace does not tell. `has_blocks`,
    `has_clock` and `local_ids` say what may be asked: load-only traces have no hashes, some traces no common clock, and some name blocks
    by ids that mean nothing outside their conversation.
    """

    chains: ChainColumns
    tenant: I32
    tenants: tuple[str, ...]
    session: I32
    conversation: I32
    category: I32
    categories: tuple[str, ...]
    turn: I32
    content: U64 | None = None
    has_blocks: bool = True
    has_clock: bool = True
    local_ids: bool = False
    tenants_assigned: bool = False

    @cached_property
    def dense(self) -> tuple[I32, int]:
        """Dense id of every block reference over all tenants, and how many ids there are."""
        return densify(self.chains.hashes)

    @cached_property
    def private(self) -> tuple[I32, int]:
        """The same with the blocks of each tenant its own, as a cache keeps them: (tenant, hash) is the key."""
        return self.dense if len(self.tenants) == 1 else densify(self.private_chains.hashes)

    @cached_property
    def private_chains(self) -> ChainColumns:
        """The chains with hashes of different tenants kept apart."""
        if len(self.tenants) == 1:
            return self.chains
        salt = np.arange(1, len(self.tenants) + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        owner = np.repeat(salt[self.tenant], np.diff(self.chains.offsets))
        return replace(self.chains, hashes=self.chains.hashes ^ owner)

    @cached_property
    def links(self) -> Links:
        """Links of every reference, tenants apart."""
        ids, distinct = self.private
        return links(ids, self.chains.offsets, distinct)

    @cached_property
    def hit_blocks(self) -> I64:
        """Blocks that an infinite cache serves to each request: the leading run of what its tenant has asked for before."""
        return leading_blocks(self.links, self.chains.requests)

    @cached_property
    def lengths(self) -> I64:
        """Blocks of each request."""
        return np.diff(self.chains.offsets)

    def of_tenant(self, code: int) -> LabelledChains:
        """One tenant's requests alone."""
        kept = np.flatnonzero(self.tenant == code)
        lengths = self.lengths[kept]
        content = None
        if self.content is not None:
            content = self.content[np.repeat(self.chains.offsets[kept] - np.cumsum(lengths) + lengths, lengths) + np.arange(lengths.sum())]
        return replace(
            self,
            chains=self.chains.select(kept),
            tenant=np.zeros(kept.size, np.int32),
            tenants=(self.tenants[code],),
            session=self.session[kept],
            conversation=self.conversation[kept],
            category=self.category[kept],
            turn=self.turn[kept],
            content=content,
        )


def leading_blocks(found: Links, requests: int) -> I64:
    """Length of the leading reused stretch of every request, int64[requests]."""
    return _leading(found.request, found.source, found.position, found.length, requests)


def prefix_tokens(chains: ChainColumns, blocks: I64) -> I64:
    """Tokens in the first `blocks` (int64[n]) blocks of every request; a whole chain of equal blocks holds its prompt at most."""
    if chains.block_tokens is not None:
        ends = np.concatenate([[0], np.cumsum(chains.block_tokens, dtype=np.int64)])
        return ends[chains.offsets[:-1] + blocks] - ends[chains.offsets[:-1]]
    lengths = np.diff(chains.offsets)
    tails = tail_tokens(lengths, chains.prompt_tokens, chains.block_size)
    short = np.where((blocks == lengths) & (blocks > 0), chains.block_size - tails, 0)
    return blocks * chains.block_size - short


def links(ids: I32, offsets: I64, distinct: int) -> Links:
    """Links of every block reference; `ids` int32[m] dense below `distinct`, `offsets` int64[n+1].

    Cost: one random read and one write a block, in two passes over each chain; memory 4 bytes a distinct block and 16 a link.
    """
    room = max(4 * offsets.size, 1 << 10)
    last = np.full(max(distinct, 1), -1, np.int32)
    out, count, done = np.empty((4, room), np.int32), 0, 0
    while True:
        done, count = _links(ids, offsets, last, out, done, count)
        if done == offsets.size - 1:
            return Links(*(np.ascontiguousarray(column) for column in out[:, :count]))
        need = count + int(offsets[done + 1] - offsets[done])
        grown = np.empty((4, max(2 * out.shape[1], need)), np.int32)
        grown[:, :count] = out[:, :count]
        out = grown


def group_hits(ids: I32, offsets: I64, distinct: int, group: I32) -> I64:
    """Leading blocks of each request that an earlier request of its own group held, int64[n]; 0 where the group is -1.

    Requests are worked through group by group, so that one stamp a block is all that has to be remembered. Cost: O(m).
    """
    order = np.argsort(group, kind="stable")
    return _group_hits(ids, offsets, group, order[group[order] >= 0], np.full(max(distinct, 1), -1, np.int32))


def group_counts(ids: I32, offsets: I64, distinct: int, group: I32) -> I32:
    """How many groups touched each block, int32[distinct]; requests of group -1 are passed over. Cost: O(m)."""
    order = np.argsort(group, kind="stable")
    return _group_counts(ids, offsets, group, order[group[order] >= 0], np.full(max(distinct, 1), -1, np.int32))[:distinct]


class Touches(NamedTuple):
    """Of each distinct block: how many requests touched it (int32), which did first (int32), and us from the first to the last (int64)."""

    requests: I32
    first: I32
    life_us: I64


def touches(ids: I32, offsets: I64, distinct: int, ts_us: I64) -> Touches:
    """What became of each block; `ids` int32[m] dense below `distinct`, `offsets` int64[n+1], `ts_us` int64[n]. Cost: O(m)."""
    return Touches(*_touches(ids, offsets, distinct, ts_us))


@nb.njit(cache=True, nogil=True)
def _links(ids: I32, offsets: I64, last: I32, out: I32, done: int, count: int) -> tuple[int, int]:
    """Link requests from `done` on until one might not fit into `out`."""
    for request in range(done, offsets.size - 1):
        lo, hi = offsets[request], offsets[request + 1]
        if count + hi - lo > out.shape[1]:
            return request, count
        for i in range(lo, hi):
            source = last[ids[i]]
            if i > lo and out[1, count - 1] == source:
                out[3, count - 1] += 1
            else:
                out[0, count], out[1, count], out[2, count], out[3, count] = request, source, i - lo, 1
                count += 1
        for i in range(lo, hi):
            last[ids[i]] = request
    return offsets.size - 1, count


@nb.njit(cache=True, nogil=True)
def _leading(request: I32, source: I32, position: I32, length: I32, requests: int) -> I64:
    hits = np.zeros(requests, np.int64)
    for row in range(request.size):
        if source[row] >= 0 and hits[request[row]] == position[row]:
            hits[request[row]] += length[row]
    return hits


@nb.njit(cache=True, nogil=True)
def _group_hits(ids: I32, offsets: I64, group: I32, order: I64, stamp: I32) -> I64:
    hits = np.zeros(offsets.size - 1, np.int64)
    for request in order:
        lo, hi, own = offsets[request], offsets[request + 1], group[request]
        at = lo
        while at < hi and stamp[ids[at]] == own:
            at += 1
        hits[request] = at - lo
        for i in range(at, hi):
            stamp[ids[i]] = own
    return hits


@nb.njit(cache=True, nogil=True)
def _group_counts(ids: I32, offsets: I64, group: I32, order: I64, stamp: I32) -> I32:
    counts = np.zeros(stamp.size, np.int32)
    for request in order:
        for i in range(offsets[request], offsets[request + 1]):
            if stamp[ids[i]] != group[request]:
                stamp[ids[i]] = group[request]
                counts[ids[i]] += 1
    return counts


@nb.njit(cache=True, nogil=True)
def _touches(ids: I32, offsets: I64, distinct: int, ts_us: I64) -> tuple[I32, I32, I64]:
    counts, last = np.zeros(distinct, np.int32), np.full(distinct, -1, np.int32)
    first, life_us = np.zeros(distinct, np.int32), np.zeros(distinct, np.int64)
    for request in range(offsets.size - 1):
        for i in range(offsets[request], offsets[request + 1]):
            block = ids[i]
            if last[block] != request:
                last[block] = request
                if counts[block] == 0:
                    first[block] = request
                counts[block] += 1
                life_us[block] = ts_us[request] - ts_us[first[block]]
    return counts, first, life_us
