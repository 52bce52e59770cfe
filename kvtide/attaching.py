"""Production request logs as events: what the engine itself reported of each request, published without residency."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec

from ingest.batching import Batcher
from ingest.errors import UsageError
from ingest.events import Access, Instance
from ingest.sources.base import TraceRequest

CLOSING_US = 180_000_000
NO_RESIDENCY = "no residency is known from a request log: causes are inferred"


def publish_log(requests: Iterable[TraceRequest], batcher: Batcher, source: str, *, close: bool) -> dict[str, int]:
    """Publish a request log in the order given; with `close` the last windows are pushed shut as nothing more will come.

    Requests must say which instance served them and what it served from its cache. A row whose figures contradict each other goes out all
    the same: the worker sets it aside as a dead letter, with its bytes. Raises `UsageError` when the log has no such figures.
    """
    sent = {"access": 0, "instance": 0}
    for event in log_events(requests, source, close=close):
        batcher.add(event)
        sent["access" if isinstance(event, Access) else "instance"] += 1
    batcher.flush()
    return sent


def log_events(requests: Iterable[TraceRequest], source: str, *, close: bool) -> Iterator[msgspec.Struct]:
    """Contract events of a request log: an `up` for each instance when it is first named, then an access for each request."""
    seen: dict[str, int] = {}
    seq, last_us = 0, 0
    for request in requests:
        if request.instance is None or request.hit_tokens is None:
            raise UsageError(
                f"request {request.request_id} does not say which instance served it and how many tokens came from its cache; "
                "such a log can be analysed (kvtide analyze, mrc) or emulated (kvtide emulate), not attached"
            )
        queue_us = round((request.queue_ms or 0.0) * 1e3)
        last_us = round(request.arrived_at_s * 1e6) + queue_us
        if request.instance not in seen:
            seen[request.instance] = seq
            yield _instance(request.instance, last_us, source, seq, "up")
            seq += 1
        yield _access(request, last_us, source, seq)
        seq += 1
    if close:
        for name in seen:
            yield _instance(name, last_us + CLOSING_US, source, seq, "heartbeat")
            seq += 1


def _instance(name: str, ts_us: int, source: str, seq: int, lifecycle: str) -> Instance:
    return Instance(ts_us=ts_us, source=source, seq=seq, instance=name, incarnation=0, lifecycle=lifecycle, reports_residency=False)


def _access(request: TraceRequest, ts_us: int, source: str, seq: int) -> Access:
    return Access(
        ts_us=ts_us,
        source=source,
        seq=seq,
        tenant=request.tenant,
        model=request.model,
        instance=request.instance or "",
        incarnation=0,
        request_id=request.request_id,
        session=request.session,
        parent_session=request.parent_session,
        category=request.category,
        turn=request.turn,
        prompt_tokens=request.prompt_tokens,
        hit_tokens=request.hit_tokens or 0,
        block_size=request.block_size,
        chain=request.full_chain().tolist(),
        output_tokens=request.output_tokens,
        queue_ms=request.queue_ms,
        prefill_ms=request.prefill_ms,
        ttft_ms=request.ttft_ms,
    )
