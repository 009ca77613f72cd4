"""`python -m elasticrt.run`, where people are used to `python -m torch.distributed.run`."""

from __future__ import annotations

import sys

from elasticrt.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["run", *sys.argv[1:]]))
