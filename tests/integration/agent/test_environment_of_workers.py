"""What workers are told, and what torchrun's flags do to them: real agents, real workers."""

from __future__ import annotations

import json
import os
import re
import secrets
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster import Cluster
from tests.servers import free_port

TELLS = """
import json, os, sys, time
from pathlib import Path
import torch, torch.distributed as dist

told = {name: os.environ[name] for name in os.environ if name.startswith(("TORCH", "ELASTICRT_"))}
for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_NAME",
             "ROLE_RANK", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS"):
    told[name] = os.environ[name]
told["launched"] = dist.is_torchelastic_launched()
sums = []
generation, rank, size = (int(os.environ[name]) for name in ("ELASTICRT_GENERATION", "RANK", "WORLD_SIZE"))
for address in (None, ("localhost", sys.argv[1 + generation])):
    if address:  # As the DDP tutorial's setup() has it.
        os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = address
    dist.init_process_group("gloo", rank=rank, world_size=size)
    total = torch.ones(1)
    dist.all_reduce(total)
    sums.append(int(total))
    dist.destroy_process_group()
Path(sys.argv[1], f"{generation}-{rank}.json").write_text(json.dumps({**told, "sums": sums}))
if generation == 1:
    while len(list(Path(sys.argv[1]).glob("1-*.json"))) < size:
        time.sleep(0.02)
    if rank == 3:
        raise ValueError("the tide is high")
    time.sleep(60)
"""

SAME_ON_ALL = """
WORLD_SIZE LOCAL_WORLD_SIZE GROUP_WORLD_SIZE ROLE_WORLD_SIZE ROLE_NAME MASTER_ADDR MASTER_PORT OMP_NUM_THREADS
TORCHELASTIC_RESTART_COUNT TORCHELASTIC_MAX_RESTARTS TORCHELASTIC_RUN_ID TORCHELASTIC_USE_AGENT_STORE
TORCHELASTIC_SIGNALS_TO_HANDLE TORCH_NCCL_ASYNC_ERROR_HANDLING ELASTICRT_GENERATION ELASTICRT_RUN_DIR launched sums
"""


def test_the_environment_is_the_same_on_all_nodes_and_after_a_restart(tmp_path: Path) -> None:
    """COMPAT 5.1, 5.2: all of torchrun's variables, the same on all nodes; counts are the run's; ports are fresh.

    The nodes meet at --master-addr and --master-port, and sit as --node-rank says. A script that overwrites MASTER_ADDR
    and MASTER_PORT gets a group of its own. What an earlier generation has written down stays.
    """
    told, script = tmp_path / "told", tmp_path / "tells.py"
    told.mkdir()
    script.write_text(TELLS)
    meeting = str(free_port())
    options = ["--nnodes", "2", "--nproc-per-node", "2", "--master-addr", "127.0.0.1", "--master-port", meeting]
    words = [str(script), str(told), str(free_port()), str(free_port())]
    with Cluster(tmp_path, f"env-{secrets.token_hex(4)}", options, words) as run:
        run.start("n0", "--node-rank", "1")
        run.start("n1", "--node-rank", "0")
        assert run.ended() == {"n0": 0, "n1": 0}, run.story()
        assert {event["etcd"].partition(":")[0] for event in run.events("agent_started")} == {"unix"}
        causes = [event["cause"] for event in run.events("generation") if event["number"] == 2]
    assert all("ValueError: the tide is high" in cause for cause in causes), causes
    said = {
        generation: [json.loads((told / f"{generation}-{rank}.json").read_text()) for rank in range(4)]
        for generation in (1, 2)
    }
    for generation, ranks in said.items():
        same = {name: ranks[0][name] for name in SAME_ON_ALL.split()}
        for rank, env in enumerate(ranks):
            assert {name: env[name] for name in SAME_ON_ALL.split()} == same
            assert (env["RANK"], env["ROLE_RANK"]) == (str(rank), str(rank))
            assert (env["LOCAL_RANK"], env["GROUP_RANK"]) == (str(rank % 2), str(rank // 2))
            assert env["ELASTICRT_NODE"] == ("n1", "n0")[rank // 2]
            assert env["sums"] == [4, 4]
            assert env["TORCHELASTIC_ERROR_FILE"].endswith(
                f"generation-{generation}/rank-{rank}.n{1 - rank // 2}.start-{generation}.error.json"
            )
        first = ranks[0]
        assert (first["WORLD_SIZE"], first["LOCAL_WORLD_SIZE"], first["GROUP_WORLD_SIZE"]) == ("4", "2", "2")
        assert (first["TORCHELASTIC_RESTART_COUNT"], first["ELASTICRT_GENERATION"]) == (
            str(generation - 1),
            str(generation),
        )
        assert (first["launched"], first["TORCHELASTIC_USE_AGENT_STORE"]) == (True, "False")
        assert (first["TORCH_NCCL_ASYNC_ERROR_HANDLING"], first["OMP_NUM_THREADS"]) == ("1", "1")
        assert first["TORCHELASTIC_SIGNALS_TO_HANDLE"] == "SIGTERM,SIGINT,SIGHUP,SIGQUIT"
        assert first["ELASTICRT_RUN_DIR"] == str(run.run_dir)
    assert said[1][0]["MASTER_PORT"] != said[2][0]["MASTER_PORT"]
    logs = run.run_dir / "logs" / "generation-1"
    assert "ValueError: the tide is high" in (logs / "rank-3.n0.err").read_text()
    message = json.loads((logs / "rank-3.n0.start-1.error.json").read_text())["message"]
    assert message["message"] == "ValueError: the tide is high"
    assert "raise ValueError" in message["extraInfo"]["py_callstack"]


SHOWS = """
import json, os, sys
told = [os.environ[name] for name in ("RANK", "LOCAL_RANK", "ROLE_NAME", "TORCHELASTIC_RUN_ID")]
told += [os.environ.get("CUDA_VISIBLE_DEVICES"), sys.argv[1:]]
print("shown", json.dumps(told), flush=True)
print("another line", flush=True)
"""
ARGUMENTS = ["key=v", "+k=v", "-m", "--multirun", "--", "--role", "x"]


def _show(directory: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "elasticrt", "run", "--nproc-per-node", "2", *options]
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "4,5"}
    command += ["shows.py", *ARGUMENTS]
    done = subprocess.run(
        command,
        cwd=directory,
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done


def _told(text: str) -> list[list[object]]:
    return sorted(json.loads(found) for found in re.findall(r"shown (\[.*\])", text))


def test_flags_of_one_node_in_workers_and_on_the_console(tmp_path: Path) -> None:
    """Flag by flag: what workers see and the console shows is another thing without it; arguments stay verbatim."""
    (tmp_path / "shows.py").write_text(SHOWS)
    plain = _show(tmp_path)
    run_id = json.loads(re.search(r"\[rank 0\] shown (\[.*\])", plain.stdout)[1])[3]
    assert run_id.count("-") == 2
    assert _told(plain.stdout) == [[str(r), str(r), "default", run_id, "4,5", ARGUMENTS] for r in (0, 1)]
    assert len(re.findall(r"^\[rank [01]\] another line$", plain.stdout, re.MULTILINE)) == 2
    assert '"event"' not in plain.stderr
    assert "--monitor-interval" not in plain.stderr

    words = "--rdzv_id calm-fox --role trainer --log_dir logs -r 1:3 -t 0:3"
    words += " --monitor-interval 5 --virtual-local-rank"
    done = _show(tmp_path, *words.split())
    lines = done.stdout.splitlines()
    assert len(lines) == 2
    assert lines[1] == "[trainer0]:another line"
    assert "--monitor-interval has no effect" in done.stderr
    logs = tmp_path / "logs" / "calm-fox" / "logs" / "generation-1"
    (other,) = logs.glob("rank-1.*.out")
    told = [_told(lines[0])[0], _told(other.read_text())[0]]
    assert [env[:5] for env in told] == [["0", "0", "trainer", "calm-fox", "4"], ["1", "0", "trainer", "calm-fox", "5"]]
    assert [env[5] for env in told] == [ARGUMENTS, ARGUMENTS]


STUBBORN = """
import os, signal, sys, time
from pathlib import Path

directory, generation, rank = Path(sys.argv[1]), os.environ["ELASTICRT_GENERATION"], os.environ["RANK"]

def save(number, _):
    time.sleep(0.3)
    (directory / f"saved-{rank}-{signal.Signals(number).name}").touch()
    sys.exit(0)

signal.signal(signal.SIGTERM, save)
signal.signal(signal.SIGUSR1, save)
(directory / f"up-{generation}-{rank}").touch()
if generation == "1":
    while len(list(directory.glob("up-1-*"))) < int(os.environ["WORLD_SIZE"]):
        time.sleep(0.01)
    if rank == "1":
        raise ValueError("enough")
    time.sleep(60)
"""


def _stubborn(tmp_path: Path, workers: int, *options: str) -> Cluster:
    script = tmp_path / "stubborn.py"
    script.write_text(STUBBORN)
    given = ["--nproc-per-node", str(workers), *options]
    return Cluster(tmp_path, f"stubborn-{secrets.token_hex(4)}", given, [str(script), str(tmp_path)])


@pytest.mark.parametrize(
    ("options", "saved"),
    [
        pytest.param(["--shutdown-timeout", "20"], ["saved-0-SIGTERM", "saved-2-SIGTERM"], id="given"),
        pytest.param([], [], id="left-out"),
    ],
)
def test_a_restart_grants_the_shutdown_timeout(tmp_path: Path, options: list[str], saved: list[str]) -> None:
    """COMPAT 0.18: with --shutdown-timeout each worker that a restart ends may finish what it does on SIGTERM."""
    with _stubborn(tmp_path, 3, *options) as run:
        run.start("n0")
        assert run.ended() == {"n0": 0}, run.story()
        assert sorted(path.name for path in tmp_path.glob("saved-*")) == saved


def test_a_signal_of_ones_own_makes_the_node_leave_and_reaches_the_workers(tmp_path: Path) -> None:
    """--signals-to-handle: SIGUSR1, as SLURM sends it before the end: the node leaves, workers get that very one."""
    with _stubborn(tmp_path, 1, "--signals-to-handle", "SIGTERM,SIGUSR1") as run:
        agent = run.start("n0")
        run.wait("the worker is up", (tmp_path / "up-1-0").exists)
        agent.process.send_signal(signal.SIGUSR1)
        assert run.ended() == {"n0": 143}, run.story()
        assert (tmp_path / "saved-0-SIGUSR1").exists()


RECORDS = """
import os, sys, time
from torch.distributed.elastic.multiprocessing.errors import record

def deep():
    raise KeyError("no such shell")

@record
def main():
    deep()

if os.environ["RANK"] == "0":
    time.sleep(60)
main()
"""


def test_torchs_own_record_is_understood(tmp_path: Path) -> None:
    """COMPAT 5.1: `@record` writes to TORCHELASTIC_ERROR_FILE; the report has what it says, and the traceback."""
    (tmp_path / "records.py").write_text(RECORDS)
    words = ["--nproc-per-node", "2", "--max-restarts", "0", "--log-dir", "run", "records.py"]
    command = [sys.executable, "-m", "elasticrt", "run", *words]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    report = done.stderr[done.stderr.index("rank 1 failed first") :]
    assert "exit code 1: KeyError: 'no such shell'" in report
    assert re.search(r"\|   File .*records\.py.*, line \d+, in deep", report)
    (file,) = (tmp_path / "run").glob("*/logs/generation-1/rank-1.*.error.json")
    assert set(json.loads(file.read_text())["message"]["extraInfo"]) >= {"py_callstack", "timestamp"}
