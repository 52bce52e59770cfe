"""What a running fleet hands out: chunks of event columns, with integer codes and one vocabulary."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from analytics.fleet.cache import BLOCK, CAUSE_TENANT, EVICTED, IDLE_US, INSTANCE, KIND, LIFE, REASON, SEQ, TS_US
from analytics.fleet.workload import Codes, Hashes, Ints, Workload

Floats = npt.NDArray[np.float64]
SOURCE = "emulator"
OUTCOMES = ("served", "failed")
RESIDENCY_KINDS = ("stored", "evicted")
REASONS = ("", "pressure", "resize")
LIFECYCLES = ("up", "down", "cleared", "heartbeat")
LIFECYCLE_REASONS = ("", "restart", "removal", "clear")


@dataclass(frozen=True)
class Vocabulary:
    """Names behind the codes of every chunk of one run."""

    tenants: tuple[str, ...]
    instances: tuple[str, ...]
    sessions: tuple[str, ...]
    categories: tuple[str, ...]
    routers: tuple[str, ...]
    model: str
    block_size: int
    source: str = SOURCE


@dataclass(frozen=True)
class AccessColumns:
    """Look-ups in order of `seq`. Codes are -1 and times NaN where unknown; `turn` is 0 where unknown."""

    request: Ints
    ts_us: Ints
    seq: Ints
    tenant: Codes
    instance: Codes
    incarnation: Ints
    request_id: list[str]
    session: Codes
    category: Codes
    turn: Codes
    prompt_tokens: Ints
    hit_tokens: Ints
    offsets: Ints  # of each row's chain in `hashes`
    hashes: Hashes
    output_tokens: Ints
    queue_ms: Floats
    prefill_ms: Floats
    ttft_ms: Floats
    router: Codes
    outcome: Codes


@dataclass(frozen=True)
class ResidencyColumns:
    """First stores and last removals of blocks, in order of `seq`; codes are -1 and `idle_ms` NaN where they do not apply."""

    ts_us: Ints
    seq: Ints
    tenant: Codes
    instance: Codes
    incarnation: Ints
    kind: Codes
    block: Hashes
    position: Codes
    reason: Codes
    cause_tenant: Codes
    idle_ms: Floats


@dataclass(frozen=True)
class InstanceColumns:
    """Lifecycle rows and heartbeats, in order of `seq`; `reason` is 0 where there is none."""

    ts_us: Ints
    seq: Ints
    instance: Codes
    incarnation: Ints
    lifecycle: Codes
    reason: Codes
    capacity_blocks: Ints
    used_blocks: Ints
    pinned_blocks: Ints
    evictable_blocks: Ints
    running: Ints
    waiting: Ints
    queued_tokens: Ints
    query_tokens: Ints
    hit_tokens: Ints


@dataclass(frozen=True)
class Chunk:
    """All rows of one stretch of event time [from_us, to_us), each kind in order; `seq` orders the kinds among each other."""

    from_us: int
    to_us: int
    vocabulary: Vocabulary
    access: AccessColumns
    residency: ResidencyColumns
    instance: InstanceColumns


def access_columns(rows: Ints, workload: Workload, epoch_us: int) -> AccessColumns:
    """Columns from rows of (request, ts, seq, instance, incarnation, hit, queue, prefill, ttft, outcome, router), times in us."""
    request, ts_us, seq, instance, incarnation, hit, queue, prefill, ttft, outcome, router = rows.T
    lengths = workload.offsets[request + 1] - workload.offsets[request]
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    where = np.repeat(workload.offsets[request] - offsets[:-1], lengths) + np.arange(offsets[-1])
    assert workload.category is not None and workload.turn is not None  # filled on construction
    return AccessColumns(
        request=request,
        ts_us=ts_us + epoch_us,
        seq=seq,
        tenant=workload.tenant[request],
        instance=instance.astype(np.int32),
        incarnation=incarnation,
        request_id=[workload.request_id(k) for k in request.tolist()],
        session=workload.session[request],
        category=workload.category[request],
        turn=workload.turn[request],
        prompt_tokens=workload.prompt_tokens[request],
        hit_tokens=hit,
        offsets=offsets,
        hashes=workload.hashes[where],
        output_tokens=workload.output_tokens[request],
        queue_ms=queue / 1e3,
        prefill_ms=prefill / 1e3,
        ttft_ms=np.where(ttft < 0, np.nan, ttft / 1e3),
        router=router.astype(np.int32),
        outcome=outcome.astype(np.int32),
    )


def residency_columns(events: Ints, workload: Workload, epoch_us: int) -> ResidencyColumns:
    """Columns from the caches' event buffer."""
    blocks = workload.blocks
    block = events[:, BLOCK]
    return ResidencyColumns(
        ts_us=events[:, TS_US] + epoch_us,
        seq=events[:, SEQ].copy(),
        tenant=blocks.tenants[block],
        instance=events[:, INSTANCE].astype(np.int32),
        incarnation=events[:, LIFE].copy(),
        kind=events[:, KIND].astype(np.int32),
        block=blocks.hashes[block],
        position=blocks.positions[block],
        reason=events[:, REASON].astype(np.int32),
        cause_tenant=events[:, CAUSE_TENANT].astype(np.int32),
        idle_ms=np.where(events[:, KIND] == EVICTED, events[:, IDLE_US] / 1e3, np.nan),
    )


def instance_columns(rows: Ints, epoch_us: int) -> InstanceColumns:
    """Columns from rows in the order of `InstanceColumns`' fields."""
    columns = list(rows.T)
    codes = [column.astype(np.int32) for column in columns]
    return InstanceColumns(columns[0] + epoch_us, columns[1], codes[2], columns[3], codes[4], codes[5], *columns[6:])
