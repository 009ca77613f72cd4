"""elasticrt keeps a PyTorch DDP job training while nodes come, go and die.

These are all public names. They are loaded on first use: `import elasticrt` itself imports neither torch nor grpc.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from elasticrt.checkpoint.checkpointer import Checkpointer
    from elasticrt.checkpoint.restoring import State
    from elasticrt.data.prepare import prepare
    from elasticrt.data.sampler import ElasticBatchSampler, ElasticDistributedSampler
    from elasticrt.distributed.barrier import barrier, global_first, local_first
    from elasticrt.distributed.context import Context, init
    from elasticrt.distributed.wrapping import is_parallel, unwrap
    from elasticrt.errors import (
        CheckpointError,
        ConfigError,
        ElasticError,
        Handover,
        PreparationError,
        WorkersFailedError,
    )
    from elasticrt.multiprocessing.spawn import spawn
    from elasticrt.train.loop import Loop

__version__ = "0.1.0"

__all__ = [
    "CheckpointError",
    "Checkpointer",
    "ConfigError",
    "Context",
    "ElasticBatchSampler",
    "ElasticDistributedSampler",
    "ElasticError",
    "Handover",
    "Loop",
    "PreparationError",
    "State",
    "WorkersFailedError",
    "barrier",
    "global_first",
    "init",
    "is_parallel",
    "local_first",
    "prepare",
    "spawn",
    "unwrap",
]

# By module. The errors are not listed: see `__getattr__`.
_HOME = {
    "multiprocessing.spawn": ("spawn",),
    "checkpoint.checkpointer": ("Checkpointer",),
    "checkpoint.restoring": ("State",),
    "distributed.context": ("Context", "init"),
    "distributed.barrier": ("barrier", "global_first", "local_first"),
    "distributed.wrapping": ("is_parallel", "unwrap"),
    "train.loop": ("Loop",),
    "data.prepare": ("prepare",),
    "data.sampler": ("ElasticBatchSampler", "ElasticDistributedSampler"),
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'elasticrt' has no attribute {name!r}; it offers {', '.join(__all__)}")
    return getattr(import_module(f"elasticrt.{_MODULE_OF.get(name, 'errors')}"), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
