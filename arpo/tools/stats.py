"""What is counted of a tool's calls.

Promises: every call is counted once, when it starts, and once more when it ends, as what it ended as; so at any moment
`calls` is the sum of those under way, cancelled, failed by kind, and answered well. Memory is bounded: the percentiles
look at the last 1024 runs.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field

from arpo.types import Fault, ToolResult, percentile

KEPT_DURATIONS = 1024


@dataclass(frozen=True, slots=True)
class ToolStats:
    """Calls of one tool up to now. `cached` ones were answered without a run, well or with a failure.

    `wait_seconds` is the sum of all waiting for a free slot, or for an identical call that was under way already.
    `p50_seconds` and `p95_seconds` are of whole runs, with their retries and without that waiting.
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
class Tally:
    """The counters behind one tool's ToolStats."""

    calls: int = 0
    cached: int = 0
    cancelled: int = 0
    in_flight: int = 0
    retries: int = 0
    wait_seconds: float = 0.0
    faults: Counter[Fault | None] = field(default_factory=Counter)
    durations: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT_DURATIONS))

    def start(self) -> None:
        """A call begins."""
        self.calls += 1
        self.in_flight += 1

    def cancel(self) -> None:
        """A call ends without a result, because its caller went away."""
        self.in_flight -= 1
        self.cancelled += 1

    def end(self, result: ToolResult) -> None:
        """A call ends."""
        self.in_flight -= 1
        self.cached += result.cached
        self.faults[result.fault] += 1

    def snapshot(self) -> ToolStats:
        """The counters now."""
        ordered = sorted(self.durations)
        return ToolStats(
            calls=self.calls,
            cached=self.cached,
            model=self.faults[Fault.MODEL],
            timeout=self.faults[Fault.TIMEOUT],
            infra=self.faults[Fault.INFRA],
            cancelled=self.cancelled,
            in_flight=self.in_flight,
            retries=self.retries,
            wait_seconds=self.wait_seconds,
            p50_seconds=percentile(ordered, 0.50),
            p95_seconds=percentile(ordered, 0.95),
        )
