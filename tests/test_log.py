"""The local log: appended records come back in order; a torn tail is set aside; damage and misuse are errors that say what to do."""

from __future__ import annotations

import struct
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ingest.errors import KvtideError, UsageError
from ingest.events import Record
from ingest.locallog import LocalLog


def _values(log: LocalLog, partition: int = 0, start: int = 0) -> list[bytes]:
    return [record.value for record in log.read(partition, start)]


def _filled(folder: Path, count: int = 5) -> Path:
    with LocalLog(folder, "t", 1) as log:
        for i in range(count):
            log.append(0, Record("access", b"value-%d" % i))
    return folder / "t" / "00000.seg"


def test_append_reopen_and_read_from_any_offset(tmp_path: Path) -> None:
    with LocalLog(tmp_path, "t", 2) as log:
        for i in range(700):
            log.append(i % 2, Record("residency", b"%d" % i))
        assert log.end_offset(0) == 350
        assert _values(log, 1)[:2] == [b"1", b"3"], "unflushed appends are readable in the same process"
    with LocalLog(tmp_path, "t") as log:
        assert (log.partitions, log.end_offset(1)) == (2, 350)
        for start in (0, 1, 255, 256, 257, 349, 350):
            records = list(log.read(0, start))
            assert [record.offset for record in records] == list(range(start, 350))
            assert all(record.value == b"%d" % (2 * record.offset) for record in records)
        assert next(log.read(0)).headers == {"kind": b"residency", "schema": b"1"}
        log.append(0, Record("access", b"more"))
        assert _values(log, 0, 350) == [b"more"]


@settings(max_examples=40, deadline=None)
@given(cut=st.integers(1, 60))
def test_a_torn_tail_is_set_aside_and_counted(tmp_path_factory: pytest.TempPathFactory, cut: int) -> None:
    folder = tmp_path_factory.mktemp("log")
    segment = _filled(folder)
    whole = segment.read_bytes()
    kept = whole[:-cut]
    segment.write_bytes(kept)
    with LocalLog(folder, "t") as log:
        survived = log.end_offset(0)
        assert _values(log) == [b"value-%d" % i for i in range(survived)]
        torn = segment.stat().st_size != len(kept)
        assert log.torn_frames == int(torn)
        assert b"".join(path.read_bytes() for path in segment.parent.glob("*.torn-*")) == kept[segment.stat().st_size :]
        log.append(0, Record("access", b"after"))
    with LocalLog(folder, "t") as log:
        assert _values(log)[survived:] == [b"after"]
        assert log.torn_frames == 0


def test_damage_before_whole_records_is_an_error_not_a_tail(tmp_path: Path) -> None:
    segment = _filled(tmp_path)
    data = bytearray(segment.read_bytes())
    data[20] ^= 1
    segment.write_bytes(bytes(data))
    with pytest.raises(KvtideError, match="record 0 at byte 0 is damaged"):
        LocalLog(tmp_path, "t")
    assert segment.read_bytes() == bytes(data), "nothing is cut off"


def test_damage_after_opening_is_noticed_on_reading(tmp_path: Path) -> None:
    segment = _filled(tmp_path)
    log = LocalLog(tmp_path, "t", read_only=True)
    data = bytearray(segment.read_bytes())
    data[-1] ^= 1
    segment.write_bytes(bytes(data))
    with pytest.raises(KvtideError, match="record 4 is damaged"):
        _values(log)


def test_an_absurd_length_is_a_torn_tail(tmp_path: Path) -> None:
    segment = _filled(tmp_path)
    with segment.open("ab") as file:
        file.write(struct.pack("<II", 0xFFFFFFFF, 0) + b"rest")
    with LocalLog(tmp_path, "t") as log:
        assert (log.end_offset(0), log.torn_frames) == (5, 1)


def test_partition_count_is_fixed_at_creation(tmp_path: Path) -> None:
    _filled(tmp_path)
    with pytest.raises(UsageError, match="has 1 partitions, not 4; pass --partitions 1"):
        LocalLog(tmp_path, "t", 4)


def test_an_absent_log_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="kvtide emulate"):
        LocalLog(tmp_path, "t", read_only=True)
    with pytest.raises(UsageError, match="kvtide emulate"):
        LocalLog(tmp_path, "t")


def test_one_writer_at_a_time_and_readers_beside_it(tmp_path: Path) -> None:
    writer = LocalLog(tmp_path, "t", 1)
    with pytest.raises(UsageError, match="another process is writing"):
        LocalLog(tmp_path, "t", 1)
    reader = LocalLog(tmp_path, "t", read_only=True)
    writer.append(0, Record("access", b"x" * 100_000))  # larger than the writer's buffer: part of it may be on disk already
    reader.refresh()
    assert reader.end_offset(0) in (0, 1)
    writer.flush(fsync=True)
    reader.refresh()
    assert _values(reader) == [b"x" * 100_000]
    with pytest.raises(UsageError, match="reading only"):
        reader.append(0, Record("access", b""))
    writer.close()
    LocalLog(tmp_path, "t", 1).close()


def test_two_creators_agree_on_one_log(tmp_path: Path) -> None:
    ids: list[str] = []

    def create() -> None:
        try:
            with LocalLog(tmp_path, "t", 3) as log:
                ids.append(log.log_id)
        except UsageError:
            with LocalLog(tmp_path, "t", read_only=True) as log:
                ids.append(log.log_id)

    threads = [threading.Thread(target=create) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(ids) == 8 and len(set(ids)) == 1
