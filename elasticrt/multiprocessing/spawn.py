"""`elasticrt.spawn`: `torch.multiprocessing.spawn`, elastic.

A call runs one node's agent as a child process, whose workers run this module as their script. They find the function
as multiprocessing does, and call it. The agent is on a leash: however this process ends, the agent and its workers end.

The call and the returned values are in memory files of the caller. Workers get the paths of the caller's descriptors,
which only the same user can open, and which end with the caller.
"""

from __future__ import annotations

import codecs
import contextlib
import json
import multiprocessing.spawn
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, TextIO

from elasticrt.errors import ConfigError, ElasticError
from elasticrt.ipc.leash import command_of

STOP_S = 30.0
"""How long the agent may take to end its workers, with their grace, before it is killed together with them."""

# How long the last output may take to arrive after the agent's end.
FLUSH_S = 5.0
_CALL = "ELASTICRT_CALL"
"""The variable with the path of the pickled call."""

_VALUES = "ELASTICRT_CALL_VALUES"
"""The variable with the paths for the returned values, one for each local rank, with colons between them."""

# How much of the end of stderr is kept for the error.
_LAST_CHARACTERS = 8000
_COMPLAINT = "elasticrt: error: "

# By exit code. The agent is another process, so its error is made again here.
_ERRORS = {kind.exit_code: kind for kind in ElasticError.__subclasses__()}


def spawn(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    nprocs: int = 1,
    join: bool = True,
    *,
    min_nodes: int = 1,
    max_nodes: int = 1,
) -> dict[int, Any]:
    """Call `fn(i, *args)` in `nprocs` worker processes of an elastic run. Returns what each returned, by global rank.

    As `torch.multiprocessing.spawn`, with i from 0 to nprocs - 1. Unlike there, workers that fail are restarted as
    those of `elasticrt run` are, from what `fn` has saved, and find RANK, WORLD_SIZE, MASTER_ADDR and so on set. With
    more than one node, run the same program on each with ELASTICRT_RUN_ID, and with ELASTICRT_ETCD on several machines;
    i is then the local rank, and the values are those of this node's ranks. All options of `elasticrt run` can be set
    as ELASTICRT_<NAME>.

    Args:
        fn: a function of a module, of a script with `if __name__ == "__main__":`, or (with cloudpickle) of a notebook.
        args: what follows i. It is pickled once, for all workers and restarts.
        nprocs: workers on this node.
        join: only True: spawn returns when all is over.
        min_nodes: train with at least so many nodes.
        max_nodes: train with at most so many nodes.

    Raises WorkersFailedError with the report if the workers have failed more often than allowed, ConfigError if the
    function, its arguments or an option cannot be used, and the agent's other errors by their exit codes.
    """
    if join is not True:
        raise ConfigError("spawn waits for its workers", "spawn", got=f"join={join!r}", remedy="Call it in a thread")
    if isinstance(nprocs, bool) or not isinstance(nprocs, int) or not 1 <= nprocs <= 4096:
        raise ConfigError("not a number of workers", "spawn", got=nprocs, expected="nprocs from 1 to 4096")
    if not isinstance(args, Sequence) or isinstance(args, str):
        raise ConfigError("not a sequence", "spawn", got=args, expected="args such as (1, 2)")
    if _CALL in os.environ:
        remedy = 'Put the call below `if __name__ == "__main__":`, which is not so in a worker'
        raise ConfigError("a worker of spawn calls spawn", "spawn", got=fn, remedy=remedy)
    call = _pickled(fn, tuple(args))
    command = ["--nproc-per-node", str(nprocs), "--nnodes", f"{min_nodes}:{max_nodes}"]
    command += ["--module", "elasticrt.multiprocessing.spawn", f"{fn.__module__}:{fn.__qualname__}"]
    with _memory() as ours, contextlib.ExitStack() as closing:
        Path(ours).write_bytes(call)
        values = [closing.enter_context(_memory()) for _ in range(nprocs)]
        _run(command, {_CALL: ours, _VALUES: ":".join(values)})
        found = [Path(path).read_bytes() for path in values]
    return dict(sorted(pickle.loads(data) for data in found if data))  # noqa: S301  From our own workers.


@contextlib.contextmanager
def _memory() -> Iterator[str]:
    """A context with a memory file. Yields the path at which processes of this user can open it."""
    fd = os.memfd_create("elasticrt-call", os.MFD_CLOEXEC)
    try:
        yield f"/proc/{os.getpid()}/fd/{fd}"
    finally:
        os.close(fd)


def _pickled(fn: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    """The call: the caller's main module and paths, the pickled function, and whether cloudpickle has pickled it.

    Raises ConfigError for a call that can't be pickled.
    """
    if not callable(fn) or not hasattr(fn, "__qualname__"):
        raise ConfigError("not a function", "spawn", got=type(fn).__name__)
    preparation = multiprocessing.spawn.get_preparation_data("elasticrt")
    # It must not be pickled, and the workers are not children of multiprocessing's.
    preparation.pop("authkey", None)
    # The main module of a notebook, an interactive session or a program from stdin is no file, so workers cannot import
    # the function from it.
    if not Path(preparation.get("init_main_from_path", "/")).exists():
        del preparation["init_main_from_path"]
    by_value = fn.__module__ == "__main__" and not {"init_main_from_name", "init_main_from_path"} & set(preparation)
    try:
        function = _cloudpickle().dumps((fn, args)) if by_value else pickle.dumps((fn, args))
    except (pickle.PicklingError, TypeError, AttributeError, ValueError, RuntimeError) as error:
        raise ConfigError(
            "a call that can't be sent to workers",
            "spawn",
            got=error,
            expected="a function at the top of a module, script or cell, and arguments that can be pickled",
            remedy="Define it with `def` at the top, not inside another function",
        ) from error
    return pickle.dumps((preparation, function, by_value))


def _cloudpickle() -> Any:
    try:
        import cloudpickle
    except ImportError as error:
        what = "a function of an interactive session needs cloudpickle"
        remedy = "pip install cloudpickle (or elasticrt[notebook]), or put the function into a file"
        raise ConfigError(what, "spawn", got=error, remedy=remedy) from error
    return cloudpickle


def _run(arguments: Sequence[str], env: Mapping[str, str]) -> None:
    """Run an agent to its end, and print what the agent and its workers print. Raises the error of its exit code."""
    source, fd = os.pipe()
    command = [sys.executable, "-m", "elasticrt", "run", "--events-fd", str(fd), *arguments]
    try:
        process = subprocess.Popen(
            command_of(command),
            env={**os.environ, **env},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=[fd],
            # Ctrl-C at a terminal is for this process, which passes it on.
            start_new_session=True,
        )
    finally:
        os.close(fd)
    ends: dict[str, Any] = {}
    last: list[str] = []
    readers = [
        threading.Thread(target=_keep_ends, args=(source, ends), name="elasticrt-events", daemon=True),
        threading.Thread(target=_show, args=(process.stdout, sys.stdout, []), name="elasticrt-output", daemon=True),
        threading.Thread(target=_show, args=(process.stderr, sys.stderr, last), name="elasticrt-errors", daemon=True),
    ]
    for each in readers:
        each.start()
    try:
        code = process.wait()
    finally:
        _end(process)
        for each in readers:
            each.join(FLUSH_S)
    _raise_for(code, ends, "".join(last))


def _keep_ends(source: int, ends: dict[str, Any]) -> None:
    """Read the events of an agent as they come, and keep only those that say how it ended: a run has very many."""
    with open(source, "rb") as lines:
        for line in lines:
            # A killed agent may leave half a line.
            event = json.loads(line) if line.endswith(b"\n") else {"event": ""}
            if event["event"] in ("result", "failure"):
                ends[event["event"]] = event


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the agent if it still runs: it hands over and saves. At a second Ctrl-C it ends at once, and later by force.

    Its workers never outlive it.
    """
    try:
        with contextlib.suppress(KeyboardInterrupt):
            process.terminate()
            process.wait(STOP_S)
        # Does nothing if the agent has ended.
        process.terminate()
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(STOP_S)


def _show(source: IO[bytes], target: TextIO, last: list[str]) -> None:
    """Copy a process's output to a stream of this process, which in a notebook has no descriptor.

    Its end stays in `last`.
    """
    decode = codecs.getincrementaldecoder("utf-8")(errors="replace").decode
    encoding = target.encoding or "utf-8"
    read = True
    with source:
        while data := os.read(source.fileno(), 1 << 16):
            text = decode(data)
            last[:] = ["".join([*last, text])[-_LAST_CHARACTERS:]]
            try:
                if read:
                    target.write(text.encode(encoding, "backslashreplace").decode(encoding))
                    target.flush()
            # Nothing reads the stream, or the disk is full. The agent's last lines are still wanted for the error.
            except OSError:
                read = False


def _raise_for(code: int, events: Mapping[str, Any], said: str) -> None:
    """Raise the error of the agent's exit code, with the report in its last events, or else with its last line."""
    if code == 0:
        if "result" not in events:
            got, remedy = os.environ.get("ELASTICRT_RUN_ID", ""), "Take another run id, or set ELASTICRT_AGAIN=1"
            what = "this run has succeeded before, so nothing was called"
            raise ConfigError(what, "spawn", got=f"ELASTICRT_RUN_ID={got}", remedy=remedy)
        return
    complaint = [line.removeprefix(_COMPLAINT) for line in said.splitlines() if line.startswith(_COMPLAINT)]
    reason = events["result"]["reason"] if "result" in events else f"the agent ended with code {code}"
    text = "\n".join([*(complaint[-1:] or [reason]), *([events["failure"]["text"]] if "failure" in events else [])])
    raise _ERRORS.get(code, ElasticError)(text)


def _work() -> None:
    """In a worker: call the function with the local rank, and write what it returns to the caller's memory file."""
    # Not LOCAL_RANK, which is 0 for all workers if each sees only one GPU.
    local_rank = int(os.environ["ELASTICRT_LOCAL_RANK"])
    target = os.environ[_VALUES].split(":")[local_rank]
    try:
        call = Path(os.environ[_CALL]).read_bytes()
    except FileNotFoundError:
        raise ConfigError("the process that called spawn is gone", "spawn", got=os.environ[_CALL]) from None
    preparation, function, by_value = pickle.loads(call)  # noqa: S301  From our own caller.
    # This imports the caller's main module under another name, so that the code below its `if __name__` does not run
    # again.
    multiprocessing.spawn.prepare(preparation)
    function, arguments = pickle.loads(function)  # noqa: S301  The same.
    value = function(local_rank, *arguments)
    # Read after the call: a change of membership may have given this worker another rank meanwhile.
    rank = int(os.environ["RANK"])
    try:
        data = (_cloudpickle() if by_value else pickle).dumps((rank, value))
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise ConfigError(
            "a value that can't be sent back",
            f"spawn, rank {rank}",
            got=f"{type(value).__name__}: {error}",
            expected="a value that can be pickled",
            remedy="Return tensors, numbers, texts, and lists, tuples or dicts of them",
        ) from error
    Path(target).write_bytes(data)


if __name__ == "__main__":
    _work()
