"""Files are written in as many pieces as can be, so that there is most to be interrupted."""

from __future__ import annotations

import pytest

from elasticrt.checkpoint import snapshot


@pytest.fixture(autouse=True)
def fine_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is gathered before it is written: as in a checkpoint of many large tensors."""
    monkeypatch.setattr(snapshot, "GATHERED_BYTES_MAX", 1)
