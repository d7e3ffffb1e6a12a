"""What a trajectory is worth: a reward is a function (task, tree, leaf) -> Reward."""

from arpo.rewards.format import format_ok
from arpo.rewards.hierarchical import RewardFn, make_reward
from arpo.rewards.text import exact_match, numbers_equal, token_f1

__all__ = ["RewardFn", "exact_match", "format_ok", "make_reward", "numbers_equal", "token_f1"]
