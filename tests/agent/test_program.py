"""Programs that somebody else wrote: exact tokens, trees as of arpo's own loop, replays, failures."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

import pytest
from fruit import PRICES, price
from native_templates import HERMES, tokenizer_for
from programs import Recording, plain, program_agent, tool_loop, without_clock

from arpo.agent.agent import Agent, PromptEncoder
from arpo.agent.endpoint import open_endpoint
from arpo.agent.formats import build_format
from arpo.agent.messages import BadRequest, ChatEncoder, Message, read_request
from arpo.agent.program import CommandProgram, read_output
from arpo.algorithm.metrics import rollout_metrics
from arpo.algorithm.rollout import rollout, sample_tree
from arpo.config.algorithm import Branching
from arpo.config.schema import Rollout
from arpo.engine.scripted import Script, ScriptedEngine
from arpo.errors import ArpoError
from arpo.rewards import Scorer
from arpo.tools.executor import Toolset
from arpo.types import NO_CONTEXT, Kind, Reward, RolloutTree, ScoredTree, StopReason, Task, Trajectory

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
    agent: Agent, policy: str = "entropy", num: int = 6, initial: int = 2, calls: int = 5, seconds: float = 60, **more: Any
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


def test_recorded_tokens_are_those_that_the_engine_sampled(tokenizer: Any) -> None:
    """Prefix by prefix, with tokens that encoding the text again would not give."""
    pieces = [tokenizer.convert_tokens_to_ids(letter) for letter in "pear"]
    whole = tokenizer("pear", add_special_tokens=False).input_ids
    assert len(whole) < len(pieces)

    class Spelling(ScriptedEngine):
        async def generate(self, prefix: Sequence[int], params: Any, *, on_token: Any = None) -> Any:
            made = await super().generate(prefix, params, on_token=None)
            tokens = list(made.tokens)
            for at in range(len(tokens)):
                if tokens[at : at + len(whole)] == whole:
                    tokens[at : at + len(whole)] = pieces
            for token in tokens:
                on_token(token, -0.5, 1.0)
            return replace(
                made, tokens=tuple(tokens), logprobs=(-0.5,) * len(tokens), entropies=(1.0,) * len(tokens)
            )

    engine = Recording(Spelling(tokenizer, scripted(TURNS)))
    tree = tree_of(program_agent(engine, tokenizer, tool_loop([SPEC], call_price)), "always")
    nodes = [index for index, node in enumerate(tree.nodes) if node.kind is Kind.MODEL]
    found = {(tree.tokens(tree.nodes[i].parent or 0), tree.nodes[i].tokens, tree.nodes[i].logprobs) for i in nodes}
    assert found == {(prefix, made.tokens, made.logprobs) for prefix, made in engine.made}
    assert any(tuple(pieces) == node.tokens[i : i + 4] for node in tree.nodes for i in range(len(node.tokens)))


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
    assert [used for used in scored.mask] == [reason is StopReason.ANSWER for reason in reasons]
    assert rollout_metrics([scored], 2)["program_differences"] == 4


def score(agent: Agent, how: Rollout, mask_faults: bool = True, policy: str = "always") -> ScoredTree:
    branching = Branching(policy=policy, probe_tokens=2)  # type: ignore[arg-type]
    with Scorer(lambda trajectory: Reward(float(trajectory.answer is not None)), 1, mask_faults) as scorer:
        return asyncio.run(sample_tree(agent, TASK, how, branching, 3, scorer.score))
