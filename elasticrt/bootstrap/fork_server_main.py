"""The worker parent: starts the workers of one node, reaps them with all that they leave behind, and guards them.

The worker parent is a process of its own because a process with threads, such as the agent, cannot be forked safely,
and because the agent must not import torch. With the method "fork" it imports torch before the first worker is needed,
and each worker is a fork of it. With "exec" it stays small, and each worker is a new program. One thread runs one loop,
which handles messages from the agent and the ends of children. When the agent ends, the worker parent ends all workers.
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
from elasticrt.ipc.leash import die_with_parent
from elasticrt.ipc.messages import Exited, Signal, Start, Started, Warm
from elasticrt.ipc.status_page import STACKS_SIGNAL
from elasticrt.ipc.std_streams import occupy

# How often the loop looks again for what ended workers have left behind.
SWEEP_AGAIN_S = 0.02
SWEEP_MAX_S = 2.0
"""After so long a worker counts as ended although a process of its session has not: that process hangs inside the
kernel."""
END_MAX_S = 0.9
"""How long a worker parent whose agent is gone tries to end the workers before it ends itself."""

_IGNORED = tuple(
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGTSTP")
)
"""Schedulers send these to every process of a job. The agent acts on them, and its worker parent stays as long as the
agent."""


@dataclass
class _Worker:
    """A worker that has been forked and is not reported yet."""

    start: Start
    pid: int
    # Its exit code, or minus the signal number, once it was reaped. Other processes of its session may still live.
    code: int | None = None
    ended_ns: int = 0


class ForkServer:
    """The worker parent's loop and its workers. `serve` runs it.

    Args:
        channel: to the agent.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        # Whether workers are new programs ("exec") instead of forks that run the script.
        self._executes = True
        # By pid.
        self._workers: dict[int, _Worker] = {}
        # What ended workers have left of `proc.HELPERS`, by pid and start: when to kill it.
        self._helpers: dict[tuple[int, int], float] = {}
        # What this process was started with. Each worker gets these dispositions back.
        self.signals: dict[int, Any] = {number: signal.getsignal(number) for number in _IGNORED}
        # Gets a byte for each signal that has a handler, so that `select` returns.
        self._wakeup = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.set_wakeup_fd(self._wakeup[1], warn_on_full_buffer=False)
        # Python writes to the wake-up descriptor only for signals with a handler. The loop does the work.
        signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
        for number in _IGNORED:
            signal.signal(number, signal.SIG_IGN)

    def forget(self) -> None:
        """Close what only the parent may hold. Called in a fork."""
        self._channel.close()
        for fd in self._wakeup:
            os.close(fd)

    def serve(self, warm: Warm) -> Job | None:
        """Run until the agent is gone, and return None. In a process that was forked as a worker, return its job.

        Args:
            warm: tells the agent how workers are started.
        """
        self._executes = warm.method == "exec"
        job = None
        try:
            self._channel.send(warm)
            while job is None:
                job = self._turn()
        # The usual end of a worker parent: its agent has ended.
        except ChannelClosed:
            self._end()
        except BaseException:
            self._end()
            raise
        return job

    def _turn(self) -> Job | None:
        sweeps = self._helpers or any(worker.code is not None for worker in self._workers.values())
        channel = self._channel.fileno()
        ready = select.select([channel, self._wakeup[0]], [], [], SWEEP_AGAIN_S if sweeps else None)[0]
        self._reap()
        # The ends of children are handled first: the agent hears of a worker's end before the parent acts on newer
        # messages.
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
        # SIGKILL goes to the worker itself as well: a process that was forked just now has no session of its own yet.
        # The signal for stacks must reach the main thread, because another thread would write its own stack, or none.
        send = proc.signal_main_thread if message.number == STACKS_SIGNAL else proc.kill
        for pid in alive:
            send(pid, message.number)

    def _start(self, start: Start, fds: list[int]) -> Job | None:
        """Fork a worker. Returns None in the parent, and the worker's job in the worker."""
        job = None
        try:
            if len(fds) != len(start.fd_names):
                # The kernel drops descriptors for which this process has no number left (RLIMIT_NOFILE).
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
        me = os.getpid()
        # No signal may reach the worker while it still has the handlers of this process.
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            pid = os.fork()
        except OSError:
            signal.pthread_sigmask(signal.SIG_SETMASK, [])
            raise
        if pid == 0:
            return Job(start, fds, me, self._executes)
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        self._workers[pid] = _Worker(start, pid)
        self._channel.send(Started(start.generation, start.local_rank, pid, time.monotonic_ns()))
        return None

    def _reap(self) -> None:
        """Reap ended children, kill what workers left behind, and report each worker of which nothing is left.

        Nobody waits for the helpers that are left.
        """
        with contextlib.suppress(BlockingIOError):
            while os.read(self._wakeup[0], 4096):
                pass
        with contextlib.suppress(ChildProcessError):
            # WNOWAIT leaves the worker unreaped until its session is killed. Until then no other process can get its
            # pid.
            while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
                worker = self._workers.get(ended.si_pid)
                if worker is not None:
                    worker.ended_ns = time.monotonic_ns()
                    proc.kill_sessions([worker.pid])
                _, status = os.waitpid(ended.si_pid, 0)
                if worker is not None:
                    worker.code = os.waitstatus_to_exitcode(status)
        for (pid, start), kill_at in list(self._helpers.items()):
            if not start or proc.start_of(pid) != start:
                del self._helpers[pid, start]
            elif time.monotonic() > kill_at:
                proc.kill(pid, signal.SIGKILL)
        for worker in [each for each in self._workers.values() if each.code is not None]:
            if not self._left_behind(worker) or time.monotonic_ns() - worker.ended_ns > SWEEP_MAX_S * 1e9:
                self._report(worker)

    def _left_behind(self, worker: _Worker) -> bool:
        """Kill what is left of an ended worker. Returns whether anything but helpers was left."""
        left = proc.members([worker.pid])
        # A process that has detached itself from its session is no particular worker's. It ends with the last worker.
        if all(each is worker or each.code is not None for each in self._workers.values()):
            left += self._orphans()
        return self._kill(left)

    def _kill(self, pids: list[int]) -> bool:
        """Kill processes that workers have left behind, the helpers later. Returns whether there are others."""
        helpers = [pid for pid in pids if proc.is_helper(pid)]
        for pid in helpers:
            self._helpers.setdefault((pid, proc.start_of(pid)), time.monotonic() + proc.HELPER_MAX_S)
        others = set(pids).difference(helpers)
        for pid in others:
            proc.kill(pid, signal.SIGKILL)
        return bool(others)

    def _orphans(self) -> list[int]:
        """The pids of children that this process has not started, without those that have ended."""
        children = proc.children().items()
        return [pid for pid, found in children if pid not in self._workers and not found.ended]

    def _report(self, worker: _Worker) -> None:
        assert worker.code is not None
        del self._workers[worker.pid]
        self._channel.send(Exited(worker.start.generation, worker.start.local_rank, worker.pid, worker.code))

    def _end(self) -> None:
        """After the end of the agent: end all processes of the workers, within END_MAX_S seconds.

        Their helpers have `proc.HELPER_MAX_S`.
        """
        begun = time.monotonic()
        while time.monotonic() - begun < (proc.HELPER_MAX_S if self._helpers else END_MAX_S):
            proc.kill_sessions(list(self._workers))
            self._kill(self._orphans())
            try:
                with contextlib.suppress(ChannelClosed):
                    # The agent may have closed only its sending side, and still read how the workers ended.
                    self._reap()
                if os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                    select.select([self._wakeup[0]], [], [], SWEEP_AGAIN_S)
            except ChildProcessError:
                return
        for pid, _ in self._helpers:
            proc.kill(pid, signal.SIGKILL)


def main(text: str) -> NoReturn:
    """Run the worker parent until this process ends.

    In a process that was forked as a worker, run that worker.

    Args:
        text: the JSON that `workers.fork_server` writes, with the arguments of its `start`.
    """
    shutdown.arrange()
    options = SimpleNamespace(**json.loads(text))
    if not getattr(sys.flags, "safe_path", False):
        # `python -m` has put the agent's working directory first. A user's file there must not be imported for its
        # name.
        sys.path.pop(0)
    # Descriptors that arrive must never get the numbers of the standard streams.
    occupy()
    proc.adopt_orphans()
    # A worker parent that a signal has stopped would not notice the end of its agent. One whose agent has ended by now
    # finds its channel closed.
    with contextlib.suppress(ProcessLookupError):
        die_with_parent(os.getppid(), signal.SIGCONT)
    script, directory = _script(options)
    parent = ForkServer(Channel.adopt(options.channel_fd))
    warm, torch_threads = _prepare(options, script, directory)
    job = parent.serve(warm)
    if job is None:
        # Ends without taking torch apart, as the workers do.
        shutdown.leave(0)
    parent.forget()
    signals = parent.signals
    # The channel and the records of other workers are the parent's: a worker does not keep them alive.
    del parent
    env = child_process.settle(job, signals)
    if job.executes:
        child_process.execute(job, env)
    from elasticrt.bootstrap import run_script

    module = job.start.command_kind == "module"
    run_script.become(job.start.command, module=module, env=env, torch_threads=torch_threads)


def _script(options: SimpleNamespace) -> tuple[Path | None, str]:
    """The file that workers will run, if it is known, and the first entry of their `sys.path`, or ""."""
    if options.kind == "program" or not options.target:
        return None, ""
    if options.kind == "script":
        path = Path(os.path.realpath(options.target))
        return path, str(path.parent)
    base = Path(*options.target.split(".")).absolute()
    files = [path for path in (base.with_name(base.name + ".py"), base / "__main__.py") if path.is_file()]
    return files[0] if files else None, str(Path.cwd())


def _prepare(options: SimpleNamespace, script: Path | None, directory: str) -> tuple[Warm, int]:
    """Import what workers will need. Returns how and why workers will be started, and torch's own number of threads."""
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
    return Warm(method, reason, time.monotonic() - before_s), torch_threads


def _is_this_python() -> bool:
    """Whether workers are to run in the Python of this process. $PYTHON_EXEC names another one, as under torchrun."""
    python = os.environ.get("PYTHON_EXEC") or sys.executable
    return Path(shutil.which(python) or python).absolute() == Path(sys.executable).absolute()


def _read_ahead(script: Path | None) -> tuple[str, list[str]]:
    """Why `script` needs an interpreter of its own, or ""; and what to import for the script before it runs."""
    if script is None:
        return "", []
    # Directories, archives, byte code, and missing files, which Python itself reports best.
    if not script.is_file() or script.suffix == ".pyc" or zipfile.is_zipfile(script):
        return f"{script.name} is not a plain source file", []
    from elasticrt.bootstrap import script_scan

    tree = script_scan.parse(script.read_bytes())
    found = script_scan.early_write(tree)
    if found:
        return f"{script.name} {found}, which is too late in a fork", []
    found = script_scan.early_spawn(tree)
    return (f"{script.name} {found}" if found else ""), script_scan.first_imports(tree)


if __name__ == "__main__":
    main(sys.argv[1])
