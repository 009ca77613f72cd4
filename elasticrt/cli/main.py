"""`elasticrt`: the commands, and the one place where an error becomes a line of text and an exit code."""

from __future__ import annotations

import argparse
import errno
import logging
import os
import re
import signal
import sys
import traceback
from collections.abc import Sequence
from datetime import datetime, timezone
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn

from elasticrt import __version__
from elasticrt.cli.options import read
from elasticrt.errors import EXIT_BUG, EXIT_USAGE, ConfigError, ElasticError
from elasticrt.ipc.std_streams import Unwritable, occupy, tell, write
from elasticrt.run_options import RunOptions
from elasticrt.text import cut, log_line, plain

DESCRIPTION = "Keeps a PyTorch DDP job training while nodes come, go and die."
BEGIN = "Begin with `elasticrt run train.py`. `elasticrt COMMAND --help` has examples of each command."

# The longest path in an error message.
WHERE_MAX_BYTES = 160


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors look like all others: one line with a suggestion, and exit code 2."""

    _inside = False

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        # What begins so is a value, such as -1:2, because no option of ours begins with a digit.
        self._negative_number_matcher = re.compile(r"-\d")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse as argparse does, but options may stand anywhere, and a command refuses unknown ones itself."""
        # argparse calls this method again, from the call below.
        if self._inside:
            return super().parse_known_args(args, namespace)
        # Intermixed parsing cannot leave the rest of the line to a script, so commands with such a rest keep argparse's
        # order.
        takes_rest = any(each.nargs in (argparse.PARSER, argparse.REMAINDER) for each in self._get_positional_actions())
        parse = super().parse_known_args if takes_rest else super().parse_known_intermixed_args
        self._inside = True
        try:
            namespace, unknown = parse(args, namespace)
        finally:
            self._inside = False
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return namespace, unknown

    def error(self, message: str) -> NoReturn:
        """Raise ConfigError instead of printing the usage."""
        commands = self._commands()
        wrong = re.search(r"invalid choice: ['\"](.*?)['\"] ", message)
        if wrong is not None and commands:
            near = self._meant(wrong[1])
            remedy = f"Did you mean `{near}`?" if near else f"Write {self.prog} COMMAND [options]"
            choices = f"one of {', '.join(commands)}"
            raise ConfigError("no such command", self.prog, got=wrong[1], expected=choices, remedy=remedy)
        unknown = re.search("unrecognized arguments: (.*)", message)
        near = self._near(unknown[1]) if unknown is not None else ""
        remedy = f"Did you mean {near}?" if near else f"See `{self.prog} --help`"
        expected = "options and arguments that its help lists"
        raise ConfigError("not a usable command line", self.prog, got=message, expected=expected, remedy=remedy)

    def _near(self, words: str) -> str:
        """The option that the first of these words may be a misspelling or the beginning of; "" if none is likely."""
        unknown = re.split("[ =]", words)[0].replace("_", "-")
        known = [option for action in self._actions for option in action.option_strings]
        begun = [option for option in known if len(unknown) > 3 and option.startswith(unknown)]
        return next(iter(begun or get_close_matches(unknown, known, n=1, cutoff=0.75)), "")

    def _print_message(self, message: str, file: Any = None) -> None:
        """Write help as all other output is written, so that a full disk behind stdout is reported."""
        del file
        write(sys.stdout, message)

    def _commands(self) -> dict[str, argparse.ArgumentParser]:
        nested = [action for action in self._actions if isinstance(action, argparse._SubParsersAction)]
        return {name: parser for action in nested for name, parser in action.choices.items()}

    def _meant(self, word: str) -> str:
        """The command that an unknown word may stand for; "" if none is likely."""
        if word.endswith(".py") and "run" in self._commands():
            return f"{self.prog} run {word}"
        near = get_close_matches(word, self._commands(), n=1)
        return f"{self.prog} {near[0]}" if near else ""


class _Handler(logging.Handler):
    """Writes log records to stderr, with control characters escaped: the records may quote anything."""

    in_json = False

    def emit(self, record: logging.LogRecord) -> None:
        """Write the line of `record`."""
        text = self.format(record)
        tell(_line(record.levelname.lower(), "log", text) if self.in_json else plain(text) + "\n")


def _line(level: str, kind: str, text: str) -> str:
    return log_line(datetime.now(timezone.utc).isoformat(), level, kind, text) + "\n"


def build_parser() -> Parser:
    """The parser of all commands."""
    from elasticrt.cli import audit, control, doctor, playground, report, run, serve_etcd

    parser = Parser(prog="elasticrt", description=DESCRIPTION, epilog=BEGIN, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"elasticrt {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True, parser_class=Parser)
    for command in (run, playground, serve_etcd, control, report, doctor, audit):
        command.add_parser(commands)
    return parser


def _check_directory() -> None:
    try:
        Path.cwd()
    except OSError as error:
        expected, remedy = "a directory that is still there", "cd to another one"
        raise ConfigError(
            "no working directory", ".", got=str(error.strerror), expected=expected, remedy=remedy
        ) from None


def _heed(arguments: argparse.Namespace, handler: _Handler) -> None:
    """Apply --log-format and --verbose to log records, if the command has these options."""
    # The commands without `run`'s options.
    if "quiet" not in arguments:
        return
    options = read(RunOptions(), arguments, os.environ)
    if options.log_format == "json":
        handler.in_json = True
        handler.setFormatter(logging.Formatter("%(message)s"))
    if options.verbose:
        logging.getLogger().setLevel(min(logging.INFO, logging.getLogger().level))


def _do(arguments: argparse.Namespace) -> int:
    """Run a command. Returns its exit code.

    Raises ConfigError for a name that no file can have, or that cannot be reached, and where no thread can be started.
    """
    try:
        code: int = arguments.func(arguments)
    except RuntimeError as error:
        # The text of Python's threading.
        if "can't start new thread" not in str(error):
            raise
        where, remedy = "ulimit -u, or pids.max of the container", "Raise the limit, or end other processes"
        raise ConfigError("no thread can be started", where, got=error, remedy=remedy) from error
    except OSError as error:
        # Errors of the system that show that the name is the user's mistake.
        if error.errno not in (errno.ENAMETOOLONG, errno.EACCES) or error.filename is None:
            raise
        where, remedy = cut(str(error.filename), WHERE_MAX_BYTES), "Check the path and its permissions"
        expected = "names of at most 255 bytes, in directories that may be searched"
        raise ConfigError("an unusable path", where, got=error.strerror, expected=expected, remedy=remedy) from error
    return code


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Returns its exit code."""
    occupy()
    debug = "ELASTICRT_DEBUG" in os.environ
    handler = _Handler()
    short, long = "elasticrt: %(levelname)s: %(message)s", "%(asctime)s %(name)s %(message)s"
    handler.setFormatter(logging.Formatter(long if debug else short))
    logging.basicConfig(level=logging.DEBUG if debug else logging.WARNING, handlers=[handler])
    try:
        # `__main__` lets Ctrl-C end the process while modules are imported. From here on it raises KeyboardInterrupt.
        if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        _check_directory()
        arguments = build_parser().parse_args(argv)
        _heed(arguments, handler)
        code = _do(arguments)
    except ElasticError as error:
        if handler.in_json:
            tell(_line("error", "error", str(error)))
        else:
            tell(f"{traceback.format_exc() if debug else ''}elasticrt: error: {plain(str(error))}\n")
        return error.exit_code
    except Unwritable as error:
        tell(f"elasticrt: error: the output cannot be written (stdout): {error.strerror}\n")
        return EXIT_USAGE
    except KeyboardInterrupt:
        # As a shell has it for a process that SIGINT has ended: 128 + 2.
        return 130
    except Exception:  # noqa: BLE001  The last line of defence: a bug of ours is shown whole, with its own exit code.
        bug = "elasticrt: this is a bug in elasticrt, not in your script; please report it"
        tell(f"{traceback.format_exc()}{bug}\n")
        return EXIT_BUG
    return code
