"""What a script says of itself before it runs: why it cannot be run by a fork, and which libraries it begins with.

A fork has torch already: a variable that the script sets for torch or one of its libraries to read as they load would
come too late. Such a script gets a fresh interpreter. When in doubt it gets one as well: that costs time, nothing else.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Mapping

_SAFE = frozenset(
    (
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "CUDA_VISIBLE_DEVICES",
        "CUDA_DEVICE_ORDER",
        "CUDA_LAUNCH_BLOCKING",
        "CUBLAS_WORKSPACE_CONFIG",
        "TF_CPP_MIN_LOG_LEVEL",
        "TORCH_HOME",
    )
)
"""Variables that are read when they are used: by `init_process_group`, the first CUDA call, the first download."""

_SAFE_PREFIXES = (
    *("MASTER_", "NCCL_", "TORCH_NCCL_", "GLOO_", "TORCHELASTIC_"),  # Read when a process group is made.
    *("HF_", "TRANSFORMERS_", "TOKENIZERS_", "WANDB_", "MLFLOW_", "COMET_", "TQDM_"),  # Of libraries never preloaded.
    "PYTHON",  # Read by an interpreter that starts, which this one has done already.
)
_MULTIPROCESSING = "torch.multiprocessing"
_SPAWNERS = {"spawn", "start_processes"}
_WRITERS = {"update", "setdefault", "pop", "popitem", "clear", "__setitem__", "__delitem__", "__ior__"}
_ANY = "variables that only running it would tell"

_SHORT_LIST = ("einops", "numpy", "PIL", "safetensors", "scipy", "torchaudio", "torchvision")
"""Well-known libraries whose import takes long, does nothing else, and reads nothing that differs between workers."""

_Place = tuple[int, int]


def parse(source: str | bytes) -> ast.Module:
    """A script's syntax tree; an empty one for what is not Python: the interpreter will say what is wrong with it."""
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError):
        return ast.Module([], [])


def early_write(tree: ast.Module, env: Mapping[str, str]) -> str:
    """The first write to the environment that a fork would make too late, in words; "" when there is none.

    Only what comes before an import counts, and nothing that comes after `import torch`. `env` is what the script
    starts with: setting a variable to the value that it has already is no change.
    """
    imports = [(_place(node), name) for node in ast.walk(tree) for name in _imported(node)]
    torch_at = min((_place(node) for node in _certain(tree) if "torch" in _imported(node)), default=None)
    for place, name in sorted(_writes(tree, env)):
        if torch_at is not None and torch_at < place:
            continue
        after = min(((at, module) for at, module in imports if at > place), default=None)
        if after is not None and not _is_safe(name):
            return f"line {place[0]} sets {name} before `import {after[1]}` in line {after[0][0]}"
    return ""


def first_imports(tree: ast.Module) -> list[str]:
    """The modules of the short list that the script's first statements import: nothing of its own ran before them.

    With `from scipy import stats` that is `scipy.stats` as well, which may turn out to be no module.
    """
    names: list[str] = []
    for node in tree.body[ast.get_docstring(tree) is not None :]:
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names += [f"{node.module}.{alias.name}" for alias in node.names if node.level == 0]
        else:
            break
    return [name for name in dict.fromkeys(names) if name.partition(".")[0] in _SHORT_LIST]


def early_spawn(tree: ast.Module) -> str:
    """Where a script starts training processes by `mp.spawn`, in words; "" when it does not.

    One of these hosts the store of a run of several nodes then, on MASTER_PORT, which no fork may keep open for itself.
    """
    modules, functions = {_MULTIPROCESSING}, set()
    for node in ast.walk(tree):
        for alias in node.names if isinstance(node, ast.Import | ast.ImportFrom) else ():
            full = f"{node.module}.{alias.name}" if isinstance(node, ast.ImportFrom) else alias.name
            if full == _MULTIPROCESSING:
                modules.add(alias.asname or alias.name)
            elif full.rpartition(".")[0] == _MULTIPROCESSING and alias.name in _SPAWNERS:
                functions.add(alias.asname or alias.name)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            module, _, function = called.rpartition(".")
            if called in functions or (module in modules and function in _SPAWNERS):
                return f"line {node.lineno} calls {called}, whose processes may host the store"
    return ""


def _is_safe(name: str) -> bool:
    return name in _SAFE or name.startswith(_SAFE_PREFIXES)


def _place(node: ast.AST) -> _Place:
    return node.lineno, node.col_offset  # type: ignore[attr-defined]  # Statements and expressions have both.


def _imported(node: ast.AST) -> list[str]:
    """The top-level names that a statement imports, but for Python's own."""
    names: list[str] = []
    if isinstance(node, ast.Import):
        names = [alias.name.partition(".")[0] for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
        names = ["." if node.level else (node.module or "").partition(".")[0]]
    return [name for name in names if name not in sys.stdlib_module_names]


def _certain(tree: ast.Module) -> Iterator[ast.stmt]:
    """The statements that run whenever the script runs: those of its top level, in `with` and in `try`."""
    todo: list[ast.stmt] = list(tree.body)
    while todo:
        node = todo.pop()
        yield node
        if isinstance(node, (ast.With, ast.Try)):
            todo += node.body


def _writes(tree: ast.Module, env: Mapping[str, str]) -> Iterator[tuple[_Place, str]]:
    """Every place that changes the environment, and the variable's name."""
    environ = _names_of_environ(tree)
    for node in ast.walk(tree):
        if isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Delete)):
            targets = node.targets if isinstance(node, (ast.Assign, ast.Delete)) else [node.target]
            value = node.value if isinstance(node, (ast.Assign, ast.AnnAssign)) else None
            for target in targets:
                yield from ((_place(node), name) for name in _assigned(target, value, environ, env))
        elif isinstance(node, ast.Call):
            yield from ((_place(node), name) for name in _called(node, environ, env))


def _names_of_environ(tree: ast.Module) -> set[str]:
    names = {"environ"}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "os":
            names |= {alias.asname or alias.name for alias in node.names if alias.name in ("environ", "environb")}
        elif isinstance(node, ast.Assign) and _is_environ(node.value, set()):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return names


def _is_environ(node: ast.expr, environ: set[str]) -> bool:
    if isinstance(node, ast.Attribute):
        return node.attr in ("environ", "environb")
    return isinstance(node, ast.Name) and node.id in environ


def _assigned(target: ast.expr, value: ast.expr | None, environ: set[str], env: Mapping[str, str]) -> Iterator[str]:
    """`os.environ[...] = ...`, `del os.environ[...]`, `os.environ |= ...`, several at once."""
    if isinstance(target, (ast.Tuple, ast.List)):
        for each in target.elts:
            yield from _assigned(each, None, environ, env)
    elif _is_environ(target, environ) and not isinstance(target, ast.Name):
        yield _ANY
    elif isinstance(target, ast.Name) and target.id in environ and value is None:
        yield _ANY  # `environ |= ...`; a plain assignment to the name changes no environment.
    elif isinstance(target, ast.Subscript) and _is_environ(target.value, environ):
        name = _text(target.slice)
        if name == _ANY or value is None or env.get(name) != _text(value):
            yield name


def _called(call: ast.Call, environ: set[str], env: Mapping[str, str]) -> Iterator[str]:
    """`os.environ.update(...)` and its like, `os.putenv`, and the well-known reader of `.env` files."""
    function = call.func
    name = (
        function.attr if isinstance(function, ast.Attribute) else function.id if isinstance(function, ast.Name) else ""
    )
    first = _text(call.args[0]) if call.args else _ANY
    if name in ("putenv", "unsetenv"):
        yield first
    elif name == "load_dotenv":
        yield _ANY
    elif not (isinstance(function, ast.Attribute) and name in _WRITERS and _is_environ(function.value, environ)):
        return
    elif name in ("setdefault", "pop"):
        if first == _ANY or (first in env) == (name == "pop"):
            yield first
    elif name in ("update", "__ior__"):
        yield from _updated(call, env)
    else:
        yield first


def _updated(call: ast.Call, env: Mapping[str, str]) -> Iterator[str]:
    pairs: list[tuple[str, ast.expr]] = [(word.arg or _ANY, word.value) for word in call.keywords]
    for each in call.args:
        if not isinstance(each, ast.Dict):
            yield _ANY
            continue
        pairs += [
            (_ANY if key is None else _text(key), value) for key, value in zip(each.keys, each.values, strict=True)
        ]
    for name, value in pairs:
        if name == _ANY or env.get(name) != _text(value):
            yield name


def _text(node: ast.expr) -> str:
    """The text that an expression is, if it is one as it stands."""
    if isinstance(node, ast.Constant) and isinstance(node.value, (str, bytes)):
        return node.value if isinstance(node.value, str) else node.value.decode(errors="replace")
    return _ANY
