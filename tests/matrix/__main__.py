"""The matrix: a slice of everything under each pair of Python and torch that there are wheels for.

    python -m tests.matrix [--python 3.11,3.12] [--torch 2.14,2.15] [--also PYTHON ...] [--cuda]

Environments are made once and kept (`environments.py`). Each line of the table is a run with real processes
(`slice.py`): seconds from the first agent's start to the first step, from a kill to the next step, the pause when a
node joins and when one leaves, from the start of the same run again to its first step; and lines that plain Python
would not have printed. `--also` names interpreters of environments that are there already. Ends with code 1 when a run
failed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.cluster import REPOSITORY
from tests.matrix.environments import Missing, Pair, environment

PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
TORCHES = ("2.10", "2.11", "2.12", "2.13", "2.14", "2.15")
SLICE_S = 600.0
SHAPE = "| {:6} | {:12} | {:>5} | {:>5} | {:>5} | {:>5} | {:>6} | {:>5} | {} |"
HEAD = SHAPE.format("Python", "torch", "start", "kill", "join", "leave", "resume", "noise", "")


def measured(python: Path) -> str:
    """The table's line for one interpreter. Raises RuntimeError when its run failed."""
    ask = [str(python), "-c", "import sys; print('%d.%d.%d' % sys.version_info[:3])"]
    version = subprocess.run(ask, capture_output=True, text=True, check=True).stdout.strip()
    with tempfile.TemporaryDirectory(prefix="ertm-") as name:
        # Agents of one machine find each other there; nobody else's shall.
        env = {**os.environ, "PYTHONPATH": str(REPOSITORY), "XDG_RUNTIME_DIR": f"{name}/run", "TMPDIR": name}
        for folder in ("run", "work"):
            Path(name, folder).mkdir(mode=0o700)
        command = [str(python), "-m", "tests.matrix.slice", f"{name}/work"]
        done = subprocess.run(
            command, cwd=REPOSITORY, env=env, capture_output=True, text=True, timeout=SLICE_S, check=False
        )
    if done.returncode:
        raise RuntimeError(f"Python {version} ({python}):\n{done.stderr}")
    found = json.loads(done.stdout.splitlines()[-1])
    times = [f"{found[what]:.2f}" for what in ("start", "kill", "join", "leave", "resume")]
    return SHAPE.format(version, found["torch"], *times, len(found["noise"]), " ".join(found["noise"][:1])[:60])


def words(text: str) -> list[str]:
    """Those between commas; none for an empty text."""
    return [each for each in text.split(",") if each]


def main() -> int:
    """Run every pair; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", type=words, default=PYTHONS)
    parser.add_argument("--torch", type=words, default=TORCHES)
    parser.add_argument("--also", nargs="*", type=Path, default=[], metavar="PYTHON")
    parser.add_argument("--cuda", action="store_true", help="take builds for CUDA where there is none for the CPU")
    arguments = parser.parse_args()
    print(HEAD, "|" + "---|" * 9, sep="\n", flush=True)
    pairs = [Pair(python, torch) for torch in arguments.torch for python in arguments.python]
    failures = []
    for each in [*pairs, *arguments.also]:
        try:
            line = measured(environment(each, cuda=arguments.cuda) if isinstance(each, Pair) else each)
        except Missing as missing:
            line = SHAPE.format(each.python, each.torch, *[""] * 6, missing)
        except (RuntimeError, subprocess.TimeoutExpired) as failure:
            line = f"| {each} failed: see below |"
            failures.append(str(failure))
        print(line, flush=True)
    print("\n\n".join(failures), file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
