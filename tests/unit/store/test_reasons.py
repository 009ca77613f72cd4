"""Why an etcd did not start: its own last words in a line, and what helps."""

from __future__ import annotations

import pytest

from elasticrt.store.etcd_server import reason_and_remedy

STACK = """
goroutine 1 [running, locked to thread]:
runtime.throw(0x121237e, 0x14)
\t/home/remote/go1.16.3/src/runtime/panic.go:1117 +0x72 fp=0xc00006d550 sp=0xc00006d520 pc=0x4385d2
runtime.goexit()
\t/home/remote/go1.16.3/src/runtime/asm_amd64.s:1371 +0x1 fp=0xc00006dfe8 sp=0xc00006dfe0 pc=0x4722e1
"""


@pytest.mark.parametrize(
    ("text", "got", "helps"),
    [
        (
            "runtime: pipe failed with 24\nfatal error: runtime: pipe failed" + STACK,
            "fatal error: runtime: pipe failed",
            "ulimit -n",
        ),
        (
            '{"level":"fatal","msg":"discovery failed","error":"listen tcp: socket: too many open files"}',
            "discovery failed: listen tcp: socket: too many open files",
            "ulimit -n",
        ),
        (
            '{"level":"fatal","msg":"file descriptor limit of etcd process is too low; please set higher"}',
            "file descriptor limit of etcd process is too low; please set higher",
            "ulimit -n",
        ),
        ("[Errno 24] Too many open files", "[Errno 24] Too many open files", "ulimit -n"),
        (
            "runtime: failed to create new OS thread (have 5 already; errno=11)\nfatal error: newosproc" + STACK,
            "fatal error: newosproc",
            "ulimit -u",
        ),
        ("[Errno 11] Resource temporarily unavailable", "[Errno 11] Resource temporarily unavailable", "ulimit -u"),
        ("fatal error: failed to reserve page" + STACK, "fatal error: failed to reserve page", "ulimit -v"),
        ("fatal error: out of memory (heap)" + STACK, "fatal error: out of memory (heap)", "ulimit -v"),
        ("[Errno 12] Cannot allocate memory", "[Errno 12] Cannot allocate memory", "ulimit -v"),
        ("open /x/wal: no space left on device", "open /x/wal: no space left on device", "TMPDIR"),
        ("panic: failed to create WAL" + STACK, "panic: failed to create WAL", "ulimit -f"),
        ("warn: x\npanic: assertion failed" + STACK, "panic: assertion failed", ""),
        (
            'first\n{"level":"fatal","msg":"discovery failed","error":"no such host","stacktrace":"a\\nb"}\n',
            "discovery failed: no such host",
            "",
        ),
        ("first\nlast\n", "last", ""),
        ("[" * 5000, "[" * 5000, ""),
        ("", "", ""),
    ],
)
def test_in_our_words(text: str, got: str, helps: str) -> None:
    """G17: files, threads, memory and space that run out are told with the limit to raise."""
    found, remedy = reason_and_remedy(text)
    assert found == got
    assert helps in remedy
    assert bool(remedy) == bool(helps)
