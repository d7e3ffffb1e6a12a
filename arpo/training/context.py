"""Everything that sampling needs, built from a configuration: tasks, tools, model, agent and reward function."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from arpo.agent.agent import Agent, PromptEncoder, build_agent, call_format, fit_prompts, system_text
from arpo.agent.examples import read_examples
from arpo.agent.formats import CallFormat
from arpo.agent.native import knows_tools
from arpo.config.plugins import NO_OBJECTS, Objects
from arpo.config.schema import Config
from arpo.data.task_set import TaskSet, load_task_set, load_test_set, require_answers
from arpo.environments.base import Environment
from arpo.environments.build import build_toolset
from arpo.environments.states import StatePool, pool_of
from arpo.errors import ArpoError
from arpo.evaluation.question_sets import HELD_OUT, QuestionSet
from arpo.models.resolve import load_policy
from arpo.models.untrained import untrained_tokens
from arpo.rewards import RewardFn, build_reward, custom_reward, wants_environment, with_overlong_penalty
from arpo.runs.reporter import SILENT, Reporter
from arpo.tools.executor import Toolset
from arpo.types import Reward, ToolCall, Trajectory


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


def open_context(
    config: Config,
    reporter: Reporter = SILENT,
    objects: Objects = NO_OBJECTS,
    with_tasks: bool = True,
    reward_needed: bool = True,
) -> RolloutContext:
    """Load the tasks, the tools and the model that the config names; close the context when done.

    Unless `reward_needed`, a reward that cannot be built is an error only when it is used.
    """
    tasks, tools = load_tasks_and_tools(config, reporter, objects, with_tasks)
    try:
        reward = build_reward_fn(config, objects, pool_of(tools))
    except ArpoError as error:
        if reward_needed:
            raise
        reward = _unavailable_reward(error)
    model, tokenizer = load_policy(config, reporter, objects=objects)
    return build_context(config, tasks, tools, reward, model, tokenizer, reporter, objects)


def build_context(
    config: Config,
    tasks: TaskSet,
    tools: Toolset,
    reward: RewardFn,
    model: Any,
    tokenizer: Any,
    reporter: Reporter = SILENT,
    objects: Objects = NO_OBJECTS,
) -> RolloutContext:
    """Build the agent around a loaded model, and check that all prompts fit."""
    agent = build_agent(config, tools, model, tokenizer, objects=objects)
    if config.rollout.format == "auto" and knows_tools(tokenizer, config.prompt.template_arguments):
        reporter.message(agent.format.note)
    _warn_of_untrained_markers(agent.format, model, tokenizer, reporter)
    fitted = fit_tasks(tasks, agent.prompts, config, reporter)
    return RolloutContext(config, fitted, tools, model, agent, reward)


def _warn_of_untrained_markers(fmt: CallFormat, model: Any, tokenizer: Any, reporter: Reporter) -> None:
    if fmt.specs and fmt.name in ("native", "json"):  # the tags of tools are ordinary text
        call = fmt.write_turn("", ToolCall(fmt.specs[0].name, {}))
        if tokens := untrained_tokens(model, tokenizer, call):
            reporter.warning(
                f"This model can hardly write calls in the format {fmt.name}: {' and '.join(tokens)} have the same "
                "embedding, so it was not trained on them. Consider rollout.format=tags with rollout.examples."
            )


def build_reward_fn(config: Config, objects: Objects = NO_OBJECTS, pool: StatePool | None = None) -> RewardFn:
    """The reward function of a config, or else of its environment, with the overlong penalty if there is one."""
    if config.reward.function is None and pool is not None and pool.has_reward:
        reward = custom_reward(_environment_reward, f"{pool.kind.__name__}.reward")
    else:
        reward = build_reward(config.reward, objects, config.answer.parse)
        if config.reward.function is None and config.program.name is not None:
            reward = _program_reward(reward)
    if pool is None and wants_environment(reward):
        raise ArpoError(
            "reward.function: it has a second parameter, the environment, but there is none; give environment.name, "
            "or a function of the trajectory alone"
        )
    if config.reward.overlong:
        reward = with_overlong_penalty(reward, config.reward.overlong, config.rollout.max_tokens)
    return reward


def _unavailable_reward(error: ArpoError) -> RewardFn:
    def reward(trajectory: Trajectory) -> Reward:
        raise error

    return reward


def _program_reward(otherwise: RewardFn) -> RewardFn:
    """The reward that a program returned; if it returned an answer, that of the answer."""

    def reward(trajectory: Trajectory) -> Reward:
        if trajectory.leaf.reward is not None:
            return trajectory.leaf.reward
        if trajectory.answer is None:  # it was cut off, or failed
            return Reward(0.0, {"correct": 0.0})
        return otherwise(trajectory)

    return reward


def _environment_reward(trajectory: Trajectory, environment: Environment) -> float | Reward:
    return environment.reward(trajectory)


def load_tasks_and_tools(
    config: Config, reporter: Reporter = SILENT, objects: Objects = NO_OBJECTS, with_tasks: bool = True
) -> tuple[TaskSet, Toolset]:
    """Load the tasks and build the tools, with all checks that need no model; close the tools when done."""
    tasks = load_task_set(config, objects) if with_tasks else TaskSet()
    for note in tasks.notes:
        reporter.message(note)
    tools = build_toolset(config, objects)
    try:
        if compares_answers(config, pool_of(tools)):
            require_answers(tasks)
        system_text(config.prompt.system)
        if config.rollout.format in ("tags", "json"):  # others depend on the tokenizer
            read_examples(config.rollout.examples, call_format(config, tools, objects=objects))
    except ArpoError:
        tools.close()
        raise
    return tasks, tools


def held_out_set(config: Config, tools: Toolset, reporter: Reporter = SILENT) -> QuestionSet:
    """The first `eval.questions` held-out questions, to be evaluated with the reward of training."""
    tasks, pool = load_test_set(config), pool_of(tools)
    for note in tasks.notes:
        reporter.message(note)
    compared = compares_answers(config, pool)
    if compared:
        require_answers(tasks)
    chosen = tasks.test[: config.eval.questions]
    metric = config.reward.accuracy if compared else "reward"
    return QuestionSet(HELD_OUT, chosen, build_reward_fn(config, pool=pool), metric)


def compares_answers(config: Config, pool: StatePool | None) -> bool:
    """Whether answers are compared with right ones: no reward of the user's own, environment or program judges."""
    judged = config.program.name is not None or (pool is not None and pool.has_reward)
    return config.reward.function is None and not judged


def fit_tasks(tasks: TaskSet, prompts: PromptEncoder, config: Config, reporter: Reporter = SILENT) -> TaskSet:
    """Leave out training tasks with prompts over `data.max_prompt_tokens`; a prompt that cannot fit is an error."""
    fitted = fit_prompts(tasks, prompts, config.data.max_prompt_tokens)
    if fitted is not tasks:
        for note in fitted.notes:
            reporter.message(note)
    return fitted
