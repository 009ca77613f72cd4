"""`elasticrt doctor`: what follows from what is seen, and what is said of things that are really broken."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from elasticrt.cli import doctor_findings, doctor_looks
from elasticrt.cli.doctor import DoctorOptions
from elasticrt.cli.doctor_findings import GIB, MIB, Finding
from elasticrt.cli.doctor_looks import looked
from elasticrt.cli.main import main
from elasticrt.store.address import parse_endpoints
from elasticrt.store.protocol import ServerStatus

SEEN: dict[str, Any] = {"torch": "2.13.0+cpu", "cuda": None, "gloo": True, "gpus": [], "nccl": ""}
GPUS: dict[str, Any] = {**SEEN, "torch": "2.15.0+cu132", "cuda": "13.2", "gpus": ["H200"] * 8, "nccl": "2.28.9"}
HEALTHY = ServerStatus("3.5.21", 40 * MIB, 0, ())
INTERFACES = {"lo": {"127.0.0.1"}, "eth0": {"10.0.0.5"}, "ib0": {"10.1.0.5"}}


def etcd(server: ServerStatus, write_s: float = 0.002, *, own: bool = False, open_to_all: bool = False) -> Finding:
    """About an etcd that answers."""
    return doctor_findings.etcd("https://e:2379", server, 0.001, write_s, own=own, open_to_all=open_to_all)


def address(interface: str = "eth0", told: str | None = None) -> Finding:
    """About this node's address."""
    return doctor_findings.address("10.0.0.5", "as --local-addr says", interface, told, INTERFACES)


CASES: list[tuple[Finding, str, str]] = [
    (
        etcd(HEALTHY),
        "ok",
        "3.5.21 at https://e:2379: reads in 1.0 ms, writes in 2.0 ms, 40 MiB used "
        "(etcd 3.5.21 does not tell its quota; the default is 2.0 GiB)",
    ),
    (etcd(HEALTHY, own=True), "ok", "starts here, for agents of this machine alone"),
    (etcd(ServerStatus("3.5.1", 0, 0, ()), own=True), "ok", "3.5.1 starts here"),
    (etcd(ServerStatus("3.5.1", 0, 0, ())), "warn", "can lose its last writes"),
    (etcd(ServerStatus("3.3.27", 0, 0, ())), "fail", "too old"),
    (etcd(ServerStatus("3.6.4", 7 * GIB, 8 * GIB, ())), "warn", "7.0 GiB of 8.0 GiB used; nearly full"),
    (etcd(ServerStatus("3.5.21", 2 * GIB, 0, ("memberID:1 alarm:NOSPACE ",))), "fail", "defragment"),
    (etcd(ServerStatus("3.5.21", 2 * MIB, 0, ("memberID:1 alarm:NOSPACE ",))), "fail", ": 2 MiB used; memberID:1"),
    (etcd(ServerStatus("3.5.21", 0, 0, ("etcdserver: no leader",))), "fail", "majority"),
    (etcd(HEALTHY, write_s=0.3), "warn", "writes in 300.0 ms"),
    (etcd(HEALTHY, open_to_all=True), "warn", "TLS"),
    (address(), "ok", "10.0.0.5 on eth0: as --local-addr says"),
    (address(interface=""), "fail", "--local-addr"),
    (address(told="eth0"), "ok", "eth0"),
    (address(told="eth7"), "fail", "none of eth0, ib0, lo"),
    (address(told="ib0"), "warn", "GLOO_SOCKET_IFNAME is ib0"),
    (doctor_findings.loopback(""), "ok", "127.0.0.1"),
    (doctor_findings.loopback("Cannot assign requested address"), "fail", "ip link set lo up"),
    (
        doctor_findings.names("n1", {"10.0.0.5"}, "n1.cluster", "", 0.01),
        "ok",
        "n1 is 10.0.0.5; its address is called n1",
    ),
    (doctor_findings.names("n1", set(), "", "Name or service not known", 0.01), "warn", "/etc/hosts"),
    (doctor_findings.names("n1", {"10.0.0.5"}, "", "", 10.2), "warn", "took 10.2 s"),
    (doctor_findings.ports(32768, 60999, 40), "ok", "28,192 of 32768 to 60999"),
    (doctor_findings.ports(32768, 60999, 27500), "warn", "732"),
    (doctor_findings.ports(32768, 60999, 28232), "fail", "0 of"),
    (doctor_findings.clock(True), "ok", "synchronised"),
    (doctor_findings.clock(None), "ok", "does not say"),
    (doctor_findings.clock(False), "warn", "chrony"),
    (doctor_findings.shared_memory(8 * GIB, 7 * GIB), "ok", "7.0 GiB of 8.0 GiB shared"),
    (doctor_findings.shared_memory(64 * MIB, 64 * MIB), "warn", "--shm-size"),
    (doctor_findings.shared_memory(8 * GIB, MIB), "warn", "SIGBUS"),
    (
        doctor_findings.limits(1 << 20, 500, -1, 65536, rdma=False),
        "ok",
        "1,048,576, processes unlimited, locked",
    ),
    (doctor_findings.limits(256, 500, -1, -1, rdma=False), "fail", "ulimit -n"),
    (doctor_findings.limits(-1, 500, 400, -1, rdma=False), "warn", "ulimit -u"),
    (doctor_findings.limits(-1, 500, -1, 65536, rdma=True), "warn", "ulimit -l"),
    (
        doctor_findings.checkpoints("/c", "", "nfs4", 90 * GIB, 0.01),
        "ok",
        "nodes can share (nfs4), 90.0 GiB",
    ),
    (doctor_findings.checkpoints("/c", "", "ext4", 90 * GIB, 0.01), "ok", "this node's own disk"),
    (doctor_findings.checkpoints("/c", "", "fuse.gcsfuse", 90 * GIB, 2.0), "warn", "slow"),
    (doctor_findings.checkpoints("/c", "", "overlay", 90 * GIB, 0.01), "warn", "lost with the node or container"),
    (doctor_findings.checkpoints("/c", "", "nfs4", 900 * MIB, 0.01), "warn", "Make room: a last save that fails"),
    (doctor_findings.checkpoints("/c", "", "nfs4", 9 * MIB, 0.01), "fail", "Make room: no checkpoint fits there"),
    (doctor_findings.torch("3.11.2", SEEN, ""), "ok", "torch 2.13.0+cpu, Python 3.11.2"),
    (doctor_findings.torch("3.11.2", {**SEEN, "torch": "2.9.1"}, ""), "fail", "2.10 to 2.15"),
    (doctor_findings.torch("3.11.2", {**SEEN, "torch": "2.16.0a0"}, ""), "warn", "newer"),
    (doctor_findings.torch("3.11.2", {**SEEN, "gloo": False}, ""), "fail", "without gloo"),
    (doctor_findings.torch("3.11.2", {}, "ModuleNotFoundError: No module named 'torch'"), "fail", "Install torch"),
    (doctor_findings.gpus(0, SEEN), "ok", "none"),
    (doctor_findings.gpus(8, GPUS), "ok", "8 x H200, CUDA 13.2, nccl 2.28.9"),
    (doctor_findings.gpus(8, {**GPUS, "gpus": ["H200"] * 7}), "fail", "the driver shows 8, torch (CUDA 13.2) sees 7"),
    (doctor_findings.gpus(8, SEEN), "fail", "torch (a build for the CPU) sees 0"),
    (doctor_findings.gpus(8, {**GPUS, "nccl": ""}), "warn", "nccl none"),
    (doctor_findings.slurm("job 7", 1, meets=False), "ok", "job 7"),
    (doctor_findings.slurm("job 7", 2, meets=True), "ok", "job 7"),
    (doctor_findings.slurm("job 7", 2, meets=False), "warn", "--etcd"),
    (doctor_findings.kubernetes("train-0", 12 * GIB, 8), "ok", "pod train-0: 12.0 GiB of memory left, 8 CPUs"),
    (doctor_findings.kubernetes("train-0", 200 * MIB, 8), "warn", "limit of memory"),
]


@pytest.mark.parametrize(("finding", "level", "words"), CASES, ids=[f"{each[1]} {each[2]}" for each in CASES])
def test_findings(finding: Finding, level: str, words: str) -> None:
    """What is seen has a level, is said in one line, and has a remedy exactly where something is to be done."""
    said = doctor_findings.line("check", finding)
    assert finding.level == level
    assert words in said
    assert "\n" not in said
    assert bool(finding.remedy) is (level != "ok")


def only(look: Callable[..., Any], **options: Any) -> Finding:
    """The one finding of a look."""
    ((_, finding),) = looked("title", look, DoctorOptions(**options))
    return finding


@pytest.mark.parametrize(
    ("endpoint", "words"),
    [
        ("http://127.0.0.1:9", "Connection refused"),
        ("http://no.such.invalid:2379", "no.such.invalid"),
        ("unix:/nonexistent/etcd", "No such file"),
        ("http://192.0.2.1:2379", "--insecure-etcd"),
    ],
)
def test_an_etcd_that_is_not_there(endpoint: str, words: str) -> None:
    """It fails with the reason, at once."""
    finding = only(doctor_looks.etcd, etcd=parse_endpoints(endpoint), insecure_etcd="invalid" in endpoint)
    assert finding.level == "fail"
    assert words in finding.what


def test_each_endpoint_of_etcd_is_looked_at() -> None:
    """One that is not there does not hide the others: agents use those."""
    options = DoctorOptions(etcd=parse_endpoints("http://127.0.0.1:9,http://127.0.0.1:10"))
    found = [finding.what for _, finding in looked("title", doctor_looks.etcd, options)]
    assert ["127.0.0.1:9: " in found[0], "127.0.0.1:10: " in found[1]] == [True, True], found


@pytest.mark.parametrize("directory", ["/proc/ckpt", "/sys", "/dev/null/ckpt"])
def test_a_checkpoint_directory_that_cannot_be_used(directory: str) -> None:
    """It fails with the place and the reason."""
    finding = only(doctor_looks.checkpoints, checkpoint=Path(directory))
    assert finding.level == "fail"
    assert directory in finding.what


def test_a_checkpoint_directory_that_is_not_there_yet(tmp_path: Path) -> None:
    """What is above it is looked at; nothing is made, and nothing is left there."""
    finding = only(doctor_looks.checkpoints, checkpoint=tmp_path / "a" / "b")
    assert "flushes in" in finding.what
    assert not list(tmp_path.iterdir())


def test_a_look_that_hangs_or_breaks_hides_no_other() -> None:
    """What was found before is said at once; what is wrong with the look itself is one line about it."""
    hung = threading.Event()

    def hangs(_: DoctorOptions) -> Any:
        yield "a", Finding("ok", "fine")
        hung.wait()

    def breaks(_: DoctorOptions) -> Any:
        yield "a", Finding("ok", "fine")
        raise KeyError("etcd")

    found = looked("b", hangs, DoctorOptions(), 60.0)
    assert next(found) == ("a", Finding("ok", "fine")), "the look is still under way"
    hung.set()
    assert list(found) == []
    hung.clear()
    late = ("b", Finding("fail", "no answer within 0.1 s"))
    assert [*looked("b", hangs, DoctorOptions(), 0.1)][-1] == late
    hung.set()
    expected = [("a", Finding("ok", "fine")), ("b", Finding("fail", "'etcd'"))]
    assert list(looked("b", breaks, DoctorOptions())) == expected


def test_the_command(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each check says its line, or with --json an object; a Python without torch fails, and so does the command."""
    monkeypatch.setenv("PYTHON_EXEC", "/bin/false")
    assert main(["doctor", "--json", "--checkpoint", str(tmp_path)]) == 1
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    checks = "etcd loopback address names ports clock memory limits checkpoints torch"
    assert [each["check"] for each in found][:10] == checks.split()
    assert all(each.keys() == {"check", "level", "what", "remedy"} for each in found)
    assert [each["check"] for each in found if each["level"] == "fail"] == ["torch"]


def test_at_a_terminal_it_says_what_it_looks_at(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a line that is taken away in the end; its output is the same as without a terminal."""
    terminal, inside = os.openpty()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("PYTHON_EXEC", "/bin/false")
    with os.fdopen(inside, "w") as shown:
        monkeypatch.setattr(sys, "stderr", shown)
        assert main(["doctor"]) == 1
        said = ""
        while not said.endswith("\r\x1b[K"):  # The kernel passes on what was written a little later.
            said += os.read(terminal, 1 << 16).decode()
    os.close(terminal)
    assert "loading" in said
    assert "looking at: checkpoints" in said
    assert "fail  torch " in capsys.readouterr().out


def test_a_pod(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pod is looked at where Kubernetes says that this is one."""
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    assert list(looked("scheduler", doctor_looks.scheduler, DoctorOptions())) == []
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.96.0.1")
    ((name, finding),) = looked("scheduler", doctor_looks.scheduler, DoctorOptions())
    assert (name, "of memory left" in finding.what) == ("kubernetes", True)


@pytest.mark.slow
def test_torch() -> None:
    """torch is loaded in a process of its own, which says what it finds."""
    (name, finding), (other, _) = looked("torch", doctor_looks.torch, DoctorOptions())
    assert (name, finding.level, other) == ("torch", "ok", "gpus")


@pytest.mark.root
def test_a_machine_whose_loopback_is_down(tmp_path: Path) -> None:
    """`run` says so at once, instead of workers that wait; and so does `doctor`."""
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("a network namespace needs root and unshare (util-linux)")
    (tmp_path / "train.py").write_text("")
    command = ["unshare", "--net", sys.executable, "-m", "elasticrt"]
    run = subprocess.run([*command, "run", "train.py"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (run.returncode, "loopback does not work" in run.stderr) == (2, True), run.stderr
    quick = {**os.environ, "PYTHON_EXEC": "/bin/false"}
    seen = subprocess.run([*command, "doctor"], env=quick, capture_output=True, text=True, check=False)
    assert "fail  loopback" in seen.stdout
    assert "ip link set lo up" in seen.stdout
