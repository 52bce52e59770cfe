"""Reading one input after another through a decoder: what happens to bad lines, to order, and to the wrong format."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Iterator, Sequence

from ingest.errors import InputError
from ingest.sources.base import DECODE_ERRORS, BadLine, Decoder, Source, TraceRequest, explain
from ingest.sources.files import Input, Meter, Unit, units, wanted

OnBad = Callable[[InputError], None]
FIRST_LINES = 20
_RAW_BYTES = 4096


def looks_like(source: Source, line: bytes) -> bool:
    """Whether `line` (a whole document for document formats) is one of `source`."""
    if source.looks_like is not None:
        return source.looks_like(line)
    decoder = source.decoder()
    decoder.start("", None)
    try:
        found = decoder.decode(line, 1)
    except (BadLine, *DECODE_ERRORS):
        return False
    return not any(isinstance(item, BadLine) for item in found)


class BadLines:
    """The policy for what cannot be read: raise at the first, or tell `on_bad` and go on unless the format itself is wrong.

    The format counts as wrong when none of the first 20 lines, or of a shorter input, can be read. Until that is settled `on_bad` is not
    told, so that a wrong format is one error and not twenty-one.
    """

    def __init__(self, source: Source, registry: Iterable[Source], on_bad: OnBad | None) -> None:
        self._source, self._registry, self._on_bad = source, registry, on_bad
        self._good = False
        self._held: list[InputError] = []
        self._guess: str | None = None

    def good(self) -> None:
        """A line was read: the format is right."""
        self._good = True
        held, self._held = self._held, []
        for error in held:
            self.file_error(error)

    def file_error(self, error: InputError) -> None:
        """What is wrong whatever the format, such as a cut file: raised, or told to `on_bad`."""
        if self._on_bad is None:
            raise error
        self._on_bad(error)

    def line_error(self, unit: Unit, why: BadLine) -> None:
        """A bad line or part of a document. Raises the wrong-format error when that is what it is."""
        name, line, data = unit
        error = InputError(name, line + why.line_offset, why.reason, why.mend, (why.raw or data)[:_RAW_BYTES])
        if self._good:
            self.file_error(error)
            return
        if not self._held:
            self._guess = self._other_format(data)
        self._held.append(error)
        if self._on_bad is None:
            raise self._wrong_format() if self._guess else error
        if len(self._held) >= FIRST_LINES:
            raise self._wrong_format()

    def end(self) -> None:
        """The input has ended. Raises the wrong-format error when nothing of it could be read."""
        if self._held:
            raise self._wrong_format()

    def _other_format(self, data: bytes) -> str | None:
        first = data.split(b"\n", 1)[0].strip()
        for other in self._registry:
            if other.name != self._source.name and looks_like(other, data if other.unit == "document" else first):
                return other.name
        return None

    def _wrong_format(self) -> InputError:
        first, name = self._held[0], self._source.name
        if self._guess:
            return InputError(
                first.path, first.line, f"this is not {name}: it looks like {self._guess}", f"use --format {self._guess}", first.raw
            )
        names = ", ".join(source.name for source in self._registry)
        reason = f"no line can be read as {name} ({len(self._held)} tried; the first: {first.reason})"
        return InputError(first.path, first.line, reason, f"choose a --format that fits ({names}), or mend the file", first.raw)


def read_inputs(
    source: Source, inputs: Sequence[Input], decoder: Decoder, bad: BadLines, meter: Meter, ordered: bool
) -> Iterator[TraceRequest]:
    """Requests of `inputs`, one after another; by arrival if `ordered`, holding only what `decoder.release_s` does not yet let go.

    Cost: decoding, plus O(log held) a request where the source needs reordering.
    """
    held: list[tuple[float, int, TraceRequest]] = []
    serial = 0
    for items in _decoded(source, inputs, decoder, bad, meter):
        if not ordered or decoder.release_s == math.inf:
            yield from items
            continue
        for item in items:
            heapq.heappush(held, (item.arrived_at_s, serial, item))
            serial += 1
        while held and held[0][0] <= decoder.release_s:
            yield heapq.heappop(held)[2]
    while held:
        yield heapq.heappop(held)[2]


def _decoded(source: Source, inputs: Sequence[Input], decoder: Decoder, bad: BadLines, meter: Meter) -> Iterator[Sequence[TraceRequest]]:
    for one in inputs:
        current = None
        for unit in units(one, source.unit, lambda name: wanted(name, source.suffixes, source.beside), meter, bad.file_error):
            if unit[0] != current:
                current = unit[0]
                decoder.start(current, one.folder)
            yield _decode(decoder, unit, bad)
    bad.end()


def _decode(decoder: Decoder, unit: Unit, bad: BadLines) -> Sequence[TraceRequest]:
    try:
        items = decoder.decode(unit[2], unit[1])
    except BadLine as why:
        bad.line_error(unit, why)
        return ()
    except DECODE_ERRORS as error:
        bad.line_error(unit, explain(error))
        return ()
    found = [item for item in items if isinstance(item, TraceRequest)]
    if found or not items:
        bad.good()
    for item in items:
        if isinstance(item, BadLine):
            bad.line_error(unit, item)
    return found


def merge_inputs(streams: Sequence[Iterator[TraceRequest]]) -> Iterator[TraceRequest]:
    """Streams that are each in time order, merged by arrival; one request of each is held."""
    return heapq.merge(*streams, key=lambda request: request.arrived_at_s)
