"""Loading a model and its tokenizer: a Hugging Face directory or hub name, or a GGUF file, with or without a LoRA
adapter. Everything that can go wrong is an ArpoError that says what to do."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import HfApi
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    PreTrainedModel,
)
from transformers.utils import cached_file
from transformers.utils import logging as transformers_logging

from arpo.config.files import expand_user
from arpo.config.plugins import GIVEN
from arpo.config.schema import Model, Train
from arpo.errors import ArpoError
from arpo.models.checks import (
    CONFIG,
    INDEX,
    TOKENIZER_FILES,
    WEIGHTS,
    check_directory,
    check_sizes,
    num_stored_values,
    read_object,
    require_memory,
    weight_files,
)
from arpo.models.gguf import load_gguf
from arpo.models.lora import add_adapter, has_adapter, load_adapter, merge_adapter
from arpo.models.network import SUPPORTED_FAMILIES
from arpo.models.resolve import ADAPTER_CONFIG
from arpo.models.threads import set_num_threads
from arpo.models.vision import (
    PROCESSOR_FILES,
    TEMPLATE_FILE,
    VISION_FAMILIES,
    check_vision_config,
    refuse_family,
    split_model,
    vision_tower,
)
from arpo.types import derive_seed

transformers_logging.disable_progress_bar()  # loading is quick, and arpo shows its own progress
_loading = threading.Lock()  # while transformers load a model, nn.init does nothing, in any thread of the process


def pick_device(device: str) -> torch.device:
    """Return the device that a `model.device` setting means on this machine."""
    if device == "cuda" and not torch.cuda.is_available():
        raise ArpoError(
            "model.device is cuda, but torch sees no CUDA device: use model.device=cpu, or see `arpo doctor`"
        )
    return torch.device("cuda" if device == "cuda" or (device == "auto" and torch.cuda.is_available()) else "cpu")


def load_model(settings: Model, given: tuple[Any, Any] | None = None) -> tuple[Any, Any]:
    """Return the causal LM, on its device, in eval mode and merged with its adapter, and its tokenizer.

    A model and a tokenizer that are `given` take the place of those that `settings.path` names.
    """
    with _loading:
        return _load_model(settings, given)


def _load_model(settings: Model, given: tuple[Any, Any] | None) -> tuple[Any, Any]:
    set_num_threads()
    path = os.path.expanduser(settings.path)
    dtype, device = getattr(torch, settings.dtype), pick_device(settings.device)
    if given is not None:
        model, tokenizer = given
        _check_given(model, tokenizer)
    elif path.lower().endswith(".gguf"):
        if not Path(path).is_file():
            raise ArpoError(f"model.path: there is no file {path!r}")
        model, tokenizer = load_gguf(Path(path), dtype)
    else:
        model, tokenizer = _load_hugging_face(path, dtype, device)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    if settings.adapter is not None:
        model = merge_adapter(model, expand_user(settings.adapter))
    shown = path.removeprefix(GIVEN)
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Dropout) and module.p > 0:
            raise ArpoError(f"model.path: {shown!r} has dropout ({name}): its log-probs would not be reproducible")
    if (tower := vision_tower(model)) is not None:
        for part in tower.to(device).parts:
            own_memory(part)
    return own_memory(model.to(device)).eval(), tokenizer


def load_tokenizer(directory: Path) -> Any:
    """Return the tokenizer in a model's directory."""
    try:
        check_directory(directory)
        return _load_tokenizer(str(directory), directory, {"trust_remote_code": False, "local_files_only": True})
    except ValueError as error:
        raise ArpoError(f"{directory}: {error}") from error


def own_memory(model: Any) -> Any:
    """Copy what lies in CPU memory that torch did not allocate for it alone; returns the model.

    Weights in the dtype of their file are views of the mapped file and start at any address. Matrix products round
    differently depending on that, so a resumed run would drift from an undisturbed one, and truncating the file would
    end the process.
    """
    for tensor in itertools.chain(model.parameters(), model.buffers()):
        storage = tensor.untyped_storage()
        own = storage.resizable() and storage.nbytes() == tensor.nbytes  # torch resizes only what it allocated
        if tensor.device.type == "cpu" and not own:
            tensor.data = tensor.data.clone()
    return model


def load_trainable(settings: Model, train: Train, seed: int, given: tuple[Any, Any] | None = None) -> tuple[Any, Any]:
    """Return the model as a run trains it, and its tokenizer.

    With `train.lora_rank` the weights are frozen and an adapter is added: a new one drawn from the run's seed, or that
    of `model.adapter`.
    """
    if not train.lora_rank:
        return load_model(settings, given)
    model, tokenizer = load_model(settings.model_copy(update={"adapter": None}), given)
    with _loading:
        model = add_adapter(model, train.lora_rank, train.lora_alpha, train.lora_targets, derive_seed(seed, "lora"))
    if settings.adapter is not None:
        load_adapter(model, expand_user(settings.adapter))
    return model, tokenizer


@contextmanager
def gradient_checkpointing(model: Any) -> Iterator[None]:
    """Within the context, forward passes keep only the inputs of each layer; backward passes recompute the rest."""
    model.gradient_checkpointing_enable({"use_reentrant": False, "preserve_rng_state": False})
    model.train()  # layers checkpoint only in training mode; there is no dropout for it to turn on
    try:
        yield
    finally:
        model.eval()
        model.gradient_checkpointing_disable()


def _load_hugging_face(path: str, dtype: torch.dtype, device: torch.device) -> tuple[Any, Any]:
    is_path = _looks_like_a_path(path)
    if is_path and not (Path(path) / "config.json").is_file():
        if (Path(path) / ADAPTER_CONFIG).is_file():
            raise ArpoError(
                f"model.path: {path!r} is an adapter, not a model: set model.adapter to it, and model.path to its base"
            )
        reason = "it has no config.json" if Path(path).is_dir() else "there is no such directory"
        raise ArpoError(
            f'model.path: {path!r} is not a model: {reason}; give a Hugging Face directory, a hub name or "tiny"'
        )
    hub_error = None if is_path else _hub_error(path)
    local = is_path or hub_error is not None  # without a network, a model in the cache can still be loaded
    kind = None
    given: dict[str, Any] = {"trust_remote_code": False, "local_files_only": local}
    try:
        directory = Path(path) if is_path else _download(path, local)
        check_directory(directory)
        described = read_object(directory / CONFIG)
        kind = described.get("model_type")
        refuse_family(described)
        sees = kind in VISION_FAMILIES
        if sees:
            check_vision_config(described)
        tokenizer = _load_tokenizer(path, directory, given)
        auto = AutoModelForImageTextToText if sees else AutoModelForCausalLM
        _require_weights(directory, AutoConfig.from_pretrained(path, **given), dtype, device, auto)
        model, report = auto.from_pretrained(path, dtype=dtype, use_safetensors=True, output_loading_info=True, **given)
        _check_loaded(model, tokenizer, report)
        if sees:
            model = split_model(model, tokenizer, directory)
    except ArpoError as error:
        raise ArpoError(f"model.path: {error}") from error
    except (KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:  # broken files make these libraries raise anything; of tokenizers even panics
        if hub_error is not None:
            raise ArpoError(
                f"model.path: {path!r} is neither a local model nor available on the hub ({hub_error}): "
                "give a directory that holds the model, or check name and network"
            ) from error
        known = kind is None or kind in SUPPORTED_FAMILIES
        why = "" if known else f"its type {kind!r:.60} is not supported, only {', '.join(SUPPORTED_FAMILIES)}: "
        raise ArpoError(f"model.path: {path!r} could not be loaded: {why}{_first_line(error)}") from error
    return model, tokenizer


def _check_given(model: Any, tokenizer: Any) -> None:
    """Raise if a loaded model cannot be used as it is."""
    if not isinstance(model, PreTrainedModel):
        raise ArpoError(
            f"model: got a {type(model).__name__}, expected a causal LM of transformers, a name or a path; to train an "
            'adapter, give the plain model and train={"lora_rank": 16}'
        )
    try:
        refuse_family(model.config.to_dict())
    except ValueError as error:
        raise ArpoError(f"model: {error}") from None
    if model.config.model_type in VISION_FAMILIES:
        raise ArpoError(
            "model: a loaded model that sees lacks its image processor; give the path of its directory, or its name"
        )
    if model.get_output_embeddings() is None:
        raise ArpoError(f"model: a {type(model).__name__} predicts no tokens; load it with AutoModelForCausalLM")
    if has_adapter(model):
        raise ArpoError(
            "model: it has an adapter already, perhaps of a trainer with train.lora_rank; load the plain model again"
        )
    try:
        _check_loaded(model, tokenizer, {"missing_keys": (), "mismatched_keys": ()})
    except ValueError as error:
        raise ArpoError(f"model: {error}") from None


def _load_tokenizer(path: str, directory: Path, given: dict[str, Any]) -> Any:
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, **given)
        if tokenizer.chat_template is None and (directory / TEMPLATE_FILE).is_file():  # of a processor
            tokenizer.chat_template = read_object(directory / TEMPLATE_FILE).get("chat_template")
        return tokenizer
    except (KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:  # see above
        found = next((name for name in TOKENIZER_FILES if (directory / name).exists()), None)
        if found is None and directory == Path(path):
            raise ValueError(
                f"it has no {TOKENIZER_FILES[0]}: copy it from the model that this one was made of"
            ) from error
        where = f" from {found}" if found else ""
        raise ValueError(f"its tokenizer cannot be read{where}: {_first_line(error)}") from error


def _download(repository: str, local: bool) -> Path:
    """The directory of a hub model in the cache, with its config and weights; they are downloaded if need be."""

    def fetch(file: str, required: bool = True) -> str | None:
        found: str | None = cached_file(
            repository, file, local_files_only=local, _raise_exceptions_for_missing_entries=required
        )
        return found

    directory = Path(str(fetch(CONFIG))).parent
    config = read_object(directory / CONFIG)
    check_sizes(config)
    if config.get("model_type") in VISION_FAMILIES:
        for name in (*PROCESSOR_FILES, TEMPLATE_FILE):
            fetch(name, required=False)
    if fetch(WEIGHTS, required=False) is None and fetch(INDEX, required=False) is not None:
        for file in weight_files(directory):
            fetch(file.name)
    return directory


def _require_weights(
    directory: Path, config: Any, dtype: torch.dtype, device: torch.device, auto: Any = AutoModelForCausalLM
) -> None:
    """Raise ValueError unless the files can hold all weights of the model, and the model fits into memory."""
    with torch.device("meta"):
        skeleton = auto.from_config(config, trust_remote_code=False)
    described = sum(parameter.numel() for parameter in skeleton.parameters())
    stored = num_stored_values(weight_files(directory))
    if described > stored.total():
        raise ValueError(
            f"{CONFIG} describes a model of {described:,} weights, but its files hold only {stored.total():,}: they do "
            "not belong together, or are incomplete"
        )
    require_memory(described, dtype, device)
    converted = stored.total() - stored[str(dtype).removeprefix("torch.")]  # the others stay in the mapped file
    require_memory(min(described, converted), dtype, torch.device("cpu"))


def _check_loaded(model: Any, tokenizer: Any, report: dict[str, Any]) -> None:
    """Raise ValueError if weights are missing, or the tokenizer has ids without an embedding."""
    missing = sorted(map(str, [*report["missing_keys"], *report["mismatched_keys"]]))
    if missing:
        raise ValueError(f"its files hold no weights of the right shape for {missing[0]!r}")
    rows, added = model.get_input_embeddings().weight.shape[0], tokenizer.added_tokens_decoder
    ids = [number for number in tokenizer.get_vocab().values() if number >= rows]
    if any(number not in added for number in ids) or (tokenizer.eos_token_id or 0) >= rows:
        raise ValueError(f"its tokenizer has ids up to {max(ids)}, but the model has only {rows} embeddings")


def _hub_error(name: str) -> str | None:
    """Return why the hub lacks a model, or None. Asked once: loading itself would retry for most of a minute."""
    try:
        HfApi().model_info(name, timeout=10)
    except Exception as error:  # its HTTP client differs between versions
        return _first_line(error)
    return None


def _looks_like_a_path(path: str) -> bool:
    """Return whether this is a path: anything that is not `name` or `owner/name`, or whose first part exists here."""
    return (
        path.startswith((".", "/"))
        or path.count("/") > 1
        or Path(path).exists()
        or Path(path).parent.name in (entry.name for entry in Path().iterdir() if entry.is_dir())
    )


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0][:300] or type(error).__name__
