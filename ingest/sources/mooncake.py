"""Mooncake traces: one JSON object a line, arrival in milliseconds, chained block ids of 512 tokens."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from ingest.sources.base import Decoder, Milliseconds, Source, Tokens, TraceRequest, check_length, checked_block_size, hashes


class _Row(msgspec.Struct, forbid_unknown_fields=True):
    timestamp: Milliseconds
    input_length: Tokens
    output_length: Tokens
    hash_ids: list[int]


class _OpenRow(_Row, forbid_unknown_fields=False):
    pass


class MooncakeDecoder(Decoder):
    """Rows `{timestamp ms, input_length, output_length, hash_ids[]}` with ceil(input_length / block_size) ids."""

    def __init__(self, *, ignore_unknown_fields: bool = False, block_size: int = 512) -> None:
        self._rows = msgspec.json.Decoder(_OpenRow if ignore_unknown_fields else _Row)
        self._block_size = checked_block_size(block_size)

    def decode(self, unit: bytes, line: int) -> Sequence[TraceRequest]:
        row = self._rows.decode(unit)
        check_length(len(row.hash_ids), row.input_length, self._block_size, "ceil")
        return (
            TraceRequest(
                arrived_at_s=row.timestamp / 1000,
                prompt_tokens=row.input_length,
                output_tokens=row.output_length,
                block_size=self._block_size,
                chain=hashes(row.hash_ids),
                request_id=f"{self.label}:{line}",
            ),
        )


SOURCE = Source(
    name="mooncake",
    summary="Mooncake FAST'25 and arXiv traces: JSON lines, chained ids, 512-token blocks",
    block_size=512,
    has_blocks=True,
    clock="start",
    decoder=MooncakeDecoder,
    options=("block_size",),
)
