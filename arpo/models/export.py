"""Exporting the model of a run's checkpoint as a plain Hugging Face directory.

Guarantees: the weights are exactly those that the engine samples from at that step; a trained adapter is merged into
its base. A new directory appears complete or not at all; an existing empty one gets its files when all are written,
config.json last. File modes follow the umask.
Not covered: other file formats; the float32 master weights of a bfloat16 model.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from arpo.config.loading import config_from_resolved
from arpo.errors import ArpoError
from arpo.models.load import load_model
from arpo.models.resolve import ADAPTER_CONFIG, check_weights, resolve_model
from arpo.models.save import save_pretrained
from arpo.runs.reporter import SILENT, Reporter
from arpo.runs.run_dir import open_run_dir, require_good_weights
from arpo.runs.storage import writing


def export_model(run: Path, directory: Path, step: int | None = None, reporter: Reporter = SILENT) -> int:
    """Write the model of this step's checkpoint (default: the last) to a new directory; return the step."""
    log = open_run_dir(run)
    steps = log.checkpoint_steps()
    if not steps:
        raise ArpoError(f"{run} has no checkpoint yet")
    if step is not None and step not in steps:
        raise ArpoError(f"{run} has no checkpoint of step {step}; it has {', '.join(map(str, steps))}")
    directory, exists = directory.resolve(), directory.is_dir()
    if directory.is_relative_to(run.resolve()):
        raise ArpoError(f"{directory}: is inside the run; choose a directory outside of it")
    if directory.exists() and (not exists or any(directory.iterdir())):
        raise ArpoError(f"{directory}: is not empty; choose a new directory")
    step = steps[-1] if step is None else step
    model = log.checkpoint_path(step) / "model"
    require_good_weights(model.parent, reporter)
    merged = None
    if (model / ADAPTER_CONFIG).is_file():
        base = resolve_model(config_from_resolved(log.config()))
        check_weights(base, reporter)
        merged = load_model(base.model_copy(update={"adapter": str(model)}))
    with writing(directory):
        directory.parent.mkdir(parents=True, exist_ok=True)
        parent = directory if exists else directory.parent
        with tempfile.TemporaryDirectory(dir=parent, prefix=directory.name + ".") as temporary:
            complete = Path(temporary) / "model"
            if merged is not None:
                save_pretrained(*merged, complete)
            else:
                shutil.copytree(model, complete)
            _make_readable(complete)
            if exists:
                for file in sorted(complete.iterdir(), key=lambda file: file.name == "config.json"):
                    file.rename(directory / file.name)
            else:
                complete.rename(directory)
    return step


def _make_readable(directory: Path) -> None:
    """Give all files the mode of a new file: safetensors are written with access for the owner only."""
    probe = directory.parent / "new"
    probe.touch()
    for file in directory.rglob("*"):
        if file.is_file():
            file.chmod(probe.stat().st_mode)
