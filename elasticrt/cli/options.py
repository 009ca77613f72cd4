"""The options of `elasticrt run`: their spellings, environment variables, and what they become. Pure but for --help.

Every option also reads `ELASTICRT_<NAME>`; the command line wins. torchrun's spellings are accepted where they mean the
same, with dashes or underscores.
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from elasticrt.errors import ConfigError, explain

_UNITS_S = {"": 1.0, "s": 1.0, "ms": 0.001, "m": 60.0, "h": 3600.0}

_WORKER_VARIABLES = frozenset({"ELASTICRT_NODE", "ELASTICRT_RUN_DIR"})
"""Set by an agent for its workers. An `elasticrt run` inside a worker must not take them for options."""


def seconds(text: str) -> float:
    """A duration such as `90`, `1.5s`, `10m`, in seconds. ValueError otherwise."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)(ms|s|m|h|)", text)
    if not match:
        raise ValueError("a duration such as 90, 1.5s or 10m")
    return float(match[1]) * _UNITS_S[match[2]]


def positive_seconds(text: str) -> float:
    """A duration greater than 0."""
    value = seconds(text)
    if not 0 < value <= 1e7 or not math.isfinite(value):
        raise ValueError("a duration greater than 0, such as 90, 1.5s or 10m")
    return value


def whole(least: int, most: int) -> Callable[[str], int]:
    """A parser for whole numbers in a range."""

    def parse(text: str) -> int:
        if not re.fullmatch(r"-?[0-9]{1,12}", text) or not least <= int(text) <= most:
            raise ValueError(f"a whole number from {least} to {most}")
        return int(text)

    return parse


def workers(text: str) -> int | str:
    """A number of workers per node, or the word for counting devices."""
    if text in ("auto", "gpu", "cpu"):
        return text
    try:
        return whole(1, 4096)(text)
    except ValueError:
        raise ValueError("a whole number from 1 to 4096, auto, gpu or cpu") from None


def choice(*words: str) -> Callable[[str], str]:
    """A parser for one of some words."""

    def parse(text: str) -> str:
        if text not in words:
            raise ValueError(f"one of {', '.join(words)}")
        return text

    return parse


class Options:
    """Collects options on an argparse parser, then reads values: command line, then environment, then default."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        self._parser = parser
        self._options: dict[str, tuple[str, Callable[[str], Any], Any]] = {}

    def add(self, *names: str, parse: Callable[[str], Any] = str, default: Any = None, text: str, value: str) -> None:
        """An option with a value. The first name is the one in messages and in ELASTICRT_<NAME>."""
        dest = names[0].lstrip("-").replace("-", "_")
        hidden = text == argparse.SUPPRESS
        shown = f"{text} (default: {default})" if default is not None and not hidden else text
        self._parser.add_argument(*spellings(names), dest=dest, metavar=value, help=shown)
        self._options[dest] = (names[0], parse, default)

    def flag(self, *names: str, text: str) -> None:
        """An option without a value."""
        dest = names[0].lstrip("-").replace("-", "_")
        self._parser.add_argument(*spellings(names), dest=dest, action="store_const", const="1", help=text)
        self._options[dest] = (names[0], _flag, False)

    def read(self, arguments: argparse.Namespace, env: Mapping[str, str]) -> dict[str, Any]:
        """All values. Raises ConfigError naming the option or the variable."""
        inside_worker = "ELASTICRT_GENERATION" in env
        values = {}
        for dest, (name, parse, default) in self._options.items():
            variable = f"ELASTICRT_{dest.upper()}"
            text, where = getattr(arguments, dest), name
            if text is None and variable in env and not (inside_worker and variable in _WORKER_VARIABLES):
                text, where = env[variable], variable
            if text is None:
                values[dest] = default
                continue
            try:
                values[dest] = parse(text)
            except ValueError as error:
                raise ConfigError(
                    explain(
                        "not a usable value", where, got=text, expected=str(error), remedy="See elasticrt run --help"
                    )
                ) from None
        return values


def spellings(names: tuple[str, ...]) -> list[str]:
    """Each long option with dashes and, as torchrun has it, with underscores."""
    found: list[str] = []
    for name in names:
        found.append(name)
        if name.startswith("--") and "-" in name[2:]:
            found.append("--" + name[2:].replace("-", "_"))
    return found


def _flag(text: str) -> bool:
    if text.lower() in ("1", "true", "yes", "on"):
        return True
    if text.lower() in ("0", "false", "no", "off", ""):
        return False
    raise ValueError("1 or 0")
