"""Custom rewards and tools named in the settings: what they do, errors in them, and the shipped example."""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from trees import answered, searched

from arpo.agent.answers import boxed_answer
from arpo.builtin.model import build_model
from arpo.config.loading import load_config
from arpo.config.plugins import load_object, names_object
from arpo.config.schema import Rewards
from arpo.errors import ArpoError
from arpo.models.save import save_pretrained
from arpo.rewards import RewardFn, build_reward
from arpo.runs.run_dir import open_run_dir as read_run
from arpo.tools.build import build_tools
from arpo.tools.executor import call_tool
from arpo.training.loop import open_training, train
from arpo.training.sampler import LocalSampler
from arpo.types import Reward, RolloutTree, Task, ToolCall

ROOT = Path(__file__).parents[2]
TASK = Task("q7", "How long?", ("Upper Kelso",))
SOURCE = """
from __future__ import annotations
from dataclasses import dataclass
from arpo.tools.base import tool
from arpo.types import Reward

LOADED = []
LOADED.append(1)

@dataclass
class Thing:
    x: int

@tool(quick=True)
def length(text: str) -> str:
    '''Length of a text.'''
    return str(len(text))

def plain(text: str) -> str:
    '''A function without @tool.'''
    return text

def share(prediction, golds, task):
    return len(prediction) / len(golds[0]) if task.id == "q7" else task.meta["score"]

def shape(trajectory):
    verdict = trajectory.task.meta["verdict"]
    return 1 / 0 if verdict == "raise" else verdict

async def later(trajectory):
    return "too late"

def whole(trajectory):
    return trajectory.task.meta.get("reward", Reward(0.25, {"correct": 0.0, "format": 1.0}))
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(SOURCE)
    return path


def scored(reward: RewardFn, task: Task, tree: RolloutTree) -> Reward:
    """The reward of the only trajectory of `tree`, as an answer to `task`."""
    (trajectory,) = replace(tree, task=task).trajectories
    return reward(trajectory)


def refused(setting: str, text: str) -> str:
    with pytest.raises(ArpoError) as error:
        load_object(setting, text)
    return str(error.value)


def test_names_of_objects() -> None:
    assert all(map(names_object, ["a.py:b", "a.b:c", "C:/x/a.py:b"]))
    assert not any(map(names_object, ["a", "a:", ":a", "a:b.c", "a:b c", ""]))


def test_a_file_is_executed_once(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_object("x", f"{file}:LOADED") == [1]
    monkeypatch.chdir(file.parent)
    assert load_object("x", "mine.py:LOADED") is load_object("x", f"{file}:LOADED")
    assert load_object("x", "./mine.py:Thing")(3).x == 3
    assert load_object("x", "os.path:join") is __import__("os").path.join


def test_errors_in_an_object_name(file: Path, tmp_path: Path) -> None:
    assert refused("reward.accuracy", "file.py:a b").startswith("reward.accuracy: got 'file.py:a b', expected path/to/")
    assert f"{tmp_path}/no.py: there is no such file (relative paths in" in refused("s", f"{tmp_path}/no.py:f")
    assert refused("s", f"{file}:shade").endswith("has no shade; did you mean share?")
    assert "no installed module arpo_nothing; install it, or name a file" in refused("s", "arpo_nothing:f")
    assert "no installed module json.nothing" in refused("s", "json.nothing:f")
    for source, told in [
        ("x = 1\nx = (\n", "fails in line 2: SyntaxError"),
        ("x = 1\n1 / 0\n", "fails in line 2: ZeroDivisionError: division by zero"),
        ("x = 1\nimport sys\nsys.exit(0)\n", "fails in line 3: SystemExit: 0"),
        ("import arpo_nothing\n", "fails in line 1: ModuleNotFoundError: No module named 'arpo_nothing'"),
    ]:
        (tmp_path / "bad.py").write_text(source)
        assert told in refused("s", f"{tmp_path}/bad.py:f")  # and it is run again once it is mended
    (tmp_path / "broken_module.py").write_text("import arpo_nothing\n")
    sys.path.insert(0, str(tmp_path))
    try:
        assert "broken_module cannot be imported: No module named 'arpo_nothing'" in refused("s", "broken_module:f")
        (tmp_path / "exiting_module.py").write_text("raise SystemExit(0)\n")
        assert "exiting_module cannot be imported: SystemExit: 0" in refused("s", "exiting_module:f")
    finally:
        sys.path.remove(str(tmp_path))


def test_custom_accuracy(file: Path) -> None:
    reward = build_reward(Rewards(accuracy=f"{file}:share", bonus=0.5, bonus_tools=("search",)))
    upper = searched(last="<think>b</think><answer>\\boxed{Upper}</answer>")
    given = scored(reward, TASK, upper)
    assert given.total == pytest.approx(5 / 11 + 0.5)
    for wrong in (1.5, -0.1, float("nan"), "1", None):
        task = Task("q8", "How?", ("x",), meta={"score": wrong})
        with pytest.raises(ArpoError, match=r"returned .* for q8, expected a number from 0 to 1"):
            scored(reward, task, upper)
    with pytest.raises(ArpoError, match="expected a function"):
        build_reward(Rewards(accuracy=f"{file}:LOADED"))


def test_custom_reward(file: Path) -> None:
    reward = build_reward(Rewards(accuracy="f1", function=f"{file}:whole"))
    tree = searched()
    assert scored(reward, TASK, tree) == Reward(0.25, {"correct": 0.0, "format": 1.0})
    assert scored(reward, Task("q", "How?", meta={"reward": 1}), tree) == Reward(1.0)
    for wrong, told in [
        ("0.5", "mine.py:whole returned '0.5' for q, expected a number or an arpo.Reward"),
        (None, "expected a number or an arpo.Reward"),
        (float("nan"), "expected finite numbers"),
        (Reward(float("inf"), {"correct": 1.0, "format": 1.0}), "expected finite numbers"),
        (Reward(1.0, {"correct": 1.0, "format": "yes"}), "expected finite numbers"),
    ]:
        with pytest.raises(ArpoError, match=told):
            scored(reward, Task("q", "How?", ("x",), meta={"reward": wrong}), tree)


def test_a_format_of_ones_own(file: Path) -> None:
    reward = build_reward(Rewards(format=f"{file}:shape", bonus=0.0))

    def of(verdict: Any) -> Reward:
        return scored(reward, replace(TASK, meta={"verdict": verdict}), searched(first="no think tags"))

    right = {"format": 1.0, "accuracy": 1.0, "correct": 1.0, "bonus": 0.0}
    assert of(None) == of("") == of(True) == Reward(1.0, right)
    wrong = {**right, "format": 0.0, "format.custom": 1.0}
    assert of("no\n unit") == Reward(-1.0, wrong, "wrong format: no unit")
    assert of(False) == Reward(-1.0, wrong, "wrong format: shape says so")
    for other in (1, 0, 0.5, [], Reward(1.0)):
        with pytest.raises(ArpoError, match=r"reward.format: .*shape returned .* for q7, expected what is wrong, as a"):
            of(other)
    with pytest.raises(ArpoError, match=r"reward.format: .*mine.py:shape raised ZeroDivisionError: .*q7 \(.*mine.py:"):
        of("raise")
    late = scored(build_reward(Rewards(format=f"{file}:later")), TASK, searched())
    assert late.note == "wrong format: too late"
    with pytest.raises(ArpoError, match=r"reward.format: .* expected a function"):
        build_reward(Rewards(format=f"{file}:LOADED"))
    given = build_reward(Rewards(format="object:mine"), {"object:mine": lambda trajectory: "bad"})
    assert scored(given, TASK, searched()).note == "wrong format: bad"


def test_the_format_may_not_count() -> None:
    reward = build_reward(Rewards(format="none", bonus=0.5, bonus_tools=("search",)))
    untidy = searched(first="x", last="<answer>\\boxed{Upper Kelso}</answer> and more")
    assert scored(reward, TASK, untidy) == Reward(1.5, {"accuracy": 1.0, "correct": 1.0, "bonus": 0.5})


def test_the_format_follows_from_how_answers_are_read() -> None:
    boxed = answered(searched(last="It is \\boxed{Upper Kelso}."), boxed_answer)
    assert scored(build_reward(Rewards(bonus=0.0), parse="boxed"), TASK, boxed).total == 1.0
    assert scored(build_reward(Rewards(bonus=0.0)), TASK, boxed).note == "wrong format: answer: none"
    assert scored(build_reward(Rewards(bonus=0.0)), TASK, replace(boxed, format="native")).total == 1.0


def test_names_of_formats() -> None:
    for name in ("auto", "none", "/mine.py:f"):
        assert load_config(None, [f"reward.format={name}"]).reward.format == name
    with pytest.raises(ArpoError, match=r'got "strict", expected "auto", "none" or path/to/file.py:name'):
        load_config(None, ["reward.format=strict"])


def test_names_of_accuracies() -> None:
    for name in ("f1", "em", "number", "math", "choice", "judge", "/mine.py:f"):
        assert load_config(None, [f"reward.accuracy={name}"]).reward.accuracy == name
    with pytest.raises(ArpoError, match=r'got "bleu", expected one of "f1", .*"judge" or path/to/file.py:name'):
        load_config(None, ["reward.accuracy=bleu"])


@pytest.mark.parametrize(
    ("override", "meant"),
    [
        ("reward.accuracy=maths", "math"),
        ("reward.accuracy=EM", "em"),
        ("reward.by_kind={a = 'f1', b = 'numbr'}", "number"),
        ("reward.format=Auto", "auto"),
        ("run.tracker=['mlflow', 'tensorbord']", "tensorboard"),
    ],
)
def test_a_misspelt_name_is_told_what_was_meant(override: str, meant: str) -> None:
    with pytest.raises(ArpoError, match=rf'expected .*\(did you mean "{meant}"\?\)$'):
        load_config(None, [override])


def test_each_accuracy_scores_as_its_function_does() -> None:
    boxed = {"f1": 2 / 3, "em": 0.0, "number": 0.0, "choice": 0.0}
    kelso = searched(last="<think>b</think><answer>\\boxed{Kelso}</answer>")
    for name, score in boxed.items():
        reward = build_reward(Rewards(accuracy=name, bonus=0.0))
        assert scored(reward, TASK, kelso).total == pytest.approx(score)
    tolerant = build_reward(Rewards(accuracy="number", tolerance=0.01, bonus=0.0))
    near = searched(last="<think>b</think><answer>\\boxed{200.5}</answer>")
    assert scored(tolerant, Task("q", "How much?", ("200",)), near).total == 1.0


def test_custom_tool(file: Path) -> None:
    def tools(*overrides: str) -> Any:
        return build_tools(load_config(None, ["reward.bonus=0.0", *overrides]))

    with tools(f'tools.enabled=["search", "{file}:length"]') as box:
        assert list(box) == ["search", "length"]
        assert asyncio.run(call_tool(box, ToolCall("length", {"text": "four"}))).text == "4"
    with tools(f'tools.enabled=["{file}:length"]', "reward.bonus=0.1", 'reward.bonus_tools=["length"]') as box:
        assert list(box) == ["length"]
    with tools(f'tools.enabled=["{file}:length"]', "reward.bonus=0.1", f"reward.function={file}:whole") as box:
        assert list(box) == ["length"]  # nothing asks for a bonus
    with pytest.raises(ArpoError, match="plain is not a tool; put @tool"):
        tools(f'tools.enabled=["{file}:plain"]')
    with pytest.raises(ArpoError, match=r"no tool 'lenght'; there are: search, python, browse, or your own as"):
        tools('tools.enabled=["lenght"]')
    with pytest.raises(ArpoError, match=r"no tool 'serch' \(did you mean 'search'\?\); there are: search"):
        tools('tools.enabled=["serch"]')


def test_the_example_is_short_and_trains(tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    example = Path("examples/custom_task")
    lines = sum(len((example / name).read_text().splitlines()) for name in ("task.py", "run.toml"))
    assert lines < 60
    prices = load_object("x", "examples/custom_task/task.py:PRICES")
    rows = [json.loads(line) for line in (example / "questions.jsonl").read_text().splitlines()]
    for row in rows:  # "... 3 apples and 1 pear ...": the answers are what the tool says
        words = row["question"].split()
        counts = [(int(word), words[i + 1].removesuffix("s")) for i, word in enumerate(words) if word.isdigit()]
        assert row["answer"] == sum(count * prices[item] for count, item in counts)
    save_pretrained(build_model(tokenizer, 32, 1, 2048, seed=1), tokenizer, tmp_path / "model")
    config = load_config(
        example / "run.toml",
        [f"model.path={tmp_path / 'model'}", f"run.dir={tmp_path / 'run'}", "train.steps=1", "train.batch_size=2",
         "rollout.num_trajectories=4", "rollout.max_tokens=24"],
    )  # fmt: skip
    with open_training(config) as training:
        assert asyncio.run(train(training)) == 1
        assert isinstance(training.sampler, LocalSampler)
        context = training.sampler.context
        assert list(context.tools) == ["price"]
        box = context.tools
        assert asyncio.run(call_tool(box, ToolCall("price", {"item": " Plum"}))).text == "25 cents"
        assert "there are: apple" in asyncio.run(call_tool(box, ToolCall("price", {"item": "axe"}))).text
        task = context.tasks.train[0]
        for box_text, total in {"150 cents": 1.0, "140": 0.5, "1": 0.0, "": 0.0, "²": 0.0}.items():
            tree = searched(last=f"<think>b</think><answer>\\boxed{{{box_text}}}</answer>", name="price")
            bonus = config.reward.bonus if total else 0.0
            assert scored(context.reward, task, tree).total == pytest.approx(total + bonus)
    (row,) = read_run(tmp_path / "run").read_metrics()
    assert row["trajectories"] == 8


def test_accuracy_by_kind() -> None:
    tree = searched(last="<think>so</think><answer>\\boxed{1200.0}</answer>")
    reward = build_reward(Rewards(accuracy="em", by_kind={"math": "number", "qa": "f1"}, bonus=0.0))
    scores = {kind: scored(reward, Task("q", "How far?", ("1200",), kind), tree).total for kind in ("", "math")}
    assert scores == {"": 0.0, "math": 1.0}
    qa = scored(reward, Task("q", "How far?", ("1200.0 feet",), "qa"), tree).total
    assert qa == pytest.approx(2 / 3)
    with pytest.raises(ArpoError, match="by_kind"):
        load_config(None, ['reward.by_kind={math = "maths"}'])
