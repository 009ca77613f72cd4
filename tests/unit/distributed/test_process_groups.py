"""Process groups outlive the script's last reference to them, and are known however they are made.

Each test has a process of its own, because torch's map is replaced.
"""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import gc
import torch.distributed as dist
from elasticrt.distributed import regroup as groups

groups.keep_groups()
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
dist.new_group([0])
known = {id(each) for each in dist.distributed_c10d._world.pg_map}
dist.destroy_process_group()
gc.collect()
assert not dist.is_initialized() and len(known) == 2 and {id(each) for each in groups._kept} == known
"""


MADE = """
import time
import torch.distributed as dist
from torch.distributed import new_group
from elasticrt.distributed import regroup as groups

groups.keep_groups()
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
groups.note_groups()
ways = [
    lambda: new_group([0]),
    lambda: dist.new_group([0]),
    lambda: dist.new_subgroups(1)[0],
    lambda: dist.new_subgroups_by_enumeration([[0]])[0],
]
for make in ways:
    assert not groups.has_subgroups()
    make()
    assert groups.has_subgroups()
    for each in list(dist.distributed_c10d._world.pg_map):
        if each is not dist.group.WORLD:
            dist.destroy_process_group(each)
assert len(groups._kept) > len(ways)
groups.RETIRED_S = 0.0
deadline = time.monotonic() + 30
while len(groups._kept) > 1 and time.monotonic() < deadline:
    groups.release_retired()
assert groups._kept == [dist.group.WORLD]
"""


def _run(script: str) -> None:
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_group_that_is_destroyed_lives_on() -> None:
    """Torch forgets a destroyed group; its destructor, which may wait for ever, has to wait for the process."""
    _run(SCRIPT)


def test_a_group_counts_while_it_lives() -> None:
    """However the script makes a group of its own, it is known until it is destroyed, and let go of some time later."""
    _run(MADE)
