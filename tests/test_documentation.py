"""What the documentation says is there: its example runs as printed, its messages, options and files exist."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests import events_page, options_page

ROOT = Path(__file__).resolve().parents[1]
PAGES = [*sorted((ROOT / "docs").rglob("*.md")), *(ROOT / name for name in ("README.md", "CONTRIBUTING.md"))]
ALONE = [sys.executable]
TWO_WORKERS = [sys.executable, "-m", "elasticrt", "run", "--nproc-per-node", "2"]


def example() -> str:
    """The training script that README prints."""
    (script,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    return script


@pytest.mark.parametrize(("launcher", "world_size"), [(ALONE, 1), (TWO_WORKERS, 2)], ids=["python", "elasticrt run"])
def test_the_example_in_readme_runs_as_printed(tmp_path, launcher, world_size):
    """Three epochs, by every launcher, and the last step is saved."""
    (tmp_path / "train.py").write_text(example())
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*launcher, "train.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    assert f"epoch 2 done: step 384, world size {world_size}" in done.stdout
    assert list((tmp_path / "ckpt").glob("*.pt"))


@cache
def texts() -> str:
    """Every text in the package's code, with values left out, one after the other."""
    found = []
    for path in (ROOT / "elasticrt").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                found.append(
                    "".join(str(each.value) if isinstance(each, ast.Constant) else "{}" for each in node.values)
                )
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return "\0".join(found)


def test_messages_that_are_explained_are_said():
    """Each message on the page about trouble, from the start of a node on, stands in the code."""
    page = (ROOT / "docs" / "troubleshooting.md").read_text().partition("## Starting a node")[2]
    pieces = [
        piece.strip(" ():;,.") for row in re.findall(r"^\| `([^`]+)`", page, re.MULTILINE) for piece in row.split("...")
    ]
    assert len(pieces) > 100
    assert not [piece for piece in pieces if piece not in texts()]


def test_the_tables_of_options_are_made_from_the_options():
    """docs/commands.md says what `--help` says: `python -m tests.options_page` renews it."""
    page = options_page.PAGE.read_text()
    assert options_page.renewed(page) == page


def test_the_page_on_events_is_current():
    """docs/events.md says what the schema says: `python -m tests.events_page` renews it."""
    page = events_page.PAGE.read_text()
    assert events_page.renewed(page) == page


def named_options() -> Iterator[tuple[str, str]]:
    """Pages and the options of `elasticrt` that they name."""
    for page in PAGES:
        for code in re.findall(r"`([^`\n]+)`", page.read_text()):
            if code.startswith("--"):
                yield page.name, re.split(r"[ =,]", code)[0]


OF_OTHERS = {
    *("--full", "--strict", "--extra-index-url", "--constraint"),
    *("--known", "--write", "--only", "--show", "--seeds", "--first", "--rows", "--reps"),
    *("--local_rank", "--note", "--data-dir"),
}
"""Options of dev.py, mkdocs and pip; of the simulated world and the bench; of a script, and of a walk's exercise."""


def test_options_exist():
    """Each option that a page names is one of the commands'."""
    known = set()
    for command in ("run", "simulate", "etcd", "doctor", "report", "status", "logs"):
        shown = [sys.executable, "-m", "elasticrt", command, "--help"]
        done = subprocess.run(shown, capture_output=True, text=True, timeout=60, check=True)
        known |= set(re.findall(r"--[a-z][a-z-]+", done.stdout))
    assert not {(page, name) for page, name in named_options() if name not in known | OF_OTHERS}


def test_files_exist():
    """Each file of the repository that a page names, or links to, is there."""
    inside = re.compile(r"`((?:tests|deploy|examples|docs|elasticrt)/[\w./-]+)`")
    missing = [(page.name, name) for page in PAGES for name in inside.findall(page.read_text()) if not exists(name)]
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "ARCHITECTURE.md"):
        links = re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text())
        missing += [(page.name, link) for link in links if not exists(link)]
    assert not missing


def exists(name: str) -> bool:
    """Whether the repository has it."""
    return (ROOT / name).exists()
