"""What a trajectory is worth: a reward is a function (task, tree, leaf) -> Reward."""

from arpo.rewards.build import overlong, reward_from
from arpo.rewards.format import format_ok
from arpo.rewards.hierarchical import Accuracy, NoVerdict, RewardFn, build_reward, unjudged
from arpo.rewards.maths import math_equal
from arpo.rewards.scorer import Scorer, fault_metrics
from arpo.rewards.text import choice_match, exact_match, numbers_equal, token_f1

__all__ = [
    "Accuracy",
    "NoVerdict",
    "RewardFn",
    "Scorer",
    "build_reward",
    "choice_match",
    "exact_match",
    "fault_metrics",
    "format_ok",
    "math_equal",
    "numbers_equal",
    "overlong",
    "reward_from",
    "token_f1",
    "unjudged",
]
