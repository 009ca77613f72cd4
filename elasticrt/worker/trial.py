"""Is it safe to fork this process, and would it still be after these imports? Tested, not guessed.

A worker that is a fork only works while its parent stays what a fork can copy: one thread, no children, no CUDA, no
sockets. Modules that nobody has asked to preload are imported in a fork first, which is then thrown away.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import sys
from collections.abc import Iterator, Mapping
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

_OF_ONE_WORKER = frozenset(
    (
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "GROUP_RANK",
        "GROUP_WORLD_SIZE",
        "ROLE_NAME",
        "ROLE_RANK",
        "ROLE_WORLD_SIZE",
    )
)
_OF_ONE_WORKER_PREFIXES = ("MASTER_", "TORCHELASTIC_", "TORCH_NCCL_", "GLOO_", "ELASTICRT_")
"""Variables that a worker has and its parent has not, or not with the same value."""

_ALL = "all of the environment"
_NICE = 10


class Watched(dict[Any, Any]):
    """A dictionary that notes whose keys are asked for."""

    def __init__(self, data: Mapping[Any, Any]) -> None:
        super().__init__(data)
        self.read: set[str] = set()

    def __getitem__(self, key: Any) -> Any:
        self.read.add(os.fsdecode(key))
        return super().__getitem__(key)

    def __iter__(self) -> Iterator[Any]:
        self.read.add(_ALL)
        return super().__iter__()

    def of_one_worker(self) -> str:
        """The first name asked for that is not the same in every worker; "" when there is none."""
        if _ALL in self.read:
            return _ALL
        return min(filter(is_of_one_worker, self.read), default="")


def is_of_one_worker(variable: str) -> bool:
    """Whether a variable differs between a worker and its parent."""
    return variable in _OF_ONE_WORKER or variable.startswith(_OF_ONE_WORKER_PREFIXES)


def watch_environment() -> Watched:
    """Note from now on what is read from `os.environ`. There is no way back: this is for a process that will end."""
    # `os.environ` keeps its content, encoded, in a dictionary of its own, which `os.environb` shares.
    watched = Watched(os.environ._data)  # type: ignore[attr-defined]  # There is no public way to listen.
    os.environ._data = os.environb._data = watched  # type: ignore[attr-defined]
    return watched


@contextlib.contextmanager
def first_on_path(directory: str) -> Iterator[None]:
    """Import as a script in `directory` does ("" for none)."""
    if directory:
        sys.path.insert(0, directory)
    try:
        yield
    finally:
        if directory:
            sys.path.remove(directory)


def why_unsafe(sockets_before: set[str]) -> str:
    """Fork once and look at both sides. "" when neither has a thread, CUDA, or a socket that was not there before."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return "has initialised CUDA"
    pid = os.fork()
    if pid == 0:
        os._exit(0 if _tasks() == 1 else 1)
    _, status = os.waitpid(pid, 0)
    if os.waitstatus_to_exitcode(status) != 0:
        return "starts a thread in a forked process"
    # Only now: libraries such as OpenBLAS end their threads when a fork is near, and have none afterwards.
    if _tasks() != 1:
        return f"keeps {_tasks() - 1} thread(s) running"
    if sockets() - sockets_before:
        return "has opened a socket"
    return ""


def has_children() -> bool:
    """Whether this process has any child, running or ended."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def sockets() -> set[str]:
    """The sockets that this process holds, by the kernel's names."""
    links = set()
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208  Names are all we need.
        with contextlib.suppress(OSError):  # The directory's own descriptor is closed by now.
            links.add(str(Path("/proc/self/fd", name).readlink()))
    return {link for link in links if link.startswith("socket:")}


def _tasks() -> int:
    return len(os.listdir("/proc/self/task"))  # noqa: PTH208  Names are all we need.


def run(origins: Mapping[str, str], directory: str, report_fd: int) -> NoReturn:
    """In a fork without children and signal handlers: import modules until one should not be, and end.

    `origins` is where each module has to come from. Lines of JSON go to `report_fd`: [name] before each module,
    [name, why] for one that must not be imported in a parent (the last line then), [] when all have been.
    """
    os.nice(_NICE)  # The workers are training meanwhile.
    output = os.memfd_create("output", os.MFD_CLOEXEC)
    null = os.open(os.devnull, os.O_RDWR)
    for number, fd in enumerate((null, output, output)):
        os.dup2(fd, number)
    watched = watch_environment()
    before = _Before(output)
    with first_on_path(directory):
        for name, origin in origins.items():
            _say(report_fd, [name])
            watched.read.clear()
            try:
                importlib.import_module(name)
                why = before.why_not(watched, directory)
            except BaseException as error:  # noqa: BLE001  Whatever it is, it must not happen in the parent.
                why = cannot(error)
            if not why and origin_of(sys.modules[name], name) != origin:
                why = f"is another one for the script: {origin}"
            if why:
                _say(report_fd, [name, why])
                os._exit(0)
    _say(report_fd, [])
    os._exit(0)


def cannot(error: BaseException) -> str:
    """The words for a module whose import has raised."""
    return f"cannot be imported: {type(error).__name__}: {error}"[:200]


def _say(fd: int, line: list[str]) -> None:
    os.write(fd, json.dumps(line).encode() + b"\n")


class _Before:
    """What the process was like before the first import."""

    def __init__(self, output_fd: int) -> None:
        self._output_fd = output_fd
        self._sockets = sockets()
        self._environment = dict(os.environ)
        self._signals = [signal.getsignal(number) for number in sorted(signal.valid_signals())]
        self._hook = sys.excepthook
        self._modules = set(sys.modules)

    def why_not(self, watched: Watched, directory: str) -> str:
        """What the last import has done that a fork cannot copy, or that another worker would do otherwise."""
        read = watched.of_one_worker()
        if read:
            return f"reads {read} while it is imported"
        if dict(watched.items()) != {os.fsencode(k): os.fsencode(v) for k, v in self._environment.items()}:
            return "changes the environment"
        if has_children():
            return "has started a process"
        cuda = sys.modules.get("torch.cuda")
        if _tasks() != 1 or sockets() != self._sockets or (cuda is not None and cuda.is_initialized()):
            why = why_unsafe(self._sockets)
            if why:
                return why
        if [signal.getsignal(number) for number in sorted(signal.valid_signals())] != self._signals:
            return "sets a signal handler"
        if sys.excepthook is not self._hook:
            return "sets sys.excepthook"
        if os.fstat(self._output_fd).st_size:
            return "prints while it is imported"
        return self._local(directory)

    def _local(self, directory: str) -> str:
        new = {name.partition(".")[0] for name in sys.modules if name not in self._modules}
        self._modules = set(sys.modules)
        local = min((name for name in new if is_local(sys.modules.get(name), name, directory)), default="")
        return f"imports {local!r}, which is beside the script" if local else ""


def origin_of(module: ModuleType | None, name: str) -> str:
    """The file that a module was loaded from; "" when it has none, or is another module under this name."""
    try:
        spec = module.__spec__ if module is not None else None
        if spec is not None and spec.name == name and isinstance(spec.origin, str) and spec.has_location:
            return spec.origin
    except Exception:  # noqa: BLE001  A script may put anything there, of which any attribute may raise.
        return ""
    return ""


def is_local(module: ModuleType | None, name: str, directory: str) -> bool:
    """Whether a top-level module is what `directory` holds under that name."""
    origin = origin_of(module, name)
    if not origin or not directory:
        return False
    found = PathFinder.find_spec(name, [directory])
    return found is not None and found.origin == origin
