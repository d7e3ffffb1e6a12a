"""`arpo.Trainer`: the same runs as those of the command line, but with Python objects."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fruit
import pytest
import torch
from cli_runs import call
from fruit import ROWS, SMALL, even_tokens, price
from training_runs import assert_same, metrics_of

import arpo
from arpo.engine.scripted import ScriptedEngine
from arpo.errors import ArpoError
from arpo.runs.run_dir import open_run_dir

OpenTrainer = Callable[..., arpo.Trainer]


@pytest.fixture
def trainer(model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Opens trainers of the small task in an empty directory; they are closed at the end."""
    monkeypatch.chdir(tmp_path)
    opened: list[arpo.Trainer] = []

    def open_trainer(model: Any = model_dir, **arguments: Any) -> arpo.Trainer:
        given = {"tasks": ROWS, "tools": [price], "reward": even_tokens, "progress": False, **SMALL, **arguments}
        opened.append(arpo.Trainer(model, **given))
        return opened[-1]

    yield open_trainer
    for each in opened:
        each.close()


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Agents sample from a script that calls the tool and is right half of the time."""
    monkeypatch.setattr(
        "arpo.engine.build.build_engine", lambda settings, model, tokenizer, *_: ScriptedEngine(tokenizer, fruit.solve)
    )


def write_settings(model: Path, folder: Path) -> Path:
    """A TOML file of the same task, in which everything is named."""
    rows = folder / "rows.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    lines = [f'data.train = "{rows}"', f'model.path = "{model}"', f'tools.enabled = ["{fruit.__file__}:price"]']
    lines += [f'reward.function = "{fruit.__file__}:even_tokens"']
    lines += [f"{name}.{key} = {value}" for name, section in SMALL.items() for key, value in section.items()]
    (folder / "fruit.toml").write_text("\n".join(lines))
    return folder / "fruit.toml"


@pytest.mark.slow
def test_a_run_with_objects_is_that_of_the_command_line_to_the_last_bit(
    trainer: OpenTrainer, model_dir: Path, tmp_path: Path
) -> None:
    """Also if it is interrupted by rollouts, evaluations and further calls of train()."""
    settings = write_settings(model_dir, tmp_path)
    assert call("train", settings, "train.steps=3", "run.dir=named") == 0
    with trainer(output_dir="given") as given:
        assert [record["step"] for record in given.train(steps=2)] == [1, 2]
        given.evaluate(ROWS, samples=2)
        given.ask("What?")
        given.rollout(ROWS[0])
        assert [record["step"] for record in given.train(steps=1)] == [3]
        assert given.metrics == open_run_dir(Path("given")).read_metrics()
    named, with_objects = (open_run_dir(Path(name)) for name in ("named", "given"))
    assert metrics_of(named) == metrics_of(with_objects)
    for run in (named, with_objects):  # ids of tasks differ: they name the source
        assert run.checkpoint_steps() == ([3] if run is named else [2, 3])
    assert_same(Path("named"), Path("given"))


@pytest.mark.slow
def test_a_loaded_model_is_trained_itself_with_a_copy_as_reference(
    trainer: OpenTrainer, model_dir: Path, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    loaded = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    before = {name: tensor.clone() for name, tensor in loaded.state_dict().items()}
    by_path = trainer(output_dir="path", loss={"kl_coef": 0.1})
    by_path.train(steps=2)
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    given = trainer(loaded, tokenizer=tokenizer, output_dir="object", loss={"kl_coef": 0.1})
    given.train(steps=2)
    assert given.model is loaded
    assert any(not torch.equal(before[name], tensor) for name, tensor in loaded.state_dict().items())
    assert_same(Path("path"), Path("object"))
    assert given.metrics[1]["reference_kl"] > 0
    recorded = open_run_dir(Path("object")).config()
    assert recorded["model"]["path"] == "object:LlamaForCausalLM"


@pytest.mark.slow
def test_a_run_is_resumed_with_its_objects_given_again(trainer: OpenTrainer) -> None:
    trainer(output_dir="whole").train(steps=3)
    with trainer(output_dir="parts") as first:
        first.train(steps=1)
        with pytest.raises(ArpoError, match="already holds a run"):
            trainer(output_dir="parts")
    with trainer(output_dir="parts", resume=True) as second:
        assert [record["step"] for record in second.metrics] == [1]
        with pytest.raises(ArpoError, match="this program itself is writing this run; stop it"):
            trainer(output_dir="parts", resume=True)
        assert [record["step"] for record in second.train(steps=2)] == [2, 3]
    assert_same(Path("whole"), Path("parts"))
    with pytest.raises(ArpoError, match=r"reward.function: .*object:even_tokens.* -> .*object:<?_?lambda"):
        trainer(output_dir="parts", resume=True, reward=lambda trajectory: 1.0)
    with pytest.raises(ArpoError, match="name the run to continue with output_dir"):
        trainer(resume=True)


@pytest.mark.slow
def test_commands_read_a_run_with_objects_and_say_what_they_lack(
    trainer: OpenTrainer, capsys: pytest.CaptureFixture[str]
) -> None:
    with trainer(output_dir="run") as given:
        given.train(steps=1)
    assert call("show", "run") == 0
    assert call("view", "run", "--export", "page.html") == 0
    capsys.readouterr()
    assert call("eval", "run") == 2
    assert "data.test: there are no held-out questions" in capsys.readouterr().err
    assert call("rollout", "run", "--ask", "What does a pear cost?") == 2
    assert "tools.enabled: price was given as a Python object" in capsys.readouterr().err
    assert call("rollout", "run", "tools.enabled=[]") == 2
    assert "data.train: tasks (3 rows) was given as a Python object" in capsys.readouterr().err


@pytest.mark.parametrize("policy", ["posthoc_outcome", "posthoc_tail"])
def test_a_policy_that_needs_rewards_refuses_a_question_without_an_answer(
    trainer: OpenTrainer, scripted: None, policy: str
) -> None:
    given = trainer(reward="number", branching={"policy": policy})
    with pytest.raises(ArpoError, match=f'"{policy}" chooses by rewards, and this question cannot be scored'):
        given.rollout("What do three pears cost?")
    assert given.rollout(ROWS[0]).rewards


def test_the_tool_is_called_and_the_tree_can_be_looked_at(trainer: OpenTrainer, scripted: None) -> None:
    given = trainer(reward="number")
    tree = given.rollout(ROWS[0])
    assert {(node.call.name, node.result.text) for node in tree.nodes if node.call and node.result} == {("price", "55")}
    earned = {
        trajectory.answer: reward.total for trajectory, reward in zip(tree.trajectories, tree.rewards, strict=True)
    }
    assert earned == {"110": 1.0, "55": 0.0}
    assert any(node.decision is not None for node in tree.nodes)
    assert tree.task.meta["fruit"] == "pear"
    assert tokens(tree) == tokens(given.rollout(ROWS[0])) != tokens(given.rollout(ROWS[0], seed=5))
    assert str(tree).startswith("What do two pears cost?\n├─ <think>look</think><price>pear</price>")
    assert "advantage" in str(tree)
    assert repr(tree).startswith("<Tree of 'question:1': ")
    asked = given.rollout("What do <b>three</b> pears cost?")
    assert (asked.rewards, len(asked.trajectories)) == ((), 4)
    html = asked._repr_html_()
    assert html.startswith("<svg") and "&lt;b&gt;three" in html and "<b>" not in html
    assert given.rollout(arpo.Task("t", "What?", ("110",))).rewards
    with pytest.raises(ArpoError, match="question: got None"):
        given.chat().ask(None)  # type: ignore[arg-type]
    assert not given.output_dir.exists() or not any(given.output_dir.iterdir())


def test_evaluations(trainer: OpenTrainer, scripted: None) -> None:
    given = trainer(reward="number", test=ROWS)
    evaluation = given.evaluate(ROWS[:1], samples=6, k=(1, 5))
    assert len(evaluation.trees) == 1 and len(evaluation.trees[0].tree.leaves) == 6
    assert 0 < evaluation.accuracy < evaluation.pass_at(5) <= 1
    assert evaluation.accuracy == pytest.approx(evaluation.pass_at(1))
    assert evaluation.reward == evaluation.metrics["reward"]
    assert repr(evaluation).startswith(f"<Evaluation of 1 tasks, 6 trajectories: accuracy {evaluation.accuracy:.1%}, ")
    assert f"pass@5 {evaluation.pass_at(5):.1%}" in repr(evaluation)
    assert len(given.evaluate().trees) == 2  # eval.questions
    assert len(given.evaluate(k=(1, 3)).trees[0].tree.leaves) == 3
    for arguments, message in (
        ({"k": (0,)}, "k: got"),
        ({"samples": 2, "k": (3,)}, "samples: got 2, but pass@3 needs"),
        ({"k": 5}, "k: got 5, expected numbers"),
        ({"samples": 1.5}, "samples: got 1.5, expected a number"),
    ):
        with pytest.raises(ArpoError, match=message):
            given.evaluate(ROWS, **arguments)
    with pytest.raises(ArpoError, match="no held-out questions"):
        trainer().evaluate()
    with pytest.raises(ArpoError, match="no column 'question'"):
        given.evaluate([{"text": "?"}])


def tokens(tree: arpo.Tree) -> list[tuple[int, ...]]:
    return [node.tokens for node in tree.nodes]


class Recorder(arpo.Callback):
    def __init__(self) -> None:
        self.events: list[Any] = []

    def on_step(self, step: int, metrics: Any) -> None:
        assert threading.current_thread() is threading.main_thread()
        self.events.append((step, metrics["trajectories"]))

    def on_tree(self, tree: arpo.Tree) -> None:
        self.events.append(tree.task.id)

    def on_evaluation(self, evaluation: arpo.Evaluation) -> None:
        self.events.append(len(evaluation.trees))

    def on_message(self, text: str) -> None:
        self.events.append(text.split()[0])


@pytest.mark.slow
def test_callbacks_hear_of_everything(trainer: OpenTrainer, scripted: None) -> None:
    recorder, steps = Recorder(), []
    given = trainer(
        reward="number",
        test=ROWS,
        eval={"every": 2, "questions": 2},
        callbacks=[recorder, lambda step, metrics: steps.append(step)],
    )
    given.train(steps=2)
    trees = [event for event in recorder.events if isinstance(event, str) and event.startswith("tasks:")]
    others = [event for event in recorder.events if event not in trees]
    assert len(trees) == 4
    assert others == ["Computing", (1, 8), 2, (2, 8)]
    assert steps == [1, 2]


def test_what_is_no_callback_is_refused(trainer: OpenTrainer) -> None:
    class Wrong:
        def on_stpe(self) -> None: ...

    with pytest.raises(ArpoError, match="there is no event on_stpe; did you mean on_step"):
        trainer(callbacks=[Wrong()])
    with pytest.raises(ArpoError, match="callbacks: got 3"):
        trainer(callbacks=[3])
    with pytest.raises(ArpoError, match=r"callbacks: Recorder is a class; give an instance: Recorder\(\)"):
        trainer(callbacks=[Recorder])


def test_one_callback_needs_no_list(trainer: OpenTrainer, scripted: None) -> None:
    recorder = Recorder()
    given = trainer(callbacks=recorder)
    given.evaluate(ROWS)
    assert recorder.events == [3]
    trainer(callbacks=None).close()


@pytest.mark.slow
def test_stop_ends_training_after_a_complete_step(trainer: OpenTrainer, scripted: None) -> None:
    def on_step(step: int, metrics: Any) -> None:
        if step == 2:
            given.stop()

    given = trainer(callbacks=[on_step])
    assert [record["step"] for record in given.train(steps=50)] == [1, 2]
    assert open_run_dir(given.output_dir).checkpoint_steps() == [2]
    assert [record["step"] for record in given.train(steps=1)] == [3]


@pytest.mark.slow
def test_an_interrupt_saves_and_the_trainer_goes_on(trainer: OpenTrainer, scripted: None) -> None:
    def on_step(step: int, metrics: Any) -> None:
        if step == 2:
            raise KeyboardInterrupt

    given = trainer(callbacks=[on_step])
    with pytest.raises(KeyboardInterrupt):
        given.train(steps=50)
    assert open_run_dir(given.output_dir).checkpoint_steps() == [2]
    assert given.rollout("What?").nodes
    assert [record["step"] for record in given.train(steps=2)] == [3, 4]


@pytest.mark.slow
def test_an_error_in_a_callback_saves_and_closes(trainer: OpenTrainer, scripted: None) -> None:
    def on_step(step: int, metrics: Any) -> None:
        raise RuntimeError("of the callback")

    given = trainer(callbacks=[on_step], output_dir="run")
    with pytest.raises(RuntimeError, match="of the callback"):
        given.train(steps=5)
    assert open_run_dir(Path("run")).checkpoint_steps() == [1]
    with pytest.raises(ArpoError, match="closed"):
        given.train(steps=5)
    assert trainer(output_dir="run", resume=True).train(steps=1)[0]["step"] == 2


def test_a_callback_cannot_use_the_trainer_while_it_trains(trainer: OpenTrainer, scripted: None) -> None:
    given = trainer(callbacks=[lambda step, metrics: given.rollout("What?")])
    with pytest.raises(ArpoError, match="busy"):
        given.train(steps=1)


@pytest.mark.slow
def test_runs_without_a_directory_get_new_ones(trainer: OpenTrainer, scripted: None) -> None:
    first, second = trainer(), trainer()
    assert (first.output_dir, second.output_dir) == (Path("runs/arpo"), Path("runs/arpo-2"))
    assert trainer(preset="grpo").output_dir == Path("runs/grpo")
    first.train(steps=1)
    first.close()
    second.close()
    assert Path("runs/arpo/config.json").is_file() and not Path("runs/arpo-2").exists()
    assert trainer().output_dir == Path("runs/arpo-2")


@pytest.mark.slow
def test_without_a_number_training_goes_on_to_the_setting(trainer: OpenTrainer, scripted: None) -> None:
    given = trainer(train={"steps": 3, "batch_size": 2})
    assert [record["step"] for record in given.train(steps=1)] == [1]
    assert [record["step"] for record in given.train()] == [2, 3]
    assert given.train() == []
    assert open_run_dir(given.output_dir).config()["train"]["steps"] == 3
    for wrong in (0, True, 1.5, "2"):
        with pytest.raises(ArpoError, match="steps: got"):
            given.train(steps=wrong)  # type: ignore[arg-type]


def test_objects_do_not_travel_to_a_cluster(trainer: OpenTrainer, model_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(ArpoError, match=r"Python objects cannot travel to other machines: tasks \(3 rows\), price"):
        trainer(cluster={"address": "auto"})
    settings = write_settings(model_dir, tmp_path)
    with pytest.raises(ArpoError, match=r"cluster.trainers: arpo.Trainer trains in one process"):
        arpo.Trainer(config=settings, cluster={"address": "auto", "trainers": 2}, progress=False)


def test_mistakes_leave_nothing_behind(trainer: OpenTrainer, tmp_path: Path) -> None:
    before = threading.active_count()
    for arguments, message in (
        ({"tasks": [{"answer": "3"}]}, "tasks, row 1: no column 'question'"),
        ({"tasks": []}, "tasks: holds no questions"),
        ({"tasks": [arpo.Task("t", "What?")], "reward": "em"}, "tasks, row 1: the task has no answer to compare with"),
        ({"tools": ["nothing"]}, "there is no tool 'nothing'"),
        ({"train": {"lr": -1.0}}, "train.lr"),
        ({"resume": True, "output_dir": "nowhere"}, "there is no run yet"),
        ({"resume": "runs/arpo"}, "resume: got 'runs/arpo', expected True or False"),
        ({"output_dir": 3}, "output_dir: got 3, expected a path"),
        ({"model": None}, "model: give a model"),
        ({"tasks": [{"problem_text": "a"}]}, 'name the right one with data={"question": ...}'),
    ):
        with pytest.raises(ArpoError, match=message):
            trainer(**arguments)
    assert list(tmp_path.iterdir()) in ([], [tmp_path / "runs"])
    assert not Path("runs").exists() or not list(Path("runs").iterdir())
    assert threading.active_count() == before


@pytest.mark.slow
def test_two_trainers_in_two_threads_do_not_disturb_each_other(trainer: OpenTrainer) -> None:
    trainer(output_dir="alone", seed=1).train(steps=2)
    trainer(output_dir="alone2", seed=2).train(steps=2)
    pair = {1: trainer(output_dir="one", seed=1), 2: trainer(output_dir="two", seed=2)}
    threads = [threading.Thread(target=each.train, args=(2,)) for each in pair.values()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert_same(Path("alone"), Path("one"))
    assert_same(Path("alone2"), Path("two"))


@pytest.mark.slow
@pytest.mark.parametrize("lora", [0, 2])
def test_a_saved_agent_is_a_model_that_transformers_load(trainer: OpenTrainer, lora: int) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    given = trainer(train={"batch_size": 2, "lr": 0.1, "lora_rank": lora}, output_dir="run")
    before = given.ask("What do two pears cost?")
    given.train(steps=2)
    assert given.save("agent") == Path("agent")
    answer = given.ask("What do two pears cost?")
    assert before != answer
    given.save("agent")  # is replaced
    Path("other").mkdir()
    Path("other/file").touch()
    with pytest.raises(ArpoError, match="is not empty"):
        given.save("other")
    loaded, tokenizer = AutoModelForCausalLM.from_pretrained("agent"), AutoTokenizer.from_pretrained("agent")
    assert tokenizer.get_vocab() == given.tokenizer.get_vocab()
    assert call("export", "run", "exported") == 0
    exported = AutoModelForCausalLM.from_pretrained("exported").state_dict()
    for name, tensor in loaded.state_dict().items():
        torch.testing.assert_close(tensor, exported[name])
    assert sorted(path.name for path in Path().iterdir() if path.name.startswith("agent")) == ["agent"]
    with pytest.raises(ArpoError, match=r"tools.enabled: price was given as a Python object"):
        arpo.load_agent("agent", progress=False)
    for saved in ("agent", "run"):  # a reward of one's own is needed only where something is scored
        given.close()
        with arpo.load_agent(saved, tools=[price], progress=False) as agent:
            assert agent.config.rollout == given.config.rollout
            assert agent.ask("What do two pears cost?") == answer
            with pytest.raises(ArpoError, match=r"reward.function: even_tokens was given as a Python object"):
                agent.evaluate(ROWS)
        with arpo.load_agent(saved, tools=[price], reward=even_tokens, progress=False) as agent:
            assert agent.evaluate(ROWS).reward > 0
        with arpo.load_agent(saved, tools=[price], reward="number", progress=False) as agent:
            assert agent.evaluate(ROWS).accuracy == 0


def test_a_saved_agent_is_evaluated_as_it_was_trained(trainer: OpenTrainer) -> None:
    trainer(reward={"accuracy": "number", "tolerance": 0.1}).save("agent")
    with arpo.load_agent("agent", tools=[price], progress=False) as agent:
        assert (agent.config.reward.accuracy, agent.config.reward.tolerance) == ("number", 0.1)


def test_a_model_without_a_head_is_refused(trainer: OpenTrainer, tiny_model: Any, tokenizer: Any) -> None:
    with pytest.raises(ArpoError, match="model: a LlamaModel predicts no tokens; load it with AutoModelForCausalLM"):
        trainer(tiny_model.model, tokenizer=tokenizer)


def test_an_environment_says_which_methods_are_tools(trainer: OpenTrainer) -> None:
    class Plain(arpo.Environment):
        def reset(self, task: arpo.Task) -> None: ...

        def push(self, item: str) -> str:
            """Push something."""
            return "pushed"

    class Foreign:
        def reset(self, **columns: Any) -> None: ...

    with pytest.raises(ArpoError, match=r"Plain has no tools; put @arpo.tool on those among push"):
        trainer(tools=None, environment=Plain)
    with pytest.raises(ArpoError, match=r"derive Foreign from arpo.Environment, and put @arpo.tool on"):
        trainer(tools=None, environment=Foreign)


class Counter(arpo.Environment):
    closed = 0

    def __init__(self, start: int = 0) -> None:
        self.count = start

    def reset(self, task: arpo.Task) -> str:
        return f"You are at {self.count}."

    def fork(self) -> Counter:
        return Counter(self.count)

    def close(self) -> None:
        Counter.closed += 1

    @arpo.tool
    def count_up(self) -> str:
        """Count one further."""
        self.count += 1
        return f"You are at {self.count}."


def count(prefix: str, seed: int) -> tuple[str, list[float]]:
    """A scripted model: it counts, and after a result stops with every second seed."""
    if "<result>" not in prefix:
        return "<think>count</think><count_up></count_up>", [0.1]
    if prefix.count("<result>") == 3 or seed % 2:
        return "<think>stop</think><answer>\\boxed{done}</answer>", [2.0]
    return "<think>on</think><count_up></count_up>", [2.0]


@pytest.mark.slow
def test_an_environment_of_ones_own(trainer: OpenTrainer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its state forks with the branch, the reward sees the final state, and it can be given to a saved agent."""
    monkeypatch.setattr(
        "arpo.engine.build.build_engine", lambda settings, model, tokenizer, *_: ScriptedEngine(tokenizer, count)
    )

    def final_count(trajectory: arpo.Trajectory, environment: Counter) -> float:
        return float(environment.count)

    given = trainer(
        tools=None,
        environment={"name": Counter, "settings": {"start": 10}},
        reward=final_count,
        rollout={"num_trajectories": 6, "max_tokens": 200},
    )
    tree = given.rollout({"question": "Count."})
    assert tree.tree.branch_points > 0
    for trajectory, reward in zip(tree.trajectories, tree.rewards, strict=True):
        assert [result.text for _, result in trajectory.tool_calls] == [
            f"You are at {number}." for number in range(11, int(reward.total) + 1)
        ]
    assert "You are at 10." in given.tokenizer.decode(tree.nodes[0].tokens)
    assert given.train(steps=1)[0]["reward"] > 10
    given.save("agent")
    with pytest.raises(ArpoError, match=r"environment.name: Counter was given as a Python object"):
        arpo.load_agent("agent", progress=False)
    with arpo.load_agent("agent", environment=Counter, progress=False) as agent:
        assert agent.config.environment.settings == {"start": 10}
        assert agent.ask("Count.") == "done"
        chat = agent.chat()
        assert chat.ask("Count.") == chat.ask("Count.") == "done"
        before = Counter.closed
    assert Counter.closed == before + 1  # that of the chat
