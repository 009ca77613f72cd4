"""Prints pip constraints for the image: the base image's torch stays as it is, what it lacks comes as pinned.

Anything else that the base has is not constrained: pip leaves it alone as long as it will do.

python3 constraints.py pins.txt > constraints.txt
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from importlib.metadata import distributions
from pathlib import Path

KEPT = ("torch", "nvidia-", "triton", "pytorch-triton")
"""Gigabytes, and built for each other."""


def normal(name: str) -> str:
    """One spelling for each name."""
    return re.sub(r"[-_.]+", "-", name).lower()


def constraints(pins: Iterable[str], installed: Iterable[tuple[str, str]]) -> list[str]:
    """One line for each name: torch with what belongs to it as installed (name, version), what is missing as pinned."""
    base = {normal(name): version for name, version in installed}
    chosen = {normal(pin.partition("==")[0]): pin.partition("==")[2] for pin in pins}
    chosen = {name: version for name, version in chosen.items() if name not in base}
    chosen |= {name: version for name, version in base.items() if name.startswith(KEPT)}
    return sorted(f"{name}=={version}" for name, version in chosen.items())


def main(path: str) -> None:
    """Print them."""
    lines = (line.partition("#")[0].strip() for line in Path(path).read_text().splitlines())
    found = [(each.metadata["Name"], each.version) for each in distributions() if each.metadata["Name"]]
    sys.stdout.write("".join(f"{line}\n" for line in constraints(filter(None, lines), found)))


if __name__ == "__main__":
    main(sys.argv[1])
