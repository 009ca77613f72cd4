"""Environments that the matrix runs in: one for each pair of Python and torch, made by pip once and kept.

They lie in the user's cache (`$XDG_CACHE_HOME/elasticrt/matrix`), about 1 GB each with torch for the CPU; CUDA's own
libraries, 3 to 5 GB, are shared by all with the same torch. Where packages come from is pip's own configuration;
`PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu` adds the CPU builds.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

INSTALL_S = 1800.0
ASK_S = 180.0


class Missing(Exception):  # noqa: N818  A cell of the table, not an error.
    """Why there is no such environment on this machine, in words."""


@dataclass(frozen=True, order=True)
class Pair:
    """A version of Python and one of torch, both without their last number."""

    python: str
    torch: str

    @property
    def directory(self) -> Path:
        """Where its environment is kept."""
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        return cache / "elasticrt" / "matrix" / f"python{self.python}-torch{self.torch}"


def environment(pair: Pair, *, cuda: bool) -> Path:
    """The interpreter of the pair's environment, which is made if it is not there. Raises Missing.

    With `cuda` a build with CUDA is taken where there is none for the CPU alone.
    """
    python, stamp = pair.directory / "bin" / "python", pair.directory / "installed"
    wanted = json.dumps(_requirements(pair))
    if stamp.exists() and stamp.read_text() == wanted:
        return python
    base = interpreter(pair.python)
    if not python.exists() or python.resolve() != base.resolve():
        shutil.rmtree(pair.directory, ignore_errors=True)
        _run([str(base), "-m", "venv", str(pair.directory)], ASK_S)
        _link_cuda(pair)
    version, large = _wheel(python, pair)
    if large and not cuda:
        shutil.rmtree(pair.directory)
        raise Missing(f"{version} for CUDA only")
    _run([*_pip(python), "install", "--progress-bar", "off", *_requirements(pair)], INSTALL_S)
    stamp.write_text(wanted)
    return python


def _link_cuda(pair: Pair) -> None:
    """Take CUDA's libraries from another environment with the same torch: gigabytes that no Python differs in."""
    (mine,) = pair.directory.glob("lib/python*/site-packages")
    for installed in pair.directory.parent.glob(f"python*-torch{pair.torch}/installed"):
        for each in installed.parent.glob("lib/python*/site-packages/nvidia*"):
            shutil.copytree(each, mine / each.name, symlinks=True, copy_function=os.link, dirs_exist_ok=True)
        return


def interpreter(version: str) -> Path:
    """A Python of this version: on PATH, of pyenv, or of uv. Raises Missing."""
    of_pyenv = sorted((Path.home() / ".pyenv" / "versions").glob(f"{version}.*/bin/python{version}"))
    on_path = shutil.which(f"python{version}")
    candidates = [*of_pyenv, *([Path(on_path)] if on_path else [])]
    if shutil.which("uv"):
        asked = subprocess.run(["uv", "python", "find", version], capture_output=True, text=True, check=False)
        candidates += [Path(asked.stdout.strip())] if asked.returncode == 0 else []
    for each in candidates:
        code = "import ensurepip, ssl, sys; print('%d.%d' % sys.version_info[:2])"
        said = subprocess.run([str(each), "-c", code], capture_output=True, text=True, check=False)
        if said.stdout.strip() == version:
            return each
    raise Missing("no such Python here")


def _requirements(pair: Pair) -> list[str]:
    """torch, what the package itself needs, and what the slice imports."""
    needed = [each for each in metadata.requires("elasticrt") or () if "extra ==" not in each]
    return [f"torch=={pair.torch}.*", *(each for each in needed if not each.startswith("torch")), "numpy", "pytest"]


def _pip(python: Path) -> list[str]:
    return [str(python), "-m", "pip", "--disable-pip-version-check", "--no-input"]


def _wheel(python: Path, pair: Pair) -> tuple[str, bool]:
    """The torch that pip would install, and whether gigabytes of CUDA come with it. Raises Missing."""
    ask = ["install", "--quiet", "--dry-run", "--no-deps", "--ignore-installed", "--only-binary", "torch"]
    try:
        report = _run([*_pip(python), *ask, "--report", "-", f"torch=={pair.torch}.*"], ASK_S)
    except Missing as missing:
        raise (Missing("no wheel") if "No matching distribution" in str(missing) else missing) from None
    (found,) = json.loads(report)["install"]
    needs = found["metadata"].get("requires_dist", [])
    return found["metadata"]["version"], any(each.startswith(("nvidia-", "cuda-")) for each in needs)


def _run(command: list[str], timeout_s: float) -> str:
    """What a command prints. Raises Missing with the last line of its error output."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired:
        raise Missing(f"{command[3]} took longer than {timeout_s:g} s") from None
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or done.stderr.splitlines()
        raise Missing(lines[-1] if lines else f"exit code {done.returncode}")
    return done.stdout
