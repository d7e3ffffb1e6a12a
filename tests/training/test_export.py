"""What is written for use elsewhere: all end tokens, the chat template, the agent's file; and that it works there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_runs import call
from templates import make_tokenizer
from tool_models import SETTINGS, TASK, TOOLS_TEMPLATE, add, save_tool_agent, turns_of
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

import arpo
from arpo.config.loading import load_config
from arpo.models.save import save_pretrained
from arpo.runs.run_dir import open_run_dir
from arpo.training.export import export_model, write_agent_files


def read(path: Path) -> Any:
    return json.loads(path.read_text())


@pytest.mark.parametrize("end", ["<|im_end|>", "<|endoftext|>"])
def test_an_exported_agent_makes_the_same_greedy_turns_in_transformers(end: str, tmp_path: Path) -> None:
    turns = save_tool_agent(tmp_path / "agent", end)
    model, tokenizer = (kind.from_pretrained(tmp_path / "agent") for kind in (AutoModelForCausalLM, AutoTokenizer))
    assert [tokenizer.decode(tokens[-1:]) for _, tokens in turns] == ["<|im_end|>", end]
    for before, tokens in turns:
        ids = torch.tensor([before])
        written = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=60)
        assert tuple(written[0, len(before) :].tolist()) == tokens
    if end != tokenizer.eos_token:  # with the tokenizer's alone it would go on
        only = model.generate(ids, attention_mask=torch.ones_like(ids), eos_token_id=2, max_new_tokens=60)
        assert only.shape[1] > len(before) + len(tokens)

    described = read(tmp_path / "agent" / "arpo_agent.json")
    messages = [
        {"role": "system", "content": described["system_prompt"]},
        {"role": "user", "content": TASK["question"]},
    ]
    options = {"add_generation_prompt": True, "tokenize": False, **described["template_arguments"]}
    prompt = tokenizer.apply_chat_template(messages, tools=described["tools"], **options)
    assert prompt == tokenizer.decode(turns[0][0])

    with arpo.load_agent(tmp_path / "agent", tools=[add], model={"device": "cpu"}, progress=False) as agent:
        assert turns_of(agent.evaluate([TASK]).trees[0].nodes) == turns


def test_what_is_written(tmp_path: Path) -> None:
    save_tool_agent(tmp_path / "agent", "<|endoftext|>")
    assert read(tmp_path / "agent" / "generation_config.json")["eos_token_id"] == [2, 0]
    assert GenerationConfig.from_pretrained(tmp_path / "agent").eos_token_id == [2, 0]
    assert (tmp_path / "agent" / "chat_template.jinja").read_text() == TOOLS_TEMPLATE
    described = read(tmp_path / "agent" / "arpo_agent.json")
    settings = described.pop("settings")
    (function,) = [tool["function"] for tool in described.pop("tools")]
    assert described == {
        "version": 1,
        "system_prompt": "Use your tools.",
        "format": "native",
        "answer": "boxed",
        "template_arguments": {},
        "limits": {"max_tool_calls": 3, "max_tokens": 200, "max_result_tokens": 512},
    }
    assert (function["name"], function["parameters"]["required"]) == ("add", ["a", "b"])
    assert settings["prompt"]["system"] == SETTINGS["prompt"]["system"]
    assert {"prompt", "answer", "tools", "environment", "rollout", "branching", "eval"} <= settings.keys()


def test_a_run_is_exported_with_its_agent(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert call("export", trained, tmp_path / "out") == 0
    assert "the agent of step 2 is in" in capsys.readouterr().out
    saved = open_run_dir(trained).checkpoint_path(2) / "model"
    assert {file.name for file in (tmp_path / "out").iterdir()} == {
        *(file.name for file in saved.iterdir()),
        "arpo_agent.json",
    }
    assert read(tmp_path / "out" / "generation_config.json")["eos_token_id"] == [1]
    described = read(tmp_path / "out" / "arpo_agent.json")
    assert (described["format"], described["answer"]) == ("tags", "tag")
    assert [tool["function"]["name"] for tool in described["tools"]] == ["search", "python"]
    assert "<search>" in described["system_prompt"]
    assert call("rollout", tmp_path / "out", "--ask", "Where was Mira Tolven born?") == 0
    assert call("eval", tmp_path / "out", "eval.questions=1", "eval.samples=1") == 0


def test_tools_that_cannot_be_opened_do_not_keep_the_model_back(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(config: arpo.Config) -> None:
        raise arpo.ArpoError("tools.mcp: no such server")

    monkeypatch.setattr("arpo.training.export.build_toolset", refuse)
    assert call("export", trained, tmp_path / "out") == 0
    captured = capsys.readouterr()
    assert "does not describe the tools" in captured.out + captured.err
    assert read(tmp_path / "out" / "arpo_agent.json").keys() == {"version", "settings"}
    assert export_model(trained, tmp_path / "again", 2) == 2


def test_no_secret_is_written_and_a_system_prompt_in_a_file_is(tiny_model: Any, tokenizer: Any, tmp_path: Path) -> None:
    secret = "b7f3c9d1e5a8460f92ab"
    (tmp_path / "prompt.md").write_text("Look at the shelf.\nThen answer.")
    config = load_config(
        None,
        [
            f"prompt.system={tmp_path / 'prompt.md'}",
            f"tools.search=https://me:{secret}@example.org/search?key={secret}",
            f'tools.mcp=[{{command = "serve", env = {{KEY = "{secret}"}}}}]',
        ],
    )
    save_pretrained(tiny_model, tokenizer, tmp_path / "agent")
    write_agent_files(tmp_path / "agent", config, tokenizer, None)
    assert secret not in (tmp_path / "agent" / "arpo_agent.json").read_text()
    settings = read(tmp_path / "agent" / "arpo_agent.json")["settings"]
    assert settings["prompt"]["system"] == "Look at the shelf.\nThen answer."


def test_a_model_without_a_generation_config_gets_one(tiny_model: Any, tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    save_pretrained(tiny_model, tokenizer, tmp_path)
    (tmp_path / "generation_config.json").unlink()
    write_agent_files(tmp_path, load_config(None, []), tokenizer, None)
    assert read(tmp_path / "generation_config.json") == {"eos_token_id": [2, 0, 1]}
