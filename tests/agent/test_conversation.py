"""A conversation: its token ids, the seeds of its turns, the limits and statistics of its answers."""

from __future__ import annotations

import asyncio
import time

import clock
import pytest
from conversations import CHAT, converse, num_tokens, says
from templates import UNCLOSED, make_tokenizer

from arpo.agent.conversation import ContextFull, Conversation
from arpo.agent.encoding import encode_plain
from arpo.agent.formats import encode_follow_up, encode_prompt, encode_result
from arpo.errors import ArpoError
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


def test_messages_from_elsewhere_are_encoded_as_those_of_a_conversation() -> None:
    conversation = converse(says("In 1912."))
    asyncio.run(conversation.begin("Where was Mira born?", [("Upper Kelso.<|im_end|>", "When?")], system="Be brief."))
    fmt = conversation.agent.format
    expected = [*encode_prompt(CHAT, "Where was Mira born?", fmt.system_prompt("Be brief.", with_answer=True))]
    expected += encode_plain(CHAT, "Upper Kelso.<|im_end|>")
    expected += encode_follow_up(CHAT, expected, "When?") or ()
    assert conversation.tokens == expected
    assert expected.count(CHAT.convert_tokens_to_ids("<|im_end|>")) == 4  # of the template, none of the message
    assert (conversation.questions, conversation.is_new) == (2, True)


def test_messages_from_elsewhere_that_do_not_fit_or_cannot_follow_an_answer_are_refused() -> None:
    with pytest.raises(ContextFull, match="context holds 300"):
        asyncio.run(converse(says(), context=300).begin("Why?", [("Because.", "Why?")] * 100))
    unclosed = converse(says(), tokenizer=make_tokenizer(UNCLOSED))
    asyncio.run(unclosed.begin("Why?"))
    with pytest.raises(ArpoError, match="one question, without earlier messages"):
        asyncio.run(unclosed.begin("Why?", [("Because.", "Why?")]))


def test_an_answer_is_cut_off_at_its_deadline() -> None:
    conversation = converse(says("<search>a</search>", "x"), delay=3.0)
    conversation.ask("Why?")

    async def main() -> tuple[StopReason | None, float]:
        started = time.monotonic()
        answer = await conversation.answer(deadline=started + 5)
        return answer.stop_reason, time.monotonic() - started

    assert clock.run(main()) == (StopReason.MAX_SECONDS, pytest.approx(5))
