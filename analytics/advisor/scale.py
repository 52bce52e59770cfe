"""How many Prefill instances: the cheap form, from reuse times (AET), a prefill cost and a queue formula.

For each candidate number of instances: hit ratio by `analytics.pool`, anchored at the observed one; prefill load, each hit token lost
being computed again at its depth; utilisation; wait by M/G/1 fitted to the observed wait; TTFT. The exact form, a replay in the fleet
emulator, is for confirming it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from analytics.advisor.advice import Advice
from analytics.costs import fit_prefill_cost
from analytics.frame import CAUSE_INDEX, Frame
from analytics.pool import ReuseHistogram, instances_hit_ratio
from analytics.queueing import Queue

Mask = NDArray[np.bool_]
CHANGES = (-1, 0, 1, 2)
UNSETTLED_RATIO = 0.05
# Causes that make counting instances premature while they take more than UNSETTLED_RATIO of the prompt tokens, and what to do instead.
UNSETTLED = {
    "routing": "Requests are routed away from their cached prefixes: mend the routing before the number of instances.",
    "instance": "Instances keep losing their KV to restarts or removals: let the fleet settle before changing its size.",
}


@dataclass(frozen=True)
class Service:
    """Spread of single requests, which windows cannot show: prefill time (mean, sd, p99) and TTFT p99, in s; zeros where unknown."""

    requests: int = 0
    prefill_mean_s: float = 0.0
    prefill_sd_s: float = 0.0
    prefill_p99_s: float = 0.0
    ttft_p99_s: float = 0.0

    @property
    def cv2(self) -> float:
        """Squared coefficient of variation of the prefill time; 1 (exponential) where unknown."""
        return (self.prefill_sd_s / self.prefill_mean_s) ** 2 if self.prefill_mean_s > 0 else 1.0

    @property
    def tail_ratio(self) -> float:
        """p99 of the prefill time over its mean; that of an exponential where unknown."""
        return self.prefill_p99_s / self.prefill_mean_s if self.prefill_mean_s > 0 else math.log(100.0)


@dataclass(frozen=True)
class ScalePolicy:
    """What a recommendation weighs: keep utilisation below `max_utilisation`; an instance is worth adding for `min_hit_gain` of hit ratio,
    and one may go if it costs at most `max_hit_loss` and the p99 TTFT stays within `max_ttft_ratio` of today's or `ttft_slack_s` above it
    (or below `ttft_p99_target_s` where one is given). Advice holds for `horizon_s`."""

    max_utilisation: float = 0.7
    min_hit_gain: float = 0.03
    max_hit_loss: float = 0.02
    max_ttft_ratio: float = 1.25
    ttft_slack_s: float = 0.2
    ttft_p99_target_s: float | None = None
    horizon_s: float = 1800.0


@dataclass(frozen=True)
class Option:
    """The fleet as it would be with `instances`: hit ratio (0 to 1), prefill load in busy instances, utilisation, waits and TTFT in s."""

    instances: int
    hit_ratio: float
    prefill_load: float
    utilisation: float
    wait_s: float
    ttft_mean_s: float
    ttft_p99_s: float


@dataclass(frozen=True)
class _Today:
    """The windows looked at: `placed` reuse times and `capacity_blocks` by instance; `blocks_ratio` of the prompt is in blocks."""

    placed: dict[str, list[ReuseHistogram]]
    capacity_blocks: dict[str, float]
    blocks_ratio: float
    hit_ratio: float
    hit_ratio_sd: float
    prompt_tokens_per_s: float
    requests_per_s: float
    prefill_load: float
    hit_token_cost_s: float
    overhead_s: float
    wait_s: float | None
    measured: bool
    lost_ratio: dict[str, float]

    @property
    def unsettled(self) -> str:
        """Why the number of instances should wait, while routing or restarts cost too many hits to tell its effect; else ''."""
        cause = max(self.lost_ratio, key=self.lost_ratio.__getitem__)
        return UNSETTLED[cause] if self.lost_ratio[cause] > UNSETTLED_RATIO else ""

    @property
    def instances(self) -> int:
        """Instances up."""
        return len(self.capacity_blocks)

    @property
    def model_hit_ratio(self) -> float:
        """Hit ratio that the reuse times give for the fleet as it is."""
        return self.model(self.instances)

    def model(self, instances: int) -> float:
        """Token hit ratio that the reuse times give with so many instances; 0 without reuse times."""
        return instances_hit_ratio(self.placed, self.capacity_blocks, instances)[0] * self.blocks_ratio


def advise_scale(
    frame: Frame, mask: Mask | None = None, service: Service | None = None, policy: ScalePolicy | None = None
) -> Advice | None:
    """`scale_up`, `scale_down` or `scale_hold` for the fleet as it was in `mask` (default: the last 15 windows).

    The target is `fleet:+n`, `fleet:0`, or the instance to remove first: the one whose hits save least prefill time. `predicted` holds the
    figures of the recommended number of instances and, with `_now`, of today's. None where no instance was up, none said what its
    capacity is (a request log does not), or nothing was asked.
    Cost: one root search per instance and candidate.
    """
    mask = _recent(frame) if mask is None else mask
    service, policy = service or Service(), policy or ScalePolicy()
    today = _today(frame, mask)
    if today is None:
        return None
    options = _options(today, service)
    now = next(option for option in options if option.instances == today.instances)
    best, reasons = _choose(options, now, policy, today.unsettled)
    kind = "scale_hold" if best is now else "scale_up" if best.instances > now.instances else "scale_down"
    target = {"scale_hold": "fleet:0", "scale_up": f"fleet:+{best.instances - now.instances}"}.get(kind) or _cheapest(frame, mask)
    spread = _spread(today, best)
    uncertain = [_option(today, service, best.instances, shift) for shift in (-spread, spread)]
    predicted = {**_figures(best), **{f"{key}_now": value for key, value in _figures(now).items()}}
    interval = {key: _ordered(_figures(uncertain[0])[key], _figures(uncertain[1])[key]) for key in _figures(best)}
    expires = float(frame.window_s[np.flatnonzero(mask)[-1]] + frame.width_s + policy.horizon_s)
    return Advice(kind, target, predicted, interval, _confidence(today), expires, (*reasons, *_evidence(options, today)))


def scale_options(frame: Frame, mask: Mask | None = None, service: Service | None = None, changes: Iterable[int] = CHANGES) -> list[Option]:
    """The fleet with some instances fewer or more, in order; empty where no instance was up or nothing was asked."""
    today = _today(frame, _recent(frame) if mask is None else mask)
    return [] if today is None else _options(today, service or Service(), changes)


def _options(today: _Today, service: Service, changes: Iterable[int] = CHANGES) -> list[Option]:
    return [_option(today, service, today.instances + change) for change in changes if today.instances + change > 0]


def _option(today: _Today, service: Service, instances: int, hit_shift: float = 0.0) -> Option:
    """Figures of the fleet with `instances`; `hit_shift` moves the predicted hit ratio, to see what its error would do."""
    moved = today.model(instances) - today.model_hit_ratio
    hit_ratio = min(max(today.hit_ratio + moved + hit_shift, 0.0), 1.0)
    extra = today.prompt_tokens_per_s * (today.hit_ratio - hit_ratio) * today.hit_token_cost_s
    load = max(today.prefill_load + extra, 0.0)
    fitted = Queue(today.requests_per_s / today.instances, today.prefill_load / today.requests_per_s, service.cv2).fitted(today.wait_s)
    queue = replace(fitted, arrivals_per_s=today.requests_per_s / instances, service_s=load / today.requests_per_s)
    mean = queue.wait_s + queue.service_s + today.overhead_s
    tail = _tail_s(queue, service, today.overhead_s) * _tail_scale(fitted, service, today.overhead_s)
    return Option(instances, hit_ratio, load, queue.utilisation, queue.wait_s, mean, max(tail, mean))


def _tail_s(queue: Queue, service: Service, overhead_s: float) -> float:
    """p99 of the TTFT: a long wait before a usual prefill, or a usual wait before a long prefill, whichever is longer."""
    long_wait, long_prefill = queue.wait_quantile_s(0.99) + queue.service_s, queue.wait_s + queue.service_s * service.tail_ratio
    return max(long_wait, long_prefill) + overhead_s


def _tail_scale(fitted: Queue, service: Service, overhead_s: float) -> float:
    """Observed over modelled p99 of today, so that predictions start from what was observed; 1 where it is unknown."""
    modelled = _tail_s(fitted, service, overhead_s)
    if service.ttft_p99_s <= 0 or not 0 < modelled < math.inf:
        return 1.0
    return min(max(service.ttft_p99_s / modelled, 0.1), 10.0)


def _recent(frame: Frame, windows: int = 15) -> Mask:
    active = np.flatnonzero(frame.fleet.prompt_tokens.sum(axis=1) > 0)
    mask = np.zeros(frame.windows, bool)
    mask[active[-windows:]] = True
    return mask


def _up(frame: Frame, mask: Mask) -> list[int]:
    """Instances that were up in the last of these windows, else those that served in them."""
    last = np.flatnonzero(mask)
    if not last.size:
        return []
    found = np.flatnonzero(frame.fleet.up[last[-1]])
    return [int(i) for i in (found if found.size else np.flatnonzero(frame.fleet.requests[mask].sum(axis=0)))]


def _today(frame: Frame, mask: Mask) -> _Today | None:
    fleet, up = frame.fleet, _up(frame, mask)
    if not up or not fleet.prompt_tokens[mask].sum() or not np.nan_to_num(fleet.capacity_blocks[mask][:, up]).any():
        return None
    seconds = float(mask.sum() * frame.width_s)
    prompt, hit = float(fleet.prompt_tokens[mask].sum()), float(fleet.hit_tokens[mask].sum())
    per_window = fleet.hit_tokens[mask].sum(axis=1) / np.maximum(fleet.prompt_tokens[mask].sum(axis=1), 1)
    known, requests = float(fleet.prefill_known[mask].sum()), float(fleet.requests[mask].sum())
    prefill_s = float(fleet.prefill_s[mask].sum()) * (requests / known if known else 0.0)
    # Where no cost can be fitted, the plain mean per missed token has to do.
    a_s, b_s = prefill_cost(frame, mask) or (prefill_s / (prompt - hit) if prompt > hit else 0.0, 0.0)
    depth = float(fleet.hit_context[mask].sum()) / hit if hit else 0.0
    wait = float(fleet.queue_s[mask].sum()) / float(fleet.queue_known[mask].sum()) if fleet.queue_known[mask].sum() else None
    return _Today(
        placed={fleet.instances[i]: frame.histograms(mask, fleet.instances[i]) for i in up},
        capacity_blocks={fleet.instances[i]: float(fleet.capacity_blocks[mask][:, i].max()) for i in up},
        blocks_ratio=1.0 - float(frame.tokens[mask][:, :, 1].sum()) / max(float(frame.prompt_tokens[mask].sum()), 1.0),
        hit_ratio=hit / prompt,
        hit_ratio_sd=float(per_window.std() / math.sqrt(max(per_window.size - 1, 1))),
        prompt_tokens_per_s=prompt / seconds,
        requests_per_s=requests / seconds,
        prefill_load=prefill_s / seconds,
        hit_token_cost_s=a_s + b_s * depth,
        overhead_s=_overhead(frame, mask, wait),
        wait_s=wait,
        measured=bool(known),
        lost_ratio={cause: float(frame.tokens[mask][:, :, CAUSE_INDEX[cause]].sum()) / prompt for cause in UNSETTLED},
    )


def prefill_cost(frame: Frame, mask: Mask | None = None) -> tuple[float, float] | None:
    """(a, b) of the prefill cost in s, fitted to the windows and instances whose requests all carry a prefill time.

    `mask` selects windows (default: all). None with fewer than 3 such groups: two coefficients would be fitted to nothing.
    """
    fleet = frame.fleet
    use = (fleet.prefill_known == fleet.requests) & (fleet.prefill_s > 0)
    use &= np.ones(frame.windows, bool)[:, None] if mask is None else mask[:, None]
    if int(use.sum()) < 3:
        return None
    missed = (fleet.prompt_tokens - fleet.hit_tokens)[use].astype(np.float64)
    try:
        return fit_prefill_cost(missed, fleet.miss_context[use], fleet.prefill_s[use])
    except ValueError:
        return None


def _overhead(frame: Frame, mask: Mask, wait_s: float | None) -> float:
    """Part of the mean TTFT that is neither queue nor prefill."""
    fleet = frame.fleet
    if not fleet.ttft_known[mask].sum() or not fleet.prefill_known[mask].sum():
        return 0.0
    ttft = float(fleet.ttft_s[mask].sum()) / float(fleet.ttft_known[mask].sum())
    return max(0.0, ttft - (wait_s or 0.0) - float(fleet.prefill_s[mask].sum()) / float(fleet.prefill_known[mask].sum()))


def _choose(options: list[Option], now: Option, policy: ScalePolicy, unsettled: str) -> tuple[Option, list[str]]:
    """The option to take and why; today's one with the reason against its neighbours if none is better."""
    more = [option for option in options if option.instances > now.instances]
    if now.utilisation > policy.max_utilisation and more:
        best = next((option for option in more if option.utilisation <= policy.max_utilisation), more[-1])
        return best, [f"Utilisation is {now.utilisation:.2f}, above {policy.max_utilisation:.2f}."]
    target = policy.ttft_p99_target_s
    if target is not None and now.ttft_p99_s > target and more:
        best = next((option for option in more if option.ttft_p99_s <= target), more[-1])
        return best, [f"TTFT p99 is {now.ttft_p99_s:.2f} s, above the target of {target:.2f} s."]
    if unsettled:
        return now, [unsettled]
    worth = [option for option in more if option.hit_ratio - now.hit_ratio >= policy.min_hit_gain * (option.instances - now.instances)]
    if worth:
        gain = 100 * (worth[-1].hit_ratio - now.hit_ratio)
        return worth[-1], [f"{worth[-1].instances} instances would add {gain:.1f} points of hit ratio: capacity is short."]
    fewer = [option for option in options if option.instances < now.instances]
    if not fewer:
        return now, ["One instance is the least there can be; it is not overloaded."]
    against = _against(fewer[-1], now, policy)
    return (now, against) if against else (fewer[-1], [f"{fewer[-1].instances} instances carry the load as well."])


def _against(fewer: Option, now: Option, policy: ScalePolicy) -> list[str]:
    reasons = []
    if fewer.utilisation > policy.max_utilisation:
        reasons.append(f"{fewer.instances} instances would be {fewer.utilisation:.2f} busy, above {policy.max_utilisation:.2f}.")
    if now.hit_ratio - fewer.hit_ratio > policy.max_hit_loss:
        reasons.append(f"{fewer.instances} instances would lose {100 * (now.hit_ratio - fewer.hit_ratio):.1f} points of hit ratio.")
    limit = policy.ttft_p99_target_s or max(policy.max_ttft_ratio * now.ttft_p99_s, now.ttft_p99_s + policy.ttft_slack_s)
    if fewer.ttft_p99_s > limit:
        reasons.append(f"TTFT p99 would be {fewer.ttft_p99_s:.2f} s with {fewer.instances} instances (now {now.ttft_p99_s:.2f} s).")
    return reasons


def _cheapest(frame: Frame, mask: Mask) -> str:
    """The instance whose hits save least prefill time."""
    up = _up(frame, mask)
    a_s, b_s = prefill_cost(frame, mask) or (1.0, 0.0)
    worth = a_s * frame.fleet.hit_tokens[mask].sum(axis=0) + b_s * frame.fleet.hit_context[mask].sum(axis=0)
    return frame.fleet.instances[min(up, key=lambda i: float(worth[i]))]


def _figures(option: Option) -> dict[str, float]:
    return {key: float(value) for key, value in vars(option).items()}


def _spread(today: _Today, option: Option) -> float:
    """Half-width of the hit ratio's 95 % interval: noise between windows, and the model's miss in proportion to the step asked of it."""
    model = abs(today.model_hit_ratio - today.hit_ratio) * min(1.0, abs(option.instances - today.instances) / today.instances)
    return 1.96 * today.hit_ratio_sd + model + (0.005 if option.instances != today.instances else 0.0)


def _confidence(today: _Today) -> float:
    """1 less ten times the miss of the reuse-time model today, at most 0.95; 0.6 of that if prefill times were not measured, or
    if requests are routed away from their prefixes.
    """
    agreement = min(max(1.0 - 10.0 * max(abs(today.model_hit_ratio - today.hit_ratio) - 0.01, 0.0), 0.1), 0.95)
    return round(agreement * (1.0 if today.measured else 0.6) * (0.6 if today.unsettled else 1.0), 3)


def _ordered(a: float, b: float) -> tuple[float, float]:
    return (a, b) if a <= b else (b, a)


def _evidence(options: list[Option], today: _Today) -> list[str]:
    lines = [f"Model says {100 * today.model_hit_ratio:.1f} % today, observed {100 * today.hit_ratio:.1f} %."]
    for option in options:
        lines.append(
            f"{option.instances} instances: hit {100 * option.hit_ratio:.1f} %, prefill load {option.prefill_load:.2f}, "
            f"utilisation {option.utilisation:.2f}, TTFT {option.ttft_mean_s:.2f} s mean, {option.ttft_p99_s:.2f} s p99."
        )
    return lines
