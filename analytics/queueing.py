"""How long a prefill request waits at one instance: M/G/1 with an exponential tail, fitted to what was observed by one factor.

Sources: Pollaczek-Khinchine for the mean; P(W > t) = rho * exp(-rho*t / E[W]) for the tail, exact for M/M/1; Kleinrock's power
(throughput over response time) for the knee.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

SCALE_LIMITS = (0.1, 20.0)


@dataclass(frozen=True)
class Queue:
    """One FIFO server: `arrivals_per_s` requests, service of mean `service_s` and squared coefficient of variation `service_cv2`.

    `scale` multiplies every wait; `fitted` sets it from an observation. Unstable queues (utilisation >= 1) wait for ever.
    """

    arrivals_per_s: float
    service_s: float
    service_cv2: float = 1.0
    scale: float = 1.0

    def __post_init__(self) -> None:
        if self.arrivals_per_s < 0 or self.service_s < 0 or self.service_cv2 < 0:
            raise ValueError("arrivals_per_s, service_s and service_cv2 must not be negative")

    @property
    def utilisation(self) -> float:
        """Share of time the server is busy (offered load; above 1 the queue grows without end)."""
        return self.arrivals_per_s * self.service_s

    @property
    def wait_s(self) -> float:
        """Mean wait before service: scale * rho * E[S] * (1 + cv2) / 2 / (1 - rho)."""
        rho = self.utilisation
        if rho >= 1.0:
            return math.inf
        return self.scale * rho * self.service_s * (1.0 + self.service_cv2) / 2.0 / (1.0 - rho)

    def wait_quantile_s(self, quantile: float) -> float:
        """Wait that `quantile` (0 to 1) of the requests do not exceed; 0 while fewer than 1 - quantile of them wait at all."""
        rho, mean = self.utilisation, self.wait_s
        if math.isinf(mean):
            return math.inf
        if rho <= 1.0 - quantile:
            return 0.0
        return mean / rho * math.log(rho / (1.0 - quantile))

    @property
    def knee_utilisation(self) -> float:
        """Utilisation of the greatest power, rho / (response time): 1 / (1 + sqrt((1 + cv2) / 2)); 1/2 for M/M/1, 0.586 for M/D/1."""
        return 1.0 / (1.0 + math.sqrt((1.0 + self.service_cv2) / 2.0))

    def fitted(self, observed_wait_s: float | None) -> Queue:
        """This queue with `scale` such that it predicts the observed mean wait, within `SCALE_LIMITS`.

        Unchanged if nothing was observed or nothing can be concluded from it (idle or unstable).
        """
        plain = replace(self, scale=1.0)
        if observed_wait_s is None or not math.isfinite(observed_wait_s) or observed_wait_s < 0:
            return plain
        if plain.wait_s <= 0 or math.isinf(plain.wait_s):
            return plain
        low, high = SCALE_LIMITS
        return replace(self, scale=min(max(observed_wait_s / plain.wait_s, low), high))
