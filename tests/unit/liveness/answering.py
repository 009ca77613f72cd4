"""An agent as others see it that ask whether it lives."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from elasticrt.liveness.probe import ProbeServer
from elasticrt.liveness.prober import Prober
from elasticrt.rendezvous.records import Seat


class AnsweringAgent:
    """A port that answers for a `life` in generation 3 of "run", from `start` on, and knows `seats` and `workers`."""

    def __init__(
        self, life: str, seats: Callable[[], Iterable[Seat]] = tuple, workers: Callable[[], Mapping[str, object]] = dict
    ) -> None:
        self.prober = Prober(lambda *_: None)
        self.server = ProbeServer(self.prober, "127.0.0.1", "run", lambda: (life, 3), seats, workers)
        self.port = self.server.port

    def start(self) -> None:
        """Answer."""
        self.server.start()

    def close(self) -> None:
        """Refuse."""
        self.server.close()
        self.prober.close()
