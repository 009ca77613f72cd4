"""One job at a time on a thread of its own, which is there already when the training thread hands it a job.

To start a thread takes the training thread a quarter of a millisecond, as it waits until the new one runs.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue

_log = logging.getLogger(__name__)

Job = Callable[[], None]


class Background:
    """The thread of its owner: begun with the first job, ended with the owner. A daemon: a stuck one hangs nobody.

    Args:
        name: of the thread.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._pid = 0
        self._idle = threading.Event()
        self._idle.set()
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()

    @property
    def busy(self) -> bool:
        """Whether a job is not done yet. A process that was forked meanwhile has the job's memory, and not the job."""
        return not self._idle.is_set() and self._pid == os.getpid()

    def start(self, job: Job) -> None:
        """Begin a job; there is none."""
        if self._pid != os.getpid():
            self._pid, self._idle, self._jobs = os.getpid(), threading.Event(), SimpleQueue()
            threading.Thread(target=_serve, args=(self._jobs, self._idle), name=self._name, daemon=True).start()
            weakref.finalize(self, self._jobs.put, None).atexit = False
        self._idle.clear()
        self._jobs.put(job)

    def wait(self, timeout_s: float) -> bool:
        """Wait until the job is done; False if it is not."""
        return not self.busy or self._idle.wait(timeout_s)


def _serve(jobs: SimpleQueue[Job | None], idle: threading.Event) -> None:
    while (job := jobs.get()) is not None:
        try:
            job()
        except Exception:  # noqa: BLE001  There is nobody here to raise it to, and there will be other jobs.
            _log.exception("a job in the background has failed")
        finally:
            del job  # It may hold its owner, whose end is the thread's.
            idle.set()
