"""A trace as labelled chains: requests packed into columns by arrival, their names numbered, contents recovered where ids name them."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from analytics.reuse.chains import ChainBuilder, ChainColumns
from analytics.workload import LabelledChains
from ingest.chaining import GOLDEN, Hashes, mix64
from ingest.errors import UsageError
from ingest.sources import Source, TraceRequest

I32 = npt.NDArray[np.int32]

# Formats whose ids mean something only within a conversation, and whose readers chain ids that name contents.
LOCAL_IDS, NAMES_CONTENT = frozenset({"weka"}), frozenset({"ragpulse", "qwen"})


@dataclass
class _Names:
    """Codes 0, 1, 2, ... of names in order of first appearance, -1 for None; one code a request."""

    def __post_init__(self) -> None:
        self.known: dict[str, int] = {}
        self.codes = array("i")

    def add(self, name: str | None) -> None:
        self.codes.append(-1 if name is None else self.known.setdefault(name, len(self.known)))

    def column(self, order: npt.NDArray[np.intp] | None) -> I32:
        codes = np.array(self.codes, np.int32)
        return codes if order is None else codes[order]


@dataclass(frozen=True)
class TraceLoad:
    """What was read: `labelled`, the load as the requests say it, and how many came before an earlier one of the file."""

    labelled: LabelledChains
    block_size: int | None
    output_tokens: int
    outputs: int
    reported_hit_tokens: int
    reported_prompt_tokens: int
    unsorted: int


class _Collector:
    """Takes requests one by one; blocks of another size than the first request's are kept with their own lengths."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._builder: ChainBuilder | None = None
        self._sizes: set[int] = set()
        self._tenant, self._session, self._conversation, self._category = _Names(), _Names(), _Names(), _Names()
        self._turn, self._last_s, self._unsorted, self._assigned = array("i"), -np.inf, 0, False
        self._outputs = self._output_tokens = self._hit = self._hit_prompt = 0

    def add(self, request: TraceRequest) -> None:
        if self._builder is None:
            self._builder, self._block_size = ChainBuilder(request.block_size), request.block_size
        tokens = request.tokens_per_block() if request.block_size != self._block_size else request.block_tokens
        self._builder.append(round(request.arrived_at_s * 1e6), request.chain, request.prompt_tokens, tokens)
        self._sizes.add(request.block_size if request.block_tokens is None else 0)
        self._tenant.add(request.tenant)
        self._session.add(request.session)
        self._conversation.add(request.parent_session or request.session)
        self._category.add(request.category)
        self._turn.append(request.turn or 0)
        self._unsorted += request.arrived_at_s < self._last_s
        self._last_s = max(self._last_s, request.arrived_at_s)
        self._assigned |= request.tenant_assigned
        if request.output_tokens is not None:
            self._outputs, self._output_tokens = self._outputs + 1, self._output_tokens + request.output_tokens
        if request.hit_tokens is not None:
            self._hit, self._hit_prompt = self._hit + request.hit_tokens, self._hit_prompt + request.prompt_tokens

    def load(self) -> TraceLoad:
        if self._builder is None:
            raise UsageError("no request was read")
        chains = self._builder.build()
        order = np.argsort(chains.ts_us, kind="stable") if self._unsorted else None
        if order is not None:
            chains = _reordered(chains, order)
        turn = np.array(self._turn, np.int32)
        labelled = LabelledChains(
            chains=chains,
            tenant=self._tenant.column(order),
            tenants=tuple(self._tenant.known),
            session=self._session.column(order),
            conversation=self._conversation.column(order),
            category=self._category.column(order),
            categories=tuple(self._category.known),
            turn=turn if order is None else turn[order],
            content=contents(chains) if self._source.name in NAMES_CONTENT else None,
            has_blocks=self._source.has_blocks,
            has_clock=self._source.clock != "session",
            local_ids=self._source.name in LOCAL_IDS,
            tenants_assigned=self._assigned,
        )
        size = max(self._sizes) or None if self._source.has_blocks and len(self._sizes) == 1 else None
        return TraceLoad(labelled, size, self._output_tokens, self._outputs, self._hit, self._hit_prompt, self._unsorted)


def load(requests: Iterable[TraceRequest], source: Source) -> TraceLoad:
    """Pack a trace; requests that arrive before an earlier one of the file are sorted in, and counted.

    Raises `UsageError` where there is none. Memory: 8 bytes a block reference and some 100 bytes a request.
    """
    collector = _Collector(source)
    for request in requests:
        collector.add(request)
    return collector.load()


def contents(chains: ChainColumns) -> Hashes:
    """What each block of `ingest.chaining.chain_hashes` chains holds, whatever stands before it: equal contents, equal values.

    Undoes the running sum: the difference of two neighbours is the scrambled id times the odd weight of its position, which has an inverse.
    """
    lengths = np.diff(chains.offsets)
    place = np.arange(chains.blocks, dtype=np.int64) - np.repeat(chains.offsets[:-1], lengths)
    positions = (place + 1).astype(np.uint64) * np.uint64(GOLDEN)
    sums = _unmix64(chains.hashes) - positions
    before = np.concatenate([np.zeros(1, np.uint64), sums[:-1]])[: sums.size]
    return (sums - np.where(place == 0, np.uint64(0), before)) * _inverse(mix64(positions) | np.uint64(1))


def _reordered(chains: ChainColumns, order: npt.NDArray[np.intp]) -> ChainColumns:
    lengths = np.diff(chains.offsets)[order]
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    blocks = np.arange(offsets[-1]) + np.repeat(chains.offsets[:-1][order] - offsets[:-1], lengths)
    tokens = None if chains.block_tokens is None else chains.block_tokens[blocks]
    return ChainColumns(chains.ts_us[order], offsets, chains.hashes[blocks], chains.prompt_tokens[order], chains.block_size, tokens)


def _unmix64(values: Hashes) -> Hashes:
    """Inverse of `ingest.chaining.mix64`, elementwise: the steps of splitmix64's finaliser backwards."""
    x = values ^ (values >> np.uint64(31)) ^ (values >> np.uint64(62))
    x *= np.uint64(0x319642B2D24D8EC3)
    x = x ^ (x >> np.uint64(27)) ^ (x >> np.uint64(54))
    x *= np.uint64(0x96DE1B173F119089)
    return x ^ (x >> np.uint64(30)) ^ (x >> np.uint64(60))


def _inverse(odd: Hashes) -> Hashes:
    """Inverse of odd numbers modulo 2^64, by Newton's iteration: each step doubles the bits that are right, from 3."""
    x = odd.copy()
    for _ in range(5):
        x *= np.uint64(2) - odd * x
    return x
