"""Teeth: the protocol with one rule broken at a time, and the invariant that notices.

By hand: a piece of a production function replaced by another. Generated: each compare of each transaction left out, and
each guard of the decision functions skipped. `python -m tests.virtual.mutants` hunts for the first story or seed in
which an invariant (not an exception) catches each, and prints the table; `--write` keeps the places in `catches.py`,
from which the tests run every mutant in its place, and writes `MUTANTS.md`.
"""

from __future__ import annotations

import argparse
import ast
import functools
import importlib
import inspect
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from elasticrt.rendezvous import transactions
from tests.virtual.catches import CATCHES
from tests.virtual.edits import EDITS
from tests.virtual.harmless import HARMLESS
from tests.virtual.plan import draw
from tests.virtual.simulator import Failed, simulate
from tests.virtual.stories import STORIES

GUARDED = (
    "elasticrt.rendezvous.decide",
    "elasticrt.rendezvous.leader_context",
    "elasticrt.rendezvous.reconfiguration",
)
"""Modules of which every guard is left out once."""


@dataclass(frozen=True)
class Mutant:
    """One broken rule: `apply` breaks it while it is entered."""

    name: str
    apply: Callable[[], Any]


def mutants() -> dict[str, Mutant]:
    """All of them by name."""
    found = [Mutant(name, functools.partial(_edited, edits)) for name, edits in EDITS.items()]
    for function, compares in _transactions().items():
        found += [
            Mutant(
                f"{function} without {text}",
                functools.partial(_without_compare, function, index, index + 1 == len(compares)),
            )
            for index, text in enumerate(compares)
        ]
    for module in GUARDED:
        for function, guards in _guards(module).items():
            found += [
                Mutant(f"{function} without: {text}", functools.partial(_without_guard, module, function, index))
                for index, text in guards.items()
            ]
    return {mutant.name: mutant for mutant in found}


@contextmanager
def _edited(edits: tuple[tuple[str, str, str, str], ...]) -> Iterator[None]:
    undo: list[Callable[[], None]] = []
    try:
        sources: dict[tuple[str, str], str] = {}
        for module, name, old, new in edits:
            source = sources.get((module, name)) or _source(module, name)
            if old not in source:
                raise LookupError(f"{module}.{name} has no {old!r} any more: bring the mutant up to date")
            sources[module, name] = source.replace(old, new)
        for (module, name), source in sources.items():
            undo.append(_put(module, name, source))
        yield
    finally:
        for step in reversed(undo):
            step()


@contextmanager
def _without_compare(function: str, index: int, last: bool) -> Iterator[None]:
    """The last one in the source may stand for several, one for each of some nodes: they go together."""
    original = getattr(transactions, function)

    def drop(txn: Any) -> Any:
        compares = tuple(
            compare for place, compare in enumerate(txn.compares) if place < index or (place > index and not last)
        )
        return replace(txn, compares=compares)

    @functools.wraps(original)
    def mutant(*args: Any, **kwargs: Any) -> Any:
        made = original(*args, **kwargs)
        return tuple(map(drop, made)) if isinstance(made, tuple) else drop(made)

    setattr(transactions, function, mutant)
    try:
        yield
    finally:
        setattr(transactions, function, original)


def _transactions() -> dict[str, list[str]]:
    """The functions of `transactions` that make transactions, and what each compares, in order."""
    made = {}
    for node in ast.parse(inspect.getsource(transactions)).body:
        if isinstance(node, ast.FunctionDef) and node.returns is not None and "Txn" in ast.unparse(node.returns):
            calls = [call for call in ast.walk(node) if isinstance(call, ast.Call)]
            calls.sort(key=lambda call: (call.lineno, call.col_offset))
            made[node.name] = [ast.unparse(call) for call in calls if ast.unparse(call.func) in COMPARING]
    return made


COLLECTED = ("trouble", "evidence", "since")
"""Lists whose largest entry is looked for: whether there is any has to be asked first."""

COMPARING = ("_unchanged", "_absent", "_own_key_kept", "_own_lease_kept", "_generation_unchanged")


def _guards(module: str) -> dict[str, dict[int, str]]:
    """Each function's guards by their place. What only asks for None is no rule: the type checker wants it."""
    found: dict[str, dict[int, str]] = {}
    for name, function in _functions(ast.parse(inspect.getsource(importlib.import_module(module))).body):
        ifs = [node for node in ast.walk(function) if isinstance(node, ast.If)]
        ifs.sort(key=lambda node: node.lineno)
        kept = {index: ast.unparse(node.test)[:80] for index, node in enumerate(ifs) if not _is_none(node.test)}
        if kept:
            found[name] = kept
    return found


def _functions(body: list[ast.stmt], owner: str = "") -> Iterator[tuple[str, ast.FunctionDef]]:
    """All functions and methods that decide something, with their names. Those that give words decide nothing."""
    for node in body:
        if isinstance(node, ast.ClassDef):
            yield from _functions(node.body, f"{node.name}.")
        elif isinstance(node, ast.FunctionDef) and node.returns is not None and ast.unparse(node.returns) != "str":
            yield owner + node.name, node


def _is_none(test: ast.expr) -> bool:
    """Whether a test only asks if there is anything, or of what type it is: what follows could not be computed else."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return isinstance(test.operand, ast.Name) and test.operand.id in COLLECTED
    if isinstance(test, ast.Call):
        return ast.unparse(test.func) == "isinstance"
    is_none = isinstance(test, ast.Compare) and isinstance(test.ops[0], ast.Is)
    return is_none and ast.unparse(test).endswith(" is None")


class _Without(ast.NodeTransformer):
    """Leaves one guard out; of `x is None or rule(x)` only the rule."""

    def __init__(self, lineno: int) -> None:
        self.lineno = lineno

    def visit_If(self, node: ast.If) -> Any:
        """See `ast.NodeTransformer`."""
        if node.lineno != self.lineno:
            return self.generic_visit(node)
        asked = [term for term in node.test.values if _is_none(term)] if isinstance(node.test, ast.BoolOp) else []
        if asked and isinstance(node.test, ast.BoolOp) and isinstance(node.test.op, ast.Or):
            node.test = asked[0] if len(asked) == 1 else ast.BoolOp(ast.Or(), asked)
            return node
        return node.orelse or ast.Pass()


@contextmanager
def _without_guard(module: str, function: str, index: int) -> Iterator[None]:
    tree = ast.parse(_source(module, function))
    lines = sorted(node.lineno for node in ast.walk(tree) if isinstance(node, ast.If))
    tree = ast.fix_missing_locations(_Without(lines[index]).visit(tree))
    undo = _put(module, function, ast.unparse(tree))
    try:
        yield
    finally:
        undo()


def _source(module: str, name: str) -> str:
    owner: Any = importlib.import_module(module)
    for part in name.split("."):
        owner = inspect.getattr_static(owner, part)
    if isinstance(owner, property):
        owner = owner.fget
    if isinstance(owner, functools.cached_property):
        owner = owner.func
    return textwrap.dedent(inspect.getsource(owner))


def _put(module: str, name: str, source: str) -> Callable[[], None]:
    """Compile a function anew, in place of the old one wherever that has been imported to; how to undo it."""
    home: Any = importlib.import_module(module)
    class_name, _, attribute = name.rpartition(".")
    space: dict[str, Any] = {}
    exec(compile(source, f"<mutant of {name}>", "exec", dont_inherit=True), vars(home), space)
    new = space[attribute]
    if class_name:
        owner = getattr(home, class_name)
        old = inspect.getattr_static(owner, attribute)
        if isinstance(new, functools.cached_property):
            new.__set_name__(owner, attribute)
        setattr(owner, attribute, new)
        return lambda: setattr(owner, attribute, old)
    old = getattr(home, attribute)
    users = [
        module
        for key, module in list(sys.modules.items())
        if key.startswith(("elasticrt", "tests.virtual")) and vars(module).get(attribute) is old
    ]
    for user in users:
        setattr(user, attribute, new)
    return lambda: [setattr(user, attribute, old) for user in users] and None


Place = int | str
"""Where a mutant is caught: a seed, or the name of a story."""


def caught(name: str, place: Place) -> str:
    """What notices a mutant in one place: an invariant's name, "exception", or "" for nothing."""
    with mutants()[name].apply():
        return _seen(place)


def _seen(place: Place) -> str:
    try:
        simulate(STORIES[place] if isinstance(place, str) else draw(place))
    except Failed as failed:
        return failed.name
    except Exception:  # noqa: BLE001  Whatever a broken protocol runs into, it is not an invariant.
        return "exception"
    return ""


def hunt(name: str, first: int, seeds: int) -> tuple[str, str, Place]:
    """The first place where an invariant catches a mutant: its name, the invariant, story or seed (-1 for none)."""
    crashed = ""
    try:
        with mutants()[name].apply():
            for place in (*STORIES, *range(first, first + seeds)):
                what = _seen(place)
                if what and what != "exception":
                    return name, what, place
                crashed = crashed or what
    except LookupError as error:
        return name, str(error), -1
    return name, crashed, -1


def main() -> int:
    """Hunt, and print the table."""
    parser = argparse.ArgumentParser(prog="python -m tests.virtual.mutants", description=__doc__)
    parser.add_argument("--seeds", type=int, default=100, help="how many to try after the stories")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--write", action="store_true", help="keep the places in catches.py, and write MUTANTS.md")
    parser.add_argument("--only", default="", help="mutants whose name contains this")
    parser.add_argument("--known", action="store_true", help="try the places in catches.py first; hunt for the rest")
    options = parser.parse_args()
    every = list(mutants())
    names = [name for name in every if options.only in name]
    kept = {name: CATCHES[name] for name in every if name in CATCHES and (options.known or name not in names)}
    found: dict[str, tuple[str, Place]] = {}
    with ProcessPoolExecutor(options.jobs) as pool:
        if options.known:
            again = [name for name in names if name in kept]
            for name, what in zip(again, pool.map(caught, again, [kept[name][1] for name in again]), strict=True):
                if what in ("", "exception"):
                    print(f"{name:<78} no longer caught in {kept.pop(name)[1]}", flush=True)
                else:
                    kept[name] = (what, kept[name][1])
        todo = [name for name in names if name not in kept and name not in HARMLESS]
        for job in as_completed([pool.submit(hunt, name, options.first, options.seeds) for name in todo]):
            name, what, place = job.result()
            print(f"{name:<78} {what or '-':<9} {place if place != -1 else 'not caught'}", flush=True)
            if place != -1:
                found[name] = (what, place)
    catches = {name: {**kept, **found}[name] for name in every if name in kept or name in found}
    missed = [name for name in names if name not in catches and name not in HARMLESS]
    print(f"{len(every)} mutants, {len(catches)} caught, {len(HARMLESS)} harmless; neither: {missed}")
    if options.write:
        HERE.joinpath("catches.py").write_text(_catches(catches))
        subprocess.run([sys.executable, "-m", "ruff", "format", "--quiet", HERE / "catches.py"], check=True)
        HERE.joinpath("MUTANTS.md").write_text(_page(every, catches))
    return 1 if missed else 0


HERE = Path(__file__).parent


def _catches(catches: dict[str, tuple[str, Place]]) -> str:
    lines = ['"""Which invariant catches which mutant where. Written by `python -m tests.virtual.mutants --write`."""']
    lines += ["", "# ruff: noqa: E501  Names of mutants may be long."]
    lines += ["", "CATCHES: dict[str, tuple[str, int | str]] = {"]
    lines += [f"    {name!r}: {pair!r}," for name, pair in catches.items()]
    return "\n".join([*lines, "}", ""])


def _page(names: list[str], catches: dict[str, tuple[str, Place]]) -> str:
    """The table for people."""
    lines = [
        "# The protocol with one rule broken at a time",
        "",
        "Written by `python -m tests.virtual.mutants --known --write`. The invariants are those of the simulator",
        "(`invariants.py`, `conduct.py`, `work.py`); a place is a seed (`python -m tests.virtual --first N --seeds 1`)",
        "or a story (`stories_of_loss.py`, `stories_of_change.py`, `stories_of_copies.py`, `stories_in_place.py`).",
        "",
        f"{len(names)} mutants: {len(catches)} caught, {len([n for n in names if n in HARMLESS])} harmless.",
        "",
        "| rule that is broken | caught by | in |",
        "|---|---|---|",
    ]
    for name in names:
        shown = name.replace("|", "\\|")
        if name in catches:
            what, place = catches[name]
            lines.append(f"| {shown} | {what} | {f'seed {place}' if isinstance(place, int) else place} |")
    lines += ["", "| rule that is broken | why that is harmless |", "|---|---|"]
    lines += [f"| {name.replace('|', chr(92) + '|')} | {why} |" for name, why in HARMLESS.items() if name in names]
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    sys.exit(main())
