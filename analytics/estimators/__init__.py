"""Estimators of the curve: a registry of functions from chains to a `Curve`. A new one is a function, a line and a right answer.

All see one LRU stack that serves `chains` in their order, each request looked up as a whole and then touched leaf first. The hashes are the
keys, so tenants must not share any. Capacities are in blocks; for `weighted` and `flows`, which know that blocks differ in size, a
capacity of c holds c * block_size tokens. Parameters are keywords with defaults, so `ESTIMATORS[name](chains)` always works.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable

from analytics.curve import Curve
from analytics.estimators.aet import aet
from analytics.estimators.counter_stacks import counter_stacks
from analytics.estimators.exact import olken, run_exact
from analytics.estimators.flows import flows
from analytics.estimators.kosmo import kosmo
from analytics.estimators.lashards import lashards
from analytics.estimators.minisim import minisim
from analytics.estimators.shards import shards
from analytics.estimators.shards_fixed import shards_fixed
from analytics.estimators.shards_hot import shards_hot
from analytics.estimators.statstack import statstack
from analytics.estimators.weighted import weighted

Estimator = Callable[..., Curve]

EXACT: dict[str, Estimator] = {"run_exact": run_exact, "olken": olken}
SAMPLED: dict[str, Estimator] = {"shards": shards, "shards_fixed": shards_fixed, "shards_hot": shards_hot, "lashards": lashards}
MODELS: dict[str, Estimator] = {"aet": aet, "statstack": statstack, "counter_stacks": counter_stacks}
SIZED: dict[str, Estimator] = {"weighted": weighted, "flows": flows}
# Curves of any eviction policy (a keyword), block by block in forward order.
POLICY: dict[str, Estimator] = {"minisim": minisim, "kosmo": kosmo}
ESTIMATORS: dict[str, Estimator] = {**EXACT, **SAMPLED, **MODELS, **SIZED, **POLICY}


def parameters(name: str) -> dict[str, type]:
    """Names and types of the parameters of an estimator that can be written as text: numbers, flags and words."""
    kinds = {"int": int, "float": float, "bool": bool, "str": str, "int | None": int}
    members = inspect.signature(ESTIMATORS[name]).parameters.values()
    found = {member.name: str(member.annotation).replace("Literal", "str", 1).split("[")[0] for member in members}
    return {member: kinds[kind] for member, kind in found.items() if kind in kinds}
