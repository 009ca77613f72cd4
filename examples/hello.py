"""The smallest elastic program: every process says who it is, and all of them add up their ranks.

python examples/hello.py
torchrun --standalone --nproc-per-node 2 examples/hello.py
elasticrt run --nproc-per-node 2 examples/hello.py
"""

import elasticrt

ctx = elasticrt.init()
print(f"rank {ctx.rank} of {ctx.world_size}, on {ctx.device}, generation {ctx.generation}", flush=True)

# An all-reduce.
total = ctx.sum(ctx.rank)
expected = sum(range(ctx.world_size))
if ctx.is_first:
    print(f"the ranks add up to {total}, as they should: {total == expected}", flush=True)
