"""The event log without Kafka: one append-only file of CRC-checked frames per partition.

A frame is `length u32, crc32 u32, payload`; the payload is `header length u32, headers as msgpack {str: bytes}, value`. The offset of a
record is its frame's index. A frame that a crash cut short is set aside at the next open, never silently read and never deleted.
"""

from __future__ import annotations

import fcntl
import logging
import os
import struct
import uuid
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import msgspec

from ingest.errors import KvtideError, UsageError
from ingest.events import Record

_FRAME = struct.Struct("<II")
_LENGTH = struct.Struct("<I")
_MAX_FRAME = 1 << 30
_INDEX_EVERY = 256  # frames between two remembered byte positions
_log = logging.getLogger("kvtide.locallog")


@dataclass(frozen=True, slots=True)
class StoredRecord:
    """One record as read back from a log: where it stood, its headers and its bytes."""

    partition: int
    offset: int
    headers: dict[str, bytes]
    value: bytes


class _Meta(msgspec.Struct, frozen=True):
    topic: str
    partitions: int
    log_id: str


@dataclass
class _Segment:
    path: Path
    count: int
    size: int
    marks: list[int]  # byte position of every _INDEX_EVERY-th frame
    file: BinaryIO | None = None


class LocalLog:
    """A topic in a folder: `<folder>/<topic>/<partition>.seg` and a meta file that fixes the partition count.

    One process at a time may write (`read_only=False` takes a lock); any number may read. `partitions` None takes what is there.
    `log_id` names this log for ever, so that a checkpoint of another log is noticed. `torn_frames` counts tails that were set aside.
    Raises `UsageError` when the count differs from the meta file, when the log is absent and cannot be created, or when it is locked.
    Cost: opening reads every frame once, about 1 s per GB.
    """

    def __init__(self, folder: str | Path, topic: str, partitions: int | None = None, *, read_only: bool = False) -> None:
        self.topic, self.folder = topic, Path(folder)
        self._folder = Path(folder) / topic
        self._read_only = read_only
        self._lock: BinaryIO | None = None
        meta = self._meta(partitions)
        self.partitions, self.log_id = meta.partitions, meta.log_id
        if not read_only:
            self._lock = _locked(self._folder)
        self.torn_frames = 0
        self._segments = [self._open(partition) for partition in range(self.partitions)]

    def append(self, partition: int, record: Record) -> None:
        """Append one record of the event contract."""
        self.append_raw(partition, record.headers, record.value)

    def append_raw(self, partition: int, headers: Mapping[str, bytes], value: bytes) -> None:
        """Append bytes with any headers; the record's offset is the partition's end offset before the call."""
        segment = self._segments[partition]
        if segment.file is None:
            raise UsageError(f"log {self._folder} is open for reading only")
        packed = msgspec.msgpack.encode(dict(headers))
        payload = b"".join((_LENGTH.pack(len(packed)), packed, value))
        if segment.count % _INDEX_EVERY == 0:
            segment.marks.append(segment.size)
        segment.file.write(_FRAME.pack(len(payload), zlib.crc32(payload)) + payload)
        segment.size += _FRAME.size + len(payload)
        segment.count += 1

    def flush(self, *, fsync: bool = False) -> None:
        """Hand all appended frames to the operating system; with `fsync` wait until they are on the disk."""
        for segment in self._segments:
            if segment.file is not None:
                segment.file.flush()
                if fsync:
                    os.fsync(segment.file.fileno())

    def read(self, partition: int, from_offset: int = 0) -> Iterator[StoredRecord]:
        """Records of a partition from an offset up to its end at the time of the call, in order.

        Raises `KvtideError` when a frame inside the log is damaged.
        """
        segment = self._segments[partition]
        if segment.file is not None:
            segment.file.flush()
        end = segment.count
        if from_offset >= end:
            return
        with segment.path.open("rb") as file:
            offset = from_offset // _INDEX_EVERY * _INDEX_EVERY
            file.seek(segment.marks[offset // _INDEX_EVERY])
            while offset < end:
                payload = _next_frame(file)
                if payload is None:
                    raise KvtideError(f"{segment.path}: record {offset} is damaged; restore the file from a copy or replay its source")
                if offset >= from_offset:
                    headers, value = _unpack(payload)
                    yield StoredRecord(partition, offset, headers, value)
                offset += 1

    def refresh(self) -> None:
        """Notice what another process has appended since this log was opened (`read_only` logs)."""
        for segment in self._segments:
            if segment.file is None:
                _scan(segment)

    def start_offset(self, partition: int) -> int:
        """First offset that is still there: 0, since a local log is never shortened from the front."""
        return 0

    def end_offset(self, partition: int) -> int:
        """Offset that the next record of the partition gets."""
        return self._segments[partition].count

    def close(self) -> None:
        """Flush and release the files and the lock."""
        for segment in self._segments:
            if segment.file is not None:
                segment.file.close()
                segment.file = None
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def __enter__(self) -> LocalLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _meta(self, partitions: int | None) -> _Meta:
        path = self._folder / "meta.json"
        if not path.exists():
            if self._read_only or partitions is None:
                raise UsageError(f"no log of topic {self.topic} in {self._folder.parent}; run `kvtide emulate` or `kvtide attach` first")
            self._folder.mkdir(parents=True, exist_ok=True)
            log_id = uuid.uuid4().hex
            draft = path.with_suffix(f".{log_id}")  # its own of each creator, threads of one process too
            draft.write_bytes(msgspec.json.encode(_Meta(self.topic, partitions, log_id)))
            try:
                os.link(draft, path)  # of two that create a log at once, one wins and both read the same meta
            except FileExistsError:
                pass
            finally:
                draft.unlink()
        meta = msgspec.json.decode(path.read_bytes(), type=_Meta)
        if partitions is not None and meta.partitions != partitions:
            raise UsageError(
                f"log {self._folder} has {meta.partitions} partitions, not {partitions}; pass --partitions {meta.partitions}, "
                "or give another --log folder (the count decides which shard owns a tenant and cannot change)"
            )
        return meta

    def _open(self, partition: int) -> _Segment:
        segment = _Segment(self._folder / f"{partition:05d}.seg", 0, 0, [])
        if not self._read_only:
            segment.path.touch()
        _scan(segment)
        if not self._read_only:
            self._set_tail_aside(segment)
            segment.file = segment.path.open("ab", buffering=1 << 16)
        return segment

    def _set_tail_aside(self, segment: _Segment) -> None:
        whole = segment.path.stat().st_size
        if whole == segment.size:
            return
        self.torn_frames += 1
        with segment.path.open("r+b") as file:
            file.seek(segment.size)
            tail = file.read()
            aside = segment.path.with_suffix(f".torn-{segment.size}")
            aside.write_bytes(tail)
            file.truncate(segment.size)
        _log.warning(
            "%s: %d bytes after record %d were cut short by a crash; moved to %s", segment.path, len(tail), segment.count - 1, aside
        )


def _locked(folder: Path) -> BinaryIO:
    lock = (folder / "lock").open("wb")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        lock.close()
        raise UsageError(f"another process is writing to log {folder}; stop it, or give another --log folder") from error
    return lock


def _scan(segment: _Segment) -> None:
    """Count whole frames from where the segment's count ends; a damaged frame with a whole one behind it is an error, not a tail."""
    if not segment.path.exists():
        return
    with segment.path.open("rb") as file:
        file.seek(segment.size)
        while (payload := _next_frame(file)) is not None:
            if segment.count % _INDEX_EVERY == 0:
                segment.marks.append(segment.size)
            segment.size += _FRAME.size + len(payload)
            segment.count += 1
        if _has_frame_behind(file, segment.size):
            raise KvtideError(
                f"{segment.path}: record {segment.count} at byte {segment.size} is damaged and whole records follow it; "
                "restore the file from a copy or replay its source"
            )


def _next_frame(file: BinaryIO) -> bytes | None:
    head = file.read(_FRAME.size)
    if len(head) < _FRAME.size:
        return None
    length, crc = _FRAME.unpack(head)
    if not _LENGTH.size <= length <= _MAX_FRAME:
        return None
    payload = file.read(length)
    return payload if len(payload) == length and zlib.crc32(payload) == crc else None


def _has_frame_behind(file: BinaryIO, start: int) -> bool:
    """Whether the frame at `start`, itself damaged, has its whole length and is followed by a whole frame."""
    file.seek(start)
    head = file.read(_FRAME.size)
    if len(head) < _FRAME.size:
        return False
    file.seek(start + _FRAME.size + _FRAME.unpack(head)[0])
    return _next_frame(file) is not None


def _unpack(payload: bytes) -> tuple[dict[str, bytes], bytes]:
    (length,) = _LENGTH.unpack_from(payload)
    body = _LENGTH.size + length
    return msgspec.msgpack.decode(payload[_LENGTH.size : body], type=dict[str, bytes]), payload[body:]
