"""Chat templates with tools, in the styles of several families of models, and those that TRL installs."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

from templates import make_tokenizer

HERMES = (
    "{% if tools %}<|im_start|>system\n{% if messages[0].role == 'system' %}{{ messages[0].content }}\n\n{% endif %}"
    "Tools:{% for tool in tools %}\n{{ tool | tojson }}{% endfor %}\nCall them in <tool_call> tags.<|im_end|>\n"
    "{% elif messages[0].role == 'system' %}<|im_start|>system\n{{ messages[0].content }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}{% if m.role == 'tool' %}"
    "{% if not loop.previtem or loop.previtem.role != 'tool' %}<|im_start|>user{% endif %}"
    "{{ '\\n' }}<tool_response>\n{{ m.content }}\n</tool_response>"
    "{% if loop.last or loop.nextitem.role != 'tool' %}<|im_end|>\n{% endif %}"
    "{% elif m.role != 'system' %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{% if m.content or not loop.first %}{{ '\\n' }}{% endif %}<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}'
    "<|im_end|>\n{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""As Hermes, Qwen 2.5 and SmolLM3."""

SMOLLM2 = HERMES.replace(
    "{% for c in m.tool_calls or [] %}{% if m.content or not loop.first %}{{ '\\n' }}{% endif %}<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}',
    "{% if m.tool_calls %}<tool_call>[{% for c in m.tool_calls %}{% if not loop.first %}, {% endif %}"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}{% endfor %}]</tool_call>'
    "{% endif %}",
)
"""All calls in one list."""

FORGETFUL = HERMES.replace(
    "{% elif m.role != 'system' %}<|im_start|>{{ m.role }}\n{{ m.content }}",
    "{% elif m.role != 'system' %}<|im_start|>{{ m.role }}\n"
    "{{ m.content if loop.last or m.role != 'assistant' else m.content.split('</think>')[-1] }}",
)
"""Drops the thoughts of earlier turns."""

MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}"
    "{% if tools and loop.first %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
    "[INST]{{ m.content }}[/INST]"
    '{% elif m.role == \'tool\' %}[TOOL_RESULTS]{"content": {{ m.content }}, "call_id": "{{ m.tool_call_id }}"}'
    "[/TOOL_RESULTS]{% elif m.role == 'system' %}{{ raise_exception('no system messages') }}"
    "{% elif m.tool_calls %}[TOOL_CALLS] [{% for c in m.tool_calls %}{% if not loop.first %}, {% endif %}"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}, "id": "{{ c.id }}"}'
    "{% endfor %}]</s>{% else %} {{ m.content }}</s>{% endif %}{% endfor %}"
)
"""Calls in a list with ids, which results name; no system messages, no text beside calls."""

MISTRAL_ARGS = MISTRAL.replace(
    "[TOOL_CALLS] [{% for c in m.tool_calls %}{% if not loop.first %}, {% endif %}"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}, "id": "{{ c.id }}"}'
    "{% endfor %}]</s>",
    "{{ m.content }}{% for c in m.tool_calls %}[TOOL_CALLS]{{ c.function.name }}[ARGS]"
    "{{ c.function.arguments | tojson }}{% endfor %}</s>",
).replace(
    '[TOOL_RESULTS]{"content": {{ m.content }}, "call_id": "{{ m.tool_call_id }}"}[/TOOL_RESULTS]',
    "[TOOL_RESULTS]{{ m.content }}[/TOOL_RESULTS]",
)

OWN = {
    "hermes": HERMES,
    "smollm2": SMOLLM2,
    "forgetful": FORGETFUL,
    "mistral": MISTRAL,
    "mistral-args": MISTRAL_ARGS,
}
_CONTROL = re.compile(
    r'<\|[\w"]+\|?>|<\w+\|>|</s>|<(?:start|end)_of_turn>|\[/?[A-Z_]+\]|<\uff5c[^\uff5c]+\uff5c>|<eos>|<bos>'
)


def trl_templates() -> dict[str, str]:
    """The chat templates that TRL installs, by name."""
    spec = importlib.util.find_spec("trl")
    assert spec is not None and spec.origin is not None
    files = sorted(Path(spec.origin).with_name("chat_templates").glob("*.jinja"))
    return {file.stem: file.read_text(encoding="utf-8") for file in files}


def tokenizer_for(template: str) -> Any:
    """A small tokenizer with this template, in which the template's control tokens are special."""
    tokenizer = make_tokenizer(template)
    tokenizer.add_special_tokens({"additional_special_tokens": sorted({*_CONTROL.findall(template), "</s>"})})
    return tokenizer
