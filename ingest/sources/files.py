"""Streaming access to trace files as they are: plain, gzip, zstd (long windows too), xz, tar of any of these, folders, standard input.

Compression and tar are told by content, not by name. Nothing is unpacked to disk and never is a whole file in memory, a document apart.
"""

from __future__ import annotations

import gzip
import io
import lzma
import sys
import tarfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import zstandard

from ingest.errors import InputError

Progress = Callable[[int, int | None], None]
Report = Callable[[InputError], None]
Unit = tuple[str, int, bytes]

MAX_UNIT_BYTES = 1 << 30
MAX_ZSTD_WINDOW_BYTES = 1 << 31
_CHUNK_BYTES = 1 << 16
# zstd may expand a chunk a thousandfold, and what one chunk yields is held at once.
_ZSTD_CHUNK_BYTES = 1 << 13
_PACKED = (".gz", ".zst", ".xz")
_TARS = (".tar", ".tgz", ".tzst", ".txz")
_READ_ERRORS = (EOFError, OSError, zlib.error, lzma.LZMAError, zstandard.ZstdError, tarfile.TarError)


@dataclass(frozen=True, slots=True)
class Input:
    """One file to read, or standard input (`path` None)."""

    name: str
    path: Path | None
    size_bytes: int | None

    @property
    def folder(self) -> Path | None:
        return self.path.parent if self.path else None


class _Unreadable(InputError):
    """Nothing more can be read of this input."""


class Meter:
    """Adds up the compressed bytes that were read over all inputs and tells `progress(bytes_done, bytes_total or None)`."""

    def __init__(self, inputs: Sequence[Input], progress: Progress | None) -> None:
        sizes = [i.size_bytes for i in inputs]
        self.total = None if None in sizes else sum(s for s in sizes if s)
        self.done, self._progress = 0, progress

    def finish(self) -> None:
        """All that matters has been read; what may follow the end of an archive has not."""
        if self.total is not None:
            self.add(self.total - self.done)

    def add(self, count: int) -> None:
        self.done += count
        if self._progress:
            self._progress(self.done, self.total)


def wanted(name: str, suffixes: tuple[str, ...], beside: tuple[str, ...] = ()) -> bool:
    """Whether a file of a folder or archive belongs to the trace, by its name: a suffix that the dialect uses, or a tar."""
    base = name.rsplit("/", 1)[-1].lower()
    for packed in _PACKED:
        base = base.removesuffix(packed)
    return not base.startswith((".", *beside)) and base.endswith((*suffixes, *_TARS))


def expand(paths: Iterable[str | Path], suffixes: tuple[str, ...], beside: tuple[str, ...] = ()) -> list[Input]:
    """Inputs that `paths` name: files as they are, folders as their fitting files sorted by path, `-` as standard input.

    Raises `InputError` for a path that does not exist and for a folder without a fitting file.
    """
    inputs: list[Input] = []
    for given in paths:
        if str(given) == "-":
            inputs.append(Input("<stdin>", None, None))
            continue
        path = Path(given)
        if not path.exists():
            raise InputError(str(path), 0, "no such file or folder", "check the path")
        found = sorted(p for p in path.rglob("*") if p.is_file() and wanted(p.name, suffixes, beside)) if path.is_dir() else [path]
        if not found:
            kinds = ", ".join(suffixes)
            raise InputError(str(path), 0, f"the folder holds no {kinds} file", "name the files, or check --format")
        inputs.extend(Input(str(p), p, p.stat().st_size if p.is_file() else None) for p in found)
    if not inputs:
        raise InputError("<nothing>", 0, "no input was named", "give a file, a folder or - for standard input")
    return inputs


class _Tap(io.RawIOBase):
    """A readable stream that can show its head without consuming it and reports how much it has read."""

    def __init__(self, source: Any, add: Callable[[int], None] | None = None) -> None:
        # read1 gives what a pipe has instead of waiting for more.
        self._read = getattr(source, "read1", source.read)
        self._add, self._ahead = add, b""

    def readable(self) -> bool:
        return True

    def _pull(self, size: int) -> bytes:
        data: bytes = self._read(size) or b""
        if self._add and data:
            self._add(len(data))
        return data

    def head(self, size: int) -> bytes:
        """The next `size` bytes; fewer at the end, and where a line ends before, so that a live pipe need not fill up first."""
        while len(self._ahead) < size and b"\n" not in self._ahead:
            data = self._pull(_CHUNK_BYTES)
            if not data:
                break
            self._ahead += data
        return self._ahead[:size]

    def readinto(self, buffer: Any) -> int:
        data = self._ahead or self._pull(len(buffer))
        count = min(len(data), len(buffer))
        buffer[:count] = data[:count]
        self._ahead = data[count:]
        return count


class _Zstd(io.RawIOBase):
    """Decompressed bytes of zstd frames. Raises `EOFError` where a frame is cut, which zstandard's own reader passes over in silence."""

    def __init__(self, source: _Tap) -> None:
        self._source, self._out, self._at = source, b"", 0
        self._context = zstandard.ZstdDecompressor(max_window_size=MAX_ZSTD_WINDOW_BYTES)
        self._frame: Any = None

    def readable(self) -> bool:
        return True

    def _more(self) -> bool:
        data = (self._frame.unused_data if self._frame and self._frame.eof else b"") or self._source.read(_ZSTD_CHUNK_BYTES)
        if not data:
            if self._frame and not self._frame.eof:
                raise EOFError("zstd frame ends early")
            return False
        if self._frame is None or self._frame.eof:
            self._frame = self._context.decompressobj()
        self._out, self._at = self._frame.decompress(data), 0
        return True

    def readinto(self, buffer: Any) -> int:
        while self._at >= len(self._out):
            if not self._more():
                return 0
        count = min(len(self._out) - self._at, len(buffer))
        buffer[:count] = self._out[self._at : self._at + count]
        self._at += count
        return count


_MAGICS: dict[bytes, Callable[[_Tap], Any]] = {
    b"\x1f\x8b": lambda tap: gzip.GzipFile(fileobj=io.BufferedReader(tap)),
    b"\x28\xb5\x2f\xfd": _Zstd,
    b"\xfd7zXZ\x00": lambda tap: lzma.LZMAFile(io.BufferedReader(tap)),  # noqa: SIM115  (its tap closes it)
}


def _unpacked(raw: _Tap) -> _Tap:
    head = raw.head(6)
    for magic, opener in _MAGICS.items():
        if head.startswith(magic):
            return _Tap(opener(raw))
    return raw


def _open(source: Input) -> AbstractContextManager[IO[bytes]]:
    return source.path.open("rb") if source.path else nullcontext(sys.stdin.buffer)


def _members(name: str, stream: _Tap, wants: Callable[[str], bool]) -> Iterator[tuple[str, IO[bytes]]]:
    """The files of a tar in its own order, or the stream itself."""
    if stream.head(512)[257:262] != b"ustar":
        yield name, io.BufferedReader(stream, _CHUNK_BYTES)
        return
    count = 0
    with tarfile.open(fileobj=io.BufferedReader(stream, _CHUNK_BYTES), mode="r|") as archive:
        for member in archive:
            content = archive.extractfile(member) if member.isfile() and wants(member.name) else None
            if content is not None:
                count += 1
                yield f"{name}:{member.name}", _unpacked_member(content)
            archive.members = []  # type: ignore[attr-defined]  # tarfile keeps every header otherwise
    if not count:
        raise _Unreadable(name, 0, "the archive holds no file of this format", "check --format")


def _unpacked_member(content: IO[bytes]) -> IO[bytes]:
    return io.BufferedReader(_unpacked(_Tap(content)), _CHUNK_BYTES)


def _lines(name: str, stream: IO[bytes]) -> Iterator[Unit]:
    line = 0
    while data := stream.readline(MAX_UNIT_BYTES):
        line += 1
        if len(data) == MAX_UNIT_BYTES:
            raise _Unreadable(name, line, f"a line longer than {MAX_UNIT_BYTES} bytes", "split the file into lines; check --format")
        data = (data.removeprefix(b"\xef\xbb\xbf") if line == 1 else data).strip()
        if data:
            yield name, line, data


def _document(name: str, stream: IO[bytes]) -> Iterator[Unit]:
    data = stream.read(MAX_UNIT_BYTES + 1)
    if len(data) > MAX_UNIT_BYTES:
        raise _Unreadable(name, 0, f"a document larger than {MAX_UNIT_BYTES} bytes", "this format has one session per file; check --format")
    if data.strip():
        yield name, 1, data


def units(source: Input, kind: str, wants: Callable[[str], bool], meter: Meter, report: Report) -> Iterator[Unit]:
    """(display name, line number, bytes) of every non-blank line, or (display name, 1, bytes) of every document, of one input, in order.

    A file that is empty, cannot be opened or is cut or corrupt goes to `report` as an `InputError`; what came before it has been yielded.
    Cost: memory of one line or document, plus the compression window.
    """
    read = _lines if kind == "line" else _document
    name, line = source.name, 0
    try:
        with _open(source) as handle:
            for name, content in _members(source.name, _unpacked(_Tap(handle, meter.add)), wants):
                line = 0
                for unit in read(name, content):
                    line = unit[1]
                    yield unit
                if not line:
                    report(InputError(name, 0, "the file is empty", "name a file with records, or fetch it again"))
    except _Unreadable as error:
        report(error)
    except _READ_ERRORS as error:
        report(_broken(name, line, source, error))


def _broken(name: str, line: int, source: Input, error: Exception) -> InputError:
    text = str(error) or type(error).__name__
    if isinstance(error, PermissionError):
        return InputError(name, 0, "permission denied", "make the file readable")
    if isinstance(error, OSError) and error.errno is not None:
        return InputError(name, line, text, "check the file and the disk")
    after = f" after line {line}" if line else ""
    return InputError(name, line, f"corrupt or cut compressed data{after}: {text}", f"fetch {source.name} again, or repack it")
