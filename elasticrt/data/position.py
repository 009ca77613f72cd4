"""Where a training loop stands, what is due, and when it is over. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, NamedTuple

from elasticrt.errors import ConfigError, explain


class Position(NamedTuple):
    """A point between two steps. A tuple, because one is made at every step, and that takes half as long.

    Attributes:
        steps: optimizer updates so far, over all epochs.
        epoch: the epoch that is being trained, or comes next.
        batches: global batches of that epoch that are done.
        open: the body of that epoch has begun and not ended: what follows its batches (evaluation, schedulers) is
            still to be done.
        drained: the epoch's loader has nothing left.
    """

    steps: int = 0
    epoch: int = 0
    batches: int = 0
    open: bool = False
    drained: bool = False

    def stepped(self) -> Position:
        """One more global batch is trained."""
        return Position(self.steps + 1, self.epoch, self.batches + 1, self.open, self.drained)

    def closed(self, *, cut_short: bool) -> Position:
        """The epoch's body has ended. When the limit of steps cut it short, its rest comes next."""
        if cut_short:
            return self._replace(open=False)
        return Position(steps=self.steps, epoch=self.epoch + 1)

    def is_over(self, total: int, steps_max: int | None) -> bool:
        """Whether nothing is left to enter. An open epoch is entered again, if only for what follows its batches."""
        if self.epoch >= total:
            return True
        return not self.open and self.limit_reached(steps_max)

    def limit_reached(self, steps_max: int | None) -> bool:
        """Whether no more steps are wanted."""
        return steps_max is not None and self.steps >= steps_max


@dataclass(frozen=True)
class SaveInterval:
    """How often to save: each `count` of `unit`."""

    count: float
    unit: Literal["seconds", "steps", "epochs"]

    @classmethod
    def parse(cls, text: object) -> SaveInterval:
        """From "500 ms", "30s", "5 min", "1 h", "200 steps" or "1 epoch". Raises TypeError, ConfigError."""
        if not isinstance(text, str):
            raise TypeError(explain("not a text", "Loop(every=)", got=text, expected='such as "30s", "200 steps"'))
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]+)\s*", text)
        number, word = match.groups() if match else ("0", "")
        seconds = {"ms": 1e-3, "s": 1, "sec": 1, "second": 1, "m": 60, "min": 60, "minute": 60, "h": 3600, "hour": 3600}
        word = word if word in seconds else word.removesuffix("s")
        if word in seconds and float(number) > 0:
            return cls(float(number) * seconds[word], "seconds")
        if word in ("step", "epoch") and number.isdigit() and int(number) > 0:
            return cls(int(number), "steps" if word == "step" else "epochs")
        expected = '"30s", "5 min", "200 steps" or "1 epoch", more than none'
        remedy = "Leave it out for one every 30 s"
        raise ConfigError("not a distance between saves", "Loop(every=)", got=text, expected=expected, remedy=remedy)

    def is_due(self, position: Position, saved: Position, since_s: float) -> bool:
        """Whether to save now. `saved` is the position of the newest save (at the start: where the loop began), since_s
        the seconds since then.
        """
        if self.unit == "seconds":
            return since_s >= self.count and position != saved
        if position == saved:
            return False
        if self.unit == "steps":
            return position.steps - saved.steps >= self.count
        # An epoch is done when its body has ended, not when its batches have.
        return not position.open and position.epoch - saved.epoch >= self.count
