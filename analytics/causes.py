"""The names and order of the causes (docs/design.md section 5), `hit` first: one list for the shard, the diagnosis and the tables.

The emulator's truth keeps a list of its own on purpose; `tests/test_shard.py` holds the two equal.
"""

from __future__ import annotations

CAUSES: tuple[str, ...] = (
    "hit",
    "granularity",
    "unobserved",
    "routing",
    "broken_prefix",
    "in_flight",
    "not_stored",
    "instance",
    "capacity_self",
    "capacity_other",
    "capacity_resize",
    "cold",
    "beyond",
)
