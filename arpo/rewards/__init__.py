"""Rewards: functions from a `Trajectory` to a `Reward`, and the threads that apply them to sampled trees.

`build` makes the reward function that the settings name: that of `hierarchical`, with an accuracy from `text`, `maths`
or `judge`, or a user's own. May import tools and the rooms below it.
"""

from arpo.rewards.build import build_reward, with_overlong_penalty
from arpo.rewards.custom import apply_reward, custom_reward, wants_environment, weighted_reward
from arpo.rewards.format import WRONG_FORMAT, FormatFault, format_ok
from arpo.rewards.hierarchical import Accuracy, NoVerdict, RewardFn, hierarchical_reward, unjudged
from arpo.rewards.maths import math_equal
from arpo.rewards.scorer import Scorer, fault_metrics, reward_metrics
from arpo.rewards.text import choice_match, exact_match, numbers_equal, token_f1

__all__ = [
    "WRONG_FORMAT",
    "Accuracy",
    "FormatFault",
    "NoVerdict",
    "RewardFn",
    "Scorer",
    "apply_reward",
    "build_reward",
    "choice_match",
    "custom_reward",
    "exact_match",
    "fault_metrics",
    "format_ok",
    "hierarchical_reward",
    "math_equal",
    "numbers_equal",
    "reward_metrics",
    "token_f1",
    "unjudged",
    "wants_environment",
    "weighted_reward",
    "with_overlong_penalty",
]
