"""Prepares data, and nothing else: one process builds, the others wait, and a second run finds the data complete.

    python examples/prepare_data.py
    torchrun --standalone --nproc-per-node 4 examples/prepare_data.py
    elasticrt run --nproc-per-node 4 examples/prepare_data.py

Kill the process that builds half way, and another one takes over. Make it fail (--fail), and all processes end with its
error.
"""

import argparse
import os
import time
from pathlib import Path

import elasticrt

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--path", type=Path, default=Path("data/squares"))
parser.add_argument("--parts", type=int, default=5, help="how many files; each takes a second")
parser.add_argument("--fail", action="store_true", help="raise in the middle")
parser.add_argument("--version", default="1", help="another version is built again")
args = parser.parse_args()


def build(directory: Path) -> None:
    """Fill `directory`, which nobody else sees. It gets its name when it is complete."""
    for part in range(args.parts):
        print(f"process {os.getpid()} builds part {part + 1} of {args.parts}", flush=True)
        time.sleep(1)
        if args.fail and part == args.parts // 2:
            raise RuntimeError("as you wished")
        (directory / f"part-{part}.txt").write_text(
            "\n".join(str(n * n) for n in range(part * 1000, part * 1000 + 1000))
        )


started = time.monotonic()
path = elasticrt.prepare(args.path, build, version=args.version)
files = sorted(path.glob("part-*.txt"))
print(f"process {os.getpid()} sees {len(files)} files after {time.monotonic() - started:.1f} s", flush=True)
