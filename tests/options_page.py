"""The tables of options in docs/commands.md, made from the options themselves: `python -m tests.options_page`."""

from __future__ import annotations

import re
from pathlib import Path

from elasticrt.cli.run import KINDS
from elasticrt.option_values import options_of

PAGE = Path(__file__).resolve().parents[1] / "docs" / "commands.md"
MARKED = re.compile(r"(<!-- options: (.+?) -->\n).*?(<!-- end -->)", re.DOTALL)


def table(section: str) -> str:
    """The options of one section that people give, with what they do and their defaults."""
    lines = ["| option | meaning |", "|---|---|"]
    for option in (option for kind in KINDS for option in options_of(kind).values()):
        if option.section == section and option.text:
            first, *others = option.names
            names = f"`{f'{first} {option.value}'.strip()}`" + "".join(f", `{name}`" for name in others)
            lines.append(f"| {names} | {option.shown.replace('<', '&lt;')} |")
    return "\n".join(lines) + "\n"


def renewed(page: str) -> str:
    """The page with its tables as they are to be."""
    return MARKED.sub(lambda found: f"{found[1]}\n{table(found[2])}\n{found[3]}", page)


if __name__ == "__main__":
    PAGE.write_text(renewed(PAGE.read_text()))
