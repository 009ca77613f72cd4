"""Free text that travels: messages of exceptions, the end of a worker's output, script arguments, paths. Pure.

Such text may have control characters that a terminal obeys, bytes that are not UTF-8 (lone surrogates in Python, which
no encoder accepts), and any length. Records apply these functions when they are made, so every record can be encoded:

* `cut`: text for people, made plain and shortened.
* `known`: text to be compared: itself if it is short and plain, otherwise with its digest.
* `shell`: a command to be pasted.
* `json_text`: JSON that every parser accepts.

Limits count bytes in JSON, because that is what travels.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import shlex
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from typing import Any

MARK = "..."
"""The end of a text that was cut."""

_COLOUR = re.compile(r"\x1b\[[0-9;:]*m")
_NOT_PLAIN = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""All control characters but tab and newline, line separators, changes of direction, lone surrogates."""

_AS_IT_IS = frozenset(map(chr, range(32, 127))) - {"\\", "'"}


def plain(text: str) -> str:
    """The text without colours, and with escapes for characters that a terminal obeys or an encoder refuses."""
    text = _COLOUR.sub("", text).replace("\r\n", "\n")
    return _NOT_PLAIN.sub(lambda found: ascii(found[0])[1:-1], text)


def size(text: str) -> int:
    """How many bytes a text without surrogates has in JSON, without the quotes."""
    return len(json.dumps(text, ensure_ascii=False).encode()) - 2


def cut(text: str, bytes_max: int) -> str:
    """The plain text, or its beginning and a mark, in at most `bytes_max` bytes."""
    text = plain(text)
    if size(text) <= bytes_max:
        return text
    room = bytes_max - len(MARK)
    # The longest beginning that fits, by bisection: sizes grow with the length.
    kept = bisect_right(range(room + 1), room, key=lambda length: size(text[:length])) - 1
    return text[:kept] + MARK


def known(text: str, bytes_max: int) -> str:
    """A form of `text` that is equal for equal texts only: itself, or an excerpt with a digest."""
    shown = plain(text)
    if shown == text and size(text) <= bytes_max:
        return text
    digest = f" (sha256 {hashlib.sha256(text.encode(errors='surrogatepass')).hexdigest()})"
    return cut(shown, bytes_max - len(digest)) + digest


def shell(words: Iterable[str]) -> str:
    """A line that a shell splits into `words` again, whatever bytes they contain."""
    return " ".join(map(_quoted, words))


def log_line(time: str, level: str, kind: str, text: str, **fields: object) -> str:
    """A log line for programs (`--log-format json`): one JSON object, without the line's end."""
    head = {"time": time, "level": level, "kind": kind, "text": plain(text)}
    return json_text({**head, **{name: value for name, value in fields.items() if name not in head}})


def json_text(value: object) -> str:
    """JSON in one line. A float that is not finite becomes a text such as "nan", because JSON has no such numbers."""
    try:
        # The usual case first: looking through every value costs more than encoding it.
        return json.dumps(value, default=str, allow_nan=False)
    except ValueError:
        return json.dumps(_finite(value), default=str)


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _finite(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _quoted(word: str) -> str:
    if plain(word) == word and "\n" not in word:
        return shlex.quote(word)
    # $'...' is of bash, zsh and newer POSIX shells. Inside of single quotes a shell knows no escapes.
    encoded = word.encode(errors="surrogateescape")
    return "$'" + "".join(chr(byte) if chr(byte) in _AS_IT_IS else f"\\x{byte:02x}" for byte in encoded) + "'"
