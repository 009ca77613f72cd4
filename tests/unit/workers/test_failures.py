"""Reports: what is made of a worker's remains, who is to blame, and what people read."""

from __future__ import annotations

import json

import pytest

from elasticrt.ipc.failure import ENDED_EARLY, LET_GO_NEVER, TRACEBACK, Failure, first_cause
from elasticrt.workers.failures import Remains, failure_of, failure_of_node, is_collateral, raised
from tests.unit.workers.states import ended, worker

GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] "
IN_TORCH = 'File "/x/torch/distributed/distributed_c10d.py", line 2780, in all_reduce'


ADVICE = (
    "This is typically caused by a remote worker crashing. Check the logs of the remote worker before reporting an "
    "error. GLHF! \N{BEACH WITH UMBRELLA}"
)
IN_LOADER = (
    "Caught KeyError in DataLoader worker process 0.\nOriginal Traceback (most recent call last):\n"
    + '  File "/x/torch/utils/data/_utils/fetch.py", line 54, in fetch\n    data = [...]\n' * 9
)


def failure(rank: int = 0, **changes: object) -> Failure:
    """A failure with some fields changed."""
    place = {"node": "node-0", "generation": 1, "local_rank": 0}
    place |= {name: changes.pop(name) for name in place if name in changes}
    return failure_of(worker(rank=rank, **place), Remains(**{"code": 1, **changes}))


def error_file(message: str, callstack: str = "") -> str:
    """The content of torchelastic's error file."""
    return json.dumps({"message": {"message": message, "extraInfo": {"py_callstack": callstack, "timestamp": "1"}}})


@pytest.mark.parametrize(
    ("exception", "message", "callstack", "collateral"),
    [
        ("RuntimeError", GLOO + "Connection closed by peer [127.0.0.1]:39123", "", True),
        ("RuntimeError", GLOO + "Read error [127.0.0.1]:1: Connection reset by peer", "", True),
        ("RuntimeError", GLOO + "writev [127.0.0.1]:1: Broken pipe", "", True),
        ("RuntimeError", GLOO + "Timed out waiting 1800000ms for recv operation to complete", "", True),
        ("RuntimeError", "Gloo connectFullMesh failed with " + GLOO + "no error", "", True),
        ("RuntimeError", "Connection reset by peer", IN_TORCH, True),
        (
            "torch.distributed.DistBackendError",
            "NCCL error in: x.cpp: remote process exited or network error",
            "",
            True,
        ),
        ("RuntimeError", "NCCL Async Error: remote process exited or there was a network error", "", True),
        ("RuntimeError", "NCCL communicator was aborted after a previous error", "", True),
        ("RuntimeError", "NCCL operation timed out", "", True),
        ("DistNetworkError", "The client socket has failed to connect to [h]:1 (errno: 111)", "", True),
        ("DistStoreError", "Timed out after 2 seconds waiting for clients. 1/2 clients joined.", "", True),
        ("ConnectionResetError", "[Errno 104] Connection reset by peer", "", False),
        ("ConnectionResetError", "[Errno 104] Connection reset by peer", "requests/adapters.py", False),
        ("DistBackendError", "NCCL error: unhandled cuda error: out of memory", "", False),
        ("RuntimeError", "DataLoader worker (pid 1) is killed by signal: Killed.", IN_TORCH, False),
        ("RuntimeError", "CUDA error: an illegal memory access was encountered", IN_TORCH, False),
        ("ValueError", GLOO + "Connection closed by peer", "", False),
        ("AssertionError", "", "", False),
        ("", "", "", False),
    ],
)
def test_collateral(exception, message, callstack, collateral):
    """W02: only an error of torch's communication that says a peer is gone is collateral."""
    assert is_collateral(exception, message, callstack) is collateral


def test_collateral_through_a_chain():
    """W02: an error that the user raised from a failed collective is collateral as well."""
    callstack = (
        f"Traceback (most recent call last):\n  {IN_TORCH}\nRuntimeError: {GLOO}Connection closed by peer\n\n"
        "The above exception was the direct cause of the following exception:\n\n"
        'Traceback (most recent call last):\n  File "train.py", line 1, in f\nMyError: step failed\n'
    )
    assert is_collateral("MyError", "step failed", callstack)
    assert not is_collateral("MyError", "step failed", callstack.replace("Connection closed by peer", "bad shape"))


def test_log_noise_is_not_evidence():
    """A warning about a peer in the output does not make a plain error collateral."""
    lines = [f"W1121 {GLOO}Connection closed by peer", "Traceback (most recent call last):", "ValueError: x"]
    found = raised(Remains(1, last_lines=lines))
    assert (found.exception, found.message) == ("ValueError", "x")
    assert not failure(last_lines=lines).collateral


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"code": 1}, "exit code 1"),
        ({"code": 137}, "exit code 137 (128 + SIGKILL: killed, perhaps for memory)"),
        ({"code": -11}, "killed by SIGSEGV"),
        ({"code": -9}, "killed by SIGKILL"),
        ({"code": -9, "oom": True}, "killed by SIGKILL: out of memory (the kernel's count of such kills went up)"),
        ({"code": -9, "lost": "its parent is gone"}, "killed by SIGKILL: its parent is gone"),
        ({"code": -7, "oom": True}, "killed by SIGBUS"),
        ({"code": -42}, "killed by signal 42"),
        ({"code": 127, "start_error": "no such file"}, "could not be started: no such file"),
        ({"code": 1, "error_file": error_file("ValueError: a: b")}, "exit code 1: ValueError: a: b"),
        ({"code": 1, "error_file": error_file("a message of words")}, "exit code 1: a message of words"),
        ({"code": 1, "error_file": '{"message": "plain"}'}, "exit code 1: plain"),
        ({"code": 1, "error_file": "not json"}, "exit code 1"),
        ({"code": 1, "error_file": error_file("CheckpointError: a (b)")}, "CheckpointError: a (b)"),
        ({"code": 1, "error_file": error_file("MisfitError: a (b)")}, "MisfitError: a (b)"),
        ({"code": 1, "error_file": "[1]"}, "exit code 1"),
        (
            {"error_file": error_file(f"KeyError: {IN_LOADER}KeyError: 'foo'")},
            "exit code 1: KeyError: 'foo' (in DataLoader worker process 0)",
        ),
        (
            {"error_file": error_file(f"RuntimeError: {GLOO}Connection closed by peer [127.0.0.1]:13706. {ADVICE}")},
            "exit code 1: RuntimeError: Connection closed by peer [127.0.0.1]:13706",
        ),
    ],
)
def test_summaries(given, words):
    """W04, W06, W17: exit, signal, out of memory, failed start, and what was raised, are told apart."""
    assert failure(**given).summary == f"rank 0 on node-0: {words}"


def test_a_survivor_that_gloo_keeps_is_replaced():
    """It has not failed: a consequence of the loss that follows it, and no cause."""
    found = failure(error_file=error_file(f"ConnectionError: {LET_GO_NEVER}"))
    assert (found.collateral, found.summary) == (
        True,
        "rank 0 on node-0 was replaced: gloo kept waiting after the connection was closed",
    )


def test_a_signal_is_never_collateral():
    """W04: a worker killed by a signal is a cause, whatever its log says."""
    assert not failure(
        code=-9, last_lines=["Traceback (most recent call last):", f"RuntimeError: {GLOO}Broken pipe"]
    ).collateral


@pytest.mark.parametrize(("code", "stepped", "killed"), [(-9, True, True), (-9, False, False), (1, True, False)])
def test_a_signal_after_a_step_of_its_own_is_the_loss_of_a_worker(code, stepped, killed):
    """W04: one that ends before its first step, or that raises, has failed."""
    assert failure(code=code, stepped=stepped).killed is killed


def test_nccl_aborts_when_a_peer_is_gone():
    """SIGABRT out of NCCL's watchdog, which throws where nobody can catch, is collateral."""
    said = "terminate called after throwing an instance of 'c10::DistBackendError'"
    assert failure(code=-6, last_lines=[said, "  what(): NCCL error: remote process exited"]).collateral
    assert not failure(
        code=-6, last_lines=["terminate called after throwing an instance of 'std::bad_alloc'"]
    ).collateral


@pytest.mark.parametrize(
    ("given", "final"),
    [
        ({"error_file": error_file("CheckpointError: x")}, 5),
        ({"error_file": error_file("PreparationError: x")}, 6),
        ({"error_file": error_file("ReadAheadError: x"), "stepped": True}, 1),
        ({"error_file": error_file("ValueError: x")}, 0),
        ({"last_lines": ["Traceback (most recent call last):", "elasticrt.errors.CheckpointError: x"]}, 5),
        (
            {
                "last_lines": [
                    f"[rank0]: {TRACEBACK}",
                    '[rank0]:   File "x"',
                    "[rank0]: elasticrt.errors.CheckpointError: x",
                ]
            },
            5,
        ),
        ({"last_lines": ["rank 1: DuplicateError: x", "  called at x", "  traceback: not kept"]}, 7),
        ({"last_lines": ["rank 1: DuplicateError: x", TRACEBACK, "ValueError: y"]}, 0),
        ({"error_file": error_file("CheckpointError: x"), "code": -9}, 0),
    ],
)
def test_final_codes(given, final):
    """Errors that no restart can cure carry the run's exit code, from the error file or the traceback."""
    assert failure(**given).final_code == final


def test_a_script_that_is_not_the_runs_is_final_for_its_node_alone():
    """It is no reason to end the run, and no sign of what a restart of the others would end in."""
    found = failure(error_file=error_file("MisfitError: x"), stepped=False)
    assert (found.misfit, found.final_code, found.collateral) == (True, 0, False)
    assert not failure(error_file=error_file("CheckpointError: x")).misfit


AT_TEN = 'Traceback (most recent call last):\n  File "/x/train.py", line 10, in <module>\nValueError: x'


@pytest.mark.parametrize(
    ("name", "stepped", "final"),
    [
        ("SyntaxError", False, 1),
        ("ModuleNotFoundError", False, 1),
        ("ImportError", None, 1),
        ("ImportError", True, 0),
        ("ValueError", False, 0),
    ],
)
def test_what_is_wrong_with_the_script_is_final(name, stepped, final):
    """A script that cannot be compiled, or imports what is not there, fails again: the run ends, with code 1."""
    assert failure(error_file=error_file(f"{name}: x"), stepped=stepped).final_code == final


SYNTAX = ['  File "/x/train.py", line 1', "    def (", "        ^", "SyntaxError: invalid syntax"]
USAGE = ["usage: train.py [-h] --n N", "train.py: error: the following arguments are required: --n"]
NO_FILE = "cannot start the worker: [Errno 2] No such file or directory: './x'"


@pytest.mark.parametrize(
    ("given", "final"),
    [
        ({"last_lines": SYNTAX}, 1),
        ({"last_lines": ["/x/bin/python3.11: No module named nosuchmod"]}, 1),
        ({"last_lines": ["/x/python: Error while finding module specification for 'a.b' (ModuleNotFoundError: a)"]}, 1),
        ({"code": 2, "last_lines": USAGE}, 1),
        ({"code": 2, "last_lines": ["Usage: train [OPTIONS]", "", "Error: Missing option '--n'."]}, 1),
        ({"code": 2, "last_lines": USAGE, "stepped": True}, 0),
        ({"code": 2, "last_lines": ["fetch: error: the connection was lost"]}, 0),
        ({"code": 3, "last_lines": USAGE}, 0),
        ({"code": 2, "last_lines": ["No module named x"]}, 0),
        ({"code": 127, "last_lines": ["./run.sh: 2: nothing: not found"]}, 1),
        ({"code": 127, "last_lines": ["./run.sh: 2: nothing: not found"], "stepped": True}, 0),
        ({"code": 127, "start_error": NO_FILE}, 1),
        ({"code": 126, "start_error": "cannot start the worker: [Errno 8] Exec format error: './x'"}, 1),
        ({"code": 126, "start_error": "fork: [Errno 11] Resource temporarily unavailable"}, 0),
    ],
)
def test_what_certainly_comes_again_without_a_traceback_is_final(given, final):
    """A fresh interpreter's words for what cannot be compiled or found, refused arguments, a program that is none."""
    assert failure(**given).final_code == final


@pytest.mark.parametrize(
    ("given", "same"),
    [
        ({}, True),
        ({"rank": 3, "node": "other"}, True),
        ({"error_file": error_file("ValueError: y", AT_TEN)}, False),
        ({"error_file": error_file("ValueError: x", AT_TEN.replace("10", "11"))}, False),
        ({"stepped": True}, False),
        ({"stepped": None}, False),
        ({"error_file": error_file("ConnectionError: x", AT_TEN)}, False),
        ({"error_file": ""}, False),
        ({"code": -11}, False),
    ],
)
def test_the_same_failure_before_the_first_step_is_recognised(given, same):
    """By type, message and line, on any rank; not where another machine may have been away, or without an exception."""
    first = failure(error_file=error_file("ValueError: x", AT_TEN), stepped=False).early
    second = failure(**{"error_file": error_file("ValueError: x", AT_TEN), "stepped": False, **given}).early
    assert len(first) == 16 and (first == second) is same
    assert same or "error_file" in given or not second


def test_first_cause():
    """The first failure that is no collateral is the cause; with collateral only, the first; with none, None."""
    peer = failure(0, error_file=error_file(f"RuntimeError: {GLOO}Connection closed by peer"))
    cause, later = failure(1, code=-11), failure(2, code=3)
    assert first_cause([peer, cause, later], ()) is cause
    assert first_cause([peer], ()) is peer
    assert first_cause([], ()) is None


def test_the_others_are_told_the_first_cause():
    """W02: what a node reports of its workers names the cause, in number, code and words, not who failed earlier."""
    peer = failure(0, error_file=error_file(f"RuntimeError: {GLOO}Connection closed by peer"))
    cause, later = failure(1, code=-11), failure(2, code=3)
    report = ended(3, failures=(peer, cause, later))
    assert (report.status, report.failure.rank, report.failure.code) == ("failed", 1, -11)
    assert (report.failure.collateral, report.failure.summary) == (False, "rank 1 on node-0: killed by SIGSEGV")
    assert failure_of_node([peer]).collateral, "only consequences: the cause is on another node"


def test_the_report_that_people_read():
    """The cause in full, with its last lines and log; one line for each other, marked collateral."""
    peer = failure(0, error_file=error_file(f"RuntimeError: {GLOO}Connection closed by peer"))
    cause = failure(
        1,
        local_rank=1,
        node="node-7",
        generation=3,
        error_file=error_file("ValueError: bad batch"),
        last_lines=["Traceback (most recent call last):", '  File "t.py", line 3', "ValueError: bad batch"],
        log_path="/run/logs/rank-1.err",
        step=120,
    )
    assert failure_of_node([peer, cause, failure(2, code=-15)]).text.splitlines() == [
        "rank 1 failed first, on node-7 (local rank 1), in generation 3, after step 120",
        "  exit code 1: ValueError: bad batch",
        "  the end of its error output:",
        "  | Traceback (most recent call last):",
        '  |   File "t.py", line 3',
        "  | ValueError: bad batch",
        "  log: /run/logs/rank-1.err",
        "  collateral: rank 0 on node-0: exit code 1: RuntimeError: Connection closed by peer",
        "  also: rank 2 on node-0: killed by SIGTERM",
    ]


@pytest.mark.parametrize(
    ("changes", "hinted"),
    [({"code": -9}, True), ({"code": -9, "oom": True}, False), ({"code": -11}, False), ({"code": 1}, False)],
)
def test_a_bare_sigkill_says_where_to_look(changes, hinted):
    """W06: nothing in a worker tells who killed it; the report names who does such things, and where they say so."""
    assert ("`dmesg`" in failure(**changes).text) is hinted


def test_who_ended_early_is_named_before_collateral_failures():
    """W02: a worker that ended with 0 while another was in a collective is the cause, if nobody else is."""
    lost = failure(rank=0, error_file=error_file(f"RuntimeError: {GLOO}Connection closed by peer"))
    record = ended(2, ended_well=(1,), failures=(lost,)).failure
    assert (record.code, record.collateral) == (0, True)
    assert record.text.splitlines()[0] == record.summary == f"rank 1 on node-0: {ENDED_EARLY}"
    assert record.text.splitlines()[1].startswith("rank 0 failed because of it, on node-0")
    assert [ended(2, ended_well=well).well for well in ((1,), (1, 0))] == [1, 1]
    own = failure(rank=0, error_file=error_file("ValueError: x"))
    assert ended(2, ended_well=(1,), failures=(own,)).failure.rank == 0
