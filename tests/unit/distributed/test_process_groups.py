"""Process groups outlive the script's last reference to them, in a process of its own: torch's map is replaced."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import gc
import torch.distributed as dist
from elasticrt.distributed import regroup as groups

groups.keep()
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
dist.new_group([0])
known = {id(each) for each in dist.distributed_c10d._world.pg_map}
dist.destroy_process_group()
gc.collect()
assert not dist.is_initialized() and len(known) == 2 and {id(each) for each in groups._kept} == known
"""


def test_a_group_that_is_destroyed_lives_on() -> None:
    """Torch forgets a destroyed group; its destructor, which may wait for ever, has to wait for the process."""
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stderr) == (0, "")
