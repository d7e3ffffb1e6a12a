"""Counters and histograms in Prometheus' text form.

answered = Counter("arpo_answers_total", "answers, by how they ended", ("end",))
answered.add("stop")
text = render([answered])
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, field

KIND = "text/plain; version=0.0.4; charset=utf-8"
SECONDS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)


@dataclass(slots=True, eq=False)
class Counter:
    """A number for each combination of labels. `kind` may be "gauge", for one that can fall."""

    name: str
    help: str
    labels: tuple[str, ...] = ()
    kind: str = "counter"
    values: dict[tuple[str, ...], float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.labels:
            self.values[()] = 0.0

    def add(self, *labels: str, count: float = 1.0) -> None:
        """Add to the number with these labels."""
        self.values[labels] = self.values.get(labels, 0.0) + count

    def lines(self) -> list[str]:
        """The samples in text form."""
        return [_sample(self.name, zip(self.labels, key, strict=True), value) for key, value in self.values.items()]


@dataclass(slots=True, eq=False)
class Histogram:
    """How many values were at most each of the bounds."""

    name: str
    help: str
    bounds: tuple[float, ...] = SECONDS
    kind: str = "histogram"
    counts: list[int] = field(init=False)  # between the bounds, and above the last
    total: float = 0.0

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self.bounds) + 1)

    def observe(self, value: float) -> None:
        """Count a value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def lines(self) -> list[str]:
        """The samples in text form; the count of a bound includes those below it."""
        lines, below = [], 0
        for bound, count in zip((*map("{:g}".format, self.bounds), "+Inf"), self.counts, strict=True):
            below += count
            lines.append(_sample(f"{self.name}_bucket", [("le", bound)], below))
        return [*lines, _sample(f"{self.name}_sum", (), self.total), _sample(f"{self.name}_count", (), below)]


def render(metrics: Iterable[Counter | Histogram]) -> bytes:
    """All metrics in text form."""
    lines: list[str] = []
    for metric in metrics:
        lines += [f"# HELP {metric.name} {metric.help}", f"# TYPE {metric.name} {metric.kind}", *metric.lines()]
    return ("\n".join(lines) + "\n").encode()


def _sample(name: str, labels: Iterable[tuple[str, str]], value: float) -> str:
    shown = ",".join(f'{label}="{_escape(text)}"' for label, text in labels)
    return f"{name}{{{shown}}} {value:.17g}" if shown else f"{name} {value:.17g}"


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
