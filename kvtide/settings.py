"""Settings: one frozen dataclass, every field with a default, an environment variable `KVTIDE_<FIELD>` and a help text."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields

from ingest.errors import UsageError


def _setting(default: object, help_: str) -> object:
    return field(default=default, metadata={"help": help_})


@dataclass(frozen=True)
class Settings:
    """Where things are and how the stream is cut. Build with `Settings.from_env()`."""

    store: str = _setting("chdb://.kvtide/store", "ClickHouse: chdb://FOLDER (embedded) or http(s)://user:pw@host:port/db")  # type: ignore[assignment]
    log: str = _setting(".kvtide/log", "folder of the local event log (embedded mode)")  # type: ignore[assignment]
    kafka: str = _setting("", "bootstrap servers, host:port[,host:port]; empty means the local log")  # type: ignore[assignment]
    topic: str = _setting("kv.events", "event topic; the dead-letter topic is kv.dlq")  # type: ignore[assignment]
    partitions: int = _setting(16, "partitions of the event topic, fixed when it is created")  # type: ignore[assignment]
    group: str = _setting("kvtide", "consumer group of the workers")  # type: ignore[assignment]
    grace_s: float = _setting(5.0, "how long rows may arrive out of order, in event time")  # type: ignore[assignment]
    checkpoint_s: float = _setting(5.0, "seconds between shard checkpoints")  # type: ignore[assignment]
    dlq_ratio: float = _setting(0.5, "share of bad rows (of the last 1000) above which a worker stops")  # type: ignore[assignment]

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None, **override: object) -> Settings:
        """Settings from `KVTIDE_*` variables; keyword arguments that are not None win. Raises `UsageError` for a bad value."""
        env = os.environ if env is None else env
        values: dict[str, object] = {}
        for item in fields(cls):
            text = env.get(f"KVTIDE_{item.name.upper()}")
            if text is not None:
                values[item.name] = _parse(item.name, text, type(item.default))
        values.update({name: value for name, value in override.items() if value is not None})
        return cls(**values)  # type: ignore[arg-type]


def _parse(name: str, text: str, type_: type) -> object:
    try:
        return type_(text)
    except ValueError as error:
        raise UsageError(f"KVTIDE_{name.upper()}={text!r} is not a {type_.__name__}; unset it or correct it") from error
