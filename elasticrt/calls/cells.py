"""What a function of an interactive session needs elsewhere: the definitions and values that it refers to.

A script's functions are found by importing the script again. The functions of a notebook cell are in no file, so their
source is sent, with that of every function and class of the session they name, and the values of its other names.
"""

from __future__ import annotations

import ast
import inspect
import io
import linecache
import pickle
import symtable
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from elasticrt.contract.call import Name, definition, first_line
from elasticrt.errors import ConfigError, explain

MAIN = "__main__"


def gather(wanted: str, session: Mapping[str, Any]) -> tuple[tuple[Name, ...], dict[str, str]]:
    """All names that `wanted`, a function of the session, refers to, and the cells that define them.

    Raises ConfigError for what cannot be sent.
    """
    gathering = _Gathering(session)
    gathering.need(wanted)
    return tuple(gathering.names), gathering.cells


class _Gathering:
    def __init__(self, session: Mapping[str, Any]) -> None:
        self._session = session
        self._seen: set[str] = set()
        self.names: list[Name] = []
        self.cells: dict[str, str] = {}

    def need(self, name: str) -> None:
        """Gather `name` after everything it needs itself. Names that the session does not have are builtins."""
        if name in self._seen or name not in self._session:
            return
        self._seen.add(name)
        value = self._session[name]
        if isinstance(value, ModuleType):
            self.names.append(Name(name, module=value.__name__))
        elif _is_defined_here(value):
            self._define(name, value)
        else:
            self._keep(name, value)

    def _define(self, name: str, value: Any) -> None:
        cell, line = _where(value, name)
        text = "".join(linecache.getlines(cell))
        node = definition(text, value.__name__, line)
        assert node is not None  # `_where` has looked.
        self.cells[cell] = text
        for each in _globals(ast.unparse(node)):
            self.need(each)
        self.names.append(Name(name, cell=cell, line=line, defines=value.__name__))

    def _keep(self, name: str, value: Any) -> None:
        pickler = _Pickler()
        try:
            pickler.dump(value)
        except (pickle.PicklingError, TypeError, AttributeError, ValueError, RuntimeError) as error:
            raise ConfigError(
                explain(
                    f"the function uses {name!r}, which can't be sent to workers",
                    "spawn",
                    got=f"{type(value).__name__}: {error}",
                    expected="functions, classes, modules and values that can be pickled",
                    remedy="Make it inside the function",
                )
            ) from error
        for each in sorted(pickler.of_the_session):
            self.need(each)
        self.names.append(Name(name, value=pickler.buffer.getvalue()))


class _Pickler(pickle.Pickler):
    """Notes which classes and functions of the session a value refers to."""

    def __init__(self) -> None:
        self.buffer = io.BytesIO()
        self.of_the_session: set[str] = set()
        super().__init__(self.buffer)

    def reducer_override(self, value: Any) -> Any:
        """Called for every object; the ordinary way is taken for all."""
        if _is_defined_here(value):
            self.of_the_session.add(value.__name__)
        return NotImplemented


def _is_defined_here(value: Any) -> bool:
    return isinstance(value, FunctionType | type) and value.__module__ == MAIN


def _where(value: Any, name: str) -> tuple[str, int]:
    """The cell in which a function or class is defined, and its first line there."""
    if isinstance(value, FunctionType):
        code = inspect.unwrap(value).__code__
        places = [(code.co_filename, code.co_firstlineno)]
    else:
        # A class does not know its cell: the newest that defines one of this name.
        places = [(cell, 0) for cell in _cells()]
    for cell, line in places:
        try:
            node = definition("".join(linecache.getlines(cell)), value.__name__, line)
        except SyntaxError:
            continue  # With a line of IPython's own language: what Python makes of it is under another name.
        if node is not None:
            return cell, first_line(node)
    raise ConfigError(
        explain(
            f"the source of {name!r} is not known",
            "spawn",
            got=f"{MAIN}.{value.__qualname__}",
            expected="a `def` or `class` at the top of a script, a module or a notebook cell",
            remedy="Put it into a file and import it from there",
        )
    )


def _cells() -> Iterator[str]:
    """The names under which a session's cells are known, the newest first: those that are no files."""
    return (name for name in reversed(list(linecache.cache)) if not Path(name).exists())


def _globals(source: str) -> list[str]:
    """The names that a definition looks up outside of itself, in a fixed order."""
    found: set[str] = set()
    tables = [symtable.symtable(source, "cell", "exec")]
    while tables:
        table = tables.pop()
        top = table.get_type() == "module"
        found |= {s.get_name() for s in table.get_symbols() if s.is_referenced() and (top or s.is_global())}
        tables += table.get_children()
    return sorted(found)
