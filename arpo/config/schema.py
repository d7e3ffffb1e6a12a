"""Every setting there is: its type, range, default and one-line meaning. Frozen values; how they are read is in
`config`.

The functions that do the work take the section that concerns them (`decide(settings.Branching, ...)`), so a setting is
described once.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticCustomError

from arpo.sections import COLUMNS, MAX_SEED, Data, Mcp, Mix, Names, NoneWord, Section, Text, Tools, World

__all__ = ["COLUMNS", "Data", "Mcp", "Mix", "Tools", "World"]


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
    leaves: int = Field(default=16, ge=1, description="M: paths per question")
    initial: int = Field(
        default_factory=lambda data: max(1, data.get("leaves", 1) // 2),
        ge=1,
        description="N: paths started at the prompt; unset: half of the leaves, or all when the policy never branches",
    )
    examples: Annotated[Text | None, NoneWord] = Field(
        default=None, description="file of worked examples, as traces, that every prompt begins with; none: no examples"
    )
    max_calls: int = Field(default=3, ge=0, description="tool calls on one path")
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
    kv_tokens: int = Field(
        default=0, ge=0, description="tokens whose keys and values the engine has room for; 0: as many as memory allows"
    )

    @field_validator("initial")
    @classmethod
    def _initial_fits(cls, value: int, info: ValidationInfo) -> int:
        return cls.at_most(value, info, "rollout", "leaves")


class Branching(Section):
    """When a tool result gets more than one continuation."""

    policy: Literal["entropy", "random", "always", "later", "top", "never"] = Field(
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
    width: int = Field(default=1, ge=1, description="Z: extra paths opened at one point")
    penalty: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="entropy: share that P loses for each result just above that was branched from",
    )
    fill: Literal["all", "mixed"] = Field(
        default="all",
        description="which questions get the paths missing when all have ended; mixed: those with unequal rewards",
    )
    balance: Annotated[Annotated[float, Field(ge=0)] | None, NoneWord] = Field(
        default=None,
        description="a first path decides N = M sigmoid(balance (H at its start - H after its tools)); none: "
        "rollout.initial does",
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

    baseline: Literal["group", "others", "batch", "tree"] = Field(
        default="group",
        description="a reward is compared with the mean of its question's paths, of the others of them, of all paths "
        "of the step, or both of its question's and of those that share its first turn",
    )
    scale: Literal["std", "none"] = Field(
        default="std", description="whether that is divided by the standard deviation of the same rewards"
    )
    attribution: Literal["soft", "hard"] = Field(default="soft", description="how tokens that paths share are credited")
    entropy: float = Field(
        default=0.0,
        ge=0,
        description="a token counts 1 + entropy * z times, at least 0, with z its entropy's distance from the mean in "
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
    kl: float = Field(default=0.0, ge=0, description="weight of the KL divergence to the model before training")
    entropy: float = Field(default=0.0, ge=0, description="weight of the entropy bonus")
    importance_cap: Annotated[Annotated[float, Field(gt=0)] | None, NoneWord] = Field(
        default=None,
        description="tokens weigh trainer's over engine's probability, at most this; none: the difference is ignored",
    )


class Train(Section):
    """The optimiser and the training loop."""

    steps: int = Field(default=100, ge=1, description="batches of questions to train on")
    budget: int = Field(
        default=0, ge=0, description="training ends with the step that spends this much, if before train.steps; 0: none"
    )
    budget_of: Literal["tool_calls", "paths", "sampled_tokens"] = Field(
        default="tool_calls", description="what the budget counts; calls and tokens on shared prefixes once"
    )
    prompts: int = Field(default=16, ge=1, description="questions per step")
    resample: int = Field(
        default=0,
        ge=0,
        description="how often a step replaces questions whose paths all earned the same by others; 0: never",
    )
    minibatches: int = Field(default=1, ge=1, description="optimiser steps per batch")
    lr: float = Field(default=1e-6, gt=0, description="learning rate")
    warmup: int = Field(default=0, ge=0, description="optimiser steps until the full learning rate")
    weight_decay: float = Field(default=0.0, ge=0, description="weight decay")
    max_grad_norm: float = Field(default=1.0, gt=0, description="longer gradients are scaled down to this norm")
    micro_tokens: int = Field(default=16384, ge=1, description="tokens in one forward pass; larger trees are cut")
    drop_infra: bool = Field(default=True, description="leave paths spoiled by a broken tool out of training")
    lora_rank: int = Field(
        default=0, ge=0, le=1024, description="rank of the LoRA adapter that is trained; 0: all weights are"
    )
    lora_alpha: int = Field(default=32, ge=1, description="the adapter counts lora_alpha / lora_rank times")
    lora_targets: Names = Field(
        default=("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
        min_length=1,
        description="linear layers that get an adapter",
    )
    checkpointing: bool = Field(
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
        return cls.at_most(value, info, "train", "prompts")


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
    steps: int = Field(default=150, ge=1, description="optimiser steps")
    batch_tokens: int = Field(default=2048, ge=1, description="tokens per optimiser step")
    lr: float = Field(default=5e-4, gt=0, description="learning rate")


class Sft(Section):
    """Supervised fine-tuning on traces: `arpo sft`."""

    data: Text = Field(default="traces.jsonl", description="the traces: a .jsonl, .json or .parquet file, or hf:NAME")
    epochs: int = Field(default=3, ge=1, description="passes over the traces")
    batch_tokens: int = Field(
        default=32768, ge=1, description="tokens per optimiser step, prompts and results included"
    )
    lr: float = Field(default=7e-6, gt=0, description="learning rate")
    warmup: int = Field(default=20, ge=0, description="optimiser steps until the full learning rate")


class Cluster(Section):
    """Sampling on other machines: `arpo train` on a Ray cluster."""

    address: Annotated[Text | None, NoneWord] = Field(
        default=None,
        description='a running Ray cluster: "auto" on one of its machines, or host:port of its head; none: this '
        "process alone",
    )
    ahead: int = Field(
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
        if self.branching.policy == "never" and "initial" not in self.rollout.model_fields_set:
            rollout = self.rollout.model_copy(update={"initial": self.rollout.leaves})
            object.__setattr__(self, "rollout", rollout)  # the one step of construction that looks at two sections
        return self

    def resolved(self) -> dict[str, Any]:
        """Every setting with its value, ready for JSON."""
        return self.model_dump(mode="json")
