"""Maths answers: verdicts checked by hand, hostile ones in bounded time, and no process left behind."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import string
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("math_verify")

from trees import searched

from arpo.config.schema import Rewards
from arpo.errors import ArpoError
from arpo.rewards import build_reward, maths
from arpo.rewards.maths import MAX_CHARS, MathJudge, Verdict, math_equal, quick_verdict
from arpo.rewards.scorer import Scorer
from arpo.types import Task

EQUAL = [
    (r"\frac{2}{4}", r"\frac12"), ("1/2", "0.5"), (r"0.333333", r"\frac13"), (r"3\frac{1}{2}", "3.5"),
    (r"\frac12", "50\\%"), ("50%", "50"), (r"\boxed{5}", "5"), ("$5$", "5"), (r"\$5", "5"), (r"\(5\)", "5"),
    ("1,000", "1000"), ("10^6", "1000000"), ("[0,1)", "[0, 1)"), (r"(0,\infty)", "x>0"), (r"x \in [1,2]", "[1,2]"),
    (r"(-\infty,2)\cup(3,\infty)", r"(3,\infty)\cup(-\infty,2)"),
    (r"\{1,2\}", r"\{2,1\}"), ("2, 1", "1,2"), ("5, 6", r"\{6,5\}"),
    ("5 cm", "5"), (r"5\text{ cm}", "5"), (r"5\,\mathrm{cm}", "5"), (r"90^\circ", "90"),
    ("1+x", "x+1"), ("(x+1)^2", "x^2+2x+1"), (r"\sqrt{8}", r"2\sqrt{2}"), ("x=5", "5"), ("y=2x+1", "2x+1"),
    (r"\pi", "3.14159265"), (r"\text{Monday}", "monday"),
    ("3 1/2", "3.5"), (r"-1\frac{1}{2}", "-1.5"), (r"\frac{1.5}{2}", "0.75"), ("17.0", "17"), (r"\$1,000", "1000"),
    (r"1.2\times 10^3", "1200"), (r"1.2 \cdot 10^{-3}", "0.0012"), (r"17\cdot 23 = 391", "391"), ("x=17*23=391", "391"),
    (r"5\text{ cm}^2", "5"), (r"(\frac12, 3)", "(0.5, 3)"), (r"\frac{3}{2}\pi", r"3\pi/2"),
    (r"2\cdot\sqrt{3}", r"\sqrt{12}"),
    (r"\frac{6}{\sqrt{3}}", r"2\sqrt{3}"), (r"\frac{1}{2}+\frac{\sqrt5}{2}", r"\frac{1+\sqrt5}{2}"), ("1024", "2^{10}"),
    ("4^5", "2^{10}"), (r"\binom{10}{7}", r"\binom{10}{3}"), ("10!", "10!"), (r"\log_2 3", r"\frac{\ln 3}{\ln 2}"),
    ("e^{-1}", r"\frac{1}{e}"), (r"\frac{1+e^2}{2}", r"\frac{e^2+1}{2}"), (r"8(3-\sqrt5)", r"24-8\sqrt5"),
    (r"\frac{\sqrt2+\sqrt6}{4}", r"\sin\frac{5\pi}{12}"), (r"\frac{3\ln 2}{\ln 10}", r"3\log 2"),
    (r"\frac{34}{2}", r"\frac{51}{3}"), (r"(x-1)^2+y^2=3^2", "(x-1)^2+y^2=9"),
    (r"3\pm 2\sqrt{2}", r"3+2\sqrt2, 3-2\sqrt2"),
    (r"\varnothing", r"\emptyset"), (r"\{\}", r"\varnothing"), ("1/3", r"0.\overline{3}"),
    (r"0.1\overline{6}", r"\frac16"), (r"-12.3\overline{45}", r"-\frac{679}{55}"), (r".\bar{3}", "1/3"),
    ("1{:}2", "1:2"), ("1:2", "1{:}2"),
    (r"\frac{\pi}{2}+1", r"1+\frac{\pi}{2}"), (r"\pi+\frac{\pi}{3}", r"\frac{\pi}{3}+\pi"),
    (r"e^2\cdot\pi", r"\pi e^2"), (r"\frac{\pi}{6}+\frac{\sqrt3}{2}", r"\frac{\pi+3\sqrt3}{6}"),
    (r"\frac{e^2-1}{2e}", r"\frac{e-e^{-1}}{2}"),
    (r"\frac{d}{dx} f(x)", r"\frac{d}{dx}f(x)"), (r"\frac{d}{c}", "d/c"), (r"\frac{d}{dx} x^3 = 3x^2", "3x^2"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}1\\ 2\end{pmatrix}"),
]  # fmt: skip
DIFFERENT = [
    ("0.33", r"\frac13"), (r"\frac{1}{3}", r"\frac{2}{3}"), ("[0,1)", "[0,1]"), ("(1,2)", "[1,2]"), ("(2,1)", "(1,2)"),
    ("5,6", "5"), ("5 or 6", "6"), ("x+1", "x-1"), ("x^2=4", "x=2"), ("Tuesday", "Monday"), (r"\frac{5", "5"),
    ("", "5"), ("-5", "5"), (r"\sqrt{2}", "1.4"), ("__import__('os').getpid()", "5"), ("{}", "5"), ("$", "5"),
    ("5", ""), ("", ""), (r"0.\overline{3}", "0.3"),
]  # fmt: skip
UNEVALUATED = [
    (r"17 \cdot 23", "391"), ("17*23", "391"), (r"17\times 23", "391"), ("x = 17*23", "391"), ("17*23 =", "391"),
    ("391+0", "391"),
    (r"\sum_{k=1}^{10} k^2", "385"), (r"\prod_{k=1}^5 k", "120"), (r"\int_0^1 2x dx", "1"),
    (r"\lim_{x\to 0} (x+1)", "1"),
    ("2^10", "1024"), ("2^{10}", "1024"), ("2^{10}-1", "1023"), (r"2\cdot 3^2", "18"), (r"10^2\cdot 10^3", "100000"),
    (r"\binom{10}{3}", "120"), (r"{10 \choose 3}", "120"), ("5!", "120"), ("10!", "3628800"), (r"\gcd(12,18)", "6"),
    (r"\operatorname{lcm}(4,6)", "12"), (r"17 \mod 5", "2"), (r"\max(1,2)", "2"), ("|-5|", "5"),
    (r"\lfloor 5.5\rfloor", "5"), (r"\sqrt{16}", "4"), (r"\sqrt{4+9}", r"\sqrt{13}"), (r"\log_2 8", "3"),
    (r"\sin\frac{\pi}{2}", "1"), (r"\arctan 1", r"\frac{\pi}{4}"), (r"1-\frac14", r"\frac34"),
    (r"\frac14+\frac14", "0.5"), (r"25\%+25\%", "0.5"), (r"\frac{34}{2}", "17"), ("34/2", "17"), ("(34)/2", "17"),
    (r"17\div 5", "3.4"), ("20 20", "40"), ("17(23)", "40"), (r"\left(17\right)\left(23\right)", "40"),
    ("(1+2, 2^2)", "(3, 4)"), (r"3\pm 2", "1, 5"), (r"\frac{17\cdot 23}{2}\pi", r"\frac{391}{2}\pi"),
    (r"\sum_{k=1}^{3} x", "3x"), ("2+3", "x=5"), (r"\frac{d}{dx} x^3", "3x^2"), (r"\frac{d}{dx} x^3 + 1", "3x^2+1"),
    (r"\frac{\pi}{6}+\frac{\pi}{3}", r"\frac{\pi}{2}"), (r"3\pi-2\pi", r"\pi"), (r"2\sqrt2+3\sqrt2", r"5\sqrt2"),
    (r"e^2\cdot e^3", "e^5"), (r"\frac{e^7}{e^2}", "e^5"), (r"\pi\cdot\pi", r"\pi^2"),
]  # fmt: skip
HANGS = "(" * 900 + "1" + ")" * 900
HOSTILE = [
    "9^{9^{9^{9}}}", "10^{10^{8}}", "1000000!", "{" * MAX_CHARS, HANGS, "x^{" * 300 + "}" * 300,
    r"\frac{1}{" * 200 + "1" + "}" * 200, r"\sum_{k=1}^{10000000} k^k", "1+" * 900 + "1", "\x00", "\ud800", "é" * 500,
]  # fmt: skip


@pytest.fixture(scope="module")
def judge() -> Iterator[MathJudge]:
    with MathJudge(workers=2, seconds=60.0) as opened:
        yield opened


def group_of(pid: int) -> list[int]:
    """Processes of a group: a worker and the fork at work."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            state, _, group = (entry / "stat").read_text().rpartition(")")[2].split()[:3]
        except OSError:
            continue
        if int(group) == pid and state not in "ZX":
            found.append(int(entry.name))
    return found


def pids(judge: MathJudge) -> list[int]:
    return [worker._process.pid for worker in judge._workers if worker._process is not None]


def wait_until_gone(*gone: int, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while any(group_of(pid) for pid in gone):
        assert time.monotonic() < deadline, "a process was left behind"
        time.sleep(0.02)


@pytest.mark.slow
@pytest.mark.parametrize(("pairs", "equal"), [(EQUAL, True), (DIFFERENT, False), (UNEVALUATED, False)])
def test_answers_checked_by_hand(judge: MathJudge, pairs: list[tuple[str, str]], equal: bool) -> None:
    for prediction, gold in pairs:
        assert judge.verdict(prediction, [gold]) == Verdict(equal), (prediction, gold)
    assert judge.verdict(pairs[0][0], ["x^7", pairs[0][1]]) == Verdict(equal)


def test_equal_strings_and_plain_numbers_start_no_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(maths, "_start", None)
    with MathJudge(1) as lazy:
        for prediction, gold, equal in [
            (" x + 1", "$x+1$", True), ("12", "12.0", True), ("1/3", "0.333333", True), ("0.3333", "1/3", False),
            ("", "5", False), ("", "", False), (r"\frac{1}{2}", ".5", True), ("-5", "5", False), ("7", "8", False),
            ("34/2", "17", False), (r"\frac{34}{2}", "17.0", False), ("34/2", "51/3", True), ("17", "34/2", True),
        ]:  # fmt: skip
            assert lazy.verdict(prediction, [gold]).equal is quick_verdict(prediction, gold) is equal
        assert lazy.verdict("7", ["8", "x", "7.0"]) == Verdict(True)
        assert lazy.verdict("x" * (MAX_CHARS + 1), ["y"]) == Verdict(False, "long")
        assert lazy.verdict("x" * 100_000, ["x" * 100_000]) == Verdict(True)
    assert quick_verdict("50%", "0.5") is quick_verdict("x+1", "1+x") is None


def verdicts_of(judge: MathJudge, answers: list[str], gold: str) -> dict[str, Verdict]:
    """The verdict on each answer, asked for from three threads."""
    found: dict[str, Verdict] = {}

    def work(mine: list[str]) -> None:
        for answer in mine:
            found[answer] = judge.verdict(answer, [gold])

    threads = [threading.Thread(target=work, args=(answers[i::3],)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


@pytest.mark.slow
def test_hostile_and_random_answers_get_a_verdict_in_time() -> None:
    pieces = [
        *string.printable[:94],
        "\\frac{",
        "\\sqrt{",
        "}{",
        "}",
        "^{",
        "\\boxed{",
        "\\text{",
        "\\left(",
        "\\",
        "∞",
    ]
    rng = random.Random(0)
    answers = [*HOSTILE, *("".join(rng.choices(pieces, k=rng.randint(1, 25))) for _ in range(60))]
    with MathJudge(workers=2, seconds=2.0) as judge:
        found = verdicts_of(judge, answers, "x^2+1")
        assert len(found) == len(set(answers))
        assert not any(verdict.equal for verdict in found.values())
        assert found["9^{9^{9^{9}}}"].reason == found[HANGS].reason == "timeout"
        assert found["\ud800"].reason == ""
        assert judge.verdict("x+1", ["1+x"]) == Verdict(True)


@pytest.mark.slow
def test_memory_is_bounded() -> None:
    with MathJudge(1, seconds=60.0, memory_mb=1) as cramped:  # less than it has already
        assert not cramped.verdict("x+1", ["1+x"]).equal  # the library may keep the reason to itself
        assert not cramped.verdict("x+2", ["2+x"]).equal


@pytest.mark.slow
def test_a_killed_worker_is_replaced_and_only_its_answer_is_lost() -> None:
    with MathJudge(1, seconds=120.0) as judge:

        def kill_at_work(victim: Callable[[int], None]) -> Verdict:
            verdicts: list[Verdict] = []
            (worker,) = pids(judge)
            thread = threading.Thread(target=lambda: verdicts.append(judge.verdict(HANGS, ["x"])))
            thread.start()
            while len(group_of(worker)) < 2:
                time.sleep(0.01)
            victim(worker)
            thread.join(60)
            return verdicts[0]

        def crash_fork(worker: int) -> None:
            os.kill(next(pid for pid in group_of(worker) if pid != worker), signal.SIGSEGV)

        assert judge.verdict("x+1", ["1+x"]).equal
        (first,) = pids(judge)
        assert kill_at_work(crash_fork) == Verdict(False, "died")
        assert judge.verdict("x+1", ["1+x"]).equal and pids(judge) == [first]
        os.killpg(first, signal.SIGKILL)
        wait_until_gone(first)
        assert judge.verdict("x+1", ["1+x"]).equal  # it was idle, so nothing is lost
        assert kill_at_work(lambda worker: os.killpg(worker, signal.SIGKILL)) == Verdict(False, "died")
        assert judge.verdict("x+1", ["1+x"]).equal


@pytest.mark.slow
def test_a_worker_that_does_not_answer_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    with MathJudge(1, seconds=1.0) as judge:
        judge.verdict("x+1", ["1+x"])
        (worker,) = pids(judge)
        os.kill(worker, signal.SIGSTOP)
        monkeypatch.setattr(maths, "GRACE_SECONDS", -0.5)  # only now: before, it may take its time
        assert judge.verdict("x+1", ["1+x"]) == Verdict(False, "timeout")
        wait_until_gone(worker)


@pytest.mark.slow
def test_closing_ends_busy_workers_and_starts_no_new_one() -> None:
    judge = MathJudge(2, seconds=300.0)
    judge.verdict("x+1", ["1+x"])
    verdicts: list[Verdict] = []
    ask = lambda: verdicts.append(judge.verdict(HANGS, ["x"]))  # noqa: E731
    threads = [threading.Thread(target=ask) for _ in range(3)]  # one has to wait
    for thread in threads:
        thread.start()
    while sum(len(group_of(pid)) for pid in pids(judge)) < 4:
        time.sleep(0.01)
    started = pids(judge)
    judge.close()
    for thread in threads:
        thread.join(60)
    assert verdicts == [Verdict(False, "died")] * 3
    wait_until_gone(*started)
    assert judge.verdict("x+2", ["2+x"]) == Verdict(False, "died")
    assert pids(judge) == []


SCRIPT = """
import signal, sys, threading, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs are started to ignore it
from arpo.rewards.maths import shared_judge
judge = shared_judge(1, float(sys.argv[2]))
print(judge.verdict("x+1", ["1+x"]).equal, judge._workers[0]._process.pid, flush=True)
threading.Thread(target=judge.verdict, args=("(" * 900 + "1" + ")" * 900, ["x"]), daemon=True).start()
while not judge._idle.empty():
    time.sleep(0.01)
time.sleep(0.2)
print("busy", flush=True)
time.sleep(float(sys.argv[1]))
"""


@pytest.mark.slow
def test_no_process_outlives_its_parent() -> None:
    def start(seconds: str, limit: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", SCRIPT, seconds, limit]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)

    ends = {None: start("0", "300"), signal.SIGINT: start("600", "300")}
    ends |= {end: start("600", "5") for end in (signal.SIGTERM, signal.SIGKILL)}
    left: list[int] = []
    try:
        for end, ours in ends.items():
            assert ours.stdout is not None
            said, pid = ours.stdout.readline().split()
            assert (said, ours.stdout.readline()) == ("True", "busy\n")
            left.append(int(pid))
            if end is not None:
                assert group_of(int(pid))
                ours.send_signal(end)
            ours.wait(60)
            if end in (None, signal.SIGINT):
                wait_until_gone(int(pid))  # at once, not when its time is up
    finally:
        for ours in ends.values():
            ours.kill()
            ours.communicate()
    wait_until_gone(*left)  # after a SIGKILL, the fork at work has the rest of its time


def test_nothing_is_evaluated_in_a_fork(tmp_path: Path) -> None:
    worker = Path(maths.__file__).with_name("math_worker.py")
    code = f"""
import os, runpy, socket, subprocess
worker = runpy.run_path({str(worker)!r})
from sympy import Number, sympify
worker["confine"](20, 4096)
assert Number("12") == 12 and abs(Number("1.5e3") - 1500) < 1
def attempt(action):
    try:
        action()
    except RuntimeError as error:
        print(error)
attempt(lambda: sympify("__import__('os')"))
attempt(lambda: eval("1+1"))
attempt(lambda: exec("Integer (1 ); x"))
attempt(lambda: exec("def monomial_mul(A, B):\\n    return A.b0"))
attempt(lambda: exec("def monomial_mul(A, B):\\n    return exit(0)"))
attempt(lambda: subprocess.run(["true"]))
attempt(lambda: os.system("true"))
attempt(lambda: socket.create_connection(("127.0.0.1", 9)))
attempt(lambda: open({str(tmp_path / "x")!r}, "w"))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    refused = [line.split()[0] for line in done.stdout.splitlines()]
    assert refused == ["compile"] * 5 + ["subprocess.Popen", "os.system", "socket.connect", "open"]
    assert not (tmp_path / "x").exists()


@pytest.mark.slow
def test_as_a_reward_the_reason_is_counted() -> None:
    reward = build_reward(Rewards(accuracy="math", bonus=0.0, math_seconds=2.0))
    boxes = {"\\frac{1}{2}": (1.0, {}), "x": (0.0, {}), HANGS: (0.0, {"judge.timeout": 1.0})}
    for box, (total, faults) in boxes.items():
        answered = searched(last=f"<think>b</think><answer>\\boxed{{{box}}}</answer>")
        task = Task("q", "How much?", ("\\frac{2}{4}", "y"))
        given = reward(replace(answered, task=task).trajectories[0])
        assert given.total == total
        assert {name: value for name, value in given.parts.items() if name.startswith("judge.")} == faults


@pytest.mark.slow
def test_scoring_does_not_block_the_event_loop() -> None:
    reward = build_reward(Rewards(accuracy="math", bonus=0.0, math_seconds=2.0))
    slow = searched(last=f"<think>b</think><answer>\\boxed{{{HANGS}}}</answer>")

    async def count() -> int:
        ticks = 0
        with Scorer(reward, 2) as scorer:
            waiting = asyncio.create_task(scorer.score(slow))
            while not waiting.done():
                ticks += 1
                await asyncio.sleep(0.01)
            assert waiting.result().rewards[0].parts["judge.timeout"] == 1.0
        return ticks

    assert asyncio.run(count()) > 2  # as many as there would be if it had to wait


@pytest.mark.slow
def test_the_shared_judge_needs_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    assert math_equal("x+1", "1+x") and not math_equal("x+1", "x")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ArpoError, match="pip install math-verify"):
        MathJudge()


def test_a_worker_that_cannot_start_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(maths, "_WORKER", Path("/no/such/worker.py"))
    with MathJudge(1) as judge, pytest.raises(ArpoError, match="does not start"):
        judge.verdict("x+1", ["1+x"])
