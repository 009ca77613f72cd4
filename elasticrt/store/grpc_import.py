"""gRPC, imported without its habit of writing every failed handshake to stderr.

Its C core reads $GRPC_VERBOSITY once, while it is imported. The variable is set for that moment only, so that workers
and the user's own gRPC settings are untouched. Every failure reaches us as an error with the same text anyway.
"""

from __future__ import annotations

import os
import sys

_VARIABLE = "GRPC_VERBOSITY"

if _VARIABLE in os.environ or "grpc" in sys.modules:
    import grpc
else:
    os.environ[_VARIABLE] = "NONE"
    try:
        import grpc
    finally:
        del os.environ[_VARIABLE]

__all__ = ["grpc"]
