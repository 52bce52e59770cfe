"""Records are cut by rows, bytes and age only, all kinds of a partition together, whatever the size of the input batches."""

from __future__ import annotations

import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from ingest.batching import Batcher
from ingest.events import Record, decode, partition_of, to_batch
from tests.contract import T0_US, ListSink, access, events


def _rows(records: list[Record]) -> list[dict[str, object]]:
    return [row for record in records for row in decode(record.value, record.headers)[1].to_pylist()]


def _kinds(sink: ListSink, partition: int = 0) -> list[tuple[str, int]]:
    return [(record.kind, decode(record.value, record.headers)[1].num_rows) for record in sink.records.get(partition, [])]


def _contents(sink: ListSink) -> dict[int, list[tuple[str, list[dict[str, object]]]]]:
    return {partition: [(record.kind, _rows([record])) for record in records] for partition, records in sink.records.items()}


def test_cut_at_max_rows_takes_all_kinds_along_in_fixed_order() -> None:
    sink = ListSink()
    batcher = Batcher(sink, 1, max_rows=3, linger_s=1e6)
    made = events(3, tenants=1)  # 3 instance rows first: the third cuts
    for event in made[:3]:
        batcher.add(event)
    assert _kinds(sink) == [("instance", 3)]
    for event in made[3:7]:  # access, 2 residency, access
        batcher.add(event)
    assert _kinds(sink)[1:] == []
    for event in made[7:9]:  # third and fourth residency rows: the third cuts
        batcher.add(event)
    assert _kinds(sink)[1:] == [("access", 2), ("residency", 3)]
    batcher.flush()
    assert _kinds(sink)[3:] == [("residency", 1)]
    assert sink.flushes == 1


def test_cut_at_max_bytes() -> None:
    sink = ListSink()
    batcher = Batcher(sink, 1, max_bytes=10_000, linger_s=1e6)
    for seq in range(4):
        batcher.add(access(seq, chain=list(range(500))))  # 4240 bytes each by the estimate
    assert _kinds(sink) == [("access", 3)]


def test_a_row_older_than_the_linger_in_event_time_cuts_before_the_younger_row() -> None:
    sink = ListSink()
    batcher = Batcher(sink, 1, linger_s=2.0)
    for seq, ts_us in enumerate([0, 1_000_000, 2_000_000, 2_000_001]):
        batcher.add(access(seq, ts_us=T0_US + ts_us))
    assert _kinds(sink) == [("access", 3)]
    batcher.advance(T0_US / 1e6 + 3.9)
    assert len(sink.records[0]) == 1
    batcher.advance(T0_US / 1e6 + 4.1)
    assert _kinds(sink) == [("access", 3), ("access", 1)]


def test_with_a_clock_age_counts_in_wall_time() -> None:
    now = [100.0]
    sink = ListSink()
    batcher = Batcher(sink, 1, linger_s=0.2, clock=lambda: now[0])
    batcher.add(access(0, ts_us=0))
    batcher.add(access(1, ts_us=10**15))
    now[0] = 100.19
    batcher.advance()
    assert sink.records == {}
    now[0] = 100.2
    batcher.advance()
    assert _kinds(sink) == [("access", 2)]


def test_tenants_go_to_their_partition_and_instance_rows_to_every_one() -> None:
    sink = ListSink()
    made = events(200)
    batcher = Batcher(sink, 4)
    for event in made:
        batcher.add(event)
    batcher.flush()
    for partition in range(4):
        rows = _rows(sink.records[partition])
        assert {partition_of(str(row["tenant"]), 4) for row in rows if "tenant" in row} <= {partition}
        assert sum("lifecycle" in row for row in rows) == sum(hasattr(event, "lifecycle") for event in made)
    assert batcher.rows == len(made)


def test_hashes_above_2_to_63_and_row_order_survive() -> None:
    sink = ListSink()
    batcher = Batcher(sink, 1)
    batcher.add(access(0, chain=[2**64 - 1, 2**63]))
    batcher.flush()
    assert _rows(sink.records[0])[0]["chain"] == [2**64 - 1, 2**63]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_cuts_do_not_depend_on_how_rows_arrive(data: st.DataObject) -> None:
    """Single structs, small batches and large batches of the same rows give the same records of the same rows."""
    count = data.draw(st.integers(1, 60))
    jumps = data.draw(st.lists(st.integers(-300_000, 1_500_000), min_size=count, max_size=count))
    sizes = data.draw(st.lists(st.integers(0, 40), min_size=count, max_size=count))
    limits = {"max_rows": data.draw(st.integers(1, 9)), "max_bytes": data.draw(st.integers(200, 3000)), "linger_s": 2.0}
    ts_us, rows = T0_US, []
    for seq, (jump, size) in enumerate(zip(jumps, sizes, strict=True)):
        ts_us += jump
        rows.append(access(seq, ts_us=ts_us, tenant=f"t{seq % 3}", chain=list(range(size))))

    singly = ListSink()
    batcher = Batcher(singly, 2, **limits)  # type: ignore[arg-type]
    for row in rows:
        batcher.add(row)
    batcher.flush()

    grouped = ListSink()
    batcher = Batcher(grouped, 2, **limits)  # type: ignore[arg-type]
    start = 0
    while start < count:
        take = data.draw(st.integers(1, count - start))
        if data.draw(st.booleans()):
            batcher.add_batch("access", to_batch("access", rows[start : start + take]))
        else:
            for row in rows[start : start + take]:
                batcher.add(row)
        start += take
    batcher.flush()
    assert _contents(grouped) == _contents(singly)


def test_columns_in_another_order_or_a_narrower_type_are_fitted() -> None:
    sink = ListSink()
    batch = to_batch("access", [access(0), access(1)])
    shuffled = pa.RecordBatch.from_arrays(
        [batch.column(name).cast(pa.int32()) if name == "hit_tokens" else batch.column(name) for name in reversed(batch.schema.names)],
        names=list(reversed(batch.schema.names)),
    )
    batcher = Batcher(sink, 1)
    batcher.add_batch("access", shuffled)
    batcher.add_batch("access", batch)
    batcher.flush()
    assert [row["seq"] for row in _rows(sink.records[0])] == [0, 1, 0, 1]
