"""Prepares data as `test_prepare_with_agents.py` tells it to by files, trains nothing, and says what it has seen.

elasticrt run ... prepare_script.py DIRECTORY node|shared
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import elasticrt

DIRECTORY, SCOPE = Path(sys.argv[1]), sys.argv[2]
NODE = os.environ["ELASTICRT_NODE"]
PATIENCE_S = 200


def note(name: str, *words: object) -> None:
    """One line; appended at once, however many write."""
    file = os.open(DIRECTORY / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(file, (" ".join(map(str, words)) + "\n").encode())
    os.close(file)


def build(directory: Path) -> None:
    """Half of the data, then the rest when told to go on."""
    (directory / "first").write_text(f"{os.getpid()}")
    note("builds", NODE, os.getpid(), os.environ["ELASTICRT_GENERATION"])
    deadline = time.monotonic() + PATIENCE_S
    while not (DIRECTORY / "go").exists():
        if time.monotonic() > deadline:
            raise TimeoutError("nobody said go")
        time.sleep(0.02)
    if (DIRECTORY / "fail").exists():
        raise ValueError("no such corpus")
    (directory / "second").write_text(f"{os.getpid()}")


def main() -> None:
    """Prepare, meet, and note what was there."""
    path = DIRECTORY / ("data" if SCOPE == "shared" else f"data-{NODE}")
    elasticrt.prepare(path, build, scope=SCOPE)
    ctx = elasticrt.init()
    first, second = (path / "first").read_text(), (path / "second").read_text()
    note("seen", NODE, ctx.rank, ctx.world_size, ctx.generation, first, second)
    elasticrt.barrier()


if __name__ == "__main__":
    main()
