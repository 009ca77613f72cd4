"""What the workers of `elasticrt.spawn` run: they find the caller's function as multiprocessing does, and call it.

Everything that is unpickled here comes from the caller of `spawn`, through memory that only the same user can open.
"""

from __future__ import annotations

import multiprocessing.spawn
import os
import pickle
from pathlib import Path

from elasticrt.errors import ConfigError, explain
from elasticrt.ipc.spawn_payload import CALL_VARIABLE, VALUES_VARIABLE, SpawnPayload


def main() -> None:
    """Call the function with this worker's local rank, and write what it returns to the caller's memory."""
    local_rank = int(os.environ["ELASTICRT_LOCAL_RANK"])  # LOCAL_RANK is 0 for all where each sees one GPU only.
    target = os.environ[VALUES_VARIABLE].split(":")[local_rank]
    try:
        call: SpawnPayload = pickle.loads(Path(os.environ[CALL_VARIABLE]).read_bytes())  # noqa: S301  As said above.
    except FileNotFoundError:
        raise ConfigError(
            explain("the process that called spawn is gone", "spawn", got=os.environ[CALL_VARIABLE])
        ) from None
    multiprocessing.spawn.prepare(dict(call.preparation))
    function, arguments = pickle.loads(call.function)  # noqa: S301  As said above.
    value = function(local_rank, *arguments)
    try:
        if call.by_value:
            import cloudpickle

            data = cloudpickle.dumps((int(os.environ["RANK"]), value))
        else:
            data = pickle.dumps((int(os.environ["RANK"]), value))
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise ConfigError(
            explain(
                "a value that can't be sent back",
                f"spawn, rank {os.environ['RANK']}",
                got=f"{type(value).__name__}: {error}",
                expected="a value that can be pickled",
                remedy="Return tensors, numbers, texts, and lists, tuples or dicts of them",
            )
        ) from error
    Path(target).write_bytes(data)


if __name__ == "__main__":
    main()
