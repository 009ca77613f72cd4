"""State from one rank to others over the process group: who sends, what arrives, and where it is written to."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from elasticrt.checkpoint.state_transfer import Plan, Standing, plan, rehearse, share

WHOLE, TORN, NEW = True, False, Standing(-1, False)


@pytest.mark.parametrize(
    ("standings", "expected"),
    [
        ([Standing(7, WHOLE)], Plan(0, ())),
        ([Standing(7, WHOLE), Standing(7, WHOLE)], Plan(0, ())),
        ([Standing(7, WHOLE), Standing(8, WHOLE)], Plan(1, (0,))),
        ([Standing(7, WHOLE), Standing(8, WHOLE), Standing(8, WHOLE), Standing(7, WHOLE)], Plan(1, (0, 3))),
        ([NEW, Standing(0, WHOLE)], Plan(1, (0,))),
        ([NEW, NEW, Standing(3, WHOLE), NEW], Plan(2, (0, 1, 3))),
        ([Standing(8, TORN), Standing(7, WHOLE)], Plan(1, (0,))),
        ([Standing(-1, TORN), Standing(7, WHOLE), Standing(8, WHOLE)], Plan(2, (0, 1))),
        ([Standing(7, TORN), Standing(7, TORN)], None),
        ([NEW], None),
        ([], None),
    ],
)
def test_who_sends(standings: list[Standing], expected: Plan | None) -> None:
    """The first of the furthest that are whole sends to all others; without one there is nobody to ask."""
    assert plan(standings) == expected


def _rank(number: int, world: int, directory: str, work: Callable[[int], Any], answers: Any) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = dist.FileStore(f"{directory}/store", world)
    dist.init_process_group("gloo", store=store, rank=number, world_size=world)
    try:
        answer = work(number)
    except Exception as error:  # noqa: BLE001  It is the answer.
        answer = f"{type(error).__name__}: {error}"
    answers.put((number, answer))
    answers.close()
    answers.join_thread()
    os._exit(0)


def ranks(directory: Path, work: Callable[[int], Any], world: int = 2) -> list[Any]:
    """What `work(rank)` gives in each process of a group."""
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    processes = [context.Process(target=_rank, args=(n, world, str(directory), work, answers)) for n in range(world)]
    for process in processes:
        process.start()
    found = dict(answers.get(timeout=60) for _ in processes)
    for process in processes:
        process.join(30)
    return [found[number] for number in range(world)]


def _state(seed: int) -> dict[str, Any]:
    draw = torch.Generator().manual_seed(seed)

    def numbers(*shape: int) -> torch.Tensor:
        return torch.randint(0, 100, shape, generator=draw)

    return {
        "model": {
            "double": numbers(5, 7).double(),
            "half": numbers(9).half(),
            "brain": numbers(3, 3).bfloat16(),
            "truth": numbers(11) > 50,
            "small": numbers(13).to(torch.int8),
            "complex": torch.complex(numbers(4).float(), numbers(4).float()),
            "turned": numbers(6, 4).float().t(),
            "every other": numbers(20).float()[::2],
            "misaligned": numbers(9).to(torch.uint8)[1:],
            "odd half": numbers(8).half()[3:],
            "alone": numbers(1).double().reshape(()),
            "empty": torch.empty(0, 3),
            "large": numbers(700_000).float(),
        },
        "optimizer": {
            "state": {0: {"step": torch.tensor(float(seed))}, 7: {"moment": (numbers(3).float(), seed)}},
            "groups": [{"lr": seed / 10, "params": [0, 7], "on": None}],
        },
        "text": f"seed {seed}",
    }


def _leaves(value: Any, path: str = "") -> dict[str, Any]:
    if isinstance(value, dict):
        return {k: v for key, each in value.items() for k, v in _leaves(each, f"{path}/{key!r}").items()}
    if isinstance(value, (list, tuple)):
        kind = type(value).__name__
        return {k: v for i, each in enumerate(value) for k, v in _leaves(each, f"{path}/{kind}{i}").items()}
    return {path: value}


def _exchange(rank: int) -> Any:
    own, expected = _state(rank + 1), _leaves(_state(2))
    places = {path: each.data_ptr() for path, each in _leaves(own).items() if isinstance(each, torch.Tensor)}
    called: list[int] = []
    told = share(Standing(rank + 4, True), lambda: own, lambda: called.append(1))
    if rank == 1:
        return told is None and not called
    assert told is not None
    found = _leaves(told)
    assert found.keys() == expected.keys()
    for path, each in expected.items():
        if isinstance(each, torch.Tensor):
            assert found[path].dtype == each.dtype, path
            assert torch.equal(found[path], each), path
            assert found[path].data_ptr() == places[path], path
        else:
            assert found[path] == each, path
    return called == [1]


def test_tensors_of_all_kinds_arrive_in_place(tmp_path: Path) -> None:
    """Odd types, views, a scalar, an empty one: each is equal afterwards, and the receiver's own tensor holds it."""
    assert ranks(tmp_path, _exchange) == [True, True]


def _to_a_newcomer(rank: int) -> Any:
    own = _state(2) if rank == 1 else {"model": {"half": torch.zeros(2)}, "optimizer": {}}
    told = share(Standing(4, True) if rank == 1 else NEW, lambda: own, lambda: None)
    if rank == 1:
        return told is None
    found, expected = _leaves(told), _leaves(_state(2))
    return all(
        torch.equal(found[path], each) if isinstance(each, torch.Tensor) else found[path] == each
        for path, each in expected.items()
    )


def test_who_lacks_parts_gets_them(tmp_path: Path) -> None:
    """A newcomer whose optimizer has no state yet, and whose tensor has another shape, gets new ones; three ranks."""
    assert ranks(tmp_path, _to_a_newcomer, 3) == [True, True, True]


def _with_a_flipped_bit(rank: int) -> Any:
    if rank == 0:
        received, real = [], dist.irecv

        class Flipped:
            def __init__(self, work: Any, tensor: torch.Tensor) -> None:
                self._work, self._tensor = work, tensor

            def wait(self) -> None:
                self._work.wait()
                received.append(self._tensor.numel())
                if len(received) == 3:
                    self._tensor.view(torch.uint8)[5] ^= 16

        dist.irecv = lambda tensor, *args: Flipped(real(tensor, *args), tensor)
    return str(share(Standing(rank, True), lambda: _state(rank), lambda: None))


def test_a_flipped_bit_is_refused(tmp_path: Path) -> None:
    """One bit that changes on the way: the receiver says so instead of training on."""
    told, sent = ranks(tmp_path, _with_a_flipped_bit)
    assert "the state has changed on its way" in told
    assert sent == "None"


LARGE = 96 * 1024 * 1024


def _peak_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("VmHWM"))) * 1024


def _measured(rank: int) -> Any:
    own = {"weights": torch.full((LARGE // 4,), float(rank))}
    Path("/proc/self/clear_refs").write_text("5")  # The peak is counted from now on.
    before = _peak_bytes()
    told = share(Standing(1, True) if rank else NEW, lambda: own, lambda: None)
    more = _peak_bytes() - before
    if told is not None:
        assert told["weights"].data_ptr() == own["weights"].data_ptr()
        assert own["weights"][-1].item() == 1.0
    return more


def test_a_receiver_needs_no_second_copy(tmp_path: Path) -> None:
    """96 MiB arrive at a newcomer, and neither side ever holds half as much more."""
    more = ranks(tmp_path, _measured)
    assert max(more) < LARGE / 2, more


def _sender_dies(rank: int) -> Any:
    if rank == 1:
        sent, real = [], dist.isend

        def isend(*args: Any) -> Any:
            sent.append(1)
            if len(sent) == 4:
                raise KeyboardInterrupt
            return real(*args)

        dist.isend = isend
        try:
            share(Standing(8, True), lambda: _state(2), lambda: None)
        except KeyboardInterrupt:
            return "died"
    own, called = _state(1), []
    try:
        share(Standing(7, True), lambda: own, lambda: called.append(1))
    except RuntimeError:
        expected, found = _leaves(_state(1)), _leaves(own)
        tensors = [path for path, each in expected.items() if isinstance(each, torch.Tensor)]
        return not called and all(torch.equal(found[path], expected[path]) for path in tensors)
    return "got it"


def test_a_state_that_does_not_arrive_leaves_ones_own(tmp_path: Path) -> None:
    """The one rank that is ahead dies while it sends: who was a step behind has that step's state still, whole."""
    assert ranks(tmp_path, _sender_dies) == [True, "died"]


def _nobody(_: int) -> Any:
    return share(Standing(-1, False), dict, lambda: None)


def test_without_a_state_all_are_told(tmp_path: Path) -> None:
    """When no rank has a whole state every rank raises, and none waits."""
    assert all("no rank of this generation has a state" in each for each in ranks(tmp_path, _nobody))


def test_a_rehearsal_leaves_the_state_where_and_as_it_is() -> None:
    """What is practised alone is what is done with a peer: the same values, in the very same tensors."""
    state = _state(3)
    expected = _state(3)
    told = rehearse(state)
    for name, tensor in state["model"].items():
        assert told["model"][name] is tensor
        assert torch.equal(tensor, expected["model"][name])
