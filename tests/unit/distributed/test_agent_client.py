"""The link to the agent: answers find their requests, reports never wait, forks keep out."""

from __future__ import annotations

import gc
import json
import os
import queue
import signal
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from elasticrt import ConfigError
from elasticrt.distributed import agent_client
from elasticrt.ipc.messages import ClaimBuild, Release, Reply, ScriptDone, ShowStack, Step
from elasticrt.ipc.status_page import STACK_BEGINS, StatusPage
from elasticrt.liveness import stacks
from elasticrt.liveness.stacks import Stacks
from tests.fake_worker import Agent, forget, under
from tests.servers import wait_until


def step(number: int) -> Step:
    """A report."""
    return Step(number, 0, 0, 0, False, {})


def test_no_agent_no_link():
    """Without an agent's variables there is no place and no link, and the status page is nobody else's."""
    forget()
    assert (agent_client.worker_env().has_agent, agent_client.agent_link().has_agent) == (False, False)
    assert not any(bytes(agent_client.status_page()))


def test_a_spawned_process_of_the_script_is_no_worker(monkeypatch):
    """A loader's worker that runs the script's `init` has the worker's environment and lacks its descriptors."""
    forget()
    reader, writer = os.pipe()
    os.close(writer)
    os.close(reader)
    monkeypatch.setattr(agent_client, "worker_env", lambda: SimpleNamespace(page_fd=reader))
    with pytest.raises(ConfigError, match=r"a process that the script has started.*__main__"):
        agent_client.status_page()


def test_answers_find_their_requests(monkeypatch):
    """Answers in another order reach the threads that asked."""
    held: list[Reply] = []

    def reversed_in_pairs(message):
        held.append(Reply(message.request, ok=True, reason=message.name))
        if len(held) == 8:
            for reply in reversed(held):
                agent.channel.send(reply)

    agent = Agent(answer=reversed_in_pairs)
    with under(agent, monkeypatch):
        mine = agent_client.agent_link()
        got = {}

        def ask(name):
            got[name] = mine.request(lambda number: ClaimBuild(number, name, "1"), 10).reason

        threads = [threading.Thread(target=ask, args=(str(i),)) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert got == {str(i): str(i) for i in range(8)}


def test_no_answer_is_none_in_time(monkeypatch):
    """The wait for an answer has an end."""
    agent = Agent(answer=lambda message: None)
    with under(agent, monkeypatch):
        assert agent_client.agent_link().request(lambda number: ClaimBuild(number, "x", "1"), 0.05) is None


def test_reports_never_wait(monkeypatch):
    """When the agent does not read, reports are dropped; training does not stop."""
    agent = Agent(answer=lambda message: time.sleep(0.5))
    with under(agent, monkeypatch):
        mine = agent_client.agent_link()
        sent = [mine.try_send(step(i)) for i in range(20_000)]
        assert sent[0]
        assert not all(sent)


def test_the_end_of_the_agent_ends_every_wait(monkeypatch):
    """Requests under way are refused, later ones at once, reports go nowhere."""
    agent = Agent(answer=lambda message: agent.close())
    with under(agent, monkeypatch):
        mine = agent_client.agent_link()
        assert "the agent is gone" in mine.request(lambda number: ClaimBuild(number, "x", "1"), 10).reason
        assert "the agent is gone" in mine.request(lambda number: ClaimBuild(number, "x", "1"), 0).reason
        assert not mine.try_send(step(1))
        mine.wait_for_release(0, 60, lambda: None)


def test_the_end_of_the_agent_ends_the_lingering(monkeypatch):
    """A01: who waits for the others of its group, whose store it holds, does not wait for an agent that has died."""
    agent = Agent(answer=lambda message: None)
    with under(agent, monkeypatch):
        lingering = threading.Thread(
            target=agent_client.agent_link().wait_for_release, args=(0, 60, lambda: None), daemon=True
        )
        lingering.start()
        wait_until(lambda: agent.of(ScriptDone), "it lingers")
        agent.close()
        lingering.join(20)
        assert not lingering.is_alive()


def test_a_forked_child_keeps_out(monkeypatch):
    """A DataLoader worker must not write into its parent's stream."""
    agent = Agent()
    with under(agent, monkeypatch):
        mine = agent_client.agent_link()
        child = os.fork()
        if child == 0:
            reply = mine.request(lambda number: ClaimBuild(number, "x", "1"), 0)
            os._exit(0 if reply is not None and not reply.ok and not mine.try_send(step(1)) else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert agent.messages == []


def test_lingers_until_released(monkeypatch):
    """The worker that hosts the group's store says it is done, and ends when told to."""

    def answer(message):
        if isinstance(message, ScriptDone):
            agent.channel.send(Release())

    agent = Agent(answer=answer)
    with under(agent, monkeypatch):
        late = []
        agent_client.agent_link().wait_for_release(0, 60, lambda: late.append("called"))
        assert agent.of(ScriptDone) == [ScriptDone(0)]
        assert not late


def test_the_wait_for_release_may_take_long(monkeypatch):
    """Whoever waits for this process in a collective is told after some time; the wait goes on."""
    agent = Agent(answer=lambda message: None)
    with under(agent, monkeypatch):
        agent_client.agent_link().wait_for_release(0, 0.01, lambda: agent.channel.send(Release()))
        assert agent.of(ScriptDone) == [ScriptDone(0)]


def test_malformed_environment(monkeypatch):
    """Variables that are the agent's, changed by somebody else, are a user's error."""
    agent = Agent()
    with under(agent, monkeypatch):
        monkeypatch.setenv("ELASTICRT_CHANNEL_FD", "seven")
        forget()
        with pytest.raises(ConfigError, match="ELASTICRT_CHANNEL_FD"):
            agent_client.worker_env()
        monkeypatch.setenv("ELASTICRT_CHANNEL_FD", str(agent.worker_fd))
        forget()


def deep(frames: int) -> int:
    """Python code whose frames come and go."""
    return frames and deep(frames - 1)


def work() -> None:
    """What a thread may be doing."""
    while True:
        deep(30)
        json.loads('{"a": [1, 2]}')


def of_child(page_fd: int, main: Callable[[], object]) -> int:
    """The process id of a worker that runs `main` and shows its stack, on the page."""
    child = os.fork()
    if child == 0:
        gc.freeze()  # As in every worker: what other tests have left has its threads in the parent.
        try:
            agent_client.agent_link()
            agent_client.show_stacks()
            StatusPage(page_fd).entered = 1
            main()
        finally:
            os._exit(1)
    wait_until(lambda: StatusPage(page_fd).entered, "it shows its stack")
    return child


def test_thousands_of_looks_at_its_stack_harm_no_process(monkeypatch):
    """W07, W08: a healthy worker that is asked for its stack lives on, and only the newest one is on its page."""
    page_fd = StatusPage.create()
    agent = Agent()
    with under(agent, monkeypatch, page_fd=page_fd):
        child, page = of_child(page_fd, work), StatusPage(page_fd)
        try:
            for _ in range(3000):
                agent.channel.send(ShowStack())
            wait_until(lambda: page.looks == 3000, "its stacks")
            assert os.waitpid(child, os.WNOHANG) == (0, 0)
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    text = page.text().decode()
    os.close(page_fd)
    assert text.count(STACK_BEGINS) == 1
    assert "in work" in text


def hang() -> None:
    """Hold the interpreter's lock in C."""
    pow(3, 10**9)


@pytest.mark.parametrize("main", [hang, signal.pause])
def test_stacks_are_taken_by_a_signal_only_where_the_interpreter_hangs(monkeypatch, main):
    """W07, W08: the link answers beside a main thread that waits; faulthandler where nothing in Python can."""
    page_fd = StatusPage.create()
    agent, found, signalled = Agent(), queue.SimpleQueue[Stacks](), []
    with under(agent, monkeypatch, page_fd=page_fd):
        child = of_child(page_fd, main)

        def send(number, _, ranks):
            signalled.append(ranks)
            os.kill(child, number)

        group = SimpleNamespace(
            pids=lambda _: {3: child},
            page=lambda *_: StatusPage(page_fd),
            ask_for_stacks=lambda _: agent.channel.send(ShowStack()),
            signal=send,
        )
        blank = Stacks("stalled", 1, 5, 3.0, False)
        try:
            stacks.take(group, found.put, blank, ())
            taken = found.get(timeout=30)
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    os.close(page_fd)
    assert signalled == ([[3]] if main is hang else [])
    assert taken.lines[3][0] == STACK_BEGINS
    assert ("in hang" if main is hang else "in of_child") in taken.lines[3][1]
