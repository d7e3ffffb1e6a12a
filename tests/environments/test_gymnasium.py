"""Gymnasium adapter, with real environments of that package."""

from __future__ import annotations

import asyncio
import copy
import random
from typing import Any

import pytest

from arpo.environments.states import StatePool
from arpo.errors import ArpoError
from arpo.tools.base import ToolError
from arpo.tools.executor import Toolset
from arpo.types import Task, ToolCall

gymnasium = pytest.importorskip("gymnasium")
from arpo.environments.gymnasium import GymnasiumEnvironment  # noqa: E402

DIRECTIONS = ["left", "down", "right", "up"]
LAKE: dict[str, Any] = {"id": "FrozenLake-v1", "make_kwargs": {"is_slippery": False}, "action_names": DIRECTIONS}


def opened(seed: int | None = 1, **settings: Any) -> tuple[GymnasiumEnvironment, str]:
    environment = GymnasiumEnvironment(**settings)
    meta = {} if seed is None else {"seed": seed}
    return environment, environment.reset(Task("t", "Go.", ("",), meta=meta))


def test_an_episode_from_the_start_to_the_goal() -> None:
    environment, shown = opened(**LAKE)
    assert shown == "[S red]FFF\nFHFH\nFFFH\nHFFG"
    assert environment.step("down") == "  (Down)\nSFFF\n[F red]HFH\nFFFH\nHFFG\nreward: 0"
    for action in ("down", "right", "right", "down"):
        environment.step(action)
    assert environment.step("right") == ("  (Right)\nSFFF\nFHFH\nFFFH\nHFF[G red]\nreward: 1\nThe episode is over.")
    assert environment.done
    reward = environment.reward(None)  # type: ignore[arg-type]
    assert (reward.total, reward.parts) == (1.0, {"steps": 6.0})
    with pytest.raises(ToolError, match="the episode is over"):
        environment.step("left")


def test_an_observation_without_rendering_is_shown_in_plain_values() -> None:
    environment, shown = opened(id="Blackjack-v1")
    gym = gymnasium.make("Blackjack-v1")
    assert shown == str(tuple(int(value) for value in gym.reset(seed=1)[0]))
    observation, reward, *_ = gym.step(0)
    assert environment.step(0) == f"{tuple(map(int, observation))}\nreward: {reward:g}\nThe episode is over."
    assert opened(id="CartPole-v1")[1].startswith("[0.0")


def test_a_task_is_always_the_same_and_tasks_differ() -> None:
    first = [opened(seed, id="Blackjack-v1")[1] for seed in range(4)]
    assert first == [opened(seed, id="Blackjack-v1")[1] for seed in range(4)]
    assert len(set(first)) > 1
    without = [GymnasiumEnvironment("Blackjack-v1").reset(Task(name, "Go.", ("",))) for name in "aabcd"]
    assert without[0] == without[1] and len(set(without)) > 2


def test_colours_tell_passenger_and_destination_apart() -> None:
    _, shown = opened(1, id="Taxi-v4")
    assert "[R magenta]" in shown and "[B blue]" in shown and "[  yellow]" in shown and "\x1b" not in shown


@pytest.mark.parametrize("name", ["FrozenLake-v1", "Taxi-v4", "CliffWalkingSlippery-v1", "Blackjack-v1"])
@pytest.mark.parametrize("seed", range(3))
def test_a_copy_equals_a_replay(name: str, seed: int) -> None:
    rng = random.Random(seed)
    environment, _ = opened(seed, id=name)
    last = int(environment._gym.action_space.n) - 1
    taken: list[int] = []
    while len(taken) < 6 and not environment.done:
        taken.append(rng.randint(0, last))
        environment.step(taken[-1])
    copied, (replayed, _) = copy.deepcopy(environment), opened(seed, id=name)
    for action in taken:
        replayed.step(action)
    before = environment.reward(None)  # type: ignore[arg-type]
    while not copied.done and len(taken) < 20:
        taken.append(rng.randint(0, last))
        assert copied.step(taken[-1]) == replayed.step(taken[-1])
    assert copied.done == replayed.done
    assert copied.reward(None) == replayed.reward(None)  # type: ignore[arg-type]
    assert environment.reward(None) == before  # type: ignore[arg-type]


@pytest.mark.parametrize("copyable", [True, False])
def test_branches_of_a_pool_go_their_own_ways(copyable: bool) -> None:
    async def rollout() -> tuple[list[str], dict[str, float]]:
        pool = StatePool(lambda: GymnasiumEnvironment(**LAKE, copyable=copyable))
        tools, task = Toolset(pool.tools.values()), Task("t", "Go.", ("",))

        async def go(state: Any, action: str) -> str:
            return (await tools.call(ToolCall("step", {"action": action}), task, state)).text.splitlines()[0].strip()

        async with pool.open(task) as root:
            first = root.branch()
            await go(first, "down")
            second = first.branch()
            said = [await go(first, "down"), await go(second, "up"), await go(second, "nowhere")]
            async with second.final() as environment:
                said.append(environment._show(None).splitlines()[1])  # type: ignore[attr-defined]
            return said, pool.stats()

    said, stats = asyncio.run(rollout())
    assert said[:2] == ["(Down)", "(Up)"] and said[3] == "[S red]FFF"
    assert "must be one of" in said[2] and '"left"' in said[2]
    assert (stats["forks"], stats["replays"]) == ((1, 0) if copyable else (0, 1))


def test_actions_may_be_texts_and_wrong_ones_are_refused() -> None:
    environment, _ = opened(id="Blackjack-v1")
    for wrong in (7, "7", "hit", "true", "[1]", "1e400", ""):
        with pytest.raises(ToolError, match="is not an action"):
            environment.step(wrong)
    assert "reward: " in environment.step(" 0 ")
    pendulum, _ = opened(id="Pendulum-v1")
    assert "reward: " in pendulum.step([0.5]) and "reward: " in pendulum.step("[1]")
    for wrong in ("[5.0]", "[0.1, 0.2]", "[[0.1]]", '["a"]', "0.5"):
        with pytest.raises(ToolError, match="is not an action"):
            pendulum.step(wrong)


class Moods(gymnasium.spaces.Discrete):
    """A space that an environment derives from one of the package."""


class Spaces(gymnasium.Env[Any, Any]):
    """Observes the last action; ends with a truncation after two."""

    def __init__(self, actions: Any) -> None:
        self.action_space, self.observation_space = actions, gymnasium.spaces.Dict({"last": actions})

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        assert seed is not None and 0 <= seed < 2**31
        self.count = 0
        return {"seen": ("nothing", self.count)}, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.count += 1
        return {"last": action}, 0.5, False, self.count == 2, {}


gymnasium.register("arpo-test/Spaces-v0", entry_point=Spaces)


@pytest.mark.parametrize(
    ("actions", "right", "shown", "wrong"),
    [
        (Moods(3, start=-1), "-1", "-1", ["2", "-2", "1.0", "null", "{}", "happy"]),
        (gymnasium.spaces.MultiDiscrete([2, 3]), "[1, 2]", "[1, 2]", ["[2, 0]", "[1]", "[0.5, 1]", "3"]),
        (gymnasium.spaces.MultiBinary(2), [0, 1], "[0, 1]", ["[0, 2]", "[0]", "[-1, 0]", "[0, 256]"]),
        (gymnasium.spaces.Text(5), "12", "'12'", ["too long", "", "a b"]),
        (gymnasium.spaces.Box(-1, 1, (1, 2)), "[[0, 0.5]]", "[[0.0, 0.5]]", ["[0, 1]", "[[NaN, 0]]", "[[2, 0]]"]),
    ],
)
def test_spaces_of_all_kinds(actions: Any, right: Any, shown: str, wrong: list[str]) -> None:
    environment, first = opened(None, id="arpo-test/Spaces-v0", make_kwargs={"actions": actions})
    assert first == "{'seen': ('nothing', 0)}"
    for text in wrong:
        with pytest.raises(ToolError, match="is not an action"):
            environment.step(text)
    assert environment.step(right) == f"{{'last': {shown}}}\nreward: 0.5" and not environment.done
    assert environment.step(right).endswith("\nThe episode is over.") and environment.done  # truncated
    assert environment.reward(None).total == 1.0  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "actions",
    [
        gymnasium.spaces.Tuple([gymnasium.spaces.Discrete(2)]),
        gymnasium.spaces.Dict({"a": gymnasium.spaces.Discrete(2)}),
        gymnasium.spaces.Box(0, 1, ()),
    ],
)
def test_actions_that_cannot_be_written_are_an_error(actions: Any) -> None:
    with pytest.raises(ArpoError, match="cannot be written as text"):
        GymnasiumEnvironment("arpo-test/Spaces-v0", {"actions": actions})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"id": "NoSuchLake-v1"}, "NoSuchLake"),
        ({"id": "FrozenLake-v1", "make_kwargs": {"colour": 1}}, "colour"),
        ({"id": "FrozenLake-v1", "action_names": ["left"]}, "one name for each action"),
        ({"id": "Pendulum-v1", "action_names": ["left"]}, "one name for each action"),
    ],
)
def test_settings_that_do_not_fit_are_an_error(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ArpoError, match=message):
        GymnasiumEnvironment(**settings)
