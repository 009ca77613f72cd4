"""What is heard of a worker: its last words before its end, and no descriptor that nobody asked for."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from elasticrt.ipc.channel import Channel
from elasticrt.ipc.env import WorkerEnv
from elasticrt.ipc.messages import Copied, Exited, Message, Started, Step
from elasticrt.ipc.status_page import StatusPage
from elasticrt.option_values import ERR
from elasticrt.run_options import RunOptions
from elasticrt.workers.logs import Output, WorkerConsole
from elasticrt.workers.worker_io import (
    GroupEnded,
    WorkerEnded,
    WorkerIO,
    WorkerMessage,
    WorkerStarted,
    WorkerState,
)

ENV = WorkerEnv(0, 0, 1, 1, 0, 1, "127.0.0.1", 1, 0, 3, "run", 1, 1, "nonce", "node-0", "")
STEP = Step(7, 0, 1, 0, first=False)


class Played:
    """A worker parent that says what this test says."""

    def __init__(self) -> None:
        self._ours, theirs = Channel.pair()
        self._theirs = Channel(theirs)

    def fileno(self) -> int:
        """See `WorkerParent`."""
        return self._ours.fileno()

    def receive(self) -> list[Message]:
        """See `WorkerParent`."""
        received = self._ours.receive(0)
        return [received[0]] if received else []

    def say(self, message: Message) -> None:
        """To the listener."""
        self._theirs.send(message)

    def close(self) -> None:
        """Close both ends."""
        self._ours.close()
        self._theirs.close()


class Heard:
    """A listener with one worker, which this test plays. `busy` keeps the listener from hearing anything."""

    def __init__(self, run_dir: str = "") -> None:
        self.events: queue.Queue[Any] = queue.Queue()
        self.busy = threading.Event()
        self.listener = WorkerIO(self._sink)
        self.parent = Played()
        channel, theirs = Channel.pair()
        self.worker = Channel(theirs)
        page = StatusPage.create()
        self.page = StatusPage(page)
        reader, self.errors = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        env = replace(ENV, run_dir=run_dir)
        output = Output(env, RunOptions(local_ranks_filter=frozenset()), WorkerConsole())
        self.state = WorkerState(1, env, output, channel, self.page, {ERR: reader})
        os.close(page)
        self.listener.watch_parent(self.parent)  # type: ignore[arg-type]  It is one as far as a listener can see.
        self.listener.add([self.state])
        self.parent.say(Started(1, 0, 4711, 1))
        assert isinstance(self.next(), WorkerStarted)

    def _sink(self, event: Any) -> None:
        self.events.put(event)
        if isinstance(event, WorkerStarted):
            self.busy.wait(20)

    def next(self) -> Any:
        """The next event."""
        return self.events.get(timeout=20)

    def end(self) -> None:
        """The worker's process is gone, with exit code 3."""
        os.close(self.errors)
        self.worker.close()
        self.parent.say(Exited(1, 0, 4711, 3))
        self.busy.set()


@pytest.fixture
def heard() -> Iterator[Heard]:
    """Whose listener is busy."""
    one = Heard()
    yield one
    one.busy.set()
    one.listener.close(20)
    one.parent.close()


def test_a_line_is_that_of_the_rank_and_generation_at_its_time(tmp_path: Path) -> None:
    """A worker that lives on in another generation, with another rank, writes to another file from then on."""
    heard = Heard(str(tmp_path))
    heard.busy.set()
    os.write(heard.errors, b"as rank 0\n")
    heard.state.env = replace(heard.state.env, rank=2, generation=3)
    heard.listener.seat(heard.state)
    seated = threading.Event()
    heard.listener._thread.call(seated.set)
    assert seated.wait(20)
    assert heard.state.output.path == str(tmp_path / "logs/generation-1/rank-0.node-0.err")
    os.write(heard.errors, b"as rank 2\n")
    heard.end()
    assert isinstance(heard.next(), WorkerEnded)
    heard.listener.close(20)
    heard.parent.close()
    logs = {str(path.relative_to(tmp_path / "logs")): path.read_text() for path in tmp_path.rglob("*.err")}
    assert logs == {"generation-1/rank-0.node-0.err": "as rank 0\n", "generation-3/rank-2.node-0.err": "as rank 2\n"}


def test_last_words_are_heard_although_the_end_is_known(heard: Heard) -> None:
    """W04: what a worker said and wrote before it died is told first, and is in the report of its death."""
    heard.page.finished(STEP.step, STEP.at_ns)
    heard.worker.send(STEP)
    os.write(heard.errors, b"Traceback (most recent call last):\nValueError: bad batch\n")
    heard.end()
    said, ended, group = heard.next(), heard.next(), heard.next()
    assert isinstance(said, WorkerMessage)
    assert said.message == STEP
    assert isinstance(ended, WorkerEnded)
    assert ended.failure is not None
    assert (ended.code, ended.failure.summary) == (3, "rank 0 on node-0: exit code 3: ValueError: bad batch")
    assert "after step 7" in ended.failure.text
    assert isinstance(group, GroupEnded)


@pytest.mark.parametrize(("message", "passed_on"), [(STEP, 0), (Copied(7, 0, 1, "d"), 1)])
def test_a_descriptor_that_nobody_asked_for_is_closed(heard: Heard, message: Message, passed_on: int) -> None:
    """W17: a copy comes with one; all others, of whatever message, would be this agent's for ever."""
    pipes = [os.pipe() for _ in range(2)]
    heard.worker.send(message, [writer for _, writer in pipes])
    heard.busy.set()
    said = heard.next()
    assert (said.message, said.fd >= 0) == (message, bool(passed_on))
    for reader, writer in pipes:
        os.close(writer)
        os.set_blocking(reader, False)
    # Where nobody has the other end any more there is an end to read.
    for reader, _ in pipes[passed_on:]:
        assert os.read(reader, 1) == b""
    if passed_on:
        with pytest.raises(BlockingIOError):
            os.read(pipes[0][0], 1)
        os.close(said.fd)
    for reader, _ in pipes:
        os.close(reader)
    heard.end()
