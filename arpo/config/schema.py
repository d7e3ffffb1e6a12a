"""Every setting there is: its type, range, default and one-line description. Frozen values.

The functions that do the work take the section they need (`decide(Branching(...), ...)`), so each setting is described
once. How settings are read from files and the command line is in `arpo.config.loading`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticCustomError

Text = Annotated[str, Field(min_length=1)]
Names = Annotated[tuple[Text, ...], Field(strict=False)]  # TOML and JSON have lists, no tuples
NoneWord = BeforeValidator(lambda value: None if value == "none" else value)  # TOML has no null
MAX_SEED = 2**32 - 1  # what every random generator in use accepts


class Section(BaseModel):
    """What all sections share: they are frozen, and know every name in them."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    @staticmethod
    def at_most(value: int, info: ValidationInfo, section: str, other: str) -> int:
        """The value, if it is no larger than another setting of the section."""
        limit = info.data.get(other, value)  # absent if it is wrong itself
        if value > limit:
            text = f"at most {section}.{other}, which is {limit}"
            raise PydanticCustomError("conflict", "{text}", {"text": text, "other": (section, other)})
        return value


class _Columns(Section):
    """Which column of a row holds what; dots lead to what lies inside one (reward_model.ground_truth)."""

    question: Annotated[Text | None, NoneWord] = Field(
        default=None,
        description="column that holds the question, a text or a list of messages; none: question, problem or prompt",
    )
    answer: Annotated[Text | None, NoneWord] = Field(
        default=None,
        description="column that holds the right answer or a list of them; none: answer or reward_model.ground_truth",
    )
    id: Annotated[Text | None, NoneWord] = Field(
        default=None, description="column that names the question; none: id, or else file and line"
    )
    kind: Annotated[Text | None, NoneWord] = Field(
        default=None, description="column by which accuracy is told apart; none: kind or ability, where there is one"
    )
    answer_after: Annotated[Text | None, NoneWord] = Field(
        default=None, description='the answer is what follows the last of these marks, like "####"; none: all of it'
    )


class Mix(_Columns):
    """One source of training questions among several."""

    source: Text = Field(description="what data.train may be")
    weight: int = Field(default=1, ge=1, le=10_000, description="its share of the questions, against the other weights")


class Data(_Columns):
    """The questions."""

    train: Annotated[Text | None, NoneWord] = Field(
        default=None,
        description='training questions: a .jsonl, .json or .parquet file, "hf:NAME:CONFIG:SPLIT" or "world"; none: '
        "the mix, or the world where there is none",
    )
    test: Annotated[Text | None, NoneWord] = Field(
        default=None, description="held-out questions, likewise; none: the world's if the training questions are"
    )
    mix: Annotated[tuple[Mix, ...], Field(strict=False)] = Field(
        default=(), description="training questions from several sources, one [[data.mix]] table each"
    )
    bad_rows: Literal["refuse", "skip"] = Field(
        default="refuse", description="rows that are no question with an answer stop the run, or are left out"
    )
    max_prompt_tokens: Annotated[Annotated[int, Field(ge=1)] | None, NoneWord] = Field(
        default=None, description="training questions whose prompt is longer are left out; none: all must fit the model"
    )
    curriculum: int = Field(
        default=0,
        ge=0,
        description="questions whose last so many visits were all right, or all wrong, come up in every fourth pass "
        "only; 0: all in every pass",
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
        """The sources of the training questions; a single one is a mixture too."""
        return self.mix or (Mix(source=self.train or "world", **{name: getattr(self, name) for name in COLUMNS}),)


COLUMNS = tuple(_Columns.model_fields)


class World(Section):
    """The built-in generated world."""

    seed: int = Field(default=0, ge=0, le=MAX_SEED, description="decides the whole world")
    entities: int = Field(default=1000, ge=60, le=2000, description="people, places and things in it")
    train_questions: int = Field(default=2000, ge=1, description="questions to train on")
    test_questions: int = Field(default=300, ge=1, description="questions held out for evaluation")
    difficulty: float = Field(default=0.5, ge=0, le=1, description="how flawed the traces are, how many hops are asked")


class Mcp(Section):
    """One MCP server whose tools the model may call: a command to start, or a URL."""

    command: Annotated[Text | None, NoneWord] = Field(default=None, description="program that speaks MCP over stdio")
    args: Names = Field(default=(), description="its arguments")
    env: dict[str, str] = Field(default={}, description="environment variables it gets besides the usual ones")
    url: Annotated[Text | None, NoneWord] = Field(default=None, description="server that speaks streamable HTTP")
    token_env: Annotated[Text | None, NoneWord] = Field(
        default=None, description="environment variable that holds the bearer token for the URL"
    )
    only: Names = Field(default=(), description="its tools that are used; empty: all")

    @model_validator(mode="after")
    def _one_way(self) -> Mcp:
        if (self.command is None) == (self.url is None):
            raise PydanticCustomError("one_way", "either command or url")
        return self


class Tools(Section):
    """What the model may call."""

    enabled: Names = Field(
        default=("search", "python"),
        description="tools the model is told of: search, python, browse, or your own as path/to/file.py:name; MCP "
        "tools are too",
    )
    search: Annotated[Text | None, NoneWord] = Field(
        default=None,
        description="where search looks: a file of documents, an index folder, the URL of a /retrieve server, or "
        "serper, tavily, brave; none: the world's documents",
    )
    search_mode: Literal["bm25", "dense", "hybrid"] = Field(
        default="bm25", description="how an index folder is searched; dense and hybrid need one built with --dense"
    )
    search_results: int = Field(default=2, ge=1, description="documents in one search result")
    timeout: float = Field(default=10.0, gt=0, description="seconds one call may take")
    result_tokens: int = Field(default=512, ge=1, description="longer results are cut to this many tokens")
    python_memory_mb: int = Field(default=512, ge=16, description="memory that one piece of code may use")
    python_blocks: bool = Field(
        default=False, description="wait for each piece of code on the spot: slower, but runs repeat exactly"
    )
    unsafe_no_isolation: bool = Field(
        default=False, description="run model-written code with all your rights where it cannot be isolated"
    )
    browse_url: Annotated[Text | None, NoneWord] = Field(
        default=None, description="OpenAI-compatible endpoint that condenses pages; none: the best paragraphs are kept"
    )
    browse_model: Annotated[Text | None, NoneWord] = Field(default=None, description="model asked at browse_url")
    cache: Annotated[Text | None, NoneWord] = Field(
        default=None, description="file that keeps tools' answers for all runs that name it; none: nothing is kept"
    )
    cache_mode: Literal["on", "record", "replay"] = Field(
        default="on", description="use and fill the cache, make every call anew, or make none: offline and repeatable"
    )
    mcp: Annotated[tuple[Mcp, ...], Field(strict=False)] = Field(
        default=(), description="MCP servers, one [[tools.mcp]] table each"
    )


class Model(Section):
    """The model that is trained."""

    path: Text = Field(
        default="tiny", description='"tiny" (built in), a Hugging Face directory, a run\'s, a hub name, or a GGUF file'
    )
    adapter: Annotated[Text | None, NoneWord] = Field(
        default=None,
        description="directory of a LoRA adapter that is merged into the model, or trained on if train.lora_rank is "
        "not 0; none: the model as it is",
    )
    device: Literal["auto", "cpu", "cuda"] = Field(default="auto", description="where to compute; auto: CUDA if any")
    dtype: Literal["float32", "bfloat16"] = Field(
        default="float32", description="number format; bfloat16 trains with float32 master weights"
    )


class Rollout(Section):
    """How paths are sampled."""

    format: Literal["tags", "json"] = Field(default="tags", description="how calls are written: <search> tags or JSON")
    num_trajectories: int = Field(default=16, ge=1, description="M: trajectories per question")
    num_initial: int = Field(
        default_factory=lambda data: max(1, data.get("num_trajectories", 1) // 2),
        ge=1,
        description="N: trajectories started at the prompt; unset: M / 2, or M when the policy never branches",
    )
    examples: Annotated[Text | None, NoneWord] = Field(
        default=None, description="file of worked examples, as traces, that every prompt begins with; none: no examples"
    )
    max_tool_calls: int = Field(default=3, ge=0, description="tool calls on one path")
    max_tokens: int = Field(default=4096, ge=1, description="tokens of one path after the prompt")
    max_seconds: float = Field(default=600.0, gt=0, description="wall-clock limit of one path")
    temperature: float = Field(default=1.0, gt=0, description="sampling temperature")
    top_p: float = Field(default=1.0, gt=0, le=1, description="keep the likeliest tokens of this total probability")
    top_k: int = Field(default=0, ge=0, description="keep this many of the likeliest tokens; 0: all")
    concurrency: int = Field(default=128, ge=1, description="paths sampled at the same time, over all questions")
    engine: Literal["local", "vllm"] = Field(default="local", description="what samples: this process, or vLLM")
    servers: Names = Field(
        default=(),
        description="addresses of vLLM servers that sample for engine vllm; none: one is started and ended here",
    )
    top_logprobs: int = Field(
        default=64, ge=1, description="likeliest tokens from which entropies are estimated; for engine vllm"
    )
    kv_cache_tokens: int = Field(
        default=0, ge=0, description="tokens whose keys and values the engine has room for; 0: as many as memory allows"
    )

    @field_validator("num_initial")
    @classmethod
    def _initial_fits(cls, value: int, info: ValidationInfo) -> int:
        return cls.at_most(value, info, "rollout", "num_trajectories")


class Branching(Section):
    """When a tool result gets more than one continuation."""

    policy: Literal["entropy", "random", "always", "posthoc_random", "posthoc_entropy", "never"] = Field(
        default="entropy",
        description="what decides about branching; random: chance alpha; later: when all paths ended, at random "
        "results; top: then where entropy rose most",
    )
    rule: Literal["threshold", "stochastic"] = Field(
        default="threshold", description="entropy: if P > tau, or with chance P"
    )
    alpha: float = Field(default=0.5, ge=0, le=1, description="base probability in P = alpha + beta * dH")
    beta: float = Field(default=0.2, ge=0, description="weight of the entropy change dH")
    tau: float = Field(default=0.5, ge=0, le=1, description="threshold on P")
    probe_tokens: int = Field(default=20, ge=1, description="k: tokens whose mean entropy is looked at")
    branch_width: int = Field(default=1, ge=1, description="Z: extra trajectories opened at one branch point")
    penalty: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="entropy: share that P loses for each result just above that was branched from",
    )
    fill: Literal["all", "informative"] = Field(
        default="all",
        description="which questions get the paths missing when all have ended; mixed: those with unequal rewards",
    )
    balance: Annotated[Annotated[float, Field(ge=0)] | None, NoneWord] = Field(
        default=None,
        description="a first path decides N = M sigmoid(balance (H at its start - H after its tools)); none: "
        "rollout.num_initial does",
    )


class Rewards(Section):
    """What a path earns."""

    accuracy: Text = Field(
        default="f1",
        description="how an answer is compared: f1, em, number, math, choice, judge, or a function of yours, as "
        "path/to/file.py:name or package.module:name",
    )
    by_kind: dict[str, Text] = Field(
        default={}, description="accuracy for questions of a kind (data.kind), where it is another one"
    )
    function: Annotated[Text | None, NoneWord] = Field(
        default=None, description="a function of yours, named in the same way, that replaces the whole reward"
    )
    bonus: float = Field(default=0.1, ge=0, description="added to a right answer that used all of bonus_tools")
    bonus_tools: Names = Field(default=("search", "python"), description="tools that earn it only together")
    tolerance: float = Field(
        default=1e-6, ge=0, lt=1, description="number: the relative difference that still counts as right"
    )
    math_seconds: float = Field(default=3.0, gt=0, description="math: time that comparing one answer may take")
    judge_url: Annotated[Text | None, NoneWord] = Field(
        default=None, description="judge: OpenAI-compatible endpoint, like http://localhost:8000/v1"
    )
    judge_model: Annotated[Text | None, NoneWord] = Field(default=None, description="judge: model asked at judge_url")
    judge_key_env: Annotated[Text | None, NoneWord] = Field(
        default=None, description="judge: environment variable that holds the key; none: no key is sent"
    )
    workers: int = Field(default=8, ge=1, le=256, description="paths that are scored at the same time")
    overlong: float = Field(
        default=0.0, ge=0, le=1, description="last share of rollout.max_tokens in which a path loses up to 1; 0: none"
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
    """Who gets the credit."""

    baseline: Literal["group", "leave_one_out", "batch", "tree"] = Field(
        default="group",
        description="a reward is compared with the mean of its question's paths, of the others of them, of all paths "
        "of the step, or both of its question's and of those that share its first turn",
    )
    scale: Literal["std", "none"] = Field(
        default="std", description="whether that is divided by the standard deviation of the same rewards"
    )
    attribution: Literal["soft", "hard"] = Field(default="soft", description="how tokens that paths share are credited")
    entropy_weight: float = Field(
        default=0.0,
        ge=0,
        description="a token counts 1 + entropy_weight * z times, at least 0, with z its entropy's distance from the mean in "
        "standard deviations",
    )


class Loss(Section):
    """The policy-gradient objective."""

    kind: Literal["ppo", "gspo", "cispo"] = Field(
        default="ppo",
        description="what is clipped: each token's ratio, the whole path's ratio (gspo), or the weight of each token's "
        "gradient (cispo)",
    )
    clip_low: float = Field(default=0.2, gt=0, le=1, description="ratios below 1 - clip_low are clipped")
    clip_high: float = Field(default=0.2, gt=0, description="ratios above 1 + clip_high are clipped")
    clip_keeps_gradient: bool = Field(
        default=False, description="ppo, gspo: above the upper clip the gradient is kept, at the clipped size"
    )
    dual_clip: Annotated[Annotated[float, Field(gt=1)] | None, NoneWord] = Field(
        default=3.0, description="cap on the ratio where the advantage is negative"
    )
    aggregation: Literal["token-mean", "sequence-mean", "constant"] = Field(
        default="sequence-mean",
        description="every token weighs the same, or every path does; constant: every path's sum over tokens is "
        "divided by rollout.max_tokens",
    )
    kl_coef: float = Field(default=0.0, ge=0, description="weight of the KL divergence to the model before training")
    entropy_coef: float = Field(default=0.0, ge=0, description="weight of the entropy bonus")
    importance_cap: Annotated[Annotated[float, Field(gt=0)] | None, NoneWord] = Field(
        default=None,
        description="tokens weigh trainer's over engine's probability, at most this; none: the difference is ignored",
    )


class Train(Section):
    """The optimizer and the training loop."""

    steps: int = Field(default=100, ge=1, description="batches of questions to train on")
    budget: int = Field(
        default=0, ge=0, description="training ends with the step that spends this much, if before train.steps; 0: none"
    )
    budget_unit: Literal["tool_calls", "trajectories", "sampled_tokens"] = Field(
        default="tool_calls", description="what the budget counts; calls and tokens on shared prefixes once"
    )
    batch_size: int = Field(default=16, ge=1, description="questions per step")
    dynamic_sampling_rounds: int = Field(
        default=0,
        ge=0,
        description="how often a step replaces questions whose paths all earned the same by others; 0: never",
    )
    minibatches: int = Field(default=1, ge=1, description="optimizer steps per batch")
    lr: float = Field(default=1e-6, gt=0, description="learning rate")
    warmup_steps: int = Field(default=0, ge=0, description="optimizer steps until the full learning rate")
    weight_decay: float = Field(default=0.0, ge=0, description="weight decay")
    max_grad_norm: float = Field(default=1.0, gt=0, description="longer gradients are scaled down to this norm")
    max_microbatch_tokens: int = Field(
        default=16384, ge=1, description="tokens in one forward pass; larger trees are cut"
    )
    mask_infra_faults: bool = Field(default=True, description="leave paths spoiled by a broken tool out of training")
    lora_rank: int = Field(
        default=0, ge=0, le=1024, description="rank of the LoRA adapter that is trained; 0: all weights are"
    )
    lora_alpha: int = Field(default=32, ge=1, description="the adapter counts lora_alpha / lora_rank times")
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
        description="what to do at signs of a collapse: say so; also go back to the last checkpoint before them and "
        "exit with code 3; or nothing",
    )

    @field_validator("minibatches")
    @classmethod
    def _minibatches_fit(cls, value: int, info: ValidationInfo) -> int:
        return cls.at_most(value, info, "train", "batch_size")


class Eval(Section):
    """Evaluation."""

    every: int = Field(default=0, ge=0, description="training steps between evaluations; 0: none")
    questions: int = Field(default=200, ge=1, description="test questions used")
    samples: int = Field(default=1, ge=1, description="paths per question")
    temperature: float = Field(default=0.6, ge=0, description="sampling temperature; 0: always the likeliest token")
    top_p: float = Field(default=0.95, gt=0, le=1, description="keep the likeliest tokens of this total probability")
    top_k: int = Field(default=0, ge=0, description="keep this many of the likeliest tokens; 0: all")
    endpoint: Annotated[Text | None, NoneWord] = Field(
        default=None, description="OpenAI-compatible endpoint asked on benchmarks in place of a model of one's own"
    )
    endpoint_model: Annotated[Text | None, NoneWord] = Field(default=None, description="model asked at the endpoint")
    endpoint_key_env: Annotated[Text | None, NoneWord] = Field(
        default=None, description="environment variable that holds the endpoint's key; none: no key is sent"
    )
    endpoint_timeout: float = Field(default=300.0, gt=0, description="seconds one turn at the endpoint may take")


def _as_names(value: Any) -> Any:
    """A single name is a list of one, and none is no name."""
    if isinstance(value, str):
        return () if value == "none" else (value,)
    return value


class Run(Section):
    """Where results go."""

    dir: Text = Field(default="runs/arpo", description="the run's directory")
    checkpoint_every: int = Field(default=10, ge=1, description="steps between checkpoints")
    keep_checkpoints: int = Field(default=2, ge=1, description="newest checkpoints that are kept")
    save_trees: bool = Field(default=True, description="write every rollout tree")
    tracker: Annotated[Names, BeforeValidator(_as_names)] = Field(
        default=(),
        description='where records are sent as well: "tensorboard", "wandb", "mlflow", "trackio", or a list of them; '
        "none: nowhere",
    )
    tracker_trees: int = Field(
        default=10, ge=0, description="steps between pictures of a tree that trackers get; 0: no pictures"
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

    seed: int = Field(default=0, ge=0, le=MAX_SEED, description="decides the model that comes out")
    traces: int = Field(default=3000, ge=1, description="example paths to imitate")
    steps: int = Field(default=150, ge=1, description="optimizer steps")
    batch_tokens: int = Field(default=2048, ge=1, description="tokens per optimizer step")
    lr: float = Field(default=5e-4, gt=0, description="learning rate")


class Sft(Section):
    """Supervised fine-tuning on traces: `arpo sft`."""

    data: Text = Field(default="traces.jsonl", description="the traces: a .jsonl, .json or .parquet file, or hf:NAME")
    epochs: int = Field(default=3, ge=1, description="passes over the traces")
    batch_tokens: int = Field(
        default=32768, ge=1, description="tokens per optimizer step, prompts and results included"
    )
    lr: float = Field(default=7e-6, gt=0, description="learning rate")
    warmup_steps: int = Field(default=20, ge=0, description="optimizer steps until the full learning rate")


class Cluster(Section):
    """Sampling on other machines: `arpo train` on a Ray cluster."""

    address: Annotated[Text | None, NoneWord] = Field(
        default=None,
        description='a running Ray cluster: "auto" on one of its machines, or host:port of its head; none: this '
        "process alone",
    )
    max_off_policy_steps: int = Field(
        default=0, ge=0, le=64, description="steps that sampling may run ahead of training, with weights so much older"
    )
    trainers: int = Field(default=1, ge=1, description="processes that train together in shards, one GPU each if any")
    actors: int = Field(
        default=0, ge=0, description="processes that sample; 0: one per GPU, or per machine without, also on new ones"
    )


class Config(Section):
    """Everything a run is decided by."""

    seed: int = Field(default=0, ge=0, le=MAX_SEED, description="decides all randomness of the run")
    preset: Text = Field(
        default="arpo", description="named settings that lie below your own: one of ours, or a TOML file of yours"
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
            object.__setattr__(self, "rollout", rollout)  # the one step of construction that looks at two sections
        return self

    def resolved(self) -> dict[str, Any]:
        """Every setting with its value, ready for JSON."""
        return self.model_dump(mode="json")
