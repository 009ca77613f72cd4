"""The stacks of the workers' main threads, as text.

A worker's link writes the stack of the main thread on the status page when the agent asks. One that does not, because
its interpreter hangs or it has no Loop, gets `STACKS_SIGNAL`, at which `faulthandler` writes it. If it does not answer
that either, the state of its process is given instead.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from elasticrt.ipc.file_modes import make_directory, opener
from elasticrt.ipc.proc import state_of, text_of
from elasticrt.ipc.status_page import STACK_BEGINS, STACKS_SIGNAL, StatusPage
from elasticrt.ipc.time_bounds import STACKS_ASKED_S, STACKS_LOOK_S, STACKS_RUNS_S, STACKS_S_MAX
from elasticrt.liveness.culprit import STATES
from elasticrt.workers.logs import file_of

log = logging.getLogger(__name__)

LINES_MAX = 120


@dataclass(frozen=True)
class Stacks:
    """The stacks of one generation's workers on this node."""

    why: Literal["stalled", "late", "paused", "waited_for", "closer"]  # The reason for taking them, see `hang_monitor`.
    # `generation`, `step`: the generation, and its newest step.
    generation: int
    step: int
    # `age_s`: for how long this state had lasted, in seconds; `final`: that is too long.
    age_s: float
    final: bool
    lines: Mapping[int, tuple[str, ...]] = field(default_factory=dict)  # The stacks by local rank.
    ended: str = ""  # For "waited_for": a description of the workers that have ended.


def take(
    workers: Mapping[int, tuple[int, StatusPage]],
    look: Callable[[], None],
    signal: Callable[[int, Sequence[int]], None],
    put: Callable[[Stacks], None],
    blank: Stacks,
) -> None:
    """Take the stacks of `workers` (process id and status page, by local rank).

    `look` sends them the message, `signal` a signal to local ranks. `put` takes the answer within a few seconds:
    `blank` with its lines. Both of these are called on another thread.
    """
    answers = {rank: Answer(pid, page) for rank, (pid, page) in workers.items()}
    look()

    def work() -> None:
        began, signalled, missing = time.monotonic(), set[int](), list(answers)
        while missing and (waited_s := time.monotonic() - began) < STACKS_S_MAX:
            silent = [rank for rank in missing if rank not in signalled and answers[rank].is_to_signal(waited_s)]
            if silent:
                signal(STACKS_SIGNAL, silent)
                signalled.update(silent)
            time.sleep(STACKS_LOOK_S)
            missing = [rank for rank in missing if not answers[rank].whole()]
        put(replace(blank, lines={rank: tuple(each.lines()[:LINES_MAX]) for rank, each in answers.items()}))

    threading.Thread(target=work, name="elasticrt-stacks", daemon=True).start()


def keep(stacks: Stacks, by_rank: Mapping[int, Sequence[str]], node: str, directory: Path) -> None:
    """Append the stacks of `node`, by global rank, to a file for each rank beside the logs in `directory`."""
    for rank, lines in by_rank.items():
        path = file_of(directory, stacks.generation, rank, node, "stacks")
        try:
            make_directory(path.parent)
            with open(path, "a", encoding="utf-8", errors="backslashreplace", opener=opener) as file:
                file.write("\n".join([f"after {stacks.age_s:.1f} s without a step:", *lines, "", ""]))
        except OSError as error:
            log.warning("stacks are not kept: %s: %s", path, error.strerror)


def main_thread(lines: Sequence[str]) -> list[str]:
    """The frames of the first thread in `lines`, innermost first; none if the worker has not answered."""
    frames: list[str] = []
    for line in lines:
        if line.startswith("  File "):
            frames.append(line)
        elif frames:
            break
    return frames


class Answer:
    """What a worker has written since it was asked."""

    def __init__(self, pid: int, page: StatusPage) -> None:
        self.pid, self._page = pid, page
        self._looks, self._length = page.looks, len(page.text())
        self._now = self._length

    def looked(self) -> bool:
        """Whether its link has answered."""
        return self._page.looks != self._looks

    def is_to_signal(self, waited_s: float) -> bool:
        """Whether it gets the signal, so many seconds after it was asked: if its main thread runs, it is late.

        That may run Python code, whose frames faulthandler would read while they change.
        """
        late = waited_s >= STACKS_ASKED_S and (waited_s >= STACKS_RUNS_S or state_of(self.pid) != "R")
        return late and not self.looked() and _catches(self.pid)  # The signal ends a process without a handler.

    def whole(self) -> bool:
        """Whether it has answered, and writes no more since the last call."""
        before, self._now = self._now, len(self._page.text())
        return self.looked() or self._now == before > self._length

    def lines(self) -> list[str]:
        """The stack; if there is none, why."""
        text = self._page.text() if self.looked() else self._page.text()[self._length :]
        if not text:
            state = state_of(self.pid)
            how = STATES.get(state, f"is in state {state}") if state else "has ended"
            return [f"it has not answered within {STACKS_S_MAX:g} s, and {how}"]
        # While an earlier answer was being written, the text before has ended in the middle of a stack.
        whole = text.decode(errors="replace").rpartition(STACK_BEGINS)
        return "".join(whole[1:]).strip().splitlines()


def _catches(pid: int) -> bool:
    """Whether a process has a handler for STACKS_SIGNAL."""
    lines = text_of(Path(f"/proc/{pid}/status")).splitlines()
    masks = [int(line.split()[1], 16) for line in lines if line.startswith("SigCgt:")]
    return bool(masks and masks[0] >> (STACKS_SIGNAL - 1) & 1)
