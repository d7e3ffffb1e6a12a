"""What a preset means in TRL: the settings of its trees and credit, and the arguments of GRPOConfig that give its loss.

    GRPOConfig(output_dir="out", num_generations=8, **loss_arguments("arpo"))

A preset says where trees branch, which advantage a turn gets, and how the loss is computed. `TreeGRPOTrainer` takes the
first two from it. The loss is TRL's, as its GRPOConfig says; `loss_arguments` are those that make the two losses equal.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

from arpo.config.loading import load_config
from arpo.config.schema import Config
from arpo.errors import ArpoError

Preset: TypeAlias = "str | os.PathLike[str] | Config"
"""The name of a preset ("arpo"), a TOML file of settings, or an `arpo.Config`."""
LOSS_TYPES = {"token-mean": "dapo", "sequence-mean": "grpo", "constant": "dr_grpo"}
SCALES = {"std": "group", "batch": "batch", "none": "none"}
"""What `advantage.scale` is called in TRL (`scale_rewards`)."""


def load_preset(preset: Preset, **sections: Mapping[str, Any]) -> Config:
    """The settings of a preset, a file or a configuration; `sections` override them."""
    if isinstance(preset, Config):
        return load_config(preset, arguments=sections)
    if not isinstance(preset, str | os.PathLike):
        raise ArpoError(f"branching: got {preset!r:.100}, expected the name of a preset, a TOML file or an arpo.Config")
    text = os.fspath(preset)
    if text.endswith((".toml", ".json")):
        return load_config(Path(text), arguments=sections)
    return load_config(None, arguments={**sections, "preset": text})


def loss_arguments(preset: Preset) -> dict[str, Any]:
    """The arguments of TRL's GRPOConfig with which its loss is that of the preset; an error if it has no such loss."""
    config = load_preset(preset)
    loss = config.loss
    lacking = {
        'loss.kind = "turn"': loss.kind == "turn",
        "loss.clip_keeps_gradient": loss.clip_keeps_gradient,
        "loss.importance_cap": loss.importance_cap is not None,
        'loss.kind = "cispo" with loss.clip_low below 1': loss.kind == "cispo" and loss.clip_low < 1,
        f'loss.kind = "{loss.kind}" with loss.aggregation = "{loss.aggregation}"': (
            loss.aggregation != {"gspo": "sequence-mean", "cispo": "token-mean"}.get(loss.kind, loss.aggregation)
        ),
    }
    missing = [name for name, used in lacking.items() if used]
    if missing:
        raise ArpoError(
            f"TRL's loss has nothing like {', '.join(missing)} of this preset; choose the loss in GRPOConfig, or train "
            "with arpo.Trainer"
        )
    if loss.kind == "cispo":
        clip: dict[str, Any] = {"loss_type": "cispo", "epsilon_high": 1 + loss.clip_high}
    else:
        clip = {
            "loss_type": LOSS_TYPES[loss.aggregation],
            "epsilon": loss.clip_low,
            "epsilon_high": loss.clip_high,
            "delta": loss.dual_clip,
            "importance_sampling_level": "sequence" if loss.kind == "gspo" else "token",
        }
    return {
        **clip,
        "beta": loss.kl_coef,
        "entropy_coef": loss.entropy_coef,
        "scale_rewards": SCALES[config.advantage.scale],
    }
