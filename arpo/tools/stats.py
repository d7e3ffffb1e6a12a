"""Counters of tool calls.

Guarantees: every call is counted when it starts and again when it ends, so `calls` is always the sum of calls in
flight, cancelled, failed (by kind) and successful. Percentiles are over the last 1024 runs.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field

from arpo.types import Fault, percentile

MAX_DURATIONS = 1024


@dataclass(frozen=True, slots=True)
class ToolStats:
    """Calls of one tool so far. `cached` calls were answered without a run; `model`, `timeout`, `infra` failed.

    `wait_seconds` is the total time spent waiting for a free slot or for an identical call in flight. `p50_seconds` and
    `p95_seconds` are of whole runs, with retries and without that waiting.
    """

    calls: int = 0
    cached: int = 0
    model: int = 0
    timeout: int = 0
    infra: int = 0
    cancelled: int = 0
    in_flight: int = 0
    retries: int = 0
    wait_seconds: float = 0.0
    p50_seconds: float = 0.0
    p95_seconds: float = 0.0


@dataclass(slots=True)
class ToolCounters:
    """The mutable counters behind `ToolStats`."""

    calls: int = 0
    cached: int = 0
    cancelled: int = 0
    retries: int = 0
    wait_seconds: float = 0.0
    faults: Counter[Fault | None] = field(default_factory=Counter)  # of calls that ended; None: success
    durations: deque[float] = field(default_factory=lambda: deque(maxlen=MAX_DURATIONS))

    def snapshot(self) -> ToolStats:
        """Return the current values."""
        ordered = sorted(self.durations)
        return ToolStats(
            calls=self.calls,
            cached=self.cached,
            model=self.faults[Fault.MODEL],
            timeout=self.faults[Fault.TIMEOUT],
            infra=self.faults[Fault.INFRA],
            cancelled=self.cancelled,
            in_flight=self.calls - self.cancelled - self.faults.total(),
            retries=self.retries,
            wait_seconds=self.wait_seconds,
            p50_seconds=percentile(ordered, 0.50),
            p95_seconds=percentile(ordered, 0.95),
        )
