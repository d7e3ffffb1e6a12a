"""Runs whose content is known, for tests of the viewer and of the page in a browser.

    make_folder(tmp_path / "runs")     # all of them
    branched_tree()                    # the tree of step 2, prompt 0 of the run "branched"

A token of a model node is a word with the space before it; its entropy is 0.1 times its place, its log-prob -0.05 times
its place, both counted from 1. So every shade on a page can be told beforehand.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from comparisons import noisy

from arpo.config.loading import load_config
from arpo.evaluation.report import Results, results_json
from arpo.evaluation.samples import build_sample, open_samples
from arpo.evaluation.statistics import summarize
from arpo.runs.run_dir import RunDir, create_run_dir
from arpo.studies.compare.report import comparison_json
from arpo.types import (
    Credit,
    Decision,
    Fault,
    Kind,
    Leaf,
    Node,
    Reward,
    RolloutTree,
    ScoredTree,
    StopReason,
    Task,
    ToolCall,
    ToolResult,
)

BRANCHED = Task("q-born", "Where was Mira Tolven born?", ("Upper Kelso",), kind="hop1")
PLAIN = Task("q-sum", "What is 2 plus 3?", ("5",), kind="sum")
# What a page or a terminal must show as text: mark-up, control characters, bidi overrides, half characters, emoji.
HOSTILE = (
    "<script>window.hacked=1</script><img src=x onerror=window.hacked=1></script><!--",
    "bell\x07 null\x00 escape\x1b[31m return\r",
    "bidi\u202eevil\u2066x\u2069 zero\u200bwidth",
    "broken\ufffd half\ud800 line\u2028sep",
    "emoji\U0001f600 family\U0001f469\u200d\U0001f467 combining e\u0301",
    "&lt;b&gt; \"quotes\" 'single' `back` ${x} {{y}} %s",
)
HOSTILE_TASK = Task(
    "<script>window.hacked=2</script>",
    "<b>bold?</b> <script>window.hacked=3</script> \u202eright",
    ("&amp;",),
    kind="<i>",
)


def words(text: str) -> list[str]:
    """The tokens of a text: every word with the white space before it."""
    return re.findall(r"\s*\S+|\s+$", text)


def model_node(parent: int, text: str, *, stop: str | None = None, offsets: bool = True, seconds: float = 0.5) -> Node:
    """A turn with one token a word; without `offsets` it has no character offsets."""
    tokens = words(text)
    return Node(
        parent,
        Kind.MODEL,
        tuple(range(10, 10 + len(tokens))),
        text,
        tuple(-0.05 * place for place in range(1, len(tokens) + 1)),
        tuple(0.1 * place for place in range(1, len(tokens) + 1)),
        stop=stop,
        policy_version=1,
        seconds=seconds,
        char_offsets=tuple(accumulate(map(len, tokens))) if offsets else (),
    )


def tool_node(
    parent: int,
    text: str,
    *,
    name: str = "search",
    args: dict[str, Any] | None = None,
    fault: Fault | None = None,
    error: str | None = None,
    cached: bool = False,
    decision: Decision | None = None,
) -> Node:
    """A call and its result."""
    return Node(
        parent,
        Kind.TOOL,
        tuple(range(100, 100 + len(words(text)))),
        f"<result>{text}</result>",
        call=ToolCall(name, {"query": "mira tolven"} if args is None else args, error),
        result=ToolResult(text, fault, seconds=0.25, attempts=0 if error else 1, cached=cached),
        decision=decision,
        seconds=0.25,
    )


def prompt_node(question: str) -> Node:
    """The root."""
    return Node(None, Kind.PROMPT, (1, 2, 3), f"Answer the question.\n\nQuestion: {question}\nAnswer:")


def branched_tree(*, offsets: bool = True) -> RolloutTree:
    """Four trajectories. 0-1-2 is shared by three: there are branches at the result of node 2, so 3 and 4 follow it.
    At node 5, a cached result after 3, there was no branch, so only 6 follows. Node 7 starts a trajectory of its own,
    with a failed call (8) and no answer (9).

    leaves: 6 right, 4 wrong, 9 no answer, and 10, a second child of 2's result, cut off.
    """
    nodes = (
        prompt_node(BRANCHED.question),
        model_node(0, "<think>I look her up.</think> <search>mira tolven</search>", stop="</search>", offsets=offsets),
        tool_node(
            1,
            "Mira Tolven was born in Upper Kelso.",
            decision=Decision(0.3, 0.9, 0.12, 0.62, 2, "P > tau", 4),
        ),
        model_node(2, "<think>Check again.</think> <search>upper kelso</search>", stop="</search>", offsets=offsets),
        model_node(
            2, "<think>Kelso it is.</think> <answer>\\boxed{Lower Kelso}</answer>", stop="</answer>", offsets=offsets
        ),
        tool_node(
            3,
            "Upper Kelso is a town.",
            args={"query": "upper kelso"},
            cached=True,
            decision=Decision(0.3, 0.2, -0.02, 0.48, 0, "P <= tau", 4),
        ),
        model_node(
            5, "<think>So it is.</think> <answer>\\boxed{Upper Kelso}</answer>", stop="</answer>", offsets=offsets
        ),
        model_node(0, "<think>Calculate.</think> <python>1/0</python>", stop="</python>", offsets=offsets),
        tool_node(7, "ZeroDivisionError: division by zero", name="python", args={"code": "1/0"}, fault=Fault.MODEL),
        model_node(8, "I do not know.", offsets=offsets),
        model_node(2, "<think>Cut off in", offsets=offsets),
    )
    ends_of = (
        Leaf(6, StopReason.ANSWER),
        Leaf(4, StopReason.ANSWER),
        Leaf(9, StopReason.EOS),
        Leaf(10, StopReason.LENGTH),
    )
    return RolloutTree(BRANCHED, nodes, ends_of)


BRANCHED_REWARDS = (
    Reward(1.1, {"correct": 1.0, "format": 1.0, "accuracy": 1.0, "bonus": 0.1}),
    Reward(0.0, {"correct": 0.0, "format": 1.0, "accuracy": 0.0}),
    Reward(-1.0, {"correct": 0.0, "format": 0.0, "accuracy": 0.0, "format.no_box": 1.0}, "wrong format: no \u202e box"),
    Reward(-1.0, {"correct": 0.0, "format": 0.0, "accuracy": 0.0}),
)
BRANCHED_CREDITS = (
    Credit(1.5, {1: 0.2, 3: 1.5, 6: 1.5}),
    Credit(0.3, {1: 0.2, 4: 0.3}),
    Credit(-0.9, {7: -0.9, 9: -0.9}),
    Credit(-0.9, {1: 0.2, 10: -0.9}),
)


def branched(*, offsets: bool = True) -> ScoredTree:
    """The branched tree with its rewards and credits."""
    mask = (True, True, True, False)
    return ScoredTree(branched_tree(offsets=offsets), BRANCHED_REWARDS, BRANCHED_CREDITS, mask)


def straight(task: Task = PLAIN, right: bool = True, count: int = 2) -> ScoredTree:
    """Trajectories that only answer, with equal rewards."""
    text = f"<think>Easy.</think> <answer>\\boxed{{{task.answers[0] if right else 'no idea'}}}</answer>"
    nodes = (prompt_node(task.question), *(model_node(0, text, stop="</answer>") for _ in range(count)))
    reward = Reward(float(right), {"correct": float(right), "format": 1.0})
    leaves = tuple(Leaf(n + 1, StopReason.ANSWER) for n in range(count))
    credits = tuple(Credit(0.0, {n + 1: 0.0}) for n in range(count))
    return ScoredTree(RolloutTree(task, nodes, leaves), (reward,) * count, credits)


def broken_tool() -> ScoredTree:
    """One trajectory with a call that was malformed, one that timed out and one whose tool is broken."""
    task = Task("q-tools", "Which tools work?", ("none",), kind="tools")
    nodes = (
        prompt_node(task.question),
        model_node(0, "try </search>", stop="</search>"),
        tool_node(1, "Error: the call is empty.", error="Error: the call is empty.", fault=Fault.MODEL, args={}),
        model_node(2, "again <search>slow</search>", stop="</search>"),
        tool_node(3, "The call took too long.", fault=Fault.TIMEOUT, args={"query": "slow"}),
        model_node(4, "again <search>down</search>", stop="</search>"),
        tool_node(5, "The tool is unavailable.", fault=Fault.INFRA, args={"query": "down"}),
        model_node(6, "<answer>\\boxed{all}</answer>", stop="</answer>"),
    )
    tree = RolloutTree(task, nodes, (Leaf(7, StopReason.ANSWER),))
    return ScoredTree(tree, (Reward(0.0, {"correct": 0.0, "format": 1.0}),), (Credit(0.0, {}),), (False,))


def hostile(long: int = 0) -> ScoredTree:
    """A tree in which everything that comes from outside is hostile; `long` more characters make its last token."""
    nodes = [prompt_node(HOSTILE_TASK.question)]
    for text in HOSTILE:
        nodes.append(model_node(len(nodes) - 1, text, stop="</search>"))
        nodes.append(tool_node(len(nodes) - 1, text, name="<u>tool</u>", args={"<k>": text}))
    nodes.append(model_node(len(nodes) - 1, "<answer>end</answer> " + "x" * long, stop="</answer>"))
    tree = RolloutTree(HOSTILE_TASK, tuple(nodes), (Leaf(len(nodes) - 1, StopReason.ANSWER),))
    reward = Reward(0.5, {"correct": 0.0, "<part>": 0.5}, "<b>note</b>")
    return ScoredTree(tree, (reward,), (Credit(0.0, {len(nodes) - 1: 0.5}),))


def record(step: int, **more: float | str) -> dict[str, float | str]:
    """A step's metrics: reward step/10, accuracy step/20, 100 tool calls, 2 seconds of sampling and 1 of training."""
    return {
        "reward": step / 10,
        "accuracy": step / 20,
        "format": 0.9,
        "informative_groups": 0.5,
        "trajectories": 32,
        "tool_calls": 100,
        "calls_per_trajectory": 2.0,
        "tool_faults": 3,
        "infra_faults": 0,
        "branches": 10 + step,
        "entropy_start": 0.5 - step / 100,
        "entropy_after_tool": 0.8 - step / 100,
        "sampled_tokens": 500,
        "completion_tokens": 40.0,
        "unique_tokens": 1000,
        "total_tokens": 1500,
        "loss": 0.01,
        "grad_norm": 0.2,
        "rollout_seconds": 2.0,
        "tool_seconds": 0.5,
        "train_seconds": 1.0,
        **more,
    }


def write_step(run_dir: RunDir, step: int, trees: Sequence[ScoredTree] = (), **more: float | str) -> None:
    """What a training step leaves: trees, if any, then its record."""
    if trees:
        run_dir.write_trees(step, trees)
    run_dir.append_metrics(step, record(step, **more))


def estimated(value: float) -> dict[str, float]:
    """An accuracy on 50 questions, with an interval of 0.1 to both sides."""
    return {"value": value, "low": max(0.0, value - 0.1), "high": min(1.0, value + 0.1), "questions": 50}


def evaluation(**kinds: float) -> dict[str, Any]:
    """An evaluation with these accuracies by kind."""
    every = {**estimated(sum(kinds.values()) / len(kinds)), "questions": 50 * len(kinds)}
    by_kind = {kind: estimated(value) for kind, value in kinds.items()}
    return {"accuracy": every, "by_kind": by_kind, "answers": 50 * len(kinds), "format": 0.9, "tool_calls": 2.0}


def settings(directory: Path, *overrides: str) -> dict[str, Any]:
    """A resolved configuration."""
    return load_config(None, [f"run.dir={directory}", *overrides]).resolved()


def make_branched(directory: Path, *, close: bool = True, overrides: Sequence[str] = ()) -> RunDir:
    """Five steps, tested after 2 and 4; evaluations by kind before training and after steps 2 and 5.
    Step 2: branched, straight (all right), straight (all wrong), broken tools. Step 4: the branched tree without
    character offsets. Step 5: straight. Unless closed, it is live."""
    run_dir = create_run_dir(directory, settings(directory, *overrides))
    wrong = Task("q-wrong", "Who knows?", ("nobody",), kind="hop2")
    steps: dict[int, list[ScoredTree]] = {
        2: [branched(), straight(), straight(wrong, right=False), broken_tool()],
        4: [branched(offsets=False)],
        5: [straight()],
    }
    for step in range(1, 6):
        tested = {"test_accuracy": 0.5 + step / 100, "test_format": 0.9} if step in (2, 4) else {}
        reasons = {"format.no_box": 1, "format.no_answer_tag": 2} if step == 5 else {}
        write_step(run_dir, step, steps.get(step, ()), **tested, **reasons)
    for step in (0, 2, 5):
        run_dir.write_evaluation(step, evaluation(hop1=0.75 - step / 100, sum=step / 5))
    if close:
        run_dir.close()
    return run_dir


def make_hostile(directory: Path, long: int = 1_000_000) -> None:
    """One step with the hostile tree, its last token a megabyte long; its record has a hostile name and text."""
    with create_run_dir(directory, settings(directory)) as run_dir:
        write_step(
            run_dir,
            1,
            [hostile(long)],
            **{"tool.<b>x</b>.calls": 3, "collapse_warnings": "<script>window.hacked=4</script>"},
        )
        run_dir.write_evaluation(1, evaluation(**{"<img src=x onerror=window.hacked=5>\u202e": 0.5}))


def make_evaluation(
    directory: Path, trees: Sequence[ScoredTree], model: Path | str = "tiny", name: str = "test"
) -> Path:
    """What `arpo eval` leaves of these trees with one trajectory each, all to different questions, with results."""
    given = {"seed": 0, "eval": {"temperature": 0.6}, "model": {"path": str(model), "adapter": None}}
    name = "test"
    with open_samples(directory, given) as store:
        samples = [build_sample(name, scored.tree.task, 0, scored, tokens=4) for scored in trees]
        for sample, scored in zip(samples, trees, strict=True):
            store.append(sample, scored)
    results = Results(str(model), {name: summarize(samples, (1,))}, metrics={name: "em"})
    (directory / "results.json").write_text(json.dumps(results_json(results)))
    return directory


def make_sft(directory: Path) -> None:
    """Three steps of supervised fine-tuning: no trees, no rewards."""
    with create_run_dir(directory, settings(directory, "train.lr=1e-5")) as run_dir:
        for step in range(1, 4):
            numbers = {"loss": 1.0 / step, "grad_norm": 0.5, "trained_tokens": 100, "computed_tokens": 200}
            run_dir.append_metrics(
                step, {"epoch": step / 3, "traces": 8, **numbers, "train_entropy": 0.4, "train_seconds": 1.5}
            )


def make_comparison(directory: Path) -> None:
    """As `arpo compare` leaves it: two algorithms, two seeds, a run of two steps with trees each, results.json."""
    for algorithm in ("grpo", "arpo"):
        for seed in range(2):
            place = directory / algorithm / f"seed-{seed}"
            given = settings(place / "run", f"seed={seed}", f"preset={algorithm}")
            with create_run_dir(place / "run", given) as run_dir:
                write_step(run_dir, 1, [straight()])
                write_step(run_dir, 2, [branched()], test_accuracy=0.6)
            (place / "config.json").write_text(json.dumps(given))
    results = json.dumps(comparison_json(noisy(("grpo", "arpo"), 2, title="two <b>algorithms</b>")))
    (directory / "results.json").write_text(results)


def make_folder(root: Path) -> Path:
    """A folder with all of them: branched, hostile, sft, comparison/."""
    make_branched(root / "branched")
    make_hostile(root / "hostile")
    make_sft(root / "sft")
    make_comparison(root / "comparison")
    return root
