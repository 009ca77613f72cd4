"""Why an etcd did not start: its own last words in a line."""

from __future__ import annotations

import pytest

from elasticrt.store.etcd_server import reason_in

STACK = """
goroutine 1 [running, locked to thread]:
runtime.throw(0x121237e, 0x14)
\t/home/remote/go1.16.3/src/runtime/panic.go:1117 +0x72 fp=0xc00006d550 sp=0xc00006d520 pc=0x4385d2
runtime.goexit()
\t/home/remote/go1.16.3/src/runtime/asm_amd64.s:1371 +0x1 fp=0xc00006dfe8 sp=0xc00006dfe0 pc=0x4722e1
"""


@pytest.mark.parametrize(
    ("text", "got"),
    [
        (
            "runtime: pipe failed with 24\nfatal error: runtime: pipe failed" + STACK,
            "fatal error: runtime: pipe failed",
        ),
        (
            '{"level":"fatal","msg":"discovery failed","error":"listen tcp: socket: too many open files"}',
            "discovery failed: listen tcp: socket: too many open files",
        ),
        (
            '{"level":"fatal","msg":"file descriptor limit of etcd process is too low; please set higher"}',
            "file descriptor limit of etcd process is too low; please set higher",
        ),
        ("[Errno 24] Too many open files", "[Errno 24] Too many open files"),
        (
            "runtime: failed to create new OS thread (have 5 already; errno=11)\nfatal error: newosproc" + STACK,
            "fatal error: newosproc",
        ),
        ("[Errno 11] Resource temporarily unavailable", "[Errno 11] Resource temporarily unavailable"),
        ("fatal error: failed to reserve page" + STACK, "fatal error: failed to reserve page"),
        ("fatal error: out of memory (heap)" + STACK, "fatal error: out of memory (heap)"),
        ("[Errno 12] Cannot allocate memory", "[Errno 12] Cannot allocate memory"),
        ("open /x/wal: no space left on device", "open /x/wal: no space left on device"),
        ("panic: failed to create WAL" + STACK, "panic: failed to create WAL"),
        ("warn: x\npanic: assertion failed" + STACK, "panic: assertion failed"),
        (
            'first\n{"level":"fatal","msg":"discovery failed","error":"no such host","stacktrace":"a\\nb"}\n',
            "discovery failed: no such host",
        ),
        ("first\nlast\n", "last"),
        ("[" * 5000, "[" * 5000),
        ("", ""),
    ],
)
def test_its_last_words(text: str, got: str) -> None:
    """G17: files, threads, memory and space that run out are told in a line, without the stacks."""
    assert reason_in(text) == got
