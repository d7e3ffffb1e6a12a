"""Every setting: its type, range, default and a one-line description. All values are frozen.

Functions take the section they need (`decide(Branching(...), ...)`), so each setting is described once. Reading
settings from files and the command line is in `arpo.config.loading`.

Guarantees: dumps, `repr` and validation errors of settings hold no secrets (`arpo.config.masking` says what these are).
Only attributes, and `resolved(reveal=True)`, have the true values.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    Field,
    JsonValue,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from arpo.config.algorithm import Advantage, Branching, Loss
from arpo.config.section import (
    MAX_BATCH_TOKENS,
    MAX_COUNT,
    MAX_FACTOR,
    MAX_GROUP,
    MAX_SECONDS,
    MAX_SEED,
    MAX_TRAJECTORIES,
    MAX_TREE_TOKENS,
    Names,
    NoneWord,
    OptionalText,
    Section,
    Text,
    setting,
)


class _Columns(Section):
    """Which column of a row holds what; a dot leads to a field inside a column (reward_model.ground_truth)."""

    question: OptionalText = setting(
        None, "column of the question, a string or a list of messages; none: question, problem or prompt"
    )
    answer: OptionalText = setting(
        None, "column of the correct answer or a list of them; none: answer or reward_model.ground_truth"
    )
    id: OptionalText = setting(None, "column of the task's id; none: id if present, else file:line")
    kind: OptionalText = setting(
        None, "column by which accuracy is reported separately; none: kind or ability, if present"
    )
    answer_after: OptionalText = setting(
        None, 'the answer is the text after the last occurrence of this, like "####"; none: all'
    )
    images: Annotated[Text | Literal[False] | None, NoneWord] = setting(
        None,
        "column of the question's image or list of images; none: image or images, if they hold images; false: the "
        "questions have no images",
    )
    image_dir: OptionalText = setting(
        None, "folder that paths of images lead into; none: that of the file with the questions"
    )
    image_urls: bool = setting(
        False, "whether images are requested from the http(s) URLs that rows name, whatever these are"
    )


class Mix(_Columns):
    """One source of training tasks among several."""

    source: Text = setting(..., "where the tasks come from, as in data.train")
    weight: int = setting(1, "relative share of the tasks that are drawn", ge=1, le=10_000)


class Data(_Columns):
    """The tasks."""

    train: OptionalText = setting(
        None,
        'training tasks: a .jsonl, .json or .parquet file, "hf:NAME:CONFIG:SPLIT", "world", "labyrinth" or '
        '"scenes"; none: data.mix, or the world if there is no mix',
    )
    test: OptionalText = setting(
        None, "held-out tasks, as in data.train; none: those that go with built-in training tasks"
    )
    mix: Annotated[tuple[Mix, ...], Field(strict=False)] = setting(
        (), "training tasks from several sources, one [[data.mix]] table each"
    )
    bad_rows: Literal["refuse", "skip"] = setting(
        "refuse", "what to do with rows that have no question and answer: stop, or leave them out"
    )
    max_prompt_tokens: Annotated[Annotated[int, Field(ge=1, le=MAX_COUNT)] | None, NoneWord] = setting(
        None, "training tasks with a longer prompt are left out; none: a prompt too long is an error"
    )
    curriculum: int = setting(
        0,
        "tasks that were all correct or all wrong in this many last visits come up in only every fourth epoch; 0: "
        "no curriculum",
        ge=0,
        le=1000,
    )

    @field_validator("mix")
    @classmethod
    def _mix_or_train(cls, value: tuple[Mix, ...], info: ValidationInfo) -> tuple[Mix, ...]:
        if value and info.data.get("train") is not None:
            text = "no tables where data.train is set"
            raise PydanticCustomError("conflict", "{text}", {"text": text, "other": ("data", "train")})
        return value

    @property
    def training(self) -> tuple[Mix, ...]:
        """The sources of the training tasks; a single one is a mixture of one."""
        return self.mix or (Mix(source=self.train or WORLD, **{name: getattr(self, name) for name in COLUMNS}),)

    @property
    def sources(self) -> tuple[str, ...]:
        """The sources of the tasks that settings should fit; one who names only test tasks does not train."""
        if self.train is None and not self.mix and self.test is not None:
            return (self.test,)
        return tuple(mix.source for mix in self.training)


COLUMNS = tuple(_Columns.model_fields)
WORLD, LABYRINTH, SCENES = "world", "labyrinth", "scenes"  # in place of a file: the built-in tasks


class World(Section):
    """The built-in generated world."""

    seed: int = setting(0, "seed of the world", ge=0, le=MAX_SEED)
    entities: int = setting(1000, "number of people, firms, towns and regions", ge=60, le=2000)
    train_questions: int = setting(2000, "number of training questions", ge=1, le=100_000)
    test_questions: int = setting(300, "number of held-out questions", ge=1, le=100_000)
    difficulty: float = setting(
        0.5, "share of long questions, and rate of mistakes in the cold-start traces", ge=0, le=1
    )


class Labyrinth(Section):
    """The built-in generated labyrinths."""

    seed: int = setting(0, "seed of the labyrinths", ge=0, le=MAX_SEED)
    train_tasks: int = setting(2000, "number of training tasks", ge=1, le=100_000)
    test_tasks: int = setting(300, "number of held-out tasks", ge=1, le=100_000)
    horizon: int = setting(12, "tool calls of the longest solution; the shortest has 6", ge=6, le=16)
    ambiguity: int = setting(3, "keys, and ways, among which one is right", ge=2, le=6)
    difficulty: float = setting(
        0.85, "how often the cold-start traces take what is named first instead of what the note says", ge=0, le=1
    )


class Scenes(Section):
    """The built-in generated scenes: pictures to zoom into."""

    seed: int = setting(0, "seed of the scenes", ge=0, le=MAX_SEED)
    train_tasks: int = setting(1000, "number of training tasks", ge=1, le=20_000)
    test_tasks: int = setting(300, "number of held-out tasks", ge=1, le=20_000)


class Mcp(Section):
    """One MCP server whose tools the model may call: a command to start, or a URL.

        Mcp(command="npx", args=["-y", "some-server"], env={"KEY": "${SOME_KEY}"}, only=["fetch"])
        Mcp(url="https://example.com/mcp", token_env="SOME_TOKEN")

    `env` are further environment variables of the command, `token_env` is the name of the variable that holds the
    bearer token, `only` are the names of the tools to use (default: all).
    """

    command: OptionalText = setting(None, "program that speaks MCP over stdio")
    args: Names = setting((), "arguments of the command")
    env: dict[str, str] = setting({}, "additional environment variables of the command")
    url: OptionalText = setting(None, "URL of a server that speaks streamable HTTP")
    token_env: OptionalText = setting(None, "environment variable that holds the bearer token for the URL")
    only: Names = setting((), "names of the tools that are used; empty: all")

    @model_validator(mode="after")
    def _one_way(self) -> Mcp:
        if (self.command is None) == (self.url is None):
            raise PydanticCustomError("one_way", "either command or url")
        return self


class Tools(Section):
    """What the model may call."""

    enabled: Names = Field(
        default_factory=tuple,
        description="tools of the model: search, python, browse, or your own as path/to/file.py:name; tools of MCP "
        "servers and of an environment are added; unset: python, and search if tools.search is set or the tasks are "
        "the world's; with an environment or a program none",
    )
    search: OptionalText = setting(
        None,
        "where search looks: a file of documents, an index folder, the URL of a /retrieve server, or serper, "
        "tavily, brave; none: the world's documents",
    )
    search_mode: Literal["bm25", "dense", "hybrid"] = setting(
        "bm25", "how an index folder is searched; dense and hybrid need one built with --dense"
    )
    search_results: int = setting(2, "documents in one search result", ge=1, le=1000)
    timeout: float = setting(10.0, "time limit of one call, in seconds", gt=0, le=86_400)  # the sandbox takes no more
    max_result_tokens: int = setting(512, "longer tool results are cut to this many tokens", ge=1, le=1_000_000)
    python_memory_mb: int = setting(512, "memory limit of one execution of code, in MB", ge=16, le=2**20)
    python_blocks: bool = setting(False, "wait for each execution on the event loop: slower, but runs are reproducible")
    python_figures: bool = setting(
        False, "show figures that code makes with matplotlib, for a model that sees; the tool python only"
    )
    unsafe_no_isolation: bool = setting(
        False, "run model-written code with your own rights where it cannot be isolated"
    )
    browse_url: OptionalText = setting(
        None, "OpenAI-compatible endpoint that condenses pages; none: keep the best paragraphs"
    )
    browse_model: OptionalText = setting(None, "model to use at browse_url")
    cache: OptionalText = setting(None, "file that stores tool results for all runs that name it; none: no cache")
    cache_mode: Literal["on", "record", "replay"] = setting(
        "on", "on: use and fill the cache; record: make every call and store it; replay: make no call"
    )
    mcp: Annotated[tuple[Mcp, ...], Field(strict=False)] = setting((), "MCP servers, one [[tools.mcp]] table each")


class Environment(Section):
    """Tools with a state of their own for each trajectory, which forks with the branch."""

    name: OptionalText = setting(
        None,
        "the environment: python, sqlite, images, gymnasium, openenv, labyrinth, or your class as path/to/file.py:name;"
        " none: tools without state",
    )
    settings: dict[str, JsonValue] = setting({}, "keyword arguments of the environment's class")
    timeout: float = setting(60.0, "time limit of a reset, a fork or a close, in seconds", gt=0, le=86_400)
    max_states: int = setting(
        1024,
        "environments alive at a time; of those not in use, the least recently used is dropped, and made again from "
        "its recorded calls when needed",
        ge=2,
        le=MAX_TRAJECTORIES,
    )


class Program(Section):
    """An agent that is a program of its own, and asks the model at a local chat endpoint."""

    function: OptionalText = setting(
        None, "your function of (task, endpoint), as path/to/file.py:name; it is run once per trajectory; none: none"
    )
    command: Names = setting(
        (), "a command and its arguments, run once per trajectory, in place of a function; it reads the task from stdin"
    )

    @property
    def name(self) -> str | None:
        """What is run, for messages; None if there is no program."""
        return self.function or " ".join(self.command) or None

    @field_validator("command")
    @classmethod
    def _either(cls, value: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        if value and info.data.get("function") is not None:
            raise PydanticCustomError(
                "conflict", "{text}", {"text": "empty if program.function is set", "other": ("program", "function")}
            )
        return value


class Model(Section):
    """The model that is trained."""

    path: Text = setting(
        "tiny", 'a Hugging Face directory, a hub name, a GGUF file, a run (its last checkpoint), or "tiny" (built in)'
    )
    adapter: OptionalText = setting(
        None,
        "directory of a LoRA adapter; merged into the model, or trained further if train.lora_rank is not 0; none: "
        "no adapter",
    )
    device: Literal["auto", "cpu", "cuda"] = setting("auto", "auto: CUDA if available, else CPU")
    dtype: Literal["float32", "bfloat16"] = setting(
        "float32", "data type of the weights; bfloat16 trains with float32 master weights"
    )


class Prompt(Section):
    """What stands before the question."""

    system: OptionalText = setting(
        None,
        "system prompt: a text, or a file (.txt or .md); where it says {tools}, or at its end, the tools are "
        "described, unless the chat template does so; none: a prompt that fits the format and answer.parse",
    )
    template_arguments: dict[str, JsonValue] = setting(
        {}, "further arguments of the model's chat template, like {enable_thinking = false}"
    )
    from_data: bool = setting(True, "use a task's own system message, if it has one, in place of prompt.system")


class Answer(Section):
    """How the answer is read from a model's last message."""

    parse: OptionalText = setting(
        None,
        "tag: \\boxed{...} in <answer>...</answer>; boxed: the last \\boxed{...}; last_line; final_message: all of it "
        "but its thoughts; regex:PATTERN: its last match, or group 1 of it; or your function of the message, as "
        "path/to/file.py:name; none: tag, and in the format native boxed",
    )


class Rollout(Section):
    """How trajectories are sampled."""

    format: Literal["auto", "native", "tags", "json"] = setting(
        "auto",
        "format of tool calls: the model's own, by its chat template (native); <search>...</search> tags; JSON in "
        "<tool_call> tags; auto: native if the chat template describes tools and is exact, else tags",
    )
    num_trajectories: int = setting(16, "M: trajectories per task", ge=1, le=MAX_GROUP)
    num_initial: int = Field(
        default_factory=lambda data: max(1, data.get("num_trajectories", 1) // 2),
        ge=1,
        le=MAX_GROUP,
        description="N: trajectories started at the prompt; unset: M / 2, or M if branching.policy is never",
    )
    examples: OptionalText = setting(
        None, "file of traces used as few-shot examples at the start of every prompt; none: none"
    )
    max_tool_calls: int = Field(
        default_factory=lambda: 3,
        ge=0,
        le=10_000,
        description="tool calls per trajectory; unset: 3, 10 with an environment, labyrinth.horizon + 2 in labyrinths; "
        "of a program: requests after the first, unset: 32",
    )
    max_tokens: int = setting(4096, "tokens per trajectory after the prompt", ge=1, le=MAX_TREE_TOKENS)
    max_seconds: float = setting(600.0, "wall-clock limit per trajectory, in seconds", gt=0, le=MAX_SECONDS)
    temperature: float = setting(1.0, "sampling temperature", gt=0, le=100)
    top_p: float = setting(1.0, "sample from the likeliest tokens of this total probability", gt=0, le=1)
    top_k: int = setting(0, "sample from this many likeliest tokens; 0: all", ge=0, le=10_000_000)
    concurrency: int = setting(128, "trajectories sampled at the same time, over all tasks", ge=1, le=65_536)
    engine: Literal["local", "vllm"] = setting("local", "inference engine: built in, or vLLM")
    servers: Names = setting((), "addresses of vLLM servers, for engine vllm; empty: arpo starts vLLM itself")
    top_logprobs: int = setting(
        64, "number of likeliest tokens from which vLLM's entropies are estimated", ge=1, le=1_000_000
    )
    kv_cache_tokens: int = setting(
        0, "size of the engine's KV cache, in tokens; 0: as many as fit into memory", ge=0, le=1_000_000_000
    )

    @field_validator("num_initial")
    @classmethod
    def _initial_fits(cls, value: int, info: ValidationInfo) -> int:
        return cls.at_most(value, info, "rollout", "num_trajectories")


Weight = Annotated[float, Field(ge=-MAX_FACTOR, le=MAX_FACTOR)]


class Rewards(Section):
    """The reward of a trajectory."""

    accuracy: Text = setting(
        "f1",
        "how answers are compared: f1, em, number, math, choice, judge, or your function, as path/to/file.py:name "
        "or package.module:name",
    )
    by_kind: dict[str, Text] = setting({}, "a different accuracy for some kinds of tasks (data.kind)")
    function: Annotated[Text | Annotated[dict[str, Weight], Field(min_length=1)] | None, NoneWord] = setting(
        None,
        "your function, named in the same way, that replaces the whole reward; or a table of several and their weights",
    )
    format: Text = setting(
        "auto",
        "what counts as the right format: auto: the rules of rollout.format and answer.parse; none: anything; or your "
        "function of a trajectory, as path/to/file.py:name, that returns what is wrong, or nothing",
    )
    bonus: float = setting(0.1, "added to a correct answer that used all of bonus_tools", ge=0, le=MAX_FACTOR)
    bonus_tools: Names = Field(
        default_factory=tuple,
        description="tools that must all be used for the bonus; unset: search and python, if both are in "
        "tools.enabled, else there is no bonus",
    )
    tolerance: float = setting(1e-6, "number: relative difference that is still correct", ge=0, lt=1)
    math_seconds: float = setting(3.0, "math: time limit for comparing one answer, in seconds", gt=0, le=3600)
    judge_url: OptionalText = setting(None, "judge: OpenAI-compatible endpoint, like http://localhost:8000/v1")
    judge_model: OptionalText = setting(None, "judge: model to use at judge_url")
    judge_key_env: OptionalText = setting(
        None, "judge: environment variable that holds the API key; none: no key is sent"
    )
    workers: int = setting(8, "trajectories scored at the same time", ge=1, le=256)
    overlong: float = setting(
        0.0,
        "soft length penalty: in this last share of rollout.max_tokens the reward falls by up to 1; 0: off",
        ge=0,
        le=1,
    )

    @field_validator("accuracy", "by_kind")
    @classmethod
    def _accuracy_is_known(cls, value: str | dict[str, str]) -> str | dict[str, str]:
        known = ("f1", "em", "number", "math", "choice", "judge")
        given = [value] if isinstance(value, str) else value.values()
        if any(name not in known and ":" not in name for name in given):
            names = ", ".join(f'"{name}"' for name in known)
            text = f"one of {names} or path/to/file.py:name"
            raise PydanticCustomError("one_way", "{text}", {"text": text, "choices": known})
        return value

    @field_validator("format")
    @classmethod
    def _format_is_known(cls, value: str) -> str:
        known = ("auto", "none")
        if value not in known and ":" not in value:
            text = '"auto", "none" or path/to/file.py:name'
            raise PydanticCustomError("one_way", "{text}", {"text": text, "choices": known})
        return value


Beta = Annotated[float, Field(ge=0, lt=1)]


class Train(Section):
    """The optimizer and the training loop."""

    steps: int = setting(100, "training steps, each with a batch of new trees", ge=1, le=MAX_COUNT)
    budget: int = setting(
        0, "stop after the step that has used this much, if before train.steps; 0: no budget", ge=0, le=10**15
    )
    budget_unit: Literal["tool_calls", "trajectories", "sampled_tokens"] = setting(
        "tool_calls", "what train.budget counts; calls and tokens of shared prefixes count once"
    )
    batch_size: int = setting(16, "tasks per step", ge=1, le=65_536)
    dynamic_sampling_rounds: int = setting(
        0,
        "up to this many times per step, tasks whose trajectories earned equal rewards are replaced by others; 0: "
        "never",
        ge=0,
        le=1000,
    )
    minibatches: int = setting(1, "optimizer steps per pass over a batch", ge=1, le=65_536)
    epochs: int = setting(1, "passes over each batch, all with the old log-probs from before the first", ge=1, le=1000)
    lr: float = setting(1e-6, "learning rate", gt=0, le=MAX_FACTOR)
    warmup_steps: int = setting(0, "optimizer steps of linear warmup", ge=0, le=MAX_COUNT)
    betas: Annotated[tuple[Beta, Beta], Field(strict=False)] = setting(
        (0.9, 0.99), "AdamW's decay rates of the gradient's mean and of its square's"
    )
    weight_decay: float = setting(0.0, "weight decay", ge=0, le=MAX_FACTOR)
    max_grad_norm: float = setting(1.0, "gradients are clipped to this norm", gt=0, le=1e30)
    max_microbatch_tokens: int = setting(
        16384, "tokens in one forward pass; larger trees are split", ge=1, le=MAX_BATCH_TOKENS
    )
    mask_infra_faults: bool = setting(
        True, "leave trajectories out of training that a broken tool, engine or judge spoiled"
    )
    lora_rank: int = setting(0, "rank of the LoRA adapter to train; 0: train all weights", ge=0, le=1024)
    lora_alpha: int = setting(32, "the adapter is scaled by lora_alpha / lora_rank", ge=1, le=1_000_000)
    lora_targets: Names = setting(
        ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
        "linear layers that get an adapter",
        min_length=1,
    )
    gradient_checkpointing: bool = setting(
        False, "recompute activations in the backward pass: less memory, a third more time"
    )
    on_collapse: Literal["warn", "stop", "ignore"] = setting(
        "warn",
        "at signs of collapse: print a warning; stop with exit code 3 and return to the last checkpoint before "
        "them; or do nothing",
    )

    @field_validator("minibatches")
    @classmethod
    def _minibatches_fit(cls, value: int, info: ValidationInfo) -> int:
        return cls.at_most(value, info, "train", "batch_size")


class Eval(Section):
    """Evaluation."""

    every: int = setting(0, "training steps between evaluations; 0: none", ge=0, le=MAX_COUNT)
    questions: int = setting(200, "number of held-out tasks used", ge=1, le=MAX_COUNT)
    samples: int = setting(1, "trajectories per task", ge=1, le=MAX_GROUP)
    temperature: float = setting(0.6, "sampling temperature; 0: greedy", ge=0, le=100)
    top_p: float = setting(0.95, "sample from the likeliest tokens of this total probability", gt=0, le=1)
    top_k: int = setting(0, "sample from this many likeliest tokens; 0: all", ge=0, le=10_000_000)
    endpoint: OptionalText = setting(None, "OpenAI-compatible endpoint that is evaluated instead of a local model")
    endpoint_model: OptionalText = setting(None, "model to use at the endpoint")
    endpoint_key_env: OptionalText = setting(
        None, "environment variable that holds the endpoint's API key; none: no key is sent"
    )
    endpoint_timeout: float = setting(300.0, "time limit of one turn at the endpoint, in seconds", gt=0, le=MAX_SECONDS)


def _as_names(value: Any) -> Any:
    """A single name becomes a list of one, and "none" an empty list."""
    if isinstance(value, str):
        return () if value == "none" else (value,)
    return value


class Run(Section):
    """Where results go."""

    dir: Text = setting("runs/arpo", "directory of the run")
    checkpoint_every: int = setting(10, "steps between checkpoints", ge=1, le=MAX_COUNT)
    keep_checkpoints: int = setting(2, "number of newest checkpoints that are kept", ge=1, le=MAX_COUNT)
    save_trees: bool = setting(True, "save every rollout tree")
    tracker: Annotated[Names, BeforeValidator(_as_names)] = setting(
        (),
        'experiment trackers to log to: "tensorboard", "wandb", "mlflow", "trackio", or a list of them; none: no '
        "tracker",
    )
    tracker_trees: int = setting(
        10, "steps between pictures of a tree that are sent to trackers; 0: no pictures", ge=0, le=MAX_COUNT
    )

    @field_validator("tracker")
    @classmethod
    def _tracker_is_known(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        known = ("tensorboard", "wandb", "mlflow", "trackio")
        if len(set(value)) < len(value) or not set(value) <= set(known):
            names = ", ".join(f'"{name}"' for name in known)
            text = f'"none", one of {names}, or a list of such names'
            raise PydanticCustomError("one_way", "{text}", {"text": text, "choices": known})
        return value


class Coldstart(Section):
    """How the built-in model is made."""

    seed: int = setting(0, "seed of the cold start", ge=0, le=MAX_SEED)
    traces: int = setting(3000, "number of traces to imitate", ge=1, le=100_000)
    steps: int = setting(150, "optimizer steps", ge=1, le=MAX_COUNT)
    batch_tokens: int = setting(2048, "tokens per optimizer step", ge=1, le=MAX_BATCH_TOKENS)
    lr: float = setting(5e-4, "learning rate", gt=0, le=MAX_FACTOR)


class Sft(Section):
    """Supervised fine-tuning on traces: `arpo sft`."""

    data: Text = setting("traces.jsonl", "traces: a .jsonl, .json or .parquet file, or hf:NAME")
    epochs: int = setting(3, "passes over the traces", ge=1, le=1000)
    batch_tokens: int = setting(
        32768, "tokens per optimizer step, prompts and tool results included", ge=1, le=MAX_BATCH_TOKENS
    )
    lr: float = setting(7e-6, "learning rate", gt=0, le=MAX_FACTOR)
    warmup_steps: int = setting(20, "optimizer steps of linear warmup", ge=0, le=MAX_COUNT)


class Cluster(Section):
    """Sampling on other machines: `arpo train` on a Ray cluster."""

    address: OptionalText = setting(
        None, 'a running Ray cluster: "auto" on one of its machines, or host:port of its head; none: no cluster'
    )
    max_off_policy_steps: int = setting(
        0, "steps that sampling may run ahead of training, with older weights", ge=0, le=64
    )
    trainers: int = setting(
        1, "processes that train together in shards (FSDP), each on a GPU of its own if any", ge=1, le=16_384
    )
    actors: int = setting(
        0,
        "processes that sample; 0: one per GPU, or per machine without GPU, machines that join included",
        ge=0,
        le=16_384,
    )


DERIVED = (
    ("reward", "bonus_tools"),
    ("tools", "enabled"),
    ("rollout", "max_tool_calls"),
    ("rollout", "num_initial"),
    ("environment", "name"),
)
"""Settings whose default follows from others; one stands before those that its own default follows from."""


class Config(Section):
    """All settings of a run."""

    seed: int = setting(0, "seed of all randomness of the run", ge=0, le=MAX_SEED)
    preset: Text = setting("arpo", "named settings below your own: the name of a preset, or a TOML file of yours")
    model: Model = Model()
    data: Data = Data()
    world: World = World()
    labyrinth: Labyrinth = Labyrinth()
    scenes: Scenes = Scenes()
    tools: Tools = Tools()
    environment: Environment = Environment()
    program: Program = Program()
    prompt: Prompt = Prompt()
    answer: Answer = Answer()
    rollout: Rollout = Rollout()
    branching: Branching = Branching()
    reward: Rewards = Rewards()
    advantage: Advantage = Advantage()
    loss: Loss = Loss()
    train: Train = Train()
    eval: Eval = Eval()
    run: Run = Run()
    cluster: Cluster = Cluster()
    coldstart: Coldstart = Coldstart()
    sft: Sft = Sft()

    @model_validator(mode="after")
    def _step_fits(self) -> Config:
        limit = MAX_TRAJECTORIES // self.rollout.num_trajectories
        if self.train.batch_size > limit:
            text = f"at most {limit}, which makes {MAX_TRAJECTORIES} trajectories per step: with fewer, take more steps"
            names = {"path": ("train", "batch_size"), "other": ("rollout", "num_trajectories")}
            raise PydanticCustomError("conflict", "{text}", {"text": text, **names})
        return self

    @model_validator(mode="after")
    def _defaults_that_depend_on_other_sections(self) -> Config:
        if LABYRINTH in self.data.sources:
            self._default("environment", name=LABYRINTH)
            self._default("rollout", max_tool_calls=self.labyrinth.horizon + 2)
        if SCENES in self.data.sources:
            self._default("environment", name="images")
            if self.environment.name == "images":  # the size that its model sees
                self._default("environment", settings={"min_side": 64, "blocking": True})
            self._default("rollout", max_tool_calls=6)
        with_environment = self.environment.name is not None
        if self.branching.policy == "never":
            self._default("rollout", num_initial=self.rollout.num_trajectories)
        if with_environment:
            self._default("rollout", max_tool_calls=10)
        with_program = self.program.name is not None
        if with_program:
            self._default("rollout", max_tool_calls=32)
            self._default("reward", format="none")
        searched = WORLD in self.data.sources or self.tools.search is not None
        enabled = ("search", "python") if searched else ("python",)
        self._default("tools", enabled=() if with_environment or with_program else enabled)
        both = {"search", "python"} <= set(self.tools.enabled)
        self._default("reward", bonus_tools=("search", "python") if both else ())
        return self

    def _default(self, section: str, **values: Any) -> None:
        """Set values of a section that were not given."""
        given: Section = getattr(self, section)
        missing = {name: value for name, value in values.items() if name not in given.model_fields_set}
        if missing:
            object.__setattr__(self, section, given.model_copy(update=missing))

    def resolved(self, reveal: bool = False) -> dict[str, Any]:
        """Every setting with its value, ready for JSON; secrets are masked, except with `reveal`, for a process that
        uses them."""
        return self.model_dump(mode="json", context={"reveal": reveal})
