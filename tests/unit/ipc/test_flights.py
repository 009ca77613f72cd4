"""Torch's flight recorder in short: what torch 2.13 has written with gloo, and with nccl as its source has it."""

from __future__ import annotations

import json

import pytest

from elasticrt.ipc.flights import FLIGHTS_BYTES, Flight, read, shortened
from tests.servers import wait_until


def _entry(record: int, number: int, name: str = "gloo:all_reduce", **more: object) -> dict:
    """As gloo's: it says of none that it has started or is completed, and retires it when it is over."""
    return {
        "collective_seq_id": number, "input_dtypes": ["Float"], "input_sizes": [[12]], "is_p2p": False,
        "op_id": number, "output_dtypes": ["Float"], "output_sizes": [[12]], "p2p_seq_id": 0, "pg_id": 0,
        "process_group": ["0", "default_pg"], "profiling_name": name, "record_id": record, "retired": True,
        "state": "scheduled", "thread_id": "140503446866816", "thread_name": "python",
        "time_created_ns": 1795467181785945865, "time_discovered_completed_ns": 0, "time_discovered_started_ns": 0,
        "timeout_ms": 1800000, **more,
    }  # fmt: skip


OPEN = {"retired": False}
MINE = {"pg_id": 1, "process_group": ["1", "mine"]}
ANEW = {"pg_id": 2}


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        pytest.param([], (), id="none"),
        pytest.param([_entry(0, 1), _entry(1, 2)], (Flight("default_pg", 2, 0, "all_reduce of [12]"),), id="all over"),
        pytest.param(
            [_entry(0, 4), _entry(1, 5, **OPEN), _entry(2, 6, **OPEN)],
            (Flight("default_pg", 6, 5, "all_reduce of [12]"),),
            id="two under way",
        ),
        pytest.param(
            [_entry(0, 4), _entry(1, 1, "gloo:barrier", input_sizes=[], **MINE, **OPEN)],
            (Flight("mine 1", 1, 1, "barrier"), Flight("default_pg", 4, 0, "all_reduce of [12]")),
            id="two groups",
        ),
        pytest.param(
            [_entry(0, 40, **OPEN), _entry(1, 1, "gloo:all_gather", **ANEW)],
            (Flight("default_pg", 1, 0, "all_gather of [12]"),),
            id="a group made anew",
        ),
        pytest.param(
            [
                _entry(0, 8, "nccl:all_reduce", state="completed", **OPEN),
                _entry(1, 9, "nccl:_all_gather_base", state="started", **OPEN),
                _entry(2, 0, "nccl:send 0->1", state="scheduled", is_p2p=True, **OPEN),
            ],
            (Flight("default_pg", 9, 9, "_all_gather_base of [12]"),),
            id="nccl",
        ),
    ],
)
def test_a_trace_in_short(entries: list[dict], expected: tuple[Flight, ...]) -> None:
    """Of each group the newest collective, and the oldest that is not over; the group used last comes first."""
    assert read(shortened(json.dumps({"version": "2.10", "entries": entries}))) == expected


@pytest.mark.parametrize("trace", ["", "{}", '{"entries": [{}]}', '{"entries": 1}', b"\xff"])
def test_what_is_no_trace_says_nothing(trace: str) -> None:
    """Another version of torch may write anything."""
    assert shortened(trace) == ""


def test_it_has_room_on_the_page() -> None:
    """However many groups there are, and whatever they are called."""
    entries = [_entry(at, 1, **{**MINE, "process_group": [str(at), "\u00e4\u0000\"'" * 50]}) for at in range(30)]
    text = shortened(json.dumps({"entries": entries}))
    assert 0 < len(text) <= FLIGHTS_BYTES
    assert read(text)


def test_what_torch_itself_writes() -> None:
    """The recorder of this torch, with gloo: a collective that is over is soon known as such."""
    import torch
    import torch.distributed as dist

    def recorded() -> Flight:
        (found,) = read(shortened(torch._C._distributed_c10d._dump_fr_trace_json()))
        return found

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        dist.all_reduce(torch.ones(7))
        # Another thread notes its end, perhaps after the call has returned.
        wait_until(lambda: recorded().awaits == 0, "it is over")
        found = recorded()
    finally:
        dist.destroy_process_group()
    assert (found.group, found.what) == ("default_pg", "all_reduce of [7]")
