"""Exporting a trained agent as a directory that transformers, vLLM and arpo can use.

It holds the model in Hugging Face layout, the tokenizer with its chat template, a generation config with every token
that ends a turn, and `arpo_agent.json`: the system prompt, the tools with their JSON schemas, the call format, how the
answer is read, the limits, and the settings from which `arpo chat DIR`, `arpo eval DIR` and `arpo rollout DIR` work.

Guarantees: the weights are exactly those that the engine samples from at that step; a trained adapter is merged into
its base. A new directory appears complete or not at all; an existing empty one gets its files when all are written,
config.json last. File modes follow the umask. Secrets are masked.
Not covered: other file formats; the float32 master weights of a bfloat16 model; files that the settings name, like
those of tools, rewards and worked examples.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from arpo.agent.agent import call_format, system_text
from arpo.agent.formats import CallFormat
from arpo.agent.turn_end import turn_end_tokens
from arpo.config.loading import config_from_resolved
from arpo.config.masking import mask_message
from arpo.config.plugins import NO_OBJECTS, Objects
from arpo.config.schema import Config
from arpo.environments.build import build_toolset
from arpo.errors import ArpoError
from arpo.models.agent_file import AGENT_FILE, agent_settings
from arpo.models.checks import CONFIG, GENERATION_CONFIG, read_object
from arpo.models.load import load_model, load_tokenizer
from arpo.models.resolve import ADAPTER_CONFIG, check_weights, resolve_model
from arpo.models.save import new_directory, require_empty, save_merged, save_pretrained
from arpo.runs.reporter import SILENT, Reporter
from arpo.runs.run_dir import open_run_dir, require_good_weights
from arpo.tools.base import Tool


def export_model(run: Path, directory: Path, step: int | None = None, reporter: Reporter = SILENT) -> int:
    """Write the agent of this step's checkpoint (default: the last) to a new directory; return the step."""
    log = open_run_dir(run)
    steps = log.checkpoint_steps()
    if not steps:
        raise ArpoError(f"{run} has no checkpoint yet")
    if step is not None and step not in steps:
        raise ArpoError(f"{run} has no checkpoint of step {step}; it has {', '.join(map(str, steps))}")
    directory = directory.resolve()
    if directory.is_relative_to(run.resolve()):
        raise ArpoError(f"{directory}: is inside the run; choose a directory outside of it")
    require_empty(directory)
    step = steps[-1] if step is None else step
    model = log.checkpoint_path(step) / "model"
    require_good_weights(model.parent, reporter)
    config, merged = config_from_resolved(log.config()), None
    if (model / ADAPTER_CONFIG).is_file():
        base = resolve_model(config)
        check_weights(base, reporter)
        merged = load_model(base.model_copy(update={"adapter": str(model)}))
    with new_directory(directory) as new:
        if merged is not None:
            save_pretrained(*merged, new)
        else:
            shutil.copytree(model, new)
        _write_with_tools(new, config, load_tokenizer(new), reporter)
    return step


def save_agent(
    directory: Path,
    model: Any,
    tokenizer: Any,
    config: Config,
    tools: Mapping[str, Tool],
    objects: Objects = NO_OBJECTS,
) -> None:
    """Write a loaded model and its agent to a directory: new, empty, or with a saved agent, which is replaced.

    An adapter is merged into the model.
    """
    with new_directory(directory, replace_if=AGENT_FILE) as new:
        save_merged(model, tokenizer, new)
        write_agent_files(new, config, tokenizer, call_format(config, tools, tokenizer, objects))


def write_agent_files(directory: Path, config: Config, tokenizer: Any, fmt: CallFormat | None) -> None:
    """Put every end token into the generation config in a model's directory, and write the agent's file.

    Without a format, since the tools are not at hand, the file has only the settings.
    """
    path = directory / GENERATION_CONFIG
    values: dict[str, Any] = read_object(path) if path.is_file() else {}
    declared = values.get("eos_token_id", read_object(directory / CONFIG).get("eos_token_id"))
    holder = SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=declared))
    values["eos_token_id"] = sorted(
        turn_end_tokens(holder, tokenizer), key=lambda token: (token != tokenizer.eos_token_id, token)
    )
    path.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    prompt = config.prompt.model_copy(update={"system": system_text(config.prompt.system)})
    described = {} if fmt is None else describe_agent(config, fmt)
    text = agent_settings(config.model_copy(update={"prompt": prompt}), described)
    (directory / AGENT_FILE).write_text(text, encoding="utf-8")


def describe_agent(config: Config, fmt: CallFormat) -> dict[str, Any]:
    """What another program needs to use the agent: system prompt, tools as chat templates take them, format, limits."""
    tools = [
        {
            "type": "function",
            "function": {
                "name": spec.name,
                "description": mask_message(spec.description),
                "parameters": dict(spec.schema),
            },
        }
        for spec in fmt.specs
    ]
    return {
        "system_prompt": mask_message(fmt.system_prompt(system_text(config.prompt.system))),
        "tools": tools,
        "format": fmt.name,
        "answer": fmt.answer,
        "template_arguments": dict(fmt.template_arguments),
        "limits": {
            "max_tool_calls": config.rollout.max_tool_calls,
            "max_tokens": config.rollout.max_tokens,
            "max_result_tokens": config.tools.max_result_tokens,
        },
    }


def _write_with_tools(directory: Path, config: Config, tokenizer: Any, reporter: Reporter) -> None:
    """Write the files with the tools that the settings name; those that cannot be built now are not described."""
    try:
        with build_toolset(config) as tools:
            fmt = call_format(config, tools, tokenizer)
    except ArpoError as error:
        reporter.warning(f"{AGENT_FILE} does not describe the tools, since they cannot be opened here: {error}")
        fmt = None
    write_agent_files(directory, config, tokenizer, fmt)
