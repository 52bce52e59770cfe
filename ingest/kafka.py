"""Kafka: the idempotent producer, topics, a plain reader and offsets. The only importer of confluent_kafka."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Literal

import confluent_kafka.admin
from confluent_kafka import (
    Consumer,
    KafkaError,
    KafkaException,
    Message,
    Producer,
    TopicCollection,
    TopicPartition,
)
from confluent_kafka.admin import AdminClient

from ingest.errors import KvtideError, UsageError
from ingest.events import Record
from ingest.locallog import StoredRecord

MAX_MESSAGE_BYTES = 8 * 1024 * 1024  # one row with a very long chain is a record of its own and passes Kafka's 1 MiB default
_api: Any = confluent_kafka.admin  # its types do not declare what it re-exports
_COORDINATOR_MOVES = {KafkaError.COORDINATOR_LOAD_IN_PROGRESS, KafkaError.COORDINATOR_NOT_AVAILABLE, KafkaError.NOT_COORDINATOR}
_MEND = "check the address (KVTIDE_KAFKA or --kafka) and that the broker runs"
_LEADERLESS = (KafkaError.NOT_LEADER_FOR_PARTITION, KafkaError.LEADER_NOT_AVAILABLE, KafkaError.UNKNOWN_TOPIC_OR_PART)
_QUIET: dict[str, Any] = {"log_level": 0, "socket.connection.setup.timeout.ms": 5000}


class KafkaSink:
    """Idempotent producer of one topic, `acks=all`, compressed, with a bounded queue.

    `append` blocks while the queue (`queue_bytes`) is full. The first record that could not be delivered raises `KvtideError` at the next
    `append` or `flush`; after `flush` returns, everything appended is on the broker's log. Records of a partition keep their order.
    """

    def __init__(
        self,
        bootstrap: str,
        topic: str,
        *,
        compression: Literal["lz4", "zstd", "none"] = "lz4",
        queue_bytes: int = 64 * 1024 * 1024,
        delivery_timeout_s: float = 60.0,
    ) -> None:
        self.topic = topic
        self._bootstrap = bootstrap
        self._timeout_s = delivery_timeout_s
        self._failure: str | None = None
        self.delivered = 0
        self._producer = Producer(
            {
                **_QUIET,
                "bootstrap.servers": bootstrap,
                "enable.idempotence": True,
                "acks": "all",
                "compression.type": compression,
                "linger.ms": 5,
                "batch.size": 1024 * 1024,
                "message.max.bytes": MAX_MESSAGE_BYTES,
                "queue.buffering.max.kbytes": max(1, queue_bytes // 1024),
                "queue.buffering.max.messages": 100_000,
                "delivery.timeout.ms": round(delivery_timeout_s * 1000),
                "error_cb": self._on_error,
            }
        )

    def append(self, partition: int, record: Record) -> None:
        """Queue one record of the event contract."""
        self.append_raw(partition, record.headers, record.value)

    def append_raw(self, partition: int, headers: Mapping[str, bytes], value: bytes) -> None:
        """Queue bytes with any headers; blocks while the queue is full."""
        deadline = time.monotonic() + self._timeout_s
        while True:
            self._producer.poll(0)
            self._raise_failure()
            try:
                self._producer.produce(self.topic, value, partition=partition, headers=dict(headers), on_delivery=self._on_delivery)
            except BufferError as error:
                if time.monotonic() > deadline:
                    raise KvtideError(f"Kafka at {self._bootstrap} has taken nothing for {self._timeout_s:g} s; {_MEND}") from error
                self._producer.poll(0.05)
            except KafkaException as error:
                raise self._error(error.args[0]) from error
            else:
                return

    def flush(self) -> None:
        """Return when all is delivered; raises `KvtideError` when something was not."""
        left = self._producer.flush(self._timeout_s)
        self._raise_failure()
        if left:
            raise KvtideError(f"{left} records are not delivered to Kafka at {self._bootstrap} after {self._timeout_s:g} s; {_MEND}")

    def close(self) -> None:
        """Flush; the client's threads end with the object."""
        self.flush()

    def _on_delivery(self, error: KafkaError | None, message: Message) -> None:
        if error is None:
            self.delivered += 1
        elif self._failure is None:
            self._failure = f"record for partition {message.partition()} of {self.topic} was not delivered: {error.str()}"

    def _on_error(self, error: KafkaError) -> None:
        if error.fatal() and self._failure is None:
            self._failure = f"the producer stopped: {error.str()}"

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise KvtideError(f"Kafka at {self._bootstrap}: {self._failure}; {_MEND}, then publish again from the last flush")

    def _error(self, error: KafkaError) -> KvtideError:
        return KvtideError(f"Kafka at {self._bootstrap}, topic {self.topic}: {error.str()}; {_MEND}")


class KafkaReader:
    """Reads a topic's partitions from given offsets without a consumer group (benchmarks, the dead-letter topic, tests)."""

    def __init__(self, bootstrap: str, topic: str, start: Mapping[int, int] | None = None) -> None:
        """`start` maps partition to first offset; None reads every partition from its start."""
        self._consumer = Consumer(
            {
                **_QUIET,
                "bootstrap.servers": bootstrap,
                "group.id": "kvtide-reader",
                "enable.auto.commit": False,
                "auto.offset.reset": "earliest",
                "fetch.wait.max.ms": 50,
            }
        )
        if start is None:
            start = dict.fromkeys(end_offsets(bootstrap, topic), 0)
        self._consumer.assign([TopicPartition(topic, partition, offset) for partition, offset in start.items()])

    def read(self, timeout_s: float = 0.5, most: int = 1000) -> list[StoredRecord]:
        """Next records, in order within a partition; empty when none came within the timeout."""
        records = []
        for message in self._consumer.consume(most, timeout_s):
            error = message.error()
            if error is not None:
                raise KvtideError(f"reading {message.topic()}: {error.str()}; {_MEND}")
            records.append(_stored(message))
        return records

    def close(self) -> None:
        """Release the connection."""
        self._consumer.close()

    def __enter__(self) -> KafkaReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def ensure_topics(bootstrap: str, topics: Mapping[str, int], *, replication: int = 1, timeout_s: float = 15.0) -> None:
    """Create the topics (name to partition count) that are absent and check the counts of those that exist.

    Raises `UsageError` for another partition count, `KvtideError` when the broker refuses or cannot be reached.
    """
    admin = _admin(bootstrap)
    present = _topics(admin, bootstrap, timeout_s)
    for name, partitions in topics.items():
        if name in present and present[name] != partitions:
            raise UsageError(
                f"topic {name} has {present[name]} partitions, not {partitions}; set KVTIDE_PARTITIONS={present[name]} or --partitions, "
                "or name another topic (the count decides which shard owns a tenant and cannot change)"
            )
    config = {"max.message.bytes": str(MAX_MESSAGE_BYTES)}
    absent = [_api.NewTopic(name, count, replication, config=config) for name, count in topics.items() if name not in present]
    for name, future in admin.create_topics(absent, operation_timeout=timeout_s).items() if absent else ():
        try:
            future.result(timeout_s)
        except KafkaException as error:
            if error.args[0].code() != KafkaError.TOPIC_ALREADY_EXISTS:
                raise KvtideError(f"topic {name} cannot be created: {error.args[0].str()}; create it by hand or mend the broker") from error
    deadline = time.monotonic() + timeout_s
    while absent and not set(topics) <= set(_topics(admin, bootstrap, timeout_s)):
        if time.monotonic() > deadline:
            raise KvtideError(f"Kafka at {bootstrap} does not show the topics it created within {timeout_s:g} s; try again")
        time.sleep(0.05)


def start_offsets(bootstrap: str, topic: str, timeout_s: float = 15.0) -> dict[int, int]:
    """First offset still held, by partition. Raises `UsageError` for an unknown topic."""
    return _offsets(bootstrap, topic, _api.OffsetSpec.earliest(), timeout_s)


def end_offsets(bootstrap: str, topic: str, timeout_s: float = 15.0) -> dict[int, int]:
    """Offset that the next record gets, by partition. Raises `UsageError` for an unknown topic."""
    return _offsets(bootstrap, topic, _api.OffsetSpec.latest(), timeout_s)


def committed_offsets(bootstrap: str, group: str, topic: str, timeout_s: float = 15.0) -> dict[int, int]:
    """Next offset that the group has committed, by partition; partitions without a commit are absent."""
    counts = _topics(_admin(bootstrap), bootstrap, timeout_s)
    asked = [TopicPartition(topic, partition) for partition in range(counts.get(topic, 0))]
    consumer = Consumer({**_QUIET, "bootstrap.servers": bootstrap, "group.id": group, "enable.auto.commit": False})
    deadline = time.monotonic() + timeout_s
    try:
        while True:
            try:
                return {item.partition: item.offset for item in consumer.committed(asked, timeout=timeout_s) if item.offset >= 0}
            except KafkaException as error:
                if error.args[0].code() not in _COORDINATOR_MOVES or time.monotonic() > deadline:
                    raise KvtideError(f"offsets of group {group} at {bootstrap}: {error.args[0].str()}; {_MEND}") from error
                time.sleep(0.1)  # a young or restarted broker is still loading its offsets topic
    finally:
        consumer.close()


def topic_id(bootstrap: str, topic: str, timeout_s: float = 15.0) -> str:
    """The broker's own id of a topic, another one after it was deleted and created again. Raises `UsageError` for an unknown topic."""
    admin = _admin(bootstrap)  # must live until the answer is here
    futures = admin.describe_topics(TopicCollection([topic]), request_timeout=timeout_s)
    try:
        return str(futures[topic].result(timeout_s).topic_id)
    except KafkaException as error:
        raise UsageError(f"topic {topic} at {bootstrap}: {error.args[0].str()}; publish events first, or correct the name") from error


def check(bootstrap: str, timeout_s: float = 5.0) -> str:
    """One line on a reachable broker: cluster id, brokers, largest message. Raises `KvtideError` with the mend otherwise."""
    admin = _admin(bootstrap)
    topics = _topics(admin, bootstrap, timeout_s)
    cluster = admin.list_topics(timeout=timeout_s)
    first = min(cluster.brokers)
    settings = admin.describe_configs([_api.ConfigResource(_api.ConfigResource.Type.BROKER, str(first))], request_timeout=timeout_s)
    found = next(iter(settings.values())).result(timeout_s)
    largest = found["message.max.bytes"].value if "message.max.bytes" in found else "?"
    brokers = f"{len(cluster.brokers)} broker(s)"
    return f"Kafka at {bootstrap}: cluster {cluster.cluster_id}, {brokers}, {len(topics)} topics, messages up to {largest} bytes"


def _stored(message: Message) -> StoredRecord:
    headers = {
        name: value if isinstance(value, bytes) else str(value or "").encode() for name, value in dict(message.headers() or {}).items()
    }
    return StoredRecord(message.partition() or 0, message.offset() or 0, headers, message.value() or b"")


def _admin(bootstrap: str) -> AdminClient:
    return AdminClient({**_QUIET, "bootstrap.servers": bootstrap})


def _topics(admin: AdminClient, bootstrap: str, timeout_s: float) -> dict[str, int]:
    try:
        return {name: len(topic.partitions) for name, topic in admin.list_topics(timeout=timeout_s).topics.items()}
    except KafkaException as error:
        raise KvtideError(f"no Kafka at {bootstrap}: {error.args[0].str()}; {_MEND}") from error


def _offsets(bootstrap: str, topic: str, spec: Any, timeout_s: float) -> dict[int, int]:
    admin = _admin(bootstrap)
    counts = _topics(admin, bootstrap, timeout_s)
    if topic not in counts:
        raise UsageError(f"no topic {topic} at {bootstrap}; publish events first, or correct the name")
    asked = {TopicPartition(topic, partition): spec for partition in range(counts[topic])}
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return {at.partition: f.result(timeout_s).offset for at, f in admin.list_offsets(asked, request_timeout=timeout_s).items()}
        except KafkaException as error:
            # A topic that was made a moment ago may not have its leaders yet.
            if not error.args[0].retriable() and error.args[0].code() not in _LEADERLESS or time.monotonic() > deadline:
                raise KvtideError(f"offsets of {topic} at {bootstrap}: {error.args[0].str()}; {_MEND}") from error
        time.sleep(0.1)
