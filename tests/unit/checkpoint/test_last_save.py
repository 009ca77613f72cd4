"""The last save of a training that comes to nothing is not a success."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from elasticrt import Checkpointer, CheckpointError, Loop
from elasticrt.checkpoint import commits
from elasticrt.ipc.env import Commit
from elasticrt.ipc.messages import ERRNO, Message, OpenDirectory, Reply, Save, Unsaved
from tests.fake_worker import Agent, under
from tests.full_disk import full_disk


def train(directory: Path, every: str = "1000 steps", epochs: int = 1) -> None:
    """Epochs of three steps."""
    loop = Loop(directory, every=every)
    loop.vars["w"] = torch.zeros(500)
    for _ in loop.epochs(epochs):
        for _ in loop.batches([1, 2, 3]):
            pass


@pytest.mark.parametrize("every", ["1000 steps", "1 epoch", "1 steps"])
def test_a_disk_that_is_full_at_the_end(tmp_path: Path, every: str) -> None:
    """F01, F02: whichever save is the last, the loop ends with an error that says what to do; the next one goes on."""
    with (
        full_disk(),
        pytest.raises(CheckpointError, match=r"of step 3, could not be saved .*training resumes from the beginning"),
    ):
        train(tmp_path / "ckpt", every)


def test_a_directory_that_is_deleted_meanwhile(tmp_path: Path) -> None:
    """Somebody deletes the checkpoint directory: it is made again, and the next start goes on from the end."""
    loop = Loop(tmp_path / "ckpt", every="1 steps")
    loop.vars["w"] = torch.zeros(500)
    for _ in loop.epochs(1):
        for number in loop.batches([1, 2, 3]):
            if number == 2:
                loop._saving.checkpointer.wait()
                shutil.rmtree(tmp_path / "ckpt")
    again = Loop(tmp_path / "ckpt")
    again.vars["w"] = torch.zeros(500)
    assert [list(again.batches([1, 2, 3])) for _ in again.epochs(1)] == []
    assert again.steps_done == 3


def test_a_disk_that_is_full_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """F01: an agent that can't write its record is a directory that can't be used, not a failure to be tried again."""
    agent = WithoutRoom(times=1)
    found = r"can't be used .*No space left on device; expected a directory .*\. Fix it, or use another"
    with under(agent, monkeypatch), pytest.raises(CheckpointError, match=found):
        train(tmp_path / "ckpt")


def test_a_commit_that_is_refused_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """F08: that is a failure like any other: the next generation trains what is missing."""
    with under(Agent(head="0123456789abcdef"), monkeypatch), pytest.raises(RuntimeError, match="the head is 0123"):
        train(tmp_path / "ckpt")


class WithoutRoom(Agent):
    """An agent that `times` times cannot write its record."""

    def __init__(self, times: int, head: str = "", error: int = errno.ENOSPC) -> None:
        self.left, self.error = times, error
        super().__init__(head, self.say)

    def say(self, message: Message) -> Reply | None:
        """What an agent says to `message`."""
        if isinstance(message, OpenDirectory) and message.take and self.left:
            self.left -= 1
            return Reply(message.request, False, f"its record .owner: {os.strerror(self.error)}", {ERRNO: self.error})
        return self.fenced(message)


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EDQUOT, errno.EROFS])
def test_a_disk_that_is_full_at_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: int
) -> None:
    """F01: a run that has trained goes on without saving, which its agent is told, and the first that can commits."""
    first = Agent()
    with under(first, monkeypatch):
        train(tmp_path, "1 steps")
    head = Commit.from_fields(first.of(Save)[-1].commit)
    agent = WithoutRoom(3, head.nonce, error)
    with under(agent, monkeypatch, resume=head, generation=2):
        train(tmp_path, "1 steps", epochs=2)
    kinds = [type(message) for message in agent.messages if isinstance(message, Save) or getattr(message, "take", 0)]
    assert kinds == [
        OpenDirectory,
        OpenDirectory,
        OpenDirectory,
        OpenDirectory,
        Save,
        Save,
    ]  # The last step, and the end of its epoch.
    assert caplog.text.count(os.strerror(error)) == 1, "a warning that nothing can be saved there"
    told = [(each.step, os.strerror(error) in each.reason) for each in agent.of(Unsaved)]
    assert told == [(4, True), (5, True)]
    assert agent.of(Save)[-1].commit["step"] == 6


class WithoutEtcd(Agent):
    """An agent that `away` times cannot say, to each kind of question, or `blocked` times cannot write."""

    def __init__(self, away: int = 0, blocked: int = 0) -> None:
        self.left, self.blocked = {OpenDirectory: away, Save: away}, blocked
        super().__init__(answer=self.say)

    def say(self, message: Message) -> Reply | None:
        """What an agent says to `message`."""
        if isinstance(message, (OpenDirectory, Save)) and self.left[type(message)]:
            self.left[type(message)] -= 1
            return Reply(message.request, ok=False, reason="etcd does not answer", refusal="unsure")
        if isinstance(message, Save) and self.blocked:
            self.blocked -= 1
            return Reply(message.request, ok=False, reason="etcd is full", refusal="blocked")
        return self.fenced(message)


def test_the_last_save_waits_for_an_etcd_that_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """E07: saves before are left out, so that training goes on; at the end it waits, and nothing is lost."""
    monkeypatch.setattr(commits, "ASK_AGAIN_S", 0.01)
    agent = WithoutEtcd(blocked=20)
    with under(agent, monkeypatch):
        train(tmp_path / "ckpt", "1 steps")
    steps = [save.commit["step"] for save in agent.of(Save)]
    assert steps[0] < 3, "not that of the end"
    assert [steps.count(step) for step in {*steps} - {3}] == [1] * (len({*steps}) - 1)
    assert agent.head == agent.of(Save)[-1].commit["nonce"]
    assert [each.step for each in agent.of(Unsaved)] == steps[: len(agent.of(Unsaved))]


def test_saves_wait_for_etcd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """E03: the first question, the commits and the last save are asked again until etcd answers; nothing is lost."""
    monkeypatch.setattr(commits, "ASK_AGAIN_S", 0.01)
    agent = WithoutEtcd(away=2)
    with under(agent, monkeypatch):
        train(tmp_path / "ckpt", "1 steps")
    assert agent.left == {OpenDirectory: 0, Save: 0}
    assert agent.of(Save)[-1].commit["step"] == 3
    assert agent.head == agent.of(Save)[-1].commit["nonce"]


def test_a_save_between_two_steps_does_not_wait_for_etcd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """E03: where it is not known who saves there it is left out, so that training goes on; the next one makes it up."""
    monkeypatch.setattr(commits, "ASK_AGAIN_S", 0.01)
    agent = WithoutEtcd(away=1)
    with under(agent, monkeypatch):
        saver = Checkpointer(tmp_path / "ckpt")
        assert saver.to_disk(step=1, epoch=0, patient=False) == []
        assert saver.missed
        saver.save({"w": torch.zeros(5)}, step=2)
        saver.finish()
    assert {save.commit["step"] for save in agent.of(Save)} == {2}


SCRIPT = """
import resource, signal, sys, torch, elasticrt
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
how, directory = sys.argv[1:]
def limit(size): resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
def save(step): saver.save({"w": torch.zeros(500)}, step=step)
if how.startswith("loop"):
    loop = elasticrt.Loop(directory)
    loop.vars["w"] = torch.zeros(500)
    limit(1000)
    for epoch in loop.epochs(2):
        for x in loop.batches([1, 2]):
            with loop.step():
                pass
        break
else:
    saver = elasticrt.Checkpointer(directory)
    limit(100)
    save(1)
    saver.wait()
    del saver
if how.endswith("well again"):
    limit(resource.RLIM_INFINITY)
    saver = elasticrt.Checkpointer(directory)
    save(2)
if how.endswith("raises"):
    raise KeyError(how)
print("the end")
"""


REFUSED = """
import sys, pytest, torch
from elasticrt import Checkpointer
from elasticrt.ipc.messages import Reply, Save
from tests.fake_worker import Agent, under

def answer(message):
    taken = Reply(message.request, False, "run b", refusal="taken")
    return taken if isinstance(message, Save) else agent.fenced(message)

agent = Agent(answer=answer)
linked = under(agent, pytest.MonkeyPatch())
linked.__enter__()
saver = Checkpointer(sys.argv[1])
saver.save({"w": torch.zeros(5)}, step=1)
"""


def test_a_directory_that_another_run_has_taken_at_the_end(tmp_path: Path) -> None:
    """The last save of a Checkpointer alone, which nobody has waited for: exit code 7, and who saves there."""
    command = [sys.executable, "-c", REFUSED, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, "run b" in done.stderr) == (7, True), done.stderr


@pytest.mark.parametrize(
    ("how", "code", "said"),
    [
        ("loop, break", 5, "of step 2, could not be saved"),
        ("saver", 5, "of step 1, could not be saved"),
        ("saver, well again", 0, ""),
        ("saver, raises", 1, "KeyError"),
    ],
)
def test_how_such_a_script_ends(tmp_path: Path, how: str, code: int, said: str) -> None:
    """F01: after `break`, and with a Checkpointer alone: exit code 5 and why, unless a later save succeeded."""
    command = [sys.executable, "-c", SCRIPT, how, str(tmp_path / "ckpt")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, said in done.stderr) == (code, True), done.stderr
    assert ("the end" in done.stdout) == (code != 1)
