"""Collectives of bytes, in a process of its own without numpy: neither we nor torch require it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = """
import os, sys
os.environ["GLOO_SOCKET_IFNAME"] = "lo"
sys.modules["numpy"] = None
import torch.distributed as dist
from elasticrt.distributed import collectives

rank = 0 if os.fork() else 1
dist.init_process_group("gloo", store=dist.FileStore(sys.argv[1], 2), rank=rank, world_size=2)
assert collectives.gather_bytes(b"" if rank else b"abc") == [b"abc", b""]
assert collectives.broadcast_bytes(b"no" if rank else bytes(range(256))) == bytes(range(256))
dist.barrier()
os._exit(0 if rank else os.waitpid(-1, 0)[1])
"""


def test_bytes_travel_without_numpy(tmp_path: Path) -> None:
    """Bytes of different lengths come as they were sent, also none, where numpy is not installed."""
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "store")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
