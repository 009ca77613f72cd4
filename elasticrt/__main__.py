"""`python -m elasticrt`, and the console script."""

from __future__ import annotations

import signal
import sys

# While modules are imported, Ctrl-C ends this process as it ends any program, without a traceback. `main` undoes this.
if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)

# Only after the signal: this import takes longest.
from elasticrt.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
