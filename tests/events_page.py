"""The tables of docs/events.md, made from the schema itself: `python -m tests.events_page`."""

from __future__ import annotations

import inspect
import re
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

from elasticrt.events import KINDS, VERSION
from elasticrt.story.buckets import BUCKETS

PAGE = Path(__file__).resolve().parents[1] / "docs" / "events.md"
MARKED = re.compile(r"(<!-- (kinds|buckets) -->\n).*?(<!-- end -->)", re.DOTALL)
FIELD = re.compile(r"((?:^    # .+\n)*)^    (\w+): .+?(?:  # (.+))?$", re.MULTILINE)
"""A field with its meaning: in the comment behind it, or in those above it."""

JSON = {"int": "integer", "float": "number", "bool": "boolean", "str": "text", "tuple": "list", "dict": "object"}


def kinds() -> str:
    """Each kind with its fields."""
    return f"Version {VERSION}.\n\n" + "\n".join(section(name, kind) for name, kind in KINDS.items())


def section(name: str, kind: type[Any]) -> str:
    """One kind: what it says, and a table of its fields."""
    said = inspect.getdoc(kind) or ""
    lines = [f"### {name}", "", " ".join(said.split()), "", "| field | type | meaning |", "|---|---|---|"]
    sources = (inspect.getsource(each) for each in kind.__mro__ if is_dataclass(each))
    meanings = {found[2]: found[3] or found[1] for source in sources for found in FIELD.finditer(source)}
    for field, each in kind.__dataclass_fields__.items():
        first, *others = str(each.type).split(" | ")
        shown = " or ".join([JSON[first.partition("[")[0]], *(other.replace("None", "null") for other in others)])
        meaning = " ".join(meanings[field].replace("    # ", " ").split()).removesuffix(".")
        lines.append(f"| `{field}` | {shown} | {meaning[0].lower() + meaning[1:]} |")
    return "\n".join([*lines, ""])


def buckets() -> str:
    """Each bucket with what it holds."""
    rows = [f"| {name} | {text} |" for name, text in BUCKETS.items()]
    return "\n".join(["| bucket | what it holds |", "|---|---|", *rows, ""])


def renewed(page: str) -> str:
    """The page with its tables as they are to be."""
    made = {"kinds": kinds, "buckets": buckets}
    return MARKED.sub(lambda found: f"{found[1]}\n{made[found[2]]()}\n{found[3]}", page)


if __name__ == "__main__":
    PAGE.write_text(renewed(PAGE.read_text()))
