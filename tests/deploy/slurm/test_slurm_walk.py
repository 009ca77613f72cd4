"""The walk-through of deploy/slurm/README.md, typed as it stands there."""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path

import pytest

from tests.deploy.slurm import lab as lab_module
from tests.deploy.slurm.lab import REPOSITORY, SCRIPTS, Lab
from tests.deploy.slurm.training import Training
from tests.servers import free_port

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

END = "that was all of it"


class Shell:
    """A bash that is typed into, as on a login node. Use it as a context manager."""

    def __init__(self, lab: Lab, home: Path) -> None:
        self.output = home / "typed.out"
        env = {**lab.env, "HOME": str(home), "ETCD_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
        with self.output.open("wb") as sink:
            self._bash = subprocess.Popen(
                ["bash", "--norc", "-eu"], stdin=subprocess.PIPE, stdout=sink, stderr=sink, env=env, cwd=REPOSITORY
            )

    def __enter__(self) -> Shell:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._bash.stdin is not None
        self._bash.stdin.close()
        try:
            self._bash.wait(10)
        except subprocess.TimeoutExpired:
            self._bash.kill()
            self._bash.wait(10)

    def type(self, lab: Lab, block: str) -> str:
        """Type some lines, and wait until they have been done; all output so far."""
        assert self._bash.stdin is not None
        done = self.output.read_text().count(END)
        self._bash.stdin.write(f"{block}\necho {END}\n".encode())
        self._bash.stdin.flush()
        lab.wait_until(f"done: {block}", lambda: self.output.read_text().count(END) > done or self._bash.poll(), 60)
        assert self._bash.poll() is None, f"{block}\n{self.output.read_text()}"
        return self.output.read_text()


def blocks() -> list[str]:
    """What the page tells people to type, in order."""
    return re.findall(r"^```bash\n(.*?)^```$", (SCRIPTS / "README.md").read_text(), re.MULTILINE | re.DOTALL)


def test_the_walk_through(tmp_path: Path, session_mark: object) -> None:
    """What the page tells people to type works as it stands, and does what it says."""
    del session_mark
    reason = lab_module.missing()
    if reason:
        pytest.skip(reason)
    copy, etcd, start, grow, take, end = blocks()
    directory = tempfile.TemporaryDirectory(prefix="slurm-")
    with directory as base, Lab(Path(base), nodes=("n1", "n2", "n3", "n4")) as lab, Shell(lab, tmp_path) as shell:
        training = Training(lab, tmp_path / "first")

        def nodes(count: int) -> bool:
            newest = [event for event in training.events("generation") if event["number"] == training.number()]
            stepped = [event for event in training.events("first_step") if event["generation"] == training.number()]
            return bool(newest) and len(newest[0]["nodes"]) == count == len(stepped)

        shell.type(lab, copy)
        shell.type(lab, etcd)
        shell.type(lab, start)
        training.wait("both nodes", lambda: nodes(2), 120)
        assert "2 nodes, 2 workers" in shell.type(lab, grow)
        training.wait("the third", lambda: nodes(3), 120)
        number = training.number()
        shell.type(lab, take)
        training.wait("one node is left", lambda: nodes(1) and training.number() > number, 120)
        training.wait("the requeued one is back", lambda: nodes(2), 120)
        shell.type(lab, end)
        lab.wait_until("all is quiet", lambda: lab.run("squeue", "--noheader", "--name=elastic") == "", 60)
        assert {event["code"] for event in training.events("agent_stopped")} == {143}
        last = max(event["step"] for event in training.events("step"))
        assert max(event["step"] for event in training.events("committed")) >= last
        assert not any(event["redone"] for event in training.events("first_step"))
        lab.end_jobs()
