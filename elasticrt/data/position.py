"""Where a training loop stands, when a save is due, and when the loop is over. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, NamedTuple

from elasticrt.errors import ConfigError, explain


class Position(NamedTuple):
    """A point between two steps.

    It is a tuple because one is made at every step, which takes half as long as for a dataclass.

    Attributes:
        steps: the number of optimizer updates so far, over all epochs.
        epoch: the epoch that is being trained, or comes next.
        batches: the number of global batches of that epoch that are done.
        open: whether the body of that epoch has begun and not ended. What follows its batches (evaluation, schedulers)
            is then still to be done.
        drained: whether the epoch's loader has nothing left.
        left: the script has left the epoch's batches by `break`, so that what follows them is next.
    """

    steps: int = 0
    epoch: int = 0
    batches: int = 0
    open: bool = False
    drained: bool = False
    left: bool = False

    def stepped(self) -> Position:
        """The position after one more global batch."""
        return Position(self.steps + 1, self.epoch, self.batches + 1, self.open, self.drained)

    def closed(self, *, cut_short: bool) -> Position:
        """The position after the end of the epoch's body.

        The next epoch comes next; if the limit of steps has `cut_short` this one, its rest does.
        """
        if cut_short:
            return self._replace(open=False)
        return Position(steps=self.steps, epoch=self.epoch + 1)

    def is_over(self, total: int, steps_max: int | None) -> bool:
        """Whether the loop has no epoch left to enter.

        An open epoch is entered again, if only for what follows its batches.

        Args:
            total: the number of epochs.
            steps_max: the limit of steps; None: there is none.
        """
        if self.epoch >= total:
            return True
        return not self.open and self.limit_reached(steps_max)

    def limit_reached(self, steps_max: int | None) -> bool:
        """Whether the limit of steps, `steps_max`, is reached."""
        return steps_max is not None and self.steps >= steps_max


@dataclass(frozen=True)
class SaveInterval:
    """How often to save: once every `count` of `unit`."""

    count: float
    unit: Literal["seconds", "steps", "epochs"]

    @classmethod
    def parse(cls, text: object) -> SaveInterval:
        """Parse a text such as "500 ms", "30s", "5 min", "1 h", "200 steps" or "1 epoch".

        Raises TypeError if it is not a text, ConfigError if it has another form.
        """
        if not isinstance(text, str):
            raise TypeError(explain("not a text", "Loop(every=)", got=text, expected='such as "30s", "200 steps"'))
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]+)\s*", text)
        number, word = match.groups() if match else ("0", "")
        seconds = {"ms": 1e-3, "s": 1, "sec": 1, "second": 1, "m": 60, "min": 60, "minute": 60, "h": 3600, "hour": 3600}
        # A unit may be in the plural; "ms" and "s" are units themselves.
        word = word if word in seconds else word.removesuffix("s")
        if word in seconds and float(number) > 0:
            return cls(float(number) * seconds[word], "seconds")
        if word in ("step", "epoch") and number.isdigit() and int(number) > 0:
            return cls(int(number), "steps" if word == "step" else "epochs")
        expected = '"30s", "5 min", "200 steps" or "1 epoch", above zero'
        remedy = "Leave it out for one every 30 s"
        raise ConfigError("not an interval between saves", "Loop(every=)", got=text, expected=expected, remedy=remedy)

    def is_due(self, position: Position, saved: Position, since_s: float) -> bool:
        """Whether to save now.

        Args:
            position: where the training loop stands.
            saved: the position of the newest save; before the first save, where the loop began.
            since_s: the seconds since that save, or since the beginning.
        """
        if self.unit == "seconds":
            return since_s >= self.count and position != saved
        if position == saved:
            return False
        if self.unit == "steps":
            return position.steps - saved.steps >= self.count
        # An epoch is done when its body has ended, not when its batches have.
        return not position.open and position.epoch - saved.epoch >= self.count
