"""Every setting: its type, range, default and a one-line description. All values are frozen.

Functions take the section they need (`decide(Branching(...), ...)`), so each setting is described once. Reading
settings from files and the command line is in `arpo.config.loading`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticCustomError

Text = Annotated[str, Field(min_length=1)]
Names = Annotated[tuple[Text, ...], Field(strict=False)]  # TOML and JSON have lists, no tuples
NoneWord = BeforeValidator(lambda value: None if value == "none" else value)  # TOML has no null
OptionalText = Annotated[Text | None, NoneWord]
MAX_SEED = 2**32 - 1  # what every random generator in use accepts


class Section(BaseModel):
    """Base of all sections: frozen, strict about types, and unknown names are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    @staticmethod
    def at_most(value: int, info: ValidationInfo, section: str, other: str) -> int:
        """Return the value if it does not exceed another setting of the section, or raise."""
        limit = info.data.get(other, value)  # absent if it is invalid itself
        if value > limit:
            text = f"at most {section}.{other}, which is {limit}"
            raise PydanticCustomError("conflict", "{text}", {"text": text, "other": (section, other)})
        return value


class _Columns(Section):
    """Which column of a row holds what; a dot leads to a field inside a column (reward_model.ground_truth)."""

    question: OptionalText = Field(
        default=None,
        description="column of the question, a string or a list of messages; none: question, problem or prompt",
    )
    answer: OptionalText = Field(
        default=None,
        description="column of the correct answer or a list of them; none: answer or reward_model.ground_truth",
    )
    id: OptionalText = Field(default=None, description="column of the task's id; none: id if present, else file:line")
    kind: OptionalText = Field(
        default=None, description="column by which accuracy is reported separately; none: kind or ability, if present"
    )
    answer_after: OptionalText = Field(
        default=None, description='the answer is the text after the last occurrence of this, like "####"; none: all'
    )


class Mix(_Columns):
    """One source of training tasks among several."""

    source: Text = Field(description="where the tasks come from, as in data.train")
    weight: int = Field(default=1, ge=1, le=10_000, description="relative share of the tasks that are drawn")


class Data(_Columns):
    """The tasks."""

    train: OptionalText = Field(
        default=None,
        description='training tasks: a .jsonl, .json or .parquet file, "hf:NAME:CONFIG:SPLIT", or "world"; none: '
        "data.mix, or the world if there is no mix",
    )
    test: OptionalText = Field(
        default=None, description="held-out tasks, as in data.train; none: the world's if data.train is the world"
    )
    mix: Annotated[tuple[Mix, ...], Field(strict=False)] = Field(
        default=(), description="training tasks from several sources, one [[data.mix]] table each"
    )
    bad_rows: Literal["refuse", "skip"] = Field(
        default="refuse", description="what to do with rows that have no question and answer: stop, or leave them out"
    )
    max_prompt_tokens: Annotated[Annotated[int, Field(ge=1)] | None, NoneWord] = Field(
        default=None,
        description="training tasks with a longer prompt are left out; none: a prompt too long is an error",
    )
    curriculum: int = Field(
        default=0,
        ge=0,
        description="tasks that were all correct or all wrong in this many last visits come up in only every fourth "
        "epoch; 0: no curriculum",
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
        return self.mix or (Mix(source=self.train or "world", **{name: getattr(self, name) for name in COLUMNS}),)


COLUMNS = tuple(_Columns.model_fields)


class World(Section):
    """The built-in generated world."""

    seed: int = Field(default=0, ge=0, le=MAX_SEED, description="seed of the world")
    entities: int = Field(default=1000, ge=60, le=2000, description="number of people, firms, towns and regions")
    train_questions: int = Field(default=2000, ge=1, description="number of training questions")
    test_questions: int = Field(default=300, ge=1, description="number of held-out questions")
    difficulty: float = Field(
        default=0.5, ge=0, le=1, description="share of long questions, and rate of mistakes in the cold-start traces"
    )


class Mcp(Section):
    """One MCP server whose tools the model may call: a command to start, or a URL."""

    command: OptionalText = Field(default=None, description="program that speaks MCP over stdio")
    args: Names = Field(default=(), description="arguments of the command")
    env: dict[str, str] = Field(default={}, description="additional environment variables of the command")
    url: OptionalText = Field(default=None, description="URL of a server that speaks streamable HTTP")
    token_env: OptionalText = Field(
        default=None, description="environment variable that holds the bearer token for the URL"
    )
    only: Names = Field(default=(), description="names of the tools that are used; empty: all")

    @model_validator(mode="after")
    def _one_way(self) -> Mcp:
        if (self.command is None) == (self.url is None):
            raise PydanticCustomError("one_way", "either command or url")
        return self


class Tools(Section):
    """What the model may call."""

    enabled: Names = Field(
        default=("search", "python"),
        description="tools of the model: search, python, browse, or your own as path/to/file.py:name; tools of MCP "
        "servers are added",
    )
    search: OptionalText = Field(
        default=None,
        description="where search looks: a file of documents, an index folder, the URL of a /retrieve server, or "
        "serper, tavily, brave; none: the world's documents",
    )
    search_mode: Literal["bm25", "dense", "hybrid"] = Field(
        default="bm25", description="how an index folder is searched; dense and hybrid need one built with --dense"
    )
    search_results: int = Field(default=2, ge=1, description="documents in one search result")
    timeout: float = Field(default=10.0, gt=0, description="time limit of one call, in seconds")
    max_result_tokens: int = Field(default=512, ge=1, description="longer tool results are cut to this many tokens")
    python_memory_mb: int = Field(default=512, ge=16, description="memory limit of one execution of code, in MB")
    python_blocks: bool = Field(
        default=False, description="wait for each execution on the event loop: slower, but runs are reproducible"
    )
    unsafe_no_isolation: bool = Field(
        default=False, description="run model-written code with your own rights where it cannot be isolated"
    )
    browse_url: OptionalText = Field(
        default=None, description="OpenAI-compatible endpoint that condenses pages; none: keep the best paragraphs"
    )
    browse_model: OptionalText = Field(default=None, description="model to use at browse_url")
    cache: OptionalText = Field(
        default=None, description="file that stores tool results for all runs that name it; none: no cache"
    )
    cache_mode: Literal["on", "record", "replay"] = Field(
        default="on",
        description="on: use and fill the cache; record: make every call and store it; replay: make no call",
    )
    mcp: Annotated[tuple[Mcp, ...], Field(strict=False)] = Field(
        default=(), description="MCP servers, one [[tools.mcp]] table each"
    )


class Model(Section):
    """The model that is trained."""

    path: Text = Field(
        default="tiny",
        description='a Hugging Face directory, a hub name, a GGUF file, a run (its last checkpoint), or "tiny" (built '
        "in)",
    )
    adapter: OptionalText = Field(
        default=None,
        description="directory of a LoRA adapter; merged into the model, or trained further if train.lora_rank is "
        "not 0; none: no adapter",
    )
    device: Literal["auto", "cpu", "cuda"] = Field(default="auto", description="auto: CUDA if available, else CPU")
    dtype: Literal["float32", "bfloat16"] = Field(
        default="float32", description="data type of the weights; bfloat16 trains with float32 master weights"
    )


class Rollout(Section):
    """How trajectories are sampled."""

    format: Literal["tags", "json"] = Field(
        default="tags", description="format of tool calls: <search>...</search> tags, or JSON in <tool_call> tags"
    )
    num_trajectories: int = Field(default=16, ge=1, description="M: trajectories per task")
    num_initial: int = Field(
        default_factory=lambda data: max(1, data.get("num_trajectories", 1) // 2),
        ge=1,
        description="N: trajectories started at the prompt; unset: M / 2, or M if branching.policy is never",
    )
    examples: OptionalText = Field(
        default=None, description="file of traces used as few-shot examples at the start of every prompt; none: none"
    )
    max_tool_calls: int = Field(default=3, ge=0, description="tool calls per trajectory")
    max_tokens: int = Field(default=4096, ge=1, description="tokens per trajectory after the prompt")
    max_seconds: float = Field(default=600.0, gt=0, description="wall-clock limit per trajectory, in seconds")
    temperature: float = Field(default=1.0, gt=0, description="sampling temperature")
    top_p: float = Field(
        default=1.0, gt=0, le=1, description="sample from the likeliest tokens of this total probability"
    )
    top_k: int = Field(default=0, ge=0, description="sample from this many likeliest tokens; 0: all")
    concurrency: int = Field(default=128, ge=1, description="trajectories sampled at the same time, over all tasks")
    engine: Literal["local", "vllm"] = Field(default="local", description="inference engine: built in, or vLLM")
    servers: Names = Field(
        default=(), description="addresses of vLLM servers, for engine vllm; empty: arpo starts vLLM itself"
    )
    top_logprobs: int = Field(
        default=64, ge=1, description="number of likeliest tokens from which vLLM's entropies are estimated"
    )
    kv_cache_tokens: int = Field(
        default=0, ge=0, description="size of the engine's KV cache, in tokens; 0: as many as fit into memory"
    )

    @field_validator("num_initial")
    @classmethod
    def _initial_fits(cls, value: int, info: ValidationInfo) -> int:
        return cls.at_most(value, info, "rollout", "num_trajectories")


class Branching(Section):
    """Where a rollout tree branches."""

    policy: Literal["entropy", "random", "always", "posthoc_random", "posthoc_entropy", "never"] = Field(
        default="entropy",
        description="where to branch: after tool results, by entropy, at random (with probability alpha) or always; "
        "when all initial trajectories have ended, at random tool results (posthoc_random) or those with the largest "
        "entropy rise (posthoc_entropy); never",
    )
    rule: Literal["threshold", "stochastic"] = Field(
        default="threshold", description="policy entropy: branch if P > tau, or with probability P"
    )
    alpha: float = Field(default=0.5, ge=0, le=1, description="base probability in P = alpha + beta * dH")
    beta: float = Field(default=0.2, ge=0, description="weight of the entropy change dH in P")
    tau: float = Field(default=0.5, ge=0, le=1, description="threshold on P")
    probe_tokens: int = Field(default=20, ge=1, description="k: number of tokens whose mean entropy is measured")
    branch_width: int = Field(default=1, ge=1, description="Z: trajectories added at one branch point")
    penalty: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="policy entropy: P shrinks by this share for each consecutive branch point just before",
    )
    fill: Literal["all", "informative"] = Field(
        default="all",
        description="which tasks get the trajectories missing from M when all have ended: all, or those whose "
        "trajectories earned unequal rewards",
    )
    balance: Annotated[Annotated[float, Field(ge=0)] | None, NoneWord] = Field(
        default=None,
        description="N = M sigmoid(balance (H at the start - H after tools)), measured on a first trajectory; none: N "
        "is rollout.num_initial",
    )


class Rewards(Section):
    """The reward of a trajectory."""

    accuracy: Text = Field(
        default="f1",
        description="how answers are compared: f1, em, number, math, choice, judge, or your function, as "
        "path/to/file.py:name or package.module:name",
    )
    by_kind: dict[str, Text] = Field(default={}, description="a different accuracy for some kinds of tasks (data.kind)")
    function: OptionalText = Field(
        default=None, description="your function, named in the same way, that replaces the whole reward"
    )
    bonus: float = Field(default=0.1, ge=0, description="added to a correct answer that used all of bonus_tools")
    bonus_tools: Names = Field(default=("search", "python"), description="tools that must all be used for the bonus")
    tolerance: float = Field(default=1e-6, ge=0, lt=1, description="number: relative difference that is still correct")
    math_seconds: float = Field(default=3.0, gt=0, description="math: time limit for comparing one answer, in seconds")
    judge_url: OptionalText = Field(
        default=None, description="judge: OpenAI-compatible endpoint, like http://localhost:8000/v1"
    )
    judge_model: OptionalText = Field(default=None, description="judge: model to use at judge_url")
    judge_key_env: OptionalText = Field(
        default=None, description="judge: environment variable that holds the API key; none: no key is sent"
    )
    workers: int = Field(default=8, ge=1, le=256, description="trajectories scored at the same time")
    overlong: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="soft length penalty: in this last share of rollout.max_tokens the reward falls by up to 1; 0: off",
    )

    @field_validator("accuracy", "by_kind")
    @classmethod
    def _accuracy_is_known(cls, value: str | dict[str, str]) -> str | dict[str, str]:
        known = ("f1", "em", "number", "math", "choice", "judge")
        given = [value] if isinstance(value, str) else value.values()
        if any(name not in known and ":" not in name for name in given):
            names = ", ".join(f'"{name}"' for name in known)
            raise PydanticCustomError("one_way", "{text}", {"text": f"one of {names} or path/to/file.py:name"})
        return value


class Advantage(Section):
    """How rewards become advantages."""

    baseline: Literal["group", "leave_one_out", "batch", "tree"] = Field(
        default="group",
        description="what is subtracted from a reward: the mean of the task's trajectories, of its other trajectories, "
        "of the whole batch, or (tree) of the task's and of those that share its first turn",
    )
    scale: Literal["std", "none"] = Field(
        default="std", description="whether advantages are divided by the standard deviation of the same rewards"
    )
    attribution: Literal["soft", "hard"] = Field(
        default="soft",
        description="tokens shared by several trajectories: each trajectory's advantage counts (soft), or their mean "
        "does (hard)",
    )
    entropy_weight: float = Field(
        default=0.0,
        ge=0,
        description="a token's policy term is weighted with 1 + entropy_weight * z, at least 0, where z is its "
        "entropy's z-score",
    )


class Loss(Section):
    """The policy-gradient loss."""

    kind: Literal["ppo", "gspo", "cispo"] = Field(
        default="ppo",
        description="what is clipped: the ratio of each token (ppo), of the whole trajectory (gspo), or the weight of "
        "each token's gradient (cispo)",
    )
    clip_low: float = Field(default=0.2, gt=0, le=1, description="ratios are clipped below 1 - clip_low")
    clip_high: float = Field(default=0.2, gt=0, description="ratios are clipped above 1 + clip_high")
    clip_keeps_gradient: bool = Field(
        default=False, description="ppo, gspo: tokens above the upper clip keep a gradient, of the clipped size"
    )
    dual_clip: Annotated[Annotated[float, Field(gt=1)] | None, NoneWord] = Field(
        default=3.0, description="upper limit of the ratio where the advantage is negative; none: no limit"
    )
    aggregation: Literal["token-mean", "sequence-mean", "constant"] = Field(
        default="sequence-mean",
        description="mean over all tokens, mean over trajectories of their token means, or (constant) token sums "
        "divided by rollout.max_tokens",
    )
    kl_coef: float = Field(
        default=0.0, ge=0, description="coefficient of the KL divergence from the model before training"
    )
    entropy_coef: float = Field(default=0.0, ge=0, description="coefficient of the entropy bonus")
    importance_cap: Annotated[Annotated[float, Field(gt=0)] | None, NoneWord] = Field(
        default=None,
        description="truncated importance sampling (TIS): upper limit of the trainer's over the engine's probability; "
        "none: no correction",
    )


class Train(Section):
    """The optimizer and the training loop."""

    steps: int = Field(default=100, ge=1, description="training steps, each with a batch of new trees")
    budget: int = Field(
        default=0, ge=0, description="stop after the step that has used this much, if before train.steps; 0: no budget"
    )
    budget_unit: Literal["tool_calls", "trajectories", "sampled_tokens"] = Field(
        default="tool_calls", description="what train.budget counts; calls and tokens of shared prefixes count once"
    )
    batch_size: int = Field(default=16, ge=1, description="tasks per step")
    dynamic_sampling_rounds: int = Field(
        default=0,
        ge=0,
        description="up to this many times per step, tasks whose trajectories earned equal rewards are replaced by "
        "others; 0: never",
    )
    minibatches: int = Field(default=1, ge=1, description="optimizer steps per batch")
    lr: float = Field(default=1e-6, gt=0, description="learning rate")
    warmup_steps: int = Field(default=0, ge=0, description="optimizer steps of linear warmup")
    weight_decay: float = Field(default=0.0, ge=0, description="weight decay")
    max_grad_norm: float = Field(default=1.0, gt=0, description="gradients are clipped to this norm")
    max_microbatch_tokens: int = Field(
        default=16384, ge=1, description="tokens in one forward pass; larger trees are split"
    )
    mask_infra_faults: bool = Field(
        default=True, description="leave trajectories out of training that a broken tool, engine or judge spoiled"
    )
    lora_rank: int = Field(
        default=0, ge=0, le=1024, description="rank of the LoRA adapter to train; 0: train all weights"
    )
    lora_alpha: int = Field(default=32, ge=1, description="the adapter is scaled by lora_alpha / lora_rank")
    lora_targets: Names = Field(
        default=("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
        min_length=1,
        description="linear layers that get an adapter",
    )
    gradient_checkpointing: bool = Field(
        default=False, description="recompute activations in the backward pass: less memory, a third more time"
    )
    on_collapse: Literal["warn", "stop", "ignore"] = Field(
        default="warn",
        description="at signs of collapse: print a warning; stop with exit code 3 and return to the last checkpoint "
        "before them; or do nothing",
    )

    @field_validator("minibatches")
    @classmethod
    def _minibatches_fit(cls, value: int, info: ValidationInfo) -> int:
        return cls.at_most(value, info, "train", "batch_size")


class Eval(Section):
    """Evaluation."""

    every: int = Field(default=0, ge=0, description="training steps between evaluations; 0: none")
    questions: int = Field(default=200, ge=1, description="number of held-out tasks used")
    samples: int = Field(default=1, ge=1, description="trajectories per task")
    temperature: float = Field(default=0.6, ge=0, description="sampling temperature; 0: greedy")
    top_p: float = Field(
        default=0.95, gt=0, le=1, description="sample from the likeliest tokens of this total probability"
    )
    top_k: int = Field(default=0, ge=0, description="sample from this many likeliest tokens; 0: all")
    endpoint: OptionalText = Field(
        default=None, description="OpenAI-compatible endpoint that is evaluated on benchmarks instead of a local model"
    )
    endpoint_model: OptionalText = Field(default=None, description="model to use at the endpoint")
    endpoint_key_env: OptionalText = Field(
        default=None, description="environment variable that holds the endpoint's API key; none: no key is sent"
    )
    endpoint_timeout: float = Field(
        default=300.0, gt=0, description="time limit of one turn at the endpoint, in seconds"
    )


def _as_names(value: Any) -> Any:
    """A single name becomes a list of one, and "none" an empty list."""
    if isinstance(value, str):
        return () if value == "none" else (value,)
    return value


class Run(Section):
    """Where results go."""

    dir: Text = Field(default="runs/arpo", description="directory of the run")
    checkpoint_every: int = Field(default=10, ge=1, description="steps between checkpoints")
    keep_checkpoints: int = Field(default=2, ge=1, description="number of newest checkpoints that are kept")
    save_trees: bool = Field(default=True, description="save every rollout tree")
    tracker: Annotated[Names, BeforeValidator(_as_names)] = Field(
        default=(),
        description='experiment trackers to log to: "tensorboard", "wandb", "mlflow", "trackio", or a list of them; '
        "none: no tracker",
    )
    tracker_trees: int = Field(
        default=10, ge=0, description="steps between pictures of a tree that are sent to trackers; 0: no pictures"
    )

    @field_validator("tracker")
    @classmethod
    def _tracker_is_known(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        known = ("tensorboard", "wandb", "mlflow", "trackio")
        if len(set(value)) < len(value) or not set(value) <= set(known):
            names = ", ".join(f'"{name}"' for name in known)
            raise PydanticCustomError("one_way", "{text}", {"text": f'"none", one of {names}, or a list of such names'})
        return value


class Coldstart(Section):
    """How the built-in model is made."""

    seed: int = Field(default=0, ge=0, le=MAX_SEED, description="seed of the cold start")
    traces: int = Field(default=3000, ge=1, description="number of traces to imitate")
    steps: int = Field(default=150, ge=1, description="optimizer steps")
    batch_tokens: int = Field(default=2048, ge=1, description="tokens per optimizer step")
    lr: float = Field(default=5e-4, gt=0, description="learning rate")


class Sft(Section):
    """Supervised fine-tuning on traces: `arpo sft`."""

    data: Text = Field(default="traces.jsonl", description="traces: a .jsonl, .json or .parquet file, or hf:NAME")
    epochs: int = Field(default=3, ge=1, description="passes over the traces")
    batch_tokens: int = Field(
        default=32768, ge=1, description="tokens per optimizer step, prompts and tool results included"
    )
    lr: float = Field(default=7e-6, gt=0, description="learning rate")
    warmup_steps: int = Field(default=20, ge=0, description="optimizer steps of linear warmup")


class Cluster(Section):
    """Sampling on other machines: `arpo train` on a Ray cluster."""

    address: OptionalText = Field(
        default=None,
        description='a running Ray cluster: "auto" on one of its machines, or host:port of its head; none: no cluster',
    )
    max_off_policy_steps: int = Field(
        default=0, ge=0, le=64, description="steps that sampling may run ahead of training, with older weights"
    )
    trainers: int = Field(
        default=1, ge=1, description="processes that train together in shards (FSDP), each on a GPU of its own if any"
    )
    actors: int = Field(
        default=0,
        ge=0,
        description="processes that sample; 0: one per GPU, or per machine without GPU, machines that join included",
    )


class Config(Section):
    """All settings of a run."""

    seed: int = Field(default=0, ge=0, le=MAX_SEED, description="seed of all randomness of the run")
    preset: Text = Field(
        default="arpo", description="named settings below your own: the name of a preset, or a TOML file of yours"
    )
    model: Model = Model()
    data: Data = Data()
    world: World = World()
    tools: Tools = Tools()
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
    def _all_initial_when_never_branching(self) -> Config:
        if self.branching.policy == "never" and "num_initial" not in self.rollout.model_fields_set:
            rollout = self.rollout.model_copy(update={"num_initial": self.rollout.num_trajectories})
            object.__setattr__(self, "rollout", rollout)  # the one default that depends on another section
        return self

    def resolved(self) -> dict[str, Any]:
        """Every setting with its value, ready for JSON."""
        return self.model_dump(mode="json")
