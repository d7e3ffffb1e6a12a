"""Environments: tools with a state of their own for each trajectory, which forks where the rollout tree branches.

    base     `Environment`: what a user writes
    states   the states of one rollout tree: opened, forked, replayed, bounded in number, closed
    build    the environment that a configuration names
    python_session, ...   the built-in ones

May import: types, errors, config, net, figures, runs, data, tools.
"""

from arpo.environments.base import Environment

__all__ = ["Environment"]
