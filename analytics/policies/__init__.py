"""Eviction policies: a registry of simulators of one cache, each in two forms. A new one is a function, a line and a right answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from analytics.policies import (
    cacheus,
    engines,
    frequent,
    grouped,
    lazy,
    learned,
    lirs,
    lists,
    merlin,
    prefix_aware,
    sampled,
    segments,
    small_main,
    tinylfu,
    wa,
)
from analytics.policies.cursor import PLAIN, PREFIX, Trace, bare, new_cursor, predecessors
from analytics.policies.fifos import fifo, s3fifo, sieve
from analytics.policies.frequency import lfu
from analytics.policies.offline import belady, belady_walk
from analytics.policies.recency import arc, lru, two_q

Bools = npt.NDArray[np.bool_]
I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]
Fill = Callable[[I32, int, int, Bools], None]
Walk = Callable[..., None]
Form = Literal["plain", "prefix"]
FORMS: dict[str, int] = {"plain": PLAIN, "prefix": PREFIX}


@dataclass(frozen=True)
class Policy:
    """Which accesses hit a cache that starts empty; always the same for the same input.

    `walk(trace, cursor, capacity, **parameters)` goes through a trace in either form (`analytics.policies.cursor` says what they are);
    `fill(ids, n_ids, capacity, hits)` is the plain form made fast, equal to it hit for hit, where there is one. `needs` names the columns
    of a trace without which the policy falls back to what its docstring says; `sized`: its plain form takes a trace with sizes.
    """

    walk: Walk | None = None
    fill: Fill | None = None
    needs: tuple[str, ...] = ()
    sized: bool = False

    @property
    def __doc__(self) -> str | None:  # type: ignore[override]
        return (self.walk or self.fill).__doc__

    def __call__(self, ids: I32, n_ids: int, capacity: int) -> Bools:
        """Hits bool[n] of the plain form on accesses of which nothing but their order is known.

        `ids` int32[n] in [0, n_ids), as `analytics.reuse.chains.densify` gives them; `capacity` in blocks, 0 never hits.
        Raises `ValueError` for a negative capacity or ids out of range. Cost: O(n), memory O(n_ids + n).
        """
        ids = np.ascontiguousarray(ids, np.int32)
        _check(ids, n_ids, capacity)
        if self.fill is None:
            return self.replay(bare(ids, n_ids), capacity, "plain")
        hits = np.zeros(ids.size, np.bool_)
        if capacity and ids.size:
            self.fill(ids, n_ids, min(capacity, n_ids), hits)
        return hits

    def replay(self, trace: Trace, capacity: int, form: Form = "prefix", **parameters: float) -> Bools:
        """Hits bool[blocks] of a trace in one form; in the prefix form all of them are prefix-contiguous.

        Where the trace has sizes, in the plain form of a `sized` policy, `capacity` is in their unit, and so are shares of it.
        Raises `ValueError` for an unknown form, a negative capacity, sizes below 1 or where they do not go, or, in the prefix form, hashes
        that do not commit to their prefix (a block behind two different ones). Cost: O(blocks), most policies 10 to 60 M/s.
        """
        if form not in FORMS:
            raise ValueError(f"form {form!r} is unknown; choose plain or prefix")
        _check(trace.ids, trace.parent.size, capacity)
        if form == "prefix" and not np.array_equal(trace.parent[trace.ids], predecessors(trace.ids, trace.offsets)):
            raise ValueError("a block stands behind two different blocks: these hashes do not commit to their prefix, use the plain form")
        if self.walk is None:
            raise ValueError("this policy has no prefix-safe form")
        total = trace.parent.size if trace.sizes is None else self._total(trace, trace.sizes, form)
        cursor = new_cursor(trace, min(capacity, total), FORMS[form])
        if capacity and trace.ids.size:
            self.walk(trace, cursor, min(capacity, trace.parent.size), **parameters)
        return cursor.hits

    def _total(self, trace: Trace, sizes: I64, form: Form) -> int:
        if not self.sized or form != "plain":
            raise ValueError("this policy counts blocks in this form; sizes go with the plain form of fifo, lru, sieve and others alike")
        if sizes.shape != trace.parent.shape or (sizes.size and sizes.min() < 1):
            raise ValueError("sizes must be one number from 1 for each dense id")
        return int(sizes.sum())


def _check(ids: I32, n_ids: int, capacity: int) -> None:
    if capacity < 0:
        raise ValueError(f"capacity is {capacity} blocks; it cannot be negative")
    if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < n_ids:
        raise ValueError(f"ids lie in [{ids.min()}, {ids.max()}], outside [0, {n_ids})")


POLICIES: dict[str, Policy] = {
    "fifo": Policy(lists.fifo, fifo, sized=True),
    "lru": Policy(lists.lru, lru, sized=True),
    "lfu": Policy(frequent.lfu, lfu, sized=True),
    "lfuda": Policy(frequent.lfuda, sized=True),
    "gdsf": Policy(frequent.gdsf, sized=True),
    "2q": Policy(segments.two_q, two_q),
    "arc": Policy(segments.arc, arc, sized=True),
    "sieve": Policy(lazy.sieve, sieve, sized=True),
    "clock": Policy(lazy.clock, sized=True),
    "delay_lru": Policy(lazy.delay_lru),
    "d_fr": Policy(lazy.d_fr),
    "age": Policy(lazy.age),
    "s3fifo": Policy(small_main.s3fifo, s3fifo, sized=True),
    "s4fifo": Policy(small_main.s4fifo),
    "lirs": Policy(lirs.lirs, sized=True),
    "w_tinylfu": Policy(tinylfu.w_tinylfu),
    "merlin": Policy(merlin.merlin),
    "hyperbolic": Policy(sampled.hyperbolic),
    "la_cache": Policy(sampled.la_cache),
    "rfb": Policy(sampled.rfb),
    "lhd": Policy(sampled.lhd),
    "cacheus": Policy(cacheus.cacheus),
    "lrb": Policy(learned.lrb),
    "3l_cache": Policy(learned.three_l_cache),
    "halp": Policy(learned.halp),
    "gl_cache": Policy(grouped.gl_cache),
    "vllm_lru": Policy(engines.vllm_lru),
    "sglang_leaf_lru": Policy(engines.sglang_leaf_lru),
    "rtp_llm": Policy(engines.rtp_llm),
    "lmcache_cost": Policy(engines.lmcache_cost),
    "mooncake_lease": Policy(engines.mooncake_lease),
    "wa": Policy(wa.wa, needs=("category", "turn")),
    "tail_optimized": Policy(prefix_aware.tail_optimized, needs=("session",)),
    "lpc": Policy(prefix_aware.lpc, needs=("session",)),
    "kvflow": Policy(prefix_aware.kvflow, needs=("workflow",)),
    "cached_attention": Policy(prefix_aware.cached_attention, needs=("session",)),
    "belady": Policy(belady_walk, belady, sized=True),
}


def leading_hits(hits: Bools, offsets: I64) -> Bools:
    """Hits that a prefix cache can use: those of each chain's leading run. `offsets` int64[requests+1] into `hits`. Cost: O(n)."""
    misses = np.concatenate([[0], np.cumsum(~hits)])
    before = np.repeat(misses[offsets[:-1]], np.diff(offsets))
    return hits & (misses[1:] == before)
