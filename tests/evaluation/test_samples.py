"""The answers of an evaluation on disk: whole whatever happens, gone on with only under the same settings."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from trees import TASK, model, prompt, searched, tool, tree

from arpo.errors import ArpoError
from arpo.evaluation.samples import (
    RESULT_FILES,
    Sample,
    SampleStore,
    build_sample,
    first_usable,
    open_samples,
    require_same_settings,
)
from arpo.rewards import hierarchical_reward
from arpo.runs.trees import tree_from_json
from arpo.types import Fault, Reward, RolloutTree, ScoredTree, Task

SETTINGS = {"seed": 0, "rollout": {"format": "tags", "max_tool_calls": 3}}
TASKS = [replace(TASK, id=f"q{n}") for n in range(3)]
F1 = hierarchical_reward("f1", 0.1, ["search"])


def scored(tree: RolloutTree) -> ScoredTree:
    return ScoredTree(tree, tuple(map(F1, tree.trajectories)))


def sample(tree: RolloutTree, number: int = 0, tokens: int | None = None) -> Sample:
    return build_sample("hotpotqa", tree.task, number, scored(tree), tokens)


def answered(task: Task, text: str = "Upper Kelso") -> RolloutTree:
    return replace(searched(last=f"<think>so</think><answer>\\boxed{{{text}}}</answer>"), task=task)


def open_and_close(directory: Path, settings: dict[str, Any]) -> None:
    with open_samples(directory, settings):
        pass


def fill(store: SampleStore, count: int) -> None:
    for number in range(count):
        tree = answered(TASKS[number % 3], "Lower Kelso" if number % 2 else "Upper Kelso")
        store.append(sample(tree, number // 3), scored(tree))


def test_scores_of_trees_made_by_hand() -> None:
    right = sample(searched(), tokens=7)
    parts = {"accuracy": 1.0, "correct": 1.0, "format": 1.0, "bonus": 0.1}
    assert right == Sample(
        *("hotpotqa", "q1", 0, "", 1.0, 1.0, 1.0, 1, 7, 0.0), reward=1.1, parts=parts, stop="answer", asked=right.asked
    )
    assert len(right.asked) == 16
    half = sample(answered(replace(TASK, kind="hard"), "Kelso"))
    assert (half.score, half.correct, half.level) == (pytest.approx(2 / 3), 0.0, "hard")  # one of two words
    no_format = sample(tree([prompt(), model(0, [3], "<answer>\\boxed{Upper Kelso}</answer>")], [1]))
    assert (no_format.score, no_format.correct, no_format.format, no_format.calls) == (1.0, 1.0, 0.0, 0)
    silent = sample(tree([prompt(), model(0, [3], "well")], [1]))
    assert (silent.score, silent.correct, silent.format, silent.failed) == (0.0, 0.0, 0.0, None)
    wrong_call = tree([prompt(), model(0, [3], "x"), tool(1, fault=Fault.MODEL), model(2, [4], "y")], [3])
    assert (sample(wrong_call).failed, sample(wrong_call).calls) == (None, 1)
    assert sample(searched(fault=Fault.INFRA)).failed == "a tool was unavailable"
    timed = replace(searched(), nodes=tuple(replace(node, seconds=1.5) for node in searched().nodes))
    assert sample(timed).seconds == 6.0
    assert searched().trajectories[0].completion_tokens == 2


def test_faults_of_the_judge() -> None:
    parts = {"accuracy": 0.0, "correct": 0.0, "format": 1.0}
    long = build_sample("gaia", TASK, 0, ScoredTree(searched(), (Reward(0.0, {**parts, "judge.long": 1.0}),)), None)
    assert (long.faults, long.failed, long.parts) == (("judge.long",), None, parts)
    unjudged = ScoredTree(searched(), (Reward(0.0, {**parts, "judge.unavailable": 1.0}),))
    down = build_sample("gaia", TASK, 0, unjudged, None)
    assert down.failed == "the judge was unavailable"


def test_a_reward_of_ones_own_need_not_say_what_is_right() -> None:
    tree = searched()
    plain = build_sample("test", TASK, 0, ScoredTree(tree, (Reward(-2.5),)), None)
    assert (plain.score, plain.correct, plain.format, plain.reward, plain.parts) == (None, None, None, -2.5, {})
    judged = build_sample("test", TASK, 0, ScoredTree(tree, (Reward(3.0, {"correct": 1.0, "speed": 2.0}),)), None)
    assert (judged.score, judged.correct, judged.format) == (1.0, 1.0, None)
    assert judged.parts == {"correct": 1.0, "speed": 2.0}


def test_samples_round_trip(tmp_path: Path) -> None:
    with open_samples(tmp_path / "out", SETTINGS) as store:
        assert not (tmp_path / "out" / "settings.json").exists()  # nothing is settled before the first answer
        assert store.read("hotpotqa", TASKS) == {}
        fill(store, 5)
    with open_samples(tmp_path / "out", json.loads(json.dumps(SETTINGS))) as store:
        found = store.read("hotpotqa", TASKS)
        lines = store.path("hotpotqa").read_text().splitlines()
    assert list(found) == [("q0", 0), ("q1", 0), ("q2", 0), ("q0", 1), ("q1", 1)]
    assert [s.correct for s in found.values()] == [1.0, 0.0, 1.0, 0.0, 1.0]
    assert found["q0", 0] == sample(answered(TASKS[0]))
    kept = tree_from_json(json.loads(lines[0])["tree"])
    assert kept.tree == answered(TASKS[0]) and kept.rewards[0].total == 1.1


def test_a_truncated_line_is_dropped(tmp_path: Path) -> None:
    with open_samples(tmp_path, SETTINGS) as store:
        fill(store, 3)
        path = store.path("hotpotqa")
    whole = path.read_bytes()
    last = whole.rindex(b"\n", 0, -1) + 1
    for cut in [*range(last, len(whole), 97), len(whole) - 1]:
        path.write_bytes(whole[:cut])
        with open_samples(tmp_path, SETTINGS) as store:
            found = store.read("hotpotqa", TASKS)
            assert list(found) == [("q0", 0), ("q1", 0)]
            assert path.read_bytes() == whole[:last]  # what is appended next starts on a line of its own
            store.append(sample(answered(TASKS[2])), scored(answered(TASKS[2])))
            assert list(store.read("hotpotqa", TASKS)) == [("q0", 0), ("q1", 0), ("q2", 0)]


@pytest.mark.parametrize("damage", [b"{}\n", b"nonsense\n", b"[1]\n", b'{"tree": 3}\n'])
def test_other_damage_is_reported(tmp_path: Path, damage: bytes) -> None:
    with open_samples(tmp_path, SETTINGS) as store:
        fill(store, 2)
        path = store.path("hotpotqa")
        first, second = path.read_bytes().splitlines(keepends=True)
        path.write_bytes(first + damage + second)
        with pytest.raises(ArpoError, match=r"hotpotqa\.jsonl: line 2 is damaged"):
            store.read("hotpotqa", TASKS)


def test_of_two_lines_for_an_answer_the_last_counts(tmp_path: Path) -> None:
    with open_samples(tmp_path, SETTINGS) as store:
        broken = replace(searched(fault=Fault.INFRA), task=TASKS[0])
        store.append(sample(broken), scored(broken))
        assert store.read("hotpotqa", TASKS)["q0", 0].failed is not None
        fill(store, 1)
        assert store.read("hotpotqa", TASKS)["q0", 0].failed is None


def test_other_questions_are_refused(tmp_path: Path) -> None:
    with open_samples(tmp_path, SETTINGS) as store:
        fill(store, 2)
        for change in ({"question": "Who?"}, {"answers": ("Nowhere",)}):
            with pytest.raises(ArpoError, match="line 2: question 'q1' differs"):
                store.read("hotpotqa", [TASKS[0], replace(TASKS[1], **change)])
        assert len(store.read("hotpotqa", TASKS[:1])) == 2  # that some are not asked now is no reason


def test_what_an_environment_adds_to_a_question_does_not_make_it_another(tmp_path: Path) -> None:
    task = replace(TASKS[0], meta={"coins": 5})
    seen = answered(replace(task, question=f"{task.question}\n\nYou have 5 coins."))
    with open_samples(tmp_path, SETTINGS) as store:
        store.append(build_sample("hotpotqa", task, 0, scored(seen), None), scored(seen))
        assert list(store.read("hotpotqa", [task])) == [("q0", 0)]
        with pytest.raises(ArpoError, match="question 'q0' differs"):
            store.read("hotpotqa", [replace(task, meta={"coins": 6})])


def test_results_without_an_answer_do_not_keep_an_evaluation_from_going_on(tmp_path: Path) -> None:
    open_and_close(tmp_path, SETTINGS)
    for name in RESULT_FILES:
        (tmp_path / name).touch()
    with open_samples(tmp_path, SETTINGS) as store:
        fill(store, 1)
    open_and_close(tmp_path, SETTINGS)


def test_the_first_directory_without_answers_of_other_settings(tmp_path: Path) -> None:
    directory = tmp_path / "my.toml"
    assert first_usable(directory, SETTINGS) == directory
    for settings in (SETTINGS, {"seed": 1}, {"seed": 2}):
        with open_samples(first_usable(directory, settings), settings) as store:
            fill(store, 1)
    found = [first_usable(directory, settings).name for settings in (SETTINGS, {"seed": 1}, {"seed": 2}, {"seed": 3})]
    assert found == ["my.toml", "my.toml-2", "my.toml-3", "my.toml-4"]


def test_other_settings_are_refused_with_what_differs(tmp_path: Path) -> None:
    with open_samples(tmp_path, SETTINGS) as store:
        fill(store, 1)
    other: dict[str, Any] = {"seed": 1, "rollout": {"format": "tags", "max_tool_calls": 3, "max_tokens": 5}}
    for attempt in (open_and_close, require_same_settings):
        with pytest.raises(ArpoError) as caught:
            attempt(tmp_path, other)
        assert str(caught.value) == (
            f"{tmp_path}: holds answers of other settings:\n  seed: 0 -> 1\n"
            "  rollout.max_tokens: unset -> 5\nUse the same settings to continue, or choose another --out"
        )
    open_and_close(tmp_path, SETTINGS)


def test_settings_may_change_as_long_as_nothing_was_answered(tmp_path: Path) -> None:
    open_and_close(tmp_path, {"seed": 1})
    with open_samples(tmp_path, SETTINGS) as store:
        fill(store, 1)
    assert json.loads((tmp_path / "settings.json").read_text()) == SETTINGS


def test_directories_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ArpoError, match="is a file"):
        open_and_close(tmp_path / "file", SETTINGS)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.txt").touch()
    with pytest.raises(ArpoError, match="is not empty and holds no evaluation; choose another --out"):
        open_and_close(tmp_path / "other", SETTINGS)
    with (
        open_samples(tmp_path / "mine", SETTINGS),
        pytest.raises(ArpoError, match=r"is writing this evaluation; stop it or choose another --out"),
    ):
        open_and_close(tmp_path / "mine", SETTINGS)
    open_and_close(tmp_path / "mine", SETTINGS)
    (tmp_path / "mine" / "settings.json").write_text("[")
    with pytest.raises(ArpoError, match="is damaged"):
        open_and_close(tmp_path / "mine", SETTINGS)
