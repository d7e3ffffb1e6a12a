"""A random chat model with tools, of the Qwen2 family, that calls a tool and then ends its turn in a given way.

Its layers are random, so its turns depend on all that stands before them. Only rows of its output layer are set, so
that it makes the turns of one conversation.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from templates import make_tokenizer
from tokenizers import AddedToken
from transformers import Qwen2Config, Qwen2ForCausalLM

import arpo
from arpo.training.export import save_agent
from arpo.types import Kind, Node, Task

TOOLS_TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{% if messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}\n\n"
    "# Tools\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
    'Write <tool_call>{"name": ..., "arguments": ...}</tool_call>.<|im_end|>\n'
    "{% elif messages[0].role == 'system' %}<|im_start|>system\n{{ messages[0].content }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}{% if m.role == 'tool' %}"
    "{% if loop.previtem.role != 'tool' %}<|im_start|>user{% endif %}\n"
    "<tool_response>\n{{ m.content }}\n</tool_response>"
    "{% if loop.last or loop.nextitem.role != 'tool' %}<|im_end|>\n{% endif %}"
    "{% elif m.role == 'assistant' %}<|im_start|>assistant\n{{ m.content }}"
    "{% for call in m.tool_calls or [] %}{% if m.content or not loop.first %}\n{% endif %}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}<|im_end|>\n"
    "{% elif m.role != 'system' %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CALL = '\n{"name": "add", "arguments": {"a": 20, "b": 22}}\n'


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: the first
        b: the second
    """
    return a + b


def make_tool_model(seed: int = 0) -> tuple[Any, Any]:
    """The model with its tokenizer, whose eos is `<|im_end|>`; its call of `add` is one token."""
    tokenizer = make_tokenizer(TOOLS_TEMPLATE)
    tokenizer.pad_token = "<|endoftext|>"
    tokenizer.add_tokens([AddedToken(CALL, special=False, normalized=False)])
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        initializer_range=0.15,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Qwen2ForCausalLM(config).eval(), tokenizer


@torch.no_grad()
def teach(model: Any, turns: Sequence[tuple[Sequence[int], Sequence[int]]]) -> None:
    """Make each turn the likeliest one after what stands before it, by the output layer alone."""
    hidden, targets = [], []
    for before, tokens in turns:
        states = model.model(torch.tensor([[*before, *tokens]])).last_hidden_state[0]
        hidden.append(states[len(before) - 1 : -1])
        targets += tokens
    rows_HT = torch.linalg.pinv(torch.cat(hidden))  # one for each place, orthogonal to all other places
    for token in set(targets):
        places = [place for place, each in enumerate(targets) if each == token]
        model.lm_head.weight[token] = 40 * rows_HT[:, places].sum(1)


SETTINGS: dict[str, Any] = {
    "rollout": {"max_tokens": 200, "max_tool_calls": 3},
    "eval": {"temperature": 0.0, "samples": 1},
    "prompt": {"system": "Use your tools."},
    "model": {"device": "cpu"},
}
TASK = {"question": "How much are 20 and 22?", "answer": "42"}


def save_tool_agent(directory: Path, end: str) -> list[tuple[list[int], tuple[int, ...]]]:
    """Write an agent that calls `add` and then ends its answer with the token `end`.

    Returns the greedy turns of arpo's local engine: what stands before each one, and its tokens.
    """
    model, tokenizer = make_tool_model()
    settings = {**SETTINGS, "model": {"path": model, "device": "cpu"}}
    with arpo.Agent(tokenizer=tokenizer, tools=[add], progress=False, **settings) as agent:
        context = agent._require_context()
        texts = [f"She was in<tool_call>{CALL}</tool_call><|im_end|>", f"the year 19 \\boxed{{42}}{end}"]
        answers = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
        prefixes: list[Sequence[int]] = [context.agent.prompt(Task("t", TASK["question"]))]
        for _ in answers:
            teach(model, list(zip(prefixes, answers, strict=False)))
            turns = turns_of(agent.evaluate([TASK]).trees[0].nodes)
            prefixes = [before for before, _ in turns[:2]]
        save_agent(directory, model, tokenizer, agent.config, context.tools)
        return turns


def turns_of(nodes: Sequence[Node]) -> list[tuple[list[int], tuple[int, ...]]]:
    """The turns of a tree with one trajectory, each with all tokens before it."""
    turns, before = [], list[int]()
    for node in nodes:
        if node.kind is Kind.MODEL:
            turns.append((list(before), node.tokens))
        before += node.tokens
    return turns
