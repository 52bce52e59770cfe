"""SHARDS at a fixed rate: exact distances within a hash sample of the blocks, blown up by the rate.

Source: Waldspurger et al., SHARDS, FAST 2015, sections 3 and 3.3 (adj).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from analytics.curve import Curve
from analytics.estimators.points import Sample
from analytics.estimators.sampling import Fold, P, folding, requests_of, sampled_blocks, threshold_of
from analytics.reuse.chains import ChainColumns, densify
from analytics.reuse.olken import olken_distances

I64 = npt.NDArray[np.int64]


def shards(chains: ChainColumns, *, rate: float = 0.1, adj: bool = True, seed: int = 0, fold: Fold | None = None) -> Curve:
    """Curve from the share `rate` of the blocks, equal to exact at rate 1.

    `adj` puts the deviation of the sampled references from their expected number at distance 0; without it all weights are scaled, which
    is better where no hot head exists. Raises `ValueError` for a rate outside (0, 1].
    Cost: one hash a block, O(log) a sampled one; memory O(rate * blocks). Error: about 1/sqrt(rate * distinct), more with hot blocks.
    """
    threshold, (_, _, share) = threshold_of(rate), folding(fold)
    return curve_of_sample(chains, sampled_blocks(chains.hashes, threshold, seed, fold), threshold / P * share, adj)


def curve_of_sample(chains: ChainColumns, blocks: I64, tracked: float, adj: bool) -> Curve:
    """Curve from all references at `blocks` (int64[k], rising) to a sample of the share `tracked` of the distinct blocks.

    `adj` as in `shards`. Cost: O(log k) a reference.
    """
    ts_us, offsets = requests_of(chains, blocks)
    ids, distinct = densify(chains.hashes[blocks])
    distances, _ = olken_distances(ts_us, offsets, ids, distinct)
    return Sample(blocks, distances / tracked, np.full(blocks.size, 1 / tracked)).curve(chains, adj)
