"""The failure of a worker, as agents, reports in etcd and the run's result have it. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from elasticrt.ipc.env import COUNT_MAX
from elasticrt.text import cut

FinalCode = Literal[0, 1, 5, 6, 7]

SUMMARY_MAX_BYTES = 400
TEXT_MAX_BYTES = 6000
"""The limits of texts in a report in etcd, and in the result of a run."""

ENDED_EARLY = (
    "ended early, with exit code 0, while others were in a collective; "
    "let all ranks make equally many steps, and none of them call sys.exit before"
)
_EARLY = re.compile(r"([0-9a-f]{16})?")


@dataclass(frozen=True)
class Failure:
    """The failure of one worker, or of all workers of a node. Long texts are cut; other wrong values raise ValueError.

    Attributes:
        rank: global rank of the worker.
        code: exit code, or minus the signal number.
        collateral: it failed only because another worker had.
        summary: where and how, in one line.
        text: the same in full: the end of the worker's output, or the stacks of its threads.
        final_code: the exit code of the run, if no restart can cure this; else 0.
        misfit: the script of the worker is not the run's, so its node leaves; that costs no restart.
        stalled: no process ended, but no step was made for too long.
        killed: a signal has ended the worker after a step of its own, and that is the cause.
        unmet: the worker could not reach another one. In a node's report: not for several generations in a row.
        early: a digest of the error before the first step, and its place. If it comes twice, it will come again.
        beats: steps of the run that the worker had finished; in a script without a Loop, optimizer steps that it made.
        loaded: when the newest snapshot was written from which it made them, in microseconds since the epoch, or 0.
    """

    rank: int
    code: int
    collateral: bool
    summary: str
    text: str = ""
    final_code: FinalCode = 0
    misfit: bool = False
    stalled: bool = False
    killed: bool = False
    unmet: bool = False
    early: str = ""
    beats: int = 0
    loaded: int = 0

    __pydantic_config__ = {"extra": "forbid", "strict": True}  # noqa: RUF012  How records read it; pydantic's own word.

    def __post_init__(self) -> None:
        """Cut the texts, and check the numbers and the digest."""
        object.__setattr__(self, "summary", cut(self.summary, SUMMARY_MAX_BYTES))
        object.__setattr__(self, "text", cut(self.text, TEXT_MAX_BYTES))
        if not all(0 <= number <= COUNT_MAX for number in (self.rank, self.beats, self.loaded)):
            raise ValueError("a number is negative or too large")
        if not _EARLY.fullmatch(self.early):
            raise ValueError("early is no digest")


def first_cause(failures: Sequence[Failure], ended: Sequence[str] = ()) -> Failure | None:
    """The first cause among `failures`, in the order in which they came; None without failures.

    It is the first failure that is not collateral. If there is none, the others waited for a worker that had ended with
    code 0: a failure that says so, or the first of `ended`, descriptions of such workers. Else it is the first failure.
    """
    causes = [each for each in failures if not each.collateral] or [each for each in failures if each.code == 0]
    if not causes and failures and ended:
        said = f"{ended[0]}: {ENDED_EARLY}"
        text = failures[0].text.replace(" failed first, ", " failed of it, ", 1)
        return replace(failures[0], code=0, summary=said, text=f"{said}\n{text}")
    return next(iter([*causes, *failures]), None)
