"""CSV traces without block hashes, for load only: BurstGPT and the Azure LLM inference traces."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from ingest.sources.base import MAX_PROMPT_TOKENS, NO_BLOCKS, BadLine, Decoder, Source, TraceRequest, seconds


class TableDecoder(Decoder):
    """Rows of a CSV file whose first line names the columns; `required` ones must be there, `known` ones may be."""

    required: tuple[str, ...] = ()
    known: tuple[str, ...] = ()

    def __init__(self, *, ignore_unknown_fields: bool = False) -> None:
        self._open = ignore_unknown_fields
        self._columns: list[str] | None = None

    def start(self, name: str, folder: Path | None) -> None:
        super().start(name, folder)
        self._columns = None

    def decode(self, unit: bytes, line: int) -> Sequence[TraceRequest]:
        try:
            cells = next(csv.reader([unit.decode()], strict=True))
        except csv.Error as error:
            raise BadLine(f"not CSV: {error}", "correct or drop this line; if every line is so, check --format") from None
        if self._columns is None:
            self._columns = self._header(cells)
            return ()
        if len(cells) != len(self._columns):
            raise BadLine(
                f"truncated: {len(cells)} cells where the header names {len(self._columns)}",
                "fetch the file again, or complete or drop this line",
            )
        return (self.row(dict(zip(self._columns, cells, strict=True)), line),)

    def _header(self, cells: list[str]) -> list[str]:
        columns = [cell.strip() for cell in cells]
        missing = [name for name in self.required if name not in columns]
        if missing:
            raise BadLine(
                f"missing field: no column {', '.join(missing)}", f"the first line must name {','.join(self.required)}; check --format"
            )
        unknown = [name for name in columns if name not in self.required and name not in self.known]
        if unknown and not self._open:
            raise BadLine(f"unknown field: column {', '.join(unknown)}", "check --format, or pass --ignore-unknown-fields")
        return columns

    def row(self, cells: dict[str, str], line: int) -> TraceRequest:
        """The request of one row. Raises `BadLine`."""
        raise BadLine("this table cannot be decoded", "choose another --format")

    def load_only(self, arrived_at_s: float, prompt_tokens: int, output_tokens: int, line: int, **more: str | None) -> TraceRequest:
        """A request without blocks; `more` is any of session, category, model."""
        return TraceRequest(
            arrived_at_s=arrived_at_s,
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
            block_size=1,
            chain=NO_BLOCKS,
            session=more.get("session"),
            category=more.get("category"),
            model=more.get("model") or "default",
            request_id=f"{self.label}:{line}",
        )


def tokens_of(cells: dict[str, str], column: str) -> int:
    """A token count. Raises `BadLine` when it is no integer, negative or above 2^31."""
    try:
        value = int(cells[column])
    except ValueError:
        raise BadLine(f"wrong type: {column} is {cells[column]!r}, expected an integer", "correct or drop this line") from None
    if value < 0:
        raise BadLine(f"negative number: {column} is {value}", "lengths cannot be negative; correct or drop this line")
    if value > MAX_PROMPT_TOKENS:
        raise BadLine(f"number too large: {column} is {value}", "a prompt has at most 2^31 tokens; correct or drop this line")
    return value


class AzureDecoder(TableDecoder):
    """Rows `TIMESTAMP,ContextTokens,GeneratedTokens`; stamps are UTC with seven decimals, of which microseconds are kept."""

    required = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")

    def row(self, cells: dict[str, str], line: int) -> TraceRequest:
        text = cells["TIMESTAMP"]
        try:
            stamp = datetime.fromisoformat(text)
        except ValueError:
            raise BadLine(f"wrong type: TIMESTAMP is {text!r}, expected YYYY-MM-DD HH:MM:SS.fffffff", "correct or drop this line") from None
        stamp = stamp if stamp.tzinfo else stamp.replace(tzinfo=UTC)
        return self.load_only(stamp.timestamp(), tokens_of(cells, "ContextTokens"), tokens_of(cells, "GeneratedTokens"), line)


class BurstGptDecoder(TableDecoder):
    """Rows with `Timestamp` in seconds, `Model`, token counts and `Log Type`; later releases add `Session ID` and `Elapsed time`.

    A failed request has 0 response tokens and is kept.
    """

    required = ("Timestamp", "Model", "Request tokens", "Response tokens", "Total tokens", "Log Type")
    known = ("Session ID", "Elapsed time")

    def row(self, cells: dict[str, str], line: int) -> TraceRequest:
        return self.load_only(
            seconds(cells["Timestamp"], "Timestamp"),
            tokens_of(cells, "Request tokens"),
            tokens_of(cells, "Response tokens"),
            line,
            session=cells.get("Session ID") or None,
            category=cells["Log Type"] or None,
            model=cells["Model"],
        )


AZURE = Source(
    name="azure",
    summary="Azure LLM inference traces: CSV of arrivals and lengths, no blocks",
    block_size=1,
    has_blocks=False,
    clock="epoch",
    decoder=AzureDecoder,
    suffixes=(".csv",),
)
BURSTGPT = Source(
    name="burstgpt",
    summary="BurstGPT traces: CSV of arrivals, models and lengths, no blocks",
    block_size=1,
    has_blocks=False,
    clock="start",
    decoder=BurstGptDecoder,
    suffixes=(".csv",),
)
