"""Causes: why each prompt token was not served from local KV, from residency events alone (docs/design.md section 5).

One `CauseTable` belongs to one (tenant, model, block_size). It knows, per block, on which instances a copy is resident, how the last
copy went, and whether somebody asked for it since. Only missed blocks and residency rows cost a probe; hits cost nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

CAUSES = (
    "hit",
    "granularity",
    "unobserved",
    "routing",
    "broken_prefix",
    "in_flight",
    "not_stored",
    "instance",
    "capacity_self",
    "capacity_other",
    "capacity_resize",
    "cold",
    "beyond",
)
(HIT, GRANULARITY, UNOBSERVED, ROUTING, BROKEN_PREFIX, IN_FLIGHT, NOT_STORED, INSTANCE, CAPACITY_SELF, CAPACITY_OTHER,
 CAPACITY_RESIZE, COLD, BEYOND) = range(len(CAUSES))  # fmt: skip

# Operations of the one sequence that a table applies.
OP_ACCESS, OP_STORED, OP_EVICTED, OP_CLEARED, OP_UP, OP_DOWN, OP_DRAIN, OP_GAP, OP_LIVE, OP_REPORTS, OP_MUTE = range(11)

FOREVER = np.int64(1 << 62)
_BLOOM_BITS = 1 << 23


class Table(NamedTuple):
    """Open-addressing columns, one entry per known block. `used` 0/1; `holders` uint64[capacity, words], one bit per instance."""

    key: NDArray[np.uint64]
    used: NDArray[np.uint8]
    holders: NDArray[np.uint64]
    gone: NDArray[np.uint8]  # cause of the last copy's removal, COLD while there was never a copy
    gone_tenant: NDArray[np.int32]
    asked_until_us: NDArray[np.int64]  # -1: nobody asked since the last store
    seen_us: NDArray[np.int64]


class Fleet(NamedTuple):
    """Per instance bit: `up`, `gap`, `reports` (residency) as uint8[n]; `incarnation` int64[n]."""

    up: NDArray[np.uint8]
    gap: NDArray[np.uint8]
    reports: NDArray[np.uint8]
    incarnation: NDArray[np.int64]

    def copy(self) -> Fleet:
        return Fleet(self.up.copy(), self.gap.copy(), self.reports.copy(), self.incarnation.copy())


class Ops(NamedTuple):
    """The sequence. `op` uint8, `instance` int32, `incarnation` int64, `ts_us` int64, `block` uint64, `cause` uint8 (why a copy goes),
    `tenant` int32 (whose allocation forced it, -1 unknown), `access` int32 (row of the access columns, -1)."""

    op: NDArray[np.uint8]
    instance: NDArray[np.int32]
    incarnation: NDArray[np.int64]
    ts_us: NDArray[np.int64]
    block: NDArray[np.uint64]
    cause: NDArray[np.uint8]
    tenant: NDArray[np.int32]
    access: NDArray[np.int32]


class Accesses(NamedTuple):
    """Columns of the accesses that `Ops.access` points to. `end_us` is when the request's prefill ends (FOREVER when unknown)."""

    prompt_tokens: NDArray[np.int64]
    hit_tokens: NDArray[np.int64]
    end_us: NDArray[np.int64]
    offsets: NDArray[np.int64]
    chain: NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Segments:
    """Stretches of prompt tokens [start, end) of one access with one cause: together they cover every prompt token once."""

    access: NDArray[np.int32]
    cause: NDArray[np.uint8]
    tenant: NDArray[np.int32]
    inferred: NDArray[np.uint8]
    start: NDArray[np.int64]
    end: NDArray[np.int64]


class CauseTable:
    """Residency and history of one (tenant, model, block_size)'s blocks over all instances.

    `tenant` is this tenant's code, so that evictions by itself are told from evictions by others. `max_blocks` bounds the memory:
    `forget` drops the longest gone blocks into a Bloom filter, after which they read as `beyond` instead of `cold`.
    """

    def __init__(self, tenant: int, block_size: int, words: int = 1, capacity: int = 1024) -> None:
        self.tenant, self.block_size = tenant, block_size
        self.table = _empty(capacity, words)
        self.count = 0
        self.bloom = np.zeros(0, np.uint64)

    def apply(self, ops: Ops, accesses: Accesses, fleet: Fleet) -> Segments:
        """Apply a sequence in order; `fleet` (changed in place) is the state of the instances at its start.

        Cost: O(ops + missed blocks) probes; O(table) for each instance that goes down or is cleared.
        """
        missed = int(np.maximum(np.diff(accesses.offsets) - accesses.hit_tokens // self.block_size, 0).sum())
        self._reserve(missed + int(np.count_nonzero(ops.op == OP_STORED)), len(fleet.up))
        out = tuple(
            np.empty(missed + 4 * len(accesses.prompt_tokens), t) for t in (np.int32, np.uint8, np.int32, np.uint8, np.int64, np.int64)
        )
        n, self.count = _apply(self.table, self.count, self.bloom, fleet, ops, accesses, self.tenant, self.block_size, out)
        return Segments(*(column[:n].copy() for column in out))  # type: ignore[arg-type]

    def forget(self, max_blocks: int) -> int:
        """Drop the longest gone blocks so that about `max_blocks` stay; resident ones always do. Returns how many went."""
        if self.count <= max_blocks + max_blocks // 4:
            return 0
        used = self.table.used.astype(bool)
        gone = used & ~self.table.holders.any(axis=1)
        n_drop = min(self.count - max_blocks, int(gone.sum()))
        if n_drop <= 0:
            return 0
        ages = np.sort(self.table.seen_us[gone], kind="stable")
        drop = gone & (self.table.seen_us <= ages[n_drop - 1])
        if not len(self.bloom):
            self.bloom = np.zeros(_BLOOM_BITS // 64, np.uint64)
        _bloom_add(self.bloom, self.table.key[drop])
        self._rebuild(used & ~drop, len(self.table.key), self.table.holders.shape[1])
        return int(drop.sum())

    def state(self) -> dict[str, NDArray[np.generic]]:
        """Live entries and the filter, for a checkpoint; `from_state` restores an equal table."""
        live = self.table.used.astype(bool)
        order = np.argsort(self.table.key[live], kind="stable")
        columns = {name: column[live][order] for name, column in self.table._asdict().items() if name != "used"}
        return {**columns, "bloom": self.bloom}

    @classmethod
    def from_state(cls, tenant: int, block_size: int, state: dict[str, NDArray[np.generic]]) -> CauseTable:
        n = len(state["key"])
        table = cls(tenant, block_size)
        used = np.ones(n, np.uint8)
        table.table = Table(**{**{name: state[name] for name in Table._fields if name != "used"}, "used": used})  # type: ignore[arg-type]
        table.bloom = np.ascontiguousarray(state["bloom"], dtype=np.uint64)
        table._rebuild(used.astype(bool), max(1024, 2 * n), state["holders"].shape[1])
        return table

    def _reserve(self, more: int, instances: int) -> None:
        words = max(self.table.holders.shape[1], -(-instances // 64))
        need = 2 * (self.count + more)
        if need > len(self.table.key) or words > self.table.holders.shape[1]:
            capacity = max(len(self.table.key), 1 << max(10, int(need - 1).bit_length()))
            self._rebuild(self.table.used.astype(bool), capacity, words)

    def _rebuild(self, keep: NDArray[np.bool_], capacity: int, words: int) -> None:
        capacity = 1 << int(capacity - 1).bit_length()
        fresh = _empty(capacity, words)
        self.count = _copy_into(fresh, self.table, np.flatnonzero(keep))
        self.table = fresh


def _empty(capacity: int, words: int) -> Table:
    return Table(
        np.zeros(capacity, np.uint64),
        np.zeros(capacity, np.uint8),
        np.zeros((capacity, words), np.uint64),
        np.full(capacity, COLD, np.uint8),
        np.full(capacity, -1, np.int32),
        np.full(capacity, -1, np.int64),
        np.zeros(capacity, np.int64),
    )


@njit(cache=True, nogil=True)
def _mix(x):  # type: ignore[no-untyped-def]
    """splitmix64 finaliser: spreads small integer hashes (public traces have them) over the table."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@njit(cache=True, nogil=True)
def _find(table, key):  # type: ignore[no-untyped-def]
    """Slot of `key`, or of the free slot where it belongs."""
    mask = np.uint64(len(table.key) - 1)
    slot = _mix(key) & mask
    while table.used[slot] and table.key[slot] != key:
        slot = (slot + np.uint64(1)) & mask
    return np.int64(slot)


@njit(cache=True, nogil=True)
def _copy_into(fresh, table, slots):  # type: ignore[no-untyped-def]
    words = table.holders.shape[1]
    for old in slots:
        new = _find(fresh, table.key[old])
        fresh.key[new] = table.key[old]
        fresh.used[new] = 1
        for word in range(words):
            fresh.holders[new, word] = table.holders[old, word]
        fresh.gone[new] = table.gone[old]
        fresh.gone_tenant[new] = table.gone_tenant[old]
        fresh.asked_until_us[new] = table.asked_until_us[old]
        fresh.seen_us[new] = table.seen_us[old]
    return len(slots)


@njit(cache=True, nogil=True)
def _bloom_add(bloom, keys):  # type: ignore[no-untyped-def]
    bits = np.uint64(len(bloom) * 64 - 1)
    for key in keys:
        h = _mix(key)
        for _ in range(3):
            bit = h & bits
            bloom[bit >> np.uint64(6)] |= np.uint64(1) << (bit & np.uint64(63))
            h = _mix(h + np.uint64(0x9E3779B97F4A7C15))


@njit(cache=True, nogil=True)
def _bloom_has(bloom, key):  # type: ignore[no-untyped-def]
    if len(bloom) == 0:
        return False
    bits = np.uint64(len(bloom) * 64 - 1)
    h = _mix(key)
    for _ in range(3):
        bit = h & bits
        if not (bloom[bit >> np.uint64(6)] >> (bit & np.uint64(63))) & np.uint64(1):
            return False
        h = _mix(h + np.uint64(0x9E3779B97F4A7C15))
    return True


@njit(cache=True, nogil=True)
def _drop_copies(table, instance, cause, tenant, ts_us):  # type: ignore[no-untyped-def]
    """Every block loses its copy on one instance; those that lose their last one remember why."""
    word, bit = instance >> 6, np.uint64(1) << np.uint64(instance & 63)
    words = table.holders.shape[1]
    for slot in range(len(table.key)):
        if table.used[slot] and table.holders[slot, word] & bit:
            table.holders[slot, word] &= ~bit
            left = np.uint64(0)
            for w in range(words):
                left |= table.holders[slot, w]
            if left == 0:
                table.gone[slot] = cause
                table.gone_tenant[slot] = tenant
                table.seen_us[slot] = ts_us


@njit(cache=True, nogil=True)
def _emit(out, n, access, cause, tenant, inferred, start, end):  # type: ignore[no-untyped-def]
    """Append a segment, or lengthen the last one if it goes on."""
    if end <= start:
        return n
    if n and out[0][n - 1] == access and out[1][n - 1] == cause and out[2][n - 1] == tenant and out[5][n - 1] == start:
        out[5][n - 1] = end
        return n
    out[0][n] = access
    out[1][n] = cause
    out[2][n] = tenant
    out[3][n] = inferred
    out[4][n] = start
    out[5][n] = end
    return n + 1


@njit(cache=True, nogil=True)
def _longest_elsewhere(table, fleet, instance, chain, begin, end, hit_blocks):  # type: ignore[no-untyped-def]
    """Length in blocks of the longest leading run of chain[begin:end] held by another up instance, if beyond `hit_blocks`."""
    words = table.holders.shape[1]
    candidates = np.zeros(words, np.uint64)
    for i in range(len(fleet.up)):
        if fleet.up[i] and i != instance:
            candidates[i >> 6] |= np.uint64(1) << np.uint64(i & 63)
    # Most misses are held nowhere else: look at the first missed block before walking the hit part.
    if not _narrow(table, candidates, chain[begin + hit_blocks]):
        return 0
    for k in range(begin, begin + hit_blocks):
        if not _narrow(table, candidates, chain[k]):
            return 0
    run = hit_blocks + 1
    while begin + run < end and _narrow(table, candidates, chain[begin + run]):
        run += 1
    return run


@njit(cache=True, nogil=True)
def _narrow(table, candidates, key):  # type: ignore[no-untyped-def]
    """Keep the candidates that hold `key`; False (and an unchanged set) when none does."""
    slot = _find(table, key)
    if not table.used[slot]:
        return False
    left = np.uint64(0)
    for w in range(len(candidates)):
        left |= candidates[w] & table.holders[slot, w]
    if left == 0:
        return False
    for w in range(len(candidates)):
        candidates[w] &= table.holders[slot, w]
    return True


@njit(cache=True, nogil=True)
def _cause_of(table, bloom, fleet, instance, key, ts_us, own):  # type: ignore[no-untyped-def]
    """(cause, cause tenant, inferred) of one missed block that no other instance could have served in a leading run."""
    slot = _find(table, key)
    known = table.used[slot] != 0
    if fleet.gap[instance]:
        return UNOBSERVED, np.int32(-1), 0
    if not fleet.reports[instance]:
        if known:
            return UNOBSERVED, np.int32(-1), 1
        return COLD, np.int32(-1), 1
    if not known:
        if _bloom_has(bloom, key):
            return BEYOND, np.int32(-1), 0
        return COLD, np.int32(-1), 0
    held, held_up = False, False
    for i in range(len(fleet.up)):
        if (table.holders[slot, i >> 6] >> np.uint64(i & 63)) & np.uint64(1):
            held = True
            held_up = held_up or fleet.up[i] != 0
    if held_up:
        return BROKEN_PREFIX, np.int32(-1), 0
    if table.asked_until_us[slot] >= 0:
        if ts_us < table.asked_until_us[slot]:
            return IN_FLIGHT, np.int32(-1), 0
        return NOT_STORED, np.int32(-1), 0
    if held:
        return INSTANCE, np.int32(-1), 0
    cause, tenant = np.int64(table.gone[slot]), table.gone_tenant[slot]
    if cause == CAPACITY_SELF and tenant != own:
        return CAPACITY_OTHER, tenant, 0
    return cause, np.int32(-1), 0


@njit(cache=True, nogil=True)
def _attribute(table, count, bloom, fleet, accesses, row, instance, ts_us, own, block_size, out, n):  # type: ignore[no-untyped-def]
    """Cover one access's prompt with segments, then mark its missed blocks as asked for."""
    begin, end = accesses.offsets[row], accesses.offsets[row + 1]
    prompt, hit = accesses.prompt_tokens[row], accesses.hit_tokens[row]
    usable = max((prompt - 1) // block_size * block_size, hit)
    n = _emit(out, n, row, HIT, np.int32(-1), 0, np.int64(0), hit)
    first = hit // block_size
    blocks = min(end - begin, -(-usable // block_size))
    elsewhere = np.int64(0)
    if first < blocks and not fleet.gap[instance]:
        elsewhere = _longest_elsewhere(table, fleet, instance, accesses.chain, begin, begin + blocks, first)
    inferred = 0 if fleet.reports[instance] else 1
    for k in range(first, blocks):
        start, stop = max(hit, k * block_size), min(usable, (k + 1) * block_size)
        if k < elsewhere:
            n = _emit(out, n, row, ROUTING, np.int32(-1), inferred, start, stop)
        else:
            cause, tenant, guess = _cause_of(table, bloom, fleet, instance, accesses.chain[begin + k], ts_us, own)
            n = _emit(out, n, row, cause, tenant, guess, start, stop)
    # Blocks that the record does not name (a chain shorter than the prompt) cannot be explained.
    n = _emit(out, n, row, UNOBSERVED, np.int32(-1), 0, max(hit, min(usable, blocks * block_size)), usable)
    n = _emit(out, n, row, GRANULARITY, np.int32(-1), 0, usable, prompt)
    for k in range(begin + first, end):
        slot = _find(table, accesses.chain[k])
        if not table.used[slot]:
            table.used[slot] = 1
            table.key[slot] = accesses.chain[k]
            count += 1
        # A copy that stands here but could not be reached gets a twin, and a twin's store is no event: nothing to wait for.
        if not (table.holders[slot, instance >> 6] >> np.uint64(instance & 63)) & np.uint64(1):
            table.asked_until_us[slot] = max(table.asked_until_us[slot], accesses.end_us[row])
        table.seen_us[slot] = ts_us
    return n, count


@njit(cache=True, nogil=True)
def _store(table, count, key, instance, ts_us):  # type: ignore[no-untyped-def]
    slot = _find(table, key)
    if not table.used[slot]:
        table.used[slot] = 1
        table.key[slot] = key
        count += 1
    table.holders[slot, instance >> 6] |= np.uint64(1) << np.uint64(instance & 63)
    table.asked_until_us[slot] = -1
    table.seen_us[slot] = ts_us
    return count


@njit(cache=True, nogil=True)
def _evict(table, key, instance, cause, tenant, ts_us):  # type: ignore[no-untyped-def]
    slot = _find(table, key)
    if not table.used[slot]:
        return
    table.holders[slot, instance >> 6] &= ~(np.uint64(1) << np.uint64(instance & 63))
    for w in range(table.holders.shape[1]):
        if table.holders[slot, w]:
            return
    table.gone[slot] = cause
    table.gone_tenant[slot] = tenant
    table.seen_us[slot] = ts_us


@njit(cache=True, nogil=True)
def _apply(table, count, bloom, fleet, ops, accesses, own, block_size, out):  # type: ignore[no-untyped-def]
    n = 0
    for i in range(len(ops.op)):
        op, instance, ts_us = ops.op[i], ops.instance[i], ops.ts_us[i]
        if op == OP_ACCESS:
            n, count = _attribute(table, count, bloom, fleet, accesses, ops.access[i], instance, ts_us, own, block_size, out, n)
        elif op in (OP_STORED, OP_EVICTED, OP_CLEARED):
            # Rows of an earlier life of the instance speak of KV that is gone already.
            if ops.incarnation[i] < fleet.incarnation[instance]:
                continue
            if op == OP_STORED:
                count = _store(table, count, ops.block[i], instance, ts_us)
            elif op == OP_EVICTED:
                _evict(table, ops.block[i], instance, ops.cause[i], ops.tenant[i], ts_us)
            else:
                _drop_copies(table, instance, ops.cause[i], ops.tenant[i], ts_us)
        elif op == OP_UP:
            fleet.up[instance] = 1
            fleet.incarnation[instance] = ops.incarnation[i]
        elif op == OP_DOWN:
            fleet.up[instance] = 0
            _drop_copies(table, instance, INSTANCE, np.int32(-1), ts_us)
        elif op == OP_DRAIN:
            fleet.up[instance] = 0
        elif op == OP_GAP:
            fleet.gap[instance] = 1
        elif op == OP_LIVE:
            fleet.gap[instance] = 0
        elif op == OP_REPORTS:
            fleet.reports[instance] = 1
        elif op == OP_MUTE:
            fleet.reports[instance] = 0
    return n, count
