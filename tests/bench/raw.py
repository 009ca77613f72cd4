"""What was measured, as JSON lines: appended as it comes, so that several partial runs add up to one table.

Three kinds of lines: a `Run` (one call of the benchmark: machine, versions, settings, command), a `Repetition` (one
event under one runtime), and a `Skipped` row with its reason.
"""

from __future__ import annotations

import json
import os
import platform
import shlex
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from tests.bench.marks import Recovery

REPOSITORY = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Run:
    """One call of the benchmark; `run` names it. `settings` are those that every repetition of it shares."""

    run: str
    date: str
    command: str
    commit: str
    machine: str
    versions: str
    load: float
    settings: dict[str, float]


@dataclass(frozen=True)
class Repetition:
    """One event under one runtime: what it cost, or why there is nothing to say.

    Attributes:
        cost: None when training did not go on within the timeout.
        note: what happened besides, or instead.
        phases_ms: what our agents say of this recovery, phase by phase.
        together: how many jobs were on this machine at the same time.
    """

    run: str
    row: str
    runtime: str
    cost: Recovery | None
    note: str = ""
    phases_ms: dict[str, float] = field(default_factory=dict)
    together: int = 1


@dataclass(frozen=True)
class Skipped:
    """A row that was asked for and could not be measured here."""

    run: str
    row: str
    reason: str


Line = Run | Repetition | Skipped
_KINDS: dict[str, type[Line]] = {"run": Run, "repetition": Repetition, "skipped": Skipped}


def append(path: Path, line: Line) -> None:
    """Add one line."""
    kind = next(name for name, known in _KINDS.items() if isinstance(line, known))
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps({"kind": kind, **asdict(line)}) + "\n")


def read(path: Path) -> list[Line]:
    """All lines of a file. ValueError, KeyError or TypeError for a line that is none of ours."""
    return [_parse(json.loads(text)) for text in path.read_text().splitlines() if text]


def _parse(values: dict[str, Any]) -> Line:
    kind = _KINDS[values.pop("kind")]
    assert set(values) == {each.name for each in fields(kind)}, f"not the fields of a {kind.__name__}: {sorted(values)}"
    if kind is Repetition and values["cost"] is not None:
        values["cost"] = Recovery(**values["cost"])
    return kind(**values)


def this_run(run: str, settings: dict[str, float]) -> Run:
    """The present call."""
    from importlib.metadata import version

    # Where somebody has put something is no part of what was measured.
    words = [_module(), *(Path(word).name if word.startswith("/") else word for word in sys.argv[1:])]
    return Run(
        run=run,
        date=time.strftime("%Y-%m-%d %H:%M"),
        command="python -m " + shlex.join(words),
        commit=_commit(),
        machine=f"{os.cpu_count()} cores ({_processor()}), {_memory_gb()} GB, Linux {platform.release()}",
        versions=f"Python {platform.python_version()}, torch {version('torch')}, gloo",
        load=round(os.getloadavg()[0], 1),
        settings=settings,
    )


def _module() -> str:
    path = Path(sys.argv[0]).resolve()
    return ".".join(path.relative_to(REPOSITORY).with_suffix("").parts) if REPOSITORY in path.parents else path.name


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _memory_gb() -> int:
    return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30)


def _commit() -> str:
    """The commit of the working tree, with a "+" when files differ from it; "" outside of a repository."""

    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], cwd=REPOSITORY, capture_output=True, text=True, check=False)
        return done.stdout.strip()

    changed = git("status", "--porcelain", "--untracked-files=no", "--", "elasticrt", "tests/bench")
    return git("rev-parse", "--short", "HEAD") + ("+" if changed else "")
