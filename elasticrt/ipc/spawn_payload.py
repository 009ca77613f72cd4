"""A function call that travels from its caller to the workers of a run, and the values that come back. Pure.

Both lie in memory that the caller holds open; what a worker gets are the paths of the caller's descriptors, which
nobody but the same user can open, and which are gone with the caller.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

CALL_VARIABLE = "ELASTICRT_CALL"
"""The path of the pickled `SpawnPayload`."""

VALUES_VARIABLE = "ELASTICRT_CALL_VALUES"
"""The paths for the values, one for each local rank, with colons between them."""


@dataclass(frozen=True)
class SpawnPayload:
    """Everything a worker needs.

    Attributes:
        preparation: what `multiprocessing` tells a child about its parent's main module, paths and arguments.
        function: the pickle of the function and its arguments.
        by_value: the function is of an interactive session: what it uses of that travels with it, by cloudpickle.
    """

    preparation: Mapping[str, Any]
    function: bytes
    by_value: bool
