"""The tokenizer that a GGUF file describes: byte-level BPE (Llama 3, SmolLM2, Qwen) or SentencePiece BPE (Gemma, older
Llamas), made to give the ids that the model's own Hugging Face tokenizer gives.

A file has tokens, merges or scores, and the NAME of the rule by which text is split first. Only rules known here are
accepted: a wrong one would cut numbers and words where the model never saw them cut.
"""

from __future__ import annotations

from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from arpo.models.gguf_file import GgufFile

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 1, 2, 3, 4, 5  # kinds of tokens
_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLITS = {"llama-bpe": _LLAMA3_SPLIT, "qwen2": _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")}
_TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<end_of_turn>")
_SPECIALS = {"bos": "bos_token_id", "eos": "eos_token_id", "pad": "padding_token_id", "unk": "unknown_token_id"}


def read_tokenizer(file: GgufFile) -> Any:
    """The tokenizer, with its chat template and special tokens."""
    tokens, kinds = _tokens(file)
    family, algorithm = file.word("general.architecture"), file.word("tokenizer.ggml.model")
    if algorithm not in ("gpt2", "llama"):
        raise ValueError(f"its tokenizer is of the kind {algorithm!r}; supported are 'gpt2' and 'llama'")
    vocab = {token: index for index, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        raise ValueError("two of its tokens are the same")
    special = {name: tokens[token] for name, token in special_ids(file).items()}
    try:
        core = _byte_level(file, vocab) if algorithm == "gpt2" else _sentencepiece(file, family, vocab, kinds)
        _add_specials(core, tokens, kinds)
        _add_ends(file, core, special)
    except ValueError:
        raise
    except Exception as error:  # what the tokenizers package raises has no class of its own
        raise ValueError(f"its tokenizer can't be made: {error}") from error
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        chat_template=file.word("tokenizer.chat_template", "") or None,
        clean_up_tokenization_spaces=False,
        **{f"{name}_token": token for name, token in special.items()},
    )


def special_ids(file: GgufFile) -> dict[str, int]:
    """The ids of those of the tokens bos, eos, pad and unk that the file names; eos is always there."""
    found: dict[str, int] = {}
    count = len(_tokens(file)[0])
    for name, key in _SPECIALS.items():
        value = file.meta.get(f"tokenizer.ggml.{key}")
        if value is None and name != "eos":
            continue
        if type(value) is not int or not 0 <= value < count:
            raise ValueError(f"its tokenizer.ggml.{key} is {value!r}")
        found[name] = value
    return found


def turn_ends(tokenizer: Any) -> int | list[int]:
    """The tokens that end the model's turn: the end token, and what its chat template closes turns with."""
    template = tokenizer.chat_template or ""
    closing = [token for token in _TURN_ENDS if token in template and token in tokenizer.get_added_vocab()]
    ids = list(dict.fromkeys(tokenizer.convert_tokens_to_ids([tokenizer.eos_token, *closing])))
    return ids[0] if len(ids) == 1 else ids


def _tokens(file: GgufFile) -> tuple[list[str], list[int]]:
    """Tokens and their kinds, without those at the end that only fill up the embeddings."""
    tokens = file.items("tokenizer.ggml.tokens", str)
    kinds = file.items("tokenizer.ggml.token_type", int, [_NORMAL] * len(tokens))
    if not tokens or len(kinds) != len(tokens):
        raise ValueError("its tokens and their kinds differ in number")
    count = len(tokens)
    while count > 1 and kinds[count - 1] == _UNUSED:
        count -= 1
    if file.word("tokenizer.ggml.model") == "llama":  # user-defined ones are stored with plain spaces
        pairs = zip(tokens, kinds, strict=True)
        tokens = [token.replace(" ", "\u2581") if kind == _USER_DEFINED else token for token, kind in pairs]
    return tokens[:count], kinds[:count]


def _byte_level(file: GgufFile, vocab: dict[str, int]) -> Tokenizer:
    pre = file.word("tokenizer.ggml.pre", "default")
    if pre != "smollm" and pre not in _SPLITS:
        raise ValueError(f"its tokenizer.ggml.pre is {pre!r}; supported are smollm, {', '.join(_SPLITS)}")
    merges = [tuple(merge.split(" ")) for merge in file.items("tokenizer.ggml.merges", str)]
    if any(len(merge) != 2 for merge in merges):
        raise ValueError("one of its tokenizer.ggml.merges is no pair")
    core = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=pre == "llama-bpe"))
    digits = pre_tokenizers.Digits(individual_digits=True)
    first = digits if pre == "smollm" else pre_tokenizers.Split(Regex(_SPLITS[pre]), "isolated")
    then = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre == "smollm")
    core.pre_tokenizer = pre_tokenizers.Sequence([first, then])
    if pre == "qwen2":
        core.normalizer = normalizers.NFC()
    core.decoder = decoders.ByteLevel()
    return core


def _sentencepiece(file: GgufFile, family: str, vocab: dict[str, int], kinds: list[int]) -> Tokenizer:
    if family == "gemma3":  # its merges are in the order of its tokens, not of their scores
        scores = [-float(index) for index in range(len(vocab))]
    else:
        scores = file.items("tokenizer.ggml.scores", float)
    if len(scores) < len(vocab):
        raise ValueError("its tokens and their scores differ in number")
    merges = _merges(
        {token: scores[index] for token, index in vocab.items() if kinds[index] in (_NORMAL, _USER_DEFINED)}
    )
    unknown = special_ids(file).get("unk")
    word = None if unknown is None else _tokens(file)[0][unknown]
    core = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token=word, fuse_unk=True, byte_fallback=True))
    spaces = normalizers.Replace(" ", "\u2581")
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    if file.meta.get("tokenizer.ggml.add_space_prefix", True) is True:
        core.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), spaces])
        steps.append(decoders.Strip(" ", 1, 0))
    else:
        core.normalizer = spaces
    core.decoder = decoders.Sequence(steps)
    return core


def _merges(scores: dict[str, float]) -> list[tuple[str, str]]:
    """Every pair of tokens that makes a token, the one with the best score first."""
    found = [
        (score, at, len(token) - at, token)
        for token, score in scores.items()
        for at in range(1, len(token))
        if token[:at] in scores and token[at:] in scores
    ]
    found.sort(key=lambda merge: merge[:3], reverse=True)
    return [(token[:at], token[at:]) for _, at, _, token in found]


def _add_specials(core: Tokenizer, tokens: list[str], kinds: list[int]) -> None:
    """Let the tokens that are no ordinary text be found as a whole, before the text is cut."""
    for special, of_kind in ((True, (_UNKNOWN, _CONTROL)), (False, (_USER_DEFINED,))):
        chosen = [token for token, kind in zip(tokens, kinds, strict=True) if kind in of_kind]
        core.add_tokens([AddedToken(token, normalized=False, special=special) for token in chosen])
    if core.get_vocab_size() != len(tokens):
        raise ValueError("one of its special tokens can't be used")


def _add_ends(file: GgufFile, core: Tokenizer, special: dict[str, str]) -> None:
    """Let the tokenizer put bos before and eos after a text, where the file says so."""
    always = file.meta["tokenizer.ggml.model"] == "llama" or file.meta.get("tokenizer.ggml.pre") == "llama-bpe"
    bos = file.meta.get("tokenizer.ggml.add_bos_token", always) is True and "bos" in special
    eos = file.meta.get("tokenizer.ggml.add_eos_token", False) is True
    if bos or eos:
        parts = [*([special["bos"]] if bos else []), "$A", *([special["eos"]] if eos else [])]
        ids = {special[name]: core.token_to_id(special[name]) for name in ("bos", "eos") if name in special}
        core.post_processor = processors.TemplateProcessing(single=parts, special_tokens=list(ids.items()))
