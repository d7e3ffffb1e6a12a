"""Whole runs with broken tools: all steps are done, the process ends, and nothing that a tool spoiled is trained on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from trees import searched

from arpo.config.schema import Config
from arpo.runs.reporter import Reporter
from arpo.runs.run_dir import open_run_dir as read_run
from arpo.training.loop import _FaultReport
from arpo.types import Fault, Reward, ScoredTree

TOOLS = """
import asyncio, json, threading, time
from arpo.tools.base import tool

@tool(quick=True)
def quits(text: str) -> str:
    '''End the process.'''
    raise SystemExit(0)

@tool
async def exits(text: str) -> str:
    '''End the process.'''
    raise SystemExit(0)

@tool
def leaves(text: str) -> str:
    '''End the process, from a thread.'''
    raise SystemExit(0)

@tool(quick=True)
def interrupts(text: str) -> str:
    '''Raise what Ctrl-C raises.'''
    raise KeyboardInterrupt

@tool(quick=True)
def cancels(text: str) -> str:
    '''Raise what a cancellation raises.'''
    raise asyncio.CancelledError

@tool(quick=True)
def decodes(text: str) -> str:
    '''Read a reply of a broken server.'''
    return json.loads('<html>502</html>')

@tool(timeout=0.01)
async def stubborn(text: str) -> str:
    '''Ignore every cancellation.'''
    while True:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            pass

@tool(timeout=0.01)
def hangs(text: str) -> str:
    '''Wait in a thread, for ever.'''
    threading.Event().wait()

@tool(timeout=0.01)
async def waits(text: str) -> str:
    '''Wait in a thread of asyncio's, for ever.'''
    await asyncio.to_thread(threading.Event().wait)
"""
RUN = """
import itertools, sys
from dataclasses import replace
import arpo.tools.executor as executor
from arpo.config.loading import load_config
from arpo.engine.scripted import ScriptedEngine
from arpo.training.interrupt import run_async
from arpo.training.loop import open_training, train
from arpo.training.sampler import LocalSampler

executor.CLEANUP_SECONDS = executor.FIRST_PAUSE_SECONDS = 0.01
model, folder, tools = sys.argv[1], sys.argv[2], sys.argv[3].split(",")
config = load_config(None, [
    f"model.path={model}", "model.device=cpu", f"run.dir={folder}/run", "world.entities=60", "world.train_questions=12",
    "world.test_questions=4", "train.batch_size=2", "train.steps=2", f"rollout.num_trajectories={2 * len(tools)}",
    "rollout.max_tokens=80", f"tools.enabled={[f'{folder}/tools.py:{name}' for name in tools]}", "reward.bonus=0.0",
    "branching.policy=never",
])
turns, calls = itertools.count(), itertools.cycle(tools)

def script(text, seed):
    if next(turns) % 2 or "<result>" in text[-200:]:
        return "<think>so</think><answer>\\\\boxed{Kelso}</answer>"
    name = next(calls)
    return f"<think>so</think><{name}>x</{name}>"

with open_training(config) as training:
    context = training.sampler.context
    engine = ScriptedEngine(context.agent.tokenizer, script, max_context=512)
    sampler = LocalSampler(replace(context, agent=replace(context.agent, engine=engine)))
    assert run_async(train(replace(training, sampler=sampler))) == 2
print(context.tools.stats())
"""


def run(tmp_path: Path, model: Path, *tools: str) -> subprocess.CompletedProcess[str]:
    (tmp_path / "tools.py").write_text(TOOLS)
    command = [sys.executable, "-c", RUN, str(model), str(tmp_path), ",".join(tools)]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)


@pytest.mark.slow
def test_a_run_does_all_its_steps_whatever_a_tool_raises(tmp_path: Path, model_dir: Path) -> None:
    tools = ("quits", "exits", "leaves", "interrupts", "cancels", "decodes")
    done = run(tmp_path, model_dir, *tools)
    assert done.returncode == 0, done.stderr
    saved = read_run(tmp_path / "run")
    assert saved.latest_checkpoint() is not None
    metrics = saved.read_metrics()
    assert [row["step"] for row in metrics] == [1, 2]
    assert all(row["infra_faults"] > 0 and row["tool_faults"] == 0 for row in metrics)
    called = {name for row in metrics for name in tools if row.get(f"tool.{name}.infra_faults")}
    assert called == set(tools)
    for scored in (scored for step in (1, 2) for scored in saved.read_trees(step)):
        assert list(scored.mask) == [not trajectory.infra_fault for trajectory in scored.tree.trajectories]


@pytest.mark.slow
def test_a_process_ends_although_a_tool_never_does(tmp_path: Path, model_dir: Path) -> None:
    done = run(tmp_path, model_dir, "stubborn", "hangs", "waits")
    assert done.returncode == 0, done.stderr
    assert [row["step"] for row in read_run(tmp_path / "run").read_metrics()] == [1, 2]
    assert "tool stubborn: a call ignored its cancellation and never ended" in done.stderr
    assert "Traceback" not in done.stderr and "destroyed" not in done.stderr


class Warnings(Reporter):
    """Keeps the warnings."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def warning(self, text: str) -> None:
        self.texts.append(text)


def test_broken_tools_and_lost_trajectories_are_reported_when_they_are_new() -> None:
    def step(*faults: Fault | None) -> list[ScoredTree]:
        masks = [(fault is not Fault.INFRA,) for fault in faults]
        return [ScoredTree(searched(fault=f), (Reward(0.0),), mask=m) for f, m in zip(faults, masks, strict=True)]

    warnings = Warnings()
    report = _FaultReport(warnings, Config())
    report.report(1, step(None, Fault.MODEL))
    assert warnings.texts == [] and report.reason.startswith("for every question, all trajectories earned the same.")
    report.report(2, step(None, Fault.INFRA))
    calls, masked = warnings.texts
    assert calls.startswith("step 2: 1 of 2 calls of search failed: ")
    assert masked.startswith("step 2: 1 of 2 trajectories are masked")
    report.report(3, step(Fault.INFRA, None))
    assert len(warnings.texts) == 2 and "apart from 2 that are masked" in report.reason
    report.report(4, step(Fault.INFRA, Fault.INFRA))
    assert warnings.texts[2:] == [masked.replace("step 2: 1", "step 4: 2")]
    report.report(5, step(Fault.INFRA, Fault.INFRA))
    assert len(warnings.texts) == 3
    report = _FaultReport(warnings, Config())
    report.report(1, step(Fault.INFRA))
    assert report.reason.startswith("all trajectories are masked")


def test_why_formats_are_wrong_is_reported_once() -> None:
    def step(*reasons: str) -> list[ScoredTree]:
        rewards = [Reward(-1.0, {f"format.{reason}": 1.0}, f"wrong format: {reason}") for reason in reasons]
        return [ScoredTree(searched(), (reward,)) for reward in rewards]

    warnings = Warnings()
    report = _FaultReport(warnings, Config())
    for number, reasons in enumerate([("no_box",), ("no_box", "no_box"), ("no_think", "no_think", "no_box")], 1):
        report.report(number, step(*reasons))
    first, second = warnings.texts
    assert first.startswith("step 1: 1 of 1 trajectories have a wrong format; the commonest reason, in 1, is 'no_box'")
    assert second.startswith("step 3: 3 of 3 trajectories have a wrong format; the commonest reason, in 2, is 'no_thi")
