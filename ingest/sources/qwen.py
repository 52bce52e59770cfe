"""Qwen-Bailian traces (KVCache in the Wild, ATC'25): one JSON object a line, arrival in seconds, blocks of 16 tokens.

An id names a block's content: the same id can stand twice in one prompt, after different predecessors. So the ids are chained here.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from ingest.chaining import chain_hashes
from ingest.sources.base import Decoder, Seconds, Source, Tokens, TraceRequest, check_length, checked_block_size, hashes


class _Row(msgspec.Struct, forbid_unknown_fields=True):
    chat_id: int
    parent_chat_id: int
    timestamp: Seconds
    input_length: Tokens
    output_length: Tokens
    type: str
    turn: Tokens
    hash_ids: list[int]


class _OpenRow(_Row, forbid_unknown_fields=False):
    pass


class QwenDecoder(Decoder):
    """Rows with ceil(input_length / block_size) ids; the session is the root of the chat_id / parent_chat_id chain.

    Remembers the root of every chat_id, one dict entry a request.
    """

    def __init__(self, *, ignore_unknown_fields: bool = False, block_size: int = 16) -> None:
        self._rows = msgspec.json.Decoder(_OpenRow if ignore_unknown_fields else _Row)
        self._block_size = checked_block_size(block_size)
        self._roots: dict[int, int] = {}

    def decode(self, unit: bytes, line: int) -> Sequence[TraceRequest]:
        row = self._rows.decode(unit)
        check_length(len(row.hash_ids), row.input_length, self._block_size, "ceil")
        chain = chain_hashes(hashes(row.hash_ids))
        parent = row.parent_chat_id
        # A parent that the trace does not hold (it began earlier) still names the session that its children share.
        root = self._roots[row.chat_id] = row.chat_id if parent < 0 else self._roots.get(parent, parent)
        return (
            TraceRequest(
                arrived_at_s=row.timestamp,
                prompt_tokens=row.input_length,
                output_tokens=row.output_length,
                block_size=self._block_size,
                chain=chain,
                session=str(root),
                category=row.type,
                turn=row.turn,
                request_id=str(row.chat_id),
            ),
        )


SOURCE = Source(
    name="qwen",
    summary="Qwen-Bailian traces: JSON lines with chats and turns, 16-token blocks",
    block_size=16,
    has_blocks=True,
    clock="start",
    decoder=QwenDecoder,
    options=("block_size",),
)
