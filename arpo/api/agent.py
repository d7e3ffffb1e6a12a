"""Agents for callers in Python: ask, sample trees, evaluate.

    with arpo.load_agent("my-agent", tools=[price]) as agent:
        print(agent.ask("What do two pears cost?"))

Everything is sampled in an event loop of the agent's own, so this works in scripts, notebooks and threads. An agent
does one thing at a time; several agents in several threads do not disturb each other.
"""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import Any, Self

from arpo.agent.conversation import Conversation, Listener
from arpo.algorithm.advantage import compute_credits
from arpo.algorithm.branching import REWARD_POLICIES, fill_unscored
from arpo.api.progress import CallbackReporter, as_callbacks, show
from arpo.api.settings import (
    EnvironmentArgument,
    ImagesArgument,
    ModelArgument,
    ProgramArgument,
    RewardArgument,
    TasksArgument,
    ToolsArgument,
    require_model,
    resolve,
    rows_of,
)
from arpo.api.thread import LoopThread
from arpo.api.tree import Tree
from arpo.config.plugins import GIVEN
from arpo.config.schema import Config
from arpo.data.row_images import given_images
from arpo.data.rows import refuse_bad_rows
from arpo.data.task_set import needs_answers
from arpo.data.tasks import Columns, Row, load_tasks, tasks_from_rows
from arpo.errors import ArpoError
from arpo.evaluation.evaluate import Evaluation, evaluation_rollout, select_tasks
from arpo.models.agent_file import find_agent
from arpo.training.context import RolloutContext, open_context
from arpo.training.sampler import LocalSampler
from arpo.types import Reward, ScoredTree, Task, Trajectory, derive_seed


class Agent:
    """A model with its tools. `Trainer` is one that can be trained; `load_agent` opens one that was."""

    _reward_needed = True  # from the start; else only where something is scored

    def __init__(
        self,
        model: ModelArgument | None = None,
        *,
        tools: ToolsArgument | None = None,
        environment: EnvironmentArgument | None = None,
        program: ProgramArgument | None = None,
        reward: RewardArgument | None = None,
        tokenizer: Any = None,
        preset: str | None = None,
        config: str | os.PathLike[str] | Config | None = None,
        seed: int | None = None,
        callbacks: Iterable[Any] = (),
        progress: bool = True,
        **settings: Mapping[str, Any],
    ) -> None:
        """Load the model and open the tools; the arguments are those of `Trainer`."""
        require_model(model, config)
        resolved, objects = resolve(
            model=model,
            tokenizer=tokenizer,
            tasks=() if config is None and not _names_tasks(settings.get("data")) else None,  # not those of the world
            tools=tools,
            environment=environment,
            program=program,
            reward=reward,
            preset=preset,
            config=config,
            seed=seed,
            settings=settings,
            known=("callbacks", "progress"),
        )
        self._begin(resolved, callbacks, progress)
        with self._closed_on_error():
            self._reporter.log(f"loading {resolved.model.path.removeprefix(GIVEN)}")
            self._context: RolloutContext | None = open_context(
                resolved, self._reporter, objects, with_tasks=False, reward_needed=self._reward_needed
            )
            self._stack.callback(self._context.close)

    def _begin(self, config: Config, callbacks: Iterable[Any], progress: bool) -> None:
        self.config = config
        if progress:
            show()
        self._thread, self._stack = LoopThread(), ExitStack()
        self._conversations: list[Conversation] = []
        self._finalizer = weakref.finalize(self, _close, self._thread, self._conversations, self._stack)
        with self._closed_on_error():
            self._reporter = CallbackReporter(
                as_callbacks(callbacks), self._thread, logging.INFO if progress else logging.DEBUG
            )

    def _closed_on_error(self) -> ExitStack:
        """A block that closes the agent if it raises."""
        block = ExitStack()
        block.push(lambda kind, error, trace: self.close() if kind is not None else None)
        return block

    @property
    def model(self) -> Any:
        """The transformers model."""
        return self._require_context().model

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer."""
        return self._require_context().agent.tokenizer

    def ask(self, question: str, *, images: ImagesArgument = (), seed: int | None = None) -> str:
        """The agent's answer to a question, which it may look up or compute with its tools.

        `images` are files, bytes or Pillow pictures; each stands where the question has the text `<image>`, or before
        it. The answer is the content of the final answer, or all of the last message if the model gave none. It is
        sampled with the temperature of `eval`; the same seed gives the same answer.
        """
        context = self._require_context()
        settings = self.config.eval.model_copy(update={"samples": 1})
        sampler = self._sampler(context, {"eval": settings}, _no_reward)
        seeds = [derive_seed(self.config.seed if seed is None else seed, "ask", 0)]
        asked = self._thread.run(sampler.evaluate([_question(question, images)], seeds))
        (trajectory,) = asked.trees[0].tree.trajectories
        return trajectory.answer or (
            self._require_context().agent.format.message(trajectory.turns[-1]) if trajectory.turns else ""
        )

    def chat(self, *, seed: int | None = None) -> Chat:
        """A conversation in which the agent remembers what was said before."""
        context = self._require_context()
        rollout = evaluation_rollout(self.config.eval, self.config.rollout, 1)
        seed = self.config.seed if seed is None else seed
        conversation = Conversation(context.agent, rollout, self.config.branching.probe_tokens, seed)
        self._conversations.append(conversation)
        return Chat(conversation, self._thread)

    def rollout(self, question: str | Row | Task, *, images: ImagesArgument = (), seed: int | None = None) -> Tree:
        """Sample the rollout tree of a question, as training would.

        `images` go with a plain question, as in `ask`; a row, a dict with the columns of the tasks, has its own. The
        tree of a row or task is scored; that of a plain question is not, since a reward may need the answer or other
        columns. The same seed gives the same tree.
        """
        context = self._require_context()
        if isinstance(question, Mapping):
            task = _with_images(self._tasks("question", [question])[0], images)
        else:
            task = _question(question, images)
        scoreable = not isinstance(question, str) and (bool(task.answers) or not needs_answers(self.config))
        if not scoreable and self.config.branching.policy in REWARD_POLICIES:
            raise ArpoError(
                f'branching.policy = "{self.config.branching.policy}" chooses by rewards, and this question cannot be '
                "scored: give a row with an answer, or another policy"
            )
        changes = {} if scoreable else {"branching": fill_unscored(self.config.branching)}
        sampler = self._sampler(context, changes, None if scoreable else _no_reward)
        seeds = [derive_seed(self.config.seed if seed is None else seed, "show", 0)]
        (scored,) = self._thread.run(sampler.sample([task], seeds))
        context.agent.engine.stats()  # starts the counters anew: this tree belongs to no training step
        if not scoreable:
            return Tree.of(ScoredTree(scored.tree))
        return Tree.of(compute_credits([scored], self.config.advantage)[0])

    def evaluate(self, tasks: TasksArgument, *, samples: int | None = None, k: Sequence[int] = (1,)) -> Evaluation:
        """Accuracy, reward and pass@k on tasks, each asked `samples` times (default: the largest of `k`)."""
        return self._evaluate(self._tasks("tasks", tasks), samples, k)

    def _evaluate(self, tasks: Sequence[Task], samples: int | None, k: Sequence[int]) -> Evaluation:
        if not isinstance(k, Sequence) or not k or not all(map(_is_count, k)):
            raise ArpoError(f"k: got {k!r:.100}, expected numbers from 1 on, like (1, 5)")
        if samples is not None and not _is_count(samples):
            raise ArpoError(f"samples: got {samples!r:.100}, expected a number from 1 on")
        samples = max(self.config.eval.samples, *k) if samples is None else samples
        if samples < max(k):
            raise ArpoError(f"samples: got {samples}, but pass@{max(k)} needs at least {max(k)}")
        context = self._require_context()
        settings = self.config.eval.model_copy(update={"samples": samples})
        sampler = self._sampler(context, {"eval": settings}, None)
        everything = self.config.eval.model_copy(update={"questions": len(tasks)})
        chosen, seeds = select_tasks(tasks, everything, self.config.seed)

        async def work() -> Evaluation:
            with self._reporter.progress("evaluating", len(chosen)) as bar:
                return await sampler.evaluate(chosen, seeds, lambda scored: bar.advance())

        trees = self._thread.run(work()).trees
        result = Evaluation(tuple(map(Tree.of, trees)), tuple(k))
        self._reporter.evaluation(result)
        return result

    def close(self) -> None:
        """Stop what is running, and release tools and files; the agent cannot be used afterwards."""
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _require_open(self) -> None:
        if not self._finalizer.alive:
            raise ArpoError("this agent is closed; open it again")

    def _require_context(self) -> RolloutContext:
        self._require_open()
        if self._context is None:
            raise ArpoError("on a cluster, only train() and evaluate() work; open the trained agent with load_agent")
        return self._context

    def _sampler(
        self, context: RolloutContext, changes: Mapping[str, Any], reward: Callable[..., Reward] | None
    ) -> LocalSampler:
        """A sampler with other settings, and another reward if one is given."""
        config = self.config.model_copy(update=dict(changes))
        return LocalSampler(replace(context, config=config, reward=context.reward if reward is None else reward))

    def _tasks(self, label: str, rows: TasksArgument) -> tuple[Task, ...]:
        data = self.config.data
        columns = Columns.named(data, answers=needs_answers(self.config))
        if isinstance(rows, str | os.PathLike):
            return load_tasks(os.fspath(rows), columns, data.bad_rows).tasks
        reading = tasks_from_rows(rows_of(label, rows), columns, label)
        refuse_bad_rows(label, "questions", reading.tasks, reading.problems, data.bad_rows)
        return reading.tasks


class _LoadedAgent(Agent):
    """One that was trained: to ask it, the reward of its training is not needed."""

    _reward_needed = False


class Chat:
    """A conversation with an agent."""

    def __init__(self, conversation: Conversation, thread: LoopThread) -> None:
        self._conversation, self._thread = conversation, thread

    def ask(self, question: str, *, images: ImagesArgument = ()) -> str:
        """The agent's answer, as of `Agent.ask`."""
        turns, task = _Turns(), _question(question, images)
        self._conversation.ask(task.question, task.images)
        self._thread.run(self._conversation.answer(turns))
        text: str = self._conversation.agent.tokenizer.decode(turns.tokens, skip_special_tokens=True)
        return self._conversation.agent.format.read_answer(text) or text.strip()

    def clear(self) -> None:
        """Start a new conversation."""
        self._conversation.clear()


class _Turns(Listener):
    """Keeps the tokens of the last turn."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self._ended = False

    def on_token(self, token: int, entropy: float) -> None:
        """Append a token; the first one of a turn begins anew."""
        self.tokens = [token] if self._ended else [*self.tokens, token]
        self._ended = False

    def on_turn_end(self) -> None:
        """The next token begins another turn."""
        self._ended = True


def load_agent(
    path: str | os.PathLike[str],
    *,
    tools: ToolsArgument | None = None,
    environment: EnvironmentArgument | None = None,
    program: ProgramArgument | None = None,
    reward: RewardArgument | None = None,
    seed: int | None = None,
    callbacks: Iterable[Any] = (),
    progress: bool = True,
    **settings: Mapping[str, Any],
) -> Agent:
    """Open an agent: what `Trainer.save` or `arpo export` wrote, a run (its last checkpoint), a TOML file or any model.

    It is used with the settings that it was trained with. Tools and environments that were Python objects are not
    saved; give them again. So give a reward of your own if you evaluate the agent; to ask it, none is needed.
    """
    config, base, _ = find_agent(path)
    sections: dict[str, Any] = {name: {**base.get(name, {}), **settings.get(name, {})} for name in [*base, *settings]}
    given: Any
    if tools is not None or "tools" in sections:
        given = tools if isinstance(tools, Mapping) else {} if tools is None else {"enabled": tools, "mcp": []}
        tools = {**sections.pop("tools", {}), **given}
    if environment is not None or "environment" in sections:
        given = (
            environment if isinstance(environment, Mapping) else {} if environment is None else {"name": environment}
        )
        environment = {**sections.pop("environment", {}), **given}
    recorded = sections.pop("reward", None)
    return _LoadedAgent(
        sections.pop("model", None),
        tools=tools,
        environment=environment,
        program=program,
        reward=recorded if reward is None else reward,
        config=config,
        seed=seed,
        callbacks=callbacks,
        progress=progress,
        **sections,
    )


def rollout(model: ModelArgument, question: str | Row | Task, *, images: ImagesArgument = (), **arguments: Any) -> Tree:
    """Sample the rollout tree of one question: `Agent(model, **arguments).rollout(question, images=images)`."""
    with Agent(model, **arguments) as agent:
        return agent.rollout(question, images=images)


def evaluate(
    model: ModelArgument,
    tasks: TasksArgument,
    *,
    samples: int | None = None,
    k: Sequence[int] = (1,),
    **arguments: Any,
) -> Evaluation:
    """Evaluate a model with tools on tasks: `Agent(model, **arguments).evaluate(tasks, samples=samples, k=k)`."""
    with Agent(model, **arguments) as agent:
        return agent.evaluate(tasks, samples=samples, k=k)


def _names_tasks(data: object) -> bool:
    """Whether the section `data`, as it was given, names tasks."""
    return isinstance(data, Mapping) and any(data.get(name) for name in ("train", "test", "mix"))


def _with_images(task: Task, images: ImagesArgument) -> Task:
    """The task, which has its own images; raises if more are given."""
    if not isinstance(images, tuple) or images:
        raise ArpoError("images: they go with a question that is a text; a row has them in its columns")
    return task


def _question(question: str | Task, images: ImagesArgument = ()) -> Task:
    if isinstance(question, Task):
        return _with_images(question, images)
    if not isinstance(question, str):
        raise ArpoError(f"question: got {question!r:.100}, expected a text, a row or an arpo.Task")
    try:
        return Task("asked", question, (), images=given_images(images))
    except ValueError as error:
        raise ArpoError(f"question: {error}") from None


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _no_reward(trajectory: Trajectory) -> Reward:
    return Reward(0.0)


def _close(thread: LoopThread, conversations: list[Conversation], stack: ExitStack) -> None:
    with suppress(ArpoError):  # after a second Ctrl-C it may still be busy
        for conversation in conversations:
            thread.run(conversation.close())
    thread.close()
    stack.close()
