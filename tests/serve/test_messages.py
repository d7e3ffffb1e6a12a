"""Requests in OpenAI's form: which messages become which conversation, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arpo.serve.http import Refused
from arpo.serve.messages import MAX_MESSAGES, NEUTRAL, ChatRequest, Reply, error_body, read_request
from arpo.types import INFRA_STOPS, StopReason

USER = {"role": "user", "content": "Why?"}


def read(*messages: Any, **options: Any) -> ChatRequest:
    body = {"model": "m", "messages": list(messages), **options}
    return read_request(json.dumps(body).encode(), "m", 100)


def refusal(*messages: Any, **options: Any) -> Refused:
    with pytest.raises(Refused) as refused:
        read(*messages, **options)
    return refused.value


def said(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


def test_messages_become_a_question_what_was_answered_and_asked_next_and_a_system_prompt() -> None:
    assert read(USER) == ChatRequest("Why?")
    found = read(
        said("system", "Be brief."),
        said("developer", "Be kind."),
        said("user", "One?"),
        said("user", [{"type": "text", "text": "T"}, {"type": "text", "text": "wo?"}]),
        said("assistant", "1"),
        said("assistant", "2"),
        said("user", "Three?"),
        said("assistant", ""),
        said("user", "Four?"),
    )
    assert found == ChatRequest("One?\n\nTwo?", (("1\n\n2", "Three?"), ("", "Four?")), system="Be brief.\n\nBe kind.")


def test_options_are_read() -> None:
    options = {
        "stream": True,
        "stream_options": {"include_usage": True},
        "arpo": {"events": True},
        "max_tokens": 100,
        "temperature": 0,
        "top_p": 0.5,
        "seed": -3,
        "user": "somebody",
        "n": 1,
        "stop": None,
        "tools": [],
    }
    expected = ChatRequest("Why?", (), "", True, True, True, 100, 0.0, 0.5, -3)
    assert read(USER, **options) == expected
    assert read(USER, max_completion_tokens=7, max_tokens=9).max_tokens == 7
    assert not read(USER, stream_options={"include_usage": True}).include_usage


@pytest.mark.parametrize(
    ("messages", "where"),
    [
        ((), "messages"),
        ((said("assistant", "Hello."), USER), "messages"),
        ((USER, said("assistant", "Because")), "messages"),
        ((USER, said("system", "Be brief."), USER), "messages[1]"),
        ((said("system", "Be brief."),), "messages"),
        ((said("user", " \n"),), "messages"),
        ((said("user", None),), "messages[0].content"),
        ((said("user", 5),), "messages[0].content"),
        ((said("user", [{"type": "image_url"}]),), "messages[0].content"),
        ((said("user", "\ud800"),), "messages[0].content"),
        ((said("tool", "42"),), "messages[0].role"),
        ((said("assistant", "") | {"tool_calls": [{}]}, USER), "messages[0]"),
        (("Why?",), "messages[0]"),
        ((USER,) * (MAX_MESSAGES + 1), "messages"),
    ],
)
def test_messages_that_are_no_conversation_are_refused(messages: tuple[Any, ...], where: str) -> None:
    refused = refusal(*messages)
    assert (refused.status, refused.parameter) == (400, where)
    assert str(refused).startswith(f"{where}: ")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("stream", "yes"),
        ("stream_options", []),
        ("max_tokens", 0),
        ("max_tokens", 101),
        ("max_tokens", True),
        ("max_completion_tokens", 1.5),
        ("temperature", -0.1),
        ("temperature", 2.1),
        ("temperature", "hot"),
        ("top_p", 0),
        ("seed", 2**63),
        ("seed", 0.5),
        ("arpo", {"event": True}),
        ("arpo", True),
        ("n", 2),
        ("n", True),
        ("stop", ["."]),
        ("tools", [{"type": "function"}]),
        ("tool_choice", "required"),
        ("logprobs", True),
        ("frequency_penalty", 0.5),
        ("response_format", {"type": "json_object"}),
        ("surprise", 1),
    ],
)
def test_options_that_cannot_be_honoured_are_refused_by_name(name: str, value: Any) -> None:
    refused = refusal(USER, **{name: value})
    assert (refused.status, refused.parameter) == (400, name)


@pytest.mark.parametrize("name", NEUTRAL)
def test_options_that_change_nothing_are_accepted(name: str) -> None:
    for value in (None, *NEUTRAL[name]):
        assert read(USER, **{name: value}) == ChatRequest("Why?")


def test_another_model_is_not_found() -> None:
    refused = refusal(USER, model="gpt")
    assert (refused.status, refused.code, refused.parameter) == (404, "model_not_found", "model")
    assert refusal(USER, model=None).code == "missing_required_parameter"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"\xff",
        b'{"model": "m", "messages": [{"role": "user", "content": "Why?"}], "temperature": NaN}',
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b"1" * 10_000,
    ],
)
def test_a_body_that_is_no_object_is_refused(body: bytes) -> None:
    with pytest.raises(Refused) as refused:
        read_request(body, "m", 100)
    assert refused.value.status == 400
    json.dumps(error_body(refused.value), allow_nan=False).encode()


ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.sampled_from(["user", "m"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["role", "content", "type", "text", "events", "x"]), inner, max_size=3)
    ),
    max_leaves=8,
)
NAMES = st.sampled_from(
    [*NEUTRAL, "messages", "stream", "stream_options", "max_tokens", "temperature", "top_p", "seed", "arpo", "user"]
)


@given(st.dictionaries(NAMES, ANY_JSON, max_size=4))
def test_nothing_but_refused_is_raised(options: dict[str, Any]) -> None:
    body = json.dumps({"model": "m", "messages": [USER], **options}).encode()
    try:
        assert isinstance(read_request(body, "m", 100), ChatRequest)
    except Refused as refused:
        assert refused.status == 400
        json.dumps(error_body(refused)).encode("ascii")


def test_every_reason_to_stop_has_a_name_in_openais_form() -> None:
    replied = {reason: Reply("", reason, 1, 2, 0) for reason in StopReason}
    found = {reason: reply.finish_reason for reason, reply in replied.items() if reason not in INFRA_STOPS}
    assert found == {
        StopReason.ANSWER: "stop",
        StopReason.EOS: "stop",
        StopReason.DONE: "stop",
        StopReason.LENGTH: "length",
        StopReason.MAX_TOOL_CALLS: "length",
        StopReason.MAX_SECONDS: "length",
    }
    assert replied[StopReason.EOS].usage == {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3}
