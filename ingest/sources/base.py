"""What every trace dialect gives: `TraceRequest`, and the `Decoder` and `Source` that a dialect is made of."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from ingest.chaining import Hashes
from ingest.errors import UsageError

MAX_PROMPT_TOKENS = 1 << 31
NO_BLOCKS: Hashes = np.empty(0, dtype=np.uint64)

Tokens = Annotated[int, msgspec.Meta(ge=0, le=MAX_PROMPT_TOKENS)]
# Both end where microseconds since the epoch no longer fit a signed 64-bit integer.
MAX_SECONDS = 9e12
Seconds = Annotated[float, msgspec.Meta(ge=0, le=MAX_SECONDS)]
Milliseconds = Annotated[float, msgspec.Meta(ge=0, le=MAX_SECONDS * 1000)]
Clock = Literal["epoch", "start", "session"]


@dataclass(slots=True)
class TraceRequest:
    """One prefill request of a trace.

    `arrived_at_s` counts on the trace's own clock (`Source.clock`). `chain` holds the hash of every block that the trace lists, a partial
    tail block included. `block_tokens` (int32) gives tokens per block where blocks are unequal; None means `block_size` each, with the rest
    of the prompt in the last one. `hit_tokens` and the times are what the engine itself reported, None where the trace does not say.
    """

    arrived_at_s: float
    prompt_tokens: int
    output_tokens: int | None
    block_size: int
    chain: Hashes
    block_tokens: NDArray[np.int32] | None = None
    tenant: str = "default"
    tenant_assigned: bool = False
    session: str | None = None
    parent_session: str | None = None
    category: str | None = None
    turn: int | None = None
    model: str = "default"
    request_id: str = ""
    instance: str | None = None
    hit_tokens: int | None = None
    queue_ms: float | None = None
    prefill_ms: float | None = None
    ttft_ms: float | None = None

    def tokens_per_block(self) -> NDArray[np.int32]:
        """Tokens of each block of `chain` (int32); a copy unless the trace gave them."""
        if self.block_tokens is not None:
            return self.block_tokens
        tokens = np.full(len(self.chain), self.block_size, dtype=np.int32)
        if len(tokens):
            rest = self.prompt_tokens - (len(tokens) - 1) * self.block_size
            tokens[-1] = min(max(rest, 1), self.block_size)
        return tokens

    def full_chain(self) -> Hashes:
        """The chain without a partial tail block: at most `floor(prompt_tokens / block_size)` hashes; a view. For equal blocks only."""
        return self.chain[: self.prompt_tokens // self.block_size]


class BadLine(Exception):
    """A unit of input that a decoder cannot read: reason and mend, and for a part of a document its lines before and its bytes."""

    def __init__(self, reason: str, mend: str, line_offset: int = 0, raw: bytes = b"") -> None:
        super().__init__(reason)
        self.reason, self.mend, self.line_offset, self.raw = reason, mend, line_offset, raw


class Decoder:
    """Turns units of input (lines, or whole documents) into requests; one per input, holding what a dialect must remember between them.

    `release_s`: no later unit holds a request that arrived before it, so requests up to it may leave the reorder heap. Infinite for traces
    that are written in time order.
    """

    release_s: float = math.inf

    def start(self, name: str, folder: Path | None) -> None:
        """A new file begins; `folder` is where it lies, None for standard input."""
        self.name, self.folder = name, folder
        # Without its folder, so that ids do not depend on where the file lies.
        self.label = name.rsplit("/", 1)[-1]

    def decode(self, unit: bytes, line: int) -> Sequence[TraceRequest | BadLine]:
        """Requests of a unit, with a `BadLine` for each part of it that cannot be read. Raises `BadLine` when nothing of it can."""
        raise BadLine("this format cannot be decoded", "choose another --format")


@dataclass(frozen=True)
class Source:
    """A trace dialect: name, one line about it, and its decoder.

    `decoder` is called with `ignore_unknown_fields` and any of `options`. `clock` says what `arrived_at_s` counts from: the Unix epoch, the
    start of the trace, or `session` where sessions have no common clock and are given start times. `block_size` is the default one, in
    tokens. In folders and archives, files with one of `suffixes` (compression aside) are read, except those whose name starts with one of
    `beside`. `looks_like` tells whether a line is one of this dialect where trying the decoder cannot.
    """

    name: str
    summary: str
    block_size: int
    has_blocks: bool
    clock: Clock
    decoder: Callable[..., Decoder]
    options: tuple[str, ...] = ()
    unit: Literal["line", "document"] = "line"
    suffixes: tuple[str, ...] = (".jsonl", ".json", ".ndjson")
    beside: tuple[str, ...] = ()
    looks_like: Callable[[bytes], bool] | None = None


def explain(error: Exception) -> BadLine:
    """What a msgspec error means to whoever has to mend the file."""
    text = str(error).splitlines()[0] if str(error) else type(error).__name__
    if not isinstance(error, msgspec.ValidationError):
        if "truncated" in text:
            return BadLine("truncated: the JSON ends early", "fetch the file again, or complete or drop this line")
        return BadLine(f"not JSON: {text}", "correct or drop this line; if every line is so, check --format")
    if "unknown field" in text:
        return BadLine(f"unknown field: {text}", "check --format, or pass --ignore-unknown-fields")
    if "missing required field" in text:
        return BadLine(f"missing field: {text}", "add the field or drop this line; if every line is so, check --format")
    if "`int` >= " in text or "`float` >= " in text:
        return BadLine(f"negative number: {text}", "lengths and times cannot be negative; correct or drop this line")
    if "`int` <= " in text or "`float` <= " in text:
        return BadLine(f"number too large: {text}", "a prompt has at most 2^31 tokens; correct or drop this line")
    return BadLine(f"wrong type: {text}", "correct or drop this line; if every line is so, check --format")


DECODE_ERRORS = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, ValueError)


def hashes(ids: list[int]) -> Hashes:
    """Block hashes as u64. Raises `BadLine` for one below 0 or above 2^64-1. Cost: 10 ns an id, half of what `np.array` takes."""
    try:
        return np.frombuffer(array("Q", ids), dtype=np.uint64)
    except OverflowError:
        wrong = next(i for i in ids if not 0 <= i < 1 << 64)
        shown = str(wrong) if abs(wrong) < 1 << 128 else f"an integer of {wrong.bit_length()} bits"
        raise BadLine(f"hash out of range: {shown}", "hashes are unsigned 64-bit integers, 0 to 2^64-1; fold wider ones") from None


def seconds(value: str | float, field: str) -> float:
    """A time written as text. Raises `BadLine` when it is no number, negative or beyond what an event can hold."""
    try:
        number = float(value)
    except ValueError:
        raise BadLine(f"wrong type: {field} is {value!r}, expected seconds", "correct or drop this line") from None
    if not 0 <= number <= MAX_SECONDS:
        raise BadLine(f"negative number, or a time out of range: {field} is {value!r}", "correct or drop this line")
    return number


def checked_block_size(block_size: int) -> int:
    """The `block_size` option, in tokens. Raises `UsageError` below 1."""
    if block_size < 1:
        raise UsageError(f"block_size={block_size}: a block has at least 1 token")
    return block_size


def check_length(blocks: int, prompt_tokens: int, block_size: int, rounding: Literal["ceil", "floor", "either"]) -> None:
    """Raises `BadLine` unless a prompt of `prompt_tokens` has `blocks` blocks of `block_size` tokens, rounded as the dialect does."""
    floor, ceil = prompt_tokens // block_size, -(-prompt_tokens // block_size)
    allowed = {"ceil": (ceil,), "floor": (floor,), "either": (floor, ceil)}[rounding]
    if blocks not in allowed:
        expected = " or ".join(str(n) for n in sorted(set(allowed)))
        raise BadLine(
            f"list length {blocks} does not fit {prompt_tokens} tokens in blocks of {block_size} (expected {expected})",
            "correct or drop this line; if every line is so, check --format and the block size",
        )
