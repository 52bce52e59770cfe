"""RAGPulse traces: prompts as lists of content components (system prompt, passages, history, web search, user input) of unequal length.

A component id says what stands there, not what stands before it, so the ids are chained into positions here. Token lengths come from the
tables `1_sys_prompt.jsonl` to `5_web_search.jsonl` that lie beside the trace.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np

from ingest.chaining import chain_hashes, recut
from ingest.errors import InputError
from ingest.sources.base import (
    DECODE_ERRORS,
    MAX_PROMPT_TOKENS,
    BadLine,
    Decoder,
    Source,
    Tokens,
    TraceRequest,
    checked_block_size,
    explain,
    hashes,
    seconds,
)
from ingest.sources.files import Meter, expand, units

TABLES = {
    "1_sys_prompt": "sys_prompt_id",
    "2_passages": "passage_id",
    "3_history": "history_id",
    "4_user_input": "user_input_id",
    "5_web_search": "web_search_id",
}
_LONGEST_COMPONENT_TOKENS = 512


class _Components(msgspec.Struct, forbid_unknown_fields=True):
    sys_prompt: list[int]
    passages_ids: list[int]
    history: list[int]
    web_search: list[int]
    user_input: list[int]


class _Row(msgspec.Struct, forbid_unknown_fields=True):
    timestamp: str | float
    input_length: Tokens
    output_length: Tokens
    hash_ids: _Components
    session_id: str | None = None


class _OpenComponents(_Components, forbid_unknown_fields=False):
    pass


class _OpenRow(_Row, forbid_unknown_fields=False):
    hash_ids: _OpenComponents


class RagPulseDecoder(Decoder):
    """Rows `{timestamp "s", input_length, output_length, hash_ids {…}, session_id}`, sorted by arrival, which holds the trace in memory.

    As it is, a chain has one hash per component and `block_tokens` their lengths. `prompt_tokens` is their sum: `input_length` counts 6 to
    12 tokens of template more, whose places the trace does not tell. `block_size=N` re-cuts it into blocks of N tokens whose hashes commit
    to everything before, so that it can run through a block cache. `tables` is the folder of the component tables where that is not the
    trace's own.
    """

    release_s = -math.inf

    def __init__(self, *, ignore_unknown_fields: bool = False, block_size: int | None = None, tables: str | Path | None = None) -> None:
        self._rows = msgspec.json.Decoder(_OpenRow if ignore_unknown_fields else _Row)
        self._block_size = None if block_size is None else checked_block_size(block_size)
        self._tables = tables
        self._lengths: dict[int, int] = {}

    def decode(self, unit: bytes, line: int) -> Sequence[TraceRequest]:
        row = self._rows.decode(unit)
        arrived_at_s = seconds(row.timestamp, "timestamp")
        parts = row.hash_ids
        ids = [*parts.sys_prompt, *parts.passages_ids, *parts.history, *parts.web_search, *parts.user_input]
        request = TraceRequest(
            arrived_at_s=arrived_at_s,
            prompt_tokens=row.input_length,
            output_tokens=row.output_length,
            block_size=self._block_size or _LONGEST_COMPONENT_TOKENS,
            chain=chain_hashes(hashes(ids)),
            session=row.session_id,
            request_id=f"{self.label}:{line}",
        )
        self._measure(request, ids)
        return (request,)

    def _measure(self, request: TraceRequest, ids: list[int]) -> None:
        self._lengths = self._lengths or _read_tables(self.name, self._tables or self.folder)
        unknown = [i for i in ids if i not in self._lengths]
        if unknown:
            raise BadLine(f"component {unknown[0]} is in none of the tables", "fetch trace and tables of one release")
        tokens = np.array([self._lengths[i] for i in ids], dtype=np.int32)
        total = int(tokens.sum())
        if total > request.prompt_tokens:
            raise BadLine(
                f"list length does not fit: {total} tokens of components exceed input_length {request.prompt_tokens}",
                "correct or drop this line; check that trace and tables are of one release",
            )
        request.prompt_tokens = total
        if self._block_size is None:
            request.block_tokens = tokens
        else:
            request.chain = recut(request.chain, tokens, request.prompt_tokens, self._block_size)


def looks_like_row(line: bytes) -> bool:
    """Whether a line has the form of a row, tables aside."""
    try:
        msgspec.json.decode(line, type=_Row)
    except DECODE_ERRORS:
        return False
    return True


def _read_tables(trace: str, folder: str | Path | None) -> dict[int, int]:
    """Tokens of every component. Raises `InputError` for a missing table or a bad row in one."""
    lengths: dict[int, int] = {}
    for table, id_field in TABLES.items():
        found = sorted(Path(folder).glob(f"{table}.jsonl*")) if folder is not None else []
        if not found:
            raise InputError(
                trace, 0, f"no {table}.jsonl beside the trace", "put the five component tables beside it, or name their folder (tables)"
            )
        inputs = expand(found[:1], (".jsonl",))
        for name, line, row in units(inputs[0], "line", lambda _: True, Meter(inputs, None), _stop):
            lengths.update([_component(name, line, row, id_field)])
    return lengths


def _component(name: str, line: int, row: bytes, id_field: str) -> tuple[int, int]:
    try:
        values = msgspec.json.decode(row, type=dict[str, int])
        id_, tokens = values[id_field], values["token_length"]
    except DECODE_ERRORS as error:
        why = explain(error)
        raise InputError(name, line, why.reason, why.mend, row[:200]) from error
    except KeyError as error:
        raise InputError(name, line, f"missing field: {error.args[0]}", "fetch the table again", row[:200]) from error
    if not 0 <= tokens < MAX_PROMPT_TOKENS:
        raise InputError(name, line, f"token_length {tokens} is out of range", "fetch the table again", row[:200])
    return id_, tokens


def _stop(error: InputError) -> None:
    raise error


SOURCE = Source(
    name="ragpulse",
    summary="RAGPulse traces: JSON lines of content components, chained; tables of their lengths beside the trace",
    block_size=_LONGEST_COMPONENT_TOKENS,
    has_blocks=True,
    clock="start",
    decoder=RagPulseDecoder,
    options=("block_size", "tables"),
    beside=tuple(TABLES),
    looks_like=looks_like_row,
)
