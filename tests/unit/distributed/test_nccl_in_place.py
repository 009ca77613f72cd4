"""What is done about groups that are aborted, as NCCL's are: by a backend of the tests, and torch's calls played."""

from __future__ import annotations

import os
import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist

from elasticrt.distributed import agent_client, context, regroup
from elasticrt.ipc.messages import Reseat
from elasticrt.train.in_place import InPlace
from tests.fake_worker import Agent, forget, under


class Abortable(dist.ProcessGroup):
    """A group of one process that notes who aborts it, and may not come back from that."""

    made: ClassVar[list[Abortable]] = []
    hang = threading.Event()

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self.aborted_by: list[str] = []
        self.shut_down = False
        self.made.append(self)

    def getBackendName(self) -> str:
        """As torch asks for it."""
        return "abortable"

    def abort(self) -> None:
        """The first group hangs, if told so."""
        self.aborted_by.append(threading.current_thread().name)
        if self is self.made[0]:
            self.hang.wait(30)

    def shutdown(self) -> None:
        """As torch does it with a group that it destroys."""
        self.shut_down = True


def _create(_store: Any, rank: int, size: int, _timeout: Any) -> Abortable:
    return Abortable(rank, size)


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch):
    """A default group and another one."""
    if "ABORTABLE" not in dist.Backend._plugins:
        dist.Backend.register_backend("abortable", _create, devices=["cpu"])
    monkeypatch.setattr(regroup, "ABORTED", ("abortable",))
    Abortable.made, Abortable.hang = [], threading.Event()
    dist.init_process_group("abortable", store=dist.HashStore(), rank=0, world_size=1)
    dist.new_group([0], backend="abortable")
    yield Abortable.made
    Abortable.hang.set()
    regroup._aborts.clear()
    if dist.is_initialized():
        dist.destroy_process_group()


def test_all_groups_are_aborted_at_once(groups) -> None:
    """Each once, by a thread of its own, and who called does not wait: NCCL takes up to a second for it."""
    regroup.cut()
    regroup.cut()
    for thread in list(regroup._aborts.values())[1:]:
        thread.join(30)
    assert [len(each.aborted_by) for each in groups] == [1, 1]
    assert groups[0].aborted_by != groups[1].aborted_by
    assert dist.is_initialized(), "torch's own books are the main thread's"


def test_a_group_is_left_while_it_is_being_aborted(groups, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch forgets it at once, so that another one can be made; it is kept until its abort has ended."""
    monkeypatch.setattr(regroup, "RETIRED_S", 0.0)
    regroup.leave()
    assert not dist.is_initialized()
    assert not any(each.shut_down for each in groups), "that would wait for the abort"
    dist.init_process_group("abortable", store=dist.HashStore(), rank=0, world_size=1)
    assert len(groups) == 3
    threads = list(regroup._aborts.values())
    regroup.release_retired()
    assert regroup._aborts
    assert regroup._retired
    Abortable.hang.set()
    for thread in threads:
        thread.join(30)
    regroup.release_retired()
    assert not regroup._aborts
    assert not regroup._retired


@pytest.mark.parametrize("has_agent", [True, False])
def test_nccl_is_told_to_survive_and_on_which_gpu(monkeypatch: pytest.MonkeyPatch, *, has_agent: bool) -> None:
    """Bound to this process's GPU; torch's watchdog is kept from ending it where there is an agent that watches."""
    made: list[tuple[str, dict[str, Any]]] = []
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **options: made.append((backend, options)))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    for name in context.SURVIVE:
        monkeypatch.setenv(name, "1")
    if has_agent:
        with under(Agent(), monkeypatch):
            context.make_group("nccl", rank=0)
            assert {name: os.environ[name] for name in context.SURVIVE} == context.SURVIVE
    else:
        forget()
        context.make_group("nccl", rank=0)
        assert {os.environ[name] for name in context.SURVIVE} == {"1"}
    context.make_group("gloo", rank=0)
    assert made == [("nccl", {"rank": 0, "device_id": torch.device("cuda", 3)}), ("gloo", {"rank": 0})]


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_an_optimizer_does_not_step_with_what_an_aborted_kernel_left(
    monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    """The stream is waited for first, then a seat that came meanwhile is seen: an error, which is no cause. With gloo
    the collective itself has raised."""
    agent, waited = Agent(), []
    with under(agent, monkeypatch):
        link = agent_client.agent_link()
        assert link is not None
        here = InPlace([], lambda: None, lambda: False, lambda: False)
        here._backend, here.possible = backend, True

        def synchronize() -> None:
            came = threading.Event()
            link.call_on_seat(came.set)
            seat = agent_client.worker_env()
            assert seat is not None
            agent.channel.send(Reseat(replace(seat, generation=2).to_env()))
            assert came.wait(30)
            waited.append(True)

        monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(synchronize=synchronize))
        if backend == "gloo":
            here.check_results()
            assert not waited
            return
        with pytest.raises(RuntimeError) as raised:
            here.check_results()
        assert waited == [True]
        assert here.report_if_lost(raised.value, 7)
        assert here.report_if_lost(ValueError("nan in the loss"), 7), "the script has worked with what was left"


def test_a_step_is_left_at_its_next_module_when_a_seat_has_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """What could be undone raises there, in the thread that makes the steps alone, and until the seat is taken."""
    agent, layer, raised = Agent(), torch.nn.Linear(1, 1), []
    with under(agent, monkeypatch):
        undoable = True
        here = InPlace([], lambda: None, lambda: undoable, lambda: False)
        here._follow()
        layer(torch.ones(1))
        seat = agent_client.worker_env()
        assert seat is not None
        came, real = threading.Event(), here._cut
        monkeypatch.setattr(here, "_cut", lambda: (real(), came.set()))
        here._follow()
        agent.channel.send(Reseat(replace(seat, generation=2).to_env()))
        assert came.wait(30)
        with pytest.raises(dist.DistNetworkError) as error:
            layer(torch.ones(1))
        assert here.report_if_lost(error.value, 7)
        other = threading.Thread(target=lambda: raised.append(layer(torch.ones(1))))
        other.start()
        other.join(30)
        undoable = False
        raised.append(layer(torch.ones(1)))
        assert len(raised) == 2
        undoable = True
        assert here.wait_for_seat()
        layer(torch.ones(1))
        assert not torch.nn.modules.module._global_forward_pre_hooks
