"""The plain policy simulators beside libcachesim's C++ on one Zipf stream in one process: accesses per processor second.

libcachesim reads its records from a trace file (`process_trace`) with its fastest hash table; ours read ids that are dense already (once a
trace, for all policies and capacities) and, apart, hashes that are made dense within the time measured.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from analytics.policies import POLICIES
from analytics.reuse.chains import densify
from bench.peers import NEVER, RECORD, SPARE_POWERS, libcachesim
from bench.timing import best_of, machine

PEERS = {"lru": "LRU", "sieve": "Sieve", "s3fifo": "S3FIFO", "arc": "ARC"}
DISTINCT, EXPONENT, ACCESSES, CAPACITY_SHARE, SEED = 1_000_000, 1.0, 5_000_000, 0.10, 0
U64 = npt.NDArray[np.uint64]


def run(trace: str | None = None, limit: int | None = None) -> dict[str, Any]:
    """See `policy_speed`; `limit` accesses instead of five million. Raises `UsageError` where libcachesim is not installed."""
    return policy_speed(limit or ACCESSES)


def zipf_stream(accesses: int, distinct: int = DISTINCT, exponent: float = EXPONENT, seed: int = SEED) -> U64:
    """Hashes of independent draws from `distinct` blocks, the k-th with probability in proportion to k^-exponent."""
    weights = np.cumsum(np.arange(1, distinct + 1, dtype=np.float64) ** -exponent)
    drawn = np.searchsorted(weights, np.random.default_rng(seed).random(accesses) * weights[-1])
    return (drawn.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)


def policy_speed(accesses: int = ACCESSES, goes: int = 3) -> dict[str, Any]:
    """Accesses per processor second of LRU, SIEVE, S3-FIFO and ARC at 10 % of the distinct blocks, ours and libcachesim's, in turn.

    Per policy: `ours` on dense ids, `ours_with_hashing` with densifying in it, `peer` (the best of three hash table sizes), the two
    `ratio`s and both miss ratios. All are compiled or built before; the best of `goes` counts. Raises `UsageError` where libcachesim is
    not installed.
    """
    package, hashes = libcachesim(), zipf_stream(accesses)
    ids, distinct = densify(hashes)
    capacity = max(int(CAPACITY_SHARE * distinct), 1)
    rows = {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "zipf.oracleGeneral.bin"
        records = np.zeros(accesses, RECORD)
        records["obj_id"], records["obj_size"], records["next_access_vtime"] = hashes, 1, NEVER
        records.tofile(path)
        for name in PEERS:
            rows[name] = _beside(package, path, name, hashes, ids, distinct, capacity, goes)
    return {
        "accesses": accesses, "distinct": distinct, "capacity_blocks": capacity, "zipf": EXPONENT, "seed": SEED,
        "peer": f"libcachesim {package.__version__} process_trace", "policies": rows, "machine": machine(),
        "least_ratio": min(row["ratio"] for row in rows.values()),
        "least_ratio_with_hashing": min(row["ratio_with_hashing"] for row in rows.values()),
    }  # fmt: skip


def _beside(
    package: Any, path: Path, name: str, hashes: U64, ids: npt.NDArray[np.int32], distinct: int, capacity: int, goes: int
) -> dict[str, float]:
    policy, missed = POLICIES[name], {}
    policy(ids[:100], distinct, capacity)

    def ours() -> None:
        missed["ours"] = 1 - float(policy(ids, distinct, capacity).mean())

    def with_hashing() -> None:
        policy(*densify(hashes), capacity)

    def peer(spare: int) -> None:
        reader = package.TraceReader(str(path), package.TraceType.ORACLE_GENERAL_TRACE)
        cache = getattr(package, PEERS[name])(capacity, hashpower=max(capacity.bit_length() + spare, 8))
        missed["peer"] = float(cache.process_trace(reader)[0])

    works = {"ours": ours, "with_hashing": with_hashing} | {f"peer{spare}": lambda spare=spare: peer(spare) for spare in SPARE_POWERS}
    best = {work: took.cpu_s for work, took in best_of(works, dict.fromkeys(works, goes)).items()}
    peer_s = min(best[f"peer{spare}"] for spare in SPARE_POWERS)
    return {
        "ours_per_second": ids.size / best["ours"], "ours_with_hashing_per_second": ids.size / best["with_hashing"],
        "peer_per_second": ids.size / peer_s, "ratio": peer_s / best["ours"], "ratio_with_hashing": peer_s / best["with_hashing"],
        "ours_miss_ratio": missed["ours"], "peer_miss_ratio": missed["peer"],
    }  # fmt: skip
