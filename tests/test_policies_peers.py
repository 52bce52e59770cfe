"""Policies beside libcachesim: its published figures on the Mooncake traces, and the package itself, run here.

libcachesim is GPL-3.0-or-later: a tool of tests and benches, never imported by kvtide. What it draws at random, or breaks ties of by what
stands where in memory, is held to a tolerance; the rest to the last hit.
"""

from __future__ import annotations

import json
import os
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from analytics.policies import POLICIES
from analytics.policies.cursor import bare
from analytics.reuse.chains import densify
from bench.policies import policy_speed
from ingest.sources import read_trace

TRACES = Path(__file__).parents[1] / ".." / "shared" / "traces" / "mooncake"
CONVERSATION, SYNTHETIC = "conversation", "synthetic"
# Share of blocks hit, forward order, at (trace, capacity); and the relative error that is let pass.
C10, C20, S10, S20 = (CONVERSATION, 10_000), (CONVERSATION, 20_000), (SYNTHETIC, 10_000), (SYNTHETIC, 20_000)
PUBLISHED: dict[str, tuple[dict[tuple[str, int], float], float]] = {
    "lirs": ({C10: 0.1946, S10: 0.4282}, 3e-4),
    "lfuda": ({C10: 0.1887, S10: 0.4255}, 3e-4),
    "gdsf": ({C10: 0.2171, S10: 0.4279, C20: 0.2955, S20: 0.5841}, 1e-3),
    "hyperbolic": ({C10: 0.2139, S10: 0.4336, C20: 0.2956, S20: 0.5845}, 0.01),
    "lhd": ({C10: 0.2121, S10: 0.4292}, 0.01),
    "w_tinylfu": ({C10: 0.1270, S10: 0.2985}, 0.01),
}
# The sketch, the sample and the counting of libCacheSim's W-TinyLFU; ours is the paper's by default.
PARAMETERS: dict[str, dict[str, float]] = {"w_tinylfu": {"peer": 1, "sample": 32, "counters": 14.4, "hashes": 10, "most": 1 << 30}}
# Its name there, and by how many of a thousand accesses its hits may differ from ours.
PEERS: dict[str, tuple[str, float]] = {
    "fifo": ("FIFO", 0), "lru": ("LRU", 0), "lfu": ("LFU", 0), "sieve": ("Sieve", 0), "arc": ("ARC", 0), "2q": ("TwoQ", 0),
    "s3fifo": ("S3FIFO", 0), "lfuda": ("LFUDA", 0), "lirs": ("LIRS", 5), "gdsf": ("GDSF", 5), "hyperbolic": ("Hyperbolic", 15),
}  # fmt: skip
# Its LHD counts age in steps of 1,024 accesses at first, ours in steps of the capacity: alike only where caches are large.
LARGE_PEERS = PEERS | {"lhd": ("LHD", 5)}


@cache
def mooncake(trace: str) -> tuple[npt.NDArray[np.int32], int]:
    path = TRACES / f"{trace}_trace.jsonl.zst"
    if not path.exists():
        pytest.skip(f"{path} is absent")
    return densify(np.concatenate([np.asarray(row.chain, np.uint64) for row in read_trace([str(path)], "mooncake")]))


@pytest.mark.traces
@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_published_mooncake_ratios(name: str) -> None:
    figures, tolerance = PUBLISHED[name]
    for (trace, capacity), expected in figures.items():
        ids, distinct = mooncake(trace)
        hits = POLICIES[name].replay(bare(ids, distinct), capacity, "plain", **PARAMETERS.get(name, {}))
        assert hits.mean() == pytest.approx(expected, rel=tolerance), (trace, capacity)


def peer_hits(package: Any, name: str, ids: npt.NDArray[np.int32], capacity: int) -> npt.NDArray[np.bool_]:
    policy, request = getattr(package, name)(capacity), package.Request()
    request.obj_size = 1
    hits = np.zeros(ids.size, np.bool_)
    for i, key in enumerate(ids.tolist()):
        request.obj_id, request.clock_time = key + 1, i
        hits[i] = policy.get(request)
    return hits


def mixed(seed: int, length: int = 4000) -> npt.NDArray[np.int32]:
    """Zipf draws, a third of them replaced by uniform ones."""
    rng = np.random.default_rng(seed)
    ids = np.minimum(rng.zipf(1.2, length), 300).astype(np.int32)
    ids[::3] = rng.integers(0, 301, ids[::3].size)
    return ids


@pytest.mark.parametrize("name", sorted(PEERS))
def test_random_traces_beside_libcachesim(name: str) -> None:
    package = pytest.importorskip(
        "libcachesim", reason="libcachesim (GPL, bench and tests only) is not installed: pip install 'kvtide[bench]'"
    )
    peer, per_mille = PEERS[name]
    for seed, capacity in ((1, 20), (2, 60), (3, 150)):
        ids = mixed(seed)
        ours, theirs = POLICIES[name](ids, 301, capacity), peer_hits(package, peer, ids, capacity)
        if per_mille == 0:
            assert np.array_equal(ours, theirs), (seed, capacity)
        else:
            assert abs(int(ours.sum()) - int(theirs.sum())) <= per_mille * ids.size / 1000, (seed, capacity)


@pytest.mark.traces
@pytest.mark.parametrize("name", sorted(LARGE_PEERS))
def test_cloudphysics_objects_beside_libcachesim(name: str) -> None:
    """Unit sizes at 489 and 4,897 objects: what the byte lists of its own tests become for a cache of equal blocks."""
    package = pytest.importorskip(
        "libcachesim", reason="libcachesim (GPL, bench and tests only) is not installed: pip install 'kvtide[bench]'"
    )
    path = os.environ.get("KVTIDE_CLOUDPHYSICS")
    if not path:
        pytest.skip("KVTIDE_CLOUDPHYSICS does not name cloudPhysicsIO.oracleGeneral.bin (libCacheSim's data folder)")
    keys = np.fromfile(path, np.dtype([("ts_s", "<u4"), ("key", "<u8"), ("bytes", "<u4"), ("next", "<i8")]))["key"]
    ids, distinct = densify(keys)
    peer, per_mille = LARGE_PEERS[name]
    for capacity in (489, 4897):
        ours, theirs = POLICIES[name](ids, distinct, capacity).sum(), peer_hits(package, peer, ids, capacity).sum()
        assert abs(int(ours) - int(theirs)) <= per_mille * ids.size / 1000, capacity


def test_the_bench_compares_the_same_misses() -> None:
    pytest.importorskip("libcachesim", reason="libcachesim (GPL, bench and tests only) is not installed: pip install 'kvtide[bench]'")
    got = json.loads(json.dumps(policy_speed(20_000, goes=1)))
    for row in got["policies"].values():
        assert row["ours_miss_ratio"] == pytest.approx(row["peer_miss_ratio"], abs=1e-9)
        assert row["ratio"] == pytest.approx(row["ours_per_second"] / row["peer_per_second"])
    assert got["least_ratio"] == min(row["ratio"] for row in got["policies"].values())
