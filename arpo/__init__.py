"""ARPO: reinforcement learning for language-model agents that use tools.

    import arpo

    trainer = arpo.Trainer("Qwen/Qwen3-0.6B", tasks=rows, tools=[price], reward=my_reward)
    trainer.train(steps=50)

What `__all__` names is the public interface (docs/api.md). It is loaded when it is first used: `import arpo` is quick.
"""

import importlib
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from arpo.api.agent import Agent, evaluate, load_agent, rollout
    from arpo.api.progress import Callback
    from arpo.api.trainer import Trainer
    from arpo.api.tree import Tree
    from arpo.config.schema import Config, Mcp
    from arpo.environments.base import Environment
    from arpo.errors import ArpoError
    from arpo.evaluation.evaluate import Evaluation
    from arpo.tools.base import Tool, ToolError, ToolTimeout, tool
    from arpo.types import Reward, RolloutTree, Task, Trajectory

__version__ = "0.2.0.dev0"  # the one place: pyproject.toml reads it here
__all__ = [
    "Agent",
    "ArpoError",
    "Callback",
    "Config",
    "Environment",
    "Evaluation",
    "Mcp",
    "Reward",
    "RolloutTree",
    "Task",
    "Tool",
    "ToolError",
    "ToolTimeout",
    "Trainer",
    "Trajectory",
    "Tree",
    "__version__",
    "evaluate",
    "load_agent",
    "rollout",
    "tool",
]
_MODULES = {
    "arpo.api.agent": ("Agent", "evaluate", "load_agent", "rollout"),
    "arpo.api.progress": ("Callback",),
    "arpo.api.trainer": ("Trainer",),
    "arpo.api.tree": ("Tree",),
    "arpo.config.schema": ("Config", "Mcp"),
    "arpo.environments.base": ("Environment",),
    "arpo.errors": ("ArpoError",),
    "arpo.evaluation.evaluate": ("Evaluation",),
    "arpo.tools.base": ("Tool", "ToolError", "ToolTimeout", "tool"),
    "arpo.types": ("Reward", "RolloutTree", "Task", "Trajectory"),
}

# Threads of torch that wait for each other spin for some microseconds, then sleep. By default they spin much longer,
# which made steps tens of times slower on a machine with other work. OpenMP (libgomp) reads this when torch is loaded.
# It changes no number, and a choice of the user's wins.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")


if not TYPE_CHECKING:  # a type checker would take any name for one that exists

    def __getattr__(name: str) -> Any:
        """Load a name of the public interface when it is first used."""
        for module, names in _MODULES.items():
            if name in names:
                value = globals()[name] = getattr(importlib.import_module(module), name)
                return value
        raise AttributeError(f"module 'arpo' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
