"""The filter that makes etcd deaf to SIGTERM, on machines that are not at hand as well."""

from __future__ import annotations

import signal
import struct

import pytest

from elasticrt.store.ignore_sigterm import program

X86, ARM, OTHER = 0xC000003E, 0xC00000B7, 0x40000003
ALLOW, PRETEND = 0x7FFF0000, 0x00050000


def verdict(code: bytes, architecture: int, call: int, argument: int) -> int:
    """What the kernel would find, by its rules for the three instructions that are used."""
    data = struct.pack("<IIQQ", call, architecture, 0, argument)
    steps = list(struct.iter_unpack("HBBI", code))
    at = accumulator = 0
    while True:
        operation, when_true, when_false, value = steps[at]
        at += 1
        if operation == 0x20:
            accumulator = struct.unpack_from("<I", data, value)[0]
        elif operation == 0x15:
            at += when_true if accumulator == value else when_false
        else:
            assert operation == 0x06
            return value


@pytest.mark.parametrize(
    ("machine", "architecture", "call", "number", "expected"),
    [
        ("x86_64", X86, 13, signal.SIGTERM, PRETEND),
        ("x86_64", X86, 13, signal.SIGINT, ALLOW),
        ("x86_64", X86, 14, signal.SIGTERM, ALLOW),
        ("x86_64", OTHER, 13, signal.SIGTERM, ALLOW),
        ("aarch64", ARM, 134, signal.SIGTERM, PRETEND),
        ("aarch64", ARM, 134, signal.SIGINT, ALLOW),
        ("aarch64", ARM, 13, signal.SIGTERM, ALLOW),
        ("aarch64", X86, 13, signal.SIGTERM, ALLOW),
    ],
)
def test_only_a_handler_for_sigterm_is_pretended(
    machine: str, architecture: int, call: int, number: int, expected: int
) -> None:
    """The one call that would install a handler for SIGTERM is not made; every other call goes through."""
    # The offset 16 is that of the first argument's lower half.
    assert verdict(program(machine), architecture, call, number) == expected


def test_unknown_machines_get_no_filter() -> None:
    """Where the numbers are not known nothing is filtered."""
    assert program("riscv64") == b""
