"""Small valid events for tests of the log and the worker, and a list that stands for a sink."""

from __future__ import annotations

import random
from collections.abc import Mapping

from ingest.events import Access, Instance, Record, Residency

T0_US = 1_700_000_000_000_000
Event = Access | Residency | Instance


class ListSink:
    """Keeps records in memory, by partition."""

    def __init__(self) -> None:
        self.records: dict[int, list[Record]] = {}
        self.raw: list[tuple[int, dict[str, bytes], bytes]] = []
        self.flushes = 0

    def append(self, partition: int, record: Record) -> None:
        self.records.setdefault(partition, []).append(record)

    def append_raw(self, partition: int, headers: Mapping[str, bytes], value: bytes) -> None:
        self.raw.append((partition, dict(headers), value))

    def flush(self) -> None:
        self.flushes += 1

    def close(self) -> None:
        self.flush()


def access(seq: int, *, tenant: str = "acme", ts_us: int | None = None, chain: list[int] | None = None, **fields: object) -> Access:
    chain = [seq, seq + 1] if chain is None else chain
    values: dict[str, object] = {
        "ts_us": T0_US + seq * 1000 if ts_us is None else ts_us,
        "source": "test",
        "seq": seq,
        "tenant": tenant,
        "model": "m",
        "instance": "p0",
        "incarnation": 1,
        "request_id": f"r{seq}",
        "prompt_tokens": 16 * len(chain) + 5,
        "hit_tokens": 0,
        "block_size": 16,
        "chain": chain,
    }
    return Access(**{**values, **fields})  # type: ignore[arg-type]


def events(count: int, *, seed: int = 1, tenants: int = 6, instances: int = 3, step_us: int = 20_000) -> list[Event]:
    """Random but valid events in time order: accesses, what they store and evict, heartbeats and a restart."""
    rng = random.Random(seed)
    names = [f"tenant-{i}" for i in range(tenants)]
    made: list[Event] = [_instance(i, "up", T0_US, i) for i in range(instances)]
    seq = instances
    for step in range(count):
        ts_us = T0_US + step * step_us + rng.randrange(step_us)
        tenant, instance = rng.choice(names), f"p{rng.randrange(instances)}"
        head = (1 << 63) + rng.randrange(20) * 1000
        chain = [head + position for position in range(rng.randrange(1, 12))]
        place = {"tenant": tenant, "model": "m", "instance": instance, "incarnation": 1, "source": "test"}
        made.append(
            access(
                seq,
                ts_us=ts_us,
                chain=chain,
                tenant=tenant,
                instance=instance,
                hit_tokens=16 * rng.randrange(len(chain)),
                queue_ms=rng.random() * 10,
                prefill_ms=rng.random() * 100,
            )
        )
        for position, block in enumerate(chain[-2:]):
            seq += 1
            kind = rng.choice(["stored", "stored", "evicted"])
            reason = "pressure" if kind == "evicted" else None
            row = Residency(**place, ts_us=ts_us, seq=seq, kind=kind, block=block, block_size=16, position=position, reason=reason)
            made.append(row)
        seq += 1
        if step % 50 == 49:
            made.append(_instance(rng.randrange(instances), "heartbeat", ts_us, seq))
            seq += 1
    made.extend(_instance(i, "heartbeat", T0_US + count * step_us + 180_000_000, seq + i) for i in range(instances))
    return made


def _instance(index: int, lifecycle: str, ts_us: int, seq: int) -> Instance:
    return Instance(
        ts_us=ts_us, source="fleet", seq=seq, instance=f"p{index}", incarnation=1, lifecycle=lifecycle, capacity_blocks=200, used_blocks=50
    )
