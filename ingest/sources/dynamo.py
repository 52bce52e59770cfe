"""Dynamo request telemetry (`DYN_REQUEST_TRACE=1`): one JSON event a line; `request_end` events hold a request and what the engine did."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from ingest.sources.base import BadLine, Decoder, Milliseconds, Source, Tokens, TraceRequest, check_length, hashes


class _Context(msgspec.Struct):
    session_id: str | None = None
    parent_session_id: str | None = None


class _Worker(msgspec.Struct):
    prefill_worker_id: int | None = None
    prefill_dp_rank: int | None = None


class _Replay(msgspec.Struct):
    trace_block_size: int
    input_length: Tokens
    input_sequence_hashes: list[int]


class _Request(msgspec.Struct):
    request_id: str
    replay: _Replay | None = None
    model: str = "default"
    output_tokens: Tokens | None = None
    cached_tokens: Tokens | None = None
    request_received_ms: Milliseconds | None = None
    prefill_wait_time_ms: Milliseconds | None = None
    prefill_time_ms: Milliseconds | None = None
    ttft_ms: Milliseconds | None = None
    total_time_ms: Milliseconds | None = None
    worker: _Worker | None = None


class _Event(msgspec.Struct):
    schema: str
    event_type: str
    event_time_unix_ms: Milliseconds
    agent_context: _Context | None = None
    request: _Request | None = None


class _Row(msgspec.Struct):
    event: _Event


class DynamoDecoder(Decoder):
    """`request_end` events; other events are passed over and unknown fields are allowed, for the schema is open.

    Events are written when a request ends but come out by arrival: a request is held until the log is `reorder_s` past its arrival. One
    that ran for longer still comes out, late.
    """

    def __init__(self, *, ignore_unknown_fields: bool = False, reorder_s: float = 600.0) -> None:
        self._rows = msgspec.json.Decoder(_Row)
        self._reorder_s = reorder_s
        self.release_s = -math.inf

    def decode(self, unit: bytes, line: int) -> Sequence[TraceRequest]:
        event = self._rows.decode(unit).event
        if not event.schema.startswith("dynamo."):
            raise BadLine(f"event schema {event.schema!r} is not Dynamo's", "check --format")
        self.release_s = max(self.release_s, event.event_time_unix_ms / 1000 - self._reorder_s)
        if event.event_type != "request_end":
            return ()
        request = event.request
        if request is None or request.replay is None:
            raise BadLine("request_end without request.replay", "turn replay hashes on in Dynamo's request trace")
        return (_request(event, request, request.replay),)


def _request(event: _Event, request: _Request, replay: _Replay) -> TraceRequest:
    if replay.trace_block_size < 1:
        raise BadLine(f"trace_block_size {replay.trace_block_size} is below 1", "correct or drop this line")
    check_length(len(replay.input_sequence_hashes), replay.input_length, replay.trace_block_size, "either")
    context = event.agent_context or _Context()
    arrived_ms = request.request_received_ms
    if arrived_ms is None:
        arrived_ms = max(event.event_time_unix_ms - (request.total_time_ms or 0.0), 0.0)
    return TraceRequest(
        arrived_at_s=arrived_ms / 1000,
        prompt_tokens=replay.input_length,
        output_tokens=request.output_tokens,
        block_size=replay.trace_block_size,
        chain=hashes(replay.input_sequence_hashes),
        session=context.session_id,
        parent_session=context.parent_session_id,
        model=request.model,
        request_id=request.request_id,
        instance=_instance(request.worker),
        hit_tokens=request.cached_tokens,
        queue_ms=request.prefill_wait_time_ms,
        prefill_ms=request.prefill_time_ms,
        ttft_ms=request.ttft_ms,
    )


def _instance(worker: _Worker | None) -> str | None:
    if worker is None or worker.prefill_worker_id is None:
        return None
    rank = worker.prefill_dp_rank
    return f"{worker.prefill_worker_id}/{rank}" if rank else str(worker.prefill_worker_id)


SOURCE = Source(
    name="dynamo",
    summary="NVIDIA Dynamo request trace: JSON-lines telemetry with engine truth (cached tokens, times, worker)",
    block_size=16,
    has_blocks=True,
    clock="epoch",
    decoder=DynamoDecoder,
    options=("reorder_s",),
)
