"""The options of `elasticrt run`: their spellings, environment variables, and what they become. Pure but for --help.

Every option also reads `ELASTICRT_<NAME>`, and one that torchrun has as well its `PET_<NAME>`; the command line wins,
then our own variable. torchrun's spellings are accepted where they mean the same, with dashes or underscores.
"""

from __future__ import annotations

import argparse
import math
import re
import signal
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from typing import Any

from elasticrt.cli.torchrun_flags import variable
from elasticrt.errors import ConfigError, explain
from elasticrt.settings import ERR, OUT, Streams

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


def start_method(text: str) -> str:
    """How workers are started. The process that they are forked from is what others call a fork server."""
    return "fork" if text == "forkserver" else choice("fork", "spawn", "forkserver")(text)


def count(text: str) -> float:
    """A number of at least 0."""
    if not re.fullmatch(r"[0-9]+(\.[0-9]*)?", text):
        raise ValueError("a number of seconds")
    return float(text)


_STREAMS = {"0": frozenset[str](), "1": frozenset({OUT}), "2": frozenset({ERR}), "3": frozenset({OUT, ERR})}


def streams(text: str) -> Streams:
    """torchrun's way of naming streams: 0 none, 1 stdout, 2 stderr, 3 both; of all workers or of some (`0:3,12:1`)."""
    if text in _STREAMS:
        return Streams(_STREAMS[text])
    pairs = [re.fullmatch(r"([0-9]{1,4}):([0-3])", part) for part in text.split(",")]
    if not all(pairs):
        raise ValueError("0, 1, 2 or 3, or a list such as 0:3,1:2 with such a number for each local rank")
    return Streams(some={int(pair[1]): _STREAMS[pair[2]] for pair in pairs if pair})


def ranks(text: str) -> frozenset[int]:
    """Local ranks with commas."""
    if not re.fullmatch(r"[0-9]{1,4}(,[0-9]{1,4})*", text):
        raise ValueError("local ranks with commas, such as 0,1,2")
    return frozenset(map(int, text.split(",")))


def pairs(text: str) -> dict[str, str]:
    """`key=value` with commas."""
    found: dict[str, str] = {}
    for part in filter(None, text.split(",")):
        key, equals, value = (word.strip() for word in part.partition("="))
        if not key or not equals or not value:
            raise ValueError("key=value,key=value")
        if key in found:
            raise ValueError(f"{key} once")
        found[key] = value
    return found


def signals(text: str) -> tuple[signal.Signals, ...]:
    """Names of signals that a process can handle, with commas."""
    try:
        found = [signal.Signals[name.strip()] for name in text.split(",")]
    except KeyError as unknown:
        raise ValueError(f"names of signals with commas, such as SIGTERM,SIGUSR1; there is no {unknown}") from None
    if not {signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD}.isdisjoint(found):
        raise ValueError("signals that can be handled: not SIGKILL, SIGSTOP or SIGCHLD")
    return tuple(dict.fromkeys(found))


@dataclass(frozen=True)
class _Option:
    """How one option is read.

    `name`: its first spelling; `variables`: those that are read when it is not given, in this order; `rivals`: options
    that say the same in other words, so that one of them on the command line overrules the variables.
    """

    name: str
    variables: tuple[str, ...]
    parse: Callable[[str], Any]
    default: Any
    rivals: tuple[str, ...] = ()

    def given(self, arguments: argparse.Namespace, env: Mapping[str, str]) -> tuple[str | None, str]:
        """What was said of it, and where: the option's name or the variable's. None when nothing was."""
        text: str | None = getattr(arguments, _dest(self.name))
        if text is None and all(getattr(arguments, each, None) is None for each in self.rivals):
            inside_worker = "ELASTICRT_GENERATION" in env
            for name in self.variables:
                if name in env and not (inside_worker and name in _WORKER_VARIABLES):
                    return env[name], name
        return text, self.name


class Options:
    """Collects options on an argparse parser, then reads values: command line, then environment, then default."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        self._parser: argparse._ActionsContainer = parser
        self._top = parser
        self._options: dict[str, _Option] = {}
        self._refused: dict[str, str] = {}

    def section(self, title: str) -> None:
        """What follows is shown under this title in the help."""
        self._parser = self._top.add_argument_group(title)

    def add(
        self,
        *names: str,
        parse: Callable[[str], Any] = str,
        default: Any = None,
        text: str,
        value: str,
        rivals: tuple[str, ...] = (),
        also: tuple[str, ...] = (),
    ) -> None:
        """An option with a value. The first name is the one in messages and in ELASTICRT_<NAME>; `also`: variables."""
        dest = _dest(names[0])
        hidden = text == argparse.SUPPRESS
        shown = f"{text} (default: {default})" if default not in (None, "") and not hidden else text
        self._parser.add_argument(*spellings(names), dest=dest, metavar=value, help=shown)
        self._options[dest] = _Option(names[0], (*_variables(names), *also), parse, default, rivals)

    def flag(self, *names: str, text: str) -> None:
        """An option without a value."""
        dest = _dest(names[0])
        self._parser.add_argument(*spellings(names), dest=dest, action="store_const", const="1", help=text)
        self._options[dest] = _Option(names[0], _variables(names), _flag, False)

    def refuse(self, name: str, why: str) -> None:
        """An option that others have and we do not: whoever gives it is told `why`, and what to use in its place."""
        self._parser.add_argument(*spellings((name,)), action=_Refused, help=argparse.SUPPRESS, metavar=why)
        self._refused |= dict.fromkeys(_variables((name,))[1:], why)

    def read(self, arguments: argparse.Namespace, env: Mapping[str, str]) -> dict[str, Any]:
        """All values. Raises ConfigError naming the option or the variable."""
        for name, why in self._refused.items():
            if env.get(name, "0") not in ("", "0", "null"):
                raise ConfigError(f"not taken by elasticrt ({name}): {why}")
        values = {}
        for dest, option in self._options.items():
            text, where = option.given(arguments, env)
            if text is None:
                values[dest] = option.default
                continue
            try:
                values[dest] = option.parse(text)
            except ValueError as error:
                remedy = f"See {self._top.prog} --help"
                raise ConfigError(
                    explain("not a usable value", where, got=text, expected=str(error), remedy=remedy)
                ) from None
        return values

    def words(self, arguments: argparse.Namespace, env: Mapping[str, str], *, without: Container[str]) -> list[str]:
        """The options that were given, here or in the environment, as words of a command line where nobody has set it.

        `without`: those that are left out, as keys of what `read` gives. The values have been read, and are usable.
        """
        words = []
        for dest, option in self._options.items():
            text, _ = option.given(arguments, env)
            if text is None or dest in without:
                continue
            if option.parse is _flag:
                words += [option.name] if _flag(text) else []
            elif text.startswith("-"):  # As a word of its own it would be taken for an option.
                words.append(f"{option.name}={text}")
            else:
                words += [option.name, text]
        return words


class _Refused(argparse.Action):
    def __call__(self, *_: Any) -> None:
        raise ConfigError(f"not taken by elasticrt ({self.option_strings[0]}): {self.metavar}")


def _dest(name: str) -> str:
    return name.lstrip("-").replace("-", "_")


def _variables(names: tuple[str, ...]) -> tuple[str, ...]:
    theirs = (variable(name) for name in names)
    return (f"ELASTICRT_{_dest(names[0]).upper()}", *(name for name in theirs if name))


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
