"""From arguments to settings: every form that an argument may have, and what is no argument at all."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
from trees import TASK

import arpo
from arpo.api.settings import resolve
from arpo.config.loading import load_config
from arpo.data.task_set import load_task_set
from arpo.errors import ArpoError


def price(item: str) -> str:
    """Price of one piece of fruit, in cents."""
    return "55"


def correct(trajectory: arpo.Trajectory) -> float:
    return 1.0


def short(trajectory: arpo.Trajectory) -> float:
    return 0.5


class Shop:
    """A shop."""

    def stock(self, item: str) -> str:
        """How many pieces there are."""
        return "3"


def settings_of(**arguments: Any) -> tuple[arpo.Config, dict[str, Any]]:
    named = ("model", "tokenizer", "tasks", "test", "tools", "reward", "environment", "preset", "config", "seed")
    given = {name: arguments.pop(name) for name in named if name in arguments}
    config, objects = resolve(**given, settings=arguments)
    return config, dict(objects)


def mistake(**arguments: Any) -> str:
    with pytest.raises(ArpoError) as caught:
        settings_of(**arguments)
    return str(caught.value)


def test_without_arguments_there_are_the_defaults() -> None:
    assert settings_of() == (load_config(None), {})


def test_sections_are_settings() -> None:
    config, _ = settings_of(train={"lr": 1e-3, "steps": 5}, rollout={"num_trajectories": 4}, seed=3, preset="grpo")
    assert (config.train.lr, config.train.steps, config.rollout.num_trajectories, config.seed) == (1e-3, 5, 4, 3)
    assert (config.preset, config.branching.policy) == ("grpo", "never")


def test_arguments_lie_above_a_file_or_a_configuration(tmp_path: Path) -> None:
    file = tmp_path / "my.toml"
    file.write_text('preset = "grpo"\n[train]\nlr = 0.5\nsteps = 7\n')
    config, _ = settings_of(config=str(file), train={"lr": 0.25})
    assert (config.train.lr, config.train.steps, config.branching.policy) == (0.25, 7, "never")
    again, _ = settings_of(config=config, train={"steps": 8})
    assert (again.train.lr, again.train.steps, again.preset) == (0.25, 8, "grpo")
    assert settings_of(config=config)[0] == config


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"taks": []}, "taks: there is no such argument; did you mean tasks?"),
        ({"trian": {}}, "trian: there is no such argument; did you mean train?"),
        ({"lr": 1}, 'lr: there is no such argument; did you mean train={"lr": ...} or coldstart={"lr": ...} or sft='),
        ({"max_tokens": 9}, 'max_tokens: there is no such argument; did you mean rollout={"max_tokens": ...}?'),
        ({"train_dataset": []}, "train_dataset: there is no such argument; did you mean tasks?"),
        ({"qqq": 1}, "qqq: there is no such argument; settings are given by section, as dicts: data, "),
        ({"train": 3}, 'train: got 3, expected settings by name, like train={"lr": 1e-5}'),
        ({"train": {"learning_rate": 1}}, "arguments: train.learning_rate: there is no such setting"),
        ({"train": {"stpes": 1}}, "arguments: train.stpes: there is no such setting; did you mean train.steps?"),
        ({"train": {"lr": "fast"}}, 'arguments: train.lr: got "fast", expected number > 0'),
        ({"preset": "arp"}, 'arguments: preset: got "arp", expected'),
        ({"model": 3}, "model: got a int, expected a name, a directory or a causal LM of transformers"),
        ({"tokenizer": 3}, "tokenizer: this goes with a loaded model"),
        ({"model": "tiny", "tokenizer": 3}, "tokenizer: this goes with a loaded model"),
        ({"tasks": {"train": [], "test": []}}, "tasks: got a dict, expected a list of rows; give one of its values"),
        ({"tasks": {"question": "a", "answer": 1}}, "tasks: got a dict, expected a list of rows; if this is one row, "),
        ({"tasks": {"question": ["a"]}}, "tasks: got a dict, expected a list of rows; if this is one row, "),
        ({"tasks": 3}, "tasks: got 3, expected a list of rows, a data set"),
        ({"tools": [3]}, "tools: got 3, expected functions"),
        ({"tools": [Shop]}, "tools: Shop is a class; give its bound methods"),
        ({"tools": [Shop.stock]}, "tools: stock is a method without its object; give the method of an instance"),
        ({"tools": [lambda item: item]}, "tools: tool <lambda>: it needs a docstring"),
        ({"reward": 3}, "reward: got 3, expected a function of a trajectory"),
        ({"reward": []}, "reward: got no function; give at least one"),
        ({"reward": [{"a": 1}]}, "reward: got {'a': 1}, expected a function of a trajectory"),
        ({"reward": {correct: "1"}}, "reward: the weight of correct is '1', expected a number"),
        ({"reward": {"f1": 1.0, short: 0.2}}, "reward: 'f1' says how answers are compared, and is no function"),
        ({"config": {"train": {}}}, "config: got settings by section; give them as arguments"),
        ({"config": 3}, "config: got 3, expected a path"),
        ({"reward": "exact"}, 'arguments: reward.accuracy: got "exact", expected one of "f1"'),
        ({"environment": 3}, "environment: got 3, expected a class or a function that makes one"),
    ],
)
def test_mistakes_are_explained(arguments: dict[str, Any], message: str) -> None:
    assert mistake(**arguments).startswith(message)


def test_tools_of_every_kind() -> None:
    decorated = arpo.tool(quick=True)(price)
    shop = Shop()
    server = arpo.Mcp(command="server", env={"KEY": "a secret"})
    config, objects = settings_of(tools=["python", decorated, shop.stock, "/my_tools.py:weigh", server])
    assert config.tools.enabled == ("python", "object:price", "object:stock", "/my_tools.py:weigh")
    assert objects["object:price"] is decorated
    assert objects["object:stock"].spec.name == "stock"
    assert config.tools.mcp == (server,)
    config, objects = settings_of(tools={"enabled": [price], "timeout": 3.0})
    assert (config.tools.enabled, config.tools.timeout, list(objects)) == (("object:price",), 3.0, ["object:price"])
    assert settings_of(tools=[])[0].tools.enabled == ()
    for given in (price, {price}, (one for one in [price])):
        assert settings_of(tools=given)[0].tools.enabled == ("object:price",)


def test_rewards_of_every_kind() -> None:
    assert settings_of(reward="number")[0].reward.accuracy == "number"
    assert settings_of(reward="/my.py:correct")[0].reward.function == "/my.py:correct"
    config, objects = settings_of(reward=correct)
    assert (config.reward.function, objects) == ("object:correct", {"object:correct": correct})
    weights = {"object:correct": 1.0, "object:short": 0.2}
    assert settings_of(reward={correct: 1.0, short: 0.2})[0].reward.function == weights
    assert settings_of(reward=[correct, "/my.py:x"])[0].reward.function == {"object:correct": 1.0, "/my.py:x": 1.0}
    config, objects = settings_of(reward={"accuracy": correct, "workers": 2})
    assert (config.reward.accuracy, config.reward.workers) == ("object:correct", 2)
    config, objects = settings_of(reward={"format": short})
    assert (config.reward.format, objects) == ("object:short", {"object:short": short})
    assert settings_of(reward={"format": "none"})[0].reward.format == "none"
    assert settings_of(reward=functools.partial(correct))[0].reward.function == "object:correct"


def test_a_reward_replaces_that_of_the_configuration() -> None:
    base, _ = settings_of(reward={"/file.py:a": 1.0, "/file.py:b": 1.0}, train={"lr": 0.5})
    config, _ = settings_of(config=base, reward={"/file.py:c": 2.0, "/file.py:d": 1.0})
    assert (config.reward.function, config.train.lr) == ({"/file.py:c": 2.0, "/file.py:d": 1.0}, 0.5)
    config, _ = settings_of(config=base, reward="em")
    assert (config.reward.function, config.reward.accuracy) == (None, "em")


def test_objects_of_the_same_name_are_kept_apart() -> None:
    def price(trajectory: arpo.Trajectory) -> float:
        return 0.0

    config, objects = settings_of(tools=[globals()["price"]], reward=price)
    assert (config.tools.enabled, config.reward.function) == (("object:price",), "object:price_2")
    assert objects["object:price_2"] is price


def test_tasks_of_every_kind(tmp_path: Path) -> None:
    config, objects = settings_of(tasks=({"question": q} for q in "ab"), test=[TASK])
    assert (config.data.train, config.data.test) == ("object:tasks (2 rows)", "object:test (1 rows)")
    assert objects["object:tasks (2 rows)"] == [{"question": "a"}, {"question": "b"}]
    config, objects = settings_of(tasks=tmp_path / "train.jsonl", test="test.jsonl", data={"answer": "solution"})
    assert (config.data.train, config.data.test, config.data.answer, objects) == (
        str(tmp_path / "train.jsonl"),
        str(Path.cwd() / "test.jsonl"),
        "solution",
        {},
    )


def test_a_data_frame_is_told_how_to_become_rows() -> None:
    class Frame:
        columns = ("question",)

        def to_dict(self, how: str) -> list[Any]:
            return []

    assert mistake(tasks=Frame()) == 'tasks: got a Frame; give its rows: tasks=frame.to_dict("records")'


def test_a_loaded_model_needs_its_tokenizer(tiny_model: Any, tokenizer: Any) -> None:
    assert mistake(model=tiny_model).startswith("tokenizer: a loaded model needs its tokenizer")
    assert mistake(model=tiny_model, tokenizer="name").endswith("got 'name'")
    wrong = {"path": tiny_model, "dtype": "bfloat16"}
    assert mistake(model=wrong, tokenizer=tokenizer).startswith("model.dtype: the loaded model is in float32")
    config, objects = settings_of(model={"path": tiny_model, "device": "cpu"}, tokenizer=tokenizer)
    assert (config.model.path, config.model.dtype, config.model.device) == ("object:LlamaForCausalLM", "float32", "cpu")
    assert objects == {"object:LlamaForCausalLM": (tiny_model, tokenizer)}


def test_environments_of_every_kind() -> None:
    class Counter(arpo.Environment):
        def __init__(self, start: int = 0) -> None:
            self.start = start

    class Needy(arpo.Environment):
        def __init__(self, start: int) -> None:
            self.start = start

    config, objects = settings_of(environment=Counter)
    assert (config.environment.name, objects) == ("object:Counter", {"object:Counter": Counter})
    assert settings_of(environment=lambda: Counter(3))[0].environment.name == "object:lambda"
    config, _ = settings_of(environment={"name": Needy, "settings": {"start": 3}})
    assert (config.environment.name, config.environment.settings) == ("object:Needy", {"start": 3})
    assert "Needy cannot be made without arguments" in mistake(environment=Needy)
    assert settings_of(environment="sqlite")[0].environment.name == "sqlite"


@pytest.mark.slow
def test_a_data_set_of_the_hub_library_is_read_like_rows() -> None:
    datasets = pytest.importorskip("datasets")
    rows = [{"question": f"{number}?", "answer": number, "level": "easy"} for number in range(3)]
    config, objects = settings_of(tasks=datasets.Dataset.from_list(rows), test=[TASK, *rows])
    tasks = load_task_set(config, objects)
    assert tasks.train == load_task_set(*settings_of(tasks=rows, test=rows)).train
    assert [(task.id, task.answers, task.meta["level"]) for task in tasks.train] == [
        (f"tasks:{number + 1}", (str(number),), "easy") for number in range(3)
    ]
    assert tasks.test[0] is TASK and [task.id for task in tasks.test[1:]] == ["test:2", "test:3", "test:4"]
    assert mistake(tasks=datasets.DatasetDict(train=datasets.Dataset.from_list(rows))) == (
        "tasks: got a DatasetDict, expected a list of rows; give one of its values: 'train'"
    )
