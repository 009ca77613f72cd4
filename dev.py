"""Sets up, tests and shows elasticrt on a fresh machine with Python 3.10 or newer and git.

Each command does the set-up itself, in `.venv` beside this file, and skips it when nothing has changed since. This file
uses the standard library only, because it runs before anything is installed. pip's own configuration says where
packages come from. If an index offers a CPU build of torch (`2.13.0+cpu`), pip takes that one.

    python3 dev.py demo                  train MNIST-like digits on three nodes of this machine; kill some while it runs
    python3 dev.py test [PYTEST ARGS]    ruff, mypy, the documentation, the fast tests (test --full: all of them)
    python3 dev.py docs                  build the documentation into build/site, and check its links
    python3 dev.py cluster               hosts of their own on this machine: cut them off, cut their power (needs root)
    python3 dev.py setup | lint | format | clean
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

# The demo, in one place: about 90 seconds of training on two cores, while a node is killed, one joins and one leaves.
DEMO_NODES = 3
DEMO_NNODES = "1:4"
DEMO_FAULTS = ("step 150: kill node 2", "step 300: add node", "step 500: kill worker 1", "step 700: drain node 0")
DEMO_SCRIPT = "examples/mnist_ddp.py"
DEMO_SCRIPT_ARGS = ("--epochs", "8", "--save-every", "3s")
DEMO_DATA = """
import functools, pathlib, sys
sys.path.insert(0, "examples")
import digits, elasticrt
data = pathlib.Path("data")
elasticrt.prepare(data / "digits", functools.partial(digits.build, source=data))
"""
DEMO_CHECKPOINT_OPTION = "--checkpoint-dir"

ROOT = Path(__file__).resolve().parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
STAMP = VENV / "elasticrt-setup.stamp"
LOG = VENV / "elasticrt-setup.log"
EXTRAS = ".[dev,docs,examples]"
# Without --quiet, which would keep --strict from seeing warnings.
MKDOCS = ["mkdocs", "build", "--strict"]
LOG_TAIL_LINES = 25
EXIT_USAGE = 2


def main(argv: list[str]) -> int:
    """Run one command and return its exit code."""
    if sys.version_info < (3, 10):  # noqa: UP036  A bare python3 of any age may start this file.
        print(f"dev.py: this is Python {sys.version.split()[0]}; elasticrt needs 3.10 or newer", file=sys.stderr)
        return EXIT_USAGE
    commands = {"demo": demo, "test": test, "cluster": cluster, "setup": setup, "lint": lint}
    commands |= {"docs": docs, "format": reformat, "clean": clean}
    if not argv or argv[0] not in commands:
        print(__doc__, file=sys.stderr if argv and argv[0] not in ("-h", "--help") else sys.stdout)
        return 0 if argv and argv[0] in ("-h", "--help") else EXIT_USAGE
    command, rest = argv[0], argv[1:]
    if rest and command not in ("test", "demo", "cluster"):
        print(f"dev.py {command} takes no arguments; got {' '.join(rest)}", file=sys.stderr)
        return EXIT_USAGE
    os.chdir(ROOT)
    if command != "clean" and (code := prepare()):
        return code
    return commands[command](rest)


# --- Set-up -----------------------------------------------------------------------------------------------------------


def prepare() -> int:
    """Make `.venv` and install into it, unless the stamp says that nothing has changed. Returns the exit code."""
    # Debian and Ubuntu ship these modules in a package of their own.
    missing = [name for name in ("venv", "ensurepip") if importlib.util.find_spec(name) is None]
    # If making the environment was cut short, it has a python without pip, and must be made anew.
    usable = PYTHON.exists() and any(VENV.glob("lib/python*/site-packages/pip")) and venv_version() == python_version()
    if missing and not usable:
        print(f"dev.py: this Python lacks the module {missing[0]}. On Debian or Ubuntu:", file=sys.stderr)
        print("    apt-get install python3-venv", file=sys.stderr)
        return EXIT_USAGE
    if usable and STAMP.exists() and STAMP.read_text() == fingerprint():
        return 0
    if not usable:
        create = [sys.executable, "-m", "venv", "--clear", str(VENV)]
        if code := phase(f"creating {VENV.name} (Python {python_version()})", create):
            return code
    # If pip fails half-way, the environment must not count as complete.
    STAMP.unlink(missing_ok=True)
    pip = [str(PYTHON), "-m", "pip", "install", "--disable-pip-version-check", "--progress-bar", "off"]
    code = phase("installing elasticrt and what it needs", [*pip, "-c", "constraints.txt", "-e", EXTRAS])
    if code == 0:
        STAMP.write_text(fingerprint())
    return code


def fingerprint() -> str:
    """A digest of all that an installed environment depends on. If it changes, the environment has to be renewed."""
    parts = (ROOT / "pyproject.toml").read_bytes(), (ROOT / "constraints.txt").read_bytes(), python_version().encode()
    return hashlib.sha256(b"\0".join((*parts, str(ROOT).encode()))).hexdigest()


def python_version() -> str:
    """Python's major and minor version, to which a virtual environment is bound."""
    return f"{sys.version_info.major}.{sys.version_info.minor}"


def venv_version() -> str:
    """The version of Python with which `.venv` was made; "" if `.venv` does not say."""
    try:
        lines = (VENV / "pyvenv.cfg").read_text().splitlines()
    except FileNotFoundError:
        return ""
    version = next((line.split("=", 1)[1].strip() for line in lines if line.startswith("version")), "")
    return ".".join(version.split(".")[:2])


def phase(title: str, command: list[str]) -> int:
    """Run a set-up command. Returns its exit code.

    Prints one line with `title` and the seconds. The output goes into LOG, and its end is printed if the command fails.
    """
    started = time.monotonic()
    live = sys.stdout.isatty()
    # `venv --clear` empties the directory of the log. So the output goes to a temporary file first.
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
        try:
            while process.poll() is None:
                if live:
                    print(f"\rsetup: {title} ... {time.monotonic() - started:.0f} s", end="", flush=True)
                time.sleep(0.2)
        except KeyboardInterrupt:
            # The terminal has interrupted the command as well.
            process.wait()
            print()
            return 128 + signal.SIGINT
        output.seek(0)
        text = output.read()
    seconds = time.monotonic() - started
    print(
        f"{chr(13) if live else ''}setup: {title} ... {seconds:.1f} s{' FAILED' if process.returncode else ''}",
        flush=True,
    )
    if VENV.is_dir():
        LOG.write_text(text)
    if process.returncode:
        tail = text.splitlines()[-LOG_TAIL_LINES:]
        print("\n".join(f"    {line}" for line in tail), file=sys.stderr)
        print(
            f"dev.py: {' '.join(command)} ended with {process.returncode}; the whole output is in {LOG}",
            file=sys.stderr,
        )
    return process.returncode


# --- Commands ---------------------------------------------------------------------------------------------------------


def setup(_: list[str]) -> int:
    """Do nothing but the set-up, which `main` has done already."""
    print(f"ready: {PYTHON.relative_to(ROOT)}")
    return 0


def demo(rest: list[str]) -> int:
    """Train on several nodes on this machine, with faults on the way. Extra arguments go to the example script."""
    begin = time.monotonic()
    subprocess.run([PYTHON, "-c", DEMO_DATA], cwd=ROOT, check=True)
    print(f"setup: the digits are prepared in data/ ({time.monotonic() - begin:.1f} s)", flush=True)
    checkpoints = Path(tempfile.mkdtemp(prefix="demo-ckpt-"))
    faults = [word for fault in DEMO_FAULTS for word in ("--fault", fault)]
    nodes = ["--nodes", DEMO_NODES, "--nnodes", DEMO_NNODES]
    where = ["--log-dir", checkpoints / "runs"]
    script = [DEMO_SCRIPT, *DEMO_SCRIPT_ARGS, DEMO_CHECKPOINT_OPTION, checkpoints / "ckpt", *rest]
    # The leash ends the simulation if this process is killed.
    leash = [PYTHON, "elasticrt/ipc/leash.py", os.getpid(), int(signal.SIGTERM)]
    command = [str(word) for word in (*leash, PYTHON, "-m", "elasticrt", "simulate", *nodes, *where, *faults, *script)]
    print("+ elasticrt simulate " + " ".join(f'"{word}"' if " " in word else word for word in command[8:]), flush=True)
    try:
        return run_and_forward(command)
    finally:
        shutil.rmtree(checkpoints)


def run_and_forward(command: list[str]) -> int:
    """Run `command` in the foreground, and return its exit code. SIGTERM is passed on to the command."""
    process: subprocess.Popen[bytes] | None = None

    def pass_on(number: int, _frame: object) -> None:
        # Ctrl-C reaches the command from the terminal. It is only ignored here, so that this process outlives it.
        if process is not None and process.poll() is None and number == signal.SIGTERM:
            process.send_signal(number)

    before = {number: signal.signal(number, pass_on) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        process = subprocess.Popen(command)
        code = process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return code if code >= 0 else 128 - code


def test(rest: list[str]) -> int:
    """Check lint, types, documentation and tests. All run, pytest last. Returns the first exit code that is not 0."""
    full = "--full" in rest
    args = [word for word in rest if word != "--full"]
    slice_ = [] if full else ["-m", "not slow"]
    # Most tests wait for processes, so running one more at a time than there are cores is faster. `-n 0` among the
    # arguments runs one at a time.
    together = ["-n", str(min(4, (os.cpu_count() or 1) + 1)), "--dist", "loadfile"]
    checks = {**lints(), "mypy": ["mypy"], "mkdocs": MKDOCS, "pytest": ["pytest", *slice_, *together, *args]}
    return run_all(checks)


def docs(_: list[str]) -> int:
    """Build the documentation as a site. A dead link, or a docstring that does not fit its function, is a failure."""
    code = run_all({"mkdocs": MKDOCS})
    if code == 0:
        print("built: build/site/index.html")
    return code


def cluster(rest: list[str]) -> int:
    """Run hosts as network namespaces. `python3 dev.py cluster` without arguments prints what can be done with them."""
    return run_and_forward([str(PYTHON), "-m", "tests.netns", *rest])


def lint(_: list[str]) -> int:
    """Check lint and types."""
    return run_all({**lints(), "mypy": ["mypy"]})


def reformat(_: list[str]) -> int:
    """Format the code and apply the safe fixes of the linter."""
    return run_all({"ruff check --fix": ["ruff", "check", "--fix", "."], "ruff format": ["ruff", "format", "."]})


def lints() -> dict[str, list[str]]:
    """The linter's two checks."""
    return {"ruff check": ["ruff", "check", "."], "ruff format": ["ruff", "format", "--check", "."]}


def run_all(checks: dict[str, list[str]]) -> int:
    """Run each check, a module with its arguments, in `.venv`. Returns the first exit code that is not 0, else 0."""
    failed: dict[str, int] = {}
    # mkdocs advertises its successor on each build otherwise.
    os.environ.setdefault("NO_MKDOCS_2_WARNING", "1")
    for name, words in checks.items():
        print(f"+ {' '.join(words)}", flush=True)
        code = run_and_forward([str(PYTHON), "-m", *words])
        if code:
            failed[name] = code
        if code in (128 + signal.SIGINT, 128 + signal.SIGTERM):
            break
    if failed:
        print("FAILED: " + ", ".join(f"{name} ({code})" for name, code in failed.items()), file=sys.stderr, flush=True)
    return next(iter(failed.values()), 0)


def clean(_: list[str]) -> int:
    """Remove what builds and test runs leave in the checkout, except for `.venv`."""
    caches = [".mypy_cache", ".pytest_cache", ".ruff_cache", ".hypothesis", "build", "dist", "elasticrt_runs"]
    for path in [*(ROOT / name for name in caches), *ROOT.glob("*.egg-info")]:
        if path.is_dir():
            shutil.rmtree(path)
            print(f"removed {path.relative_to(ROOT)}")
    for folder in ("elasticrt", "tests", "examples"):
        for path in (ROOT / folder).rglob("__pycache__"):
            shutil.rmtree(path)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
