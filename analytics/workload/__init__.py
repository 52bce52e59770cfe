"""What a trace is made of: load, reuse, its time and place, sessions, templates. Pure functions on chains and their labels."""

from analytics.workload.labels import LabelledChains
from analytics.workload.profile import characterise, flatten

__all__ = ["LabelledChains", "characterise", "flatten"]
