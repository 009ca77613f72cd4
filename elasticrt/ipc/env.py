"""The environment of a worker, as values: what the agent writes is what the training process reads. Pure.

`WorkerEnv.to_env` sets every variable that torchrun sets, with its meaning, plus a few `ELASTICRT_*`. Restart count
and generation are the run's, not this node's, so they are equal on all ranks.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import TypeVar

from elasticrt.text import unpacked

Made = TypeVar("Made", "Commit", "Copy")

REMOVED_PREFIXES = ("ELASTICRT_ETCD", "ETCD_", "ETCDCTL_")
"""Our own credentials and server settings."""

HIDDEN = (
    "SLURM_GTIDS",
    "SLURM_LOCALID",
    "SLURM_NPROCS",
    "SLURM_NTASKS",
    "SLURM_NTASKS_PER_NODE",
    "SLURM_PROCID",
    "SLURM_STEP_NUM_TASKS",
    "SLURM_STEP_TASKS_PER_NODE",
    "SLURM_TASKS_PER_NODE",
)
"""What SLURM says of its own task, which is the agent. Libraries that find it take it for the worker's rank and world
size, and meet at an address of their own. Nothing else of the user's environment is touched."""


STRICT = {"extra": "forbid", "strict": True}
"""What pydantic, which the agent has, is to make of these dataclasses in a record. Workers do without it."""

COUNT_MAX = 2**53
PATH_BYTES_MAX = 4096
_HEX16, _HEX64 = "[0-9a-f]{16}", "[0-9a-f]{64}"


def _check(value: Commit | Copy, **forms: str) -> None:
    """Check every field: a whole number, or a text of its form. Raises ValueError that names the field."""
    for field in fields(value):
        found = getattr(value, field.name)
        if field.type == "int":
            expected, good = "a whole number", type(found) is int and 0 <= found <= COUNT_MAX
        else:
            expected = forms[field.name]
            good = type(found) is str and re.fullmatch(expected, found) is not None
        if not good:
            kind = type(value).__name__.lower()
            raise ValueError(f"field {field.name!r} of a {kind}: got {found!r:.200}; expected {expected}")


def _from_fields(kind: type[Made], found: object) -> Made:
    try:
        return kind(**found)  # type: ignore[arg-type]  # The TypeError is what is wanted.
    except TypeError as error:  # A field is missing or unknown, or it is no object.
        raise ValueError(f"not the fields of a {kind.__name__.lower()}: {error}") from error


@dataclass(frozen=True)
class Commit:
    """A committed checkpoint, or one that is to be committed: the one shape of a checkpoint's head.

    It is the value in etcd, a part of the manifest, and what a worker resumes from.

    Attributes:
        step: steps trained in the state that the file holds.
        epoch: the epoch the next step belongs to.
        generation: the generation whose rank 0 wrote it.
        nonce: 16 hex digits, unique for this commit.
        parent: the nonce of the commit before it in the history, "" for the first.
        directory: absolute path of the checkpoint directory, as `text.packed` writes it.
        file: name of the payload inside the directory, without any "/".
        digest: SHA-256 of the payload, 64 hex digits.
        size: bytes of the payload.
        serial: larger than that of every checkpoint that its writer knew of.
        node: the node whose rank 0 wrote it, which has the file if the directory is not shared; "" without an agent.
        place: 16 hex digits that tell the run's directories apart, the same on all nodes; "" where it has only one.
        total: steps that the run had trained by then, in all of its directories; 0 where that is `step`.

    Raises ValueError when a field does not have its form.
    """

    step: int
    epoch: int
    generation: int
    nonce: str
    parent: str
    directory: str
    file: str
    digest: str
    size: int
    serial: int = 0
    node: str = ""
    place: str = ""
    total: int = 0

    __pydantic_config__ = STRICT

    def __post_init__(self) -> None:
        _check(
            self,
            nonce=_HEX16,
            parent=f"({_HEX16})?",
            directory=r"/[^\ud800-\udfff]*",
            file=r"[^/.][^/]{0,254}",
            digest=_HEX64,
            node=r"([A-Za-z0-9_-][A-Za-z0-9._-]{0,127})?",
            place=f"({_HEX16})?",
        )
        if len(unpacked(self.directory).encode(errors="surrogateescape")) > PATH_BYTES_MAX:
            raise ValueError(f"field 'directory' of a commit: expected at most {PATH_BYTES_MAX} bytes")

    @property
    def reached(self) -> int:
        """How far the run had come: the steps of all its loops."""
        return self.total or self.step

    def to_json(self) -> str:
        """One line of JSON."""
        return _to_json(self)

    @classmethod
    def from_json(cls, text: str | bytes | bytearray) -> Commit:
        """Parse what `to_json` wrote. Raises ValueError that says what is wrong."""
        return cls.from_fields(json.loads(text))

    @classmethod
    def from_fields(cls, found: object) -> Commit:
        """Build it from `found`, a parsed JSON object. Raises ValueError that says what is wrong."""
        return _from_fields(cls, found)


@dataclass(frozen=True)
class Copy:
    """A copy of the training state in a node's memory, which a generation can resume from.

    Attributes:
        step: steps of the run, as `Commit.reached`.
        epoch: as in Commit.
        size: bytes of the copy.
        digest: SHA-256 of the copy, 64 hex digits.
        world_size: processes of the generation that took it.
        place: as in Commit.

    Raises ValueError when a field does not have its form.
    """

    step: int
    epoch: int
    size: int
    digest: str
    world_size: int
    place: str = ""

    __pydantic_config__ = STRICT

    def __post_init__(self) -> None:
        _check(self, digest=_HEX64, place=f"({_HEX16})?")

    def to_json(self) -> str:
        """One line of JSON."""
        return _to_json(self)

    @classmethod
    def from_json(cls, text: str) -> Copy:
        """Parse what `to_json` wrote. Raises ValueError that says what is wrong."""
        return _from_fields(cls, json.loads(text))


def _to_json(value: Commit | Copy) -> str:
    return json.dumps(asdict(value), sort_keys=True, separators=(",", ":"))


@dataclass(frozen=True)
class WorkerEnv:
    """Everything a worker is told by its agent.

    `resume` is the head that the generation resumes from; with `copy` it resumes from that copy in memory instead,
    which descends from `resume`.

    Descriptors are numbers of inherited file descriptors, -1 where there is none: `channel_fd` (unix stream socket to
    the agent), `page_fd` (status page, a memfd), `listen_fd` (global rank 0 only: a bound, listening TCP socket for
    the generation's store), `state_fd` (global rank 0 with `copy`: the memfd that holds it).

    `as_srun`: say the same as `srun` would of its tasks, for scripts that read SLURM_PROCID and so on.

    `gpu`: the only one that it sees, in the words of CUDA_VISIBLE_DEVICES; the script is then told that its local rank
    is 0. "": it sees what its agent sees. `signals`: names of those that make its agent leave, with commas.

    `beside`: it sets up while others train, in a world of its own, and waits to be let in; rank and world size are then
    what they would be, and `generation` is 0 until it has a seat.
    """

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    group_rank: int
    group_world_size: int
    master_addr: str
    master_port: int
    restart_count: int
    max_restarts: int
    run_id: str
    attempt: int
    generation: int
    nonce: str
    node: str
    run_dir: str
    role: str = "default"
    as_srun: bool = False
    gpu: str = ""
    signals: str = ""
    beside: bool = False
    error_file: str = ""
    resume: Commit | None = None
    copy: Copy | None = None
    state_fd: int = -1
    channel_fd: int = -1
    page_fd: int = -1
    listen_fd: int = -1

    @property
    def resume_step(self) -> int:
        """The step that this generation's first step follows."""
        return self.copy.step if self.copy else self.resume.reached if self.resume else 0

    def to_env(self) -> dict[str, str]:
        """The variables to set, on top of the user's own environment."""
        env = {
            "RANK": self.rank,
            "LOCAL_RANK": 0 if self.gpu else self.local_rank,
            "WORLD_SIZE": self.world_size,
            "LOCAL_WORLD_SIZE": self.local_world_size,
            "GROUP_RANK": self.group_rank,
            "GROUP_WORLD_SIZE": self.group_world_size,
            "ROLE_NAME": self.role,
            "ROLE_RANK": self.rank,
            "ROLE_WORLD_SIZE": self.world_size,
            "MASTER_ADDR": self.master_addr,
            "MASTER_PORT": self.master_port,
            "TORCHELASTIC_RESTART_COUNT": self.restart_count,
            "TORCHELASTIC_MAX_RESTARTS": self.max_restarts,
            "TORCHELASTIC_RUN_ID": self.run_id,
            "TORCHELASTIC_USE_AGENT_STORE": "False",
            "TORCHELASTIC_ERROR_FILE": self.error_file,
            "TORCHELASTIC_SIGNALS_TO_HANDLE": self.signals,
            "ELASTICRT_LOCAL_RANK": self.local_rank,
            "ELASTICRT_GPU": self.gpu,
            "ELASTICRT_BESIDE": int(self.beside),
            "ELASTICRT_ATTEMPT": self.attempt,
            "ELASTICRT_GENERATION": self.generation,
            "ELASTICRT_NONCE": self.nonce,
            "ELASTICRT_NODE": self.node,
            "ELASTICRT_RUN_DIR": self.run_dir,
            "ELASTICRT_RESUME": self.resume.to_json() if self.resume else "",
            "ELASTICRT_COPY": self.copy.to_json() if self.copy else "",
            "ELASTICRT_STATE_FD": self.state_fd,
            "ELASTICRT_CHANNEL_FD": self.channel_fd,
            "ELASTICRT_PAGE_FD": self.page_fd,
            "ELASTICRT_LISTEN_FD": self.listen_fd,
        }
        if self.gpu:
            env["CUDA_VISIBLE_DEVICES"] = self.gpu
        if self.as_srun:
            env |= {
                "SLURM_PROCID": self.rank,
                "SLURM_LOCALID": self.local_rank,
                "SLURM_NODEID": self.group_rank,
                "SLURM_NTASKS": self.world_size,
                "SLURM_NPROCS": self.world_size,
                "SLURM_NNODES": self.group_world_size,
                "SLURM_JOB_NUM_NODES": self.group_world_size,
                "SLURM_NTASKS_PER_NODE": self.local_world_size,
            }
        return {name: str(value) for name, value in env.items()}

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> WorkerEnv | None:
        """Read back what an elasticrt agent set; None when no such agent started this process.

        Raises ValueError naming the variable when one is missing or malformed.
        """
        if "ELASTICRT_GENERATION" not in env:
            return None

        def whole(name: str) -> int:
            try:
                return int(env[name])
            except (KeyError, ValueError):
                raise ValueError(f"{name}: got {env.get(name)!r}; expected a whole number set by the agent") from None

        resume, copy = env.get("ELASTICRT_RESUME", ""), env.get("ELASTICRT_COPY", "")
        return cls(
            rank=whole("RANK"),
            local_rank=whole("ELASTICRT_LOCAL_RANK" if "ELASTICRT_LOCAL_RANK" in env else "LOCAL_RANK"),
            world_size=whole("WORLD_SIZE"),
            local_world_size=whole("LOCAL_WORLD_SIZE"),
            group_rank=whole("GROUP_RANK"),
            group_world_size=whole("GROUP_WORLD_SIZE"),
            master_addr=env.get("MASTER_ADDR", ""),
            master_port=whole("MASTER_PORT"),
            restart_count=whole("TORCHELASTIC_RESTART_COUNT"),
            max_restarts=whole("TORCHELASTIC_MAX_RESTARTS"),
            run_id=env.get("TORCHELASTIC_RUN_ID", ""),
            attempt=whole("ELASTICRT_ATTEMPT"),
            generation=whole("ELASTICRT_GENERATION"),
            nonce=env.get("ELASTICRT_NONCE", ""),
            node=env.get("ELASTICRT_NODE", ""),
            run_dir=env.get("ELASTICRT_RUN_DIR", ""),
            role=env.get("ROLE_NAME", "default"),
            gpu=env.get("ELASTICRT_GPU", ""),
            signals=env.get("TORCHELASTIC_SIGNALS_TO_HANDLE", ""),
            beside=env.get("ELASTICRT_BESIDE") == "1",
            error_file=env.get("TORCHELASTIC_ERROR_FILE", ""),
            resume=Commit.from_json(resume) if resume else None,
            copy=Copy.from_json(copy) if copy else None,
            state_fd=whole("ELASTICRT_STATE_FD") if "ELASTICRT_STATE_FD" in env else -1,
            channel_fd=whole("ELASTICRT_CHANNEL_FD"),
            page_fd=whole("ELASTICRT_PAGE_FD"),
            listen_fd=whole("ELASTICRT_LISTEN_FD"),
        )


def inherited(env: Mapping[str, str]) -> dict[str, str]:
    """The user's environment as workers get it: all of it, less our own credentials, etcd's settings and `HIDDEN`."""
    kept = (name for name in env if name not in HIDDEN and not name.startswith(REMOVED_PREFIXES))
    return {name: env[name] for name in kept}
