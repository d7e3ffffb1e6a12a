"""The agent: an engine with its tokenizer, tools and call format, and the prompts it is given."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from arpo.agent.examples import encode_examples, read_examples
from arpo.agent.formats import CallFormat, build_format, encode_next_question, encode_prompt
from arpo.config.schema import Config
from arpo.data.task_set import TaskSet
from arpo.errors import ArpoError
from arpo.tools.base import Tool
from arpo.types import Task

if TYPE_CHECKING:
    from arpo.engine.base import Engine


@dataclass(frozen=True, slots=True)
class PromptEncoder:
    """Turns questions into prompts: system prompt, worked examples (if any), question."""

    tokenizer: Any
    format: CallFormat
    max_context: int
    examples: tuple[int, ...] = ()  # token ids of the system prompt and the worked examples; empty without examples

    def encode(self, question: str) -> tuple[int, ...]:
        """The token ids of the prompt with this question, however long."""
        if not self.examples:
            return encode_prompt(self.tokenizer, question, self.format.instructions)
        return (*self.examples, *encode_next_question(self.tokenizer, self.examples, question))

    def prompt(self, task: Task) -> tuple[int, ...]:
        """The prompt's token ids; an error if no answer would fit into the context."""
        tokens = self.encode(task.question)
        if len(tokens) >= self.max_context:
            fewer = ", give fewer rollout.examples" if self.examples else ""
            raise ArpoError(
                f"the prompt of task {task.id!r} has {len(tokens)} tokens, but the model's context holds "
                f"{self.max_context}: shorten the question{fewer} or use a model with a longer context"
            )
        return tokens


@dataclass(frozen=True, slots=True)
class Agent:
    """What samples trajectories: engine, tokenizer, tools, call format, and the examples that begin every prompt."""

    engine: Engine
    tokenizer: Any
    tools: Mapping[str, Tool]
    format: CallFormat
    result_tokens: int = 512
    examples: tuple[int, ...] = ()  # as in `PromptEncoder`

    @property
    def prompts(self) -> PromptEncoder:
        """The encoder of this agent's prompts."""
        return PromptEncoder(self.tokenizer, self.format, self.engine.capabilities.max_context, self.examples)

    def prompt(self, task: Task) -> tuple[int, ...]:
        """The prompt's token ids; an error if no answer would fit into the context."""
        return self.prompts.prompt(task)


def call_format(config: Config, tools: Mapping[str, Tool]) -> CallFormat:
    """The format in which these tools are called."""
    return build_format(config.rollout.format, [tool.spec for tool in tools.values()])


def build_agent(
    config: Config, tools: Mapping[str, Tool], model: Any, tokenizer: Any, threaded: bool | None = None
) -> Agent:
    """Build the agent and its engine, which runs in a thread of its own if `threaded` or if some tool takes time."""
    from arpo.engine.build import build_engine
    from arpo.models.lora import has_adapter
    from arpo.models.save import save_for_vllm

    if threaded is None:
        threaded = not all(tool.quick for tool in tools.values())
    if config.rollout.engine == "vllm" and has_adapter(model) and config.model.dtype != "float32":
        raise ArpoError(
            "rollout.engine: vLLM gets an adapter merged into the model, and in 16 bits most of what was trained would "
            "be rounded away; use rollout.engine=local, model.dtype=float32, or train.lora_rank=0"
        )
    engine = build_engine(config.rollout, model, tokenizer, partial(save_for_vllm, model, tokenizer), threaded)
    prompts = build_prompts(config, tools, tokenizer, engine.capabilities.max_context)
    return Agent(engine, tokenizer, tools, prompts.format, config.tools.max_result_tokens, prompts.examples)


def build_prompts(config: Config, tools: Mapping[str, Tool], tokenizer: Any, max_context: int) -> PromptEncoder:
    """The encoder of the prompts that these settings describe."""
    fmt, limit = call_format(config, tools), config.tools.max_result_tokens
    examples = encode_examples(read_examples(config.rollout.examples, fmt), tokenizer, fmt, limit)
    return PromptEncoder(tokenizer, fmt, max_context, examples)


def fit_prompts(tasks: TaskSet, prompts: PromptEncoder, max_tokens: int | None) -> TaskSet:
    """Leave out training tasks whose prompt has more than `max_tokens`; notes say how many.

    Without a limit, and for test tasks, a prompt that does not fit into the model's context is an error.
    """
    for task in tasks.test if max_tokens else (*tasks.train, *tasks.test):
        prompts.prompt(task)
    if max_tokens is None:
        return tasks
    limit = min(max_tokens, prompts.max_context - 1)
    sources, notes = [], []
    for source in tasks.sources:
        short = tuple(task for task in source.tasks if len(prompts.encode(task.question)) <= limit)
        count, left_out = len(source.tasks), len(source.tasks) - len(short)
        if not short:
            raise ArpoError(
                f"data.max_prompt_tokens: none of the {count:,} prompts of {source.name} has {limit} or less"
            )
        if left_out:
            notes.append(f"{left_out:,} of {count:,} questions of {source.name} are left out: over {limit} tokens")
        sources.append(replace(source, tasks=short))
    return replace(tasks, sources=tuple(sources), notes=tuple(notes))
