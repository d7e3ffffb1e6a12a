"""Engines over vLLM, without vLLM: entropy estimates, and servers that die, restart, stall and send invalid replies."""

from __future__ import annotations

import asyncio
import importlib.util
import math
import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_vllm import BreakOff, FakeVllm, Spoil, fake_vllm, next_token
from hypothesis import example, given
from hypothesis import strategies as st
from models import CONTEXT, EOS, VOCAB, Letters, logits_of, make_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from arpo.agent.agent import build_agent
from arpo.builtin.model import build_model
from arpo.config.loading import load_config
from arpo.config.schema import Rollout
from arpo.engine.build import build_engine
from arpo.engine.vllm.completion import CompletionBuilder, InvalidToken, SampledToken
from arpo.engine.vllm.engine import _without_torchrun_variables
from arpo.engine.vllm.entropy_bounds import entropy_bounds
from arpo.errors import ArpoError
from arpo.models.lora import add_adapter
from arpo.models.save import save_for_vllm
from arpo.tools.executor import Toolset
from arpo.types import Completion, SamplingParams

pytest.importorskip("httpx2")

from arpo.engine.vllm.client import VllmClient
from arpo.engine.vllm.servers import ServerEngine
from arpo.net.http import Unavailable

PREFIX = [5, 6, 7]
PARAMS = SamplingParams(max_tokens=12, seed=3)

# Entropy from the most likely tokens.


def entropy(probabilities: list[float]) -> float:
    return -math.fsum(p * math.log(p) for p in probabilities if p > 0)


@given(
    weights=st.lists(st.floats(0, 1) | st.floats(0, 30).map(lambda x: math.exp(-x)), min_size=1, max_size=60),
    share=st.floats(0, 1),
)
@example(weights=[1.0] * 50, share=0.1)  # flat
@example(weights=[1.0, 1e-12, 1e-12, 1e-12], share=0.3)  # peaked
@example(weights=[1.0, 1.0, 0.0, 0.0], share=0.5)  # nothing left for the others
@example(weights=[3.0, 2.0, 1.0], share=1.0)  # all known
def test_the_entropy_lies_within_its_bounds(weights: list[float], share: float) -> None:
    total = math.fsum(weights)
    if total < 1e-9:
        return
    probabilities = sorted((weight / total for weight in weights), reverse=True)
    known = max(1, round(share * len(probabilities)))
    logprobs = [math.log(p) if p > 0 else -math.inf for p in probabilities[:known]]
    bounds = entropy_bounds(logprobs, len(probabilities))
    exact = entropy(probabilities)
    assert bounds.low - 1e-9 <= exact <= bounds.high + 1e-9
    assert abs(bounds.estimate - exact) <= bounds.error + 1e-9
    assert bounds.error == pytest.approx(0, abs=1e-9) or known < len(probabilities)


def test_the_bounds_are_reached() -> None:
    known = [0.4, 0.2]
    logprobs = list(map(math.log, known))
    low, high = entropy_bounds(logprobs, 10)
    assert low == pytest.approx(entropy([*known, 0.2, 0.2]))  # as many as possible as likely as the last
    assert high == pytest.approx(entropy([*known, *[0.05] * 8]))  # all alike


def test_probabilities_that_rounding_makes_more_than_one() -> None:
    low, high = entropy_bounds([math.log(0.5), math.log(0.5 + 1e-7)], 1000)
    assert low == high == pytest.approx(math.log(2), abs=1e-6)


@pytest.mark.parametrize("known", [[], [-1.0, -1.0, -1.0]])
def test_an_impossible_number_of_logprobs_is_refused(known: list[float]) -> None:
    with pytest.raises(ValueError, match="log-probs of a vocabulary of 2"):
        entropy_bounds(known, 2)


# A turn as it arrives.


def builder(top: int = 4) -> CompletionBuilder:
    return CompletionBuilder(make_model("llama"), Letters(), top)


def sampled(token: int) -> SampledToken:
    return SampledToken(token, math.log(0.5), (math.log(0.5), math.log(0.1)))


@pytest.mark.parametrize(
    ("text", "stop", "limit", "kept", "finish", "found"),
    [
        ("AB<ZC>DE", ("<ZC>",), 9, "AB<ZC>", "stop", "<ZC>"),
        ("AB<ZC>DE", ("<ZC>",), 6, "AB<ZC>", "stop", "<ZC>"),  # at the limit it still counts
        ("AB<ZC>DE", ("<ZC>",), 5, "AB<ZC", "length", None),
        ("AB$CD", ("<ZC>",), 9, "AB$", "eos", None),
        ("AB$", ("$",), 9, "AB$", "eos", "$"),  # as the local engine says
        ("ABCD", (), 4, "ABCD", "length", None),
    ],
)
def test_where_a_turn_ends(text: str, stop: tuple[str, ...], limit: int, kept: str, finish: str, found: Any) -> None:
    alphabet = Letters.alphabet
    seen: list[int] = []
    turn = builder().start(PREFIX, SamplingParams(limit, stop=stop), lambda token, *_: seen.append(token))
    for letter in text:
        turn.add(sampled(alphabet.index(letter)))
    done = turn.completion(7)
    assert "".join(alphabet[token] for token in done.tokens) == kept
    assert (done.finish, done.stop, done.policy_version) == (finish, found, 7)
    assert tuple(seen) == done.tokens


def test_a_sampled_token_outside_the_top_sets_no_bound() -> None:
    turn = builder().start(PREFIX, PARAMS, None)
    turn.add(SampledToken(5, math.log(0.001), (math.log(0.001), math.log(0.4), math.log(0.3))))
    top = entropy_bounds([math.log(0.4), math.log(0.3)], VOCAB)
    assert turn.entropies == [top.estimate]
    assert turn.builder.entropy_stats() == {
        "entropy_error": top.error,
        "entropy_error_max": top.error,
    }
    assert turn.builder.entropy_stats() == {"entropy_error": 0.0, "entropy_error_max": 0.0}


HALF = math.log(0.5)


@pytest.mark.parametrize(
    "bad",
    [
        SampledToken(VOCAB, HALF, (HALF,)),
        SampledToken(-1, HALF, (HALF,)),
        SampledToken(True, HALF, (HALF,)),
        SampledToken("5", HALF, (HALF,)),  # type: ignore[arg-type]
        SampledToken(5, math.nan, (HALF,)),
        SampledToken(5, 0.5, (HALF,)),
        SampledToken(5, -9999.0, (HALF,)),
        SampledToken(5, -math.inf, (HALF,)),
        SampledToken(5, HALF, ()),
        SampledToken(5, HALF, (HALF, math.nan)),
        SampledToken(5, HALF, (HALF, HALF, HALF)),
        SampledToken(5, HALF, (-3.0,)),
        SampledToken(5, HALF, (HALF,) + (-20.0,) * VOCAB),
    ],
)
def test_invalid_tokens_are_refused(bad: SampledToken) -> None:
    seen: list[int] = []
    turn = builder().start(PREFIX, PARAMS, lambda token, *_: seen.append(token))
    with pytest.raises(InvalidToken):
        turn.add(bad)
    assert turn.tokens == turn.logprobs == turn.entropies == seen == []


@pytest.mark.parametrize("prefix", [[], [VOCAB], [-1], [5] * CONTEXT])
def test_invalid_requests_are_refused(prefix: list[int]) -> None:
    with pytest.raises(ValueError, match=r"cannot sample|vocabulary"):
        builder().start(prefix, PARAMS, None)


def test_the_context_limits_a_turn() -> None:
    assert builder().start([5] * (CONTEXT - 2), PARAMS, None).max_tokens == 2


# Settings.


def choose(**settings: Any) -> Any:
    return build_engine(Rollout(**settings), make_model("llama"), Letters(), lambda directory: None, False)


def test_settings_that_do_not_go_together() -> None:
    with pytest.raises(ArpoError, match=r"rollout\.servers.*engine is local"):
        choose(servers=("http://localhost:1",))
    with pytest.raises(ArpoError, match=r"rollout\.temperature.*top_p=1"):
        choose(engine="vllm", temperature=0.7, top_p=0.9)
    with pytest.raises(ArpoError, match=r"rollout\.temperature"):
        choose(engine="vllm", temperature=0.7, top_k=5, servers=("http://localhost:1",))
    assert choose().capabilities.exact_entropy
    assert not choose(engine="vllm", top_p=0.9, servers=("http://localhost:1",)).capabilities.exact_entropy


def test_an_adapter_that_merging_would_round_away_is_refused() -> None:
    settings = [
        "rollout.engine=vllm",
        "train.lora_rank=2",
        "model.dtype=bfloat16",
        'tools.enabled=["search"]',
        "reward.bonus=0",
    ]
    config = load_config(None, settings)
    model = add_adapter(make_model("llama"), 2, 4, ("q_proj",), 0)
    with pytest.raises(ArpoError, match="rounded away"):
        build_agent(config, Toolset([]), model, Letters())


def test_torchrun_variables_are_hidden_from_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "x", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    for name, value in ranks.items():
        monkeypatch.setenv(name, value)
    before = dict(os.environ)
    with _without_torchrun_variables():
        assert not ranks.keys() & os.environ.keys() and "PATH" in os.environ
    assert dict(os.environ) == before


def test_without_vllm_the_error_says_how_to_install_it() -> None:
    if importlib.util.find_spec("vllm") is not None:
        pytest.skip("vLLM is here")
    with pytest.raises(ArpoError, match="pip install vllm"):
        choose(engine="vllm")


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://x", "http://", "http://me:secret@host:1"])
def test_invalid_addresses_are_refused(url: str) -> None:
    with pytest.raises(ArpoError, match=r"rollout\.servers") as caught:
        choose(engine="vllm", servers=(url,))
    assert "secret" not in str(caught.value)


def test_messages_about_a_server_have_no_query() -> None:
    client = VllmClient("http://127.0.0.1:9?key=kanarie4711", 1.0)
    with pytest.raises(Unavailable) as caught:
        asyncio.run(client.weight_version())
    assert "127.0.0.1:9" in str(caught.value) and client.name == "http://127.0.0.1:9"
    assert "kanarie" not in str(caught.value)


# Servers.


class Bed:
    """An engine over fake servers, and the weights that it writes."""

    def __init__(self, count: int, **options: Any) -> None:
        self.weights = 100
        self.stack = ExitStack()
        self.servers: list[FakeVllm] = [self.stack.enter_context(fake_vllm()) for _ in range(count)]
        urls = [server.url for server in self.servers]
        limits = {"patience": 20.0, "pause": 0.02, "idle_timeout": 20.0, "top_logprobs": 4, **options}
        self.engine = ServerEngine([url + "/" for url in urls], make_model("llama"), Letters(), self.write, **limits)

    def write(self, directory: Path) -> None:
        directory.mkdir()
        (directory / "weights").write_text(str(self.weights))

    def ask(self, *prefixes: list[int], params: SamplingParams = PARAMS, on_token: Any = None) -> list[Completion]:
        async def all_of_them() -> list[Completion]:
            asked = (self.engine.generate(prefix, params, on_token=on_token) for prefix in prefixes)
            return list(await asyncio.gather(*asked))

        return asyncio.run(all_of_them())

    def plain(self, prefix: list[int], count: int = PARAMS.max_tokens) -> tuple[int, ...]:
        ids = list(prefix)
        for _ in range(count):
            ids.append(next_token(ids, self.weights))
        return tuple(ids[len(prefix) :])


@pytest.fixture
def one() -> Iterator[Bed]:
    bed = Bed(1)
    with bed.stack:
        yield bed


@pytest.fixture
def two() -> Iterator[Bed]:
    bed = Bed(2)
    with bed.stack:
        yield bed


def test_a_turn_of_a_server(one: Bed) -> None:
    seen: list[tuple[int, float, float]] = []
    (done,) = one.ask(PREFIX, on_token=lambda *values: seen.append(values))
    assert done.tokens == one.plain(PREFIX)
    assert (done.finish, done.stop) == ("length", None)
    assert set(done.logprobs) == {HALF}
    bounds = entropy_bounds([HALF, *[math.log(0.01)] * 3], VOCAB)
    assert done.entropies == pytest.approx([bounds.estimate] * 12)
    assert seen == list(zip(done.tokens, done.logprobs, done.entropies, strict=True))
    (request,) = one.servers[0].turns()
    assert request["token_ids"] == PREFIX
    assert request["stream"] is True
    assert request["sampling_params"] == {
        "max_tokens": 12,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "seed": 3,
        "ignore_eos": True,
        "stop_token_ids": [EOS],
        "detokenize": False,
        "logprobs": 4,
    }
    told = one.engine.stats()
    assert told == {"retries": 0, "weight_loads": 1, "entropy_error": pytest.approx(bounds.error)} | {
        "entropy_error_max": pytest.approx(bounds.error)
    }
    assert one.engine.stats()["weight_loads"] == 0


@pytest.mark.slow
def test_all_servers_are_used_and_each_loads_once(two: Bed) -> None:
    prefixes = [[5, 6, i] for i in range(4, 24)]
    assert [done.tokens for done in two.ask(*prefixes)] == [two.plain(prefix) for prefix in prefixes]
    assert [server.count("/collective_rpc") for server in two.servers] == [1, 1]
    assert min(len(server.turns()) for server in two.servers) >= 5
    assert len({turn["cache_salt"] for server in two.servers for turn in server.turns()}) == 1


def test_requests_go_to_the_server_that_has_their_prefix(two: Bed) -> None:
    long = [5 + i % 30 for i in range(200)]
    two.ask(long[::-1], long)  # one each
    (reader,) = (server for server in two.servers if server.turns()[0]["token_ids"] == long)
    for _ in range(3):
        two.ask([*long, 9])
    assert len(reader.turns()) == 4
    two.ask(*[[*long, i] for i in range(4, 12)])  # but not all of it
    assert len(reader.turns()) < 12


def test_new_weights_reach_a_server_before_it_samples_again(two: Bed) -> None:
    two.ask(PREFIX, [7, 8], [8, 9])
    before = {turn["cache_salt"] for server in two.servers for turn in server.turns()}
    two.weights = 555
    asyncio.run(two.engine.sync_weights(4))
    done = two.ask(PREFIX, [7, 8], [8, 9])
    assert [one.tokens for one in done] == [two.plain(prefix) for prefix in (PREFIX, [7, 8], [8, 9])]
    assert {one.policy_version for one in done} == {4}
    assert [server.count("/reset_prefix_cache") for server in two.servers] == [2, 2]
    after = {turn["cache_salt"] for server in two.servers for turn in server.turns()} - before
    assert len(before) == len(after) == 1
    assert len(list(Path(two.engine._temp_dir.name).iterdir())) == 1  # older weights do not pile up


def test_weights_may_not_change_during_a_turn(one: Bed) -> None:
    one.servers[0].hold = threading.Event()

    async def try_it() -> None:
        turn = asyncio.create_task(one.engine.generate(PREFIX, PARAMS))
        await asyncio.to_thread(one.servers[0].began.wait, 30)
        with pytest.raises(RuntimeError, match="may not change"):
            await one.engine.sync_weights(1)
        assert one.servers[0].hold is not None
        one.servers[0].hold.set()
        assert (await turn).tokens == one.plain(PREFIX)

    asyncio.run(try_it())


def test_a_restarted_server_gets_the_current_weights_first(one: Bed) -> None:
    known = PREFIX * 50
    one.ask(known)
    one.servers[0].restart()
    assert one.ask(known)[0].tokens == one.plain(known)
    assert one.servers[0].count("/collective_rpc") == 2


def break_off(after: int) -> Spoil:
    def spoil(number: int, event: Any) -> Any:
        if number == after:
            raise BreakOff
        return event

    return spoil


@pytest.mark.slow
@pytest.mark.parametrize("after", [0, 1, 5, 11])
def test_an_interrupted_turn_continues_on_another_server(after: int) -> None:
    bed = Bed(2, pause=1.0)  # long enough that the other server is asked first, on a slow machine too
    with bed.stack:
        for server in bed.servers:
            server.spoil = [break_off(after)]
        seen: list[int] = []
        (done,) = bed.ask(PREFIX, on_token=lambda token, *_: seen.append(token))
        assert done.tokens == bed.plain(PREFIX)
        assert tuple(seen) == done.tokens  # each once, in order
        turns = [turn for server in bed.servers for turn in server.turns()]
        assert len(turns) == 2 if after * 2 >= 12 else 3
        assert {len(turn["token_ids"]) + turn["sampling_params"]["max_tokens"] for turn in turns} == {3 + 12}
        assert len({turn["sampling_params"]["seed"] for turn in turns}) == (len(turns) if after else 1)
        assert all(server.turns() for server in bed.servers)  # another server first


def test_a_server_that_restarts_in_the_middle_of_a_turn(one: Bed) -> None:
    def die(number: int, event: Any) -> Any:
        if number == 5:
            one.servers[0].restart()
            raise BreakOff
        return event

    one.servers[0].spoil = [die]
    assert one.ask(PREFIX)[0].tokens == one.plain(PREFIX)
    assert one.servers[0].count("/collective_rpc") == 2


def replaced(**changes: Any) -> Spoil:
    """Changes of the choice, of its one entry (`place_`), and of the most likely tokens there (`top_`)."""

    def spoil(number: int, event: Any) -> Any:
        if number == 2:
            (choice,) = event["choices"]
            (place,) = choice["logprobs"]["content"]
            for name, value in changes.items():
                if name.startswith("place_"):
                    place[name.removeprefix("place_")] = value
                elif name.startswith("top_"):
                    place["top_logprobs"][1][name.removeprefix("top_")] = value
                else:
                    choice[name] = value
        return event

    return spoil


def sends(text: bytes) -> Spoil:
    return lambda number, event: text if number == 2 else event


LIES: dict[str, Spoil] = {
    "an id beyond the vocabulary": replaced(token_ids=[VOCAB], place_token_id=VOCAB),
    "a negative id": replaced(token_ids=[-3], place_token_id=-3),
    "an id that is no number": replaced(token_ids=["x"], place_token_id="x"),
    "two ids, one log-prob": replaced(token_ids=[5, 6]),
    "no log-probs": replaced(logprobs=None),
    "log-probs of another token": replaced(place_token_id=4),
    "nan": replaced(place_logprob=math.nan),
    "a probability above 1": replaced(place_logprob=2.0),
    "what stands for nan": replaced(place_logprob=-9999.0),
    "a number too big": replaced(place_logprob=-(10**400)),
    "top tokens above 1": replaced(top_logprob=-0.01),
    "top tokens with nan": replaced(top_logprob=math.nan),
    "none of the top": replaced(place_top_logprobs="none"),
    "no choice": sends(b'data: {"choices": []}\n\n'),
    "an error": sends(b'data: {"error": {"message": "CUDA"}}\n\n'),
    "no JSON": sends(b"data: hello\n\n"),
    "deep JSON": sends(b"data: " + b"[" * 20_000 + b"\n\n"),
    "another type": sends(b"data: 7\n\n"),
    "without end": sends(b"x" * 2_000_000),
}


@pytest.mark.parametrize("lie", LIES)
def test_invalid_replies_are_dropped_and_the_turn_continues(one: Bed, lie: str) -> None:
    one.servers[0].spoil = [LIES[lie]] * 2
    seen: list[int] = []
    (done,) = one.ask(PREFIX, on_token=lambda token, *_: seen.append(token))
    assert done.tokens == one.plain(PREFIX) == tuple(seen)
    assert one.engine.stats()["retries"] == 2


@pytest.mark.parametrize("path", ["/inference/v1/generate", "/weight_info", "/collective_rpc", "/server_info"])
@pytest.mark.parametrize("status", [500, 503, 429, 408])
def test_an_overloaded_server_is_asked_again(one: Bed, path: str, status: int) -> None:
    one.servers[0].status = {path: [(status, {}), (status, {"Retry-After": "0"})]}
    assert one.ask(PREFIX)[0].tokens == one.plain(PREFIX)
    assert one.engine.stats()["retries"] == 2


@pytest.mark.slow
def test_when_nothing_helps_the_servers_are_named() -> None:
    bed = Bed(2, patience=0.5)
    with bed.stack:
        bed.servers[0].status = {"/weight_info": [(503, {})] * 1000}
        bed.servers[1].spoil = [break_off(0)] * 1000
        with pytest.raises(ArpoError, match=r"nothing was sampled for 0\.5 seconds") as caught:
            bed.ask(PREFIX)
    said = str(caught.value)
    assert f"{bed.servers[0].url} answers with HTTP status 503" in said
    assert f"{bed.servers[1].url} broke off" in said


def test_unreachable_servers_are_reported_at_once() -> None:
    bed = Bed(2, patience=1000.0, pause=1000.0)
    with bed.stack:
        pass
    with pytest.raises(ArpoError, match=r"no server answers: .*cannot be reached.*; .*cannot be reached.*start it as"):
        bed.ask(PREFIX)
    assert bed.engine.unreachable


@pytest.mark.slow
def test_servers_that_are_lost_later_are_waited_for() -> None:
    bed = Bed(1, patience=0.3)
    with bed.stack:
        bed.ask(PREFIX)
        assert not bed.engine.unreachable
    with pytest.raises(ArpoError, match=r"nothing was sampled for 0\.3 seconds: .*cannot be reached"):
        bed.ask(PREFIX)
    assert bed.engine.unreachable


def test_an_outage_ends_a_run_before_its_trajectories() -> None:
    engine = choose(engine="vllm", servers=("http://localhost:1",), max_seconds=10.0)
    assert isinstance(engine, ServerEngine) and engine._patience == 5.0


def test_a_timeout_during_an_outage_does_not_count_against_the_model(one: Bed) -> None:
    one.ask(PREFIX)
    one.servers[0].status = {"/inference/v1/generate": [(503, {})] * 1000}

    async def cut() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await one.engine.generate(PREFIX, PARAMS)
        assert one.engine.unreachable

    asyncio.run(cut())
    one.servers[0].status = {}
    one.ask(PREFIX)
    assert not one.engine.unreachable


def test_a_load_longer_than_a_trajectory_is_done_once(one: Bed) -> None:
    one.servers[0].loading.clear()

    async def cut_three_times() -> Completion:
        for _ in range(3):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.1):
                    await one.engine.generate(PREFIX, PARAMS)
        assert one.engine.unreachable
        one.servers[0].loading.set()
        return await one.engine.generate(PREFIX, PARAMS)

    assert asyncio.run(cut_three_times()).tokens == one.plain(PREFIX)
    assert one.servers[0].count("/collective_rpc") == 1


@pytest.mark.slow
def test_a_long_load_does_not_use_up_patience() -> None:
    bed = Bed(1, patience=0.3)
    with bed.stack:
        server = bed.servers[0]
        server.loading.clear()
        threading.Timer(0.8, server.loading.set).start()
        server.status = {"/inference/v1/generate": [(503, {})]}
        assert bed.ask(PREFIX)[0].tokens == bed.plain(PREFIX)


def test_servers_load_new_weights_before_the_next_request(two: Bed) -> None:
    async def update() -> None:
        two.weights = 7
        await two.engine.sync_weights(1)

    asyncio.run(update())
    assert [server.weights for server in two.servers] == [7, 7]
    two.servers[0].status = {"/collective_rpc": [(500, {})]}
    two.weights = 8
    asyncio.run(two.engine.sync_weights(2))  # one of them cannot: it loads them when it is asked
    assert sorted(server.weights for server in two.servers) == [7, 8]
    assert [done.tokens for done in two.ask(PREFIX, [9], [8])] == [two.plain(x) for x in (PREFIX, [9], [8])]
    assert [server.weights for server in two.servers] == [8, 8]


def test_a_server_that_sends_only_keep_alives_counts_as_lost() -> None:
    bed = Bed(2, idle_timeout=0.3)
    with bed.stack:
        bed.servers[0].hold = threading.Event()  # it sends keep-alives, but no token
        bed.servers[1].hold = threading.Event()
        bed.servers[1].hold.set()
        seen: list[int] = []
        done = bed.ask(PREFIX, [9, 8], on_token=lambda token, *_: seen.append(token))
        assert [one.tokens for one in done] == [bed.plain(PREFIX), bed.plain([9, 8])]
        assert bed.engine.stats()["retries"] >= 1 and len(seen) == 24
        bed.servers[0].hold.set()


def test_a_server_that_recovers_is_trusted_again(one: Bed) -> None:
    one.servers[0].status = {"/inference/v1/generate": [(500, {})] * 3}
    one.ask(PREFIX)
    assert one.engine._servers[0].failures == 0


def test_escapes_of_a_server_do_not_reach_the_terminal() -> None:
    bed = Bed(1, patience=0.2)
    with bed.stack:

        def escape(number: int, event: Any) -> Any:
            event["choices"][0]["token_ids"] = ["\x1b]0;x\x07"]
            event["choices"][0]["logprobs"]["content"][0]["token_id"] = "\x1b]0;x\x07"
            return event

        bed.servers[0].spoil = [escape] * 100_000
        with pytest.raises(ArpoError) as caught:
            bed.ask(PREFIX)
    assert "sends token" in str(caught.value) and str(caught.value).isprintable()


@pytest.mark.slow
def test_a_silent_server_counts_as_lost() -> None:
    bed, ended = Bed(2, idle_timeout=2.0), threading.Event()
    bed.stack.callback(ended.set)
    with bed.stack:

        def stall(number: int, event: Any) -> Any:
            ended.wait()
            return event

        for server in bed.servers:
            server.spoil = [stall]
        assert bed.ask(PREFIX)[0].tokens == bed.plain(PREFIX)
        assert bed.engine.stats()["retries"] == 2


def test_weights_that_a_server_does_not_see(one: Bed) -> None:
    one.servers[0].status = {"/collective_rpc": [(500, {})] * 1000}
    one.engine._patience = 0.2
    with pytest.raises(ArpoError, match="does it see that directory"):
        one.ask(PREFIX)
    assert not one.servers[0].turns()


@pytest.mark.parametrize(
    ("path", "status", "said"),
    [
        ("/weight_info", 404, "VLLM_SERVER_DEV_MODE=1"),
        ("/inference/v1/generate", 404, "--tokens-only"),
        ("/inference/v1/generate", 401, "without an API key"),
        ("/inference/v1/generate", 400, "refuses the request with HTTP status 400: no.31m such luck"),
    ],
)
def test_permanent_errors_are_reported_at_once(one: Bed, path: str, status: int, said: str) -> None:
    one.servers[0].status = {path: [(status, {})]}
    with pytest.raises(ArpoError, match=said):
        one.ask(PREFIX)
    assert one.engine.stats()["retries"] == 0


@pytest.mark.parametrize(
    ("info", "said"),
    [
        ({"max_model_len": CONTEXT - 1}, f"--max-model-len {CONTEXT}"),
        ({"max_logprobs": 3}, "--max-logprobs 4"),
        ({"logprobs_mode": "processed_logprobs"}, "--logprobs-mode raw_logprobs"),
        ({"dtype": "torch.bfloat16"}, "--dtype float32"),
    ],
)
def test_a_server_must_have_been_started_as_needed(one: Bed, info: dict[str, Any], said: str) -> None:
    one.servers[0].info |= info
    with pytest.raises(ArpoError, match=said):
        one.ask(PREFIX)
    assert not one.servers[0].turns()


def test_weights_that_someone_else_changes_are_noticed(one: Bed) -> None:
    def change(number: int, event: Any) -> Any:
        if number == 11:
            event["choices"][0]["weight_versions"][0]["version"] = "theirs"
        return event

    one.servers[0].spoil = [change]
    with pytest.raises(ArpoError, match="is it shared"):
        one.ask(PREFIX)


def test_a_cancelled_turn_closes_its_connection(one: Bed) -> None:
    one.servers[0].hold = threading.Event()

    async def try_it() -> None:
        turn = asyncio.create_task(one.engine.generate(PREFIX, PARAMS))
        await asyncio.to_thread(one.servers[0].began.wait, 30)
        turn.cancel()
        with pytest.raises(asyncio.CancelledError):
            await turn
        assert await asyncio.to_thread(one.servers[0].gone.wait, 30)
        await one.engine.sync_weights(1)  # no request is in flight

    asyncio.run(try_it())


def test_a_turn_that_ends_at_a_stop_string_closes_its_connection(one: Bed) -> None:
    tokens = one.plain(PREFIX)
    stop = Letters.alphabet[tokens[2]] + Letters.alphabet[tokens[3]]

    def slowly(number: int, event: Any) -> Any:
        threading.Event().wait(0.01)  # else everything is sent before the client can disconnect
        return event

    one.servers[0].spoil = [slowly]
    (done,) = one.ask(PREFIX, params=SamplingParams(300, stop=(stop,)))
    assert (done.tokens, done.finish, done.stop) == (tokens[:4], "stop", stop)
    assert one.servers[0].gone.wait(30)


def test_an_error_of_the_callers_ends_the_turn(one: Bed) -> None:
    def fails(*_: Any) -> None:
        raise OSError("mine")

    with pytest.raises(OSError, match="mine"):
        one.ask(PREFIX, on_token=fails)
    assert one.engine.stats()["retries"] == 0


# The weights that vLLM loads.


@pytest.mark.parametrize("adapted", [False, True], ids=["plain", "with an adapter"])
def test_the_directory_for_vllm_holds_the_weights_as_they_are(tokenizer: Any, tmp_path: Path, adapted: bool) -> None:
    model = build_model(tokenizer, hidden=64, layers=1, max_context=64, seed=0).eval()
    if adapted:
        pytest.importorskip("peft")
        add_adapter(model, 2, 4, ("q_proj", "up_proj"), seed=0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name or not adapted:
                parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)) * 0.1)
    save_for_vllm(model, tokenizer, tmp_path / "model")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval()
    assert not loaded.config.tie_word_embeddings
    assert model.config.tie_word_embeddings  # it stays what it was
    assert set(load_file(tmp_path / "model" / "model.safetensors")) == set(loaded.state_dict())
    assert torch.allclose(logits_of(loaded, PREFIX), logits_of(model, PREFIX), atol=1e-5)
