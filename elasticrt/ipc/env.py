"""The environment of a worker, as a value that the agent writes and the training process reads. Pure.

`WorkerEnv.to_env` sets every variable that torchrun sets, with torchrun's meaning, and some `ELASTICRT_*` of our own.
The restart count and the generation are those of the run, so all ranks have the same values. The file also holds the
two records that travel between agent, worker and etcd: `Commit` and `Copy`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields
from typing import Any, ClassVar, TypeVar

Made = TypeVar("Made", bound="_Record")

REMOVED_PREFIXES = ("ELASTICRT_ETCD", "ETCD_", "ETCDCTL_")
"""Credentials for etcd and settings of etcd servers: the agent's business, which workers must not inherit."""

HIDDEN = (
    *("SLURM_GTIDS", "SLURM_LOCALID", "SLURM_NPROCS", "SLURM_NTASKS", "SLURM_NTASKS_PER_NODE", "SLURM_PROCID"),
    *("SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"),
)
"""Variables of the SLURM task, which is the agent. Libraries would take them for the worker's rank and world size, and
make a process group of their own at another address. The rest of the user's environment is not touched."""

STRICT = {"extra": "forbid", "strict": True}
"""How pydantic validates these dataclasses inside a record. Only the agent has pydantic."""

# Python's JSON has no limit, but a reader with floating-point numbers is exact only up to here.
COUNT_MAX = 2**53
_HEX16, _HEX64 = "[0-9a-f]{16}", "[0-9a-f]{64}"

NODE = "[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}"
"""The form of a node's name, which is a part of keys in etcd and of paths: no slash, and no dot at its beginning."""


class _Record:
    """A frozen dataclass of whole numbers and texts that travels as JSON.

    `FORMS` has a regular expression for each text field; whole numbers lie between 0 and `COUNT_MAX`. A field of
    another type or form raises ValueError that names the field.
    """

    __pydantic_config__ = STRICT
    FORMS: ClassVar[Mapping[str, str]] = {}

    def __post_init__(self) -> None:
        for each in fields(self):  # type: ignore[arg-type]  # Each of these is a dataclass.
            found, expected = getattr(self, each.name), self.FORMS.get(each.name, "a whole number")
            if each.type == "int":
                good = type(found) is int and 0 <= found <= COUNT_MAX
            else:
                good = type(found) is str and re.fullmatch(expected, found) is not None
            if not good:
                kind = type(self).__name__.lower()
                raise ValueError(f"field {each.name!r} of a {kind}: got {found!r:.200}; expected {expected}")

    def to_json(self) -> str:
        """This record as one line of JSON. Equal records give equal lines."""
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))  # type: ignore[call-overload]  # As above.

    @classmethod
    def from_json(cls: type[Made], text: str | bytes | bytearray) -> Made:
        """Parse the `text` that `to_json` wrote. Raises ValueError that says what is wrong."""
        return cls.from_fields(json.loads(text))

    @classmethod
    def from_fields(cls: type[Made], found: object) -> Made:
        """Build the record from `found`, a parsed JSON object. Raises ValueError that says what is wrong."""
        try:
            return cls(**found)  # type: ignore[arg-type]  # A wrong type raises TypeError.
        # A field is missing or unknown, or `found` is not an object.
        except TypeError as error:
            raise ValueError(f"not the fields of a {cls.__name__.lower()}: {error}") from error


@dataclass(frozen=True)
class Commit(_Record):
    """A checkpoint that is committed or about to be.

    The same record is the head in etcd, a part of the checkpoint's manifest, and what a worker resumes from.

    Attributes:
        step: steps trained in the state that the file holds.
        epoch: the epoch that the next step belongs to.
        generation: the generation whose rank 0 wrote the file.
        nonce: 16 hex digits, unique for this commit.
        parent: the nonce of the commit before it in the history; "" for the first.
        directory: absolute path of the checkpoint directory.
        file: name of the payload inside the directory, without any "/".
        digest: SHA-256 of the payload, 64 hex digits.
        size: bytes of the payload.
        serial: larger than the serial of every checkpoint that its writer knew of.
        node: the node whose rank 0 wrote the file, and which has the file if the directory is not shared; "" without an
            agent.
        place: 16 hex digits that identify the directory in the run, the same on all nodes; "" if the run has only one.
        total: steps that the run had trained by then, in all its directories; 0 if that number is `step`.
        root: the nonce of the first commit of the history; "" for the first commit itself.

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
    root: str = ""

    FORMS = {  # noqa: RUF012  It is one of the base class.
        "nonce": _HEX16,
        "parent": f"({_HEX16})?",
        # No path is longer: Linux's PATH_MAX.
        "directory": r"/[^\0\ud800-\udfff]{0,4095}",
        "file": r"[^/.][^/]{0,254}",
        "digest": _HEX64,
        "node": f"({NODE})?",
        "place": f"({_HEX16})?",
        "root": f"({_HEX16})?",
    }

    @property
    def history(self) -> str:
        """The name of the history that this commit belongs to: of all commits that descend from the same first one."""
        return self.root or self.nonce

    @property
    def reached(self) -> int:
        """The steps of the run at this commit, in all its loops."""
        return self.total or self.step


@dataclass(frozen=True)
class Copy(_Record):
    """A copy of the training state in a node's memory, which a generation can resume from.

    Attributes:
        step: steps of the run, as in `Commit.reached`.
        epoch: as in `Commit`.
        size: bytes of the copy.
        digest: SHA-256 of the copy, 64 hex digits.
        world_size: the number of ranks of the generation that took the copy.
        place: as in `Commit`.

    Raises ValueError when a field does not have its form.
    """

    step: int
    epoch: int
    size: int
    digest: str
    world_size: int
    place: str = ""

    FORMS = {"digest": _HEX64, "place": f"({_HEX16})?"}  # noqa: RUF012  It is one of the base class.


def _variable(variable: str, default: Any = MISSING) -> Any:
    """A field of `WorkerEnv` that travels as the environment variable `variable`."""
    return field(default=default, metadata={"variable": variable})


def _text(value: object) -> str:
    """The text of a variable for a value of a field. The reverse of `_value`."""
    if value is None:
        return ""
    if isinstance(value, Commit | Copy):
        return value.to_json()
    return str(int(value) if isinstance(value, bool) else value)


def _value(variable: str, kind: str, text: str) -> Any:
    """The value of type `kind` in the `text` of a variable. Raises ValueError that names the variable."""
    try:
        return _PARSERS[kind](text)
    except ValueError as error:
        raise ValueError(f"{variable}: got {text!r:.200}; expected a value set by the agent ({error})") from None


_PARSERS: dict[str, Callable[[str], Any]] = {
    "int": int,
    "str": str,
    "bool": lambda text: text == "1",
    "Commit | None": lambda text: Commit.from_json(text) if text else None,
    "Copy | None": lambda text: Copy.from_json(text) if text else None,
}


_NOTHING: dict[str, Any] = {"int": 0, "str": ""}
"""By type, the value of a required field in a process that no agent started."""


@dataclass(frozen=True)
class WorkerEnv:
    """The settings of a worker, from its agent. Each field but two travels as an environment variable.

    Fields that are not listed mean what torchrun's variables of the same names mean. File descriptors are inherited by
    the worker; -1 is none.

    Attributes:
        attempt: the number of the run's attempt: a run that has ended may be started again.
        generation: the number of the generation; 0 while the worker sets up `beside` the training.
        nonce: 16 hex digits that name this generation even where numbers repeat, after etcd was replaced.
        node: the node's name.
        run_dir: the directory of the node's logs and events.
        cause: why the generation was made, in the leader's words.
        last_step: the newest step of this node's workers before the generation; 0: none, or not known.
        last_step_at_ns: when `last_step` was done (CLOCK_MONOTONIC); 0 as above.
        as_srun: whether to set `srun`'s variables as well, for scripts that read SLURM_PROCID and so on. Has no
            variable.
        has_agent: false in a process that no agent started. Then all other fields but `run_id` are empty: 0, "" or
            none. Has no variable.
        gpu: the only GPU that the worker sees, as in CUDA_VISIBLE_DEVICES; LOCAL_RANK is then 0. "": the worker sees
            all GPUs of its agent.
        signals: the names of the signals that make the agent leave the run, with commas.
        beside: whether the worker sets up while others train, in a world of its own, and waits to be let in. Rank and
            world size are then only what they are expected to be.
        waits: whether the generation makes no step because there are too few nodes. Its rank 0 saves, and all workers
            wait for the next generation.
        error_file: where the worker writes its exception, in torchelastic's form.
        resume: the head that the generation resumes from; None: from the beginning.
        copy: the copy in memory that the generation resumes from instead. It descends from `resume`.
        state_fd: the memfd with `copy`, at global rank 0.
        channel_fd: the unix stream socket to the agent.
        page_fd: the status page, a memfd.
        listen_fd: a bound, listening TCP socket for the generation's store, at global rank 0.
    """

    rank: int = _variable("RANK")
    local_rank: int = _variable("ELASTICRT_LOCAL_RANK")
    world_size: int = _variable("WORLD_SIZE")
    local_world_size: int = _variable("LOCAL_WORLD_SIZE")
    group_rank: int = _variable("GROUP_RANK")
    group_world_size: int = _variable("GROUP_WORLD_SIZE")
    master_addr: str = _variable("MASTER_ADDR")
    master_port: int = _variable("MASTER_PORT")
    restart_count: int = _variable("TORCHELASTIC_RESTART_COUNT")
    max_restarts: int = _variable("TORCHELASTIC_MAX_RESTARTS")
    run_id: str = _variable("TORCHELASTIC_RUN_ID")
    attempt: int = _variable("ELASTICRT_ATTEMPT")
    generation: int = _variable("ELASTICRT_GENERATION")
    nonce: str = _variable("ELASTICRT_NONCE")
    node: str = _variable("ELASTICRT_NODE")
    run_dir: str = _variable("ELASTICRT_RUN_DIR")
    role: str = _variable("ROLE_NAME", "default")
    cause: str = _variable("ELASTICRT_CAUSE", "")
    last_step: int = _variable("ELASTICRT_LAST_STEP", 0)
    last_step_at_ns: int = _variable("ELASTICRT_LAST_STEP_AT_NS", 0)
    as_srun: bool = False
    has_agent: bool = True
    gpu: str = _variable("ELASTICRT_GPU", "")
    signals: str = _variable("TORCHELASTIC_SIGNALS_TO_HANDLE", "")
    beside: bool = _variable("ELASTICRT_BESIDE", default=False)
    waits: bool = _variable("ELASTICRT_WAITS", default=False)
    error_file: str = _variable("TORCHELASTIC_ERROR_FILE", "")
    resume: Commit | None = _variable("ELASTICRT_RESUME", None)  # noqa: RUF009  It makes a field.
    copy: Copy | None = _variable("ELASTICRT_COPY", None)  # noqa: RUF009  It makes a field.
    state_fd: int = _variable("ELASTICRT_STATE_FD", -1)
    channel_fd: int = _variable("ELASTICRT_CHANNEL_FD", -1)
    page_fd: int = _variable("ELASTICRT_PAGE_FD", -1)
    listen_fd: int = _variable("ELASTICRT_LISTEN_FD", -1)

    @property
    def resume_step(self) -> int:
        """The step that this generation's first step follows."""
        return self.copy.step if self.copy else self.resume.reached if self.resume else 0

    def to_env(self) -> dict[str, str]:
        """The variables to set, on top of the user's own environment."""
        variables = {each.metadata["variable"]: getattr(self, each.name) for each in fields(self) if each.metadata}
        variables |= {
            # Torch numbers the GPUs in CUDA_VISIBLE_DEVICES from 0, and a worker with `gpu` sees no other.
            "LOCAL_RANK": 0 if self.gpu else self.local_rank,
            "ROLE_RANK": self.rank,
            "ROLE_WORLD_SIZE": self.world_size,
            # Without a torchelastic agent's store, torch's `env://` has rank 0 host the store at MASTER_PORT.
            "TORCHELASTIC_USE_AGENT_STORE": "False",
        }
        if self.gpu:
            variables["CUDA_VISIBLE_DEVICES"] = self.gpu
        if self.as_srun:
            variables |= {
                "SLURM_PROCID": self.rank,
                "SLURM_LOCALID": self.local_rank,
                "SLURM_NODEID": self.group_rank,
                "SLURM_NTASKS": self.world_size,
                "SLURM_NPROCS": self.world_size,
                "SLURM_NNODES": self.group_world_size,
                "SLURM_JOB_NUM_NODES": self.group_world_size,
                "SLURM_NTASKS_PER_NODE": self.local_world_size,
            }
        return {variable: _text(value) for variable, value in variables.items()}

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> WorkerEnv:
        """Read the variables of `to_env` in `env`. Raises ValueError that names a missing or malformed variable."""
        # No agent of elasticrt has started this process: it runs under torchrun, or alone.
        if "ELASTICRT_GENERATION" not in env:
            nothing = {each.name: _NOTHING[str(each.type)] for each in fields(cls) if each.default is MISSING}
            return cls(**{**nothing, "run_id": env.get("TORCHELASTIC_RUN_ID", ""), "has_agent": False})
        values = {}
        for each in fields(cls):
            variable = each.metadata.get("variable", "")
            if variable in env or (variable and each.default is MISSING):
                values[each.name] = _value(variable, str(each.type), env.get(variable, ""))
        return cls(**values)


def inherited(env: Mapping[str, str]) -> dict[str, str]:
    """The environment that workers inherit: the user's, without our credentials, etcd's settings and `HIDDEN`."""
    kept = (name for name in env if name not in HIDDEN and not name.startswith(REMOVED_PREFIXES))
    return {name: env[name] for name in kept}
