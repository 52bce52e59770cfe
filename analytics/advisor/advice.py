"""One recommendation, as the CLI, the report and the `advice` table show it."""

from __future__ import annotations

import json
import math
import uuid
from dataclasses import dataclass
from typing import Any

KINDS: tuple[str, ...] = ("scale_up", "scale_down", "scale_hold", "route", "route_keep")


@dataclass(frozen=True)
class Advice:
    """`kind` (one of `KINDS`) and `target` say what to do; `predicted` what it brings, with `interval` (low, high) for the same keys.

    `confidence` is 0 to 1: how far the model behind it agreed with what was observed. Not valid after `expires_at_s` (epoch seconds).
    """

    kind: str
    target: str
    predicted: dict[str, float]
    interval: dict[str, tuple[float, float]]
    confidence: float
    expires_at_s: float
    evidence: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Plain values for JSON; infinite waits are null."""
        return {
            "kind": self.kind,
            "target": self.target,
            "predicted": {key: _plain(value) for key, value in self.predicted.items()},
            "interval": {key: [_plain(low), _plain(high)] for key, (low, high) in self.interval.items()},
            "confidence": self.confidence,
            "expires_at_s": self.expires_at_s,
            "evidence": list(self.evidence),
        }

    def row(self, made_at_us: int) -> dict[str, Any]:
        """This advice as a row of the `advice` table; the id follows from its content and time."""
        document = self.to_json()
        evidence = json.dumps({"evidence": document["evidence"], "interval": document["interval"]})
        predicted = json.dumps(document["predicted"])
        identity = uuid.uuid5(uuid.NAMESPACE_OID, f"{made_at_us}:{self.kind}:{self.target}:{predicted}:{evidence}")
        return {
            "id": str(identity),
            "made_at_us": made_at_us,
            "kind": self.kind,
            "target": self.target,
            "predicted": predicted,
            "confidence": self.confidence,
            "expires_at_us": round(self.expires_at_s * 1e6),
            "evidence": evidence,
            "status": "open",
        }


def _plain(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None
