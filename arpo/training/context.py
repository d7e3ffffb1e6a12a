"""Everything that sampling needs, built from a configuration: tasks, tools, model, agent and reward function."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from arpo.agent.agent import Agent, PromptEncoder, build_agent, call_format, fit_prompts
from arpo.agent.examples import read_examples
from arpo.config.schema import Config
from arpo.data.task_set import TaskSet, load_task_set
from arpo.errors import ArpoError
from arpo.models.resolve import load_policy
from arpo.rewards import RewardFn, build_reward, with_overlong_penalty
from arpo.runs.reporter import SILENT, Reporter
from arpo.tools.build import build_tools
from arpo.tools.executor import Toolset


@dataclass(frozen=True, slots=True)
class RolloutContext:
    """What rollouts need: the tasks, the agent (engine, tools, call format) and the reward function."""

    config: Config
    tasks: TaskSet
    tools: Toolset
    model: Any
    agent: Agent
    reward: RewardFn

    def close(self) -> None:
        """Release what the tools hold: servers, connections, the cache."""
        self.tools.close()


def open_context(config: Config, reporter: Reporter = SILENT) -> RolloutContext:
    """Load the tasks, the tools and the model that the config names; close the context when done."""
    tasks, tools = load_tasks_and_tools(config, reporter)
    reward = build_reward_fn(config)
    model, tokenizer = load_policy(config, reporter)
    return build_context(config, tasks, tools, reward, model, tokenizer, reporter)


def build_context(
    config: Config,
    tasks: TaskSet,
    tools: Toolset,
    reward: RewardFn,
    model: Any,
    tokenizer: Any,
    reporter: Reporter = SILENT,
) -> RolloutContext:
    """Build the agent around a loaded model, and check that all prompts fit."""
    agent = build_agent(config, tools, model, tokenizer)
    fitted = fit_tasks(tasks, agent.prompts, config, reporter)
    return RolloutContext(config, fitted, tools, model, agent, reward)


def build_reward_fn(config: Config) -> RewardFn:
    """The reward function of a config, with the overlong penalty if there is one."""
    reward = build_reward(config.reward)
    if config.reward.overlong:
        reward = with_overlong_penalty(reward, config.reward.overlong, config.rollout.max_tokens)
    return reward


def load_tasks_and_tools(config: Config, reporter: Reporter = SILENT) -> tuple[TaskSet, Toolset]:
    """Load the tasks and build the tools, with all checks that need no model; close the tools when done."""
    tasks = load_task_set(config)
    for note in tasks.notes:
        reporter.message(note)
    tools = build_tools(config)
    try:
        read_examples(config.rollout.examples, call_format(config, tools))
    except ArpoError:
        tools.close()
        raise
    return tasks, tools


def fit_tasks(tasks: TaskSet, prompts: PromptEncoder, config: Config, reporter: Reporter = SILENT) -> TaskSet:
    """Leave out training tasks with prompts over `data.max_prompt_tokens`; a prompt that cannot fit is an error."""
    fitted = fit_prompts(tasks, prompts, config.data.max_prompt_tokens)
    if fitted is not tasks:
        for note in fitted.notes:
            reporter.message(note)
    return fitted
