"""What a training script does inside a worker: process groups over the given socket, multiprocessing, data loading."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest

from elasticrt.ipc.messages import ScriptDone
from elasticrt.ipc.proc import start_of
from elasticrt.settings import Command
from elasticrt.workers import worker_io
from elasticrt.workers.worker_io import GroupEnded, WorkerEnded, WorkerMessage
from tests.servers import wait_until

REDUCE = """
    import os, torch, torch.distributed as dist
    for n in range(2):
        dist.init_process_group("gloo")
        x = torch.tensor([float(dist.get_rank() + 1)])
        dist.all_reduce(x)
        print(n, x.item(), flush=True)
        dist.destroy_process_group()
    """


def test_a_group_meets_on_the_given_socket(warm, tmp_path):
    """W15: two workers reduce over the socket that was bound before they existed, and may initialise twice."""
    result = warm.run(REDUCE, tmp_path, workers=2)
    assert result.codes == {0: 0, 1: 0}, result.err
    assert result.out[0] == result.out[1] == "0 3.0\n1 3.0\n"


def test_a_group_of_exec_workers(cold, tmp_path):
    """Workers of their own interpreter bind MASTER_PORT themselves: the held socket is out of their way."""
    # `_exit`: torch's threads can keep an interpreter from ending. Once a rank took more than a minute here.
    body = REDUCE.replace("range(2)", "range(1)") + "os._exit(0)\n"
    result = cold.run(body, tmp_path, workers=2)
    assert result.codes == {0: 0, 1: 0}, result.err
    assert result.out[0] == result.out[1] == "0 3.0\n"


def test_a_stale_worker_never_joins(warm, tmp_path):
    """S4, W20: a worker with another generation's nonce finds nobody, although the address and the port are right."""
    body = """
        import datetime, os, sys, torch.distributed as dist
        rank = int(os.environ["RANK"])
        try:
            dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=2))
        except dist.DistError:  # Whoever gives up first; the other's store, or its only partner, is gone then.
            print("nobody", flush=True)
            raise
        print("joined", flush=True)
        """
    (tmp_path / "x.py").write_text(textwrap.dedent(body))
    # The group does not care whether the seats it is given belong together: here they do not.
    from elasticrt.ipc.env import WorkerEnv

    warm.generation += 1
    warm.run_dir = tmp_path / "run"
    listen = socket.create_server(("127.0.0.1", 0))
    port = listen.getsockname()[1]
    envs = [
        WorkerEnv(
            n, n, 2, 2, 0, 1, "127.0.0.1", port, 0, 3, "test", 1, warm.generation, nonce, "node-0", str(warm.run_dir)
        )
        for n, nonce in enumerate(("new", "old"))
    ]
    warm.group.start(warm.generation, envs, Command(("x.py",)), listen, warm.base_env, tmp_path)
    result = warm.finish(2)
    assert result.out == {0: "nobody\n", 1: "nobody\n"}, result.err
    assert result.codes == {0: 1, 1: 1}
    assert all(e.failure is not None and e.failure.collateral for e in result.ended.values())


def test_a_script_with_an_address_of_its_own(warm, tmp_path):
    """A script that overwrites MASTER_ADDR and MASTER_PORT, as the DDP tutorial does, gets torch's own rendezvous."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    body = f"""
        import os, torch.distributed as dist
        os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "localhost", "{port}"
        dist.init_process_group("gloo")
        print(dist.get_world_size())
        store = dist.distributed_c10d._get_default_store()
        while hasattr(store, "underlying_store"):
            store = store.underlying_store
        print(store.port == {port})
        dist.barrier()  # A rank that ends breaks the connections that the other may still be making.
        """
    result = warm.run(body, tmp_path, workers=2)
    assert result.out == {0: "2\nTrue\n", 1: "2\nTrue\n"}, result.err


def test_rank_0_lingers(warm, tmp_path, is_alive):
    """Rank 0's store serves slower ranks after its script and its exit hooks have ended: those have no limit then."""
    body = """
        import atexit, os, time
        import torch.distributed as dist
        dist.init_process_group("gloo")
        atexit.register(print, "hook")
        store = dist.distributed_c10d._get_default_store()
        if dist.get_rank() == 1:
            store.set("connected", "")
            while not os.path.exists("go"):
                time.sleep(0.01)
            store.set("late", "word")
        store.wait(["connected"])
        print("end")
        """
    (tmp_path / "x.py").write_text(textwrap.dedent(body))
    warm.start(Command(("x.py",)), tmp_path, 2)
    pids = warm.pids(2)
    seen = []
    ended = warm.wait(WorkerEnded, seen=seen)
    assert (ended.rank, ended.code, ended.failure) == (0, 0, None)
    assert [e.message for e in seen if isinstance(e, WorkerMessage)] == [ScriptDone(0)]
    log = tmp_path / "run" / "logs" / f"generation-{warm.generation}"
    assert is_alive(pids[0])
    assert (log / "rank-0.node-0.out").read_text() == "end\nhook\n"
    (tmp_path / "go").write_text("")
    ended = warm.wait(WorkerEnded)
    assert (ended.rank, ended.code) == (1, 0), (log / "rank-1.node-0.err").read_text()
    warm.group.release(warm.generation)
    seen = []
    warm.wait(GroupEnded, seen=seen)
    assert not [e for e in seen if isinstance(e, WorkerEnded)]


def test_a_worker_that_dies_while_seats_are_given_out_is_not_the_last(warm, tmp_path):
    """W08: it has its new seat, its neighbour has none yet: the neighbour's group has not ended with it."""
    (tmp_path / "x.py").write_text("import time; time.sleep(60)")
    warm.start(Command(("x.py",)), tmp_path, 2)
    pids, before, seen = warm.pids(2), warm.generation, []
    seats = [replace(warm.group._worker(rank, before).env, generation=before + 1) for rank in range(2)]
    with warm.group.seating:
        assert warm.group.reseat(0, before, seats[0], None)
        os.kill(pids[0], signal.SIGKILL)
        wait_until(lambda: not start_of(pids[0]), "its parent has reaped it")
        assert warm.group.reseat(1, before, seats[1], None)
    assert warm.wait(WorkerEnded, seen=seen).generation == before + 1
    os.kill(pids[1], signal.SIGKILL)
    warm.generation += 1
    warm.wait(WorkerEnded, seen=seen)
    assert not [event for event in seen if isinstance(event, GroupEnded)]
    assert warm.wait(GroupEnded).generation == before + 1


def test_a_worker_that_is_dying_when_the_group_is_ended(warm, tmp_path):
    """W02: somebody has killed it, and its end is told so, though the agent has sent it a signal as well."""
    script = tmp_path / "script.py"
    script.write_text("import time; time.sleep(60)")
    warm.start(Command((str(script),)), tmp_path, 2)
    pids = warm.pids(2)
    os.kill(pids[1], signal.SIGKILL)
    warm.group.kill(warm.generation)
    ended = warm.finish(2).ended
    assert ended[0].failure is None
    assert ended[1].failure is not None and ended[1].failure.summary.endswith("killed by SIGKILL")


def test_connections_outlive_a_short_script_of_rank_0(warm, tmp_path):
    """Peers that are still connecting get a second; then those that wait for rank 0 find it gone."""
    body = """
        import os, socket, time
        if os.environ["RANK"] == "0":
            listen = socket.create_server(("127.0.0.1", 0))
            with open("port.new", "w") as file:
                file.write(str(listen.getsockname()[1]))
            os.rename("port.new", "port")
            connection, _ = listen.accept()
            os.dup(connection.fileno())  # As a library holds it, which nobody closes.
            connection.sendall(str(time.monotonic()).encode())
        else:
            while not os.path.exists("port"):
                time.sleep(0.01)
            connection = socket.create_connection(("127.0.0.1", int(open("port").read())))
            text = b""
            while data := connection.recv(100):
                text += data
            print(time.monotonic() - float(text) >= 1.0)
        """
    result = warm.run(body, tmp_path, workers=2)
    assert result.out == {0: "", 1: "True\n"}, result.err


@pytest.mark.parametrize("end", ["pass", "sys.exit(0)", "sys.exit(5)", "raise ValueError('a fork of mine')"])
def test_a_fork_of_the_script_does_not_speak_for_the_worker(warm, tmp_path, end):
    """A child by `os.fork` that ends like a program neither lingers nor says that rank 0 is done, or why it failed."""
    body = f"""
        import os, sys
        child = os.fork()
        if child == 0:
            {end}
        else:
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            print(code, os.path.exists(os.environ["TORCHELASTIC_ERROR_FILE"]))
            raise RuntimeError("the worker's own")
        """
    result = warm.run(body, tmp_path, workers=2)
    code = 5 if "5" in end else int("raise" in end)
    assert result.out == {0: f"{code} False\n", 1: f"{code} False\n"}
    for rank in (0, 1):
        failure = result.ended[rank].failure
        assert failure is not None
        assert failure.code == 1
        assert failure.summary.endswith("the worker's own")
    assert not [e for e in result.events if isinstance(e, WorkerMessage)]


def test_a_lingering_worker_ends_with_its_agent(own, tmp_path, is_alive, until):
    """Nobody lingers for an agent that is gone."""
    (tmp_path / "x.py").write_text("import os, time\nwhile not os.path.exists('go'): time.sleep(0.01)")
    own.start(Command(("x.py",)), tmp_path, 2)
    pids = own.pids(2)
    (tmp_path / "go").write_text("")
    for _ in range(2):
        own.wait(WorkerEnded)
    own.parent.close()
    until(lambda: not any(map(is_alive, pids.values())), "both workers are gone")
    own.wait(GroupEnded)


def test_a_peer_that_dies_is_the_cause(warm, tmp_path):
    """W02: rank 1 is killed by a signal: that is the cause, and rank 0's failed collective is collateral."""
    body = """
        import os, signal, torch, torch.distributed as dist
        dist.init_process_group("gloo")
        x = torch.ones(1)
        dist.all_reduce(x)
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(x)
        """
    result = warm.run(body, tmp_path, workers=2)
    first, second = result.ended[0].failure, result.ended[1].failure
    assert first is not None
    assert second is not None
    assert (first.collateral, second.collateral) == (True, False), first
    assert second.summary.endswith("killed by SIGKILL")


MULTIPROCESSING = """
    import multiprocessing as mp, os, sys
    from concurrent.futures import ProcessPoolExecutor

    def square(x):
        return x * x

    def name(queue):
        queue.put((__name__, mp.current_process().name, os.path.basename(sys.argv[0])))

    if __name__ == "__main__":
        print(mp.current_process().name, mp.parent_process())
        for method in ("fork", "spawn"):
            context = mp.get_context(method)
            queue = context.Queue()
            process = context.Process(target=name, args=(queue,))
            process.start()
            print(method, *queue.get(timeout=60))
            process.join()
            print(process.exitcode)
            with ProcessPoolExecutor(2, mp_context=context) as pool:
                print(list(pool.map(square, range(4))))
    """


@pytest.mark.parametrize("as_module", [False, True])
def test_multiprocessing(warm, tmp_path, as_module):
    """Processes by fork and spawn, and pools, find the script's own main module again, as under plain Python."""
    (tmp_path / "script.py").write_text(textwrap.dedent(MULTIPROCESSING))
    warm.start(Command(("script",), "module") if as_module else Command(("script.py",)), tmp_path)
    result = warm.finish()
    command = [sys.executable, "-u", *(["-m", "script"] if as_module else ["script.py"])]
    expected = subprocess.run(
        command, cwd=tmp_path, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True, timeout=60
    )
    assert result.codes[0] == 0, result.err
    assert "spawn __mp_main__" in expected.stdout
    assert (result.out[0], result.err[0]) == (expected.stdout, expected.stderr)


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_data_loading(warm, tmp_path, method):
    """DataLoader workers of either kind deliver every batch."""
    body = f"""
        import torch
        from torch.utils.data import DataLoader, TensorDataset
        if __name__ == "__main__":
            data = TensorDataset(torch.arange(8))
            loader = DataLoader(data, batch_size=2, num_workers=2, multiprocessing_context="{method}")
            for epoch in range({2 if method == "fork" else 1}):
                print([batch[0].tolist() for batch in loader])
        """
    result = warm.run(body, tmp_path)
    assert result.out[0] == "[[0, 1], [2, 3], [4, 5], [6, 7]]\n" * (2 if method == "fork" else 1), result.err
    assert result.codes == {0: 0}


def test_two_workers_have_different_keys(warm, tmp_path):
    """Each worker has multiprocessing's secret for itself, as programs of their own have."""
    result = warm.run(
        "import multiprocessing as m; print(bytes(m.current_process().authkey).hex())", tmp_path, workers=2
    )
    assert len({*result.out.values()}) == 2


def test_a_failure_is_told_while_the_kernel_still_ends_the_process(warm, tmp_path, monkeypatch):
    """It takes long to give back a GPU's memory; here a second thread stays, when the first has ended with a code."""
    monkeypatch.setattr(worker_io, "_HAS_GPUS", True)
    body = """
        import ctypes, os, platform, stat, sys, threading, time
        def stay():
            while ") Z " not in open(f"/proc/self/task/{os.getpid()}/stat").read():
                time.sleep(0.01)
            for fd in map(int, os.listdir("/proc/thread-self/fd")):
                if os.path.exists(f"/proc/thread-self/fd/{fd}") and stat.S_ISSOCK(os.fstat(fd).st_mode):
                    os.close(fd)
            while not os.path.exists("go"):
                time.sleep(0.01)
            os._exit(3)
        threading.Thread(target=stay).start()
        print("last words", file=sys.stderr, flush=True)
        ctypes.CDLL(None).syscall({"x86_64": 60, "aarch64": 93}[platform.machine()], 3)
        """
    (tmp_path / "script.py").write_text(textwrap.dedent(body))
    warm.start(Command((str(tmp_path / "script.py"),)), tmp_path)
    pid = warm.pids()[0]
    ended = warm.wait(WorkerEnded)
    assert ended.code == ended.failure.code == 3
    assert "last words" in ended.failure.text
    assert Path(f"/proc/{pid}").exists()
    assert warm.group.pids(warm.generation) == {0: pid}
    (tmp_path / "go").touch()
    seen = []
    warm.wait(GroupEnded, seen=seen)
    assert not [each for each in seen if isinstance(each, WorkerEnded)], "it is told once"
