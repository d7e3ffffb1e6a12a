"""States of environments: forked, replayed, bounded, and closed exactly once, whatever fails or is cancelled."""

from __future__ import annotations

import asyncio
import gc
import random
import re
import threading
from collections import Counter as Count
from collections.abc import Awaitable, Callable
from typing import Any, ClassVar, TypeVar

import pytest
from PIL import Image as pillow

from arpo.environments import Environment
from arpo.environments.states import EnvironmentTools, State, StatePool
from arpo.tools.base import ToolError, ToolTimeout, ToolUnavailable, tool
from arpo.types import Fault, Task, ToolCall, ToolResult

TASK = Task("q1", "Count.", ("3",), meta={"start": 10})
UP = ToolCall("count_up", {})
T = TypeVar("T")


class Counter(Environment):
    """Counts its calls from the number in the task; every instance that was made and closed is known."""

    made: ClassVar[list[Counter]] = []
    closed: ClassVar[Count[int]] = Count()
    in_use: ClassVar[Count[int]] = Count()  # of the instances that run a method now
    overlaps: ClassVar[int] = 0
    lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self) -> None:
        with Counter.lock:
            Counter.made.append(self)
            self.number = len(Counter.made)

    def reset(self, task: Task) -> str | None:
        self.count = task.meta["start"]
        return None

    @tool
    def count_up(self) -> str:
        """Count one further."""
        with Counter.lock:
            Counter.in_use[self.number] += 1
            Counter.overlaps += Counter.in_use[self.number] > 1
        self.before()
        self.count += 1
        with Counter.lock:
            Counter.in_use[self.number] -= 1
        return f"{self.count}"

    def before(self) -> None:
        """What happens in a call before it counts."""

    def close(self) -> None:
        Counter.overlaps += Counter.in_use[self.number] > 0
        Counter.closed[self.number] += 1


class Forking(Counter):
    def fork(self) -> Forking:
        other = type(self)()
        other.count = self.count
        return other


class Copied(Counter):
    copyable = True

    def __deepcopy__(self, memo: dict[int, Any]) -> Copied:  # so that copies are counted, too
        other = type(self)()
        other.count = self.count
        return other


class Quick(Forking):
    quick = True


KINDS = [Counter, Forking, Copied, Quick]


@pytest.fixture(autouse=True)
def fresh() -> None:
    Counter.made, Counter.closed, Counter.in_use, Counter.overlaps = [], Count(), Count(), 0


def run(kind: type[Environment], work: Callable[[EnvironmentTools, State], Awaitable[T]], **limits: Any) -> T:
    """What `work` returns, given tools and a root state; all that was made must be closed once when it ends."""

    async def main() -> T:
        pool = StatePool(kind, **limits)
        tools = EnvironmentTools(pool)
        Counter.made.clear()  # the prototype is never reset
        Counter.closed.clear()
        async with pool.open(TASK) as root:
            result = await work(tools, root)
        assert pool.live == 0 and not pool._idle
        assert Counter.overlaps == 0
        return result

    result = asyncio.run(main())
    assert {one.number: 1 for one in Counter.made} == dict(Counter.closed)
    return result


async def up(tools: EnvironmentTools, state: State) -> str:
    result = await tools.call(UP, TASK, state)
    assert result.fault is None, result.text
    return result.text


@pytest.mark.parametrize("kind", KINDS)
def test_a_branch_continues_from_the_state_where_it_branched_off(kind: type[Counter]) -> None:
    async def work(tools: EnvironmentTools, root: State) -> list[str]:
        trunk = root.branch()
        assert [await up(tools, trunk) for _ in range(2)] == ["11", "12"]
        branch = trunk.branch()
        said = [await up(tools, trunk), await up(tools, branch), await up(tools, branch), await up(tools, trunk)]
        other = root.branch()
        said.append(await up(tools, other))
        stats = tools.pool.stats()
        assert (stats["replays"] > 0) == (kind is Counter) and (stats["forks"] > 0) == (kind is not Counter)
        assert stats["replayed_calls"] == (2 if kind is Counter else 0) and stats["differences"] == 0
        assert tools.pool.stats()["forks"] == 0  # counters start anew
        return said

    assert run(kind, work) == ["13", "13", "14", "14", "11"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("max_states", [2, 3, 256])
def test_of_many_branches_at_once_each_is_told_the_right_number(kind: type[Counter], max_states: int) -> None:
    """A random tree of concurrent trajectories, in which each one knows how often it has called."""

    async def grow(tools: EnvironmentTools, state: State, count: int, rng: random.Random) -> int:
        branches, calls = [], 0
        while count < 15:
            count, calls = count + 1, calls + 1
            assert await up(tools, state) == str(count)
            if rng.random() < 0.4:
                seed = random.Random(rng.random())
                branches.append(asyncio.create_task(grow(tools, state.branch(), count, seed)))
        await state.close()
        return calls + sum(await asyncio.gather(*branches))

    async def work(tools: EnvironmentTools, root: State) -> int:
        rng = random.Random(3)
        starts = [grow(tools, root.branch(), 10, random.Random(rng.random())) for _ in range(6)]
        calls = sum(await asyncio.gather(*starts))
        stats = tools.pool.stats()
        assert 1 < stats["live_max"] <= max_states
        assert (stats["dropped"] > 0) == (max_states < 256)
        return calls

    assert run(kind, work, max_states=max_states) > 60


def test_nothing_is_made_before_it_is_needed_and_a_lone_trajectory_needs_one() -> None:
    async def work(tools: EnvironmentTools, root: State) -> None:
        state = root.branch()
        assert not Counter.made
        await root.close()
        for _ in range(3):
            await up(tools, state)
        assert len(Counter.made) == 1
        await state.close()
        await state.close()
        with pytest.raises(RuntimeError, match="the state is closed"):
            await tools.call(UP, TASK, state)
        assert Counter.closed == {Counter.made[0].number: 1} and tools.pool.live == 0

    run(Forking, work)


class Breaking(Forking):
    """Fails in some calls, after it has spoiled its state."""

    failures: ClassVar[list[BaseException | None]] = []

    def before(self) -> None:
        error = Breaking.failures.pop(0) if Breaking.failures else None
        if error is not None:
            if not isinstance(error, ToolError | ToolTimeout):
                self.count += 1000
            Counter.in_use[self.number] -= 1
            raise error


@pytest.mark.parametrize(
    ("failures", "expected"),
    [
        ([ValueError("broken")], [None, None]),  # made again, and retried
        ([None, SystemExit(1), KeyError("x")], [None, None]),
        ([None, *[ValueError("broken")] * 3], [None, Fault.INFRA, None]),
        ([None, ToolError("no"), None], [None, Fault.MODEL, None]),
        ([None, ToolTimeout("slow"), None], [None, Fault.TIMEOUT, None]),
    ],
)
def test_after_a_failure_the_state_is_made_again_without_what_the_failed_call_did(
    failures: list[BaseException | None], expected: list[Fault | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("arpo.tools.executor.FIRST_PAUSE_SECONDS", 0.0)
    Breaking.failures = [*failures]

    async def work(tools: EnvironmentTools, root: State) -> list[ToolResult]:
        state = root.branch()
        return [await tools.call(UP, TASK, state) for _ in expected]

    results = run(Breaking, work)
    assert [result.fault for result in results] == expected
    right = [result.text for result in results if result.fault is None]
    assert right == [str(11 + number) for number in range(len(right))]


def test_a_failed_trajectory_still_stands_where_its_branches_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("arpo.tools.executor.FIRST_PAUSE_SECONDS", 0.0)

    async def work(tools: EnvironmentTools, root: State) -> None:
        await root.prepare()
        first, second = root.branch(), root.branch()
        await root.close()
        Breaking.failures = [ValueError("broken")] * 3
        assert (await tools.call(UP, TASK, first)).fault is Fault.INFRA
        assert tools.pool.stats()["forks"] == 3 and tools.pool.live == 1
        assert await up(tools, second) == "11"
        assert tools.pool.stats()["forks"] == 1  # the other one still needs the original
        await second.close()
        assert tools.pool.live == 1
        await first.close()
        assert tools.pool.live == 0

    run(Breaking, work)


def test_an_environment_that_nobody_needs_after_its_fork_is_closed() -> None:
    started, go_on = threading.Event(), threading.Event()

    class Slow(Forking):
        def fork(self) -> Forking:
            started.set()
            assert go_on.wait(60)
            return super().fork()

    async def work(tools: EnvironmentTools, root: State) -> None:
        await root.prepare()
        call = asyncio.create_task(up(tools, root.branch()))
        await asyncio.to_thread(started.wait, 60)
        await root.close()
        go_on.set()
        assert await call == "11" and tools.pool.live == 1

    run(Slow, work)


def test_a_call_that_took_too_long_is_not_made_again() -> None:
    class Endless(Counter):
        calls: ClassVar[int] = 0

        @tool
        def endless(self) -> str:
            """Take too long."""
            Endless.calls += 1
            raise ToolTimeout("too long")

    async def work(tools: EnvironmentTools, root: State) -> None:
        trunk = root.branch()
        assert (await tools.call(ToolCall("endless", {}), TASK, trunk)).fault is Fault.TIMEOUT
        assert await up(tools, trunk) == "11"
        assert await up(tools, trunk.branch()) == "12"
        assert Endless.calls == 1

    run(Endless, work)


def test_a_call_that_the_model_got_wrong_is_replayed_too() -> None:
    class Wrong(Counter):
        @tool
        def fail(self) -> str:
            """Change the state, then refuse."""
            self.count += 5
            raise ToolError("not possible")

    async def work(tools: EnvironmentTools, root: State) -> str:
        trunk = root.branch()
        wrong = await tools.call(ToolCall("fail", {}), TASK, trunk)
        assert (wrong.text, wrong.fault) == ("Error: not possible", Fault.MODEL)
        malformed = await tools.call(ToolCall("count_up", {"by": 3}), TASK, trunk)
        assert malformed.attempts == 0  # and so it is no part of the history
        branch = trunk.branch()
        assert await up(tools, trunk) == "16"
        return await up(tools, branch)

    assert run(Wrong, work) == "16"


def test_a_replay_that_differs_is_counted_shown_and_not_retried(caplog: pytest.LogCaptureFixture) -> None:
    class Moody(Counter):
        @tool
        def mood(self) -> str:
            """Something else every time."""
            return f"mood {self.number}"

    async def work(tools: EnvironmentTools, root: State) -> None:
        trunk = root.branch()
        first = (await tools.call(ToolCall("mood", {}), TASK, trunk)).text
        branch = trunk.branch()
        assert await up(tools, trunk) == "11"
        result = await tools.call(UP, TASK, branch)
        assert result.fault is Fault.INFRA and result.attempts == 1 and repr(first) in result.text
        assert not await trunk.branch().try_prepare()
        assert await up(tools, trunk) == "12"  # which has kept its environment
        assert tools.pool.stats()["differences"] == 2

    run(Moody, work)
    [shown] = [text for text in caplog.messages if text.startswith("environment Moody")]
    assert "mood {} returned 'mood 2' when it was made again, and 'mood 1' at first" in shown
    assert "an environment without fork must always do the same" in shown


def test_another_image_is_a_difference(caplog: pytest.LogCaptureFixture) -> None:
    class Painter(Counter):
        @tool
        def paint(self, moody: bool = False) -> Any:
            """A picture of one colour, the same every time unless moody."""
            return ["Here:", pillow.new("L", (1, 1), self.number if moody else 0)]

    async def work(tools: EnvironmentTools, root: State) -> None:
        for moody in (False, True):
            trunk = root.branch()
            first = await tools.call(ToolCall("paint", {"moody": moody}), TASK, trunk)
            assert len(first.images) == 1
            branch = trunk.branch()
            assert await up(tools, trunk) == "11"
            assert (await tools.call(UP, TASK, branch)).fault is (Fault.INFRA if moody else None)

    run(Painter, work)
    [shown] = [text for text in caplog.messages if text.startswith("environment Painter")]
    assert re.search(r"returned 'Here: \[image \w{8}\]' when it was made again, and 'Here: \[image \w{8}\]'", shown)


def test_another_opening_is_a_difference(caplog: pytest.LogCaptureFixture) -> None:
    class Opening(Counter):
        def reset(self, task: Task) -> str | None:
            super().reset(task)
            return f"You are number {self.number}."

    async def work(tools: EnvironmentTools, root: State) -> str:
        await root.prepare()
        first, second = root.branch(), root.branch()
        assert await up(tools, first) == "11"
        with pytest.raises(ToolUnavailable, match=r"reset returned 'You are number 2\.'"):
            await second.prepare()
        return root.with_opening(TASK).question

    assert run(Opening, work) == "Count.\n\nYou are number 1."


@pytest.mark.parametrize("where", ["__init__", "reset", "fork", "close"])
def test_whatever_method_raises_the_rest_is_closed(where: str, caplog: pytest.LogCaptureFixture) -> None:
    class Bad(Forking):
        pass

    def broken(self: Bad, *args: Any) -> Any:
        if where == "close":
            Forking.close(self)
        raise ValueError("out of order")

    async def work(tools: EnvironmentTools, root: State) -> None:
        setattr(Bad, where, broken)
        trunk = root.branch()
        for _ in range(2):
            result = await tools.call(UP, TASK, trunk)
            await trunk.branch().close()
        if where in ("__init__", "reset"):
            method = "constructor" if where == "__init__" else where
            assert result.fault is Fault.INFRA and f"{method} failed: ValueError: out of order" in result.text
            assert "(test_states.py, line" in result.text
        else:
            assert result.fault is None

    if where == "fork":  # the root shares its position with the trajectory

        async def forked(tools: EnvironmentTools, root: State) -> None:
            await root.prepare()
            Bad.fork = broken  # type: ignore[method-assign]
            result = await tools.call(UP, TASK, root.branch())
            assert result.fault is Fault.INFRA and "fork failed: ValueError: out of order" in result.text

        run(Bad, forked)
    else:
        run(Bad, work)
    if where == "close":
        assert "close failed: ValueError: out of order" in caplog.text


@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize("what", ["reset", "fork", "call"])
def test_what_a_thread_makes_after_a_cancellation_is_closed_when_it_is_done(what: str, twice: bool) -> None:
    started, go_on = threading.Event(), threading.Event()

    class Slow(Forking):
        def hold(self, name: str) -> None:
            if name == what:
                Counter.in_use[self.number] += 1
                started.set()
                assert go_on.wait(60)
                Counter.in_use[self.number] -= 1

        def reset(self, task: Task) -> str | None:
            self.hold("reset")
            return super().reset(task)

        def fork(self) -> Forking:
            self.hold("fork")
            return super().fork()

        def before(self) -> None:
            self.hold("call")

    async def work(tools: EnvironmentTools, root: State) -> None:
        if what != "reset":
            await root.prepare()
        call = asyncio.create_task(tools.call(UP, TASK, root.branch()))
        await asyncio.to_thread(started.wait, 60)
        call.cancel()
        assert not Counter.closed  # a method of it is running
        asyncio.get_running_loop().call_later(0.05, go_on.set)
        if twice:  # it then does not wait until the thread is done
            await asyncio.sleep(0.01)
            call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert twice or tools.pool.live == (what != "reset")

    run(Slow, work, timeout=60.0)


def test_a_state_that_is_closed_during_a_call_leaves_nothing_behind() -> None:
    started, go_on = threading.Event(), threading.Event()

    class Slow(Forking):
        def before(self) -> None:
            started.set()
            assert go_on.wait(60)

    async def work(tools: EnvironmentTools, root: State) -> None:
        state = root.branch()
        call = asyncio.create_task(tools.call(UP, TASK, state))
        await asyncio.to_thread(started.wait, 60)
        await state.close()
        go_on.set()
        assert (await call).text == "11" and tools.pool.live == 0

    run(Slow, work)


def test_the_least_recently_used_environment_is_dropped_first() -> None:
    async def work(tools: EnvironmentTools, root: State) -> None:
        states = [root.branch() for _ in range(5)]
        for state in states[:4]:
            await up(tools, state)
        assert await up(tools, states[0]) == "12"
        assert await up(tools, states[4]) == "11"  # there is room for four
        assert tools.pool.stats()["dropped"] == 1
        for state in (states[0], states[2], states[3]):
            await up(tools, state)
        assert tools.pool.stats()["replays"] == 0
        assert await up(tools, states[1]) == "12" and tools.pool.stats()["replays"] == 1

    run(Counter, work, max_states=4)


def test_async_environments_work_the_same() -> None:
    class Async(Counter):
        async def reset(self, task: Task) -> str | None:  # type: ignore[override]
            await asyncio.sleep(0)
            self.count = 10
            return None

        async def fork(self) -> Async:  # type: ignore[override]
            await asyncio.sleep(0)
            other = Async()
            other.count = self.count
            return other

        @tool
        async def count_up(self) -> str:
            """Count one further."""
            await asyncio.sleep(0)
            self.count += 1
            return f"{self.count}"

        async def close(self) -> None:  # type: ignore[override]
            await asyncio.sleep(0)
            Counter.close(self)

    async def work(tools: EnvironmentTools, root: State) -> list[str]:
        trunk = root.branch()
        said = [await up(tools, trunk)]
        branch = trunk.branch()
        said += await asyncio.gather(up(tools, trunk), up(tools, branch))
        assert tools.pool.stats()["forks"] == 1
        return said

    assert run(Async, work) == ["11", "12", "12"]


def test_a_reward_gets_the_final_state_and_tools_get_the_task() -> None:
    class Done(Forking):
        @tool
        def finish(self, task: Task) -> str:
            """End it."""
            self.done = True
            return f"finished {task.id}"

    async def work(tools: EnvironmentTools, root: State) -> None:
        state = root.branch()
        await up(tools, state)
        branch = state.branch()
        assert (await tools.call(ToolCall("finish", {}), TASK, state)).text == "finished q1"
        assert state.done and not branch.done
        async with state.final() as environment:
            assert isinstance(environment, Done) and environment.count == 11 and environment.done
        async with branch.final() as environment:
            assert environment.count == 11 and not environment.done
        assert tools["finish"].spec.schema["properties"] == {}

    run(Done, work)


def test_what_is_no_environment_and_too_small_a_bound_are_refused() -> None:
    with pytest.raises(TypeError, match="is not an Environment"):
        StatePool(dict)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="a fork needs two"):
        StatePool(Counter, max_states=1)
    with pytest.raises(ValueError, match="leave out cacheable"):

        class Cached(Environment):
            @tool(cacheable=True)
            def look(self) -> str:
                """Look."""
                return ""


def test_a_method_tool_is_bound_to_its_object_and_can_still_be_called() -> None:
    counter = Counter()
    counter.reset(TASK)
    assert counter.count_up() == "11" and asyncio.run(counter.count_up.run()) == "12"
    assert Counter.count_up.method and not counter.count_up.method


def test_a_cancellation_while_the_original_is_closed_leaves_nothing_behind() -> None:
    forking, go_on, closing, may_close = (threading.Event() for _ in range(4))

    class Slow(Forking):
        def fork(self) -> Forking:
            forking.set()
            assert go_on.wait(60)
            return super().fork()

        def close(self) -> None:
            super().close()
            closing.set()
            assert may_close.wait(60)

    async def work(tools: EnvironmentTools, root: State) -> None:
        await root.prepare()
        call = asyncio.create_task(tools.call(UP, TASK, root.branch()))
        await asyncio.to_thread(forking.wait, 60)
        await root.close()
        go_on.set()
        await asyncio.to_thread(closing.wait, 60)
        call.cancel()
        asyncio.get_running_loop().call_later(0.05, may_close.set)
        with pytest.raises(asyncio.CancelledError):
            await call
        assert tools.pool.slots()._value == 512

    run(Slow, work)


def test_states_that_are_closed_during_their_fork_leave_the_others_alone() -> None:
    forking, go_on = threading.Event(), threading.Event()

    class Slow(Forking):
        def fork(self) -> Forking:
            forking.set()
            assert go_on.wait(60)
            return super().fork()

    async def work(tools: EnvironmentTools, root: State) -> None:
        await root.prepare()
        for cancelled in (False, True):
            forking.clear()
            go_on.clear()
            state = root.branch()
            call = asyncio.create_task(tools.call(UP, TASK, state))
            await asyncio.to_thread(forking.wait, 60)
            await state.close()
            if cancelled:
                await root.close()
                call.cancel()
            go_on.set()
            await asyncio.wait({call})
            assert tools.pool.live == (0 if cancelled else 1)

    run(Slow, work)


def test_nobody_uses_an_environment_whose_fork_hangs() -> None:
    go_on = threading.Event()

    class Hanging(Forking):
        def fork(self) -> Forking:
            with Counter.lock:
                Counter.in_use[self.number] += 1
                Counter.overlaps += Counter.in_use[self.number] > 1
            assert go_on.wait(60)
            with Counter.lock:
                Counter.in_use[self.number] -= 1
            return super().fork()

    async def work(tools: EnvironmentTools, root: State) -> None:
        await root.prepare()
        branch = root.branch()
        with pytest.raises(ToolUnavailable, match=r"fork failed: took longer than 0\.05 seconds"):  # and no retry
            await branch.prepare()
        assert tools.pool.stats()["seconds"] > 0.05  # failures take time, too
        assert await up(tools, branch) == "11" and await up(tools, root) == "11"
        assert tools.pool.stats()["opened"] == 2
        go_on.set()
        while tools.pool._closing:
            await asyncio.wait(tools.pool._closing)

    run(Hanging, work, timeout=0.05)


@pytest.mark.parametrize("what", ["fork", "call"])
def test_an_async_method_that_ignores_its_cancellation_is_waited_for_before_close(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("arpo.tools.executor.CLEANUP_SECONDS", 0.01)
    stubborn = asyncio.Event()

    class Stubborn(Counter):
        async def hold(self) -> None:
            Counter.in_use[self.number] += 1
            while not stubborn.is_set():
                try:
                    await stubborn.wait()
                except asyncio.CancelledError:
                    continue
            Counter.in_use[self.number] -= 1

        async def fork(self) -> Stubborn:  # type: ignore[override]
            await self.hold()
            other = Stubborn()
            other.count = self.count
            return other

        @tool(timeout=0.05)
        async def count_up(self) -> str:
            """Count one further."""
            await self.hold()
            return ""

    async def work(tools: EnvironmentTools, root: State) -> None:
        await root.prepare()
        if what == "fork":
            assert not await root.branch().try_prepare()
        else:
            assert (await tools.call(UP, TASK, root)).fault is Fault.INFRA
        stubborn.set()
        while tools.pool._closing:
            await asyncio.wait(tools.pool._closing)

    run(Stubborn, work, timeout=0.1)


def test_environments_of_one_position_are_reset_side_by_side() -> None:
    together = threading.Barrier(4)

    class Slow(Counter):
        def reset(self, task: Task) -> str | None:
            together.wait(60)
            return super().reset(task)

    async def work(tools: EnvironmentTools, root: State) -> list[str]:
        return await asyncio.gather(*[up(tools, root.branch()) for _ in range(4)])

    assert run(Slow, work) == ["11"] * 4


def test_a_replay_gives_tools_the_same_task_and_the_arguments_as_the_model_gave_them() -> None:
    class Open(Counter):
        def reset(self, task: Task) -> str | None:
            super().reset(task)
            return "It is open."

        @tool
        def sort(self, items: list[int], task: Task) -> str:
            """Sort numbers."""
            items.append(0)
            items.sort()
            return f"{items} {task.question}"

    async def work(tools: EnvironmentTools, root: State) -> dict[str, Any]:
        await root.prepare()
        call, state = ToolCall("sort", {"items": [3, 1]}), root.branch()
        result = await tools.call(call, root.with_opening(TASK), state)
        assert result.text == "[0, 1, 3] Count.\n\nIt is open."
        await state.branch().prepare()
        assert tools.pool.stats()["replayed_calls"] == 1
        return dict(call.args)

    assert run(Open, work) == {"items": [3, 1]}


def test_a_thread_that_fails_after_a_cancellation_logs_nothing(caplog: pytest.LogCaptureFixture) -> None:
    started, go_on = threading.Event(), threading.Event()

    class Late(Counter):
        def before(self) -> None:
            started.set()
            assert go_on.wait(60)
            Counter.in_use[self.number] -= 1
            raise ValueError("too late")

    async def work(tools: EnvironmentTools, root: State) -> None:
        call = asyncio.create_task(tools.call(UP, TASK, root))
        await asyncio.to_thread(started.wait, 60)
        call.cancel()
        asyncio.get_running_loop().call_later(0.05, go_on.set)
        with pytest.raises(asyncio.CancelledError):
            await call

    run(Late, work)
    gc.collect()
    assert not caplog.messages


def test_a_fork_must_be_another_environment() -> None:
    class Same(Forking):
        def fork(self) -> Forking:
            return self

    async def work(tools: EnvironmentTools, root: State) -> None:
        await root.prepare()
        branch = root.branch()
        result = await tools.call(UP, TASK, branch)
        assert result.fault is Fault.INFRA and "expected a new environment" in result.text
        await branch.close()
        assert await up(tools, root) == "11"  # which still has its own

    run(Same, work)


def test_an_error_in_place_of_the_same_text_is_a_difference() -> None:
    class Sour(Counter):
        @tool
        def taste(self) -> str:
            """Taste it."""
            if self.number > 1:
                raise ToolError("sour")
            return "Error: sour"

    async def work(tools: EnvironmentTools, root: State) -> None:
        trunk = root.branch()
        assert (await tools.call(ToolCall("taste", {}), TASK, trunk)).fault is None
        assert not await trunk.branch().try_prepare()
        assert tools.pool.stats()["differences"] == 1

    run(Sour, work)


def test_a_trajectory_that_has_ended_leaves_its_environment_to_a_branch() -> None:
    async def work(tools: EnvironmentTools, root: State) -> str:
        trunk = root.branch()
        await up(tools, trunk)
        branch, other = trunk.branch(), trunk.branch()
        await trunk.close()
        said = await up(tools, branch)
        assert len(Counter.made) == 1
        assert await up(tools, other) == said and len(Counter.made) == 2
        return said

    assert run(Counter, work) == "12"


def test_an_environment_whose_method_outlives_the_event_loop_is_not_counted_for_ever() -> None:
    go_on = threading.Event()

    class Endless(Counter):
        @tool(timeout=0.05)
        def hang(self) -> str:
            """Hang."""
            assert go_on.wait(60)
            return ""

    pool = StatePool(Endless, timeout=0.05)

    async def main() -> None:
        tools = EnvironmentTools(pool)
        async with pool.open(TASK) as root:
            assert (await tools.call(ToolCall("hang", {}), TASK, root)).fault is Fault.INFRA
        assert pool.live == 1

    asyncio.run(main())
    go_on.set()
    assert pool.live == 0


def test_an_environment_that_cannot_be_made_at_first_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("arpo.tools.executor.FIRST_PAUSE_SECONDS", 0.0)
    failures = [OSError("not yet")] * 2

    class Late(Counter):
        def reset(self, task: Task) -> str | None:
            if failures:
                raise failures.pop()
            return super().reset(task)

    async def work(tools: EnvironmentTools, root: State) -> None:
        await root.prepare()
        assert not failures and len(Counter.made) == 3
        stats = [tools.pool.stats() for _ in range(2)]
        assert stats[0]["opened"] == 1 and stats[1]["opened"] == 0
        assert stats[1]["live_max"] == 1  # what is alive when the counters start anew

    run(Late, work)


def test_after_a_reward_that_failed_the_state_is_made_again() -> None:
    async def work(tools: EnvironmentTools, root: State) -> None:
        await up(tools, root)
        with pytest.raises(ValueError, match="out of order"):
            async with root.final() as environment:
                environment.count += 1000  # type: ignore[attr-defined]
                raise ValueError("out of order")
        assert tools.pool.live == 0
        async with root.final() as environment:
            assert environment.count == 11  # type: ignore[attr-defined]

    run(Forking, work)
