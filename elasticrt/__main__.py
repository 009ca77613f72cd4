"""`python -m elasticrt`, and the console script."""

from __future__ import annotations

import signal
import sys

if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    # While modules are imported Ctrl-C ends this process as it ends any program, without a traceback. `main` undoes it.
    signal.signal(signal.SIGINT, signal.SIG_DFL)

from elasticrt.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
