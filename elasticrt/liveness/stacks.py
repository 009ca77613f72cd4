"""The stacks of the workers' main threads, as text.

A worker with a Loop writes its stack on its status page when it gets `STACKS_SIGNAL`, by `faulthandler`, which works
while the interpreter hangs. If a worker does not answer, the state of its process is given instead.
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
from elasticrt.ipc.proc import state_of
from elasticrt.ipc.status_page import STACKS_SIGNAL, StatusPage
from elasticrt.ipc.time_bounds import STACKS_LOOK_S, STACKS_S_MAX
from elasticrt.liveness.culprit import STATES
from elasticrt.workers.logs import file_of

log = logging.getLogger(__name__)

LINES_MAX = 120
# The first line of each answer, by faulthandler.
BEGINS = "Stack (most recent call first):"


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
    signal: Callable[[int], None],
    put: Callable[[Stacks], None],
    blank: Stacks,
) -> None:
    """Ask `workers` (process id and status page, by local rank) for their stacks; `signal` sends all of them a signal.

    `put` takes the answer within a few seconds, on another thread: `blank` with its lines.
    """
    before = {rank: len(page.text()) for rank, (_, page) in workers.items()}
    if all(_catches(pid) for pid, _ in workers.values()):  # The signal ends a process without a handler.
        signal(STACKS_SIGNAL)

    def work() -> None:
        said = {rank: tuple(_text_of(pid, page, before[rank])[:LINES_MAX]) for rank, (pid, page) in workers.items()}
        put(replace(blank, lines=said))

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


def _text_of(pid: int, page: StatusPage, before: int) -> list[str]:
    """The text that the worker has added to its page, whose length was `before`, once it has stopped writing."""
    deadline, length = time.monotonic() + STACKS_S_MAX, before
    while time.monotonic() < deadline:
        now = len(page.text())
        if now == length > before:
            break
        length = now
        time.sleep(STACKS_LOOK_S)
    if length == before:
        state = state_of(pid)
        how = STATES.get(state, f"is in state {state}") if state else "has ended"
        return [f"it has not answered within {STACKS_S_MAX:g} s, and {how}"]
    # While an earlier answer was being written, the text before has ended in the middle of a stack.
    whole = page.text()[before:].decode(errors="replace").rpartition(BEGINS)
    return "".join(whole[1:]).strip().splitlines()


def _catches(pid: int) -> bool:
    """Whether a process has a handler for STACKS_SIGNAL."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return False
    masks = [int(line.split()[1], 16) for line in lines if line.startswith("SigCgt:")]
    return bool(masks and masks[0] >> (STACKS_SIGNAL - 1) & 1)
