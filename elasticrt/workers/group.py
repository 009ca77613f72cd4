"""Starts the workers of this node, signals them, and sends them new seats.

`worker_io` reads the workers' channels and output, and reports their ends. A new generation may start while workers of
the one before are still ending, so every event names its generation.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from elasticrt.ipc.channel import Channel, ChannelClosed
from elasticrt.ipc.env import WorkerEnv
from elasticrt.ipc.file_modes import make_directory
from elasticrt.ipc.messages import Release, Reseat, ShowStack, Signal, Start
from elasticrt.ipc.proc import is_dying
from elasticrt.ipc.status_page import StatusPage
from elasticrt.option_values import ERR, OUT
from elasticrt.run_options import RunOptions
from elasticrt.settings import Command
from elasticrt.workers.failures import Remains, failure_of
from elasticrt.workers.fork_server import WorkerParent
from elasticrt.workers.logs import Output, WorkerConsole, file_of
from elasticrt.workers.worker_io import GroupEnded, GroupEvent, WorkerEnded, WorkerIO, WorkerState, oom_kills

# The exit code of a worker that cannot be started, as shells use it for a program that they cannot execute.
EXIT_CANNOT_START = 126


class WorkerGroup:
    """All workers of this node. Only the agent's main thread uses it.

    Args:
        sink: takes events, mostly on the thread of `WorkerIO`. It must only put them into a queue.
        options: what to do with the workers' output; None: the defaults.
    """

    def __init__(self, sink: Callable[[GroupEvent], None], *, options: RunOptions | None = None) -> None:
        self._sink = sink
        self._options = options or RunOptions()
        self._console = WorkerConsole()
        self._workers: list[WorkerState] = []
        self._starts = 0
        self._io = WorkerIO(sink)

    def set_parent(self, parent: WorkerParent) -> None:
        """Start workers with this `parent` from now on. Call it before the first start, and after a parent was lost."""
        self._parent = parent
        self._io.watch_parent(parent)

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
        """Start workers. The parent must be warm.

        Errors arrive as events: `WorkerEnded` with a failure for each worker, and then `GroupEnded`. The error file and
        the logs of a worker are below its `env.run_dir`.

        Args:
            generation: the generation of the workers; 0: they set up beside the training.
            envs: the seats of the workers, one for each.
            command: what each worker runs.
            listen: the listening socket of the generation's store if global rank 0 is here. It is closed on this side.
            base_env: the environment that all workers share, from `workers.environment`.
            directory: the workers' working directory.
            state_fd: the memory file with the state from which local rank 0 resumes; -1 for none. The caller keeps it.
        """
        # Workers beside the training all start as generation 0, and survivors outlive the generation in which they were
        # started. So a generation does not identify a worker: the parent knows each by the number of its start.
        self._starts = max(generation, self._starts + 1)
        with contextlib.ExitStack() as theirs, contextlib.ExitStack() as ours:
            if listen is not None:
                theirs.enter_context(listen)
            try:
                prepared = [self._prepare(env, command, base_env, directory, theirs, ours) for env in envs]
            except OSError as error:
                # Nothing has been started: all workers of this node fail with the same message.
                self._refuse(envs, f"cannot prepare the workers: {error}")
                return
            # From now on the files on this side are closed when their worker ends.
            ours.pop_all()
            workers = [worker for worker, _, _ in prepared]
            living = {each.start for each in self._workers if not each.gone}
            self._workers = [*(each for each in self._workers if each.start in living), *workers]
            self._io.add(workers)
            try:
                for worker, start, fds in prepared:
                    if worker.env.local_rank == 0 and state_fd >= 0:
                        start.fd_names.append("state")
                        fds.append(state_fd)
                    if worker.env.rank == 0 and listen is not None:
                        start.fd_names.append("listen")
                        fds.append(listen.fileno())
                    self._parent.send(start, fds)
            except ChannelClosed as error:
                # `ParentLost` may have been handled before these workers were added, and then it has not reported their
                # ends.
                self._io.report_lost(workers, f"the worker parent is gone: {error}")

    @property
    def seating(self) -> contextlib.AbstractContextManager[object]:
        """A lock to hold while the seats of a generation in place are given out: no end is reported meanwhile.

        Without the lock, a worker could end in its new seat while others are still in their old ones. It would count as
        the last worker of the new generation, and `GroupEnded` would be wrong.
        """
        return self._io.seating

    def reseat(self, local_rank: int, generation: int, env: WorkerEnv, listen: socket.socket | None) -> bool:
        """Send a living worker its seat in another generation. Returns False if the worker has ended.

        Args:
            local_rank: the worker's local rank.
            generation: its present generation; 0: it has set up beside the training.
            env: its new seat.
            listen: the listening socket of the new generation's store, for global rank 0. It is closed on this side.
        """
        try:
            with self._io.seating:
                worker = self._worker(local_rank, generation)
                if worker is None or worker.gone or worker.ended:
                    return False
                # A worker keeps the path of its error file in all its seats.
                worker.env = replace(env, error_file=worker.env.error_file)
                # The handover that led to the new seat is over, so its words must not hold the worker there.
                page = worker.page
                page.stop = page.go = page.save = 0
            self._io.seat(worker)
            worker.send(Reseat(env.to_env()), [listen.fileno()] if listen is not None else [])
            return True
        finally:
            if listen is not None:
                listen.close()

    def kill(self, generation: int, local_ranks: Sequence[int] = ()) -> None:
        """Send SIGKILL to all processes of the sessions of `generation`'s workers, or of those with `local_ranks`."""
        self._signal(generation, signal.SIGKILL, local_ranks, stops=True)

    def terminate(self, generation: int, number: int = signal.SIGTERM) -> None:
        """Send SIGTERM, or the signal `number`, to the main processes of `generation`'s workers, and release them."""
        self._signal(generation, number, (), stops=True)
        self.release(generation)

    def signal(self, number: int, generation: int, local_ranks: Sequence[int] = ()) -> None:
        """Send the signal `number`, which ends no process, to workers of `generation`: to all, or to `local_ranks`."""
        self._signal(generation, number, local_ranks, stops=False)

    def ask_for_stacks(self, generation: int) -> None:
        """Ask the workers of `generation` to write their stacks and their collectives on their status pages."""
        for worker in self._of(generation):
            worker.send(ShowStack())

    def release(self, generation: int) -> None:
        """Let workers of `generation` end that linger, because they hold the store or wait for another seat."""
        for worker in self._of(generation):
            worker.send(Release())

    def page(self, local_rank: int, generation: int) -> StatusPage:
        """The status page of the worker with `local_rank` in `generation`. Raises KeyError without such a worker."""
        worker = self._worker(local_rank, generation)
        if worker is None:
            raise KeyError(f"no worker with local rank {local_rank} in generation {generation}")
        return worker.page

    def pids(self, generation: int) -> dict[int, int]:
        """The process ids of the workers of `generation` that run, by local rank."""
        return {each.env.local_rank: each.pid for each in self._of(generation) if each.pid and not each.gone}

    def close(self, timeout_s: float = 5.0) -> None:
        """Stop reading, within `timeout_s` seconds. Close the worker parent first, because that ends the workers."""
        self._io.close(timeout_s)

    def _prepare(  # noqa: PLR0917  Each has a type of its own: they cannot be taken for each other.
        self,
        env: WorkerEnv,
        command: Command,
        base_env: Mapping[str, str],
        directory: str | Path,
        theirs: contextlib.ExitStack,
        ours: contextlib.ExitStack,
    ) -> tuple[WorkerState, Start, list[int]]:
        """Make the worker's state, the message that starts it, and the list of its descriptors. Raises OSError.

        `ours` closes the files that stay on this side, `theirs` those that the worker gets.
        """
        pipes: dict[str, int] = {}
        fds: list[int] = []
        for stream in (OUT, ERR):
            pipes[stream], writer = os.pipe2(os.O_CLOEXEC)
            ours.callback(os.close, pipes[stream])
            theirs.callback(os.close, writer)
            # Only this end does not block: programs expect that their stdout blocks.
            os.set_blocking(pipes[stream], False)
            fds.append(writer)
        channel, other_end = Channel.pair()
        ours.callback(channel.close)
        theirs.enter_context(other_end)
        page_fd = StatusPage.create()
        theirs.callback(os.close, page_fd)
        env = _with_error_file(env, self._starts)
        start = Start(
            generation=self._starts,
            local_rank=env.local_rank,
            command=command.of_worker(env.local_rank),
            command_kind=command.kind,
            env={**base_env, **env.to_env()},
            directory=str(directory),
            fd_names=["stdout", "stderr", "channel", "page"],
        )
        output, page = Output(env, self._options, self._console), StatusPage(page_fd)
        state = WorkerState(self._starts, env, output, channel, page, pipes, oom_kills())
        return state, start, [*fds, other_end.fileno(), page_fd]

    def _refuse(self, envs: Sequence[WorkerEnv], error: str) -> None:
        """Report that none of these workers could be started."""
        for env in envs:
            failure = failure_of(env, Remains(EXIT_CANNOT_START, start_error=error))
            self._sink(WorkerEnded(env.generation, env.rank, env.local_rank, 0, EXIT_CANNOT_START, failure))
        self._sink(GroupEnded(envs[0].generation))

    def _signal(self, generation: int, number: int, local_ranks: Sequence[int], *, stops: bool) -> None:
        by_start: dict[int, list[int]] = {}
        for worker in self._of(generation):
            local_rank = worker.env.local_rank
            if not worker.gone and (not local_ranks or local_rank in local_ranks):
                # A worker that somebody else has killed may take longer to die than its peers take to report their
                # lost connections. Its end is the cause, and no work of this signal.
                worker.was_dying |= stops and not worker.stopping and worker.pid > 0 and is_dying(worker.pid)
                worker.stopping |= stops
                by_start.setdefault(worker.start, []).append(local_rank)
        for start, ranks in by_start.items():
            # If the channel is closed, the workers have ended with their parent, and need no signal.
            with contextlib.suppress(ChannelClosed):
                self._parent.send(Signal(start, number, ranks))

    def _of(self, generation: int) -> list[WorkerState]:
        return [each for each in self._workers if each.env.generation == generation]

    def _worker(self, local_rank: int, generation: int) -> WorkerState | None:
        found = [each for each in self._of(generation) if each.env.local_rank == local_rank]
        # In generation 0 a worker may follow one of the same local rank that has ended. The living one counts.
        return next((each for each in found if not each.gone), found[0] if found else None)


def _with_error_file(env: WorkerEnv, start: int) -> WorkerEnv:
    """Return `env` with the path of the worker's error file, where no file exists yet; unchanged if none can be made.

    A worker keeps its error file in its later seats, and two workers that set up beside the training may get the same
    rank one after the other. So the file's name has the number of the worker's `start`.
    """
    if not env.run_dir:
        return env
    path = file_of(env.run_dir, env.generation, env.rank, env.node, f"start-{start}.error.json")
    try:
        make_directory(path.parent)
        path.unlink(missing_ok=True)
    # The logs cannot be written either, and `Output` warns of that.
    except OSError:
        return env
    return replace(env, error_file=str(path))
