"""Builds dataclasses from parsed JSON, and checks each field against its annotation. Pure.

pydantic does this for records in etcd. This is for what workers read as well, which have only the standard library, and
for events, of which a report reads millions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from functools import cache
from typing import Any, TypeVar

Made = TypeVar("Made")

_JSON: dict[str, tuple[type, ...]] = {
    "int": (int,),
    "float": (int, float),
    "bool": (bool,),
    "str": (str,),
    "list": (list,),
    "tuple": (list,),
    "dict": (dict,),
    "None": (type(None),),
}
"""What JSON makes of each type of field. Elements of lists and objects are not checked."""


def typed(kind: type[Made], found: Mapping[str, Any]) -> Made:
    """The dataclass `kind` with the fields `found`. Raises TypeError if one is missing, unknown or of another type."""
    expected = _expected(kind)  # type: ignore[arg-type]  # mypy takes a type variable for unhashable.
    values = {}
    for name, value in found.items():
        types, is_tuple = expected.get(name, ((), False))
        # Not `isinstance`: True would pass as an int, and is no number here.
        if type(value) not in types:
            raise TypeError(f"{name!r} is no field of {kind.__name__}, or of another type")
        values[name] = tuple(value) if is_tuple else value
    return kind(**values)


@cache
def _expected(kind: type[Any]) -> dict[str, tuple[tuple[type, ...], bool]]:
    """By field: the types that its value may have in JSON, and whether the value becomes a tuple."""
    names = {each.name: [name.partition("[")[0] for name in str(each.type).split(" | ")] for each in fields(kind)}
    return {field: (sum((_JSON[name] for name in kinds), ()), "tuple" in kinds) for field, kinds in names.items()}
