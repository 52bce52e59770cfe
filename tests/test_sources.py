"""Trace readers: what each dialect means, how files are opened, what bad input says, and the right answers on the public traces."""

from __future__ import annotations

import gzip
import io
import json
import lzma
import os
import sys
import tarfile
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from ingest.chaining import GOLDEN, chain_hashes, mix64, mix64_int, recut, scope_key
from ingest.errors import InputError, UsageError
from ingest.sources import SOURCES, TraceRequest, read_trace

DATA = Path(__file__).parent / "data"
TRACES = Path(__file__).parents[2] / "shared" / "traces"
FIXTURES = {
    "mooncake": DATA / "mooncake.jsonl",
    "weka": DATA / "weka.json",
    "ragpulse": DATA / "ragpulse" / "0_trace.jsonl",
    "dynamo": DATA / "dynamo.jsonl",
    "qwen": DATA / "qwen.jsonl",
    "burstgpt": DATA / "burstgpt.csv",
    "azure": DATA / "azure.csv",
}
needs_traces = [
    pytest.mark.traces,
    pytest.mark.skipif(not TRACES.is_dir(), reason="the public traces (../shared/traces) are not beside the checkout"),
]


def mooncake_line(**change: Any) -> bytes:
    row = {"timestamp": 0, "input_length": 1024, "output_length": 1, "hash_ids": [1, 2]} | change
    return json.dumps(row).encode() + b"\n"


def written(path: Path, *lines: bytes) -> Path:
    path.write_bytes(b"".join(lines))
    return path


def read_all(path: Any, format: str, **options: Any) -> tuple[list[TraceRequest], list[InputError]]:
    bad: list[InputError] = []
    return list(read_trace(path, format, on_bad=bad.append, **options)), bad


# ---- hashes -------------------------------------------------------------------------------------------------------------------------


def test_mix64_is_the_finaliser_of_splitmix64() -> None:
    first_of_seed_0 = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert [mix64_int(i * GOLDEN) for i in (1, 2, 3)] == first_of_seed_0


@given(st.lists(st.integers(0, 2**64 - 1)))
def test_mix64_of_an_array_is_mix64_of_its_entries(values: list[int]) -> None:
    assert mix64(np.array(values, dtype=np.uint64)).tolist() == [mix64_int(v) for v in values]


@given(st.lists(st.integers(0, 2**64 - 1), unique=True), st.integers(0, 2**64 - 1))
def test_ids_of_one_scope_never_collide(ids: list[int], scope: int) -> None:
    assert len(set(scope_key(np.array(ids, dtype=np.uint64), scope).tolist())) == len(ids)


components = st.lists(st.integers(0, 3), min_size=1, max_size=6)
LENGTHS = [1, 2, 5, 7]


def ids_of(ids: list[int]) -> Any:
    return np.array(ids, dtype=np.uint64)


def shared_run(a: Iterable[Any], b: Iterable[Any]) -> int:
    count = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        count += 1
    return count


@given(components, components)
def test_chained_hashes_agree_exactly_as_far_as_the_components_do(a: list[int], b: list[int]) -> None:
    assert shared_run(chain_hashes(ids_of(a)).tolist(), chain_hashes(ids_of(b)).tolist()) == shared_run(a, b)


@given(components, components, st.integers(1, 6))
def test_recut_blocks_agree_exactly_as_far_as_the_tokens_do(a: list[int], b: list[int], block_size: int) -> None:
    def cut(ids: list[int]) -> tuple[list[int], list[tuple[tuple[int, int], ...]]]:
        tokens = [(c, i) for c in ids for i in range(LENGTHS[c])]
        sizes = np.array([LENGTHS[c] for c in ids], dtype=np.int32)
        blocks = [tuple(tokens[i : i + block_size]) for i in range(0, len(tokens), block_size)]
        return recut(chain_hashes(ids_of(ids)), sizes, len(tokens), block_size).tolist(), blocks

    (hashes_a, blocks_a), (hashes_b, blocks_b) = cut(a), cut(b)
    assert len(hashes_a) == len(blocks_a)
    assert shared_run(hashes_a, hashes_b) == shared_run(blocks_a, blocks_b)


# ---- dialects -----------------------------------------------------------------------------------------------------------------------


def test_mooncake() -> None:
    first, second, third = read_trace(FIXTURES["mooncake"], "mooncake")
    assert (first.arrived_at_s, second.arrived_at_s, third.arrived_at_s) == (0.0, 0.25, 1.5)
    assert (first.prompt_tokens, first.output_tokens, first.block_size) == (1300, 50, 512)
    assert third.chain.dtype == np.uint64 and third.chain.tolist() == [0, 1, 2, 2**64 - 1]
    assert first.tokens_per_block().tolist() == [512, 512, 276]
    assert first.full_chain().tolist() == [0, 1] and second.full_chain().tolist() == [0, 1]
    assert (first.tenant, first.tenant_assigned, first.request_id) == ("default", False, "mooncake.jsonl:1")


def test_qwen_sessions_are_the_roots_of_chats() -> None:
    requests = list(read_trace(FIXTURES["qwen"], "qwen"))
    assert [r.session for r in requests] == ["10", "10", "10", "13"]
    assert [(r.category, r.turn) for r in requests] == [("text", 1), ("text", 2), ("text", 3), ("image", 1)]
    assert requests[0].tokens_per_block().tolist() == [16, 16, 1]


def test_qwen_ids_name_contents_and_are_chained(tmp_path: Path) -> None:
    first, second, third, _ = read_trace(FIXTURES["qwen"], "qwen")
    assert shared_run(first.chain.tolist(), second.chain.tolist()) == 2
    assert shared_run(second.chain.tolist(), third.chain.tolist()) == 3
    # The same content twice in a prompt is two different blocks of prefix KV.
    (again,) = read_trace(written(tmp_path / "q", qwen_line(hash_ids=[1, 2, 1])), "qwen")
    assert len(set(again.chain.tolist())) == 3


def test_dynamo_comes_by_arrival_with_engine_truth() -> None:
    early, late = read_trace(FIXTURES["dynamo"], "dynamo")
    assert (early.request_id, late.request_id) == ("early", "late")
    assert late.arrived_at_s == 1_700_000_002.0
    assert late.chain.tolist() == [2**64 - 1, 2**63, 7]
    assert (late.session, late.parent_session, late.instance, early.instance) == ("s:1", "s:0", "12345678901234567890", "5/2")
    assert (late.hit_tokens, late.queue_ms, late.prefill_ms, late.ttft_ms) == (16, 1.5, 20.25, 21.75)
    assert (early.hit_tokens, early.queue_ms, early.session) == (0, None, None)


def test_dynamo_lets_go_of_what_lies_further_back_than_the_reorder_span() -> None:
    assert [r.request_id for r in read_trace(FIXTURES["dynamo"], "dynamo", reorder_s=0.0)] == ["late", "early"]
    assert [r.request_id for r in read_trace(FIXTURES["dynamo"], "dynamo", reorder_s=8.0)] == ["early", "late"]


def test_weka_merges_sub_agents_by_time_under_the_sessions_ids() -> None:
    requests = list(read_trace(FIXTURES["weka"], "weka"))
    assert [(r.arrived_at_s, r.session, r.parent_session, r.turn, r.category, r.model) for r in requests] == [
        (0.0, "s1", None, 1, "main", "big"),
        (10.0, "s1/a1", "s1", 1, "Explore", "small"),
        (25.0, "s1", None, 2, "main", "big"),
        (40.0, "s1/a1", "s1", 2, "Explore", "small"),
    ]
    assert requests[0].chain.tolist() == requests[2].chain[:2].tolist()
    assert requests[1].chain.tolist() == requests[3].chain[:1].tolist()
    assert requests[0].tokens_per_block().tolist() == [64, 64]
    assert (requests[2].ttft_ms, requests[0].ttft_ms, requests[2].block_size) == (500.0, None, 64)


def test_ragpulse_chains_components_and_sorts() -> None:
    a, b = read_trace(FIXTURES["ragpulse"], "ragpulse")
    assert [(r.session, r.arrived_at_s, r.prompt_tokens) for r in (a, b)] == [("a", 82.0, 21), ("b", 90.0, 32)]
    assert (a.tokens_per_block().tolist(), b.tokens_per_block().tolist()) == ([10, 7, 4], [10, 7, 12, 3])
    assert shared_run(a.chain.tolist(), b.chain.tolist()) == 2


def test_ragpulse_recut_into_equal_blocks() -> None:
    a, b = read_trace(DATA / "ragpulse", "ragpulse", block_size=8)
    assert (len(a.chain), len(b.chain), a.block_size, a.block_tokens) == (3, 4, 8, None)
    # Tokens 0-16 are common: two whole blocks.
    assert shared_run(a.chain.tolist(), b.chain.tolist()) == 2
    assert a.tokens_per_block().tolist() == [8, 8, 5]


def test_csv_traces_are_load_only() -> None:
    first, second = read_trace(FIXTURES["azure"], "azure")
    assert first.arrived_at_s == pytest.approx(1700158546.68059, abs=1e-6)
    assert (first.prompt_tokens, first.output_tokens, len(first.chain)) == (374, 44, 0)
    assert second.arrived_at_s - first.arrived_at_s == pytest.approx(4.314579, abs=1e-6)
    one, two = read_trace(FIXTURES["burstgpt"], "burstgpt")
    assert (one.arrived_at_s, one.session, one.model, one.category) == (5.0, "a7", "ChatGPT", "Conversation log")
    assert (two.arrived_at_s, two.session, two.output_tokens) == (45.5, None, 0)
    assert [s.name for s in SOURCES.values() if not s.has_blocks] == ["burstgpt", "azure"]


def test_burstgpt_without_sessions(tmp_path: Path) -> None:
    header = b"Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    (request,) = read_trace(written(tmp_path / "b.csv", header, b"5,GPT-4,1,2,3,API log\n"), "burstgpt")
    assert (request.session, request.prompt_tokens, request.output_tokens) == (None, 1, 2)


def test_block_size_of_a_format_can_be_given(tmp_path: Path) -> None:
    path = written(tmp_path / "m.jsonl", mooncake_line(input_length=33, hash_ids=[1, 2, 3]))
    (request,) = read_trace(path, "mooncake", block_size=16)
    assert request.tokens_per_block().tolist() == [16, 16, 1]


# ---- order --------------------------------------------------------------------------------------------------------------------------


def weka_session(id_: str, times: list[float], blocks: int = 2) -> bytes:
    requests = [{"t": t, "type": "n", "model": "m", "in": 64 * blocks, "out": 1, "hash_ids": list(range(1, blocks + 1))} for t in times]
    return json.dumps({"id": id_, "block_size": 64, "hash_id_scope": "local", "requests": requests}).encode()


def weka_folder(folder: Path, sessions: int) -> Path:
    for i in range(sessions):
        (folder / f"s{i:02d}.json").write_bytes(weka_session(f"s{i}", [0.0, 7.0, 200.0 + 13 * i]))
    return folder


def test_weka_sessions_share_nothing_even_under_one_id(tmp_path: Path) -> None:
    paths = [written(tmp_path / name, weka_session(id_, [0.0])) for name, id_ in (("a.json", "x"), ("b.json", "y"), ("c.json", "x"))]
    requests = list(read_trace(paths, "weka"))
    assert len({h for r in requests for h in r.chain.tolist()}) == 6
    assert [r.session for r in requests] == ["x", "y", "x#2"]


def test_weka_time_order_is_the_session_order_sorted(tmp_path: Path) -> None:
    folder = weka_folder(tmp_path, 12)
    by_session = list(read_trace(folder, "weka", order="session", session_interval_s=20.0))
    by_time = list(read_trace(folder, "weka", order="time", session_interval_s=20.0))
    assert [r.session for r in by_session] == [f"s{i}" for i in range(12) for _ in range(3)]
    wanted = sorted(by_session, key=lambda r: r.arrived_at_s)
    assert [(r.arrived_at_s, r.request_id) for r in by_time] == [(r.arrived_at_s, r.request_id) for r in wanted]
    assert wanted != by_session


def test_weka_start_times_are_a_poisson_process_of_the_seed(tmp_path: Path) -> None:
    for i in range(400):
        (tmp_path / f"{i:03d}.json").write_bytes(weka_session(f"s{i}", [0.0]))
    starts = [r.arrived_at_s for r in read_trace(tmp_path, "weka", session_interval_s=30.0)]
    gaps = np.diff(starts)
    # Mean and deviation of 399 exponential gaps of mean 30 have standard errors 1.5 and about 2.1.
    assert starts[0] == 0.0 and gaps.min() > 0 and 25 < gaps.mean() < 35 and 23 < gaps.std() < 37
    assert starts == [r.arrived_at_s for r in read_trace(tmp_path, "weka", session_interval_s=30.0)]
    assert starts != [r.arrived_at_s for r in read_trace(tmp_path, "weka", session_interval_s=30.0, seed=1)]


def test_inputs_with_one_clock_are_merged_by_time(tmp_path: Path) -> None:
    a = written(tmp_path / "a.jsonl", mooncake_line(timestamp=0), mooncake_line(timestamp=2000))
    b = written(tmp_path / "b.jsonl", mooncake_line(timestamp=1000), mooncake_line(timestamp=3000))
    assert [r.arrived_at_s for r in read_trace([a, b], "mooncake")] == [0.0, 1.0, 2.0, 3.0]
    assert [r.arrived_at_s for r in read_trace([a, b], "mooncake", order="session")] == [0.0, 2.0, 1.0, 3.0]


# ---- opening ------------------------------------------------------------------------------------------------------------------------


def tarred(*members: tuple[str, bytes]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return out.getvalue()


def zst(data: bytes, long: bool = False) -> bytes:
    if not long:
        return zstandard.ZstdCompressor().compress(data)
    parameters = zstandard.ZstdCompressionParameters(window_log=28, enable_ldm=True)
    compressor = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    return compressor.compress(data) + compressor.flush()


PACKINGS: dict[str, Callable[[bytes], bytes]] = {
    ".jsonl": lambda data: data,
    ".jsonl.gz": gzip.compress,
    ".jsonl.zst": zst,
    ".long.jsonl.zst": lambda data: zst(data, long=True),
    ".frames.jsonl.zst": lambda data: zst(data[:50]) + zst(data[50:]),
    ".jsonl.xz": lzma.compress,
    ".tar": lambda data: tarred(("LICENSE", b"free"), ("t/a.jsonl", data)),
    ".tar.gz": lambda data: gzip.compress(tarred(("t/a.jsonl", data))),
    ".tar.zst": lambda data: zst(tarred(("t/a.jsonl", data))),
    ".gz.tar": lambda data: tarred(("t/a.jsonl.gz", gzip.compress(data))),
}


@pytest.mark.parametrize("kind", PACKINGS)
@pytest.mark.parametrize("way", ["file", "folder", "stdin"])
def test_every_packing_reads_alike(kind: str, way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path / f"trace{kind}", PACKINGS[kind](FIXTURES["mooncake"].read_bytes()))
    if way == "stdin":
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(path.read_bytes())))
    given_path: Any = {"file": path, "folder": tmp_path, "stdin": "-"}[way]
    got = [(r.arrived_at_s, r.prompt_tokens, r.chain.tolist()) for r in read_trace(given_path, "mooncake")]
    assert got == [(r.arrived_at_s, r.prompt_tokens, r.chain.tolist()) for r in read_trace(FIXTURES["mooncake"], "mooncake")]


def test_a_packed_archive_of_sessions_reads_in_its_own_order(tmp_path: Path) -> None:
    members = [("t/b.json", weka_session("b", [0.0])), ("t/a.json", weka_session("a", [0.0, 1.0]))]
    path = written(tmp_path / "t.tar.zst", zst(tarred(*members), long=True))
    assert [r.session for r in read_trace(path, "weka", order="session")] == ["b", "a", "a"]


def test_progress_counts_compressed_bytes_to_the_end(tmp_path: Path) -> None:
    path = written(tmp_path / "m.jsonl.zst", zst(mooncake_line() * 10_000))
    seen: list[tuple[int, int | None]] = []
    assert sum(1 for _ in read_trace(path, "mooncake", progress=lambda done, total: seen.append((done, total)))) == 10_000
    size = path.stat().st_size
    assert seen[-1] == (size, size) and seen == sorted(seen)


def test_a_live_pipe_is_read_line_by_line(monkeypatch: pytest.MonkeyPatch) -> None:
    out, into = os.pipe()
    monkeypatch.setattr(sys, "stdin", os.fdopen(out))
    requests = read_trace("-", "mooncake")
    for arrival in (0, 1000, 2000):
        os.write(into, mooncake_line(timestamp=arrival))
        assert next(requests).arrived_at_s == arrival / 1000
    os.close(into)
    assert list(requests) == []


@pytest.mark.parametrize("packing", [lambda data: data, gzip.compress, zst])
def test_reading_is_streaming(packing: Callable[[bytes], bytes], tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    lines = [mooncake_line(input_length=512 * 100, hash_ids=rng.integers(0, 2**63, 100).tolist()) for _ in range(3_000)]
    path = written(tmp_path / "big.jsonl", packing(b"".join(lines)))
    seen: list[tuple[int, int | None]] = []
    tracemalloc.start()
    requests = read_trace(path, "mooncake", progress=lambda done, total: seen.append((done, total)))
    next(requests)
    done, total = seen[-1]
    assert total == path.stat().st_size and done < total / 5
    rest = sum(1 for _ in requests)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert rest == len(lines) - 1 and peak < 2_500_000 < sum(map(len, lines)) / 2


def test_sessions_are_read_one_at_a_time(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    members = []
    for i in range(30):
        request = {"t": 0.0, "type": "n", "model": "m", "in": 64 * 5000, "out": 1, "hash_ids": rng.integers(0, 2**63, 5000).tolist()}
        members.append((f"{i}.json", json.dumps({"id": str(i), "block_size": 64, "requests": [request]}).encode()))
    path = written(tmp_path / "t.tar.zst", zst(tarred(*members)))
    seen: list[int] = []
    requests = read_trace(path, "weka", progress=lambda done, total: seen.append(done))
    next(requests)
    assert seen[-1] < path.stat().st_size / 5
    assert sum(1 for _ in requests) == 29


# ---- bad input ----------------------------------------------------------------------------------------------------------------------


def test_paths_that_hold_nothing(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "README.md").write_text("no trace")
    for path, words in ((tmp_path / "missing.jsonl", "no such file"), (tmp_path / "folder", "holds no .jsonl")):
        with pytest.raises(InputError, match=words) as caught:
            read_trace(path, "mooncake")
        assert str(path) in str(caught.value) and caught.value.mend
    with pytest.raises(InputError, match="no input was named"):
        read_trace([], "mooncake")


@pytest.mark.parametrize("content", [b"", b"\n\n  \n", gzip.compress(b""), zst(b"")])
@pytest.mark.parametrize("format", SOURCES)
def test_empty_files(content: bytes, format: str, tmp_path: Path) -> None:
    path = written(tmp_path / "empty", content)
    with pytest.raises(InputError, match="the file is empty") as caught:
        list(read_trace(path, format))
    assert caught.value.path == str(path) and caught.value.mend


def test_an_empty_file_does_not_take_its_neighbours_with_it(tmp_path: Path) -> None:
    written(tmp_path / "a.jsonl")
    written(tmp_path / "b.jsonl", mooncake_line())
    requests, bad = read_all(tmp_path, "mooncake")
    assert len(requests) == 1 and [Path(e.path).name for e in bad] == ["a.jsonl"]


@pytest.mark.parametrize("packing", [gzip.compress, zst, lzma.compress, lambda data: zst(tarred(("t/a.jsonl", data)))])
def test_cut_compression_keeps_what_came_before(packing: Callable[[bytes], bytes], tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    lines = b"".join(mooncake_line(hash_ids=rng.integers(0, 2**63, 2).tolist()) for _ in range(20_000))
    whole = packing(lines)
    path = written(tmp_path / "cut.jsonl", whole[: len(whole) // 2])
    requests, bad = read_all(path, "mooncake")
    assert 5_000 < len(requests) < 15_000
    assert "corrupt or cut" in bad[0].reason and str(path) in str(bad[0]) and "again" in bad[0].mend
    with pytest.raises(InputError, match="corrupt or cut"):
        list(read_trace(path, "mooncake"))


def test_corrupt_compression(tmp_path: Path) -> None:
    for name, content in (("a.zst", b"\x28\xb5\x2f\xfd" + b"\xff" * 40), ("b.gz", b"\x1f\x8b" + b"\xff" * 40)):
        with pytest.raises(InputError, match="corrupt or cut"):
            list(read_trace(written(tmp_path / name, content), "mooncake"))


GOOD_QWEN = {"chat_id": 1, "parent_chat_id": -1, "timestamp": 0.0, "input_length": 33, "output_length": 1, "type": "t", "turn": 1}
GOOD_RAG = {"sys_prompt": [1], "passages_ids": [], "history": [], "web_search": [], "user_input": []}


def qwen_line(**change: Any) -> bytes:
    return json.dumps(GOOD_QWEN | {"hash_ids": [1, 2, 3]} | change).encode() + b"\n"


def rag_line(**change: Any) -> bytes:
    return json.dumps({"timestamp": "1", "input_length": 12, "output_length": 1, "hash_ids": GOOD_RAG} | change).encode() + b"\n"


def dynamo_line(**change: Any) -> bytes:
    replay = {"trace_block_size": 16, "input_length": 32, "input_sequence_hashes": [1, 2]}
    request = {"request_id": "r", "request_received_ms": 5, "replay": replay}
    request |= {"replay": replay | change} if change.keys() & replay.keys() else change
    event = {"schema": "dynamo.request.trace.v1", "event_type": "request_end", "event_time_unix_ms": 9, "request": request}
    return json.dumps({"timestamp": 1, "event": event}).encode() + b"\n"


def azure_line(text: str = "2023-11-16 18:15:46.68,374,44") -> bytes:
    return text.encode() + b"\n"


LINES: dict[str, Callable[..., bytes]] = {
    "mooncake": mooncake_line,
    "qwen": qwen_line,
    "ragpulse": rag_line,
    "dynamo": dynamo_line,
    "azure": azure_line,
}
HEAD = {"azure": b"TIMESTAMP,ContextTokens,GeneratedTokens\n"}
TOO_BIG = 2**64
BAD_LINES = [
    ("mooncake", mooncake_line()[:40], "truncated"),
    ("mooncake", b"\xff\xfe\x00\n", "not JSON"),
    ("mooncake", b"[" * 5000 + b"\n", "wrong type"),
    ("mooncake", mooncake_line(input_length="1024"), "wrong type"),
    ("mooncake", mooncake_line(input_length=1.5), "wrong type"),
    ("mooncake", mooncake_line(input_length=-1), "negative number"),
    ("mooncake", mooncake_line(output_length=-1), "negative number"),
    ("mooncake", mooncake_line(timestamp=-1), "negative number"),
    ("mooncake", mooncake_line(input_length=2**40), "number too large"),
    ("mooncake", mooncake_line(timestamp=1e300), "number too large"),
    ("mooncake", mooncake_line(hash_ids=[1]), "list length 1 does not fit 1024 tokens"),
    ("mooncake", mooncake_line(hash_ids=[1, 2, 3]), "list length 3"),
    ("mooncake", mooncake_line(hash_ids=[1, TOO_BIG]), "hash out of range: 18446744073709551616"),
    ("mooncake", mooncake_line(hash_ids=[1, 10**400]), "hash out of range: an integer of 1329 bits"),
    ("mooncake", mooncake_line(hash_ids=[1, -2]), "hash out of range: -2"),
    ("mooncake", mooncake_line(hash_ids=[1, None]), "wrong type"),
    ("mooncake", mooncake_line(hash_ids=None), "wrong type"),
    ("mooncake", mooncake_line(extra=1), "unknown field"),
    ("mooncake", b'{"timestamp": 0}\n', "missing field"),
    ("mooncake", b"[]\n", "wrong type"),
    ("qwen", qwen_line()[:-20], "truncated"),
    ("qwen", qwen_line(turn="1"), "wrong type"),
    ("qwen", qwen_line(input_length=-5), "negative number"),
    ("qwen", qwen_line(hash_ids=[1, 2]), "list length 2 does not fit 33 tokens"),
    ("qwen", qwen_line(hash_ids=[1, 2, TOO_BIG]), "hash out of range"),
    ("qwen", qwen_line(extra=1), "unknown field"),
    ("ragpulse", rag_line()[:-20], "truncated"),
    ("ragpulse", rag_line(timestamp="soon"), "wrong type: timestamp"),
    ("ragpulse", rag_line(timestamp="-1"), "negative number"),
    ("ragpulse", rag_line(input_length=-1), "negative number"),
    ("ragpulse", rag_line(input_length=9), "list length does not fit: 10 tokens"),
    ("ragpulse", rag_line(hash_ids=GOOD_RAG | {"user_input": [TOO_BIG]}), "hash out of range"),
    ("ragpulse", rag_line(hash_ids=GOOD_RAG | {"user_input": [1234]}), "component 1234"),
    ("ragpulse", rag_line(hash_ids=GOOD_RAG | {"other": []}), "unknown field"),
    ("ragpulse", rag_line(extra=1), "unknown field"),
    ("dynamo", dynamo_line()[:-20], "truncated"),
    ("dynamo", dynamo_line(input_length="32"), "wrong type"),
    ("dynamo", dynamo_line(input_length=-32), "negative number"),
    ("dynamo", dynamo_line(input_sequence_hashes=[1]), "list length 1"),
    ("dynamo", dynamo_line(input_sequence_hashes=[1, TOO_BIG]), "hash out of range"),
    ("dynamo", dynamo_line(trace_block_size=0), "trace_block_size"),
    ("dynamo", dynamo_line(replay=None), "without request.replay"),
    ("azure", azure_line("2023-11-16 18:15:46.68,374"), "truncated"),
    ("azure", azure_line("2023-11-16 18:15:46.68,many,44"), "wrong type"),
    ("azure", azure_line("2023-11-16 18:15:46.68,-374,44"), "negative number"),
    ("azure", azure_line("2023-11-16 18:15:46.68,99999999999,44"), "number too large"),
    ("azure", azure_line("yesterday,374,44"), "wrong type"),
    ("azure", azure_line('"2023,374,44'), "not CSV"),
]


@pytest.mark.parametrize(("format", "line", "reason"), BAD_LINES, ids=[f"{f}-{r[:24]}-{i}" for i, (f, _, r) in enumerate(BAD_LINES)])
def test_a_bad_line_names_file_line_and_mend_and_the_others_are_kept(format: str, line: bytes, reason: str, tmp_path: Path) -> None:
    good = LINES[format]()
    line = line if line.endswith(b"\n") else line + b"\n"
    head = HEAD.get(format, good)
    path = written(tmp_path / "trace", head, good, line, good, good)
    options: dict[str, Any] = {"tables": DATA / "ragpulse"} if format == "ragpulse" else {}
    with pytest.raises(InputError) as caught:
        list(read_trace(path, format, **options))
    error = caught.value
    assert (error.path, error.line, error.raw) == (str(path), 3, line.strip()[:4096])
    assert reason in error.reason and error.mend
    assert str(error).startswith(f"{path}:3: ")
    requests, bad = read_all(path, format, **options)
    assert len(requests) == (3 if format in HEAD else 4)
    assert [str(e) for e in bad] == [str(error)]


def weka_document(**change: Any) -> bytes:
    good = {"t": 0.0, "type": "n", "model": "m", "in": 130, "out": 1, "hash_ids": [1, 2]}
    rows = [good | {"t": 1.0}, good | change, good | {"t": 3.0}]
    agent = {"t": 5.0, "type": "subagent", "agent_id": "a", "requests": [good]}
    body = ",\n".join(json.dumps(row) for row in [*rows, agent])
    return b'{"id": "s", "block_size": 64, "requests": [\n' + body.encode() + b"\n]}"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"in": "130"}, "wrong type"),
        ({"in": -130}, "negative number"),
        ({"t": -1.0}, "negative number"),
        ({"hash_ids": [1, 2, 3]}, "list length 3"),
        ({"hash_ids": [1, TOO_BIG]}, "hash out of range"),
        ({"hash_ids": [1, -1]}, "hash out of range"),
        ({"extra": 1}, "unknown field"),
        ({"type": "x"}, "wrong type"),
    ],
)
def test_a_bad_request_leaves_the_rest_of_its_session(change: dict[str, Any], reason: str, tmp_path: Path) -> None:
    path = written(tmp_path / "s.json", weka_document(**change))
    requests, (error,) = read_all(path, "weka")
    assert [r.arrived_at_s for r in requests] == [1.0, 3.0, 5.0]
    assert reason in error.reason and "requests[1]" in error.reason and error.mend and error.path == str(path) and error.line == 3
    with pytest.raises(InputError, match=r"requests\[1\]"):
        list(read_trace(path, "weka"))


@pytest.mark.parametrize(
    ("change", "reason"), [({"in": "130"}, "wrong type"), ({"hash_ids": [1]}, "list length 1"), ({"x": 1}, "unknown field")]
)
def test_a_bad_request_of_a_sub_agent_leaves_the_rest_of_it(change: dict[str, Any], reason: str, tmp_path: Path) -> None:
    good = {"t": 0.0, "type": "s", "model": "m", "in": 130, "out": 1, "hash_ids": [1, 2]}
    agent = {"t": 5.0, "type": "subagent", "agent_id": "a", "requests": [good, good | change, good | {"t": 2.0}]}
    path = written(tmp_path / "s.json", json.dumps({"id": "s", "block_size": 64, "requests": [good, agent]}).encode())
    requests, (error,) = read_all(path, "weka")
    assert [(r.arrived_at_s, r.turn) for r in requests] == [(0.0, 1), (5.0, 1), (7.0, 3)]
    assert reason in error.reason and error.reason.startswith("requests[1].requests[1]: ")


def test_a_bad_session_leaves_the_other_sessions(tmp_path: Path) -> None:
    members = [("a.json", weka_session("a", [0.0])), ("b.json", weka_session("b", [0.0])[:-30]), ("c.json", b"{}"), ("d.json", b"")]
    path = written(tmp_path / "t.tar", tarred(*members, ("e.json", weka_session("e", [0.0]))))
    requests, bad = read_all(path, "weka")
    assert [r.session for r in requests] == ["a", "e"]
    assert [(e.path, e.reason.split(":")[0]) for e in bad] == [
        (f"{path}:b.json", "truncated"),
        (f"{path}:c.json", "missing field"),
        (f"{path}:d.json", "the file is empty"),
    ]


def test_unknown_fields_can_be_allowed(tmp_path: Path) -> None:
    assert len(list(read_trace(written(tmp_path / "m", mooncake_line(extra=1)), "mooncake", ignore_unknown_fields=True))) == 1
    assert len(list(read_trace(written(tmp_path / "q", qwen_line(extra=1)), "qwen", ignore_unknown_fields=True))) == 1
    assert len(list(read_trace(written(tmp_path / "w", weka_document(extra=1)), "weka", ignore_unknown_fields=True))) == 4
    rag = rag_line(extra=1, hash_ids=GOOD_RAG | {"more": []})
    assert len(list(read_trace(written(tmp_path / "r", rag), "ragpulse", ignore_unknown_fields=True, tables=DATA / "ragpulse"))) == 1
    table = HEAD["azure"].replace(b"\n", b",More\n") + azure_line("2023-11-16 18:15:46.68,374,44,1")
    with pytest.raises(InputError, match="unknown field: column More"):
        list(read_trace(written(tmp_path / "a", table), "azure"))
    assert len(list(read_trace(tmp_path / "a", "azure", ignore_unknown_fields=True))) == 1


@pytest.mark.parametrize("told", [False, True], ids=["raise", "on_bad"])
@pytest.mark.parametrize("real", SOURCES)
@pytest.mark.parametrize("given_format", SOURCES)
def test_a_wrong_format_says_which_one_it_looks_like(given_format: str, real: str, told: bool, tmp_path: Path) -> None:
    if given_format == real:
        return
    bad: list[InputError] = []
    with pytest.raises(InputError) as caught:
        list(read_trace(FIXTURES[real], given_format, on_bad=bad.append if told else None))
    error = caught.value
    assert bad == []
    assert f"looks like {real}" in error.reason and error.mend == f"use --format {real}"
    assert (error.path, error.line) == (str(FIXTURES[real]), 1)


def test_reading_stops_when_the_first_twenty_lines_are_all_bad(tmp_path: Path) -> None:
    path = written(tmp_path / "x.jsonl", *[b'{"a": 1}\n'] * 30, mooncake_line())
    bad: list[InputError] = []
    with pytest.raises(InputError, match="no line can be read as mooncake") as caught:
        list(read_trace(path, "mooncake", on_bad=bad.append))
    assert bad == [] and caught.value.line == 1 and "20 tried" in caught.value.reason and "weka" in caught.value.mend
    kept, bad_lines = read_all(written(path, *[b'{"a": 1}\n'] * 19, mooncake_line(), *[b'{"a": 1}\n'] * 30), "mooncake")
    assert (len(kept), len(bad_lines)) == (1, 49)


def test_a_log_without_requests_is_an_error(tmp_path: Path) -> None:
    path = written(tmp_path / "d.jsonl", FIXTURES["dynamo"].read_bytes().splitlines(keepends=True)[0])
    with pytest.raises(InputError, match="no dynamo request could be read"):
        list(read_trace(path, "dynamo"))


def test_missing_component_tables(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no 1_sys_prompt.jsonl beside the trace"):
        list(read_trace(written(tmp_path / "0_trace.jsonl", rag_line()), "ragpulse"))


@pytest.mark.parametrize("row", [b'{"sys_prompt_id": 1}', b'{"sys_prompt_id": 1, "token_length": -4}', b'{"sys_prompt_id": 1, "token_'])
def test_bad_component_tables(row: bytes, tmp_path: Path) -> None:
    for table in (DATA / "ragpulse").iterdir():
        (tmp_path / table.name).write_bytes(table.read_bytes())
    written(tmp_path / "1_sys_prompt.jsonl", row)
    with pytest.raises(InputError) as caught:
        list(read_trace(tmp_path, "ragpulse"))
    assert (Path(caught.value.path).name, caught.value.line) == ("1_sys_prompt.jsonl", 1)


# ---- the front door -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"format": "moonshot"}, "choose one of mooncake, weka"),
        ({"seed": 1}, "format mooncake has no option seed; it has block_size"),
        ({"tenant": "a", "assign_tenants": "zipf:3"}, "not both"),
        ({"tenant": " "}, "--tenant is empty"),
        ({"order": "random"}, "time, session"),
        ({"assign_tenants": "zipf"}, "zipf:N"),
        ({"assign_tenants": "zipf:0"}, "zipf:N"),
        ({"assign_tenants": "uniform:3"}, "zipf:N"),
        ({"assign_tenants": "zipf:99999"}, "zipf:N"),
    ],
)
def test_wrong_usage_is_told_at_the_call(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        read_trace(FIXTURES["mooncake"], **({"format": "mooncake"} | options))


def test_wrong_option_values(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="at least 1 token"):
        read_trace(FIXTURES["mooncake"], "mooncake", block_size=0)
    with pytest.raises(UsageError, match="session_interval_s"):
        read_trace(FIXTURES["weka"], "weka", session_interval_s=-1.0)


def test_limit() -> None:
    assert [r.arrived_at_s for r in read_trace(FIXTURES["mooncake"], "mooncake", limit=2)] == [0.0, 0.25]
    assert list(read_trace(FIXTURES["mooncake"], "mooncake", limit=0)) == []


def test_tenant_names_all() -> None:
    assert {(r.tenant, r.tenant_assigned) for r in read_trace(FIXTURES["weka"], "weka", tenant="acme")} == {("acme", False)}


def test_zipf_tenants_have_zipf_shares_and_stick_to_conversations(tmp_path: Path) -> None:
    # 4000 conversations behind one shared head block, two turns each.
    lines = []
    for i in range(4000):
        lines += [mooncake_line(hash_ids=[0, i + 1]), mooncake_line(hash_ids=[0, i + 1, 10_000 + i], input_length=1536)]
    path = written(tmp_path / "m.jsonl", *lines)
    requests = list(read_trace(path, "mooncake", assign_tenants="zipf:4"))
    assert all(r.tenant_assigned for r in requests)
    assert [r.tenant for r in requests[::2]] == [r.tenant for r in requests[1::2]]
    shares = Counter(r.tenant for r in requests)
    for i in range(1, 5):
        # Shares 12/25, 6/25, 4/25, 3/25; three standard errors of 4000 draws are below 0.024.
        assert shares[f"tenant-{i:02d}"] / len(requests) == pytest.approx(12 / 25 / i, abs=0.024)
    written(tmp_path / "renamed.jsonl", *lines)
    again = read_trace(tmp_path / "renamed.jsonl", "mooncake", assign_tenants="zipf:4")
    assert [r.tenant for r in again] == [r.tenant for r in requests]


def test_sub_agents_belong_to_the_tenant_of_their_session() -> None:
    for count in (2, 5, 50):
        assert len({r.tenant for r in read_trace(FIXTURES["weka"], "weka", assign_tenants=f"zipf:{count}")}) == 1


# ---- right answers on the public traces -----------------------------------------------------------------------------------------------


def summary(requests: Iterable[TraceRequest]) -> dict[str, Any]:
    """Leading-run hits in an infinite cache, block by block; also asserts the chain property and time order."""
    before: dict[int, int] = {}
    count = blocks = hits = hit_tokens = tokens = 0
    last_s = 0.0
    for r in requests:
        chain, sizes = r.chain.tolist(), r.tokens_per_block()
        run = shared_run((h in before for h in chain), [True] * len(chain))
        count, blocks, hits = count + 1, blocks + len(chain), hits + run
        hit_tokens, tokens = hit_tokens + int(sizes[:run].sum()), tokens + int(sizes.sum())
        for previous, block in zip([-1, *chain], chain, strict=False):
            assert before.setdefault(block, previous) == previous
        assert r.arrived_at_s >= last_s
        last_s = r.arrived_at_s
    ideal, ideal_tokens = round(hits / max(blocks, 1), 4), round(hit_tokens / max(tokens, 1), 4)
    return {"requests": count, "blocks": blocks, "distinct": len(before), "ideal": ideal, "ideal_tokens": ideal_tokens}


def leading_runs(requests: Iterable[TraceRequest]) -> list[int]:
    seen: set[int] = set()
    runs = []
    for r in requests:
        chain = r.chain.tolist()
        runs.append(shared_run((h in seen for h in chain), [True] * len(chain)))
        seen.update(chain)
    return runs


class TestPublicTraces:
    pytestmark = needs_traces

    @pytest.mark.parametrize(
        ("path", "format", "right"),
        [
            ("mooncake/conversation_trace.jsonl.zst", "mooncake", (12031, 288500, 182790, 0.3664, 0.3736)),
            ("mooncake/synthetic_trace.jsonl.zst", "mooncake", (3993, 121877, 43924, 0.6396, 0.6512)),
            ("mooncake/mooncake_trace_1000.jsonl.zst", "mooncake", (1000, 19686, 12207, 0.3799, 0.3907)),
            ("ragpulse", "ragpulse", (7106, 71583, 58727, 0.1796, 0.3153)),
            ("dynamo/pi_request_trace.jsonl.gz", "dynamo", (17, 4163, 1183, 0.7158, None)),
        ],
    )
    def test_published_totals(self, path: str, format: str, right: tuple[Any, ...]) -> None:
        got = summary(read_trace(TRACES / path, format))
        assert tuple(got.values())[: 5 if right[4] else 4] == (right if right[4] else right[:4])

    def test_ragpulse_recut_hits_the_same_tokens(self) -> None:
        as_is = list(read_trace(TRACES / "ragpulse", "ragpulse"))
        recut_ = list(read_trace(TRACES / "ragpulse", "ragpulse", block_size=64))
        for one, two, run, blocks in zip(as_is, recut_, leading_runs(as_is), leading_runs(recut_), strict=True):
            tokens = int(one.tokens_per_block()[:run].sum())
            # Whole blocks of the shared tokens; the partial tail only of a prompt that was seen entire.
            assert blocks == (len(two.chain) if tokens == two.prompt_tokens else tokens // 64)

    def test_dynamo_engine_truth(self) -> None:
        requests = list(read_trace(TRACES / "dynamo", "dynamo"))
        cached = sum(r.hit_tokens or 0 for r in requests) / sum(r.prompt_tokens for r in requests)
        assert round(cached, 4) == 0.7555
        assert len({r.session for r in requests}) == 5 and len({r.instance for r in requests}) == 2

    def test_qwen_head(self) -> None:
        got = summary(read_trace(TRACES / "qwen-bailian-head", "qwen"))
        assert (got["requests"], got["blocks"]) == (7, 1290)

    @pytest.mark.parametrize(("name", "rows"), [("azure_code.csv", 8819), ("azure_conv.csv", 19366)])
    def test_azure(self, name: str, rows: int) -> None:
        arrivals = [r.arrived_at_s for r in read_trace(TRACES / "azure" / name, "azure")]
        assert len(arrivals) == rows and arrivals == sorted(arrivals)
        assert 55 * 60 < arrivals[-1] - arrivals[0] < 60 * 60

    def test_a_cut_last_line_costs_one_row(self) -> None:
        requests, bad = read_all(TRACES / "mooncake" / "toolagent.head.jsonl", "mooncake")
        assert len(requests) == 45 and [(e.line, e.reason.split(":")[0]) for e in bad] == [(46, "truncated")]

    @pytest.mark.slow
    def test_all_claude_code_sessions(self) -> None:
        started = time.perf_counter()
        requests = blocks = distinct = hits = agents = 0
        sessions = SessionHits()
        for r in read_trace(TRACES / "weka-claude-code" / "traces_710.tar.zst", "weka", order="session"):
            requests, blocks, agents = requests + 1, blocks + len(r.chain), agents + (r.parent_session is not None)
            run, new = sessions.add(r)
            hits, distinct = hits + run, distinct + new
        print(f"{blocks / (time.perf_counter() - started) / 1e6:.1f} M ids/s with the infinite cache")
        assert (requests, blocks, distinct, agents, len(sessions.names)) == (49334, 94310647, 3450959, 676, 710)
        assert round(hits / blocks, 4) == 0.9634


class SessionHits:
    """Infinite cache of one session at a time, for sessions share nothing: a sorted array of the hashes seen."""

    def __init__(self) -> None:
        self.names: set[str] = set()
        self._seen = np.empty(0, dtype=np.uint64)

    def add(self, request: TraceRequest) -> tuple[int, int]:
        """Blocks of the leading run, and blocks never seen before."""
        root = request.parent_session or request.session or ""
        if root not in self.names:
            self.names.add(root)
            self._seen = np.empty(0, dtype=np.uint64)
        chain = request.chain
        if not len(self._seen):
            known = np.zeros(len(chain), dtype=bool)
        else:
            at = np.minimum(np.searchsorted(self._seen, chain), len(self._seen) - 1)
            known = self._seen[at] == chain
        fresh = np.unique(chain[~known])
        if len(fresh):
            self._seen = np.sort(np.concatenate([self._seen, fresh]), kind="stable")
        return (int(np.argmin(known)) if not known.all() else len(chain)), len(fresh)
