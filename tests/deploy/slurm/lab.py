"""A SLURM of this machine's own: munged, slurmctld and a slurmd per node, all in one directory, as whoever starts it.

    with Lab(directory) as lab:
        job = lab.submit(ARRAY, "train.py", "--array=0-1")
        lab.wait_for(job, "COMPLETED")

The nodes are called n1, n2 and n3. Without a network they are one machine with three names, which needs no privileges.
With one (`tests.netns`) each is a network namespace, so that cables can be cut. Times are short: a silent node is down
after about 10 s, a requeued job starts again after about 5 s, and SIGKILL follows SIGTERM after 15 s.
"""

from __future__ import annotations

import getpass
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType

from tests.netns import Network
from tests.servers import free_port

REPOSITORY = Path(__file__).resolve().parents[3]
SCRIPTS = REPOSITORY / "deploy" / "slurm"
ARRAY, ALLOC, ETCD = (SCRIPTS / f"{name}.sbatch" for name in ("elastic_array", "elastic_alloc", "etcd"))

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scancel", "scontrol", "squeue", "sinfo")
PACKAGES = "slurm-wlm slurm-wlm-basic-plugins munge"

NODES = ("n1", "n2", "n3")
KILL_WAIT_S = 15
UP_S_MAX = 30.0

AS_HOST = ["unshare", "--uts", "--mount", "--propagation", "slave", "sh", "-c"]
AS_HOST += ['hostname "$0" && mount --bind "$1" /etc/hosts && shift && exec "$@"']
"""Runs a command as a machine of its own name, on which the names of the others resolve."""

CONF = """
ClusterName=lab
SlurmctldHost={host}({address})
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={base}/munge.socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={base}/state
SlurmdSpoolDir={base}/spool.%n
SlurmctldPidFile={base}/slurmctld.pid
SlurmdPidFile={base}/slurmd.%n.pid
SlurmctldLogFile={base}/slurmctld.log
SlurmdLogFile={base}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0,sched_min_interval=100000
ReturnToService=2
SlurmdTimeout=10
MessageTimeout=5
TCPTimeout=2
MinJobAge=3600
KillWait={kill_wait}
JobRequeue=1
SlurmdParameters=config_overrides
{nodes}
PartitionName=debug Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def missing() -> str:
    """Why there can be no SLURM here; "" when there can."""
    absent = [name for name in PROGRAMS if shutil.which(name, path=_path()) is None]
    return f"no {', '.join(absent)}: apt-get install --no-install-recommends {PACKAGES}" if absent else ""


def _path() -> str:
    # Our own `elasticrt` first, as in an environment that was activated before sbatch; SLURM itself is often in sbin.
    return f"{Path(sys.executable).parent}:{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"


class Lab:
    """A running SLURM. Use it as a context manager: whatever happens, no process of it is left."""

    def __init__(self, directory: Path, network: Network | None = None, nodes: tuple[str, ...] = NODES) -> None:
        self.directory = directory
        self.network = network
        self.nodes = nodes
        self.conf = directory / "slurm.conf"
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    @property
    def env(self) -> dict[str, str]:
        """What SLURM's commands need. Everything that a job starts carries SLURM_CONF, too: this is how it is found."""
        return {**os.environ, "PATH": _path(), "SLURM_CONF": str(self.conf)}

    def __enter__(self) -> Lab:
        try:
            self._start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _start(self) -> None:
        base, host = self.directory, socket.gethostname().partition(".")[0]
        base.chmod(0o700)
        key = base / "munge.key"
        key.touch(0o600)
        key.write_bytes(secrets.token_bytes(1024))
        for name in ("state", *(f"spool.{node}" for node in self.nodes)):
            (base / name).mkdir()
        lines, names = [], ["127.0.0.1 localhost"]
        for name in self.nodes:
            address, hostname = "127.0.0.1", host
            if self.network is not None:
                address, hostname = self.network.nodes[name].address, name
            where = f"NodeName={name} NodeHostname={hostname} NodeAddr={address} Port={free_port()}"
            lines.append(f"{where} CPUs=2 RealMemory=4000")
            names.append(f"{address} {name}")
        (base / "hosts").write_text("\n".join(names) + "\n")
        self.conf.write_text(
            CONF.format(
                host=host,
                address="127.0.0.1" if self.network is None else self.network.host,
                port=free_port(),
                user=getpass.getuser(),
                base=base,
                kill_wait=KILL_WAIT_S,
                nodes="\n".join(lines),
            )
        )
        munged = ["munged", "--foreground", "--force", f"--key-file={key}", f"--socket={base}/munge.socket"]
        munged += [f"--pid-file={base}/munged.pid", f"--log-file={base}/munged.log", f"--seed-file={base}/munge.seed"]
        self._launch("munged", munged)
        self.wait_until("munged serves", (base / "munge.socket").exists)
        self._launch("slurmctld", ["slurmctld", "-D", "-c", "-f", str(self.conf)])
        for name in self.nodes:
            self._start_node(name)
        self.wait_until("all nodes are idle", lambda: self.node_states() == dict.fromkeys(self.nodes, "idle"))

    def _start_node(self, name: str) -> None:
        command = ["slurmd", "-D", "-N", name, "-f", str(self.conf)]
        if self.network is not None:
            command = self.network.nodes[name].command([*AS_HOST, name, str(self.directory / "hosts"), *command])
        self._launch(name, command)

    def _launch(self, name: str, command: list[str]) -> None:
        with (self.directory / f"{name}.out").open("ab") as output:
            self._processes[name] = subprocess.Popen(
                command, env=self.env, stdin=subprocess.DEVNULL, stdout=output, stderr=output, cwd=self.directory
            )

    def stop(self) -> None:
        """End all jobs, then the servers, by pid; what is left of a job (its node may be lost) is killed."""
        for name in reversed(self._processes):
            self._processes[name].terminate()
        for process in self._processes.values():
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(10)
        self.wait_until("its processes are gone", lambda: not self._kill_rest())

    def _kill_rest(self) -> list[int]:
        """SIGKILL to everything that has this SLURM's configuration in its environment; what there was."""
        mark, found = f"SLURM_CONF={self.conf}".encode(), []
        for path in Path("/proc").glob("[0-9]*/environ"):
            try:
                if mark in path.read_bytes().split(b"\0") and int(path.parent.name) != os.getpid():
                    found.append(int(path.parent.name))
                    os.kill(found[-1], signal.SIGKILL)
            except OSError:
                continue  # It has ended.
        return found

    def end_jobs(self) -> None:
        """End every job, in whatever state, bring all nodes back, and see the queue empty."""
        for job in self.run("squeue", "--noheader", "--format=%A").split():
            self.run("scancel", job, check=False)
        for name, state in self.node_states().items():
            if state.startswith(("down", "drain")):
                self.run("scontrol", "update", f"nodename={name}", "state=resume", check=False)
        self.wait_until("the queue is empty", lambda: not self.run("squeue", "--noheader"), 3 * KILL_WAIT_S)
        self.wait_until("all nodes are idle", lambda: set(self.node_states().values()) == {"idle"}, 60)

    # What users type.

    def run(self, *command: str, cwd: Path | None = None, check: bool = True, **env: str) -> str:
        """The output of one of SLURM's commands."""
        done = subprocess.run(
            command, env={**self.env, **env}, cwd=cwd, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0 or not check, f"{' '.join(command)}: {done.stderr.strip()}"
        return done.stdout.strip()

    def submit(self, script: Path, *words: str, options: tuple[str, ...] = (), cwd: Path, **env: str) -> str:
        """`sbatch`: the job's number."""
        return self.run("sbatch", "--parsable", *options, str(script), *words, cwd=cwd, **env)

    def jobs(self, job: str) -> dict[str, dict[str, str]]:
        """What `scontrol show job` says of a job, or of each element of an array: by number, or number_index."""
        text = self.run("scontrol", "--oneliner", "show", "job", job, check=False)
        found = {}
        for line in text.splitlines():
            fields = dict(re.findall(r"(\S+?)=(\S*)", line))
            index = f"_{fields['ArrayTaskId']}" if "ArrayTaskId" in fields else ""
            found[f"{fields.get('ArrayJobId', fields['JobId'])}{index}"] = fields
        return found

    def states(self, job: str) -> dict[str, str]:
        """The state of a job, or of each element of an array."""
        return {name: fields["JobState"] for name, fields in self.jobs(job).items()}

    def wait_for_state(self, job: str, *states: str, timeout_s: float = 60.0) -> None:
        """Wait until the job, or all elements of the array, are in one of these states."""
        self.wait_until(f"{job} is {states}", lambda: set(self.states(job).values()) <= set(states), timeout_s)

    def node_states(self) -> dict[str, str]:
        """The state of each node, as `sinfo` has it."""
        text = self.run("sinfo", "--noheader", "--Node", "--format=%N %t", check=False)
        return dict(line.split() for line in text.splitlines())

    def wait_until(self, what: str, condition: Callable[[], object], timeout_s: float = UP_S_MAX) -> float:
        """Poll until it is true; the seconds that took. AssertionError with the logs when it takes longer."""
        begun = time.monotonic()
        while not condition():
            assert time.monotonic() - begun < timeout_s, f"not within {timeout_s:g} s: {what}\n{self.logs()}"
            time.sleep(0.05)
        return time.monotonic() - begun

    def logs(self) -> str:
        """The ends of all logs, for a failing test."""
        parts = [self.run("squeue", check=False), self.run("sinfo", check=False)]
        for path in sorted(self.directory.glob("*.log")):
            parts.append(f"--- {path.name}\n{path.read_text(errors='replace')[-1500:]}")
        return "\n".join(parts)


def variables(**more: str) -> Mapping[str, str]:
    """The environment of agents in tests: newcomers get in at once."""
    return {"ELASTICRT_JOIN": "now", "OMP_NUM_THREADS": "1", **more}
