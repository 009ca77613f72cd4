"""A function call that travels from its caller to the workers of a run. Pure.

The call and the returned values are in memory files of the caller. Workers get the paths of the caller's descriptors,
which only the same user can open, and which end with the caller.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

CALL_VARIABLE = "ELASTICRT_CALL"
"""The path of the pickled `SpawnPayload`."""

VALUES_VARIABLE = "ELASTICRT_CALL_VALUES"
"""The paths for the returned values, one for each local rank, with colons between them."""


@dataclass(frozen=True)
class SpawnPayload:
    """A call.

    Attributes:
        preparation: the parent's main module, paths and arguments, as `multiprocessing` passes them to a child.
        function: the pickle of the function and its arguments.
        by_value: the function is from an interactive session, and was pickled with all that it uses, by cloudpickle.
    """

    preparation: Mapping[str, Any]
    function: bytes
    by_value: bool
