"""The tokenizer of a GGUF file: byte-level BPE (Llama 3, SmolLM2, Qwen) or SentencePiece BPE (Gemma, older Llamas),
built to give the same ids as the model's own Hugging Face tokenizer.

A file has tokens, merges or scores, and the name of its pre-tokenizer. Only pre-tokenizers known here are accepted: a
wrong one would split numbers and words in ways that the model never saw.
"""

from __future__ import annotations

from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from arpo.models.gguf_file import GgufFile

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 1, 2, 3, 4, 5  # token types
_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLITS = {"llama-bpe": _LLAMA3_SPLIT, "qwen2": _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")}
_MAX_SPLIT_CHARS = 10**9  # characters in all ways to split a token; Gemma's 262,144 tokens have about 10**7
_SPECIALS = {"bos": "bos_token_id", "eos": "eos_token_id", "pad": "padding_token_id", "unk": "unknown_token_id"}


def read_tokenizer(file: GgufFile) -> Any:
    """Return the tokenizer with its chat template and special tokens."""
    tokens, kinds = _tokens(file)
    family, algorithm = file.string("general.architecture"), file.string("tokenizer.ggml.model")
    if algorithm not in ("gpt2", "llama"):
        raise ValueError(f"its tokenizer has the type {algorithm!r}; supported are 'gpt2' and 'llama'")
    vocab = {token: index for index, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        raise ValueError("two of its tokens are the same")
    special = {name: tokens[token] for name, token in special_ids(file).items()}
    try:
        core = _byte_level(file, vocab) if algorithm == "gpt2" else _sentencepiece(file, family, vocab, kinds)
        _add_special_tokens(core, tokens, kinds)
        _add_bos_and_eos(file, core, special)
    except ValueError:
        raise
    except Exception as error:  # the tokenizers package raises plain Exceptions
        raise ValueError(f"its tokenizer cannot be built: {error}") from error
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        chat_template=file.string("tokenizer.chat_template", "") or None,
        clean_up_tokenization_spaces=False,
        **{f"{name}_token": token for name, token in special.items()},
    )


def special_ids(file: GgufFile) -> dict[str, int]:
    """Return the ids of bos, eos, pad and unk, those that the file names; eos is required."""
    ids = {name: _token_id(file, key) for name, key in _SPECIALS.items()}
    if ids["eos"] is None:
        raise ValueError("its tokenizer.ggml.eos_token_id is None")
    return {name: token for name, token in ids.items() if token is not None}


def declared_end_ids(file: GgufFile) -> list[int]:
    """Return the tokens that the file says end a text, a turn or a message: eos, eot and eom."""
    ids = [_token_id(file, f"{name}_token_id") for name in ("eos", "eot", "eom")]
    return list(dict.fromkeys(token for token in ids if token is not None))


def _token_id(file: GgufFile, key: str) -> int | None:
    """Return the token that the file names under this key, if any."""
    value = file.metadata.get(f"tokenizer.ggml.{key}")
    if value is not None and (type(value) is not int or not 0 <= value < len(_tokens(file)[0])):
        raise ValueError(f"its tokenizer.ggml.{key} is {value!r}")
    return value


def _tokens(file: GgufFile) -> tuple[list[str], list[int]]:
    """Return tokens and their types, without the unused ones at the end that pad the embeddings."""
    tokens = file.array("tokenizer.ggml.tokens", str)
    kinds = file.array("tokenizer.ggml.token_type", int, [_NORMAL] * len(tokens))
    if not tokens or len(kinds) != len(tokens):
        raise ValueError("its tokens and their types differ in number")
    count = len(tokens)
    while count > 1 and kinds[count - 1] == _UNUSED:
        count -= 1
    if file.string("tokenizer.ggml.model") == "llama":  # user-defined ones are stored with plain spaces
        pairs = zip(tokens, kinds, strict=True)
        tokens = [token.replace(" ", "\u2581") if kind == _USER_DEFINED else token for token, kind in pairs]
    return tokens[:count], kinds[:count]


def _byte_level(file: GgufFile, vocab: dict[str, int]) -> Tokenizer:
    pre = file.string("tokenizer.ggml.pre", "default")
    if pre != "smollm" and pre not in _SPLITS:
        raise ValueError(f"its tokenizer.ggml.pre is {pre!r}; supported are smollm, {', '.join(_SPLITS)}")
    merges = [tuple(merge.split(" ")) for merge in file.array("tokenizer.ggml.merges", str)]
    if any(len(merge) != 2 for merge in merges):
        raise ValueError("one of its tokenizer.ggml.merges is not a pair")
    core = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=pre == "llama-bpe"))
    digits = pre_tokenizers.Digits(individual_digits=True)
    split = digits if pre == "smollm" else pre_tokenizers.Split(Regex(_SPLITS[pre]), "isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre == "smollm")
    core.pre_tokenizer = pre_tokenizers.Sequence([split, to_bytes])
    if pre == "qwen2":
        core.normalizer = normalizers.NFC()
    core.decoder = decoders.ByteLevel()
    return core


def _sentencepiece(file: GgufFile, family: str, vocab: dict[str, int], kinds: list[int]) -> Tokenizer:
    if family == "gemma3":  # merges follow the order of the tokens, not their scores
        scores = [-float(index) for index in range(len(vocab))]
    else:
        scores = file.array("tokenizer.ggml.scores", float)
    if len(scores) < len(vocab):
        raise ValueError("its tokens and their scores differ in number")
    merges = _merges(
        {token: scores[index] for token, index in vocab.items() if kinds[index] in (_NORMAL, _USER_DEFINED)}
    )
    unknown = special_ids(file).get("unk")
    unk_token = None if unknown is None else _tokens(file)[0][unknown]
    core = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token=unk_token, fuse_unk=True, byte_fallback=True))
    spaces = normalizers.Replace(" ", "\u2581")
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    if file.metadata.get("tokenizer.ggml.add_space_prefix", True) is True:
        core.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), spaces])
        steps.append(decoders.Strip(" ", 1, 0))
    else:
        core.normalizer = spaces
    core.decoder = decoders.Sequence(steps)
    return core


def _merges(scores: dict[str, float]) -> list[tuple[str, str]]:
    """Return every pair of tokens that merges into a token, best score first."""
    if sum(len(token) ** 2 for token in scores) > _MAX_SPLIT_CHARS:
        raise ValueError("its tokens are too long")
    found = [
        (score, at, len(token) - at, token)
        for token, score in scores.items()
        for at in range(1, len(token))
        if token[:at] in scores and token[at:] in scores
    ]
    found.sort(key=lambda merge: merge[:3], reverse=True)
    return [(token[:at], token[at:]) for _, at, _, token in found]


def _add_special_tokens(core: Tokenizer, tokens: list[str], kinds: list[int]) -> None:
    """Register special and user-defined tokens, so that they are matched before the text is split."""
    for special, of_kind in ((True, (_UNKNOWN, _CONTROL)), (False, (_USER_DEFINED,))):
        chosen = [token for token, kind in zip(tokens, kinds, strict=True) if kind in of_kind]
        core.add_tokens([AddedToken(token, normalized=False, special=special) for token in chosen])
    if core.get_vocab_size() != len(tokens):
        raise ValueError("one of its special tokens cannot be used")


def _add_bos_and_eos(file: GgufFile, core: Tokenizer, special: dict[str, str]) -> None:
    """Make the tokenizer put bos before and eos after a text, where the file says so."""
    always = file.metadata["tokenizer.ggml.model"] == "llama" or file.metadata.get("tokenizer.ggml.pre") == "llama-bpe"
    bos = file.metadata.get("tokenizer.ggml.add_bos_token", always) is True and "bos" in special
    eos = file.metadata.get("tokenizer.ggml.add_eos_token", False) is True
    if bos or eos:
        parts = [*([special["bos"]] if bos else []), "$A", *([special["eos"]] if eos else [])]
        ids = {special[name]: core.token_to_id(special[name]) for name in ("bos", "eos") if name in special}
        core.post_processor = processors.TemplateProcessing(single=parts, special_tokens=list(ids.items()))
