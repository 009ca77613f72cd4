"""Dataclasses of options as an argparse parser, and what was given as such a dataclass.

The command line wins, then ELASTICRT_<NAME>, then torchrun's PET_<NAME> where torchrun has the flag, then the default.
Spellings are taken with dashes or, as torchrun has it, with underscores.
"""

from __future__ import annotations

import argparse
from collections.abc import Container, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from elasticrt.cli.torchrun_flags import FLAGS, variable
from elasticrt.errors import ConfigError, explain
from elasticrt.option_values import Option, options_of, yes_or_no
from elasticrt.run_options import ETCD, NODES, OUTPUT, WORKERS

SECTIONS = ("", NODES, WORKERS, OUTPUT, ETCD, "torchrun's flags")

_WORKER_VARIABLES = frozenset({"ELASTICRT_NODE"})
"""Set by an agent for its workers. An `elasticrt run` inside a worker must not take them for options."""

T = TypeVar("T")


def declare(parser: argparse.ArgumentParser, *kinds: type) -> None:
    """Add the options of these dataclasses to a parser, each in its section."""
    found = {name: option for kind in kinds for name, option in options_of(kind).items()}
    for section in SECTIONS:
        of_section = [option for option in found.values() if option.section == section]
        group = parser.add_argument_group(section) if section and of_section else parser
        for option in of_section:
            shown = option.shown.replace("%", "%%") if option.text else argparse.SUPPRESS
            how: dict[str, Any] = {"metavar": option.value} if option.value else {"action": "store_const", "const": "1"}
            group.add_argument(*spellings(option.names), dest=_dest(option), help=shown, **how)
    parser.set_defaults(prog=parser.prog)


def declare_refused(parser: argparse.ArgumentParser) -> None:
    """torchrun's flags that we do not have: whoever gives one is told why, and what to use in its place."""
    for flag in FLAGS:
        if flag.refused:
            parser.add_argument(*spellings((flag.name,)), action=_Refused, help=argparse.SUPPRESS, metavar=flag.meaning)


def check_refused(env: Mapping[str, str]) -> None:
    """The same for their variables. Raises ConfigError."""
    for flag in FLAGS:
        name = variable(flag.name) if flag.refused else None
        if name is not None and env.get(name, "0") not in ("", "0", "null"):
            raise ConfigError(f"not taken by elasticrt ({name}): {flag.meaning}")


class _Refused(argparse.Action):
    def __call__(self, *_: Any) -> None:
        raise ConfigError(f"not taken by elasticrt ({self.option_strings[0]}): {self.metavar}")


def read(base: T, arguments: argparse.Namespace, env: Mapping[str, str]) -> T:
    """`base` with what was given. Raises ConfigError naming the option or the variable."""
    values: dict[str, Any] = {}
    for name, option in options_of(base).items():
        text, where = _given(option, arguments, env)
        if text is not None:
            values[name] = _value(option, text, where, arguments.prog)
    return replace(base, **values)  # type: ignore[type-var]


def _value(option: Option, text: str, where: str, prog: str) -> Any:
    try:
        return option.parse(text)
    except ValueError as error:
        message = explain("not a usable value", where, got=text, expected=str(error), remedy=f"See {prog} --help")
        raise ConfigError(message) from None


def words(kind: type, arguments: argparse.Namespace, env: Mapping[str, str], *, without: Container[str]) -> list[str]:
    """The options that were given, here or in `env`, as words of a command line where nobody has set a variable.

    `without`: fields whose options are left out. The values have been read, and are usable.
    """
    found = []
    for name, option in options_of(kind).items():
        text, _ = _given(option, arguments, env)
        if text is None or name in without:
            continue
        if not option.value:
            found += [option.names[0]] if yes_or_no(text) else []
        elif text.startswith("-"):  # As a word of its own it would be taken for an option.
            found.append(f"{option.names[0]}={text}")
        else:
            found += [option.names[0], text]
    return found


def _given(option: Option, arguments: argparse.Namespace, env: Mapping[str, str]) -> tuple[str | None, str]:
    """What was said of it, and where: the option's name or the variable's. None when nothing was."""
    text: str | None = getattr(arguments, _dest(option), None)
    if text is None:
        inside_worker = "ELASTICRT_GENERATION" in env
        for name in variables(option):
            if name in env and not (inside_worker and name in _WORKER_VARIABLES):
                return env[name], name
    return text, option.names[0]


def variables(option: Option) -> tuple[str, ...]:
    """The variables that are read where the option is not given, in this order."""
    theirs = (variable(name) for name in option.names)
    return (f"ELASTICRT_{_dest(option).upper()}", *(name for name in theirs if name), *option.also)


def _dest(option: Option) -> str:
    return option.names[0].lstrip("-").replace("-", "_")


def spellings(names: tuple[str, ...]) -> list[str]:
    """Each long option with dashes and, as torchrun has it, with underscores."""
    found: list[str] = []
    for name in names:
        found.append(name)
        if name.startswith("--") and "-" in name[2:]:
            found.append("--" + name[2:].replace("-", "_"))
    return found
