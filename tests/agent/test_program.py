"""Programs that somebody else wrote: exact tokens, trees as of arpo's own loop, replays, failures."""

from __future__ import annotations

import asyncio
import concurrent.futures
import http.client
import json
import os
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from fruit import PRICES, price
from native_templates import HERMES, tokenizer_for
from programs import COMMAND, Recording, plain, program_agent, tool_loop, without_clock

from arpo.agent.agent import Agent, PromptEncoder
from arpo.agent.conversation import Conversation
from arpo.agent.formats import build_format
from arpo.agent.messages import BadRequest, ChatEncoder, Message, read_request
from arpo.agent.program import CommandProgram, Endpoint, read_output
from arpo.algorithm.metrics import rollout_metrics
from arpo.algorithm.rollout import _TreeBuilder, rollout, sample_tree
from arpo.config.algorithm import Branching
from arpo.config.schema import Rollout
from arpo.engine.scripted import Script, ScriptedEngine
from arpo.errors import ArpoError
from arpo.rewards import Scorer
from arpo.runs.trees import pack_trees, tree_to_json, unpack_tree
from arpo.tools.executor import Toolset
from arpo.types import NO_CONTEXT, Kind, Reward, RolloutTree, ScoredTree, StopReason, Task

TASK = Task("q1", "What do two pears cost?", ("110",))
SPEC = {"type": "function", "function": {"name": "price", "description": price.spec.description}}
SPEC["function"]["parameters"] = dict(price.spec.schema)  # type: ignore[index]
ANSWER = "<think>so</think><answer>\\boxed{110}</answer>"


def scripted(turns: dict[int, str], entropy: float = 0.1) -> Script:
    """A model that says `turns[n]` after n results, with rising entropy; words of its own for every seed."""

    def script(prefix: str, seed: int) -> tuple[str, list[float]]:
        results = prefix.count("</result>") + prefix.count("</tool_response>")
        return turns[results].replace("SEED", str(seed % 97)), [entropy + results]

    return script


TURNS = {
    0: "<think>SEED</think><price>pear</price>",
    1: "<think>SEED more</think><price>apple</price>",
    2: "<think>SEED</think><answer>\\boxed{110}</answer>",
}


def tree_of(
    agent: Agent,
    policy: str = "entropy",
    num: int = 6,
    initial: int = 2,
    calls: int = 5,
    seconds: float = 60,
    **more: Any,
) -> RolloutTree:
    how = Rollout(num_trajectories=num, num_initial=initial, max_tool_calls=calls, concurrency=1, max_seconds=seconds)
    how = how.model_copy(update=more)
    branching = Branching(policy=policy, probe_tokens=2)  # type: ignore[arg-type]
    return asyncio.run(rollout(agent, TASK, how, branching, 3))


def call_price(name: str, arguments: dict[str, Any]) -> str:
    return str(PRICES[arguments["item"]])


@pytest.mark.parametrize("policy", ["entropy", "always", "never", "posthoc_random", "posthoc_entropy", "shuffled"])
def test_a_tree_of_a_program_is_that_of_arpos_own_loop(policy: str, tokenizer: Any) -> None:
    """Node by node: tokens, log-probs, entropies, decisions, calls and results, and where every trajectory ends."""
    engine = ScriptedEngine(tokenizer, scripted(TURNS))
    tools = Toolset([price])
    own = Agent(engine, tokenizer, tools, build_format("tags", [price.spec], tokenizer))
    by_program = program_agent(engine, tokenizer, tool_loop([SPEC], call_price))
    expected, got = tree_of(own, policy), tree_of(by_program, policy)
    assert without_clock(got) == without_clock(expected)
    assert len(expected.leaves) == 6
    if policy in ("always", "entropy"):
        assert expected.branch_points == 4 and expected.tool_calls < 2 * 6


@pytest.mark.parametrize("twice", [False, True])
def test_a_tree_in_the_models_own_format_is_that_of_arpos_own_loop(twice: bool) -> None:
    """With one call a turn, and with two, whose results stand in one message."""
    tokenizer = tokenizer_for(HERMES)
    call = '<tool_call>\n{"name": "price", "arguments": {"item": "pear"}}\n</tool_call>'
    turns = {0: "I look. " + call, 1: call, 2: "\\boxed{110}", 3: "\\boxed{110}"}
    if twice:
        turns[0] = f"I look.\n{call}\n{call.replace('pear', 'apple')}"
    turns = {number: f"SEED {text}<|im_end|>" if number != 1 else f"{text}<|im_end|>" for number, text in turns.items()}
    if twice:
        turns[1] = turns[2]
    engine = ScriptedEngine(tokenizer, scripted(turns))
    fmt = build_format("native", [price.spec], tokenizer)
    fmt = replace(fmt, end_texts=(*fmt.end_texts, "<|im_end|>"))
    prompts = PromptEncoder(tokenizer, fmt, 4096, system="Be brief.")
    own = Agent(engine, tokenizer, Toolset([price]), fmt, encoder=prompts)
    program = tool_loop([SPEC], call_price, system="Be brief.")
    by_program = program_agent(engine, tokenizer, program, "native")
    by_program = replace(
        by_program, chat=ChatEncoder(tokenizer, "native", end_texts=("<|im_end|>",)), format=replace(fmt, specs=())
    )
    expected, got = tree_of(own, "always"), tree_of(by_program, "always")
    assert without_clock(got) == without_clock(expected)
    assert len(expected.trajectories[0].tool_calls) == 2 and expected.branch_points


class Spelling(ScriptedEngine):
    """Writes "pear" letter by letter, as encoding its text would not."""

    async def generate(self, prefix: Sequence[int], params: Any, *, on_token: Any = None) -> Any:
        made = await super().generate(prefix, params, on_token=None)
        pieces = [self._tokenizer.convert_tokens_to_ids(letter) for letter in "pear"]
        whole = self._tokenizer("pear", add_special_tokens=False).input_ids
        assert len(whole) < len(pieces)
        tokens = list(made.tokens)
        for at in range(len(tokens)):
            if tokens[at : at + len(whole)] == whole:
                tokens[at : at + len(whole)] = pieces
        for token in tokens:
            on_token(token, -0.5, 1.0)
        return replace(made, tokens=tuple(tokens), logprobs=(-0.5,) * len(tokens), entropies=(1.0,) * len(tokens))


def test_a_reply_in_a_conversation_that_starts_anew_keeps_its_tokens(tokenizer: Any) -> None:
    """A program that compacts its history, and keeps the model's last words."""

    def compacting(task: Any, endpoint: Any) -> None:
        reply = plain.ask(endpoint, [{"role": "user", "content": task.question}])
        kept = [{"role": "user", "content": "Before:"}, reply, {"role": "user", "content": "Go on."}]
        plain.ask(endpoint, kept)

    engine = Recording(Spelling(tokenizer, lambda prefix, seed: "pear"))
    tree = tree_of(program_agent(engine, tokenizer, compacting), "never", num=1, initial=1)
    assert tree.nodes[2].context == NO_CONTEXT
    first, second = engine.made
    spelled = first[1].tokens
    assert len(spelled) == 4 and spelled in [second[0][i : i + 4] for i in range(len(second[0]))]


def test_recorded_tokens_are_those_that_the_engine_sampled(tokenizer: Any) -> None:
    """Prefix by prefix, with tokens that encoding the text again would not give."""
    pieces = [tokenizer.convert_tokens_to_ids(letter) for letter in "pear"]
    engine = Recording(Spelling(tokenizer, scripted(TURNS)))
    tree = tree_of(program_agent(engine, tokenizer, tool_loop([SPEC], call_price)), "always")
    nodes = [index for index, node in enumerate(tree.nodes) if node.kind is Kind.MODEL]
    found = {(tree.tokens(tree.nodes[i].parent or 0), tree.nodes[i].tokens, tree.nodes[i].logprobs) for i in nodes}
    assert found == {(prefix, made.tokens, made.logprobs) for prefix, made in engine.made}
    assert any(tuple(pieces) == node.tokens[i : i + 4] for node in tree.nodes for i in range(len(node.tokens)))


def score(agent: Agent, how: Rollout, mask_faults: bool = True, policy: str = "always") -> ScoredTree:
    branching = Branching(policy=policy, probe_tokens=2)  # type: ignore[arg-type]
    with Scorer(lambda trajectory: Reward(float(trajectory.answer is not None)), 1, mask_faults) as scorer:
        return asyncio.run(sample_tree(agent, TASK, how, branching, 3, scorer.score))


def two_agents(task: Any, endpoint: Any) -> str:
    """A main conversation; a sub-agent with one of its own in the middle; at the end a summary in place of all."""
    talk = [{"role": "user", "content": task.question}]
    talk.append(plain.ask(endpoint, talk))
    sub = [{"role": "user", "content": f"Check this: {talk[-1]['content']}"}]
    checked = plain.ask(endpoint, sub)["content"]
    talk.append({"role": "user", "content": f"The check says: {checked}"})
    talk.append(plain.ask(endpoint, talk))
    summary = [{"role": "user", "content": f"So far: {talk[-1]['content']} Answer."}]
    return str(plain.ask(endpoint, summary)["content"])


def test_conversations_of_a_run_have_contexts_of_their_own_and_share_its_trajectory(tokenizer: Any) -> None:
    said = count()
    engine = Recording(ScriptedEngine(tokenizer, lambda prefix, seed: f"reply {next(said)}"))
    tree = tree_of(program_agent(engine, tokenizer, two_agents), "never", num=1, initial=1)
    (trajectory,) = tree.trajectories
    assert [node.kind for node in trajectory.nodes] == [Kind.PROMPT, *[Kind.MODEL, Kind.TOOL] * 3, Kind.MODEL]
    assert [node.context for node in tree.nodes if node.kind is Kind.TOOL] == [NO_CONTEXT, 1, NO_CONTEXT]
    assert trajectory.turns == ("reply 0", "reply 1", "reply 2", "reply 3") and trajectory.answer == "reply 3"
    seen = [tokenizer.decode(list(prefix)) for prefix, _ in engine.made]
    assert seen == [
        "<|user|> What do two pears cost?<|assistant|>",
        "<|user|> Check this: reply 0<|assistant|>",
        "<|user|> What do two pears cost?<|assistant|>reply 0<|user|> The check says: reply 1<|assistant|>",
        "<|user|> So far: reply 2 Answer.<|assistant|>",
    ]
    assert [tree.tokens(i - 1) for i in (1, 3, 5, 7)] == [prefix for prefix, _ in engine.made]


def test_a_branch_in_a_sub_agent_replays_the_conversations_before_it(tokenizer: Any) -> None:
    said = count()
    runs: list[str] = []
    engine = Recording(ScriptedEngine(tokenizer, lambda prefix, seed: (f"reply {next(said)}", [float(len(runs))])))

    def program(task: Any, endpoint: Any) -> str:
        runs.append(endpoint.api_key)
        return two_agents(task, endpoint)

    tree = tree_of(program_agent(engine, tokenizer, program), "always", num=3, initial=1)
    assert len(set(runs)) == 3 and len(engine.made) == 4 + 3 + 2
    assert [leaf.stop_reason for leaf in tree.leaves] == [StopReason.ANSWER] * 3
    first, second, third = (trajectory.indices for trajectory in tree.trajectories)
    assert first[:3] == second[:3] and first[3] != second[3] and first[:5] == third[:5] and first[5] != third[5]
    assert {tree.tokens(node.parent or 0) for node in tree.nodes if node.kind is Kind.MODEL} == {
        prefix for prefix, _ in engine.made
    }


def test_the_same_question_asked_again_is_sampled_again_in_the_same_context(tokenizer: Any) -> None:
    said = count()

    def best_of(task: Any, endpoint: Any) -> str:
        asked = [{"role": "user", "content": task.question}]
        return " ".join(plain.ask(endpoint, asked)["content"] for _ in range(3))

    engine = Recording(ScriptedEngine(tokenizer, lambda prefix, seed: f"{next(said)}"))
    tree = tree_of(program_agent(engine, tokenizer, best_of), "never", num=1, initial=1)
    assert tree.trajectories[0].answer == "0 1 2"
    assert {prefix for prefix, _ in engine.made} == {tree.nodes[0].tokens}
    assert [tree.tokens(i - 1) for i in (1, 3, 5)] == [tree.nodes[0].tokens] * 3


def test_a_program_that_does_not_ask_the_same_again_is_masked_and_counted(tokenizer: Any) -> None:
    """Its tool returns another number each time; the branches are left out, and the others are trained."""
    numbers = count()
    agent = program_agent(
        ScriptedEngine(tokenizer, scripted(TURNS)), tokenizer, tool_loop([SPEC], lambda *_: str(next(numbers)))
    )
    how = Rollout(num_trajectories=6, num_initial=2, concurrency=1)
    scored = score(agent, how, mask_faults=False)
    reasons = [leaf.stop_reason for leaf in scored.tree.leaves]
    assert reasons.count(StopReason.REPLAY_DIFFERS) == 4 and reasons.count(StopReason.ANSWER) == 2
    assert list(scored.mask) == [reason is StopReason.ANSWER for reason in reasons]
    assert rollout_metrics([scored], 2)["program_differences"] == 4


def test_replays_are_noticed_when_the_program_asks_less_or_fails(tokenizer: Any) -> None:
    runs = count()

    def tired(task: Any, endpoint: Any) -> None:
        run = next(runs)
        if run == 2:
            return
        if run == 3:
            raise RuntimeError("no more")
        tool_loop([SPEC], call_price)(task, endpoint)

    agent = program_agent(ScriptedEngine(tokenizer, scripted(TURNS)), tokenizer, tired)
    tree = tree_of(agent, "always", num=4)
    assert [leaf.stop_reason for leaf in tree.leaves] == [StopReason.ANSWER] * 2 + [StopReason.REPLAY_DIFFERS] * 2


def test_a_client_that_goes_away_at_a_branch_point_may_ask_again_there(tokenizer: Any) -> None:
    """The branch then has a turn of its own after the same result, and no request twice."""
    started, cancelled, runs = threading.Event(), threading.Event(), count()

    class Stuck(ScriptedEngine):
        async def generate(self, prefix: Sequence[int], *args: Any, **kwargs: Any) -> Any:
            if leaving and not started.is_set():
                started.set()
                try:
                    await asyncio.Event().wait()
                finally:
                    cancelled.set()
            return await super().generate(prefix, *args, **kwargs)

    leaving: list[bool] = []

    def program(task: Any, endpoint: Any) -> str:
        is_branch = next(runs) == 1
        talk = [{"role": "user", "content": task.question}]
        talk += [plain.ask(endpoint, talk), {"role": "user", "content": "again"}]
        if is_branch:
            leaving.append(True)
            port = int(endpoint.base_url.split(":")[2].split("/")[0])
            connection = http.client.HTTPConnection("127.0.0.1", port)
            headers = {"Authorization": f"Bearer {endpoint.api_key}"}
            connection.request("POST", "/v1/chat/completions", json.dumps({"messages": talk}), headers)
            assert started.wait(60)
            connection.close()
            assert cancelled.wait(60)
        return str(plain.ask(endpoint, talk)["content"])

    agent = program_agent(Stuck(tokenizer, lambda prefix, seed: f"reply {seed % 97}"), tokenizer, program)
    tree = tree_of(agent, "always", num=2, initial=1)
    assert [trajectory.indices for trajectory in tree.trajectories] == [(0, 1, 2, 3), (0, 1, 2, 4)]
    assert {leaf.stop_reason for leaf in tree.leaves} == {StopReason.ANSWER}


def test_a_branch_has_the_time_of_a_whole_run(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its program is run from the beginning, and so are its tools."""
    seconds: list[float] = []

    def start(self: _TreeBuilder, trajectory: Any) -> None:
        seconds.append(trajectory.seconds)
        original(self, trajectory)

    original = _TreeBuilder._start
    monkeypatch.setattr(_TreeBuilder, "_start", start)
    agent = program_agent(ScriptedEngine(tokenizer, scripted(TURNS)), tokenizer, tool_loop([SPEC], call_price))
    assert tree_of(agent, "always", seconds=60).branch_points and seconds == [60.0] * 6


def test_a_later_branch_may_make_as_many_requests_as_any_run() -> None:
    """Two results in one request count once."""
    tokenizer = tokenizer_for(HERMES)
    call = '<tool_call>\n{"name": "price", "arguments": {"item": "pear"}}\n</tool_call>'
    turns = {0: f"{call}\n{call.replace('pear', 'apple')}<|im_end|>", 2: f"{call}<|im_end|>", 3: "SEED<|im_end|>"}
    agent = program_agent(
        ScriptedEngine(tokenizer, scripted(turns)), tokenizer, tool_loop([SPEC], call_price), "native"
    )
    agent = replace(agent, chat=ChatEncoder(tokenizer, "native", end_texts=("<|im_end|>",)))
    tree = tree_of(agent, "posthoc_top_entropy", num=6, initial=1, calls=2)
    assert [leaf.stop_reason for leaf in tree.leaves] == [StopReason.ANSWER] * 6
    assert {sum(node.kind is Kind.TOOL for node in each.nodes) for each in tree.trajectories} == {3}
    assert {node.parent for node in tree.nodes if node.kind is Kind.MODEL} >= {0, 3}


def test_an_error_of_the_engine_ends_the_rollout(tokenizer: Any) -> None:
    """It is not the program's, so it must not be masked as one."""

    class Broken(ScriptedEngine):
        async def generate(self, *args: Any, **kwargs: Any) -> Any:
            raise RuntimeError("out of memory")

    agent = program_agent(Broken(tokenizer, scripted(TURNS)), tokenizer, tool_loop([SPEC], call_price))
    with pytest.raises(RuntimeError, match="out of memory"):
        tree_of(agent, "never", num=2, initial=2)


def test_trees_of_programs_are_stored_and_others_as_before(tokenizer: Any) -> None:
    agent = program_agent(ScriptedEngine(tokenizer, lambda prefix, seed: "reply"), tokenizer, two_agents)
    tree = tree_of(agent, "never", num=1, initial=1)
    leaf = replace(tree.leaves[0], reward=Reward(0.5, {"short": 1.0}))
    scored = ScoredTree(replace(tree, leaves=(leaf,)), (Reward(0.5),), mask=(True,))
    assert unpack_tree(pack_trees([scored])[0]) == scored
    agent = program_agent(ScriptedEngine(tokenizer, scripted(TURNS)), tokenizer, tool_loop([SPEC], call_price))
    values = tree_to_json(ScoredTree(tree_of(agent, "always")))
    assert all("context" not in node for node in values["nodes"])
    assert all(set(each) == {"node", "stop_reason", "answer"} for each in values["leaves"])


def test_a_program_has_no_chat(tokenizer: Any) -> None:
    agent = program_agent(ScriptedEngine(tokenizer, lambda prefix, seed: ANSWER), tokenizer, two_agents)
    with pytest.raises(ArpoError, match="holds its own conversations"):
        Conversation(agent, Rollout(), 2, 0)


def stuck(task: Any, endpoint: Any) -> None:
    threading.Event().wait()


def broken(task: Any, endpoint: Any) -> None:
    plain.ask(endpoint, [{"role": "user", "content": task.question}])
    raise RuntimeError("the database is gone")


def exiting(task: Any, endpoint: Any) -> None:
    plain.ask(endpoint, [{"role": "user", "content": task.question}])
    sys.exit(1)


def cancelled_inside(task: Any, endpoint: Any) -> None:
    plain.ask(endpoint, [{"role": "user", "content": task.question}])
    raise concurrent.futures.CancelledError


@pytest.mark.parametrize(
    ("program", "reason", "metric"),
    [
        (stuck, StopReason.PROGRAM_TIMEOUT, "program_timeouts"),
        (broken, StopReason.PROGRAM_FAILED, "program_failures"),
        (lambda task, endpoint: 1.0, StopReason.PROGRAM_FAILED, "program_failures"),  # it asks nothing
        (exiting, StopReason.PROGRAM_FAILED, "program_failures"),
        (cancelled_inside, StopReason.PROGRAM_FAILED, "program_failures"),
    ],
)
def test_a_program_that_fails_or_hangs_is_masked_and_counted(
    program: Callable[..., Any], reason: StopReason, metric: str, tokenizer: Any
) -> None:
    agent = program_agent(ScriptedEngine(tokenizer, lambda prefix, seed: ANSWER), tokenizer, program)
    how = Rollout(num_trajectories=2, num_initial=2, max_seconds=0.2 if program is stuck else 60)
    scored = score(agent, how, policy="never")
    assert [leaf.stop_reason for leaf in scored.tree.leaves] == [reason] * 2
    assert scored.mask == (False, False)
    metrics = rollout_metrics([scored], 2)
    assert metrics[metric] == metrics["masked_trajectories"] == 2


def test_a_model_that_is_cut_off_is_trained_even_if_its_program_then_fails(tokenizer: Any) -> None:
    """It asks too often, writes too much, or takes too long: this is something to learn from."""

    def strict(task: Any, endpoint: Any) -> str:
        reply = plain.ask(endpoint, [{"role": "user", "content": task.question}])
        return str(json.loads(reply["content"]))

    class Slow(ScriptedEngine):
        async def generate(self, *args: Any, **kwargs: Any) -> Any:
            return replace(await super().generate(*args, **kwargs), finish="time")

    looping = scripted(dict.fromkeys(range(20), TURNS[0]))
    cases: list[tuple[Any, Any, dict[str, Any], StopReason]] = [
        (ScriptedEngine(tokenizer, looping), tool_loop([SPEC], call_price), {}, StopReason.MAX_TOOL_CALLS),
        (ScriptedEngine(tokenizer, scripted(TURNS)), strict, {"max_tokens": 3}, StopReason.LENGTH),
        (ScriptedEngine(tokenizer, looping), tool_loop([SPEC], call_price), {"max_tokens": 30}, StopReason.LENGTH),
        (ScriptedEngine(tokenizer, looping, max_context=60), tool_loop([SPEC], call_price), {}, StopReason.LENGTH),
        (Slow(tokenizer, scripted(TURNS)), strict, {}, StopReason.MAX_SECONDS),
    ]
    for engine, program, more, reason in cases:
        how = Rollout(num_trajectories=1, num_initial=1, max_tool_calls=5, **more)
        scored = score(program_agent(engine, tokenizer, program), how, policy="never")
        (trajectory,) = scored.tree.trajectories
        assert (trajectory.stop_reason, scored.mask) == (reason, (True,))
        assert trajectory.completion_tokens > 0
        assert all(len(scored.tree.tokens(i)) <= engine.capabilities.max_context for i in range(len(scored.tree.nodes)))
        if reason is StopReason.MAX_TOOL_CALLS:
            assert len(trajectory.tool_calls) == 5 and len(trajectory.model_nodes) == 6


def test_runs_that_begin_with_different_words_are_one_group(tokenizer: Any) -> None:
    runs = count()

    def dated(task: Any, endpoint: Any) -> str:
        return str(plain.ask(endpoint, [{"role": "user", "content": f"Day {next(runs)}. {task.question}"}])["content"])

    engine = Recording(ScriptedEngine(tokenizer, lambda prefix, seed: ANSWER))
    tree = tree_of(program_agent(engine, tokenizer, dated), "always", num=3, initial=3)
    assert [len(trajectory.nodes) for trajectory in tree.trajectories] == [2, 3, 3]
    assert [trajectory.nodes[-1].parent for trajectory in tree.trajectories] == [0, 2, 4]
    assert [tree.tokens(i) for i in (0, 2, 4)] == [prefix for prefix, _ in engine.made]
    assert all(node.decision is None for node in tree.nodes)


def test_the_next_request_may_cut_and_limit_its_reply(tokenizer: Any) -> None:
    """Stop strings are not part of what the program sees, and the conversation goes on after them."""
    seen: list[Any] = []

    def program(task: Any, endpoint: Any) -> None:
        talk = [{"role": "user", "content": task.question}]
        talk.append(plain.ask(endpoint, talk, stop=["Kelso"]))
        talk.append({"role": "user", "content": "And?"})
        talk.append(plain.ask(endpoint, talk, max_tokens=2))
        seen.extend(talk)

    engine = Recording(ScriptedEngine(tokenizer, lambda prefix, seed: "Born in Upper Kelso is Mira"))
    tree = tree_of(program_agent(engine, tokenizer, program), "never", num=1, initial=1)
    assert seen[1]["content"] == "Born in Upper" and len(tree.nodes[-1].tokens) == 2
    assert tree.nodes[1].text == "Born in Upper Kelso" and tree.nodes[1].tokens == engine.made[0][1].tokens
    assert [node.context for node in tree.nodes] == [None] * 4
    assert tree.leaves[0].stop_reason is StopReason.ANSWER


def test_thoughts_that_the_template_drops_begin_a_conversation_anew() -> None:
    """Where a template changes earlier turns, their tokens are not appended to."""
    last = "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}"
    last += "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    content = "{{ m.content.split('</think>')[-1] if m.role == 'assistant' and loop.index0 < ns.last else m.content }}"
    tokenizer = tokenizer_for(last + HERMES.replace("{{ m.content }}{% for c", content + "{% for c"))

    def program(task: Any, endpoint: Any) -> None:
        talk = [{"role": "user", "content": task.question}]
        talk.append(plain.ask(endpoint, talk))
        assert talk[1]["content"] == "It is 110." and talk[1]["reasoning_content"] == "long"
        plain.ask(endpoint, [*talk, {"role": "user", "content": "Sure?"}])

    engine = Recording(ScriptedEngine(tokenizer, lambda prefix, seed: "<think>long</think>It is 110.<|im_end|>"))
    agent = program_agent(engine, tokenizer, program, "auto")
    agent = replace(agent, chat=ChatEncoder(tokenizer, "native", end_texts=("<|im_end|>",)))
    tree = tree_of(agent, "never", num=1, initial=1)
    assert tree.nodes[2].context == NO_CONTEXT
    assert tokenizer.decode(list(engine.made[1][0])) == (
        "<|im_start|>user\nWhat do two pears cost?<|im_end|>\n<|im_start|>assistant\nIt is 110.<|im_end|>\n"
        "<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_history_that_the_program_wrote_itself_is_written_in_the_format(tokenizer: Any) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "price", "arguments": '{"item": "pear"}'}}

    def program(task: Any, endpoint: Any) -> None:
        talk: list[dict[str, Any]] = [{"role": "system", "content": "Be brief."}]
        talk += [{"role": "user", "content": "Apples?"}, {"role": "assistant", "content": "40"}]
        talk += [{"role": "user", "content": task.question}, {"role": "assistant", "tool_calls": [call]}]
        plain.ask(endpoint, [*talk, {"role": "tool", "tool_call_id": "c1", "content": "55 <|end|>"}], tools=[SPEC])

    engine = Recording(ScriptedEngine(tokenizer, lambda prefix, seed: ANSWER))
    tree_of(program_agent(engine, tokenizer, program), "never", num=1, initial=1)
    assert tokenizer.decode(list(engine.made[0][0])) == (
        "<|user|> Apples?<|assistant|>40<|user|> What do two pears cost?<|assistant|>"
        "<price>pear</price><result>55 <|end|></result>\n"
    )
    assert tokenizer.eos_token_id not in engine.made[0][0]  # a text is no control token


def test_tools_that_the_format_cannot_express_stop_the_run(tokenizer: Any) -> None:
    tool = {"type": "function", "function": {"name": "think", "parameters": {}}}
    agent = program_agent(
        ScriptedEngine(tokenizer, lambda prefix, seed: ANSWER), tokenizer, tool_loop([tool], call_price)
    )
    with pytest.raises(ArpoError, match="a tool cannot be named 'think'"):
        tree_of(agent, "never", num=1, initial=1)


def test_a_command_is_killed_when_its_trajectory_ends(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    code = f"import os, pathlib, time; pathlib.Path({str(ready)!r}).write_text(str(os.getpid()) + '.'); time.sleep(1e4)"

    async def work() -> None:
        running = asyncio.ensure_future(CommandProgram((sys.executable, "-c", code)).run(TASK, Endpoint("", "")))
        while not (ready.exists() and ready.read_text().endswith(".")):
            assert not running.done()
            await asyncio.sleep(0.01)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    asyncio.run(work())
    with pytest.raises(ProcessLookupError):
        os.kill(int(ready.read_text()[:-1]), 0)


def test_a_command_asks_this_machine_without_a_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "intranet.example")
    monkeypatch.delenv("no_proxy", raising=False)
    code = "import os; print(os.environ['NO_PROXY'], os.environ['no_proxy'])"
    said = asyncio.run(CommandProgram((sys.executable, "-c", code)).run(TASK, Endpoint("", "")))
    assert said == "intranet.example,127.0.0.1,localhost 127.0.0.1,localhost"


def test_a_command_is_run(tokenizer: Any) -> None:
    agent = program_agent(ScriptedEngine(tokenizer, lambda prefix, seed: "110<|end|>"), tokenizer, broken)
    agent = replace(
        agent,
        program=CommandProgram((sys.executable, "-c", COMMAND)),
        format=replace(agent.format, end_texts=("<|end|>",)),
    )
    agent = replace(agent, chat=ChatEncoder(tokenizer, "tags", end_texts=("<|end|>",)))
    (leaf,) = tree_of(agent, "never", num=1, initial=1).leaves
    assert (leaf.stop_reason, leaf.answer) == (StopReason.ANSWER, "110")
    how, never = Rollout(num_trajectories=1, num_initial=1), Branching(policy="never")
    failing = Task("q2", "What?", (), meta={"status": 3})
    (leaf,) = asyncio.run(rollout(agent, failing, how, never, 0)).leaves
    assert leaf.stop_reason is StopReason.PROGRAM_FAILED
    hanging = replace(agent, program=CommandProgram((sys.executable, "-c", "import time; time.sleep(10000)")))
    (leaf,) = tree_of(hanging, "never", num=1, initial=1, seconds=0.2).leaves
    assert leaf.stop_reason is StopReason.PROGRAM_TIMEOUT


def test_what_a_program_returns() -> None:
    assert read_output(None) == (None, None) and read_output("42") == ("42", None)
    assert read_output(True) == (None, Reward(1.0)) and read_output(0.5) == (None, Reward(0.5))
    assert read_output(Reward(2.0, {"correct": 1.0})) == (None, Reward(2.0, {"correct": 1.0}))
    assert read_output({"a": [1]}) == ('{"a": [1]}', None)
    with pytest.raises(ValueError, match="finite"):
        read_output(float("nan"))


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ([], "messages"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "only text"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "no role 'robot'"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "nothing to answer"),
        ({"messages": [{"role": "user", "content": "x"}], "n": 2}, "n: this endpoint"),
        ({"messages": [{"role": "user", "content": "x"}], "response_format": {"type": "json_object"}}, "response_f"),
        ({"messages": [{"role": "user", "content": "x"}], "max_tokens": 0}, "max_tokens"),
        ({"messages": [{"role": "user", "content": "x"}], "tools": [1]}, "tools"),
        ({"messages": [{"role": "user", "content": "x"}], "tools": [{"function": 1}]}, "tools"),
        ({"messages": [{"role": "user", "content": "x"}], "tools": [{"function": {"parameters": 1}}]}, "tools"),
        ({"messages": [{"role": "user", "content": "x"}], "logprobs": True}, "logprobs: this endpoint"),
        ({"messages": [{"role": "user", "content": "x"}], "stop": [""]}, "stop"),
        ({"messages": [{"role": "user", "content": "x"}], "stop": 3}, "stop"),
        ({"messages": [{"role": "user", "content": "x"}], "stop": [None]}, "stop"),
        ({"messages": [{"role": "user", "content": "x"}], "stop": ["x"] * 17}, "stop"),
        ({"messages": [{"role": ["user"], "content": "x"}]}, "no role"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "a", "function": 1}]}]}, "tool call"),
    ],
)
def test_requests_that_cannot_be_answered_say_why(body: Any, words: str) -> None:
    with pytest.raises(BadRequest, match=words):
        read_request(body)


def test_odd_texts_of_a_request_can_be_encoded_and_compared() -> None:
    """Halves of characters, and arguments that no parser takes."""
    deep = {"id": "a", "function": {"name": ["f"], "arguments": "[" * 200_000}}
    messages = [{"role": "user", "content": "\ud800"}, {"role": "assistant", "tool_calls": [deep]}]
    tool = {"function": {"name": "f", "description": "\udfff"}}
    request = read_request(
        {"messages": [*messages, {"role": "user", "content": "x"}], "tools": [tool], "stop": "\ud800"}
    )
    assert request.messages[0].text == "\ufffd" and request.stop == ("\ufffd",) and len({*request.messages}) == 3
    assert "\ufffd" in request.tools
    for harmless in (
        {"n": 1, "logprobs": False, "stop": None},
        {"response_format": {"type": "text"}, "functions": None},
    ):
        assert read_request({"messages": [{"role": "user", "content": "x"}], **harmless}).stop == ()


def test_messages_are_equal_if_they_say_the_same() -> None:
    call = {"id": "a", "function": {"name": "f", "arguments": '{"y":1, "x": 2}'}}
    one = {"role": "assistant", "content": [{"type": "text", "text": " hi "}], "tool_calls": [call]}
    other = {"role": "assistant", "content": "hi", "refusal": None, "tool_calls": [call | {"type": "function"}]}
    other["tool_calls"][0]["function"] = {"name": "f", "arguments": {"x": 2, "y": 1}}  # type: ignore[index]
    end = {"role": "user", "content": "x"}
    assert read_request({"messages": [one, end]}) == read_request({"messages": [other, end]})
    assert read_request({"messages": [one, end]}).messages[0] == Message(
        "assistant", "hi", (("a", "f", '{"x": 2, "y": 1}'),)
    )
