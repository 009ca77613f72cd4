"""What an option is, and the parsers of option values. Pure.

A parser takes the text and returns the value. It raises ValueError with what it expects, or ConfigError if it makes the
whole message itself.
"""

from __future__ import annotations

import dataclasses
import re
import shlex
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from elasticrt.errors import ConfigError
from elasticrt.store.address import check_host

OUT, ERR = "out", "err"

T = TypeVar("T")

# The largest number of nodes that an option accepts.
NODES_MAX = 100_000
# Run ids and node names: parts of etcd keys and of paths, so no slash, no hidden file, and no `..`.
NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")

_UNITS_S = {"": 1.0, "s": 1.0, "ms": 0.001, "m": 60.0, "h": 3600.0}


def some_text(text: str) -> str:
    """Any text but an empty one, which is often an unset shell variable and must not mean the default."""
    if not text:
        raise ValueError("some text")
    return text


@dataclass(frozen=True)
class Option:
    """How one option is given and shown."""

    # Its names, and the placeholder of its value if it takes one, such as `--run-id, --rdzv-id ID`. Messages use the
    # first name, which also makes the variable ELASTICRT_<NAME>.
    spelled: str
    initial: Any  # Its value if nothing is given.
    text: str  # What it does, for `--help` and docs/commands.md; "" hides the option.
    parse: Callable[[str], Any] = some_text  # Text to value.
    default: str = ""  # The default in words, if `initial` does not say it.
    section: str = ""  # The heading of `--help` below which it stands.
    also: tuple[str, ...] = ()  # Variables to read besides ELASTICRT_<NAME> and torchrun's.
    # Whether it belongs to this node alone. The line that brings another node does not repeat such options.
    own: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """Its spellings with dashes."""
        return tuple(word.partition(" ")[0] for word in self.spelled.split(", "))

    @property
    def value(self) -> str:
        """The placeholder of its value; "" for an option without a value."""
        return self.spelled.rpartition(", ")[2].partition(" ")[2]

    @property
    def shown(self) -> str:
        """The text with the default."""
        default, initial = self.default, self.initial
        # Floats are durations.
        if not default and isinstance(initial, float):
            default = f"{initial / 60:g}m" if initial >= 60 and initial % 60 == 0 else f"{initial:g}s"
        elif not default and isinstance(initial, str | int) and not isinstance(initial, bool):
            default = str(initial)
        return f"{self.text} (default: {default})" if default else self.text


def option(spelled: str, initial: Any, text: str, parse: Callable[[str], Any] = some_text, **how: Any) -> Any:
    """A field of a dataclass of options. The arguments are those of `Option`."""
    return field(default=initial, metadata={"option": Option(spelled, initial, text, parse, **how)})


def options_of(kind: Any) -> dict[str, Option]:
    """The options of a dataclass, by the names of their fields."""
    return {each.name: each.metadata["option"] for each in dataclasses.fields(kind) if "option" in each.metadata}


def parsed(parse: Callable[[str], T], where: str, prog: str) -> Callable[[str], T]:
    """`parse` for a text that is given as `where` to the command `prog`.

    The result raises ConfigError for unusable texts.
    """

    def value_of(text: str) -> T:
        try:
            return parse(text)
        except ValueError as error:
            what, remedy = "not a usable value", f"See `{prog} --help`"
            raise ConfigError(what, where, got=text, expected=str(error), remedy=remedy) from None

    return value_of


def yes_or_no(text: str) -> bool:
    """The value of a flag's variable, as a bool."""
    if text.lower() in ("1", "true", "yes", "y", "t", "on"):
        return True
    if text.lower() in ("0", "false", "no", "n", "f", "off", ""):
        return False
    raise ValueError("1 or 0")


def duration(least_s: float = 0.0, most_s: float = 1000 * 3600.0) -> Callable[[str], float]:
    """A parser for durations in a range, such as `90`, `1.5s`, `10m`. Its values are in seconds."""

    def parse(text: str) -> float:
        match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)(ms|s|m|h|)", text)
        value_s = float(match[1]) * _UNITS_S[match[2]] if match else -1.0
        if not least_s <= value_s <= most_s:
            raise ValueError(f"a duration from {least_s:g}s to {most_s / 3600:g}h, such as 90, 1.5s or 10m")
        return value_s

    return parse


seconds = duration()


def whole(least: int, most: int) -> Callable[[str], int]:
    """A parser for whole numbers in a range."""

    def parse(text: str) -> int:
        if not re.fullmatch(r"-?[0-9]{1,12}", text) or not least <= int(text) <= most:
            raise ValueError(f"a whole number from {least} to {most}")
        return int(text)

    return parse


def choice(*words: str) -> Callable[[str], str]:
    """A parser for one of some words."""

    def parse(text: str) -> str:
        if text not in words:
            raise ValueError(f"one of {', '.join(words)}")
        return text

    return parse


def workers(text: str) -> int | str:
    """A number of workers per node, or the word that says how to count them."""
    if text in ("auto", "gpu", "cpu"):
        return text
    try:
        return whole(1, 4096)(text)
    except ValueError:
        raise ValueError("a whole number from 1 to 4096, auto, gpu or cpu") from None


def start_method(text: str) -> str:
    """How workers are started. torchrun's forkserver means the same as fork here."""
    return "fork" if text == "forkserver" else choice("fork", "spawn", "forkserver")(text)


def comma_separated(text: str) -> tuple[str, ...]:
    """Words, separated by commas. Empty ones are left out."""
    return tuple(filter(None, text.split(",")))


def command(text: str) -> tuple[str, ...]:
    """A command with its arguments, quoted as in a shell; empty for an empty text."""
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise ValueError(f"a command, quoted as in a shell ({error})") from None


def ranks(text: str) -> frozenset[int]:
    """Local ranks, separated by commas."""
    if not re.fullmatch(r"[0-9]{1,4}(,[0-9]{1,4})*", text):
        raise ValueError("local ranks with commas, such as 0,1,2")
    return frozenset(map(int, text.split(",")))


def signals(text: str) -> tuple[signal.Signals, ...]:
    """Names of signals that a process can handle, separated by commas."""
    try:
        found = [signal.Signals[name.strip()] for name in text.split(",")]
    except KeyError as unknown:
        raise ValueError(f"names of signals with commas, such as SIGTERM,SIGUSR1; there is no {unknown}") from None
    # The first two cannot be handled. SIGCHLD comes whenever a child ends, so every node would leave at once.
    if not {signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD}.isdisjoint(found):
        raise ValueError("signals that can be handled: not SIGKILL, SIGSTOP or SIGCHLD")
    return tuple(dict.fromkeys(found))


@dataclass(frozen=True)
class Streams:
    """A choice of workers' output streams: by local rank in `some`, and `others` for all other local ranks."""

    others: frozenset[str] = frozenset()
    some: Mapping[int, frozenset[str]] = field(default_factory=dict)

    def of(self, local_rank: int) -> frozenset[str]:
        """The streams of one worker."""
        return self.some.get(local_rank, self.others)


NO_STREAMS = Streams()

_STREAMS = {"0": frozenset[str](), "1": frozenset({OUT}), "2": frozenset({ERR}), "3": frozenset({OUT, ERR})}


def streams(text: str) -> Streams:
    """Streams as torchrun numbers them: 0 none, 1 stdout, 2 stderr, 3 both; of all workers, or of some (`0:3,12:1`)."""
    if text in _STREAMS:
        return Streams(_STREAMS[text])
    pairs = [re.fullmatch(r"([0-9]{1,4}):([0-3])", part) for part in text.split(",")]
    if not all(pairs):
        raise ValueError("0, 1, 2 or 3, or a list such as 0:3,1:2 with such a number for each local rank")
    return Streams(some={int(pair[1]): _STREAMS[pair[2]] for pair in pairs if pair})


def key_values(text: str) -> dict[str, str]:
    """Pairs `key=value`, separated by commas."""
    found: dict[str, str] = {}
    for part in filter(None, text.split(",")):
        key, equals, value = (word.strip() for word in part.partition("="))
        if not key or not equals or not value:
            raise ValueError("key=value,key=value")
        if key in found:
            raise ValueError(f"{key} once")
        found[key] = value
    return found


def check_name(text: str, where: str) -> str:
    """A run id or node name that was given as `where`. It becomes part of etcd keys and of paths.

    Raises ConfigError.
    """
    if not NAME.fullmatch(text):
        raise ConfigError(
            "not a usable name",
            where,
            got=text,
            expected="1 to 128 of the characters A-Z a-z 0-9 . _ -, not starting with a dot",
            remedy="Choose another name",
        )
    return text


def as_name(text: str) -> str:
    """`text` as a usable name: characters that names cannot have become dashes."""
    return re.sub(r"[^A-Za-z0-9._-]", "-", text).lstrip(".")[:100] or "node"


def parse_nodes(text: str) -> tuple[int, int]:
    """`N` or `MIN:MAX` as two numbers."""
    found = re.fullmatch(r"([0-9]{1,9})(?::([0-9]{1,9}))?", text)
    # 0 is out of range, so a text of another form gets the same message as a number that is too small.
    least, most = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
    if least > most:
        raise ValueError("MIN <= MAX, as in 1:4")
    if not 1 <= least <= most <= NODES_MAX:
        raise ValueError(f"a number of nodes, or MIN:MAX such as 1:4, with 1 <= MIN <= MAX <= {NODES_MAX}")
    return least, most


def host_and_port(where: str, default: str = "", least: int = 0) -> Callable[[str], tuple[str, int]]:
    """A parser for HOST:PORT, which raises ConfigError for a malformed host.

    Args:
        where: the option, for messages.
        default: the host for PORT alone; "" makes HOST required.
        least: the lowest port. With 0 the kernel may choose one.
    """

    def parse(text: str) -> tuple[str, int]:
        host, colon, port = text.rpartition(":")
        number = int(port) if re.fullmatch(r"[0-9]{1,5}", port) else -1
        if not least <= number <= 65535 or not (colon or default):
            form = "[HOST:]PORT" if default else "HOST:PORT"
            raise ValueError(f"{form} with a port from {least} to 65535")
        return check_host(host, where) if colon else default, number

    return parse
