"""`python -m elasticrt.launch`, where people are used to `python -m torch.distributed.launch`."""

from __future__ import annotations

import sys

from elasticrt.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["launch", *sys.argv[1:]]))
