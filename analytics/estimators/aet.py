"""AET: the curve from reuse times alone. Source: Hu et al., AET, ATC 2016 and ToS 2018."""

from __future__ import annotations

from analytics.curve import Curve
from analytics.estimators.reuse_times import collect
from analytics.estimators.sampling import threshold_of
from analytics.reuse.chains import ChainColumns


def aet(chains: ChainColumns, *, rate: float = 1.0, seed: int = 0) -> Curve:
    """Curve by mean eviction time: a reuse time of r stands at the mean distance of all touches, those that never come back included.

    `rate` is the share of touches that are watched. Exact where one reuse time says all (a cyclic scan), Che's approximation on independent
    references, and wrong where reuse changes over the trace, since one distribution of steps stands for all of it. Reuse times of several
    tenants compose into a shared pool (`analytics.pool`), which distances do not. Raises `ValueError` for a rate outside (0, 1].
    Cost: one probe a block and O(1) log bins. Source: AET section 3, with distances by log bins and requests looked up as a whole.
    """
    return collect(chains, threshold_of(rate), seed).curve(chains, cold=True)
