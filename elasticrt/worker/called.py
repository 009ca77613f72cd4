"""What the workers of `elasticrt.spawn` run: find the caller's function as multiprocessing's children do, and call it.

Everything that is unpickled or executed here comes from the caller, whose own function this process is for, through
memory that only the same user can open.
"""

from __future__ import annotations

import ast
import importlib
import linecache
import multiprocessing.spawn
import os
import pickle
import sys
import types
from pathlib import Path
from typing import Any

from elasticrt.contract.call import CALL_VARIABLE, VALUES_VARIABLE, Call, Name, definition
from elasticrt.errors import ConfigError, explain


def main() -> None:
    """Call the function with this worker's local rank, and put down what it returns."""
    local_rank = int(os.environ["ELASTICRT_LOCAL_RANK"])  # LOCAL_RANK is 0 for all where each sees one GPU only.
    target = os.environ[VALUES_VARIABLE].split(":")[local_rank]
    try:
        call: Call = pickle.loads(Path(os.environ[CALL_VARIABLE]).read_bytes())  # noqa: S301  As said above.
    except FileNotFoundError:
        raise ConfigError(
            explain("the process that called spawn is gone", "spawn", got=os.environ[CALL_VARIABLE])
        ) from None
    multiprocessing.spawn.prepare(dict(call.preparation))
    if call.names:
        _restore(call)
    function, arguments = pickle.loads(call.function)  # noqa: S301  As said above.
    value = function(local_rank, *arguments)
    try:
        data = pickle.dumps((int(os.environ["RANK"]), value))
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise ConfigError(
            explain(
                "a value that can't be sent back",
                f"spawn, rank {os.environ['RANK']}",
                got=f"{type(value).__name__}: {error}",
                expected="a value that can be pickled",
                remedy="Return tensors, numbers, texts, and lists, tuples or dicts of them",
            )
        ) from error
    Path(target).write_bytes(data)


def _restore(call: Call) -> None:
    """Give `__main__` the names of the interactive session that the function refers to."""
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    names = vars(main)
    for cell, text in call.cells.items():
        linecache.cache[cell] = (len(text), None, text.splitlines(keepends=True), cell)  # Tracebacks quote from here.
    for each in call.names:
        names[each.name] = _made(each, call, names)


def _made(name: Name, call: Call, names: dict[str, Any]) -> Any:
    if name.module:
        return importlib.import_module(name.module)
    if not name.cell:
        return pickle.loads(name.value)  # noqa: S301  As said above.
    node = definition(call.cells[name.cell], name.defines, name.line)
    assert node is not None  # The caller has found it there.
    exec(compile(ast.Module([node], []), name.cell, "exec", dont_inherit=True), names)  # noqa: S102  As said above.
    return names[name.defines]


if __name__ == "__main__":
    main()
