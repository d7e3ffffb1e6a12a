"""What can be checked before a training run loads anything: settings that do not go together, its directory, files.

None of this needs torch, so a mistake is told at once.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from arpo.config.files import expand_user, no_such_file
from arpo.config.schema import Config
from arpo.data.rows import HUB
from arpo.data.task_set import TASK_PLUGINS
from arpo.errors import ArpoError
from arpo.runs import run_dir
from arpo.runs.run_dir import CONFIG_FILE, RunDir


def require_start(config: Config, resume: bool) -> Path:
    """The directory of the run, if a run can begin there or, with `resume`, be continued."""
    directory = expand_user(config.run.dir)
    if not resume:
        run_dir.require_unused(directory)
    elif not run_dir.is_run_dir(directory) and not RunDir(directory, None).checkpoint_steps():
        if (directory / CONFIG_FILE).exists():
            raise ArpoError(f"{directory / CONFIG_FILE}: is damaged; begin again in another run.dir")
        raise ArpoError(f"{directory}: there is no run yet; leave out --resume to begin one")
    return directory


def require_files(config: Config, needs_test: bool = False) -> None:
    """Raise ArpoError if a file of training tasks, test tasks or worked examples does not exist."""
    for setting, path in _files(config):
        if not os.path.lexists(expand_user(path)):
            optional = setting == "data.test" and not needs_test
            hint = "\n(this is data.test; training works without it: data.test=none)" if optional else ""
            raise ArpoError(no_such_file(path) + hint)


def _files(config: Config) -> Iterator[tuple[str, str]]:
    sources = [("data.train", mix.source) for mix in config.data.training] + [("data.test", config.data.test or HUB)]
    for setting, source in sources:
        if source not in TASK_PLUGINS and not source.startswith(HUB):
            yield setting, source
    if config.rollout.examples is not None:
        yield "rollout.examples", config.rollout.examples


def check_settings(config: Config, on_cluster: bool) -> None:
    """Raise if settings do not go together, or need a cluster that is not there."""
    cluster, rounds = config.cluster, config.train.dynamic_sampling_rounds
    if cluster.address is None:
        changed = [
            name for name, field in type(cluster).model_fields.items() if getattr(cluster, name) != field.default
        ]
        if changed:
            name, default = changed[0], type(cluster).model_fields[changed[0]].default
            raise ArpoError(
                f"cluster.{name}: needs a cluster; give cluster.address as well, or cluster.{name}={default}"
            )
    elif not on_cluster:
        raise ArpoError("cluster.address: only `arpo train` works on a cluster; use cluster.address=none")
    elif config.rollout.servers:
        raise ArpoError(
            "rollout.servers: every actor would load its own weights there; use rollout.servers=[] on a cluster, where "
            "rollout.engine=vllm starts one vLLM in each actor"
        )
    if cluster.max_off_policy_steps and config.loss.importance_cap is None:
        raise ArpoError(
            "cluster.max_off_policy_steps: trees sampled by older weights need importance weights; "
            "give loss.importance_cap=2 as well"
        )
    if cluster.max_off_policy_steps and config.data.curriculum:
        raise ArpoError(
            "cluster.max_off_policy_steps: use 0 with data.curriculum, which waits for the outcomes of every step"
        )
    if config.loss.kl_coef and config.train.lora_rank and config.model.adapter is not None:
        raise ArpoError(
            "loss.kl_coef: with train.lora_rank the reference is the base model without model.adapter; "
            "use loss.kl_coef=0, or train.lora_rank=0 to train all weights"
        )
    if rounds and config.data.curriculum:
        raise ArpoError(
            "train.dynamic_sampling_rounds: use 0 with data.curriculum, which already skips settled questions"
        )
    if rounds and config.advantage.baseline == "batch":
        raise ArpoError(
            'train.dynamic_sampling_rounds: use 0 with advantage.baseline="batch", where trajectories of a task that '
            "all earned the same have advantages, too"
        )
    if rounds and config.advantage.attribution == "same_state":
        raise ArpoError(
            'train.dynamic_sampling_rounds: use 0 with advantage.attribution="same_state", where trajectories of a '
            "task that all earned the same have advantages, too"
        )
    if config.advantage.attribution == "unbiased":
        _check_unbiased(config)


def _check_unbiased(config: Config) -> None:
    """Raise if the tree or the loss would make `advantage.attribution = "unbiased"` biased."""
    branching = config.branching
    if config.loss.aggregation != "constant":
        raise ArpoError(
            'advantage.attribution: "unbiased" needs loss.aggregation="constant": the others divide by the lengths of '
            "the trajectories that were sampled"
        )
    by_state = branching.policy in ("random", "always", "oracle", "entropy") and branching.probe != "trajectory"
    if not (by_state or branching.policy == "never") or branching.balance is not None:
        raise ArpoError(
            'advantage.attribution: "unbiased" needs a tree that grows by decisions on the state alone; use '
            'branching.policy="never", or "random", "always", "oracle" or "entropy" with '
            'branching.probe="first_token"; and branching.balance=none'
        )
    if branching.policy != "never" and branching.fill != "none":
        raise ArpoError(
            'advantage.attribution: "unbiased" needs a fixed number of trajectories from the prompt; use '
            'branching.fill="none"'
        )
    others = {
        'loss.kind="ppo" or "cispo"': config.loss.kind in ("ppo", "cispo"),
        "advantage.entropy_weight=0": config.advantage.entropy_weight == 0,
        "train.dynamic_sampling_rounds=0": config.train.dynamic_sampling_rounds == 0,
        "rollout.top_p=1": config.rollout.top_p == 1,
    }
    if missing := [needed for needed, given in others.items() if not given]:
        raise ArpoError(f'advantage.attribution: "unbiased" needs {" and ".join(missing)}')
