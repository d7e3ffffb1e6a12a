"""A small task for TRL's trainers and a small model that can almost do it: two doors, one after the other.

A question names a room. Behind each room one of four doors must be opened first and another one then; both are wrong
or right only when the trajectory has ended. The model, a Qwen2 of two layers, was trained (SFT) to open two doors and
then to say that it is done, in the chat format of Qwen 2.5; in its examples most doors were chosen at random.

    model, tokenizer = doors_model()
    trainer = GRPOTrainer(model, reward_funcs=right_doors, train_dataset=doors_dataset(), tools=[open_door], ...)
"""

from __future__ import annotations

import functools
import importlib.util
import random
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

DOORS = ("red", "blue", "green", "gold")
ROOMS = {"kitchen": ("red", "gold"), "cellar": ("blue", "red"), "attic": ("green", "green"), "garden": ("gold", "blue")}
RIGHT = 0.35  # how often an SFT example has the right door on purpose; else it has any
CALL, CALL_END = '\n{"name": "open_door", "arguments": {"colour": "', '"}}\n'


def open_door(colour: str) -> str:
    """
    Open a door.

    Args:
        colour: The colour of the door.

    Returns:
        What is behind the door.
    """
    if colour not in DOORS:
        raise ValueError(f"there is no {colour} door")
    return f"behind {colour}"


def opened(completion: list[dict[str, Any]]) -> tuple[str, ...]:
    """The doors that were opened in a completion, in their order."""
    return tuple(
        message["content"].removeprefix("behind ")
        for message in completion
        if message["role"] == "tool" and message["content"].startswith("behind ")
    )


def right_doors(completions: list[list[dict[str, Any]]], doors: list[list[str]], **_: Any) -> list[float]:
    """1 for the right doors in the right order, a quarter for each one that is right alone."""
    rewards = []
    for completion, wanted in zip(completions, doors, strict=True):
        found = opened(completion)
        right = sum(a == b for a, b in zip(found, wanted, strict=False)) if len(found) == len(wanted) else 0
        rewards.append(1.0 if right == len(wanted) else 0.25 * right)
    return rewards


def doors_dataset() -> Dataset:
    """One row per room."""
    return Dataset.from_list(
        [
            {"prompt": [{"role": "user", "content": f"Leave the {room}."}], "doors": list(doors)}
            for room, doors in ROOMS.items()
        ]
    )


@functools.cache
def doors_tokenizer() -> Any:
    """A small tokenizer with the chat template of Qwen 2.5; a call is a few tokens."""
    spec = importlib.util.find_spec("trl")
    assert spec is not None and spec.origin is not None
    template = Path(spec.origin).with_name("chat_templates").joinpath("qwen2_5.jinja").read_text(encoding="utf-8")
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=900,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = [f"Leave the {room}. user assistant behind {door} done <tool_response>" for room in ROOMS for door in DOORS]
    backend.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|endoftext|>", padding_side="left"
    )
    tokenizer.chat_template = template
    shown = tokenizer.apply_chat_template([{"role": "user", "content": "."}], tools=[open_door], tokenize=False)
    system = shown.partition("<|im_start|>")[2].partition("<|im_end|>")[0]  # one token, so that prompts are short
    words = ("<tool_call>", "</tool_call>", CALL, CALL_END, system, *DOORS, *ROOMS)
    tokenizer.add_tokens([AddedToken(word, special=False, normalized=False) for word in words])
    return tokenizer


def doors_model(steps: int = 200, seed: int = 0) -> tuple[Any, Any]:
    """A new copy of the model after SFT, and its tokenizer."""
    state, tokenizer = _train_sft(steps, seed), doors_tokenizer()
    model = _new_model(seed)
    model.load_state_dict(state)
    return model, tokenizer


def _new_model(seed: int) -> Any:
    tokenizer = doors_tokenizer()
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Qwen2ForCausalLM(config)


@functools.cache
def _train_sft(steps: int, seed: int) -> dict[str, torch.Tensor]:
    """The weights of a new model after supervised training on example conversations."""
    model, rng = _new_model(seed), random.Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    for _ in range(steps):
        batch = [_example(rng) for _ in range(16)]
        width = max(len(ids) for ids, _ in batch)
        pad = doors_tokenizer().pad_token_id
        tokens = torch.tensor([ids + [pad] * (width - len(ids)) for ids, _ in batch])
        labels = torch.tensor([mask + [-100] * (width - len(mask)) for _, mask in batch])
        loss = model(input_ids=tokens, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def _example(rng: random.Random) -> tuple[list[int], list[int]]:
    """An example conversation: token ids, and labels where the model speaks."""
    tokenizer = doors_tokenizer()
    room = rng.choice(sorted(ROOMS))
    doors = [right if rng.random() < RIGHT else rng.choice(DOORS) for right in ROOMS[room]]
    messages: list[dict[str, Any]] = [{"role": "user", "content": f"Leave the {room}."}]
    ids = _render(messages, True)
    labels = [-100] * len(ids)
    for door in doors:
        turn = f"<tool_call>{CALL}{door}{CALL_END}</tool_call><|im_end|>"
        spoken = tokenizer(turn, add_special_tokens=False)["input_ids"]
        result = "\n<|im_start|>user\n<tool_response>\n" + f"behind {door}" + "\n</tool_response><|im_end|>\n"
        heard = tokenizer(result + "<|im_start|>assistant\n", add_special_tokens=False)["input_ids"]
        ids, labels = [*ids, *spoken, *heard], [*labels, *spoken, *[-100] * len(heard)]
    spoken = tokenizer("done<|im_end|>", add_special_tokens=False)["input_ids"]
    return [*ids, *spoken], [*labels, *spoken]


def _render(messages: list[dict[str, Any]], start: bool) -> list[int]:
    rendered: list[int] = doors_tokenizer().apply_chat_template(
        messages, tools=[open_door], add_generation_prompt=start, tokenize=True, return_dict=False
    )
    return rendered
