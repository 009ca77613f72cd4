"""What a script's source tells before it runs: why a fork cannot run it, and which libraries it imports first.

A fork has imported torch already. A variable that the script sets for torch or one of its libraries to read while they
load would come too late there, so such a script gets a fresh interpreter. In doubt it gets one as well, which costs
time and nothing else.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Collection

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
    """A script's syntax tree. Empty for what is not Python: the interpreter reports best what is wrong with it."""
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError):
        return ast.Module([], [])


def early_write(tree: ast.Module) -> str:
    """The first write to the environment that comes too late in a fork, in words; "" if there is none.

    Only a write before an import and before `import torch` counts. `tree`: of the script.
    """
    imports = [(_place(node), name) for node in ast.walk(tree) for name in _imported(node)]
    # Statements that run for certain, so that an `import torch` among them surely comes after the writes above it.
    certain = [*tree.body, *(each for node in tree.body if isinstance(node, ast.With | ast.Try) for each in node.body)]
    torch_at = min((_place(node) for node in certain if "torch" in _imported(node)), default=(sys.maxsize, 0))
    for place, name in sorted(_writes(tree)):
        after = min(((at, module) for at, module in imports if at > place), default=None)
        if after is not None and place < torch_at and name not in _SAFE and not name.startswith(_SAFE_PREFIXES):
            return f"line {place[0]} sets {name} before `import {after[1]}` in line {after[0][0]}"
    return ""


def first_imports(tree: ast.Module) -> list[str]:
    """The modules of `_SHORT_LIST` that the script's first statements import, before anything else of it runs.

    `from scipy import stats` gives `scipy.stats`, which may turn out to be no module.
    """
    names: list[str] = []
    # The docstring may come first.
    for node in tree.body[ast.get_docstring(tree) is not None :]:
        if not isinstance(node, ast.Import | ast.ImportFrom):
            break
        names += _dotted(node)
    return [name for name in dict.fromkeys(names) if name.partition(".")[0] in _SHORT_LIST]


def early_spawn(tree: ast.Module) -> str:
    """Where a script starts training processes by `mp.spawn`, in words; "" if it does not.

    One of these processes hosts the store of a run of several nodes, on MASTER_PORT, which a fork must then not keep
    open.
    """
    nodes = list(ast.walk(tree))
    is_imported = any(name.startswith(_MULTIPROCESSING) for node in nodes for name in _dotted(node))
    for call in (node for node in nodes if isinstance(node, ast.Call) and _name(node.func) in _SPAWNERS):
        called = ast.unparse(call.func)
        if is_imported or called.startswith(_MULTIPROCESSING):
            return f"line {call.lineno} calls {called}, whose processes may host the store"
    return ""


def _place(node: ast.AST) -> _Place:
    return node.lineno, node.col_offset  # type: ignore[attr-defined]  # Statements and expressions have both.


def _dotted(node: ast.AST) -> list[str]:
    """Everything that an import names, with its package; nothing for relative imports and other statements."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and not node.level:
        return [f"{node.module}.{alias.name}" for alias in node.names]
    return []


def _imported(node: ast.AST) -> list[str]:
    """The top-level names that a statement imports, without those of Python's standard library."""
    if isinstance(node, ast.ImportFrom) and node.level:
        return ["."]
    names = [name.partition(".")[0] for name in _dotted(node)]
    return [name for name in names if name not in sys.stdlib_module_names]


def _writes(tree: ast.Module) -> list[tuple[_Place, str]]:
    """Every place that changes the environment, with the variable that it changes."""
    nodes, environ = list(ast.walk(tree)), {"environ", "environb"}
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module == "os":
            environ |= {alias.asname or alias.name for alias in node.names if alias.name in environ}
    return [(_place(node), name) for node in nodes for name in _written(node, environ)]


def _written(node: ast.AST, environ: Collection[str]) -> list[str]:
    """The variables that this node changes: by an item, a method of `os.environ`, or a function known to do so."""
    match node:
        case ast.Subscript(owner, key, ast.Store() | ast.Del()) if _name(owner) in environ:
            return [_text(key)]
        case ast.Call(ast.Attribute(owner, "setdefault" | "pop"), [key, *_]) if _name(owner) in environ:
            return [_text(key)]
        case ast.Call(function, [key, *_]) if _name(function) in ("putenv", "unsetenv"):
            return [_text(key)]
        case ast.Call(function) if _name(function) == "load_dotenv":
            return [_ANY]
        # `os.environ |= ...`
        case ast.AugAssign(owner) | ast.Call(ast.Attribute(owner, "update" | "clear" | "popitem")) if (
            _name(owner) in environ
        ):
            return [_ANY]
    return []


def _name(node: ast.expr) -> str:
    """The last name of `os.environ`, `environ` or any such expression; "" for another one."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _text(node: ast.expr | None) -> str:
    """The text of a literal, or _ANY."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str | bytes):
        return node.value if isinstance(node.value, str) else node.value.decode(errors="replace")
    return _ANY
