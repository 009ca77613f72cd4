"""Lives of a run whose nodes have checkpoint directories of their own: restore, save, end. One rank is one node."""

from __future__ import annotations

import contextlib
import io
import logging
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from elasticrt import Checkpointer, CheckpointError
from elasticrt.checkpoint.snapshot import Snapshot
from elasticrt.distributed import collectives
from elasticrt.ipc.env import Commit, Copy, WorkerEnv


class _Warnings(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def life(
    directory: Path,
    *,
    name: str,
    nodes: str,
    saves: tuple[int, ...] = (),
    head: str = "",
    generation: int = 0,
    run: str = "run",
    shared: bool = False,
    damaged: str = "",
    lost: str = "",
    copy: int = 0,
    fresh: bool = False,
) -> dict[str, Any]:
    """One life of the story `name`: restore, save the steps `saves`, end.

    `nodes`: who has rank 0, 1, ... `head`: the file of the story with the commit that etcd names, "" for none.
    `generation`: under an agent; 0: without one. `damaged`, `lost`: before that, this node's newest checkpoint is
    damaged, or gone. `copy`: rank 0 has a copy of this step in memory.
    """
    rank, _ = collectives.rank_and_world()
    node = nodes[rank]
    story = directory / name
    place = story / ("shared" if shared else f"node-{node}")
    os.environ["LOCAL_RANK"] = "0"
    os.environ["ELASTICRT_FRESH"] = "1" if fresh else ""
    if generation:
        os.environ.update(_worker(nodes, story / head if head else None, generation, run, copy))
    if node in (damaged, lost):
        newest = max(place.glob("*.pt"), key=lambda path: int(path.name.split("-")[1]))
        if node == damaged:
            newest.write_bytes(newest.read_bytes()[:-1] + b"?")
        else:
            for path in place.glob(f"{newest.stem}.*"):
                path.unlink()
    dist.barrier()
    warnings = _Warnings()
    logging.getLogger("elasticrt").addHandler(warnings)
    result: dict[str, Any] = {"step": None, "error": "", "head": None}
    with contextlib.redirect_stderr(io.StringIO()) as said:
        saver = Checkpointer(place, keep=3)
        try:
            found = saver.begin()
        except CheckpointError as error:
            result["error"] = str(error)
        else:
            if found is not None:
                assert found["w"].tolist() == [float(found.step)] * 40
                result["step"] = found.step
            for step in saves:
                saver.save({"w": torch.full((40,), float(step))}, step=step)
                assert saver.wait()
            parent = saver._head.known
            if parent is not None:
                result["head"] = asdict(parent)
                (story / f"head-{parent.step}").write_text(parent.to_json())
    steps = sorted(int(path.name.split("-")[1]) for path in place.glob("*.pt"))
    return {**result, "said": said.getvalue(), "warned": warnings.texts, "start": saver.start, "steps": steps}


def _worker(nodes: str, head: Path | None, generation: int, run: str, copy: int) -> dict[str, str]:
    """The environment that an agent sets, which answers nothing: a commit is accepted at once."""
    rank = dist.get_rank()
    resume = Commit.from_json(head.read_text()) if head else None
    fd, copied = -1, None
    if copy:
        fd = os.memfd_create("copy")
        size, digest = Snapshot({"w": torch.full((40,), float(copy))}).write_to(fd)
        copied = Copy(copy, 0, size, digest, len(nodes))
    world_size = len(nodes)
    worker = WorkerEnv(
        rank, 0, world_size, 1, rank, world_size, "127.0.0.1", 1, 0, 3, run, 1, generation, f"n{generation}",
        nodes[rank], "", resume=resume, copy=copied, state_fd=fd if rank == 0 else -1,
    )  # fmt: skip
    return worker.to_env()
