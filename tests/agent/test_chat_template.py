"""Chat templates are programs from outside: they render as Hugging Face renders them, or end with a message."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import pytest
import templates
from templates import make_tokenizer
from tokenizers import Regex, pre_tokenizers

from arpo.agent import chat_template
from arpo.agent.chat_template import render_chats
from arpo.agent.formats import _chats, encode_prompt
from arpo.agent.template_worker import set_limits
from arpo.errors import ArpoError

FEATURES = (
    "{%- set ns = namespace(seen=0) -%}\n{{ bos_token }}{{ strftime_now('%Y') }}\n"
    "  {% for m in messages %}\n{% set ns.seen = ns.seen + 1 %}{% if ns.seen > 3 %}{% break %}{% endif %}"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{{ eos_token }}{% endgeneration %}"
    "{% else %}[{{ m.role }}]{{ m | tojson(indent=2) }}{{ dict(a='<é>') | tojson }}{% endif %}\n  {% endfor %}\n"
    "{% if tools %}tools{% endif %}{{ messages[0]['content'].strip()[:20] }}"
    "{% if add_generation_prompt %}>{% endif %}\n"
    "{{ dict.fromkeys(['a', 'é'], 1) | tojson(true) }}{{ dict(b=1, a=[2]) | tojson(true, 2, (',', ':'), true) }}"
    "{{ 'some long words' | wordwrap(6) }}{{ messages | pprint }}{{ lipsum(n=1) | length > 9 }}"
)


@pytest.mark.parametrize("name", ["CHATML", "QWEN", "STRICT", "DROPPING", "UNCLOSED", "FEATURES"])
def test_the_text_is_that_of_hugging_face(name: str) -> None:
    tokenizer = make_tokenizer(FEATURES if name == "FEATURES" else getattr(templates, name))
    found = render_chats(tokenizer, _chats())
    for chat, (messages, generation, _) in _chats().items():
        try:
            text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=generation)
        except Exception:
            text = None
        assert found[chat].text == text, chat
    assert any(chat.text for chat in found.values())


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
    ("template", "reason"),
    [
        ("{{ raise_exception('no\\x1b\\n ' + 'o' * 999) }}", "TemplateError: no o{180,190}"),
        ("{% if", "TemplateSyntaxError: unexpected 'end of template'"),
        ("{# nothing #}", "it leaves the message out, or repeats it"),
        ("{{ messages.nothing.nothing }}", "UndefinedError: 'list object' has no attribute 'nothing'"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError: "),
        (
            "{{ ''.__class__.__mro__[1].__subclasses__() }}{{ messages }}",
            "SecurityError: access to attribute '__class_",
        ),
        ("{{ cycler.__init__.__globals__.os.popen('id').read() }}", "SecurityError: access to attribute '__init__'"),
        ("{{ namespace(__class__=1) }}", "SecurityError: a namespace cannot have '__class__'"),
        ("{% set ns = namespace() %}{% set ns.__class__ = 1 %}{{ messages }}", "SecurityError: a namespace cannot"),
        ("{{ messages.append(1) }}", "SecurityError: "),
        ("{% include '/etc/passwd' %}", "TypeError: no loader for this environment"),
        ("{% for i in range(1000000) %}{% endfor %}", "OverflowError: Range too big"),
    ],
)
def test_a_template_that_raises_or_writes_nothing_is_refused(template: str, reason: str) -> None:
    with pytest.raises(ArpoError, match=rf"chat template cannot render a user message; .* \({reason}"):
        encode_prompt(make_tokenizer(template), "Why?", "Be brief.")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("worker", "message"),
    [
        (
            "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)",
            "could not be rendered: its process was ended by SIGKILL",
        ),
        ("import no_such_package", "could not be rendered: ModuleNotFoundError: No module named 'no_such_package'"),
    ],
)
def test_a_process_that_ends_for_another_reason(
    worker: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "worker.py").write_text(worker)
    monkeypatch.setattr(chat_template, "_WORKER", tmp_path / "worker.py")
    with pytest.raises(ArpoError, match=message):
        render_chats(make_tokenizer("{# " + worker + " #}"), _chats())


def test_macos_may_refuse_the_limit_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[int] = []

    def refuse_memory(kind: int, limit: tuple[int, int]) -> None:
        if kind == resource.RLIMIT_AS:
            raise ValueError("current limit exceeds maximum limit")
        limits.append(kind)

    monkeypatch.setattr(resource, "setrlimit", refuse_memory)
    monkeypatch.setattr(sys, "platform", "darwin")
    set_limits(5, 2**30)
    assert limits == [resource.RLIMIT_CPU]
    monkeypatch.setattr(sys, "platform", "linux")
    with pytest.raises(ValueError, match="exceeds"):
        set_limits(5, 2**30)


def test_a_tokenizer_that_backtracks_without_end_is_an_error() -> None:
    tokenizer = make_tokenizer()
    split = pre_tokenizers.Split(Regex("(a+)+$"), "isolated")
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel()])
    with pytest.raises(ArpoError, match="the model's tokenizer fails"):
        encode_prompt(tokenizer, "a" * 40 + "!", "Be brief.")
