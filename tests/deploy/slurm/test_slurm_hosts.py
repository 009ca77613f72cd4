"""The same scripts where each node is a host of its own, whose cable can be pulled: network namespaces."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests import netns
from tests.deploy.slurm import lab as lab_module
from tests.deploy.slurm.lab import ALLOC, ARRAY, NODES, Lab, variables
from tests.deploy.slurm.test_slurm import pause
from tests.deploy.slurm.training import Training
from tests.netns import Network
from tests.servers import EtcdServer, wheel_binary

pytestmark = [pytest.mark.root, pytest.mark.slow, pytest.mark.timeout(300)]

Note = Callable[[str], None]


@pytest.fixture(scope="module")
def hosts(session_mark: object) -> Iterator[Lab]:
    """A SLURM of three hosts."""
    del session_mark
    reason = lab_module.missing() or netns.missing()
    if reason:
        pytest.skip(reason)
    with tempfile.TemporaryDirectory(prefix="slurm-") as directory, Network() as network:
        for name in NODES:
            network.add(name)
        with Lab(Path(directory), network) as lab:
            yield lab


@pytest.fixture
def lab(hosts: Lab) -> Iterator[Lab]:
    """The SLURM of this file; cables are healed and no job outlives its test."""
    yield hosts
    assert hosts.network is not None
    hosts.network.heal()
    hosts.end_jobs()


@pytest.fixture
def etcd(hosts: Lab, tmp_path: Path) -> Iterator[EtcdServer]:
    """An etcd of the site's, at an address that all hosts reach."""
    assert hosts.network is not None
    server = EtcdServer(wheel_binary(), tmp_path / "etcd")
    server.address = type(server.address)("http", hosts.network.host, server.port)
    with server:
        yield server


def cut(lab: Lab, name: str) -> None:
    """Pull a host's cable: what it sends and what is sent to it is lost in silence."""
    network = lab.network
    assert network is not None
    others = [network.nodes[other] for other in NODES if other != name]
    network.cut([network.nodes[name]], [*others, network.host])


def heal(lab: Lab) -> None:
    """Put it back."""
    assert lab.network is not None
    lab.network.heal()


def test_array_and_a_cut_link(etcd: EtcdServer, lab: Lab, tmp_path: Path, note: Note) -> None:
    """K03: the others train on at once, SLURM requeues the element alone, and after the heal it comes back."""
    training = Training(lab, tmp_path)
    env = variables(ELASTICRT_ETCD=str(etcd.address), GLOO_SOCKET_IFNAME="eth0")
    job = lab.submit(ARRAY, "train.py", options=("--array=0-2",), cwd=tmp_path, **env)
    training.together(*NODES, timeout_s=90)
    training.ready()
    note("three elements train")
    number = training.number()
    cut(lab, "n3")
    note("the link of n3 is cut")
    note(f"the others train on; {pause(training.together('n1', 'n2', after=number))}")
    lab.wait_until("SLURM has requeued the element", lambda: lab.states(job)[f"{job}_2"] == "PENDING", 90)
    assert {lab.states(job)[f"{job}_{index}"] for index in (0, 1)} == {"RUNNING"}
    note("SLURM has noticed: the element is back in the queue, the other two are untouched")
    number = training.number()
    heal(lab)
    note("the link is healed")
    back = training.together(*NODES, after=number, timeout_s=120)
    note(f"the element is back; {pause(back)}")
    assert lab.jobs(job)[f"{job}_2"]["Restarts"] == "1"
    assert back["redone"] == 0
    training.finish()
    lab.wait_for_state(job, "COMPLETED")


@pytest.mark.parametrize("lost", ["n3", "n1"])
def test_alloc_and_a_cut_link(etcd: EtcdServer, lab: Lab, tmp_path: Path, note: Note, lost: str) -> None:
    """K03: the others train on, also without the host of the batch script and srun; the job keeps what is left."""
    training = Training(lab, tmp_path)
    env = variables(ELASTICRT_ETCD=str(etcd.address), GLOO_SOCKET_IFNAME="eth0")
    job = lab.submit(ALLOC, "train.py", options=("--nodes=3",), cwd=tmp_path, **env)
    training.together(*NODES, timeout_s=90)
    training.ready()
    note("all three train")
    number, left = training.number(), [name for name in NODES if name != lost]
    cut(lab, lost)
    note(f"the link of {lost} is cut{', where the batch script and srun run' if lost == 'n1' else ''}")
    note(f"the others train on; {pause(training.together(*left, after=number))}")
    lab.wait_until(f"{lost} is down", lambda: lab.node_states()[lost].startswith("down"), 90)
    note(f"SLURM has noticed: {lost} is down")
    step = training.events("step")[-1]["step"]
    training.wait("steps after that", lambda: training.events("step")[-1]["step"] > step + 20)
    assert training.number() == number + 1
    assert lab.states(job) == {job: "RUNNING"}
    note(f"the job still runs on {lab.jobs(job)[job]['NodeList']}")
    lab.run("scancel", job)
    training.wait("the others have ended", lambda: training.stopped(*left) == [143, 143])
    note("scancel: they have saved their last step and left")


def test_alloc_without_an_etcd(lab: Lab, tmp_path: Path, note: Note) -> None:
    """The job's first node serves the etcd; a cancelled job and its etcd live until the last step is saved."""
    training = Training(lab, tmp_path)
    env = variables(GLOO_SOCKET_IFNAME="eth0")
    job = lab.submit(ALLOC, "train.py", options=("--nodes=3",), cwd=tmp_path, **env)
    training.together(*NODES, timeout_s=90)
    training.ready()
    note(f"all three train, and meet at {training.events('agent_started')[0]['etcd']}")
    lab.run("scancel", job)
    training.wait("all have ended", lambda: training.stopped(*NODES) == [143] * 3)
    last = max(event["step"] for event in training.events("step"))
    assert max(event["step"] for event in training.events("committed")) >= last
    note("scancel: all have saved their last step and left")
