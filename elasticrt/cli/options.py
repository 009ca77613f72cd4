"""Makes an argparse parser of dataclasses of options, and such a dataclass of what was given.

The command line wins; then ELASTICRT_<NAME>; then PET_<NAME>, as torchrun calls the variables of its flags; then the
default.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar

from elasticrt.cli.slurm import Slurm
from elasticrt.cli.torchrun_flags import REFUSED, SECTION, MeetingFlags
from elasticrt.errors import ConfigError
from elasticrt.option_values import NODES_MAX, Option, options_of, parsed, some_text, yes_or_no
from elasticrt.run_options import EtcdOptions, RunOptions

# The headings of `--help`, in this order; "" is the top.
SECTIONS = ("", "nodes", "workers", "output", "etcd", SECTION)

T = TypeVar("T")
E = TypeVar("E", bound=EtcdOptions)


def add_command(
    subparsers: argparse._SubParsersAction[Any],
    name: str,
    act: Callable[[argparse.Namespace], int],
    text: str,
    *kinds: type,
    more: str = "",
    epilog: str = "",
) -> argparse.ArgumentParser:
    """Register a command with the options of `kinds`. `text` says in a clause what it does, `more` stands below it."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        name,
        help=text,
        description="\n".join(filter(None, (f"{text[0].upper()}{text[1:]}.", more))),
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    declare(parser, *kinds)
    parser.set_defaults(func=act)
    return parser


def declare(parser: argparse.ArgumentParser, *kinds: type) -> None:
    """Add the options of these dataclasses to a parser, each in its section."""
    found = {name: option for kind in kinds for name, option in options_of(kind).items()}
    for section in SECTIONS:
        of_section = [option for option in found.values() if option.section == section]
        group = parser.add_argument_group(section) if section and of_section else parser
        for option in of_section:
            shown = option.shown.replace("%", "%%") if option.text else argparse.SUPPRESS
            how: dict[str, Any] = {"metavar": option.value} if option.value else {"action": "store_const", "const": "1"}
            _add(group, option.names, dest=_word(option.names[0]), help=shown, **how)
    parser.set_defaults(prog=parser.prog)


def declare_refused(parser: argparse.ArgumentParser) -> None:
    """Add torchrun's flags that elasticrt refuses: giving one is an error that names a replacement."""
    for name, reason in REFUSED.items():
        _add(parser, (name,), action=_Refused, help=argparse.SUPPRESS, metavar=reason)


def declare_run(parser: argparse.ArgumentParser, default: str) -> None:
    """Add RUN and --log-dir. `default` says which run is meant without RUN."""
    text = f"the run's id, or its directory (default: {default})"
    parser.add_argument("run", metavar="RUN", nargs="?", type=parsed(some_text, "RUN", parser.prog), help=text)
    declare_log_dir(parser)


def declare_log_dir(parser: argparse.ArgumentParser) -> None:
    """Add the option of all commands that read the directories of runs."""
    names = variables(options_of(RunOptions)["log_dir"])
    log_dir = log_place(next((os.environ[name] for name in names if os.environ.get(name)), RunOptions.log_dir))
    text = f"where runs keep their logs (default: {log_dir})".replace("%", "%%")
    place = parsed(log_place, "--log-dir", parser.prog)
    complete_files(parser.add_argument("--log-dir", metavar="DIR", type=place, default=log_dir, help=text))


def log_place(log_dir: str) -> str:
    """Where runs keep their directories. --log-dir /dev/null drops only workers' output: events need a directory."""
    return RunOptions.log_dir if log_dir == os.devnull else some_text(log_dir)


def complete_files(action: argparse.Action) -> None:
    """Let shells complete the value of `action` as a file: shtab makes completions of a parser, by `complete`."""
    # What `shtab.FILE` holds, without a dependency on shtab.
    fish = "(__fish_complete_path (commandline -ct))"
    action.complete = {"bash": "_shtab_compgen_files", "zsh": "_files", "fish": fish}  # type: ignore[attr-defined]


def _add(group: argparse._ActionsContainer, names: tuple[str, ...], **how: Any) -> None:
    action = group.add_argument(*names, **how)
    if action.metavar in ("FILE", "DIR"):
        complete_files(action)
    for name in names:
        # Underscores do as well, as with torchrun. Registered here, they appear neither in help nor in completions.
        group._option_string_actions.setdefault(name[:2] + name[2:].replace("-", "_"), action)


def check_refused(env: Mapping[str, str]) -> None:
    """Refuse the same flags as variables. Raises ConfigError."""
    for flag, reason in REFUSED.items():
        name = f"PET_{_word(flag).upper()}"
        if env.get(name, "0") not in ("", "0", "null"):
            raise ConfigError(f"not supported by elasticrt ({name}): {reason}")


class _Refused(argparse.Action):
    def __call__(self, *_: Any) -> None:
        raise ConfigError(f"not supported by elasticrt ({self.option_strings[0]}): {self.metavar}")


def read(base: T, arguments: argparse.Namespace, env: Mapping[str, str]) -> T:
    """`base` with the options that were given. Raises ConfigError that names the option or the variable."""
    values = {
        name: parsed(option.parse if option.value else yes_or_no, where, arguments.prog)(text)
        for name, (option, text, where) in given(base, arguments, env).items()
    }
    return replace(base, **values)  # type: ignore[type-var]


def options_given(arguments: argparse.Namespace, base: E) -> E:
    """`base` with the options that were given to a command about a run of `elasticrt run`.

    The run's name and the place where its agents meet are derived as `elasticrt run` derives them. A name by SLURM is
    taken only if there is such a run, because an agent that trains alone has another name. Raises ConfigError.
    """
    flags, options = read(MeetingFlags(), arguments, os.environ), read(base, arguments, os.environ)
    run_id, slurm = options.run_id or flags.run_id(options), Slurm.from_env(os.environ)
    of_step = slurm.run_id(NODES_MAX) if slurm is not None and run_id is None else None
    if of_step is not None and Path(arguments.log_dir, of_step).is_dir():
        run_id = of_step
    return replace(flags.placed(options), run_id=run_id)


def words(kind: type, arguments: argparse.Namespace, env: Mapping[str, str], *, without: Container[str]) -> list[str]:
    """The options that were given, also by variables, as words of a command line for a place without these variables.

    All values must have been read without an error. Fields in `without` are left out.
    """
    found = []
    for name, (option, text, _) in given(kind, arguments, env).items():
        if name in without:
            continue
        if not option.value:
            found += [option.names[0]] if yes_or_no(text) else []
        # As a word of its own such a value would be taken for an option.
        elif text.startswith("-"):
            found.append(f"{option.names[0]}={text}")
        else:
            found += [option.names[0], text]
    return found


def given(kind: Any, arguments: argparse.Namespace, env: Mapping[str, str]) -> dict[str, tuple[Option, str, str]]:
    """The options of `kind` that were given, by field: the option, the text, and which option or variable had it."""
    # An agent sets ELASTICRT_NODE for its workers. An `elasticrt run` inside a worker must not take it for an option.
    hidden = "ELASTICRT_NODE" if "ELASTICRT_GENERATION" in env else ""
    found = {}
    for field, option in options_of(kind).items():
        texts = [(option.names[0], getattr(arguments, _word(option.names[0]), None))]
        texts += [(name, env[name]) for name in variables(option) if env.get(name) and name != hidden]
        first = next(((text, where) for where, text in texts if text is not None), None)
        if first is not None:
            found[field] = option, *first
    return found


def variables(option: Option) -> tuple[str, ...]:
    """The variables that are read if the option is not given, in this order."""
    first, *others = (_word(name).upper() for name in option.names if name.startswith("--"))
    return (f"ELASTICRT_{first}", *(f"PET_{name}" for name in (first, *others)), *option.also)


def misspelt(kinds: Iterable[type], env: Mapping[str, str]) -> list[str]:
    """One sentence for each variable that no option of these dataclasses reads, and that is nearly the name of one.

    Other unknown variables may have their own meaning: Kubernetes sets some for a Service that is called elasticrt.
    """
    if "ELASTICRT_GENERATION" in env:  # Set by an agent, for a worker in which this command runs.
        return []
    known = {name for kind in kinds for option in options_of(kind).values() for name in variables(option)} | _OTHERS
    found = []
    for name in sorted(set(env) - known):
        prefix = next((each for each in ("ELASTICRT_", "PET_") if name.startswith(each)), None)
        # The common prefix would make all names alike.
        ends = [each.removeprefix(prefix) for each in known if each.startswith(prefix)] if prefix else []
        near = get_close_matches(name.removeprefix(prefix or ""), ends, 1, cutoff=0.75)
        found += [f"no option reads the variable {name}: is {prefix}{near[0]} meant?"] if near else []
    return found


_OTHERS = frozenset({"ELASTICRT_ETCD_BIN", "ELASTICRT_DEBUG", "ELASTICRT_FRESH"})
"""Variables that are read elsewhere."""


def _word(name: str) -> str:
    return name.lstrip("-").replace("-", "_")
