"""kvtide: why the prefix-cache hit ratio of a Prefill fleet moves, what capacity is worth, and what to do now."""

__version__ = "0.1.0"
