"""Claude Code traces of WEKA (kv-cache-tester): one JSON document a session, session-local block ids of 64 tokens, sub-agents inside.

Ids are keyed by the session, so that sessions share nothing. Sessions have no common clock: they are *given* start times.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import msgspec

from ingest.chaining import GOLDEN, mix64_int, scope_key, text_hash
from ingest.errors import UsageError
from ingest.sources.base import DECODE_ERRORS, BadLine, Decoder, Seconds, Source, Tokens, TraceRequest, check_length, explain, hashes

Item = TypeVar("Item")


class _Request(msgspec.Struct, tag_field="type", forbid_unknown_fields=True):
    t: Seconds
    model: str
    prompt_tokens: Tokens = msgspec.field(name="in")
    output_tokens: Tokens = msgspec.field(name="out")
    hash_ids: list[int]
    input_types: list[str] = []
    output_types: list[str] = []
    stop: str | None = None
    think_time: float | None = None
    api_time: float | None = None
    ttft: Seconds | None = None


class _Normal(_Request, tag="n"):
    pass


class _Streamed(_Request, tag="s"):
    pass


class _Agent(msgspec.Struct, Generic[Item], tag_field="type", tag="subagent", forbid_unknown_fields=True):
    t: Seconds
    agent_id: str
    requests: list[Item]
    subagent_type: str | None = None
    duration_ms: float | None = None
    total_tokens: int | None = None
    tool_use_count: int | None = None
    status: str | None = None
    models: list[str] = []
    tool_tokens: int | None = None
    system_tokens: int | None = None


class _OpenNormal(_Request, tag="n", forbid_unknown_fields=False):
    pass


class _OpenStreamed(_Request, tag="s", forbid_unknown_fields=False):
    pass


class _OpenAgent(_Agent[Item], Generic[Item], tag="subagent", forbid_unknown_fields=False):
    pass


class _Session(msgspec.Struct, Generic[Item]):
    id: str
    block_size: int
    requests: list[Item]
    hash_id_scope: str = "local"


StrictInner = _Normal | _Streamed
Strict = _Normal | _Streamed | _Agent[_Normal | _Streamed]
OpenInner = _OpenNormal | _OpenStreamed
Open = _OpenNormal | _OpenStreamed | _OpenAgent[_OpenNormal | _OpenStreamed]


class WekaDecoder(Decoder):
    """Sessions, with the requests of sub-agents merged in by time (marker time plus their own) under the session's id space.

    Start times: session k, in file order, starts an exponential gap of mean `session_interval_s` after session k-1 (a Poisson process drawn
    from `seed`); the first starts at 0. So starts rise, and requests can be merged in time order while only overlapping sessions are held.
    """

    def __init__(self, *, ignore_unknown_fields: bool = False, session_interval_s: float = 60.0, seed: int = 0) -> None:
        if not 0 <= session_interval_s < math.inf:
            raise UsageError(f"session_interval_s={session_interval_s}: the mean gap between session starts must be 0 or more seconds")
        kind: Any = Open if ignore_unknown_fields else Strict
        inner: Any = OpenInner if ignore_unknown_fields else StrictInner
        agent: Any = (_OpenAgent if ignore_unknown_fields else _Agent)[msgspec.Raw]
        self._sessions: msgspec.json.Decoder[Any] = msgspec.json.Decoder(_Session[kind])
        self._raw_sessions = msgspec.json.Decoder(_Session[msgspec.Raw])
        self._item: msgspec.json.Decoder[Any] = msgspec.json.Decoder(kind)
        self._inner: msgspec.json.Decoder[Any] = msgspec.json.Decoder(inner)
        self._raw_agent: msgspec.json.Decoder[Any] = msgspec.json.Decoder(agent)
        self._interval_s, self._seed = session_interval_s, seed
        self._count = 0
        self._names: dict[str, int] = {}
        self.release_s = 0.0

    def decode(self, unit: bytes, line: int) -> Sequence[TraceRequest | BadLine]:
        bad: list[tuple[int, BadLine]] = []
        try:
            session = self._sessions.decode(unit)
        except msgspec.ValidationError:
            # A wrong request must not take its session with it: decode them one by one. Raises when the session itself is wrong.
            raw = self._raw_sessions.decode(unit)
            items = [self._salvage((i,), item, bad) for i, item in enumerate(raw.requests)]
            session = _Session(raw.id, raw.block_size, items, raw.hash_id_scope)
        if session.block_size < 1:
            raise BadLine(f"block_size {session.block_size} is below 1", "correct the session's block_size")
        requests = _SessionReader(session, self._named(session.id), self.release_s, bad).requests()
        self._count += 1
        uniform = (mix64_int(self._seed * GOLDEN + mix64_int(self._count)) + 1) / (1 << 64)
        self.release_s -= self._interval_s * math.log(uniform)
        return [*requests, *self._located(unit, bad)]

    def _salvage(self, where: tuple[int, ...], item: msgspec.Raw, bad: list[tuple[int, BadLine]]) -> Any:
        """The decoded request or sub-agent, the latter without its bad requests; None where there is nothing to save."""
        try:
            return (self._item if len(where) == 1 else self._inner).decode(item)
        except DECODE_ERRORS as error:
            why = explain(error)
        try:
            agent = self._raw_agent.decode(item)
        except DECODE_ERRORS:
            bad.append((where[0], BadLine(f"{_path(where)}: {why.reason}", why.mend)))
            return None
        agent.requests = [self._salvage((*where, j), inner, bad) for j, inner in enumerate(agent.requests)]
        return agent

    def _located(self, unit: bytes, bad: list[tuple[int, BadLine]]) -> list[BadLine]:
        """The bad requests with their lines and bytes, found by decoding the document once more."""
        raw = self._raw_sessions.decode(unit).requests if bad else []
        for index, why in bad:
            why.raw = bytes(raw[index])
            why.line_offset = unit.count(b"\n", 0, unit.find(why.raw))
        return [why for _, why in sorted(bad, key=lambda pair: pair[0])]

    def _named(self, id_: str) -> str:
        """The session's id, numbered where an earlier session of the input had the same one, for their block ids are unrelated."""
        seen = self._names[id_] = self._names.get(id_, 0) + 1
        return id_ if seen == 1 else f"{id_}#{seen}"


class _SessionReader:
    """Flattens one session: its own requests and those of its sub-agents, on the common clock, by time."""

    def __init__(self, session: _Session[Any], name: str, start_s: float, bad: list[tuple[int, BadLine]]) -> None:
        self._session, self._name, self._start_s, self._bad = session, name, start_s, bad
        self._scope = text_hash(name)

    def requests(self) -> list[TraceRequest]:
        out: list[TraceRequest] = []
        turn = 0
        for i, item in enumerate(self._session.requests):
            if isinstance(item, _Agent):
                agent = f"{self._name}/{item.agent_id}"
                for j, inner in enumerate(item.requests):
                    if inner is not None:
                        self._add(out, (i, j), inner, item.t, agent, j + 1, item.subagent_type or "subagent")
            elif item is not None:
                turn += 1
                self._add(out, (i,), item, 0.0, self._name, turn, "main")
        out.sort(key=lambda request: request.arrived_at_s)
        return out

    def _add(
        self, out: list[TraceRequest], where: tuple[int, ...], item: _Request, base_s: float, session: str, turn: int, category: str
    ) -> None:
        block_size = self._session.block_size
        try:
            check_length(len(item.hash_ids), item.prompt_tokens, block_size, "floor")
            ids = hashes(item.hash_ids)
        except BadLine as why:
            self._bad.append((where[0], BadLine(f"{_path(where)}: {why.reason}", why.mend)))
            return
        out.append(
            TraceRequest(
                arrived_at_s=self._start_s + base_s + item.t,
                prompt_tokens=item.prompt_tokens,
                output_tokens=item.output_tokens,
                block_size=block_size,
                chain=scope_key(ids, self._scope) if self._session.hash_id_scope == "local" else ids,
                session=session,
                parent_session=None if session == self._name else self._name,
                category=category,
                turn=turn,
                model=item.model,
                request_id=f"{session}:{turn}",
                ttft_ms=None if item.ttft is None else item.ttft * 1000,
            )
        )


def _path(where: tuple[int, ...]) -> str:
    return ".".join(f"requests[{i}]" for i in where)


def looks_like_session(data: bytes) -> bool:
    """Whether `data` is, or is the beginning of, a session document."""
    return data.startswith(b"{") and all(key in data[:4096] for key in (b'"id"', b'"block_size"', b'"requests"'))


SOURCE = Source(
    name="weka",
    summary="Claude Code sessions (WEKA kv-cache-tester): one JSON file a session, sub-agents, 64-token blocks",
    block_size=64,
    has_blocks=True,
    clock="session",
    decoder=WekaDecoder,
    options=("session_interval_s", "seed"),
    unit="document",
    suffixes=(".json",),
    looks_like=looks_like_session,
)
