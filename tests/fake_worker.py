"""An agent's side of the channel, for tests: a thread that answers as an agent would, and the worker's environment."""

from __future__ import annotations

import itertools
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from elasticrt.distributed import agent_client
from elasticrt.ipc.channel import Channel, ChannelClosed
from elasticrt.ipc.env import Commit, WorkerEnv
from elasticrt.ipc.messages import Copied, Message, OpenDirectory, Reply, Save


def forget() -> None:
    """Let this process become another worker: it reads its environment again at the next use."""
    for cached in (
        agent_client.worker_env,
        agent_client.agent_link,
        agent_client.status_page,
        agent_client.show_stacks,
    ):
        cached.cache_clear()


class Agent:
    """Keeps messages, and what their files hold; fences saves by the head's nonce, unless `answer` says otherwise."""

    def __init__(self, head: str = "", answer: Callable[[Message], Reply | None] | None = None) -> None:
        self.head = head
        self.taken = ""
        self.heads: dict[str, dict[str, Any]] = {}
        self.messages: list[Message] = []
        self.copies: list[bytes] = []
        self._answer = answer or self.fenced
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self.channel = Channel(mine)
        self.worker_fd = theirs.detach()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def fenced(self, message: Message) -> Reply | None:
        """What the transaction would say."""
        if isinstance(message, OpenDirectory):
            refusal = "taken" if self.taken else ""
            data = self.heads.get(message.place, {})
            return Reply(message.request, ok=not self.taken, reason=self.taken, data=data, refusal=refusal)
        if isinstance(message, Copied) and message.request:
            return Reply(message.request, ok=True)
        if not isinstance(message, Save):
            return None
        place = message.commit["place"]
        head = self.heads[place]["head"]["nonce"] if message.beside and place in self.heads else self.head
        if message.replaces != ("" if message.beside and place not in self.heads else head):
            return Reply(message.request, ok=False, reason=f"the head is {head}")
        self.head = self.head if message.beside else message.commit["nonce"]
        self.heads[place] = {"head": message.commit}
        return Reply(message.request, ok=True)

    def of(self, kind: type[Any]) -> list[Any]:
        """The messages of one kind so far."""
        return [message for message in self.messages if isinstance(message, kind)]

    def close(self) -> None:
        """The agent dies."""
        self.channel.close()

    def _serve(self) -> None:
        try:
            while True:
                received = self.channel.receive(0.05)
                if received is not None:
                    for each in received[1]:
                        self.copies.append(os.pread(each, os.fstat(each).st_size, 0))
                        os.close(each)
                    self.messages.append(received[0])
                    reply = self._answer(received[0])
                    if reply is not None:
                        self.channel.send(reply)
        except (ChannelClosed, OSError, ValueError):
            return


_NUMBERS = itertools.count()

WORKER = WorkerEnv(
    rank=0,
    local_rank=0,
    world_size=1,
    local_world_size=1,
    group_rank=0,
    group_world_size=1,
    master_addr="127.0.0.1",
    master_port=1,
    restart_count=0,
    max_restarts=3,
    run_id="calm-fox-41",
    attempt=1,
    generation=1,
    nonce="n1",
    node="a",
    run_dir="",
)


@contextmanager
def under(agent: Agent, monkeypatch: Any, *, resume: Commit | None = None, **fields: Any) -> Iterator[WorkerEnv]:
    """This process is a worker of `agent` in here."""
    worker = replace(WORKER, resume=resume, channel_fd=agent.worker_fd, nonce=f"under-{next(_NUMBERS)}")
    worker = replace(worker, **fields)
    forget()
    with monkeypatch.context() as patch:
        for name, value in worker.to_env().items():
            patch.setenv(name, value)
        try:
            yield worker
        finally:
            adopted = agent_client.agent_link()
            agent.close()
            if adopted._channel is not None:
                adopted._channel.close()
            forget()
