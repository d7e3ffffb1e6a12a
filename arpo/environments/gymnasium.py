"""Any Gymnasium environment, as a tool `step(action)`.

    [environment]
    name = "gymnasium"
    settings = {id = "FrozenLake-v1", action_names = ["left", "down", "right", "up"]}

It is reset with the task's column `seed`, or with a seed made of the task's id, so all trajectories of a task start in
the same state. The model sees the rendering of mode "ansi" where the environment has one, with colours in words, and
else the observation. The trajectory ends with the episode, and the reward is the sum of the environment's rewards.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from arpo.environments.base import Environment
from arpo.errors import ArpoError
from arpo.tools.base import Tool, ToolError, as_coroutine
from arpo.types import Reward, Task, ToolSpec, Trajectory, derive_seed

MAX_SHOWN_CHARS = 100
_COLOURS = ("gray", "red", "green", "yellow", "blue", "magenta", "cyan", "white", "crimson")
_COLOURED = re.compile(r"\x1b\[(\d+)(?:;\d+)*m(.*?)\x1b\[0m", re.DOTALL)


class GymnasiumEnvironment(Environment):
    """An environment that `gymnasium.make(id, **make_kwargs)` makes.

    With `copyable` a branch starts with a deep copy of it, else its actions are taken again from the same seed.
    `action_names` are names for the actions 0, 1, 2 and so on.
    """

    def __init__(
        self,
        id: str,
        make_kwargs: Mapping[str, Any] | None = None,
        copyable: bool = False,
        action_names: Sequence[str] = (),
    ) -> None:
        self.copyable, self._names, self._rewards = copyable, list(action_names), list[float]()
        self._gym = _make(id, dict(make_kwargs or {}))
        self._schema = _action_schema(self._gym.action_space, self._names)

    def reset(self, task: Task) -> str:
        """Start the episode; returns what it shows."""
        seed = task.meta.get("seed")
        seed = derive_seed("gymnasium", task.id) % 2**31 if seed is None else int(seed)  # some take no larger ones
        observation, _ = self._gym.reset(seed=seed)
        return self._show(observation)

    def close(self) -> None:
        """Close the environment."""
        self._gym.close()

    def reward(self, trajectory: Trajectory) -> Reward:
        """The sum of the rewards."""
        return Reward(sum(self._rewards), {"steps": float(len(self._rewards))})

    def tools(self) -> list[Tool]:
        """The tool `step`, whose schema has the actions of this environment."""

        def step(self: GymnasiumEnvironment, action: Any) -> str:
            return self.step(action)

        schema = {"type": "object", "properties": {"action": self._schema}, "required": ["action"]}
        spec = ToolSpec("step", "Take an action; returns what is seen then.", {**schema, "additionalProperties": False})
        return [Tool(spec, as_coroutine(step, False), function=step, method=True)]

    def step(self, action: Any) -> str:
        """Take an action; returns the reward and what the environment shows."""
        if self.done:
            raise ToolError("the episode is over")
        observation, reward, terminated, truncated, _ = self._gym.step(self._parse(action))
        self._rewards.append(float(reward))
        self.done = bool(terminated or truncated)
        return f"{self._show(observation)}\nreward: {float(reward):g}" + "\nThe episode is over." * self.done

    def _parse(self, action: Any) -> Any:
        """The action as the environment takes it; a text in place of a number or list is read as JSON."""
        space, given = self._gym.action_space, action
        if self._names:
            return self._names.index(action) + int(space.start)  # the schema has been checked
        if isinstance(action, str) and "Text" not in _kinds(space):
            try:
                action = json.loads(action)
            except (ValueError, RecursionError):
                action = None
        if space.shape:
            action = _as_array(space, action)
        if action is None or isinstance(action, bool) or not space.contains(action):
            raise ToolError(f"{given!r:.{MAX_SHOWN_CHARS}} is not an action; the actions are {space}")
        return action

    def _show(self, observation: Any) -> str:
        if self._gym.render_mode == "ansi":
            return _COLOURED.sub(_in_words, str(self._gym.render())).strip("\n")
        return observation if isinstance(observation, str) else repr(_plain(observation))


def _make(id: str, kwargs: dict[str, Any]) -> Any:
    try:
        import gymnasium
    except ImportError:
        raise ArpoError("environment.name: gymnasium needs one more package: pip install gymnasium") from None
    try:
        made = gymnasium.make(id, disable_env_checker=True, **kwargs)
        if "render_mode" not in kwargs and "ansi" in made.metadata.get("render_modes", ()):
            made.close()
            made = gymnasium.make(id, disable_env_checker=True, render_mode="ansi", **kwargs)
        return made
    except (gymnasium.error.Error, ImportError, TypeError) as error:
        raise ArpoError(f"environment.settings: gymnasium cannot make {id!r}: {error}") from None


def _action_schema(space: Any, names: list[str]) -> dict[str, Any]:
    """The JSON schema of an action. Texts are allowed for numbers, because some call formats have only texts."""
    kinds = _kinds(space)
    if names:
        if "Discrete" not in kinds or len(set(names)) != len(names) or len(names) != space.n:
            raise ArpoError(f"environment.settings: action_names needs one name for each action of {space}")
        return {"type": "string", "enum": names}
    if "Discrete" in kinds:
        last = int(space.start + space.n - 1)
        return {"type": ["integer", "string"], "description": f"{int(space.start)} to {last}"}
    if "Text" in kinds:
        return {"type": "string"}
    if space.shape and kinds & {"Box", "MultiDiscrete", "MultiBinary"}:
        return {"type": ["array", "string"], "description": f"as JSON: {space}"}
    raise ArpoError(f"environment.settings: actions of the kind {space} cannot be written as text")


def _kinds(space: Any) -> set[str]:
    """The names of the classes that a space is of: environments may derive their own."""
    return {kind.__name__ for kind in type(space).__mro__}


def _as_array(space: Any, values: Any) -> Any:
    """The values as an array of the space's type, or None."""
    import numpy as np

    try:
        array = np.asarray(values)
        same = array.shape == space.shape and (space.dtype.kind == "f" or array.dtype.kind in "iu")
        cast = array.astype(space.dtype) if same else None
        return cast if cast is not None and (space.dtype.kind == "f" or (cast == array).all()) else None
    except (ValueError, TypeError, OverflowError):
        return None


def _in_words(match: re.Match[str]) -> str:
    """A coloured text of the rendering: the position on a map is often marked by nothing else."""
    code = int(match[1][-2:])
    colour = code - (40 if code >= 40 else 30)
    return f"[{match[2]} {_COLOURS[colour]}]" if 0 <= colour < len(_COLOURS) else f"[{match[2]}]"


def _plain(value: Any) -> Any:
    """An observation made of plain Python values."""
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)(_plain(each) for each in value) if type(value) in (tuple, list) else [*map(_plain, value)]
    return value.tolist() if hasattr(value, "tolist") else value
