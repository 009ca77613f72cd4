"""Copies of a training state on the host, one after the other in the same memory, for whoever writes them somewhere."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from elasticrt.train.deferred import Deferred
from elasticrt.train.plain import Buffers, plain_copy


class Snapshots:
    """One writer's copies. What is marked as `Steady` is copied later, until it is seen to be changed too early."""

    def __init__(self) -> None:
        self._buffers = Buffers()
        self._deferred = Deferred()
        self._at_once = False  # Since what was marked as `Steady` was seen to be none.

    @property
    def spoilt(self) -> bool:
        """Whether the last copy came to nothing because what was marked as `Steady` was changed too early."""
        return not self._deferred.intact

    def take(self, state: Mapping[str, Any]) -> tuple[dict[str, Any], Deferred]:
        """Copy `state` now, over the copy before, and what of it is still to be copied. Raises ConfigError."""
        self._at_once = self._at_once or self.spoilt
        self._deferred = Deferred()
        return plain_copy(state, "state", self._buffers, None if self._at_once else self._deferred), self._deferred

    def settle(self) -> None:
        """Before an optimizer steps: from here on, what was marked as `Steady` in the last copy may change."""
        self._deferred.finish()
