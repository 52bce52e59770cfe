"""Run-level exact LRU stack: exact stack distances of prefix chains with one tree operation a run instead of one a block.

A block's hash commits to all blocks before it, so whatever was last touched together lies together in the LRU stack. A request is looked
up as a whole; then its blocks become the most recent, head newest, tail oldest (the leaf-first order in which vLLM frees them).
Distances are those at look-up, before the request's own blocks move, and equal `olken`'s block by block.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from analytics.reuse import stack_kernel as kernel
from analytics.reuse.stack_parts import REMEMBERED_A_WORD, filter_has_each

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]
U64 = npt.NDArray[np.uint64]

STATE_FIELDS = ("scalars", "lengths", "ts_us", "hashes", "filter")


@dataclass(frozen=True)
class Runs:
    """Runs of the requests of one `touch`, in stream order: one row is one maximal stretch with distances one after another and one age.

    `request` int32, index in the call · `position` int32 of its first block in the chain · `length` int32 blocks · `distance` int64 of its
    first block at look-up, block j has distance + j, -1 when cold · `age_us` int64 since the last touch, -1 when cold · `beyond` int32,
    leading blocks of a cold run that may have been cut off by `max_depth_blocks` (0 for reused runs).
    Rows do not depend on how the stream is cut into calls, nor on how the stack stores its runs.
    """

    request: I32
    position: I32
    length: I32
    distance: I64
    age_us: I64
    beyond: I32

    def __len__(self) -> int:
        return int(self.request.size)

    def per_block(self) -> tuple[I64, I64]:
        """Distance and age_us of every block of the call, in stream order, -1 where cold. Cost: O(blocks)."""
        starts = np.repeat(np.cumsum(self.length, dtype=np.int64) - self.length, self.length)
        distance = np.repeat(self.distance, self.length)
        within = np.arange(distance.size) - starts
        return np.where(distance < 0, -1, distance + within), np.repeat(self.age_us, self.length)

    @classmethod
    def concat(cls, parts: Iterable[Runs]) -> Runs:
        """Runs of several calls behind one another; `request` counts on only where the caller has shifted it."""
        columns = zip(*((p.request, p.position, p.length, p.distance, p.age_us, p.beyond) for p in parts), strict=True)
        return cls(*(np.concatenate(column) for column in columns))


class RunStack:
    """Exact LRU stack of one tenant's blocks.

    `max_depth_blocks` cuts the bottom after each request, exact above it: memory then stays O(max_depth_blocks + longest chain) however
    long the stream. A Bloom filter of `2**filter_bits` bits (more for a greater depth: 16 bits a block) remembers what was cut, to tell
    cold from perhaps beyond the depth. It has two generations and drops the older when the younger is full: the last
    `remembered_blocks` that were cut are known for certain, and of blocks never seen at most 6 % are taken for cut ones.
    `merge` joins neighbours that are touched together again into one node; without it the distances are the same and the nodes more.
    Cost of a request: O(blocks) to compare and copy plus O(log runs) a run.
    Source: Mattson et al. 1970 for the stack; one tree query a run is this project's own.
    """

    def __init__(self, max_depth_blocks: int | None = None, *, filter_bits: int = 22, initial_room: int = 1024, merge: bool = True) -> None:
        room = max(int(initial_room), 4)
        self._filter_words = 1 << max(filter_bits - 6, 1)
        self._stack = kernel.Stack(
            at=np.zeros(kernel.SCALARS, np.int64),
            nodes=np.zeros((room, kernel.NODE_FIELDS), np.int64),
            slots=np.full(room, -1, np.int32),
            fenwick=np.zeros(room, np.int64),
            table=np.zeros(4 << (room - 1).bit_length(), np.uint64),
            arena=np.empty(room, np.uint64),
            known=np.zeros(1, np.uint64),
            pieces=np.empty((room, kernel.PIECE_FIELDS), np.int64),
        )
        at = self._stack.at
        at[kernel.FREE], at[kernel.BOTTOM], at[kernel.MERGE] = -1, 1, merge
        self.max_depth_blocks = max_depth_blocks

    @property
    def max_depth_blocks(self) -> int | None:
        """Greatest depth, None for no limit. A new value takes hold after the next request. Raises `ValueError` below 1."""
        limit = int(self._stack.at[kernel.MAX_DEPTH])
        return None if limit == kernel.NO_LIMIT else limit

    @max_depth_blocks.setter
    def max_depth_blocks(self, blocks: int | None) -> None:
        if blocks is not None and blocks < 1:
            raise ValueError(f"max_depth_blocks is {blocks}; it must be at least 1, or None for no limit")
        limit = kernel.NO_LIMIT if blocks is None else blocks
        if limit != self._stack.at[kernel.MAX_DEPTH] and not self.trimmed_blocks:
            self._stack = self._stack._replace(known=np.zeros(1, np.uint64))  # its size follows the depth at the first cut
        self._stack.at[kernel.MAX_DEPTH] = limit

    @property
    def depth_blocks(self) -> int:
        """Blocks that now stand in the stack."""
        return int(self._stack.at[kernel.DEPTH])

    @property
    def trimmed_blocks(self) -> int:
        """Blocks ever cut off at the bottom; one that came back and was cut again counts twice."""
        return int(self._stack.at[kernel.TRIMMED])

    @property
    def nbytes(self) -> int:
        """Bytes that the arrays of the stack hold now, room to grow included; the runs that `touch` returns are not among them."""
        return sum(array.nbytes for array in self._stack)

    @property
    def remembered_blocks(self) -> int:
        """How many of the blocks cut last the filter knows for certain; it knows up to twice as many."""
        words = self._stack.known.size if self._stack.known.size > 1 else self._words_needed()
        return REMEMBERED_A_WORD * (words // 2)

    def maybe_trimmed(self, hashes: U64) -> npt.NDArray[np.bool_]:
        """Whether each block may have been cut off: true may be a chance agreement in the filter, false that it was long ago."""
        if not self.trimmed_blocks:
            return np.zeros(len(hashes), np.bool_)
        return filter_has_each(self._stack.known, np.ascontiguousarray(hashes, np.uint64))

    def touch(self, ts_us: I64, offsets: I64, hashes: U64) -> Runs:
        """Look up and then touch requests in the order given.

        `ts_us` int64[n], never falling (an age below 0 is given as 0) · `offsets` int64[n+1] into `hashes` uint64[m]; chains may be empty.
        Raises `ValueError` for offsets that do not fit. Hashes that do not commit to their prefix (a block repeated in its chain, a block
        behind two different prefixes) are outside the contract: each place counts as a block of its own and what could no longer be found
        is not stored; the result is still the same for the same requests.
        """
        ts_us, offsets = np.ascontiguousarray(ts_us, np.int64), np.ascontiguousarray(offsets, np.int64)
        hashes = np.ascontiguousarray(hashes, np.uint64).view()
        hashes.flags.writeable = False  # one compiled variant, whether or not the caller's buffer may be written
        self._fit_pieces(_longest(ts_us, offsets, hashes) + 1)
        self._stack.at[kernel.RUNS] = 0
        out, done = _columns(2 * ts_us.size + 16), 0
        while done < ts_us.size:
            done = kernel.touch(self._stack, out, ts_us, offsets, hashes, done)
            if done < ts_us.size:
                out = self._make_room(out)
        count = int(self._stack.at[kernel.RUNS])
        return Runs(
            **{name: column[:count] if 2 * count > column.size else column[:count].copy() for name, column in out._asdict().items()}
        )

    def state(self) -> dict[str, npt.NDArray[np.int64] | U64]:
        """The stack as arrays, live data only: `RunStack.from_state` of it goes on exactly as this one would."""
        self._renumber(len(self._stack.slots))
        self._repack(len(self._stack.arena))
        stack, top = self._stack, int(self._stack.at[kernel.TOP])
        nodes = stack.nodes[stack.slots[1 : top + 1]]
        limit, trimmed = stack.at[kernel.MAX_DEPTH], self.trimmed_blocks
        return {
            "scalars": np.array([limit, trimmed, self._filter_words, *stack.at[[kernel.MERGE, kernel.YOUNG, kernel.CUT]]], np.int64),
            "lengths": nodes[:, kernel.LENGTH].copy(),
            "ts_us": nodes[:, kernel.TS].copy(),
            "hashes": stack.arena[: stack.at[kernel.USED]].copy(),
            "filter": stack.known.copy() if trimmed else np.zeros(0, np.uint64),
        }

    @classmethod
    def from_state(cls, state: Mapping[str, npt.NDArray[np.int64] | U64]) -> RunStack:
        """A stack from what `state` returned. Raises `KeyError` for a missing array."""
        scalars, lengths, ts_us, hashes, known = (np.asarray(state[name]) for name in STATE_FIELDS)
        limit, trimmed, words, *rest = (int(value) for value in scalars)
        merge, young, cut = rest if len(rest) == 3 else (1, 0, 0)  # older states say neither
        stack = cls(None if limit == kernel.NO_LIMIT else limit, initial_room=2 * max(lengths.size, 1) + 2, merge=bool(merge))
        stack._filter_words = words
        stack._stack = stack._stack._replace(arena=np.concatenate([hashes.astype(np.uint64), np.empty(hashes.size + 4, np.uint64)]))
        if trimmed:
            stack._stack = stack._stack._replace(known=known.astype(np.uint64) if rest else _two_generations(known))
        at, nodes, live = stack._stack.at, stack._stack.nodes, lengths.size
        nodes[:live, kernel.START] = np.cumsum(lengths) - lengths
        nodes[:live, kernel.LENGTH], nodes[:live, kernel.TS] = lengths, ts_us
        stack._stack.slots[1 : live + 1] = np.arange(live)
        at[kernel.TOP] = at[kernel.NODES] = at[kernel.LIVE] = live
        at[kernel.DEPTH] = at[kernel.USED] = hashes.size
        at[kernel.TRIMMED], at[kernel.YOUNG], at[kernel.CUT] = trimmed, young, cut
        stack._renumber(len(stack._stack.slots))
        kernel.rehash(stack._stack, stack._stack.table)
        return stack

    def _make_room(self, out: kernel.RunColumns) -> kernel.RunColumns:
        """Give the request at hand all the room it asked for; arrays at least double where their live part needs it."""
        at = self._stack.at
        pieces, blocks = int(at[kernel.NEED_PIECES]), int(at[kernel.NEED_BLOCKS])
        live = int(at[kernel.LIVE])
        if at[kernel.TOP] + pieces >= self._stack.slots.size:
            self._renumber(_grown(self._stack.slots.size, live + pieces + 1))
        if live + pieces > self._stack.nodes.shape[0]:
            spare = np.zeros((live + pieces, kernel.NODE_FIELDS), np.int64)
            self._stack = self._stack._replace(nodes=np.concatenate([self._stack.nodes, spare]))
        if 4 * (live + pieces) > self._stack.table.size:
            table = np.zeros(4 << (live + pieces).bit_length(), np.uint64)
            kernel.rehash(self._stack, table)
            self._stack = self._stack._replace(table=table)
        if at[kernel.USED] + blocks > self._stack.arena.size:
            self._repack(_grown(self._stack.arena.size, self.depth_blocks + blocks))
        if self._stack.known.size == 1 and at[kernel.MAX_DEPTH] < kernel.NO_LIMIT:
            self._stack = self._stack._replace(known=np.zeros(self._words_needed(), np.uint64))
        if at[kernel.RUNS] + pieces > out.request.size:
            wider = _columns(2 * out.request.size + pieces)
            for name, column in out._asdict().items():
                getattr(wider, name)[: column.size] = column
            return wider
        return out

    def _words_needed(self) -> int:
        """Words of the filter: as many as were asked for, at least a quarter of the depth in blocks where there is one."""
        depth = self.max_depth_blocks
        return self._filter_words if depth is None else max(self._filter_words, 1 << (depth // 4).bit_length())

    def _fit_pieces(self, count: int) -> None:
        if count > self._stack.pieces.shape[0]:
            self._stack = self._stack._replace(pieces=np.empty((2 * count, kernel.PIECE_FIELDS), np.int64))

    def _renumber(self, size: int) -> None:
        slots, fenwick = np.full(size, -1, np.int32), np.zeros(size, np.int64)
        kernel.renumber(self._stack, slots, fenwick)
        self._stack = self._stack._replace(slots=slots, fenwick=fenwick)

    def _repack(self, size: int) -> None:
        arena = np.empty(size, np.uint64)
        kernel.repack(self._stack, arena)
        self._stack = self._stack._replace(arena=arena)


def _grown(size: int, needed: int) -> int:
    """Room after compaction: the same while a third of it is free, else twice the need; so a block is moved twice on average at most."""
    return size if 3 * needed <= 2 * size else 2 * needed


def _two_generations(known: npt.NDArray[Any]) -> U64:
    """A filter of one generation, from an older state, as the elder one of two: its halves laid over one another know the same blocks."""
    words = known.astype(np.uint64)
    half = words.size // 2
    return np.concatenate([np.zeros(half, np.uint64), words[:half] | words[half:]])


def _columns(size: int) -> kernel.RunColumns:
    request, position, length, beyond = np.empty((4, size), np.int32)
    distance, age_us = np.empty((2, size), np.int64)
    return kernel.RunColumns(request, position, length, distance, age_us, beyond)


def _longest(ts_us: I64, offsets: I64, hashes: U64) -> int:
    """Blocks of the longest chain. Raises `ValueError` for offsets that do not fit."""
    if offsets.ndim != 1 or offsets.size != ts_us.size + 1:
        raise ValueError(f"{offsets.size} offsets for {ts_us.size} requests; there must be one more than requests")
    lengths = offsets[1:] - offsets[:-1]
    if offsets[0] < 0 or offsets[-1] > hashes.size or (lengths.size and lengths.min() < 0):
        raise ValueError(f"offsets must rise within [0, {hashes.size}], the number of hashes")
    return int(lengths.max()) if lengths.size else 0
