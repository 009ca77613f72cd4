"""Prints pip constraints for the image: the torch of the base image stays as it is, and missing packages are pinned.

Other packages of the base image are not constrained. pip leaves them alone if their versions will do.

python3 constraints.py pins.txt > constraints.txt
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from importlib.metadata import distributions
from pathlib import Path

KEPT = ("torch", "nvidia-", "triton", "pytorch-triton")
"""How the names of packages begin that must stay as they are: they have gigabytes, and are built for each other."""


def normal(name: str) -> str:
    """The normal form of a package's name, which may be spelled in several ways."""
    return re.sub(r"[-_.]+", "-", name).lower()


def constraints(pins: Iterable[str], installed: Iterable[tuple[str, str]]) -> list[str]:
    """The lines of the constraints: KEPT packages in their installed version, missing packages in their pinned one.

    Args:
        pins: lines of the form NAME==VERSION.
        installed: name and version of each package of the base image.
    """
    base = {normal(name): version for name, version in installed}
    chosen = {normal(pin.partition("==")[0]): pin.partition("==")[2] for pin in pins}
    chosen = {name: version for name, version in chosen.items() if name not in base}
    chosen |= {name: version for name, version in base.items() if name.startswith(KEPT)}
    return sorted(f"{name}=={version}" for name, version in chosen.items())


def main(path: str) -> None:
    """Print the constraints for the pins in the file `path`."""
    lines = (line.partition("#")[0].strip() for line in Path(path).read_text().splitlines())
    found = [(each.metadata["Name"], each.version) for each in distributions() if each.metadata["Name"]]
    sys.stdout.write("".join(f"{line}\n" for line in constraints(filter(None, lines), found)))


if __name__ == "__main__":
    main(sys.argv[1])
