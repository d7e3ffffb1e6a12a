"""Ten thousand hostile, random and honest maths answers: time for each, reasons, processes left. The last line is JSON.

    python benchmarks/bench_math.py [--answers 10000] [--seconds 1] [--workers 2]

Of ten answers one is built to take forever, four are random LaTeX, five are right or wrong in a way that is known. The
benchmark fails if one of these gets the wrong verdict, if an answer takes much longer than its limit, or if a process
is left.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import string
import threading
import time
from collections import Counter
from pathlib import Path

from arpo.rewards.maths import GRACE_SECONDS, MathJudge, Verdict, quick_verdict
from arpo.types import percentile

PIECES = [
    *string.printable[:94],
    "\\frac{",
    "\\sqrt{",
    "}{",
    "}",
    "^{",
    "_{",
    "\\boxed{",
    "\\text{",
    "\\left(",
    "\\",
    "π",
]
GOLD = "x^2+1"


def hostile(rng: random.Random) -> str:
    """An answer that is built to take time or room."""
    size = rng.randint(2, 900)
    return rng.choice(
        [
            "9^{9^{9^{9}}}",
            f"{size}^{{{size}^{{{size}}}}}",
            f"{size * 1000}!",
            "(" * size + "1" + ")" * size,
            "{" * size,
            "x^{" * size + "}" * size,
            "\\frac{1}{" * (size // 5) + "1" + "}" * (size // 5),
            "\\sqrt{" * (size // 4) + "2" + "}" * (size // 4),
            f"\\sum_{{k=1}}^{{{10**size if size < 300 else size}}} k^k",
            f"\\binom{{{size * 999}}}{{{size * 333}}}",
            f"(x+1)^{{{size * 10}}}",
            "1+" * size + "1",
            chr(rng.randint(1, 0x10FFFF)) * size,
            "x" * 100_000,
        ]
    )


def make(number: int, rng: random.Random) -> tuple[str, str, bool | None]:
    """An answer, what it is compared with, and whether they are equal; None where that is not known."""
    kind = number % 10
    if kind == 0:
        return hostile(rng), GOLD, None
    if kind < 5:
        return "".join(rng.choices(PIECES, k=rng.randint(1, 30))), GOLD, None
    a, b = rng.randint(2, 999), rng.randint(2, 999)
    right = kind != 9
    c = b if right else b + 1
    return [
        (f"\\frac{{{2 * a}}}{{{2 * b}}}", f"\\frac{{{a}}}{{{b}}}", True),
        (f"{a}", f"{a}.0", True),
        (f"{a}+{c}x", f"{b}x+{a}", right),
        (f"\\{{{a},{a + b}\\}}", f"{a + b}, {a}", True),
        (f"({-a},{c}]", f"({-a}, {b}]", right),
    ][kind - 5 if kind != 9 else rng.choice((2, 4))]


def processes(group: int) -> int:
    """Living processes of a group."""
    found = 0
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            state, _, own = (entry / "stat").read_text().rpartition(")")[2].split()[:3]
        except OSError:
            continue
        found += int(own) == group and state not in "ZX"
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--answers", type=int, default=10_000)
    parser.add_argument("--seconds", type=float, default=1.0, help="limit for one answer")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rng = random.Random(options.seed)
    jobs = [make(number, rng) for number in range(options.answers)]
    found: list[tuple[Verdict, float] | None] = [None] * len(jobs)
    groups: set[int] = set()
    judge = MathJudge(options.workers, options.seconds)

    def work(start: int) -> None:
        for number in range(start, len(jobs), options.workers):
            began = time.perf_counter()
            verdict = judge.verdict(jobs[number][0], (jobs[number][1],))
            found[number] = verdict, time.perf_counter() - began
            groups.update(worker._process.pid for worker in judge._workers if worker._process is not None)

    started = time.perf_counter()
    threads = [threading.Thread(target=work, args=(start,)) for start in range(options.workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    total = time.perf_counter() - started
    judge.close()
    done = [one for one in found if one is not None]
    late = [
        job for job, (verdict, _) in zip(jobs, done, strict=True) if job[2] is not None and verdict.reason == "timeout"
    ]
    wrong = [
        job
        for job, (verdict, _) in zip(jobs, done, strict=True)
        if job[2] is not None and job not in late and verdict.equal != job[2]
    ]
    seconds = sorted(took for _, took in done)
    left = sum(map(processes, groups))
    result = {
        "cores": os.cpu_count(),
        "machine": platform.machine(),
        "answers": len(done),
        "limit_seconds": options.seconds,
        "workers": options.workers,
        "total_seconds": round(total, 1),
        "decided_on_the_spot": sum(quick_verdict(answer, gold) is not None for answer, gold, _ in jobs),
        "p50_ms": round(1000 * percentile(seconds, 0.5), 2),
        "p95_ms": round(1000 * percentile(seconds, 0.95), 2),
        "longest_seconds": round(seconds[-1], 2),
        "reasons": dict(sorted(Counter(verdict.reason or "none" for verdict, _ in done).items())),
        "known_but_late": len(late),
        "wrong_verdicts": len(wrong),
        "processes_started": len(groups),
        "processes_left": left,
    }
    for name, value in result.items():
        print(f"{name:20} {value}")
    print(json.dumps(result))
    assert len(done) == options.answers and not left, "something was lost or left"
    assert not wrong, f"wrong verdicts: {wrong[:5]}"
    assert seconds[-1] < options.seconds + GRACE_SECONDS, "an answer took too long"


if __name__ == "__main__":
    main()
