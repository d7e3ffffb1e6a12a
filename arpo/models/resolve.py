"""Which model a configuration means: a run's last checkpoint, an adapter with its base, a plug-in's model, or a path.

Loading is in `arpo.models.load`, which needs torch; finding the model does not.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from arpo.config.files import expand_user
from arpo.config.loading import config_from_resolved
from arpo.config.schema import Config, Model
from arpo.data.task_set import Progress, model_plugin
from arpo.errors import ArpoError
from arpo.runs.manifest import MANIFEST_FILE
from arpo.runs.reporter import SILENT, Reporter
from arpo.runs.run_dir import is_run_dir, open_run_dir, require_undamaged

ADAPTER_CONFIG = "adapter_config.json"


def load_policy(config: Config, reporter: Reporter = SILENT) -> tuple[Any, Any]:
    """Load the model that is trained, and its tokenizer; the cold start of a plug-in's model is reported."""
    from arpo.models.load import load_trainable

    with reporter.progress("cold start", config.coldstart.steps) as bar:

        def show(step: int, steps: int, loss: float) -> None:
            if step == 0:
                reporter.message("Cold start: training the built-in model to call its tools (once; it is cached).")
            elif step % 50 == 0 and not reporter.has_bars:
                reporter.message(f"  step {step} of {steps}, loss {loss:.3f}")
            bar.update(step, steps, f"loss {loss:.3f}" if step else "writing examples")

        return load_trainable(resolve_model(config, show), config.train, config.seed)


def resolve_model(config: Config, progress: Progress = lambda *_: None) -> Model:
    """The model settings with names replaced by paths: a run becomes its last checkpoint, "tiny" a directory."""
    model = _resolve_run(config.model)
    plugin = model_plugin(model.path)
    return model if plugin is None else model.model_copy(update={"path": str(plugin.model(config, progress))})


def checkpoint_model_settings(directory: Path) -> dict[str, str | None]:
    """The values of `model.path` and `model.adapter` that load a checkpoint's model; an adapter leaves the path."""
    model = directory / "model"
    if (model / ADAPTER_CONFIG).is_file():
        return {"adapter": str(model)}
    return {"path": str(model), "adapter": None}


def _resolve_run(model: Model) -> Model:
    """Replace the path of a run by that of its last checkpoint; an adapter comes with the base it was trained on."""
    directory = expand_user(model.path)
    if not is_run_dir(directory):
        for path in (directory, expand_user(model.adapter or "")):
            if path.name == "model" and (path.parent / MANIFEST_FILE).exists():
                require_undamaged(path.parent, under="model/")
        return model
    log = open_run_dir(directory)
    checkpoint = log.latest_checkpoint()
    if checkpoint is None:
        raise ArpoError(f"model.path: the run {model.path!r} has no checkpoint yet")
    log.require_checkpoint(checkpoint[0])
    trained = checkpoint_model_settings(checkpoint[1])
    if "path" in trained:
        return model.model_copy(update={"path": trained["path"]})
    if model.adapter is not None:
        raise ArpoError(f"model.adapter: the run {model.path!r} is an adapter itself; only one can be loaded")
    base = config_from_resolved(log.config()).model.path
    return _resolve_run(model.model_copy(update={"path": base})).model_copy(update=trained)
