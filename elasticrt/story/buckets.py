"""The buckets between which the time of each agent's life is divided, and spans of time in them. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

TRAIN, REDONE, DATA, SAVE, PAUSE = "train", "redone steps", "data wait", "checkpoint stall", "pause"
DETECT, AGREE, REFORM, SET_UP, RESTORE = "detect", "agree", "re-form", "set-up", "restore"
START, WAITING, STANDBY = "start", "waiting for nodes", "standby"

BUCKETS: Mapping[str, str] = {
    TRAIN: "steps that count",
    REDONE: "steps that had been done before, and are done again",
    DATA: "waiting for the data loader",
    SAVE: "training was blocked by a checkpoint or a copy of the state",
    PAUSE: "in `loop.pause`: evaluation, for example",
    DETECT: "from the last step until the failure or change was noticed; all of a hang",
    AGREE: "until the next generation was agreed",
    REFORM: "old workers ended, survivors took their new ranks, the process group was created",
    SET_UP: "workers started, and the script came to its first step",
    RESTORE: "the state was loaded, or taken over from another worker",
    START: "the agent or the worker parent started, or the agent ended",
    WAITING: "there were fewer nodes than the run needs",
    STANDBY: "other nodes trained without this one",
}
"""Each bucket with its meaning, the best use of time first. docs/events.md shows this table."""

SPANS_MAX = 4000
"""How many spans one life keeps. Beyond that, short ones are merged (`coarse`): no second is lost, but within a piece
the buckets stand in their own order."""


@dataclass(frozen=True)
class Span:
    """An interval of time, in one bucket."""

    # `begin` and `end` are in seconds since 1970.
    begin: float
    end: float
    bucket: str  # A key of `BUCKETS`.


def append(spans: list[Span], span: Span) -> None:
    """Add `span` at the end of `spans`; if it continues the last one, make that longer."""
    last = spans[-1] if spans else None
    if last is not None and last.bucket == span.bucket and last.end == span.begin:
        span = Span(spans.pop().begin, span.end, span.bucket)
    spans.append(span)


def coarse(spans: Sequence[Span], pieces: int) -> list[Span]:
    """The same time in at most about `pieces` pieces, each divided between its buckets. Longer spans stay whole."""
    found, piece = list[Span](), list[Span]()
    piece_s = (spans[-1].end - spans[0].begin) / pieces if spans else 0.0
    for span in spans:
        # A new piece begins after a gap, when the present one is long enough, or for a long span.
        is_whole = piece and piece[-1].end - piece[0].begin >= piece_s
        if piece and (is_whole or span.begin > piece[-1].end or span.end - span.begin >= piece_s):
            _divide(piece, found)
            piece = []
        piece.append(span)
    _divide(piece, found)
    return found


def _divide(piece: Sequence[Span], found: list[Span]) -> None:
    """Add to `found` one span for each bucket of `piece`, which has no gap."""
    spent, begin = totals(piece), piece[0].begin if piece else 0.0
    for place, (bucket, spent_s) in enumerate(spent.items(), 1):
        end = piece[-1].end if place == len(spent) else min(begin + spent_s, piece[-1].end)
        if end > begin:
            append(found, Span(begin, end, bucket))
        begin = end


def totals(spans: Iterable[Span]) -> dict[str, float]:
    """Seconds by bucket, in the order of `BUCKETS`, without those that are empty."""
    found = dict.fromkeys(BUCKETS, 0.0)
    for span in spans:
        found[span.bucket] += span.end - span.begin
    return {name: spent_s for name, spent_s in found.items() if spent_s > 0}
