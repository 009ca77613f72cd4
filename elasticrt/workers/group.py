"""The workers of this node: started for one generation at a time, listened to, stopped, and every end explained.

One thread reads all channels and all output, and only puts events into the sink. A new generation may start while
workers of the one before are still dying: every event names its own.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from elasticrt.ipc.channel import Channel, ChannelClosed
from elasticrt.ipc.env import WorkerEnv
from elasticrt.ipc.file_modes import make_directory
from elasticrt.ipc.messages import Look, Release, Reply, Reseat, Signal, Start
from elasticrt.ipc.status_page import StatusPage
from elasticrt.option_values import ERR, OUT
from elasticrt.settings import Command, LogOptions
from elasticrt.workers.failures import Remains, failure_of
from elasticrt.workers.fork_server import WorkerParent
from elasticrt.workers.logs import Output, WorkerConsole, file_of
from elasticrt.workers.worker_io import GroupEnded, GroupEvent, WorkerEnded, WorkerIO, WorkerState, oom_kills

EXIT_CANNOT_START = 126
"""What a shell says of a program that it cannot execute, and the worker parent of a worker it cannot start."""


class WorkerGroup:
    """All workers of this node.

    Methods are called from one thread, the agent's; events come from others.

    Args:
        sink: gets events, from the thread that reads.
        logs: what of their output is kept and shown.
        console: where it is shown.
    """

    def __init__(
        self,
        sink: Callable[[GroupEvent], None],
        *,
        logs: LogOptions | None = None,
        console: WorkerConsole | None = None,
    ) -> None:
        self._sink = sink
        self._logs = logs or LogOptions()
        self._console = console or WorkerConsole()
        self._workers: list[WorkerState] = []
        self._starts = 0
        self._io = WorkerIO(sink)

    def use(self, parent: WorkerParent) -> None:
        """Start workers with this parent from now on: the first one, or another after it was lost."""
        self._parent = parent
        self._io.follow(parent)

    def start(  # noqa: PLR0917  Each has a type of its own: they cannot be taken for each other.
        self,
        generation: int,
        envs: Sequence[WorkerEnv],
        command: Command,
        listen: socket.socket | None,
        base_env: Mapping[str, str],
        directory: str | Path,
        state_fd: int = -1,
    ) -> None:
        """Start the workers of `generation`, one for each of `envs`. Call it after `Warm`.

        What goes wrong is told by events: `WorkerEnded` with a failure, and in the end `GroupEnded`. The error file and
        the logs go below `env.run_dir`.

        Args:
            generation: its number; 0 for workers that set up beside the training.
            envs: who each worker is.
            command: what each runs, in `directory`.
            listen: the generation's listening socket when global rank 0 is here; it is closed on this side.
            base_env: from `workers.environment`.
            directory: the working directory.
            state_fd: the saved state that local rank 0 resumes from, which stays the caller's; -1: none.
        """
        self._starts = max(generation, self._starts + 1)
        workers: list[WorkerState] = []
        starts: list[tuple[Start, list[int]]] = []
        try:
            for env in envs:
                worker, start, fds = self._prepare(env, command, base_env, directory)
                workers.append(worker)
                starts.append((start, fds))
                if env.local_rank == 0 and state_fd >= 0:
                    start.fd_names.append("state")
                    fds.append(os.dup(state_fd))
                if env.rank == 0 and listen is not None:
                    start.fd_names.append("listen")
                    fds.append(os.dup(listen.fileno()))
        except OSError as error:
            # Nothing has been started: every worker of this node fails with the same words.
            self._refuse(workers, envs, f"cannot prepare the workers: {error}")
            return
        else:
            living = {each.start for each in self._workers if not each.gone}
            self._workers = [*(each for each in self._workers if each.start in living), *workers]
            self._io.add(workers)
            try:
                for start, fds in starts:
                    self._parent.send(start, fds)
            except ChannelClosed as error:
                # Its own ParentLost may have come before there was anything to end.
                self._io.lose(workers, f"the worker parent is gone: {error}")
        finally:
            for _, fds in starts:
                for fd in fds:
                    os.close(fd)
            if listen is not None:
                listen.close()

    def reseat(self, local_rank: int, generation: int, env: WorkerEnv, listen: socket.socket | None) -> bool:
        """Let the worker with `local_rank` in `generation` go on in the one of `env`. False: it has ended meanwhile.

        `listen` is as in `start`, for global rank 0; it is closed on this side.
        """
        try:
            with self._io.seating:
                worker = self._worker(local_rank, generation)
                if worker is None or worker.gone or worker.ended:
                    return False
                worker.left.add(generation)
                worker.env = replace(env, error_file=worker.env.error_file)
                page = worker.page
                page.stop = page.go = page.save = 0
            worker.tell(Reseat(env.to_env()), [listen.fileno()] if listen is not None else [])
            return True
        finally:
            if listen is not None:
                listen.close()

    def kill(self, generation: int, local_ranks: Sequence[int] = ()) -> None:
        """SIGKILL workers of `generation`, all or `local_ranks`, with all that they have started."""
        self._signal(generation, signal.SIGKILL, sessions=True, local_ranks=local_ranks)

    def terminate(self, grace_s: float, generation: int, number: int = signal.SIGTERM) -> float:
        """SIGTERM, or `number`, to the main processes of `generation`.

        Returns when to `kill` them: in `grace_s` seconds, by time.monotonic().
        """
        self._signal(generation, number, sessions=False)
        self.release(generation)
        return time.monotonic() + grace_s

    def signal(self, number: int, generation: int, local_ranks: Sequence[int] = ()) -> None:
        """Pass any other signal on to main processes of `generation`, all or `local_ranks`. None shall end of it."""
        self._signal(generation, number, sessions=False, local_ranks=local_ranks, stops=False)

    def look(self, generation: int) -> None:
        """Have workers of `generation` write on their pages how many collectives they have begun."""
        for worker in self._of(generation):
            worker.tell(Look())

    def release(self, generation: int) -> None:
        """Let workers of `generation` end that wait for its end, for the sake of its store, or for another seat."""
        for worker in self._of(generation):
            worker.tell(Release())

    def reply(self, local_rank: int, message: Reply, generation: int) -> None:
        """Send `message` to the worker that asked as `local_rank` of `generation`, and may be in another by now.

        Nothing happens when it has ended meanwhile.
        """
        worker = self._worker(local_rank, generation)
        if worker is None:
            moved = (each for each in self._workers if each.env.local_rank == local_rank and generation in each.left)
            worker = next(moved, None)
        if worker is not None:
            worker.tell(message)

    def page(self, local_rank: int, generation: int) -> StatusPage:
        """The status page of the worker with `local_rank` in `generation`. KeyError when there is none."""
        worker = self._worker(local_rank, generation)
        if worker is None:
            raise KeyError(f"no worker with local rank {local_rank} in generation {generation}")
        return worker.page

    def pids(self, generation: int) -> dict[int, int]:
        """Process ids by local rank, of the workers of `generation` that run."""
        return {each.env.local_rank: each.pid for each in self._of(generation) if each.pid and not each.gone}

    def close(self, timeout_s: float = 5.0) -> None:
        """Stop reading, within `timeout_s`. Close the parent first: that ends the workers; what they said is read."""
        self._io.close(timeout_s)

    def _prepare(
        self, env: WorkerEnv, command: Command, base_env: Mapping[str, str], directory: str | Path
    ) -> tuple[WorkerState, Start, list[int]]:
        """The worker's state, the message that starts it, and the descriptors to go with it. OSError: none is left."""
        with contextlib.ExitStack() as undo:

            def owned(fd: int) -> int:
                undo.callback(os.close, fd)
                return fd

            pipes: dict[str, int] = {}
            fds: list[int] = []
            for stream in (OUT, ERR):
                reader, writer = os.pipe2(os.O_CLOEXEC)
                pipes[stream] = owned(reader)
                fds.append(owned(writer))
                os.set_blocking(reader, False)
            channel, theirs = Channel.pair()
            undo.callback(channel.close)
            fds += [owned(theirs.detach()), owned(StatusPage.create())]
            page = StatusPage(fds[-1])
            env = _with_error_file(env)
            undo.pop_all()
        output = Output(env, self._logs, self._console)
        start = Start(
            generation=self._starts,
            local_rank=env.local_rank,
            command=command.of_worker(env.local_rank),
            module=command.kind == "module",
            env={**base_env, **env.to_env()},
            directory=str(directory),
            fd_names=["stdout", "stderr", "channel", "page"],
            keep_stdin=env.local_rank == 0,
        )
        state = WorkerState(self._starts, env, self._parent, output, channel, page, pipes, oom_kills())
        return state, start, fds

    def _refuse(self, workers: Sequence[WorkerState], envs: Sequence[WorkerEnv], error: str) -> None:
        for worker in workers:
            worker.channel.close()
            for fd in worker.pipes.values():
                os.close(fd)
        for env in envs:
            failure = failure_of(env, Remains(EXIT_CANNOT_START, start_error=error))
            self._sink(WorkerEnded(env.generation, env.rank, env.local_rank, 0, EXIT_CANNOT_START, failure))
        self._sink(GroupEnded(envs[0].generation))

    def _signal(
        self,
        generation: int,
        number: int,
        *,
        sessions: bool,
        local_ranks: Sequence[int] = (),
        stops: bool = True,
    ) -> None:
        wanted = [each for each in self._of(generation) if not each.gone]
        wanted = [each for each in wanted if not local_ranks or each.env.local_rank in local_ranks]
        for start in {each.start for each in wanted}:
            ranks = [each.env.local_rank for each in wanted if each.start == start]
            for worker in wanted:
                worker.stopping |= stops
            with contextlib.suppress(ChannelClosed):  # Without a parent there is no worker either.
                self._parent.send(Signal(start, number, sessions, ranks))

    def _of(self, generation: int) -> list[WorkerState]:
        return [each for each in self._workers if each.env.generation == generation]

    def _worker(self, local_rank: int, generation: int) -> WorkerState | None:
        found = [each for each in self._of(generation) if each.env.local_rank == local_rank]
        return next((each for each in found if not each.gone), found[0] if found else None)


def _with_error_file(env: WorkerEnv) -> WorkerEnv:
    """The same worker with a place for its error file, which is empty; without, where none can be made."""
    default = file_of(env.run_dir, env.generation, env.rank, env.node, "error.json") if env.run_dir else ""
    path = Path(env.error_file or default)
    if path == Path():
        return env
    try:
        make_directory(path.parent)
        path.unlink(missing_ok=True)
    except OSError:
        return replace(env, error_file="")  # The logs have the same problem, and say so.
    return replace(env, error_file=str(path))
