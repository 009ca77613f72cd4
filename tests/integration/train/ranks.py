"""Run functions in process groups of several sizes, one after the other, from one interpreter.

    python ranks.py DIRECTORY SECONDS_PER_PHASE '[[world_size, "module.function", {arguments}], ...]'

Modules lie in this folder; a function without one is of `cases.py`.

Each rank is a fork of a process that has torch imported and no thread of its own. What a case returns lies afterwards,
as JSON, in DIRECTORY/<phase>-<rank>.json.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[3]
TIMEOUT_S = 100


def run(directory: Path, *phases: tuple[int, str, dict[str, Any]], timeout_s: int = TIMEOUT_S) -> list[list[Any]]:
    """For each phase (world size, case, arguments) what the ranks returned; fails with their output.

    A phase that hangs ends after `timeout_s`. How many phases there are does not matter, nor how fast they go.
    """
    done = subprocess.run(
        [sys.executable, __file__, str(directory), str(timeout_s), json.dumps(phases)],
        capture_output=True,
        text=True,
        timeout=timeout_s * (1 + len(phases)),
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    results = []
    for number, (world_size, _, _) in enumerate(phases):
        paths = [directory / f"{number}-{rank}.json" for rank in range(world_size)]
        results.append([json.loads(path.read_text()) if path.exists() else None for path in paths])
    return results


def main(directory: Path, timeout_s: int, phases: list[tuple[int, str, dict[str, Any]]]) -> int:
    """Each phase's ranks as forks; a rank that fails makes the others fail, by its closed connections."""
    pids: list[int] = []
    signal.signal(signal.SIGALRM, lambda *_: [os.kill(pid, signal.SIGKILL) for pid in pids])
    import torch

    found = {name: _case(name) for _, name, _ in phases}
    importlib.import_module("torch._dynamo")  # Optimizers import it late; here once for all ranks.
    torch.set_num_threads(1)
    for number, (world_size, name, arguments) in enumerate(phases):
        signal.alarm(timeout_s)  # Forks have none.
        for rank in range(world_size):
            pid = os.fork()
            if pid == 0:
                os._exit(be_rank(directory, number, (rank, world_size), found[name], arguments))
            pids.append(pid)
        codes = []
        while pids:
            codes.append(os.waitstatus_to_exitcode(os.waitpid(pids[0], 0)[1]))
            del pids[0]
        if any(codes):
            late = "" if signal.alarm(0) else f", killed after {timeout_s} s"
            print(f"phase {number} ({name}): exit codes {codes}{late}")
            return 1
    return 0


def _case(name: str) -> Any:
    module, _, function = name.rpartition(".")
    return getattr(importlib.import_module(module or "cases"), function)


def be_rank(directory: Path, number: int, place: tuple[int, int], case: Any, arguments: dict[str, Any]) -> int:
    """One rank's whole life."""
    import torch.distributed as dist

    rank, world_size = place
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_WORLD_SIZE=str(world_size)
    )
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    try:
        store = dist.FileStore(str(directory / f"store-{number}"), world_size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
        result = case(directory, **arguments)
        (directory / f"{number}-{rank}.json").write_text(json.dumps(result))
        dist.barrier()
    except BaseException:  # noqa: BLE001  The top of a process: shown, and told by the exit code.
        traceback.print_exc()
        return 1
    else:
        return 0
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3])))
