"""Teeth: the protocol with one rule broken at a time, and the invariant that notices.

By hand: a piece of a production function replaced by another. Generated: each compare of each transaction left out, and
each guard of the decision functions skipped. `python -m tests.virtual.mutants` hunts for the first seed in which an
invariant (not an exception) catches each, and prints the table; `--write` keeps the seeds in `catches.py`, from which
the tests run every mutant on its seed.
"""

from __future__ import annotations

import argparse
import ast
import functools
import importlib
import inspect
import os
import sys
import textwrap
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from elasticrt.rendezvous import decide as decide_module  # noqa: F401  Loads what mutants are made of.
from elasticrt.rendezvous import fence
from tests.virtual.edits import EDITS
from tests.virtual.plan import draw
from tests.virtual.simulator import Failed, simulate

TRANSACTIONS = {
    "register": 4, "register_again": 3, "announce": 1, "file": 2, "leave": 2, "roster": 1, "publish": 5, "evict": 2,
    "finish": 4, "commit": 3, "claim": 2, "settle": 1,
}  # fmt: skip
"""The transactions of `fence`, and how many compares each has."""

GUARDED = (
    ("elasticrt.rendezvous.decide", "decide"),
    ("elasticrt.rendezvous.decide", "_lead"),
    ("elasticrt.rendezvous.decide", "_follow"),
    ("elasticrt.rendezvous.decide", "_fence_or_wait"),
    ("elasticrt.rendezvous.decide", "_gone"),
)


@dataclass(frozen=True)
class Mutant:
    """One broken rule: `apply` breaks it while it is entered."""

    name: str
    apply: Callable[[], Any]


def mutants() -> dict[str, Mutant]:
    """All of them by name."""
    found = [Mutant(name, functools.partial(_edited, edits)) for name, edits in EDITS.items()]
    for function, count in TRANSACTIONS.items():
        found += [
            Mutant(f"{function} without compare {index}", functools.partial(_without_compare, function, index))
            for index in range(count)
        ]
    for module, function in GUARDED:
        guards = _guards(module, function)
        found += [
            Mutant(f"{function} without: {text}", functools.partial(_without_guard, module, function, index))
            for index, text in enumerate(guards)
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
def _without_compare(function: str, index: int) -> Iterator[None]:
    original = getattr(fence, function)

    def drop(txn: Any) -> Any:
        compares = tuple(compare for place, compare in enumerate(txn.compares) if place != index)
        return replace(txn, compares=compares)

    def mutant(*args: Any, **kwargs: Any) -> Any:
        made = original(*args, **kwargs)
        return tuple(map(drop, made)) if isinstance(made, tuple) else drop(made)

    setattr(fence, function, mutant)
    try:
        yield
    finally:
        setattr(fence, function, original)


def _guards(module: str, function: str) -> list[str]:
    body = ast.parse(_source(module, function)).body[0].body  # type: ignore[attr-defined]  It is a function.
    return [ast.unparse(node.test)[:80] for node in body if isinstance(node, ast.If)]


@contextmanager
def _without_guard(module: str, function: str, index: int) -> Iterator[None]:
    tree = ast.parse(_source(module, function))
    body = tree.body[0].body  # type: ignore[attr-defined]  It is a function.
    guards = [node for node in body if isinstance(node, ast.If)]
    body.remove(guards[index])
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


def caught(name: str, seed: int) -> str:
    """What notices a mutant in one seed: an invariant's name, "exception", or "" for nothing."""
    with mutants()[name].apply():
        try:
            simulate(draw(seed))
        except Failed as failed:
            return failed.name
        except Exception:  # noqa: BLE001  Whatever a broken protocol runs into, it is not an invariant.
            return "exception"
    return ""


def hunt(name: str, first: int, seeds: int) -> tuple[str, str, int]:
    """The first seed in which an invariant catches a mutant: its name, the invariant, the seed (-1 for none)."""
    crashed = ""
    for seed in range(first, first + seeds):
        what = caught(name, seed)
        if what and what != "exception":
            return name, what, seed
        crashed = crashed or what
    return name, crashed, -1


def main() -> int:
    """Hunt, and print the table."""
    parser = argparse.ArgumentParser(prog="python -m tests.virtual.mutants", description=__doc__)
    parser.add_argument("--seeds", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--write", action="store_true", help="keep the catching seeds in catches.py")
    parser.add_argument("--only", default="", help="mutants whose name contains this")
    parser.add_argument("--known", action="store_true", help="start with the seeds in catches.py; hunt for the rest")
    options = parser.parse_args()
    from tests.virtual.catches import CATCHES, UNCAUGHT

    names = [name for name in mutants() if options.only in name]
    kept = {name: CATCHES[name] for name in names if name in CATCHES} if options.known else {}
    todo = [name for name in names if name not in kept]
    with ProcessPoolExecutor(options.jobs) as pool:
        jobs = [pool.submit(hunt, name, options.first, options.seeds) for name in todo]
        found = {}
        for job in as_completed(jobs):
            name, what, seed = job.result()
            found[name] = (what, seed)
            print(f"{name:<78} {what or '-':<9} {seed if seed >= 0 else UNCAUGHT.get(name, 'not caught')}", flush=True)
    catches = {**kept, **{name: pair for name, pair in found.items() if pair[1] >= 0}}
    missed = [name for name in names if name not in catches]
    print(f"{len(names)} mutants, {len(catches)} caught, {len(missed)} not: {[n for n in missed if n not in UNCAUGHT]}")
    if options.write:
        _write({name: catches[name] for name in names if name in catches}, UNCAUGHT)
    return 1 if any(name not in UNCAUGHT for name in missed) else 0


def _write(catches: dict[str, tuple[str, int]], uncaught: dict[str, str]) -> None:
    lines = ['"""Which invariant catches which mutant in which seed. `python -m tests.virtual.mutants --write`."""']
    lines += ["", "# ruff: noqa: E501  A table.", "CATCHES: dict[str, tuple[str, int]] = {"]
    lines += [f"    {name!r}: {pair!r}," for name, pair in catches.items()]
    lines += ["}", "", "UNCAUGHT: dict[str, str] = {"]
    lines += [f"    {name!r}: {why!r}," for name, why in uncaught.items()]
    lines += ["}", ""]
    Path(__file__).with_name("catches.py").write_text("\n".join(lines))


if __name__ == "__main__":
    sys.exit(main())
