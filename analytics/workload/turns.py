"""Sessions: how many turns they have, and what single and later turns get of the hits."""

from __future__ import annotations

from typing import Any

import numba as nb
import numpy as np
import numpy.typing as npt

from analytics.workload.labels import LabelledChains
from analytics.workload.measures import quantiles, ratio

I32 = npt.NDArray[np.int32]


def turn_numbers(session: I32, turn: I32) -> I32:
    """Turn of each request: as given, else its rank within its session in order of arrival; 0 where neither is known."""
    return np.where(turn > 0, turn, _ranks(session, int(session.max(initial=-1)) + 1)).astype(np.int32)


def turns(trace: LabelledChains) -> dict[str, Any]:
    """Turns of a session (requests of it in the trace), and requests and hits of single-turn and of multi-turn sessions.

    A session is single-turn if the trace holds one request of it and that is not a later turn of one begun before. Requests without a
    session are left out. `next_turn_after_*_ratio`: how often a first, or later, turn is followed by another before the trace ends.
    """
    named = trace.session >= 0
    session, hits, blocks = trace.session[named], trace.hit_blocks[named], trace.lengths[named]
    number = turn_numbers(session, trace.turn[named])
    length = np.bincount(session)
    alone = (length[session] == 1) & (number <= 1)
    p50, p90 = quantiles(length[length > 0], (0.5, 0.9))
    last = _last_of_session(session, length)
    found: dict[str, Any] = {
        "sessions": int((length > 0).sum()),
        "turns_p50": p50,
        "turns_p90": p90,
        "turns_max": int(length.max(initial=0)),
        "next_turn_after_first_ratio": ratio(int((~last & (number == 1)).sum()), int((number == 1).sum())),
        "next_turn_after_later_ratio": ratio(int((~last & (number > 1)).sum()), int((number > 1).sum())),
    }
    for name, mask in (("single_turn", alone), ("multi_turn", ~alone)):
        found[f"{name}_requests_ratio"] = ratio(int(mask.sum()), mask.size)
        found[f"{name}_hits_ratio"] = ratio(int(hits[mask].sum()), int(hits.sum()))
        found[f"{name}_hit_blocks_ratio"] = ratio(int(hits[mask].sum()), int(blocks[mask].sum()))
    return found


def _last_of_session(session: I32, length: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    return _ranks(session, length.size) == length[session]


@nb.njit(cache=True, nogil=True)
def _ranks(session: I32, sessions: int) -> I32:
    seen, out = np.zeros(sessions, np.int32), np.zeros(session.size, np.int32)
    for i in range(session.size):
        if session[i] >= 0:
            seen[session[i]] += 1
            out[i] = seen[session[i]]
    return out
