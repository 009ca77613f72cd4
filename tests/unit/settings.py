"""The settings of an agent that a test makes without a run."""

from __future__ import annotations

from pathlib import Path

from elasticrt.run_options import RunOptions
from elasticrt.settings import Command, Settings
from elasticrt.store.protocol import Credentials


def settings_of(run_dir: Path) -> Settings:
    """Those of node n0 with one worker."""
    return Settings(
        options=RunOptions(node="n0"),
        run_id="r",
        node="n0",
        address=None,
        workers=1,
        command=Command(("x.py",)),
        etcd=(),
        credentials=Credentials(),
        serve=None,
        run_dir=run_dir,
    )
