"""The settings that make an algorithm: where trees branch, how rewards become advantages, and the loss."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from arpo.config.section import MAX_FACTOR, MAX_GROUP, MAX_TREE_TOKENS, NoneWord, Section, setting


class Branching(Section):
    """Where a rollout tree branches."""

    policy: Literal[
        "entropy",
        "random",
        "always",
        "shuffled",
        "oracle",
        "posthoc_random",
        "posthoc_entropy",
        "posthoc_top_entropy",
        "posthoc_outcome",
        "posthoc_tail",
        "never",
    ] = setting(
        "entropy",
        "where to branch: after tool results, by entropy, at random (with probability alpha), always, by the dH of "
        "another result of equal depth and tool (shuffled), or where the environment says that the next choice is "
        "decisive (oracle); when all initial trajectories have ended, at random tool results (posthoc_random), those "
        "with the largest entropy rise (posthoc_entropy) or the largest entropy (posthoc_top_entropy), those below "
        "which rewards are most uncertain (posthoc_outcome), or the last ones (posthoc_tail); never",
    )
    rule: Literal["threshold", "stochastic"] = setting(
        "threshold", "policies entropy, shuffled: branch if P > tau, or with probability P"
    )
    alpha: float = setting(0.5, "base probability in P = alpha + beta * dH", ge=0, le=1)
    beta: float = setting(0.2, "weight of the entropy change dH in P", ge=0, le=MAX_FACTOR)
    entropy_unit: Literal["mean", "sum"] = setting(
        "mean",
        "unit of dH, and of the entropies of balance: mean or sum over the probed tokens, divided by ln V; beta = 0.2 "
        "by the sum is about beta = 0.2 k by the mean",
    )
    tau: float = setting(0.5, "threshold on P", ge=0, le=1)
    probe_tokens: int = setting(20, "k: number of tokens whose entropy is measured", ge=1, le=MAX_TREE_TOKENS)
    branch_width: int = setting(
        1, "Z: trajectories added at one branch point; posthoc policies add one at a time", ge=1, le=MAX_GROUP
    )
    penalty: float = setting(
        0.0,
        "policies entropy, shuffled: P shrinks by this share for each consecutive branch point just before; "
        "posthoc_top_entropy: subtracted from H for each branch opened there",
        ge=0,
        le=1,
    )
    round_size: int = setting(
        4,
        "posthoc_top_entropy, posthoc_outcome, posthoc_tail: results at which a branch opens before they are compared "
        "anew",
        ge=1,
        le=MAX_GROUP,
    )
    per_call: bool = setting(
        False, "posthoc_outcome: divide a result's score by 1 + the calls that trajectories made after it"
    )
    fill: Literal["all", "informative", "none"] = setting(
        "all",
        "which tasks get the trajectories missing from M when all have ended: all, those whose trajectories "
        "earned unequal rewards, or none (posthoc policies still branch)",
    )
    balance: Annotated[Annotated[float, Field(ge=0, le=MAX_FACTOR)] | None, NoneWord] = setting(
        None,
        "N = M sigmoid(balance (H at the start - H after tools)), measured on a first trajectory in the unit of dH; "
        "none: N is rollout.num_initial",
    )
    probe: Literal["trajectory", "first_token", "discarded"] = setting(
        "trajectory",
        "what is probed after a tool result: the first k tokens of the trajectory; the distribution of its first "
        "token, which the state alone decides; or k tokens that are sampled for this and discarded",
    )

    @property
    def probe_length(self) -> int:
        """The number of tokens whose entropy is measured: k, or 1 if only the first token is probed."""
        return 1 if self.probe == "first_token" else self.probe_tokens

    @field_validator("balance")
    @classmethod
    def _balance_fits(cls, value: float | None, info: ValidationInfo) -> float | None:
        policy = info.data.get("policy")
        if value is not None and policy in ("shuffled", "oracle"):
            text = f'"none" with branching.policy = "{policy}"'
            raise PydanticCustomError("conflict", "{text}", {"text": text, "other": ("branching", "policy")})
        return value

    @field_validator("probe")
    @classmethod
    def _probe_fits(cls, value: str, info: ValidationInfo) -> str:
        policy, balance = info.data.get("policy"), info.data.get("balance")
        if value == "discarded" and (policy not in ("entropy", None) or balance is not None):
            other = "balance" if balance is not None else "policy"
            text = '"trajectory" or "first_token": only the policy entropy, without balance, can discard a probe'
            raise PydanticCustomError("conflict", "{text}", {"text": text, "other": ("branching", other)})
        return value


class Advantage(Section):
    """How rewards become advantages."""

    baseline: Literal["group", "leave_one_out", "batch", "tree"] = setting(
        "group",
        "what is subtracted from a reward: the mean of the task's trajectories, of its other trajectories, of the "
        "whole batch, or (tree) of the task's and of those that share its first turn",
    )
    scale: Literal["std", "batch", "none"] = setting(
        "std",
        "what advantages are divided by: the standard deviation of the same rewards, that of the advantages of the "
        "whole batch, or nothing",
    )
    attribution: Literal["soft", "hard", "prefix_value", "turn_value", "same_state", "unbiased"] = setting(
        "soft",
        "the advantage of a turn: its trajectory's (soft), the mean of the trajectories through it (hard), soft plus "
        "the change in mean advantage at the branch (prefix_value), values backed up the tree (turn_value), soft plus "
        "a comparison with turns after the same text (same_state), or an exact policy gradient on trees (unbiased)",
    )
    gamma: float = setting(0.95, "same_state: the return of a turn is gamma^(turns left) times the reward", ge=0, le=1)
    step_weight: float = setting(1.0, "same_state: weight of the comparison of turns", ge=0, le=MAX_FACTOR)
    entropy_weight: float = setting(
        0.0,
        "a token's policy term is weighted with 1 + entropy_weight * z, at least 0, where z is its entropy's z-score",
        ge=0,
        le=MAX_FACTOR,
    )

    @field_validator("attribution")
    @classmethod
    def _unbiased_has_its_own_baseline(cls, value: str, info: ValidationInfo) -> str:
        for other, needed in (("baseline", "leave_one_out"), ("scale", "none")):
            if value == "unbiased" and info.data.get(other, needed) != needed:
                text = f'another attribution, or advantage.{other} = "{needed}" with unbiased'
                raise PydanticCustomError("conflict", "{text}", {"text": text, "other": ("advantage", other)})
        return value


class Loss(Section):
    """The policy-gradient loss."""

    kind: Literal["ppo", "turn", "gspo", "cispo"] = setting(
        "ppo",
        "what is clipped: the ratio of each token (ppo), of each turn (turn), of the whole trajectory (gspo), or the "
        "weight of each token's gradient (cispo)",
    )
    clip_low: float = setting(0.2, "ratios are clipped below 1 - clip_low", gt=0, le=1)
    clip_high: float = setting(0.2, "ratios are clipped above 1 + clip_high", gt=0, le=MAX_FACTOR)
    clip_keeps_gradient: bool = setting(
        False, "ppo, turn, gspo: tokens above the upper clip keep a gradient, of the clipped size"
    )
    dual_clip: Annotated[Annotated[float, Field(gt=1, le=MAX_FACTOR)] | None, NoneWord] = setting(
        3.0, "upper limit of the ratio where the advantage is negative; none: no limit"
    )
    aggregation: Literal["token-mean", "sequence-mean", "constant"] = setting(
        "token-mean",
        "mean over all tokens, mean over trajectories of their token means, or (constant) token sums divided by "
        "rollout.max_tokens",
    )
    kl_coef: float = setting(
        0.0, "coefficient of the KL divergence from the model before training", ge=0, le=MAX_FACTOR
    )
    entropy_coef: float = setting(0.0, "coefficient of the entropy bonus", ge=0, le=MAX_FACTOR)
    importance_cap: Annotated[Annotated[float, Field(gt=0, le=MAX_FACTOR)] | None, NoneWord] = setting(
        None,
        "truncated importance sampling (TIS): upper limit of the trainer's over the engine's probability; none: no "
        "correction",
    )
