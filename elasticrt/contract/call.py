"""A function call that travels from its caller to the workers of a run, and the values that come back. Pure.

Both lie in memory that the caller holds open; what a worker gets are the paths of the caller's descriptors, which
nobody but the same user can open, and which are gone with the caller.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

CALL_VARIABLE = "ELASTICRT_CALL"
"""The path of the pickled `Call`."""

VALUES_VARIABLE = "ELASTICRT_CALL_VALUES"
"""The paths for the values, one for each local rank, with colons between them."""


@dataclass(frozen=True)
class Name:
    """One global name of an interactive session: how to have it elsewhere.

    Attributes:
        name: what the session calls it.
        module: the module to import, or "".
        cell, line, defines: where its definition is (the first line, decorators included), and what that calls it.
        value: the pickle of any other value.
    """

    name: str
    module: str = ""
    cell: str = ""
    line: int = 0
    defines: str = ""
    value: bytes = b""


@dataclass(frozen=True)
class Call:
    """Everything a worker needs.

    Attributes:
        preparation: what `multiprocessing` tells a child about its parent's main module, paths and arguments.
        names: for a function of an interactive session, all it refers to, in an order in which they can be made.
        cells: the texts of the cells that define some of the names.
        function: the pickle of the function and its arguments.
    """

    preparation: Mapping[str, Any]
    names: tuple[Name, ...]
    cells: Mapping[str, str]
    function: bytes


Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def definition(text: str, name: str, line: int = 0) -> Definition | None:
    """The last definition of `name` in a cell; with `line`, the one that begins there. SyntaxError for no Python."""
    found = None
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, Definition) and node.name == name and line in (0, first_line(node)):
            found = node
    return found


def first_line(node: Definition) -> int:
    """Where a definition begins, decorators included, as a function's code object counts."""
    return min([node.lineno, *(each.lineno for each in node.decorator_list)])
