"""GGUF files: a loaded model equals the Hugging Face model it was written from; invalid files are refused."""

from __future__ import annotations

import itertools
import json
import struct
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf_files import (
    FAMILIES,
    TEMPLATE,
    TEXTS,
    Vocabulary,
    byte_level,
    sentencepiece,
    settings_of,
    small_model,
    tensors_of,
    vocabulary_of,
    write,
    write_model,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, GemmaTokenizer, Qwen2Tokenizer
from transformers.tokenization_utils_base import generate_merges

from arpo.errors import ArpoError
from arpo.models.gguf import load_gguf
from arpo.models.gguf_file import read_gguf

VOCABULARIES = {family: vocabulary_of(family) for family in FAMILIES}


def logits(model: Any) -> torch.Tensor:
    tokens = torch.arange(5, 45).view(2, 20)
    with torch.no_grad():
        return model(tokens).logits


def rounded(model: Any, kind: Kind) -> Any:
    """The model with every matrix stored as `kind` and read back."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                numbers = gguf.dequantize(gguf.quantize(parameter.numpy(), kind), kind)
                parameter.copy_(torch.from_numpy(numbers.copy()))
    return model


def original(family: str, **more: Any) -> Any:
    return small_model(family, len(VOCABULARIES[family].tokens), **more)


# The model.


@pytest.mark.parametrize("family", FAMILIES)
def test_the_model_is_the_one_that_was_written(family: str, tmp_path: Path) -> None:
    model = original(family)
    path = write_model(tmp_path / "x.gguf", family, model, VOCABULARIES[family])
    loaded, _ = load_gguf(path, torch.float32)
    path.write_bytes(b"")  # the file is not needed any more
    torch.testing.assert_close(logits(loaded), logits(model), rtol=0, atol=1e-5)
    ours, theirs = loaded.config.to_dict(), model.config.to_dict()
    odd = {"architectures", "dtype", "_name_or_path", "_sliding_window_pattern"}
    assert {key: value for key, value in ours.items() if key not in odd and value != theirs.get(key)} == (
        {"head_dim": 16} if family == "qwen2" else {}
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_q8_0_gives_the_rounded_model(family: str, tmp_path: Path) -> None:
    model = original(family)
    # rows are rounded one by one, so their order in the file does not matter
    path = write_model(tmp_path / "x.gguf", family, model, VOCABULARIES[family], kind=Kind.Q8_0)
    loaded, _ = load_gguf(path, torch.float32)
    exact = logits(model)
    torch.testing.assert_close(logits(loaded), logits(rounded(model, Kind.Q8_0)), rtol=0, atol=1e-5)
    assert (logits(loaded) - exact).abs().max() > 1e-4


@pytest.mark.parametrize("kind", [Kind.F16, Kind.BF16, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1])
def test_other_quantization_types(kind: Kind, tmp_path: Path) -> None:
    model = original("llama")
    loaded, _ = load_gguf(
        write_model(tmp_path / "x.gguf", "llama", model, VOCABULARIES["llama"], kind=kind), torch.float32
    )
    torch.testing.assert_close(logits(loaded), logits(rounded(model, kind)), rtol=0, atol=1e-5)


def test_bfloat16(tmp_path: Path) -> None:
    model = original("llama")
    loaded, _ = load_gguf(write_model(tmp_path / "x.gguf", "llama", model, VOCABULARIES["llama"]), torch.bfloat16)
    assert {parameter.dtype for parameter in loaded.parameters()} == {torch.bfloat16}
    assert torch.equal(loaded.model.norm.weight, model.model.norm.weight.bfloat16())


def llama3_factors(head_size: int, theta: float, factor: float) -> np.ndarray[Any, Any]:
    """The factors that llama.cpp's converter writes, computed as it does."""
    values = []
    for i in range(0, head_size, 2):
        wave = 2 * np.pi * theta ** (i / head_size)
        if wave < 8192 / 4:
            values.append(1.0)
        elif wave > 8192:
            values.append(factor)
        else:
            smooth = (8192 / wave - 1) / (4 - 1)
            values.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(values, dtype=np.float32)


def test_the_rope_of_llama_3(tmp_path: Path) -> None:
    rope = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 32.0, "low_freq_factor": 1.0}
    rope |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    model = original("llama", rope_parameters=rope, head_dim=32)
    factors = llama3_factors(32, 500000.0, 32.0)
    assert len(set(factors.tolist())) > 2
    tensors = tensors_of("llama", model) | {"rope_freqs.weight": factors}
    path = write(tmp_path / "x.gguf", "llama", settings_of("llama", model), tensors, VOCABULARIES["llama"])
    loaded, _ = load_gguf(path, torch.float32)
    assert {key: loaded.config.rope_parameters[key] for key in rope} == rope
    tokens = torch.arange(5, 45).repeat(8)[None]
    with torch.no_grad():
        torch.testing.assert_close(loaded(tokens).logits, model(tokens).logits, rtol=0, atol=1e-4)
    tensors["rope_freqs.weight"] = factors * np.float32(1.1)
    path = write(tmp_path / "y.gguf", "llama", settings_of("llama", model), tensors, VOCABULARIES["llama"])
    with pytest.raises(ArpoError, match=r"rope_freqs\.weight is not that of Llama 3"):
        load_gguf(path, torch.float32)


def is_tied(model: Any) -> bool:
    shared = model.get_input_embeddings().weight.data_ptr() == model.get_output_embeddings().weight.data_ptr()
    assert shared == model.config.tie_word_embeddings
    return shared


@pytest.mark.parametrize("coarse", [Kind.Q4_0, Kind.Q5_0, Kind.Q8_0, Kind.F16])
def test_one_matrix_stored_twice_is_tied_and_the_better_copy_is_used(coarse: Kind, tmp_path: Path) -> None:
    model = original("qwen2")
    tensors = tensors_of("qwen2", model)
    tensors["output.weight"] = tensors["token_embd.weight"]
    kinds = {"token_embd.weight": coarse, "output.weight": Kind.Q8_0}
    path = tmp_path / "x.gguf"
    write(path, "qwen2", settings_of("qwen2", model), tensors, VOCABULARIES["qwen2"], kinds=kinds)
    loaded, _ = load_gguf(path, torch.float32)
    assert is_tied(loaded)
    best = max((coarse, Kind.Q8_0), key=lambda kind: gguf.GGML_QUANT_SIZES[kind][1] / gguf.GGML_QUANT_SIZES[kind][0])
    expected = gguf.dequantize(gguf.quantize(tensors["output.weight"], best), best)
    assert np.array_equal(loaded.get_input_embeddings().weight.detach().numpy(), expected)


@pytest.mark.parametrize("change", [0.2, 2.0])
def test_two_matrices_stay_two(change: float, tmp_path: Path) -> None:
    model = original("qwen2", tie_word_embeddings=False)
    with torch.no_grad():
        weight = model.model.embed_tokens.weight
        model.lm_head.weight.copy_(weight + change * weight.std() * torch.randn_like(weight))
    path = write_model(tmp_path / "x.gguf", "qwen2", model, VOCABULARIES["qwen2"], kind=Kind.Q8_0)
    loaded, _ = load_gguf(path, torch.float32)
    assert not is_tied(loaded)
    torch.testing.assert_close(logits(loaded), logits(rounded(model, Kind.Q8_0)), rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_was_loaded_can_be_saved_and_loaded_again(family: str, tmp_path: Path) -> None:
    path = write_model(tmp_path / "x.gguf", family, original(family), VOCABULARIES[family], kind=Kind.Q8_0)
    model, tokenizer = load_gguf(path, torch.float32)
    model.save_pretrained(tmp_path / "saved")
    tokenizer.save_pretrained(tmp_path / "saved")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert torch.equal(logits(model), logits(again))
    assert is_tied(again) == is_tied(model)
    assert again.generation_config.eos_token_id == model.generation_config.eos_token_id
    other = AutoTokenizer.from_pretrained(tmp_path / "saved")
    for text in [*TEXTS, "  two  e\u0301 <tool_call> 12345<|im_end|>", "\u2581\u2581 <end_of_turn>"]:
        assert other(text)["input_ids"] == tokenizer(text)["input_ids"]
        assert other.decode(other(text)["input_ids"]) == tokenizer.decode(tokenizer(text)["input_ids"])
    names = ("bos_token", "eos_token", "pad_token", "chat_template")
    assert [getattr(other, name) for name in names] == [getattr(tokenizer, name) for name in names]
    assert len(other) == len(tokenizer)


# The tokenizer.


def load_tokenizer(path: Path, family: str, vocabulary: Vocabulary) -> Any:
    model = small_model(family, len(vocabulary.tokens), num_hidden_layers=1)
    return load_gguf(write_model(path / "x.gguf", family, model, vocabulary), torch.float32)[1]


def byte_level_oracle(vocabulary: Vocabulary, pre: str) -> Any:
    """The Hugging Face tokenizer for this pre-tokenizer and vocabulary."""
    count = len(vocabulary.tokens) - 2  # the last two are padding
    vocab = {token: index for index, token in enumerate(vocabulary.tokens[:count])}
    merges = [tuple(merge.split(" ")) for merge in vocabulary.values["merges"]]
    if pre == "qwen2":
        core = Qwen2Tokenizer(vocab=vocab, merges=merges)._tokenizer
    else:
        core = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=pre == "llama-bpe"))
        plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        cut = Regex(
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
            r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
        )
        core.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), plain]
            if pre == "smollm"
            else [pre_tokenizers.Split(cut, "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
        )
    core.add_special_tokens([AddedToken(token, normalized=False) for token in vocabulary.tokens[:3]])
    core.add_tokens([AddedToken("<tool_call>", normalized=False)])
    return core


PIECES = st.one_of(
    st.sampled_from(
        ["<|im_end|>", "<tool_call>", "<end_of_turn>", "  ", "\n\n", " The", "they're", "e\u0301", "\u2581"]
    ),
    st.integers(0, 10**9).map(str),
    st.text(max_size=8),
)
STRINGS = st.lists(PIECES, max_size=8).map("".join).filter(lambda text: "\x00" not in text)


@pytest.mark.parametrize("pre", ["smollm", "qwen2", "llama-bpe"])
def test_byte_level_tokenizers_equal_those_of_hugging_face(pre: str, tmp_path: Path) -> None:
    vocabulary = byte_level(pre)
    if pre == "llama-bpe":  # a whole word that no merges lead to
        tokens = [*vocabulary.tokens[:-2], "\u0120zebrawood", *vocabulary.tokens[-2:]]
        kinds = [*vocabulary.kinds[:-2], 1, 5, 5]
        values = vocabulary.values | {"add_bos_token": False}
        vocabulary = replace(vocabulary, tokens=tokens, kinds=kinds, values=values)
    tokenizer = load_tokenizer(tmp_path, "llama" if pre != "qwen2" else "qwen2", vocabulary)
    oracle = byte_level_oracle(vocabulary, pre)
    assert "\u0120zebrawood" in tokenizer.tokenize("a zebrawood") or pre != "llama-bpe"

    @given(STRINGS)
    @settings(max_examples=150, deadline=None)
    def check(text: str) -> None:
        assert tokenizer(text)["input_ids"] == oracle.encode(text).ids

    check()
    for text in TEXTS:
        assert tokenizer(text)["input_ids"] == oracle.encode(text).ids
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_digits_are_split_individually(tmp_path: Path) -> None:
    vocabulary = byte_level("smollm")
    joined = [word for word in vocabulary.tokens if word.isascii() and word.isdigit() and len(word) > 1]
    assert "00" in joined  # a tokenizer with the wrong rule would use it
    for pre in ("smollm", "qwen2"):
        values = vocabulary.values | {"pre": pre}
        tokenizer = load_tokenizer(tmp_path, "llama", replace(vocabulary, values=values))
        assert tokenizer.tokenize("10000") == ["1", "0", "0", "0", "0"]


def slow_sentencepiece(vocabulary: Vocabulary, text: str, prefix: bool) -> list[int]:
    """Join the best pair of neighbours until none makes a token; what is left and no token becomes bytes."""
    tokens = [token.replace(" ", "\u2581") for token in vocabulary.tokens]
    ids = {token: index for index, token in enumerate(tokens)}
    usable = {token for token, kind in zip(tokens, vocabulary.kinds, strict=True) if kind in (1, 4)}
    scores = vocabulary.values["scores"]
    parts = list((("\u2581" + text) if prefix and text else text).replace(" ", "\u2581"))
    while True:
        pairs = [
            ((scores[ids[a + b]], len(a), len(b)), -at)
            for at, (a, b) in enumerate(itertools.pairwise(parts))
            if a in usable and b in usable and a + b in usable
        ]
        if not pairs:
            break
        at = -max(pairs)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    found: list[int] = []
    for part in parts:
        found += [ids[part]] if part in usable else [ids[f"<0x{byte:02X}>"] for byte in part.encode()]
    return found


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_of_llama(prefix: bool, tmp_path: Path) -> None:
    vocabulary = sentencepiece(prefix)
    tokenizer = load_tokenizer(tmp_path, "llama", vocabulary)
    assert tokenizer("The")["input_ids"][0] == tokenizer.bos_token_id == 2
    plain = st.text(st.sampled_from("aaaThe quickbrownfx.,?é日1290"), max_size=30) | st.text(max_size=8)

    @given(plain.filter(lambda text: "<" not in text and "\u2581" not in text and "\x00" not in text))
    @settings(max_examples=200, deadline=None)
    def check(text: str) -> None:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert ids == slow_sentencepiece(vocabulary, text, prefix)
        assert tokenizer.decode(ids) == text

    check()
    merges = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
    vocab = {token.replace(" ", "\u2581"): index for index, token in enumerate(vocabulary.tokens)}
    scores = dict(zip(vocab, vocabulary.values["scores"], strict=True))
    assert [tuple(merge) for merge in merges] == generate_merges(vocab, scores)
    assert tokenizer.decode(tokenizer(TEXTS[0], add_special_tokens=False)["input_ids"]) == TEXTS[0]


def test_sentencepiece_of_gemma_follows_the_order_of_tokens(tmp_path: Path) -> None:
    vocabulary = sentencepiece(prefix=False)
    flat = replace(vocabulary, values=vocabulary.values | {"scores": [-1000.0] * len(vocabulary.tokens)})
    tokenizer = load_tokenizer(tmp_path, "gemma3", flat)
    vocab = {token.replace(" ", "\u2581"): index for index, token in enumerate(vocabulary.tokens)}
    merges = generate_merges(vocab, {token: -index for token, index in vocab.items()})
    oracle = GemmaTokenizer(vocab=vocab, merges=merges)
    oracle.add_special_tokens({"additional_special_tokens": [AddedToken("<end_of_turn>", normalized=False)]})
    oracle.add_tokens([AddedToken("\u2581\u2581", normalized=False)])

    @given(STRINGS.filter(lambda text: "<mask>" not in text))
    @settings(max_examples=200, deadline=None)
    def check(text: str) -> None:
        assert (
            tokenizer(text, add_special_tokens=False)["input_ids"]
            == oracle(text, add_special_tokens=False)["input_ids"]
        )

    check()
    assert tokenizer("a")["input_ids"][0] == 2


def test_special_tokens_and_template_come_from_the_file(tmp_path: Path) -> None:
    vocabulary = vocabulary_of("qwen2")
    model, tokenizer = load_gguf(
        write_model(tmp_path / "x.gguf", "qwen2", original("qwen2"), vocabulary), torch.float32
    )
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == (
        "<|endoftext|>",
        "<|im_end|>",
        "<|endoftext|>",
    )
    assert model.generation_config.eos_token_id == [0, 2]
    assert tokenizer.chat_template == TEMPLATE
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], add_generation_prompt=True, tokenize=False
    )
    assert text == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    tool = tokenizer.convert_tokens_to_ids("<tool_call>")
    assert tokenizer("<tool_call>")["input_ids"] == [tool]
    assert tokenizer.decode([1, tool, 2], skip_special_tokens=True) == "<tool_call>"
    assert len(tokenizer) == len(vocabulary.tokens) - 2 < model.config.vocab_size


@pytest.mark.parametrize(
    ("pre", "told", "added"), [("llama-bpe", None, 1), ("llama-bpe", False, 0), ("qwen2", True, 1)]
)
def test_the_first_token(pre: str, told: bool | None, added: int, tmp_path: Path) -> None:
    """Llama 3 begins every text with a token of its own, even where the file does not say so."""
    vocabulary = byte_level(pre)
    vocabulary = replace(vocabulary, values=vocabulary.values | {"add_bos_token": told})
    tokenizer = load_tokenizer(tmp_path, "llama", vocabulary)
    assert tokenizer("x")["input_ids"] == [0] * added + tokenizer("x", add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("key", ["eot_token_id", "eom_token_id"])
def test_a_turn_ends_at_all_tokens_that_the_file_names(key: str, tmp_path: Path) -> None:
    vocabulary = vocabulary_of("qwen2")
    named = replace(vocabulary, values=vocabulary.values | {key: 1})
    path = write_model(tmp_path / "x.gguf", "qwen2", original("qwen2"), named)
    assert load_gguf(path, torch.float32)[0].generation_config.eos_token_id == [0, 1, 2]


def test_a_turn_also_ends_where_the_template_closes_it(tmp_path: Path) -> None:
    vocabulary = vocabulary_of("qwen2")
    base = replace(vocabulary, values=vocabulary.values | {"eos_token_id": 0})
    path = write_model(tmp_path / "x.gguf", "qwen2", original("qwen2"), base)
    model, tokenizer = load_gguf(path, torch.float32)
    assert model.generation_config.eos_token_id == [0, 2]
    assert tokenizer.eos_token == "<|endoftext|>"


# What is refused.


def refused(path: Path) -> str:
    with pytest.raises(ArpoError) as error:
        load_gguf(path, torch.float32)
    message = str(error.value)
    assert message.startswith(f"model.path: {str(path)!r} could not be loaded: ")
    return message.partition("could not be loaded: ")[2]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A whole small file."""
    path = tmp_path_factory.mktemp("gguf") / "x.gguf"
    model = small_model("qwen2", len(VOCABULARIES["qwen2"].tokens), num_hidden_layers=1)
    return write_model(path, "qwen2", model, VOCABULARIES["qwen2"], kind=Kind.Q8_0).read_bytes()


def changed(path: Path, *, values: Any = None, more: Any = None, extra: Any = None, family: str = "llama") -> str:
    """Why a file with some metadata changed is refused."""
    model = small_model(family, len(VOCABULARIES["llama"].tokens), num_hidden_layers=1)
    vocabulary = replace(VOCABULARIES["llama"], values=VOCABULARIES["llama"].values | (values or {}))
    shape = settings_of(family, model) | (more or {})
    return refused(write(path / "x.gguf", family, shape, tensors_of(family, model), vocabulary, extra=extra))


@pytest.mark.parametrize("pre", ["default", "gpt-2", "tekken", "brand-new", None])
def test_an_unknown_pre_tokenizer_is_refused_by_name(pre: str | None, tmp_path: Path) -> None:
    message = f"its tokenizer.ggml.pre is {pre or 'default'!r}; supported are smollm, llama-bpe, qwen2"
    assert changed(tmp_path, values={"pre": pre}) == message


@pytest.mark.parametrize(
    ("part", "change", "message"),
    [
        ("more", {"expert_count": 8}, "it has 'llama.expert_count', which is not supported"),
        ("more", {"rope.scaling.type": "yarn"}, "its rope scaling is 'yarn'; supported are none and linear"),
        ("more", {"rope.dimension_count": 8}, "its llama.rope.dimension_count is not the head dimension, 16"),
        ("more", {"attention.head_count_kv": 3}, "its llama.attention.head_count is not a multiple of head_count_kv"),
        ("more", {"attention.head_count": 0}, "its llama.attention.head_count is 0"),
        ("more", {"attention.head_count": 128}, "its llama.attention.key_length is 0"),
        ("more", {"block_count": 10**9}, "tensors are missing"),
        ("more", {"block_count": 2}, "it has no tensor 'blk.1."),
        (
            "more",
            {"feed_forward_length": 128},
            "its tensor 'blk.0.ffn_gate.weight' has the shape (96, 64), not (128, 64)",
        ),
        ("more", {"embedding_length": [64]}, "its llama.embedding_length is [64]"),
        ("more", {"embedding_length": None}, "its llama.embedding_length is None"),
        ("more", {"rope.freq_base": float("nan")}, "its llama.rope.freq_base is nan"),
        ("more", {"attention.layer_norm_rms_epsilon": "x"}, "its llama.attention.layer_norm_rms_epsilon is 'x'"),
        ("values", {"model": "t5"}, "its tokenizer has the type 't5'; supported are 'gpt2' and 'llama'"),
        ("values", {"eos_token_id": None}, "its tokenizer.ggml.eos_token_id is None"),
        ("values", {"eos_token_id": 10**6}, "its tokenizer.ggml.eos_token_id is 1000000"),
        ("values", {"eot_token_id": 10**6}, "its tokenizer.ggml.eot_token_id is 1000000"),
        ("values", {"merges": ["a b c"]}, "one of its tokenizer.ggml.merges is not a pair"),
        ("values", {"merges": ["zz zz"]}, "its tokenizer cannot be built: "),
        ("values", {"merges": [1, 2]}, "its tokenizer.ggml.merges is not a list of str"),
        ("extra", {"split.count": 3}, "it is one part of a split model: merge the parts first"),
        ("extra", {"general.alignment": 0}, "its general.alignment is 0"),
    ],
)
def test_invalid_metadata_is_refused(part: str, change: dict[str, Any], message: str, tmp_path: Path) -> None:
    assert changed(tmp_path, **{part: change}).startswith(message)


def test_other_architectures_and_tensors(tmp_path: Path) -> None:
    model, vocabulary = original("llama"), VOCABULARIES["llama"]
    shape, tensors = settings_of("llama", model), tensors_of("llama", model)
    path = tmp_path / "x.gguf"
    message = "its architecture is 'phi3'; supported are llama, qwen2, qwen3, gemma3"
    assert refused(write(path, "phi3", shape, tensors, vocabulary)) == message
    bias = {"blk.0.attn_q.bias": np.zeros(64, dtype=np.float32)}
    message = "it has the tensor 'blk.0.attn_q.bias', which the llama family does not have"
    assert refused(write(path, "llama", shape, tensors | bias, vocabulary)) == message
    fewer = {name: value for name, value in tensors.items() if name != "output_norm.weight"}
    assert refused(write(path, "llama", shape, fewer, vocabulary)) == "it has no tensor 'output_norm.weight'"
    few = tensors | {"token_embd.weight": tensors["token_embd.weight"][:-1]}
    assert refused(write(path, "llama", shape, few, vocabulary)) == "it has more tokens than embeddings"
    twice = replace(
        vocabulary, tokens=[*vocabulary.tokens[:-3], *vocabulary.tokens[3:6]], kinds=[*vocabulary.kinds[:-3], 1, 1, 1]
    )
    assert refused(write(path, "llama", shape, tensors, twice)) == "two of its tokens are the same"


def test_a_file_that_is_not_gguf(tmp_path: Path, small: bytes) -> None:
    path = tmp_path / "x.gguf"
    for content in (b"", b"GGUF", b"PK\3\4" * 100):
        path.write_bytes(content)
        assert refused(path) == "it is not a GGUF file"
    path.write_bytes(small[:4] + struct.pack("<I", 1) + small[8:])
    assert refused(path) == "its GGUF version is 1; supported are 2 and 3, little-endian"
    path.write_bytes(small[:8] + struct.pack("<QQ", 2**63, 2**63) + small[24:])
    assert refused(path)


def test_a_truncated_file(tmp_path: Path, small: bytes) -> None:
    path = tmp_path / "x.gguf"
    for end in [*range(24, len(small), len(small) // 60), len(small) - 1]:
        path.write_bytes(small[:end])
        assert refused(path) == "it is damaged or incomplete"


def test_lengths_beyond_the_end_of_the_file(tmp_path: Path, small: bytes) -> None:
    """Lengths of 2**60 in the header must not be read or allocated."""
    path = tmp_path / "x.gguf"
    key = b"tokenizer.ggml.tokens"
    at = small.index(key) + len(key) + 8
    path.write_bytes(small[:at] + struct.pack("<Q", 2**60) + small[at + 8 :])
    assert refused(path)
    key = b"tokenizer.ggml.token_type"
    at = small.index(key) + len(key) + 8
    path.write_bytes(small[:at] + struct.pack("<Q", 2**60) + small[at + 8 :])
    assert refused(path) == "it is damaged or incomplete"
    name = b"token_embd.weight"
    at = small.index(name) + len(name) + 4
    for shape in ((2**40, 2**40), (63, 64), (0, 64)):  # too much, half a block, nothing
        path.write_bytes(small[:at] + struct.pack("<QQ", *shape) + small[at + 16 :])
        assert refused(path) == "it is damaged or incomplete"


def test_some_rows_of_a_tensor(tmp_path: Path, small: bytes) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(small)
    file = read_gguf(path)
    whole = file.dequantize("token_embd.weight")
    assert whole.shape == (len(VOCABULARIES["qwen2"].tokens), 64)
    assert np.array_equal(file.dequantize("token_embd.weight", 3, 5), whole[3:5])


def test_metadata_given_twice(tmp_path: Path, small: bytes) -> None:
    """It is ambiguous which of the two counts."""
    path = tmp_path / "x.gguf"
    path.write_bytes(small.replace(b"tokenizer.ggml.bos_token_id", b"tokenizer.ggml.eos_token_id"))
    assert refused(path) == "it has 'tokenizer.ggml.eos_token_id' twice"


def test_overlapping_tensors(tmp_path: Path, small: bytes) -> None:
    """Else a small file could ask for any amount of memory."""
    path = tmp_path / "x.gguf"
    names = [b"blk.0.attn_q.weight", b"blk.0.attn_output.weight"]
    first, second = (small.index(name) + len(name) + 4 + 16 + 4 for name in names)
    path.write_bytes(small[:second] + small[first : first + 8] + small[second + 8 :])
    assert refused(path) == "two of its tensors share a name or overlap"


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_a_damaged_file_is_refused_or_loads(small: bytes, tmp_path_factory: pytest.TempPathFactory, data: Any) -> None:
    head = small.index(b"token_embd.weight") + 2000  # the metadata and the list of tensors
    damaged = bytearray(small)
    for _ in range(data.draw(st.integers(1, 3))):
        damaged[data.draw(st.integers(0, head))] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.getbasetemp() / "damaged.gguf"
    path.write_bytes(damaged)
    try:
        load_gguf(path, torch.float32)
    except ArpoError as error:
        assert str(error).startswith("model.path: ")


def test_without_the_gguf_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ArpoError, match="pip install gguf"):
        load_gguf(tmp_path / "x.gguf", torch.float32)
