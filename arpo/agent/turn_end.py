"""All tokens that end a turn of a model, with the one that its chat template writes at the end of a message."""

from __future__ import annotations

from typing import Any

from arpo.agent.chat_template import Chat, render_chats
from arpo.models.end_tokens import end_tokens

_ANSWER = "@@answer@@"
_CHAT = Chat([{"role": "user", "content": "..."}, {"role": "assistant", "content": _ANSWER}], False)


def turn_end_tokens(model: Any, tokenizer: Any) -> frozenset[int]:
    """The tokens of `arpo.models.end_tokens`, and the one that the chat template writes after an answer."""
    closing = closing_token(tokenizer)
    return end_tokens(model, tokenizer) | (frozenset() if closing is None else {closing})


def closing_text(tokenizer: Any) -> str:
    """The text of the token that ends a message: the chat template's, or else the tokenizer's eos."""
    closing = closing_token(tokenizer)
    text = tokenizer.eos_token if closing is None else tokenizer.convert_ids_to_tokens(closing)
    return text if isinstance(text, str) else ""


def closing_token(tokenizer: Any) -> int | None:
    """The control token with which the chat template ends the model's message; None if it writes none there."""
    if not getattr(tokenizer, "chat_template", None):
        return None
    text = render_chats(tokenizer, {"answer": _CHAT})["answer"].text or ""
    after = text.rpartition(_ANSWER)[2].lstrip() if _ANSWER in text else ""
    special = {token.content: number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    special |= dict(zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True))
    found = [token for token in special if token and after.startswith(token)]
    return special[max(found, key=len)] if found else None
