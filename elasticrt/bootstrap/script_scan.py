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
        *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "TORCH_HOME", "TF_CPP_MIN_LOG_LEVEL"),
        *("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "CUDA_LAUNCH_BLOCKING", "CUBLAS_WORKSPACE_CONFIG"),
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
    certain = [*tree.body, *(each for node in tree.body if isinstance(node, ast.With | ast.Try) for each in node.body)]
    torch_at = min((_place(node) for node in certain if "torch" in _imported(node)), default=(sys.maxsize, 0))
    for place, name, value in sorted(_writes(tree, env), key=lambda write: write[:2]):
        if name != _ANY and env.get(name) == value:
            continue
        after = min(((at, module) for at, module in imports if at > place), default=None)
        if after is not None and place < torch_at and name not in _SAFE and not name.startswith(_SAFE_PREFIXES):
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
    imported = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            imported |= {module + alias.name for alias in node.names}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            known = called.startswith(_MULTIPROCESSING) or any(name.startswith(_MULTIPROCESSING) for name in imported)
            if known and called.rpartition(".")[2] in _SPAWNERS:
                return f"line {node.lineno} calls {called}, whose processes may host the store"
    return ""


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


def _writes(tree: ast.Module, env: Mapping[str, str]) -> Iterator[tuple[_Place, str, str | None]]:
    """Every place that changes the environment, the variable, and the value that it then has: None for none."""
    environ = {"environ", "environb"}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "os":
            environ |= {alias.asname or alias.name for alias in node.names if alias.name in environ}
    values = {target: node.value for node in ast.walk(tree) if isinstance(node, ast.Assign) for target in node.targets}
    for node in ast.walk(tree):
        if isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load) and _name(node.value) in environ:
            deleted = isinstance(node.ctx, ast.Del)
            yield _place(node), _text(node.slice), None if deleted else _text(values.get(node))
        elif isinstance(node, ast.AugAssign) and _name(node.target) in environ:
            yield _place(node), _ANY, _ANY  # `os.environ |= ...`
        elif isinstance(node, ast.Call):
            yield from ((_place(node), *written) for written in _called(node, environ, env))


def _called(call: ast.Call, environ: set[str], env: Mapping[str, str]) -> list[tuple[str, str | None]]:
    """`os.environ.update(...)` and its like, `os.putenv`, and the well-known reader of `.env` files."""
    method, function = _name(call.func), call.func
    first = _text(call.args[0]) if call.args else _ANY
    if method in ("putenv", "unsetenv"):
        return [(first, _ANY)]
    if method == "load_dotenv":
        return [(_ANY, _ANY)]
    if not isinstance(function, ast.Attribute) or _name(function.value) not in environ:
        return []
    words: list[tuple[str, str | None]] = [(word.arg or _ANY, _text(word.value)) for word in call.keywords]
    pairs: list[tuple[str, str | None]] = [
        (_text(key), _text(value))
        for each in call.args
        if isinstance(each, ast.Dict)
        for key, value in zip(each.keys, each.values, strict=True)
    ]
    written: dict[str, list[tuple[str, str | None]]] = {
        "setdefault": [(first, env.get(first, _ANY))],
        "pop": [(first, None)],
        "update": words + (pairs or [(_ANY, _ANY)] * len(call.args)),
        "clear": [(_ANY, _ANY)],
        "popitem": [(_ANY, _ANY)],
    }
    return written.get(method, [])


def _name(node: ast.expr) -> str:
    """The last name of `os.environ`, `environ` or any other such expression; "" for one without."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _text(node: ast.expr | None) -> str:
    """The text that an expression is, if it is one as it stands."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str | bytes):
        return node.value if isinstance(node.value, str) else node.value.decode(errors="replace")
    return _ANY
