"""Chat templates are programs from outside: they render as Hugging Face renders them, or end with a message."""

from __future__ import annotations

import pytest
import templates
from templates import make_tokenizer
from tokenizers import Regex, pre_tokenizers

from arpo.agent.chat_template import render_chats
from arpo.agent.formats import _CHATS, encode_prompt
from arpo.errors import ArpoError

FEATURES = (
    "{%- set ns = namespace(seen=0) -%}\n{{ bos_token }}{{ strftime_now('%Y') }}\n"
    "  {% for m in messages %}\n{% set ns.seen = ns.seen + 1 %}{% if ns.seen > 3 %}{% break %}{% endif %}"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{{ eos_token }}{% endgeneration %}"
    "{% else %}[{{ m.role }}]{{ m | tojson(indent=2) }}{{ dict(a='<é>') | tojson }}{% endif %}\n  {% endfor %}\n"
    "{% if tools %}tools{% endif %}{{ messages[0]['content'].strip()[:20] }}"
    "{% if add_generation_prompt %}>{% endif %}\n"
)


@pytest.mark.parametrize("name", ["CHATML", "QWEN", "STRICT", "DROPPING", "UNCLOSED", "FEATURES"])
def test_the_text_is_that_of_hugging_face(name: str) -> None:
    tokenizer = make_tokenizer(FEATURES if name == "FEATURES" else getattr(templates, name))
    found = render_chats(tokenizer, _CHATS)
    for chat, (messages, generation) in _CHATS.items():
        try:
            text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=generation)
        except Exception:
            text = None
        assert found[chat] == text, chat
    assert any(found.values())


@pytest.mark.slow
@pytest.mark.parametrize(
    "template",
    [
        "{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}{% endfor %}",
        "{% set ns = namespace(a='ab') %}{% for i in range(90) %}{% set ns.a = ns.a + ns.a %}{% endfor %}{{ ns.a }}",
        "{{ 'a' * 1000000000000 }}",
        "{{ 'a' * 100000000 }}",
        "{% for i in range(99999) %}{{ 'a' * 1000 }}{% endfor %}",
        "{{ 9 ** (9 ** 9) }}",
    ],
)
def test_a_template_without_end_is_refused(template: str) -> None:
    with pytest.raises(ArpoError, match="chat template does not end: it takes more than 5 seconds, 1 GiB or"):
        encode_prompt(make_tokenizer(templates.CHATML + template), "Why?", "Be brief.")


@pytest.mark.slow
@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('no') }}",
        "{% if",
        "",
        "{{ messages.nothing.nothing }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}{{ messages }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ namespace(__class__=1) }}",
        "{% set ns = namespace() %}{% set ns.__class__ = 1 %}{{ messages }}",
        "{{ messages.append(1) }}",
        "{% include '/etc/passwd' %}",
        "{% for i in range(1000000) %}{% endfor %}",
    ],
)
def test_a_template_that_raises_or_writes_nothing_is_refused(template: str) -> None:
    tokenizer = make_tokenizer(template or "{# nothing #}")
    with pytest.raises(ArpoError, match="chat template cannot render a user message"):
        encode_prompt(tokenizer, "Why?", "Be brief.")


def test_a_tokenizer_that_backtracks_without_end_is_an_error() -> None:
    tokenizer = make_tokenizer()
    split = pre_tokenizers.Split(Regex("(a+)+$"), "isolated")
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel()])
    with pytest.raises(ArpoError, match="the model's tokenizer fails"):
        encode_prompt(tokenizer, "a" * 40 + "!", "Be brief.")
