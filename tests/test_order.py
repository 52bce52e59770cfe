"""Event-time order: the sequence in which rows touch state does not depend on how they were cut into records."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from ingest.events import KINDS, SCHEMAS, Kind
from streams.order import ReorderBuffer, application_order

GRACE = 10


def batch(kind: Kind, rows: list[tuple[int, str, int]]) -> pa.RecordBatch:
    """Contract batch with real order columns and empty filling."""
    filling = {pa.string(): "", pa.bool_(): True}
    columns = {}
    for field in SCHEMAS[kind]:
        blank = [] if pa.types.is_list(field.type) else filling.get(field.type, 0)
        columns[field.name] = pa.array([blank] * len(rows), field.type)
    columns["ts_us"] = pa.array([row[0] for row in rows], pa.int64())
    columns["source"] = pa.array([row[1] for row in rows], pa.string())
    columns["seq"] = pa.array([row[2] for row in rows], pa.uint64())
    return pa.RecordBatch.from_pydict(columns, schema=SCHEMAS[kind])


def drain(buffer: ReorderBuffer, until: int) -> list[tuple[int, str, int, bool]]:
    taken = buffer.take(until)
    rank = application_order(taken)
    out = {}
    for kind in KINDS:
        rows = taken[kind]
        for i in range(len(rows.arrival)):
            row = rows.batch.slice(i, 1).to_pylist()[0]
            out[int(rank[kind][i])] = (int(rows.effective_us[i]), row["source"], row["seq"], bool(rows.late[i]))
    return [out[i] for i in range(len(out))]


def oracle(rows: list[tuple[Kind, int, str, int]]) -> list[tuple[int, str, int, bool]]:
    """Row by row: late rows happen at the watermark, after the on-time rows there."""
    mark, keyed = None, []
    for arrival, (_, ts, source, seq) in enumerate(rows):
        late = mark is not None and ts <= mark
        key = (mark, 1, "", 0, arrival) if late else (ts, 0, source, seq, arrival)
        keyed.append((key, (key[0], source, seq, late)))
        mark = ts - GRACE if mark is None else max(mark, ts - GRACE)
    return [row for _, row in sorted(keyed)]


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_any_cut_and_any_release_gives_the_one_sequence(data: st.DataObject) -> None:
    n = data.draw(st.integers(1, 30))
    rows: list[tuple[Kind, int, str, int]] = [
        (data.draw(st.sampled_from(KINDS)), data.draw(st.integers(0, 80)), data.draw(st.sampled_from("ba")), seq) for seq in range(n)
    ]
    buffer, got, start = ReorderBuffer(GRACE), [], 0
    while start < n:
        kind = rows[start][0]
        stop = start + 1
        while stop < n and rows[stop][0] == kind and data.draw(st.booleans()):
            stop += 1
        buffer.add(kind, batch(kind, [row[1:] for row in rows[start:stop]]), start)
        start = stop
        if data.draw(st.booleans()) and buffer.watermark_us > 0:
            got += drain(buffer, data.draw(st.integers(0, buffer.watermark_us)))
        if data.draw(st.booleans()):
            buffer = ReorderBuffer.from_state(GRACE, buffer.state())
    got += drain(buffer, 10_000)
    assert got == oracle(rows)


def test_late_rows_are_marked_and_take_effect_at_the_watermark() -> None:
    buffer = ReorderBuffer(GRACE)
    buffer.add("instance", batch("instance", [(100, "a", 0), (90, "a", 1), (91, "a", 2)]), 0)
    assert drain(buffer, 1000) == [(90, "a", 1, True), (91, "a", 2, False), (100, "a", 0, False)]
    assert buffer.watermark_us == 90


def test_empty_batches_change_nothing() -> None:
    buffer = ReorderBuffer(GRACE)
    buffer.add("access", batch("access", []), 0)
    assert buffer.earliest_us is None and drain(buffer, 10) == []
    assert np.iinfo(np.int64).min == buffer.watermark_us
