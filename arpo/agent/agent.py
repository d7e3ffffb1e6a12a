"""The agent: an engine with its tokenizer, tools and call format, and the prompts it is given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from arpo.agent.examples import encode_examples, read_examples
from arpo.agent.formats import CallFormat, build_format, encode_next_question, encode_prompt
from arpo.agent.messages import ChatEncoder
from arpo.agent.program import Program, build_program
from arpo.agent.turn_end import turn_end_tokens
from arpo.config.files import expand_user, read_limited
from arpo.config.plugins import NO_OBJECTS, Objects
from arpo.config.schema import Config
from arpo.data.images import IMAGE_PLACE, refuse_images
from arpo.data.task_set import TaskSet
from arpo.data.tasks import Trace
from arpo.errors import ArpoError
from arpo.tools.base import Tool
from arpo.types import Image, Task

if TYPE_CHECKING:
    from arpo.engine.base import Engine
    from arpo.models.vision import VisionTower


MAX_STARTS = 64  # encoded beginnings of prompts that are kept, by their system prompt


@dataclass(frozen=True, slots=True)
class PromptEncoder:
    """Turns tasks into prompts: system prompt, worked examples (if any), question."""

    tokenizer: Any
    format: CallFormat
    max_context: int
    result_tokens: int = 512
    examples: tuple[Trace, ...] = ()
    system: str | None = None  # prompt.system; None: the default of the format
    from_data: bool = True  # a task's own system message takes its place
    vision: VisionTower | None = None  # None: the model cannot see
    _starts: dict[str, tuple[int, ...]] = field(default_factory=dict, compare=False, repr=False)

    def system_prompt(self, task: Task) -> str:
        """The system prompt for a task: its own, the one that is set, or the default one."""
        if self.from_data and task.system:
            return self.format.system_prompt(task.system, with_answer=True)
        return self.format.system_prompt(self.system)

    def encode(self, task: Task) -> tuple[int, ...]:
        """The token ids of a task's prompt, however long."""
        system = self.system_prompt(task)
        images = self.expand(task.images, f"task {task.id!r}")
        if not self.examples:
            return encode_prompt(self.tokenizer, task.question, system, self.format, images)
        start = self._starts.get(system)
        if start is None:
            start = encode_examples(self.examples, self.tokenizer, self.format, self.result_tokens, system)
            if len(self._starts) >= MAX_STARTS:
                self._starts.clear()
            self._starts[system] = start
        return (*start, *encode_next_question(self.tokenizer, start, task.question, self.format, images))

    def expand(self, images: Sequence[Image], what: str) -> list[tuple[int, ...]]:
        """The token ids that stand for each of these images of `what`; ArpoError if the model cannot see."""
        if self.vision is None:
            refuse_images(images, what, "this model or engine cannot see")
            return []
        return [self.vision.expand(self.tokenizer, image) for image in images]

    def embed_ids(self, tokens: Sequence[int], images: Sequence[Image]) -> Sequence[int]:
        """A node's tokens as the engine gets them: at the places of its images, the ids of their features."""
        if not images:
            return tokens
        assert self.vision is not None  # else they were refused
        return self.vision.embed_ids(tokens, images)

    def shown_text(self, tokens: Sequence[int], images: Sequence[Image]) -> str:
        """The text of a node's tokens, in which `<image>` stands for each of its images."""
        text: str = self.tokenizer.decode(list(tokens))
        for image in images:
            assert self.vision is not None
            text = text.replace(self.vision.expanded_text(image), IMAGE_PLACE, 1)
        return text

    def prompt(self, task: Task) -> tuple[int, ...]:
        """The prompt's token ids; an error if no answer would fit into the context."""
        tokens = self.encode(task)
        if len(tokens) >= self.max_context:
            fewer = ", give fewer rollout.examples" if self.examples else ""
            raise ArpoError(
                f"the prompt of task {task.id!r} has {len(tokens)} tokens, but the model's context holds "
                f"{self.max_context}: shorten the question{fewer} or use a model with a longer context"
            )
        return tokens


@dataclass(frozen=True, slots=True)
class Agent:
    """What samples trajectories: engine, tokenizer, tools, call format, and the encoder of its prompts.

    Without an encoder, prompts have the format's own system prompt and no examples.
    """

    engine: Engine
    tokenizer: Any
    tools: Mapping[str, Tool]
    format: CallFormat
    result_tokens: int = 512
    encoder: PromptEncoder | None = None
    program: Program | None = None  # runs the turns in place of arpo's own loop, and asks through `chat`
    chat: ChatEncoder | None = None

    @property
    def prompts(self) -> PromptEncoder:
        """The encoder of this agent's prompts."""
        max_context = self.engine.capabilities.max_context
        return self.encoder or PromptEncoder(self.tokenizer, self.format, max_context, self.result_tokens)

    def prompt(self, task: Task) -> tuple[int, ...]:
        """The prompt's token ids; an error if no answer would fit into the context."""
        return self.prompts.prompt(task)


def call_format(
    config: Config, tools: Mapping[str, Tool], tokenizer: Any = None, objects: Objects = NO_OBJECTS
) -> CallFormat:
    """The format in which these tools are called."""
    specs = [tool.spec for tool in tools.values()]
    arguments = config.prompt.template_arguments
    return build_format(config.rollout.format, specs, tokenizer, config.answer.parse, arguments, objects)


def system_text(setting: str | None) -> str | None:
    """What `prompt.system` says: a text, or the content of the file that it names."""
    if setting is None or "\n" in setting or not setting.endswith((".txt", ".md")):
        return setting
    path = expand_user(setting)
    try:
        return read_limited(path).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise ArpoError(f"prompt.system: {path} cannot be read: {error}") from None


def build_agent(
    config: Config,
    tools: Mapping[str, Tool],
    model: Any,
    tokenizer: Any,
    threaded: bool | None = None,
    objects: Objects = NO_OBJECTS,
) -> Agent:
    """Build the agent and its engine, which runs in a thread of its own if `threaded` or if some tool takes time."""
    from arpo.engine.build import build_engine
    from arpo.models.lora import has_adapter
    from arpo.models.save import save_for_vllm
    from arpo.models.vision import vision_tower

    program = build_program(config.program, objects)
    if program is not None and tools:
        raise ArpoError(
            f"program: a program brings its own tools, so leave out tools and environment; got {', '.join(tools)}"
        )
    if threaded is None:
        threaded = program is not None or not all(tool.quick for tool in tools.values())
    if config.rollout.engine == "vllm" and has_adapter(model) and config.model.dtype != "float32":
        raise ArpoError(
            "rollout.engine: vLLM gets an adapter merged into the model, and in 16 bits most of what was trained would "
            "be rounded away; use rollout.engine=local, model.dtype=float32, or train.lora_rank=0"
        )
    tower = vision_tower(model) if config.rollout.engine == "local" else None  # others get ids that they do not know
    if tower is None and config.tools.python_figures and "python" in tools:
        raise ArpoError(
            "tools.python_figures: this model or engine cannot see figures; use a SmolVLM or Idefics3 model with "
            "rollout.engine=local, or tools.python_figures=false"
        )
    save_weights, ends = partial(save_for_vllm, model, tokenizer), turn_end_tokens(model, tokenizer)
    engine = build_engine(config.rollout, model, tokenizer, save_weights, threaded, ends)
    prompts = build_prompts(config, tools, tokenizer, engine.capabilities.max_context, objects, tower)
    texts = {text for text in tokenizer.convert_ids_to_tokens(sorted(ends)) if isinstance(text, str)}
    fmt = replace(prompts.format, end_texts=tuple(sorted({*prompts.format.end_texts, *texts})))
    prompts = replace(prompts, format=fmt)
    chat = ChatEncoder(
        tokenizer, config.rollout.format, config.answer.parse, config.prompt.template_arguments, objects, fmt.end_texts
    )
    return Agent(engine, tokenizer, tools, prompts.format, config.tools.max_result_tokens, prompts, program, chat)


def build_prompts(
    config: Config,
    tools: Mapping[str, Tool],
    tokenizer: Any,
    max_context: int,
    objects: Objects = NO_OBJECTS,
    vision: VisionTower | None = None,
) -> PromptEncoder:
    """The encoder of the prompts that these settings describe."""
    fmt = call_format(config, tools, tokenizer, objects)
    return PromptEncoder(
        tokenizer,
        fmt,
        max_context,
        config.tools.max_result_tokens,
        read_examples(config.rollout.examples, fmt),
        system_text(config.prompt.system),
        config.prompt.from_data,
        vision,
    )


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
        short = tuple(task for task in source.tasks if len(prompts.encode(task)) <= limit)
        count, left_out = len(source.tasks), len(source.tasks) - len(short)
        if not short:
            raise ArpoError(
                f"data.max_prompt_tokens: none of the {count:,} prompts of {source.name} has {limit} or less"
            )
        if left_out:
            notes.append(f"{left_out:,} of {count:,} questions of {source.name} are left out: over {limit} tokens")
        sources.append(replace(source, tasks=short))
    return replace(tasks, sources=tuple(sources), notes=tuple(notes))
