"""The worker parent: starts the workers of one node, reaps them and all that they left behind, and guards them.

It is a process of its own because the agent has threads and must not import torch. With "fork" it imports torch before
the first worker is needed, and each worker is a fork of it. With "exec" it is small, and each worker is a new program.
One thread runs one loop: messages from the agent, ends of children. When the agent ends, it ends the workers.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import select
import shutil
import signal
import sys
import time
import zipfile
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

from elasticrt.bootstrap import child_process, shutdown
from elasticrt.bootstrap.child_process import Job
from elasticrt.ipc import proc
from elasticrt.ipc.channel import Channel, ChannelClosed
from elasticrt.ipc.messages import Exited, Signal, Start, Started, Warm
from elasticrt.ipc.status_page import STACKS_SIGNAL
from elasticrt.ipc.std_streams import occupy

SWEEP_AGAIN_S = 0.02
SWEEP_MAX_S = 2.0
"""After this a worker counts as ended although a process of its session has not: it hangs inside the kernel."""
END_MAX_S = 0.9
"""How long a parent without an agent tries to end its workers before it ends itself."""

_IGNORED = tuple(
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGTSTP")
)
"""Schedulers send these to every process of a job. The agent acts on them; its worker parent stays with it."""


@dataclass
class _Worker:
    start: Start
    pid: int
    errors_fd: int
    code: int | None = None
    ended_ns: int = 0


class ForkServer:
    """The state of a worker parent. `serve` runs it."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._executes = True
        self._workers: dict[int, _Worker] = {}
        self.signals: dict[int, Any] = {number: signal.getsignal(number) for number in _IGNORED}
        self._wakeup = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)  # Gets a byte for each signal that has a handler.
        signal.set_wakeup_fd(self._wakeup[1], warn_on_full_buffer=False)
        # A handler has to be there for the wake-up to happen; the work is done in the loop.
        signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
        for number in _IGNORED:
            signal.signal(number, signal.SIG_IGN)

    def forget(self) -> None:
        """In a fork: close what only the parent may hold."""
        self._channel.close()
        for fd in self._wakeup:
            os.close(fd)
        for worker in self._workers.values():
            os.close(worker.errors_fd)

    def serve(self, warm: Warm) -> Job | None:
        """Work until the agent is gone (None), or until this process is a forked worker: then its job."""
        self._executes = warm.method == "exec"
        job = None
        try:
            self._channel.send(warm)
            while job is None:
                job = self._turn()
        except ChannelClosed:
            self._end()  # The agent has ended, which is how a worker parent usually ends.
        except BaseException:
            self._end()
            raise
        return job

    def _turn(self) -> Job | None:
        sweeps = any(worker.code is not None for worker in self._workers.values())
        channel = self._channel.fileno()
        ready = select.select([channel, self._wakeup[0]], [], [], SWEEP_AGAIN_S if sweeps else None)[0]
        self._reap()
        if channel not in ready:
            return None
        while (received := self._channel.receive(0)) is not None:
            message, fds = received
            if isinstance(message, Signal):
                self._signal(message)
                continue
            assert isinstance(message, Start), f"the agent sent a {type(message).__name__} to its worker parent"
            job = self._start(message, fds)
            if job is not None:
                return job
        return None

    def _signal(self, message: Signal) -> None:
        started = [worker for worker in self._workers.values() if worker.start.generation == message.generation]
        meant = [worker for worker in started if worker.start.local_rank in message.local_ranks]
        alive = [worker.pid for worker in meant if worker.code is None]
        if message.number == signal.SIGKILL:
            proc.kill_sessions(alive)
        # SIGKILL to the process itself as well: one that was just forked has no session of its own yet.
        # Another thread would write down its own stack, or none.
        send = proc.signal_main_thread if message.number == STACKS_SIGNAL else proc.kill
        for pid in alive:
            send(pid, message.number)

    def _start(self, start: Start, fds: list[int]) -> Job | None:
        """Fork a worker. In the worker itself: its job."""
        job = None
        try:
            if len(fds) != len(start.fd_names):
                # The kernel drops descriptors for which this process has no number left.
                what = f"{os.strerror(errno.EMFILE)}: {len(fds)} of {len(start.fd_names)} descriptors arrived"
                raise OSError(errno.EMFILE, what)  # noqa: TRY301  As the fork below would.
            job = self._fork(start, dict(zip(start.fd_names, fds, strict=True)))
        except OSError as error:
            text = f"cannot start a worker process: {error}"
            self._channel.send(Exited(start.generation, start.local_rank, 0, child_process.EXIT_CANNOT_EXECUTE, text))
        if job is None:
            for fd in fds:
                os.close(fd)
        return job

    def _fork(self, start: Start, fds: dict[str, int]) -> Job | None:
        # Closed by the `exec` of a program, and by `main` before a script: until then it tells why nothing runs.
        errors_fd, errors_writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        me = os.getpid()
        # No signal may reach the worker while it still has this process's handlers.
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            pid = os.fork()
        except OSError:
            os.close(errors_fd)
            os.close(errors_writer)
            signal.pthread_sigmask(signal.SIG_SETMASK, [])
            raise
        if pid == 0:
            os.close(errors_fd)
            return Job(start, fds, errors_writer, me, self._executes)
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        os.close(errors_writer)
        self._workers[pid] = _Worker(start, pid, errors_fd)
        self._channel.send(Started(start.generation, start.local_rank, pid, time.monotonic_ns()))
        return None

    def _reap(self) -> None:
        """Learn which children ended, sweep what workers left behind, and report those of which nothing is left."""
        with contextlib.suppress(BlockingIOError):
            while os.read(self._wakeup[0], 4096):
                pass
        with contextlib.suppress(ChildProcessError):
            # Its session is killed before a worker is reaped: until then no other process can get its number.
            while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
                worker = self._workers.get(ended.si_pid)
                if worker is not None:
                    worker.ended_ns = time.monotonic_ns()
                    proc.kill_sessions([worker.pid])
                _, status = os.waitpid(ended.si_pid, 0)
                if worker is not None:
                    worker.code = os.waitstatus_to_exitcode(status)
        for worker in [each for each in self._workers.values() if each.code is not None]:
            if not self._left_behind(worker) or time.monotonic_ns() - worker.ended_ns > SWEEP_MAX_S * 1e9:
                self._report(worker)

    def _left_behind(self, worker: _Worker) -> bool:
        """Kill what is left of an ended worker. Returns whether anything was."""
        left = proc.members([worker.pid])
        if all(each is worker or each.code is not None for each in self._workers.values()):
            left += self._orphans()  # Processes that detached themselves from any session end with the last worker.
        for pid in left:
            proc.kill(pid, signal.SIGKILL)
        return bool(left)

    def _orphans(self) -> list[int]:
        """Children of this process that it has not started. Those that have ended are reaped, not listed."""
        children = proc.children().items()
        return [pid for pid, found in children if pid not in self._workers and not found.ended]

    def _report(self, worker: _Worker) -> None:
        assert worker.code is not None
        error = ""
        with contextlib.suppress(BlockingIOError):
            error = os.read(worker.errors_fd, 4096).decode(errors="replace")
        os.close(worker.errors_fd)
        del self._workers[worker.pid]
        reason = f"cannot start the worker: {error}" if error else ""
        start = worker.start
        self._channel.send(Exited(start.generation, start.local_rank, worker.pid, worker.code, reason))

    def _end(self) -> None:
        """End every process of the workers within END_MAX_S seconds, after the end of the agent."""
        deadline = time.monotonic() + END_MAX_S
        while time.monotonic() < deadline:
            proc.kill_sessions(list(self._workers))
            for pid in self._orphans():
                proc.kill(pid, signal.SIGKILL)
            try:
                with contextlib.suppress(ChannelClosed):
                    # The agent may have closed only its sending side, and still read how they ended.
                    self._reap()
                if os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                    select.select([self._wakeup[0]], [], [], SWEEP_AGAIN_S)
            except ChildProcessError:
                return


def main(text: str) -> NoReturn:
    """Run the worker parent, to its process's end, or to that of the worker which a fork of it has become.

    `text` is the JSON that `workers.fork_server` writes: the arguments of its `start`.
    """
    shutdown.arrange()
    options = SimpleNamespace(**json.loads(text))
    if not getattr(sys.flags, "safe_path", False):
        # `-m` has put the agent's directory there. A file of the user's must not be imported because of its name.
        sys.path.pop(0)
    occupy()  # Descriptors that arrive must never get the numbers of the standard streams.
    proc.adopt_orphans()
    script, directory = _script(options)
    parent = ForkServer(Channel.adopt(options.channel_fd))
    warm, torch_threads = _prepare(options, script, directory)
    job = parent.serve(warm)
    if job is None:
        shutdown.leave(0)  # As in its forks, what was imported is not taken apart.
    parent.forget()
    signals = parent.signals
    del parent
    env = child_process.settle(job, signals)
    if job.executes:
        child_process.execute(job, env)
    os.close(job.errors_fd)
    from elasticrt.bootstrap import run_script

    module = job.start.command_kind == "module"
    run_script.become(job.start.command, module=module, env=env, torch_threads=torch_threads)


def _script(options: SimpleNamespace) -> tuple[Path | None, str]:
    """The file that workers will run, if it is known, and the first entry of their path, or ""."""
    if options.kind == "program" or not options.target:
        return None, ""
    if options.kind == "script":
        path = Path(os.path.realpath(options.target))
        return path, str(path.parent)
    base = Path(*options.target.split(".")).absolute()
    files = [path for path in (base.with_name(base.name + ".py"), base / "__main__.py") if path.is_file()]
    return files[0] if files else None, str(Path.cwd())


def _prepare(options: SimpleNamespace, script: Path | None, directory: str) -> tuple[Warm, int]:
    """Import what workers will need. Returns how they will be started and why, and torch's own number of threads."""
    before_s = time.monotonic()
    reason, torch_threads = "", 0
    if options.kind == "program":
        reason = "the command is not Python's"
    elif options.method == "fork":
        reason, wanted = _read_ahead(script) if _is_this_python() else ("$PYTHON_EXEC is another Python", [])
        if not reason:
            from elasticrt.bootstrap import preload

            reason, torch_threads = preload.warm_up(options.preload, directory, wanted)
    method = "exec" if reason else options.method
    return Warm(os.getpid(), method, reason, time.monotonic() - before_s), torch_threads


def _is_this_python() -> bool:
    """Whether workers are to run in the Python that this process is, as under torchrun by $PYTHON_EXEC."""
    python = os.environ.get("PYTHON_EXEC") or sys.executable
    return Path(shutil.which(python) or python).absolute() == Path(sys.executable).absolute()


def _read_ahead(script: Path | None) -> tuple[str, list[str]]:
    """Why `script` needs interpreters of its own, or "", and what to import for it before it runs."""
    if script is None:
        return "", []
    # A directory, an archive, byte code, and what is missing, which Python reports.
    if not script.is_file() or script.suffix == ".pyc" or zipfile.is_zipfile(script):
        return f"{script.name} is not a plain source file", []
    from elasticrt.bootstrap import script_scan

    tree = script_scan.parse(script.read_bytes())
    found = script_scan.early_write(tree, os.environ)
    if found:
        return f"{script.name} {found}, which is too late in a fork", []
    found = script_scan.early_spawn(tree)
    return (f"{script.name} {found}" if found else ""), script_scan.first_imports(tree)


if __name__ == "__main__":
    main(sys.argv[1])
