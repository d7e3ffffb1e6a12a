"""The model of a run's checkpoint as a plain Hugging Face directory, for any other program to load.

Promises: the weights are those that the engine samples from at that step, to the bit; where an adapter was trained,
they are its base with the adapter added. A new directory appears complete or not at all; an empty one gets its files
when all are written, config.json last. Who may read them is what the umask says.
Does not cover: other file formats; the float32 weights that a bfloat16 model was rounded from.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from arpo.config.loading import config_from_resolved
from arpo.errors import ArpoError
from arpo.models import lora
from arpo.models.load import load_model
from arpo.models.resolve import resolve_model
from arpo.models.save import save_pretrained
from arpo.runs.run_dir import open_run


def export_model(run: Path, directory: Path, step: int | None = None) -> int:
    """Write the model of this step's checkpoint, or of the last one, to a new directory; returns the step."""
    log = open_run(run)
    steps = log.checkpoint_steps()
    if not steps:
        raise ArpoError(f"{run} has no checkpoint yet")
    if step is not None and step not in steps:
        raise ArpoError(f"{run} has no checkpoint of step {step}; it has {', '.join(map(str, steps))}")
    directory, there = directory.resolve(), directory.is_dir()
    if directory.is_relative_to(run.resolve()):
        raise ArpoError(f"{directory}: is inside of the run; choose a directory outside of it")
    if directory.exists() and (not there or any(directory.iterdir())):
        raise ArpoError(f"{directory}: is not empty; choose a new directory")
    step = steps[-1] if step is None else step
    model = log.checkpoint_path(step) / "model"
    directory.parent.mkdir(parents=True, exist_ok=True)
    place = directory if there else directory.parent
    with tempfile.TemporaryDirectory(dir=place, prefix=directory.name + ".") as unfinished:
        whole = Path(unfinished) / "model"
        if (model / lora.CONFIG).is_file():
            base = resolve_model(config_from_resolved(log.config()))
            save_pretrained(*load_model(base.model_copy(update={"adapter": str(model)})), whole)
        else:
            shutil.copytree(model, whole)
        _make_readable(whole)
        if there:
            for file in sorted(whole.iterdir(), key=lambda file: file.name == "config.json"):
                file.rename(directory / file.name)
        else:
            whole.rename(directory)
    return step


def _make_readable(directory: Path) -> None:
    """Give all files the mode of a new file: safetensors are written for their owner alone."""
    new = directory.parent / "new"
    new.touch()
    for file in directory.rglob("*"):
        if file.is_file():
            file.chmod(new.stat().st_mode)
