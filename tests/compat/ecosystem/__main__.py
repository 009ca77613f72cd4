"""The libraries that people use with DDP, installed next to elasticrt, run under it with a worker killed.

    python -m tests.compat.ecosystem [--venv DIRECTORY] [SCRIPT ...]

Makes a virtual environment (in the temporary directory, removed at the end; or DIRECTORY, which stays), installs
requirements.txt with the torch of constraints.txt, plays each script undisturbed and with a worker killed, and writes
their rows into RESULTS.md.
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
import tempfile
import venv
from importlib import metadata
from pathlib import Path

from tests.cluster import REPOSITORY

HERE = Path(__file__).parent
TABLE = HERE / "RESULTS.md"
INSIDE = "ELASTICRT_ECOSYSTEM_INSIDE"
SCRIPTS = {
    "lightning_trainer": "lightning",
    "lightning_fabric": "lightning",
    "accelerate_loop": "accelerate",
    "transformers_trainer": "transformers",
    "metrics_and_logs": "torchmetrics, tensorboard, wandb",
    "ipython_cell": "ipython",
}
INSTALL_S = 1800


def main(argv: list[str]) -> int:
    """Install, then play in the new environment; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.compat.ecosystem", description=__doc__)
    parser.add_argument("--venv", type=Path, help="keep the environment here, and use what is there")
    parser.add_argument("scripts", nargs="*", metavar="SCRIPT")
    arguments = parser.parse_args(argv)
    if not set(arguments.scripts) <= set(SCRIPTS):
        parser.error(f"the scripts are {', '.join(SCRIPTS)}")
    if INSIDE in os.environ:
        return play(arguments.scripts)
    with tempfile.TemporaryDirectory(prefix="ecosystem-") as directory:
        python = install(arguments.venv or Path(directory) / "venv")
        env = {**os.environ, INSIDE: "1", "TMPDIR": directory, "XDG_RUNTIME_DIR": directory, "OMP_NUM_THREADS": "1"}
        command = [str(python), "-m", "tests.compat.ecosystem", *arguments.scripts]
        return subprocess.run(command, cwd=REPOSITORY, env=env, check=False).returncode


def install(place: Path) -> Path:
    """A virtual environment with everything; its python. What is there already is brought up to date."""
    python = place / "bin" / "python"
    if not python.exists():
        venv.create(place, with_pip=True, symlinks=True)
    pip = [str(python), "-m", "pip", "install", "--disable-pip-version-check", "--quiet"]
    pip += ["-c", str(REPOSITORY / "constraints.txt")]
    for words in (["-e", str(REPOSITORY)], ["-r", str(HERE / "requirements.txt")]):
        subprocess.run([*pip, *words], check=True, timeout=INSTALL_S)
    return python


def play(names: list[str]) -> int:
    """Play each script named, or all, and write their rows into the table."""
    from tests.compat.styles import Style, both

    wrong, lines = 0, []
    kept = TABLE.read_text().splitlines() if TABLE.exists() else []
    for name, packages in SCRIPTS.items():
        if names and name not in names:
            lines += [line for line in kept if line.startswith(f"| `{name}.py` |")]
            continue
        folder = "../tests/compat/ecosystem"
        style = Style(name, f"{name}.py", options=("--nnodes", "2", "--nproc-per-node", "1"), victim=1, folder=folder)
        with tempfile.TemporaryDirectory(prefix="ecosystem-") as directory:
            try:
                problem = cell(name, Path(directory)) if name == "ipython_cell" else both(style, Path(directory))[1]
            except AssertionError as error:
                print(error, file=sys.stderr)
                problem = "failed"
        wrong += bool(problem)
        found = ", ".join(f"{package} {metadata.version(package)}" for package in packages.split(", "))
        lines.append(f"| `{name}.py` | {found} | {f'**{problem}**' if problem else 'the same result'} |")
        print(lines[-1], flush=True)
    TABLE.write_text("\n".join([*head(), *lines, ""]))
    return 1 if wrong else 0


def cell(name: str, directory: Path) -> str:
    """Run what is no training script of its own; what is wrong, "" for nothing."""
    command = [sys.executable, str(HERE / f"{name}.py")]
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=120, check=False)
    print(done.stderr[-3000:] if done.returncode else "", file=sys.stderr, end="")
    return "" if done.returncode == 0 and "result: both values" in done.stdout else f"exit code {done.returncode}"


def head() -> list[str]:
    """The table's head: what everything ran with."""
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in ("torch", "grpcio", "protobuf", "pydantic"))
    return [
        "# Libraries next to elasticrt",
        "",
        "Made by `python -m tests.compat.ecosystem`: each script ran under `elasticrt run` on 2 nodes of one worker",
        "(CPU, gloo), undisturbed and with one worker killed by SIGKILL after its fourth epoch, went on from its own",
        f"checkpoint, and ended with exit code 0. Python {platform.python_version()}, {versions}.",
        "",
        "| script | next to | with a worker killed |",
        "|---|---|---|",
    ]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
