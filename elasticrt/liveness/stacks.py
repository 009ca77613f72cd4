"""Takes the stacks of the workers' main threads, as text.

The agent first sends a message: the worker's link thread then writes the stack of the main thread on the status page. A
worker that does not answer, because its interpreter hangs or because it has no Loop, gets `STACKS_SIGNAL`, and
`faulthandler` writes the stack. If the worker does not answer the signal either, the state of its process takes the
place of the stack.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import dropwhile, takewhile
from pathlib import Path
from typing import Literal

from elasticrt.ipc.file_modes import make_directory, opener
from elasticrt.ipc.proc import state_of, text_of
from elasticrt.ipc.status_page import STACK_BEGINS, STACKS_SIGNAL, StatusPage
from elasticrt.ipc.time_bounds import STACKS_ASKED_S, STACKS_LOOK_S, STACKS_RUNS_S, STACKS_S_MAX
from elasticrt.liveness.culprit import STATES
from elasticrt.workers.group import WorkerGroup
from elasticrt.workers.logs import file_of

log = logging.getLogger(__name__)

LINES_MAX = 120


@dataclass(frozen=True)
class Stacks:
    """The stacks of one generation's workers on this node.

    Attributes:
        why: the reason for taking them, see `hang_monitor`.
        generation: the generation of the workers.
        step: the newest step there.
        age_s: for how many seconds the state that is the reason had lasted.
        final: whether that is too long, so that the workers have failed.
        lines: the lines of the stacks, by local rank.
        ended: for "waited_for", a description of the workers that have ended.
    """

    why: Literal["stalled", "late", "paused", "waited_for", "closer"]
    generation: int
    step: int
    age_s: float
    final: bool
    lines: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    ended: str = ""


def take(group: WorkerGroup, put: Callable[[Stacks], None], blank: Stacks, local_ranks: Collection[int]) -> None:
    """Take the stacks of workers in the background, within about STACKS_S_MAX seconds.

    Args:
        group: the worker processes.
        put: takes the answer: `blank` with its lines. Called on another thread.
        blank: the answer without lines. It also names the generation of the workers.
        local_ranks: the workers to ask; empty: all of that generation.
    """
    number, pids = blank.generation, group.pids(blank.generation)
    asked = [rank for rank in local_ranks or pids if rank in pids]
    # In this order: a `StackAnswer` notes what is on the page before the worker is asked.
    answers = {rank: StackAnswer(pids[rank], group.page(rank, number)) for rank in asked}
    group.ask_for_stacks(number)

    def work() -> None:
        began, signalled, missing = time.monotonic(), set[int](), list(answers)
        while missing and (waited_s := time.monotonic() - began) < STACKS_S_MAX:
            silent = [rank for rank in missing if rank not in signalled and answers[rank].is_to_signal(waited_s)]
            if silent:
                group.signal(STACKS_SIGNAL, number, silent)
                signalled.update(silent)
            time.sleep(STACKS_LOOK_S)
            missing = [rank for rank in missing if not answers[rank].is_complete()]
        put(replace(blank, lines={rank: tuple(each.lines()[:LINES_MAX]) for rank, each in answers.items()}))

    threading.Thread(target=work, name="elasticrt-stacks", daemon=True).start()


def keep(stacks: Stacks, by_rank: Mapping[int, Sequence[str]], node: str, directory: Path) -> None:
    """Append stacks to one file for each rank, beside the logs.

    Args:
        stacks: from which generation the stacks are, and after how many seconds they were taken.
        by_rank: the lines of the stacks, by global rank.
        node: the name of this node.
        directory: the run's directory.
    """
    for rank, lines in by_rank.items():
        path = file_of(directory, stacks.generation, rank, node, "stacks")
        try:
            make_directory(path.parent)
            with open(path, "a", encoding="utf-8", errors="backslashreplace", opener=opener) as file:
                file.write("\n".join([f"after {stacks.age_s:.1f} s without a step:", *lines, "", ""]))
        except OSError as error:
            log.warning("stacks are not kept: %s: %s", path, error.strerror)


def main_thread(lines: Sequence[str]) -> list[str]:
    """The frames of the first thread in `lines`, innermost first; empty if the worker has not answered."""
    from_the_first = dropwhile(lambda line: not line.startswith("  File "), lines)
    return list(takewhile(lambda line: line.startswith("  File "), from_the_first))


class StackAnswer:
    """What a worker has written on its page since it was asked. Make it before the worker is asked.

    Args:
        pid: the worker's process id.
        page: its status page.
    """

    def __init__(self, pid: int, page: StatusPage) -> None:
        self.pid, self._page = pid, page
        # A worker's link counts `looks` up, and replaces the text. The signal handler of faulthandler appends to it.
        self._looks, self._length = page.looks, len(page.text())
        self._now = self._length

    def has_answered(self) -> bool:
        """Whether the worker's link has answered."""
        return self._page.looks != self._looks

    def is_to_signal(self, waited_s: float) -> bool:
        """Whether to send the signal, `waited_s` seconds after the worker was asked.

        A main thread that runs gets it later: it may run Python code, and faulthandler would read frames that change.
        """
        late = waited_s >= STACKS_ASKED_S and (waited_s >= STACKS_RUNS_S or state_of(self.pid) != "R")
        # The signal would end a process without a handler for it.
        return late and not self.has_answered() and _catches(self.pid)

    def is_complete(self) -> bool:
        """Whether the worker has answered, and has written nothing more since the last call.

        The link counts up when its text is complete. faulthandler tells no end, so the text must have stopped growing.
        """
        before, self._now = self._now, len(self._page.text())
        return self.has_answered() or self._now == before > self._length

    def lines(self) -> list[str]:
        """The lines of the stack; without an answer, one line that says why."""
        text = self._page.text() if self.has_answered() else self._page.text()[self._length :]
        if not text:
            state = state_of(self.pid)
            how = STATES.get(state, f"is in state {state}") if state else "has ended"
            return [f"it has not answered within {STACKS_S_MAX:g} s, and {how}"]
        # An earlier answer may have been incomplete when this worker was asked. So the text may begin in the middle of
        # a stack, and only the last whole stack counts.
        whole = text.decode(errors="replace").rpartition(STACK_BEGINS)
        return "".join(whole[1:]).strip().splitlines()


def _catches(pid: int) -> bool:
    """Whether the process `pid` has a handler for STACKS_SIGNAL, by the kernel's mask of caught signals."""
    lines = text_of(Path(f"/proc/{pid}/status")).splitlines()
    masks = [int(line.split()[1], 16) for line in lines if line.startswith("SigCgt:")]
    return bool(masks and masks[0] >> (STACKS_SIGNAL - 1) & 1)
