"""The curves of a trace: its chains as one pool and tenant by tenant; an estimator timed, its band and shape; all estimators compared."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from analytics.curve import Curve, Weight
from analytics.curve_algebra import cliffs, knee
from analytics.estimators import ESTIMATORS, EXACT, MODELS, POLICY, SAMPLED, SIZED, Estimator, parameters
from analytics.reuse.chains import ChainBuilder, ChainColumns
from ingest.chaining import mix64_int, text_hash
from ingest.errors import UsageError
from ingest.sources import TraceRequest

if TYPE_CHECKING:
    from analytics.bands import Band

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]

COMPARED_POINTS = 40
BAND_SHARDS, BAND_LEVEL = 32, 0.95
KINDS = {"exact": EXACT, "sampled": SAMPLED, "model": MODELS, "sized": SIZED, "policy": POLICY}
_WARM_UP_REQUESTS = 32
_GOES, _ENOUGH_S = 5, 0.5
_LEAST_SAMPLED_BLOCKS = 50  # of a sample that a capacity must hold for its band to be honest


@dataclass(frozen=True)
class Weighing:
    """What a curve counts: `weight`, and the prefill cost (s/token, s/token^2) where that is `cost`."""

    weight: Weight
    cost: tuple[float, float]

    def ratio(self, curve: Curve, capacities: Sequence[int] | I64) -> F64:
        """Hit ratio at capacities in blocks."""
        return curve.hit_ratio(capacities, self.weight, self.cost)


@dataclass(frozen=True)
class TraceChains:
    """A trace as columns, each request's tenant, and whether tenants were assigned by kvtide."""

    chains: ChainColumns
    tenants: list[str]
    assigned: bool

    @property
    def names(self) -> list[str]:
        """The tenants in name order."""
        return sorted(set(self.tenants))

    def pool(self) -> ChainColumns:
        """The chains as one pool sees them: hashes of different tenants never meet."""
        if len(self.names) == 1:
            return self.chains
        keys = {name: mix64_int(text_hash(name)) for name in self.names}
        salt = np.array([keys[name] for name in self.tenants], np.uint64)
        return replace(self.chains, hashes=self.chains.hashes ^ np.repeat(salt, np.diff(self.chains.offsets)))

    def of(self, tenant: str) -> ChainColumns:
        """One tenant's chains."""
        return self.chains.select(np.flatnonzero(np.array(self.tenants) == tenant))


def collect(requests: Iterable[TraceRequest]) -> TraceChains:
    """Columns of a trace. Raises `UsageError` where block sizes differ or nothing was read."""
    builder: ChainBuilder | None = None
    tenants: list[str] = []
    assigned, block_size = False, 0
    for request in requests:
        if builder is None:
            builder, block_size = ChainBuilder(request.block_size), request.block_size
        elif request.block_size != block_size:
            raise UsageError(f"the trace mixes blocks of {block_size} and {request.block_size} tokens; give each block size by itself")
        builder.append(round(request.arrived_at_s * 1e6), request.chain, request.prompt_tokens, request.block_tokens)
        tenants.append(request.tenant)
        assigned = assigned or request.tenant_assigned
    if builder is None:
        raise UsageError("no request was read")
    return TraceChains(builder.build(), tenants, assigned)


def timed(estimate: Estimator, chains: ChainColumns) -> tuple[Curve, float]:
    """The curve and the processor seconds it took: compiled before, on arrays in memory, the best of a few goes where one is short.

    Raises `UsageError` where the estimator refuses its parameters.
    """
    try:
        estimate(chains.slice(0, _WARM_UP_REQUESTS))
        seconds: list[float] = []
        while len(seconds) < _GOES and sum(seconds) < _ENOUGH_S:
            start = time.process_time()
            curve = estimate(chains)
            seconds.append(time.process_time() - start)
    except ValueError as error:
        raise UsageError(str(error)) from error
    return curve, max(min(seconds), 1e-9)


def with_defaults(name: str, given: dict[str, Any]) -> dict[str, Any]:
    """All parameters of an estimator that can be written as text: those given, the others as they are by default."""
    members = inspect.signature(ESTIMATORS[name]).parameters
    return {key: given.get(key, members[key].default) for key in parameters(name)}


def distinct_blocks(curve: Curve) -> int:
    """Distinct blocks behind a curve (by its own account where it is an estimate), 2 at least."""
    return max(round(curve.total_blocks * (1 - curve.ideal_ratio())), 2)


def spaced(curve: Curve, points: int) -> list[int]:
    """At most so many capacities from a thousandth of the distinct blocks to all of them, evenly in logarithm."""
    distinct = distinct_blocks(curve)
    sizes = np.geomspace(max(distinct / 1000, 1), distinct, points).round().astype(np.int64)
    return [int(size) for size in np.unique(sizes)]


def shape(curve: Curve, by: Weighing) -> dict[str, Any]:
    """Knee of a curve and its cliffs: where the next block begins to bring little, and where less than all of a stretch brings little."""
    return {
        "knee_blocks": round(knee(curve, by.weight, by.cost)),
        "cliffs": [asdict(cliff) for cliff in cliffs(curve, weight=by.weight, cost=by.cost)],
    }


# ---------------------------------------------------------------- bands


def sampled_rate(name: str, given: dict[str, Any], curve: Curve) -> float:
    """Share of the blocks that a sampled estimator tracks, the least where that varies."""
    if name == "shards_fixed":
        return float(min(1.0, given["s_max"] / distinct_blocks(curve)))
    return float(given["rate_min" if name == "lashards" else "rate"])


def band(name: str, given: dict[str, Any], chains: ChainColumns, curve: Curve, capacities: Sequence[int], by: Weighing) -> Band:
    """Jackknife band of a sampled estimator at capacities, NaN where they hold too little of the sample for it to be honest.

    `given` are all parameters of the estimator, `curve` is its curve. Cost: 33 estimates.
    """
    from analytics.bands import Band, jackknife_band  # here, since SciPy's distributions take a second to come

    rate = sampled_rate(name, given, curve)
    estimate = partial(ESTIMATORS[name], chains, **given)
    found = jackknife_band(lambda fold: counting(estimate(fold=fold), by), capacities, rate=rate, shards=BAND_SHARDS, level=BAND_LEVEL)
    honest = np.asarray(capacities) * rate >= _LEAST_SAMPLED_BLOCKS
    return Band(found.ratio, np.where(honest, found.low, np.nan), np.where(honest, found.high, np.nan))


def counting(curve: Curve, by: Weighing) -> Curve:
    """The curve with what `by` weighs in place of its blocks."""
    if by.weight == "blocks":
        return curve
    if by.weight == "tokens":
        return replace(curve, blocks=curve.tokens, total_blocks=curve.total_tokens)
    a, b = by.cost
    hits, total = a * curve.tokens + b * curve.token_context, a * curve.total_tokens + b * curve.total_token_context
    return replace(curve, blocks=hits, total_blocks=total)


# ---------------------------------------------------------------- comparison


@dataclass(frozen=True)
class Compared:
    """One estimator beside the exact curve over a grid of capacities: errors in hit ratio (0 to 1), speed, and the curve itself.

    `failed` says why there is none; then the figures are NaN.
    """

    name: str
    kind: str
    policy: str
    parameters: dict[str, Any]
    mean_error: float = float("nan")
    max_error: float = float("nan")
    max_error_at_blocks: int = 0
    blocks_per_second: float = float("nan")
    speed_ratio: float = float("nan")
    failed: str | None = None
    curve: Curve | None = None


def compare(
    chains: ChainColumns, wanted: dict[str, dict[str, Any]], exact: tuple[Curve, float], by: Weighing, step: Callable[[str], None]
) -> tuple[list[int], list[Compared]]:
    """The grid, and every wanted estimator (name to parameters) beside the exact curve (curve, seconds); `step` is told each name first.

    Errors are over 40 capacities, log-spaced from a thousandth of the distinct blocks to all; the speed of `run_exact` is the 1 of
    `speed_ratio`. An estimator that refuses the trace fails by itself.
    """
    grid = spaced(exact[0], COMPARED_POINTS)
    truth, rows = by.ratio(exact[0], grid), []
    for name, given in wanted.items():
        step(name)
        kind = next(kind for kind, members in KINDS.items() if name in members)
        row = Compared(name, kind, str(given.get("policy", "lru")), given)
        try:
            curve, seconds = exact if name == "run_exact" else timed(partial(ESTIMATORS[name], **given), chains)
        except UsageError as error:
            rows.append(replace(row, failed=str(error)))
            continue
        off = np.abs(by.ratio(curve, grid) - truth)
        worst = int(off.argmax())
        row = replace(row, mean_error=float(off.mean()), max_error=float(off[worst]), max_error_at_blocks=grid[worst], curve=curve)
        rows.append(replace(row, blocks_per_second=chains.blocks / seconds, speed_ratio=exact[1] / seconds))
    return grid, rows
