"""A conversation: its token ids, the seeds of its turns, the limits and statistics of its answers."""

from __future__ import annotations

import asyncio

import clock
import pytest
from conversations import CHAT, converse, num_tokens, says

from arpo.agent.conversation import Conversation
from arpo.agent.formats import encode_follow_up, encode_prompt, encode_result
from arpo.types import StopReason


def ask(conversation: Conversation, *questions: str) -> None:
    for question in questions:
        assert conversation.ask(question)
        asyncio.run(conversation.answer())


def test_a_conversation_is_prompt_turns_results_and_follow_ups_as_ids() -> None:
    first, second, third = "<think>Hm.</think><search>Mira</search>", "Upper Kelso.<|im_end|>", "In 1912."
    conversation = converse(says(first, second, third))
    ask(conversation, "Where was Mira born?", "When?")
    ids = [CHAT(text, add_special_tokens=False)["input_ids"] for text in (first, second, third)]
    agent = conversation.agent
    expected = [
        *encode_prompt(CHAT, "Where was Mira born?", agent.format.system_prompt()),
        *ids[0],
        *encode_result(CHAT, agent.format, "found: Mira", 512)[0],
        *ids[1],
    ]
    expected += [*(encode_follow_up(CHAT, expected, "When?") or ()), *ids[2]]
    assert conversation.tokens == expected


def test_every_turn_has_a_seed_of_its_own_that_repeats() -> None:
    def seeds() -> list[int]:
        seen: list[int] = []
        conversation = converse(lambda prefix, seed: seen.append(seed) or "Yes.")  # type: ignore[func-returns-value]
        ask(conversation, "Why?")
        conversation.clear()
        ask(conversation, "Why?", "Why?")
        return seen

    assert len({*seeds()}) == 3
    assert seeds() == seeds()


def test_entropies_are_those_of_the_first_tokens_of_the_turn_and_after_each_result() -> None:
    turns = iter(
        [
            ("<search>a</search>", [1.0, 2.0, 99.0]),
            ("<search>b</search>", [3.0, 4.0, 99.0]),
            ("So it is.", [5.0, 6.0, 99.0]),
        ]
    )
    conversation = converse(lambda prefix, seed: next(turns))
    conversation.ask("Why?")
    answer = asyncio.run(conversation.answer())
    assert (answer.stop_reason, answer.tool_calls) == (StopReason.EOS, 2)
    assert (answer.initial_entropies, answer.result_entropies) == ([1.0, 2.0], [3.0, 4.0, 5.0, 6.0])
    assert answer.sampled_tokens == sum(
        num_tokens(CHAT, text) for text in ("<search>a</search>", "<search>b</search>", "So it is.")
    )


def test_a_result_counts_against_the_tokens_of_an_answer() -> None:
    used = num_tokens(CHAT, "<search>a</search><result>found: a</result>\n")
    for more, end in ((0, StopReason.LENGTH), (1, StopReason.EOS)):
        conversation = converse(says("<search>a</search>", "x"), max_tokens=used + more)
        conversation.ask("Why?")
        asked = len(conversation.tokens)
        assert asyncio.run(conversation.answer()).stop_reason is end
        taken = used + 1 if end is StopReason.EOS else num_tokens(CHAT, "<search>a</search>")
        assert len(conversation.tokens) == asked + taken


def test_the_time_of_an_answer_is_that_of_all_its_sampling() -> None:
    conversation = converse(says("<search>a</search>", "x"), delay=0.02)
    conversation.ask("Why?")
    assert clock.run(conversation.answer()).seconds == pytest.approx(0.04)
