"""Free text that travels: what an exception says, the end of a worker's output, script arguments, paths. Pure.

Such a text may hold anything: control characters that a terminal obeys, bytes that are not UTF-8 (Python keeps them as
lone surrogates, which no encoder takes), far more than a record may hold. Each kind of text has one function here, and
the records apply it when they are made, so that none can be made that others refuse:

* `cut`: for people. Made plain, and shortened where it is too long.
* `known`: to be compared with another one. As it is where that is short and plain, else told by its digest.
* `packed`, `unpacked`: a path, which has to arrive as it is.
* `shell`: a command, to be pasted.

A limit counts bytes as JSON encodes them, because that is what travels.
"""

from __future__ import annotations

import hashlib
import json
import re
import shlex
from bisect import bisect_right
from collections.abc import Iterable

MARK = "..."
"""Stands where something has been cut off."""

_COLOUR = re.compile(r"\x1b\[[0-9;:]*m")
_NOT_PLAIN = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""All control characters but tab and newline, separators of lines, changes of direction, lone surrogates."""

_NOT_UTF8 = re.compile(r"[\udc80-\udcff]")
_AS_IT_IS = frozenset(map(chr, range(32, 127))) - {"\\", "'"}
_PACKED = re.compile(r"\0([89a-f][0-9a-f])")


def plain(text: str) -> str:
    """The text without colours, and with visible escapes for all that a terminal obeys or an encoder refuses."""
    text = _COLOUR.sub("", text).replace("\r\n", "\n")
    return _NOT_PLAIN.sub(lambda found: ascii(found[0])[1:-1], text)


def size(text: str) -> int:
    """Bytes of a text that has no surrogates, as JSON encodes it, without its quotes."""
    return len(json.dumps(text, ensure_ascii=False).encode()) - 2


def cut(text: str, bytes_max: int) -> str:
    """The text made plain; if it is larger than `bytes_max`, its beginning, to a character's end, and a mark."""
    text = plain(text)
    if size(text) <= bytes_max:
        return text
    room = bytes_max - len(MARK)
    kept = bisect_right(range(room + 1), room, key=lambda length: size(text[:length])) - 1
    return text[:kept] + MARK


def known(text: str, bytes_max: int) -> str:
    """A text that is equal to another's exactly where the two texts are: the text itself, or a digest behind it."""
    shown = plain(text)
    if shown == text and size(text) <= bytes_max:
        return text
    digest = f" (sha256 {hashlib.sha256(text.encode(errors='surrogatepass')).hexdigest()})"
    return cut(shown, bytes_max - len(digest)) + digest


def packed(path: str) -> str:
    """A path, or another text of the system's, without surrogates: none of them holds a NUL, which marks a byte."""
    return _NOT_UTF8.sub(lambda found: f"\0{ord(found[0]) - 0xDC00:02x}", path)


def unpacked(text: str) -> str:
    """The reverse of `packed`. ValueError where it is no text of the system's."""
    path = _PACKED.sub(lambda found: chr(0xDC00 + int(found[1], 16)), text)
    if "\0" in path:
        raise ValueError("a NUL in a path")
    path.encode(errors="surrogateescape")
    return path


def shell(words: Iterable[str]) -> str:
    """A command in one line that a shell takes for the same words, in any bytes."""
    return " ".join(map(_quoted, words))


def log_line(time: str, level: str, kind: str, text: str, **fields: object) -> str:
    """A line of ours for programs (`--log-format json`): one object of JSON, without the line's end."""
    head = {"time": time, "level": level, "kind": kind, "text": plain(text)}
    return json.dumps({**head, **{name: value for name, value in fields.items() if name not in head}}, default=str)


def _quoted(word: str) -> str:
    if plain(word) == word and "\n" not in word:
        return shlex.quote(word)
    encoded = word.encode(errors="surrogateescape")
    return "$'" + "".join(chr(byte) if chr(byte) in _AS_IT_IS else f"\\x{byte:02x}" for byte in encoded) + "'"
