"""Which model a configuration means: a run's last checkpoint, an adapter with its base, a plug-in's model, or a path.

Loading is in `arpo.models.load`, which needs torch; finding the model does not.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from arpo.config.files import expand_user
from arpo.config.loading import config_from_resolved
from arpo.config.plugins import NO_OBJECTS, Objects, require_given
from arpo.config.schema import Config, Model
from arpo.data.task_set import Progress, model_plugin
from arpo.errors import ArpoError
from arpo.runs.manifest import MANIFEST_FILE
from arpo.runs.reporter import SILENT, Reporter
from arpo.runs.run_dir import checkpoint_step, is_run_dir, open_run_dir, require_good_weights

ADAPTER_CONFIG = "adapter_config.json"


def load_policy(
    config: Config, reporter: Reporter = SILENT, checked: Path | None = None, objects: Objects = NO_OBJECTS
) -> tuple[Any, Any]:
    """Load the model that is trained, and its tokenizer; the cold start of a plug-in's model is reported.

    Raises ArpoError if the weights are those of a damaged checkpoint. The checkpoint `checked` is not checked again.
    `objects` may hold the model and its tokenizer; that very model is then trained.
    """
    from arpo.models.load import load_trainable

    with reporter.progress("cold start", config.coldstart.steps) as bar:

        def show(step: int, steps: int, loss: float) -> None:
            if step == 0:
                reporter.message("Cold start: training the built-in model to call its tools (once; it is cached).")
            elif step % 50 == 0 and not reporter.has_bars:
                reporter.message(f"  step {step} of {steps}, loss {loss:.3f}")
            bar.update(step, steps, f"loss {loss:.3f}" if step else "writing examples")

        model = resolve_model(config, show)
        require_given("model.path", model.path, objects)
        check_weights(model, reporter, checked)
        return load_trainable(model, config.train, config.seed, objects.get(model.path))


def resolve_model(config: Config, progress: Progress = lambda *_: None) -> Model:
    """The model settings with names replaced by paths: a run becomes its last checkpoint, "tiny" a directory."""
    model = _resolve_run(config.model)
    plugin = model_plugin(model.path, config.data)
    return model if plugin is None else model.model_copy(update={"path": str(plugin.model(config, progress))})


def check_weights(model: Model, reporter: Reporter = SILENT, checked: Path | None = None) -> None:
    """Raise ArpoError if a resolved model is that of a damaged checkpoint; warn if its checkpoint has no manifest."""
    for path in (expand_user(model.path), expand_user(model.adapter or "")):
        checkpoint = path.parent
        known = (checkpoint / MANIFEST_FILE).exists() or checkpoint_step(checkpoint) is not None
        if path.name == "model" and known and checkpoint != checked:
            require_good_weights(checkpoint, reporter)


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
        return model
    log = open_run_dir(directory)
    checkpoint = log.latest_checkpoint()
    if checkpoint is None:
        raise ArpoError(f"model.path: the run {model.path!r} has no checkpoint yet")
    trained = checkpoint_model_settings(checkpoint[1])
    if "path" in trained:
        return model.model_copy(update={"path": trained["path"]})
    if model.adapter is not None:
        raise ArpoError(f"model.adapter: the run {model.path!r} is an adapter itself; only one can be loaded")
    base = config_from_resolved(log.config()).model.path
    return _resolve_run(model.model_copy(update={"path": base})).model_copy(update=trained)
