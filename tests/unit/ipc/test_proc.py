"""What the kernel shows of a process."""

from __future__ import annotations

import os
import subprocess
import sys

from elasticrt.ipc.proc import start_of, stat

NAMED = "open('/proc/self/comm', 'w').write('a) Z 1 (b'); print(flush=True); input()"


def test_a_process_until_it_is_gone() -> None:
    """Its name may look like fields; one that waits to be reaped has ended, one that was reaped is not there."""
    with subprocess.Popen([sys.executable, "-c", NAMED], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdout.readline()
        found = stat(process.pid)
        assert found is not None
        assert (found.ended, found.parent, found.ticks >= 0) == (False, os.getpid(), True)
        assert start_of(process.pid) == found.start >= start_of(os.getpid()) > 0
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        found = stat(process.pid)
        assert found is not None
        assert (found.ended, start_of(process.pid)) == (True, 0)
        process.wait()
        assert (stat(process.pid), start_of(process.pid)) == (None, 0)
