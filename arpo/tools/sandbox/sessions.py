"""Python sessions: variables, imports and files stay from one call to the next, and a session can branch anywhere.

    sessions = Sessions(sandbox)
    point = sessions.open()
    _, point = sessions.run(point, "x = 1")
    left, _ = sessions.run(point, "x += 1; x")     # 2
    right, _ = sessions.run(point, "x += 5; x")    # 6: a branch from the same point

A `SessionPoint` is the state after some calls, and never changes. It records these calls with what they printed. It is
also a frozen process (`session_worker`), from which the next call is forked, as long as that lives: until nobody refers
to the point any more, or it is the least recently used of more than `max_frozen`, or it is killed. Then the point is
built again by replay: the recorded calls are made once more in a new session, and what they print is compared.

`random` and `numpy.random` start from a fixed seed (0) and go on from call to call, so each branch, and a replay, draws
the same numbers from a point on.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections import OrderedDict, deque
from dataclasses import dataclass

from arpo.errors import ArpoError
from arpo.tools.sandbox import session_worker
from arpo.tools.sandbox.sandbox import Call, CallCancelled, Pool, Sandbox, SandboxError, SandboxResult

KEPT = ("ok", "error", "memory")  # how a call ends that leads to a new point
SEEDED = "numpy"  # imported before every session, as its seed is set then


@dataclass(frozen=True, slots=True)
class Cell:
    """A call of a session, and how it must end when it is made again."""

    code: str
    timeout: float
    printed: tuple[str, ...]  # status, stdout, stderr


class SessionPoint:
    """A state of a session: the calls that lead to it, and the frozen process that has it, if there is one."""

    def __init__(self, cells: tuple[Cell, ...] = (), frozen: Frozen | None = None) -> None:
        self.cells = cells
        self.lock = threading.Lock()  # while it is built
        self.frozen = frozen
        if frozen is not None:
            _release_with(self, frozen)


class Frozen:
    """A frozen process: its session, and its number there."""

    def __init__(self, session: Session, number: int) -> None:
        self.session, self.number, self.released = session, number, False
        self.calls = 0  # that start from it at the moment

    @property
    def alive(self) -> bool:
        """Whether a call can start from it, as far as is known."""
        return not self.released and not self.session.closed

    def release(self) -> None:
        """End the process; can be called at any time and more than once."""
        if not self.released:
            self.released = True
            self.session.release(self.number)


def _release_with(point: SessionPoint, frozen: Frozen) -> None:
    """End the frozen process when nobody refers to the point any more."""
    weakref.finalize(point, frozen.release).atexit = False


class SessionEnded(ConnectionError):
    """The session was ended, by another call, before the call was sent."""


class Session:
    """The connection to the worker of one session; OSError if there is none."""

    def __init__(self, pool: Pool, forks: bool) -> None:
        self._pool, self.forks, self.closed = pool, forks, False
        self._connection, self._folder = pool.open_session()
        self._lock = threading.Lock()  # one request at a time
        self._numbers = itertools.count(1)
        self._released: deque[int] = deque()
        self._living = {session_worker.ROOT}
        self.root = Frozen(self, session_worker.ROOT)

    def run(
        self, start: Frozen, call: Call, slots: threading.Semaphore, cell: Cell | None = None
    ) -> tuple[SandboxResult, Frozen | None]:
        """Make a call and return its result and the new point, if there is one; OSError if the session worker fails.

        With `cell` it is that earlier call which is made again, as a part of the call.
        """
        text, timeout = (cell or call).code.encode("utf-8", "replace"), (cell or call).timeout
        try:
            with self._lock, slots:
                if self.closed:
                    raise SessionEnded("the session has ended")
                new = next(self._numbers)
                header = session_worker.REQUEST.pack(session_worker.RUN, start.number, new, len(text), timeout)
                try:
                    result = call.run_on(self._connection, header + text, timeout)
                except CallCancelled:  # while it waited: other calls of the session go on
                    raise
                except BaseException:
                    self.close()
                    raise
                if not self.forks:
                    start.released = True
                    self._living.discard(start.number)
                if result.status in KEPT:
                    self._living.add(new)
                if not self._living:
                    self.close()
        finally:
            self._flush()
        return result, Frozen(self, new) if result.status in KEPT else None

    def printed(self, result: SandboxResult) -> tuple[str, ...]:
        """Return what another session must give for the same call, whose scratch may have another path."""
        return result.status, *(text.replace(self._folder, "SCRATCH") for text in (result.stdout, result.stderr))

    def release(self, number: int) -> None:
        """Have the session worker end a point: now, or after the call that it is making."""
        self._released.append(number)
        self._flush()

    def close(self) -> None:
        """End the session with all its points."""
        self.closed = True
        self._pool.close_session(self._connection)

    def _flush(self) -> None:
        """Pass on what was released, unless a call is being made, after which it is passed on."""
        while self._released and self._lock.acquire(blocking=False):
            try:
                while self._released:
                    number = self._released.popleft()
                    if number in self._living and not self.closed:
                        self._living.discard(number)
                        self._connection.sendall(session_worker.REQUEST.pack(session_worker.RELEASE, number, 0, 0, 0.0))
                if not self._living and not self.closed:
                    self.close()
            except OSError:
                self.close()
            finally:
                self._lock.release()


class Sessions:
    """The sessions of one sandbox, with at most `max_frozen` frozen processes, or those that calls start from."""

    def __init__(self, sandbox: Sandbox, max_frozen: int = 128) -> None:
        if max_frozen < 1:
            raise ArpoError(f"max_frozen is {max_frozen}, but the point that a call starts from must be kept")
        self._sandbox, self._max_frozen = sandbox, max_frozen
        self.workers = sandbox.workers  # calls at a time
        self._recent: OrderedDict[Frozen, None] = OrderedDict()  # least recently used first
        self._lock = threading.Lock()
        self.replays = 0  # points that were built again

    def start(self) -> None:
        """Attack a session, as `Sandbox.start` does with a call; ArpoError if there can be no sessions here."""
        try:
            self._sandbox.self_test(lambda code, timeout: self.run(self.open(), code, timeout)[0])
        except SandboxError as error:
            raise ArpoError(
                f"Python sessions cannot be had on this machine, they need Linux 5.9 and /proc: {error}. "
                "Use the tool python instead, which keeps no state."
            ) from error

    def open(self) -> SessionPoint:
        """Return the state of a new session, in which no call has been made."""
        return SessionPoint()

    def run(self, point: SessionPoint, code: str, timeout: float = 10.0) -> tuple[SandboxResult, SessionPoint]:
        """Make a call from a point; return its result and the point after it.

        That is the same point if the call did not end by itself (status timeout, killed) or was refused.
        """
        return self._run(point, Call(code, timeout, "", True))

    async def arun(self, point: SessionPoint, code: str, timeout: float = 10.0) -> tuple[SandboxResult, SessionPoint]:
        """`run` for an event loop. A call that is cancelled ends at once."""
        return await self._sandbox.in_thread(lambda call: self._run(point, call), Call(code, timeout, "", True))

    def _run(self, point: SessionPoint, call: Call) -> tuple[SandboxResult, SessionPoint]:
        reason, failures = "", 0
        while failures < 2 and not call.cancelled:
            try:
                start = self._frozen(point, call)
                try:
                    result, new = start.session.run(start, call, self._sandbox.slots)
                except CallCancelled:
                    self._give_back(point, start)
                    raise
                finally:
                    with self._lock:
                        start.calls -= 1
            except SessionEnded:  # each time by a call that is over now, so that this comes to an end
                continue
            except OSError as error:
                reason, failures = str(error), failures + 1
                continue
            if result.status == "lost":
                failures += 1
                reason = "a call, or the process that it started from, was killed from outside"
                start.release()
            elif new is None:
                return result, point
            else:
                self._use(new)
                cell = Cell(call.code, call.timeout, start.session.printed(result))
                return result, SessionPoint((*point.cells, cell), new)
        raise SandboxError(f"no session answered ({reason}){self._pool(point, call).stderr_tail()}")

    def _frozen(self, point: SessionPoint, call: Call) -> Frozen:
        """Return the frozen process of a point, for this call alone if it cannot fork; build it if there is none."""
        with point.lock:
            frozen = point.frozen
            if frozen is None or not frozen.alive:
                frozen = point.frozen = self._replay(point, call)
                _release_with(point, frozen)
            if not frozen.session.forks:
                point.frozen = None
            self._use(frozen, calls=1)
        return frozen

    def _give_back(self, point: SessionPoint, frozen: Frozen) -> None:
        """Return what `_frozen` gave to a call that did not use it."""
        with point.lock:
            if frozen.alive and not frozen.session.forks:
                point.frozen = frozen

    def _replay(self, point: SessionPoint, call: Call) -> Frozen:
        """Make the calls of a point once more; SandboxError if they print anything else."""
        session = Session(self._pool(point, call), self._sandbox.tier == "namespaces")
        frozen = session.root
        self.replays += bool(point.cells)
        for number, cell in enumerate(point.cells, 1):
            try:
                result, new = session.run(frozen, call, self._sandbox.slots, cell)
            except BaseException:
                session.close()
                raise
            frozen.release()
            printed = session.printed(result)
            if new is None or printed != cell.printed:
                session.close()
                shown, expected = (" ".join(texts)[:200] for texts in (printed, cell.printed))
                raise SandboxError(f"a session could not be replayed: call {number} gave {shown!r}, not {expected!r}")
            frozen = new
        return frozen

    def _pool(self, point: SessionPoint, call: Call) -> Pool:
        """Return the pool that has imported what the first call of the session names."""
        return self._sandbox.pool(f"{SEEDED} {point.cells[0].code if point.cells else call.code}")

    def _use(self, frozen: Frozen, calls: int = 0) -> None:
        """Note that a frozen process is used, and end those that were not for the longest time."""
        with self._lock:
            frozen.calls += calls
            self._recent[frozen] = None
            self._recent.move_to_end(frozen)
            for other in [other for other in self._recent if not other.alive]:
                del self._recent[other]
            too_many = max(0, len(self._recent) - self._max_frozen)
            oldest = [other for other in itertools.islice(self._recent, too_many) if not other.calls]
            for other in oldest:
                del self._recent[other]
        for other in oldest:
            other.release()
