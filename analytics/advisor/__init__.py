"""What to do now: recommendations with predicted effect, interval, confidence, expiry and evidence."""

from analytics.advisor.advice import Advice
from analytics.advisor.route import RouterOutcome, advise_route
from analytics.advisor.scale import Option, ScalePolicy, Service, advise_scale, prefill_cost, scale_options

__all__ = ["Advice", "Option", "RouterOutcome", "ScalePolicy", "Service", "advise_route", "advise_scale", "prefill_cost", "scale_options"]
