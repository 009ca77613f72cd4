"""Turns options into the settings of an agent.

All checks are here, before any process starts or any server is asked.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import socket
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elasticrt.cli.options import log_place
from elasticrt.cli.slurm import Slurm, placed, surplus
from elasticrt.errors import ConfigError
from elasticrt.ipc.proc import gpus
from elasticrt.option_values import as_name, check_name, options_of
from elasticrt.run_options import EtcdOptions, RunOptions
from elasticrt.settings import Command, Settings
from elasticrt.store.address import check_security, is_loopback
from elasticrt.store.etcd_server import resolve, resolve_for_others
from elasticrt.store.protocol import Address, Credentials
from elasticrt.text import plain

if TYPE_CHECKING:
    from elasticrt.spec import RunSpec

BEFORE_THE_SCRIPT = frozenset({
    "--nproc-per-node", "--nnodes", "--min-nodes", "--max-nodes", "--run-id", "--rdzv-id", "--etcd", "--rdzv-endpoint",
    "--rdzv-backend", "--max-restarts",
})  # fmt: skip
"""Few scripts have such options themselves. One behind the script is probably misplaced, and gets a note."""

ORDER = "Options go before SCRIPT; what follows it is the script's."

_ADJECTIVES = (
    "amber brisk calm clear deep eager fair gentle keen lively mellow nimble quiet rapid steady sunny swift warm"
)
_ANIMALS = "badger crane dolphin falcon fox gecko heron ibex jay koala lark marten newt otter panda raven seal wren"


def configure(
    options: RunOptions, script: str | None, arguments: list[str], env: Mapping[str, str]
) -> tuple[Settings, RunSpec]:
    """This agent's settings, and the spec that it must agree on with the others of its run. Raises ConfigError.

    torchrun's flags are translated in `options` already.
    """
    from elasticrt.spec import RunSpec

    least, most = options.nnodes
    misplaced = [word for word in arguments if word.partition("=")[0].replace("_", "-") in BEFORE_THE_SCRIPT]
    command = command_of(options, script, arguments)
    if options.node_check:
        _check_program(options.node_check[0], f"--node-check {options.node_check[0]}")
    if options.log_dir not in (RunOptions.log_dir, os.devnull):
        _check_log_dir(Path(options.log_dir).absolute())
    slurm = Slurm.from_env(env)
    options = placed(options, slurm)
    etcd, serve = where_etcd_is(options)
    run_id = options.run_id or _new_run_id()
    workers = count_workers(options.nproc_per_node, env)
    left = (f"{word} comes after SCRIPT, so elasticrt does not read it. {ORDER}" for word in misplaced)
    notes = (*options.notes, *left, *surplus(slurm))
    options = replace(options, prefix=prefix_of(options, workers, env), notes=notes)
    settings = Settings(
        options=options,
        run_id=run_id,
        node=check_name(options.node or (slurm.node if slurm else "") or as_name(socket.gethostname()), "--node"),
        address=own_address(options.local_addr, most),
        workers=workers,
        command=command,
        etcd=etcd,
        credentials=read_credentials(options),
        serve=serve,
        run_dir=Path(log_place(options.log_dir), run_id).absolute(),
        gpus=own_gpus(workers, env) if options.virtual_local_rank else (),
    )
    # An option on which all nodes must agree is a field of both, under one name.
    agreed: dict[str, Any] = {each: getattr(options, each) for each in RunSpec.model_fields if hasattr(options, each)}
    agreed |= {"min_nodes": least, "max_nodes": most, "command": (command.kind, *command.argv)}
    agreed |= {"max_restarts": settings.max_restarts, "restarts_reset": options.max_restarts is None}
    return settings, RunSpec(**agreed)


# The script.


def command_of(options: RunOptions, script: str | None, arguments: list[str]) -> Command:
    """What every worker runs. Raises ConfigError if it cannot be run."""
    if options.module and options.no_python:
        what, remedy = "a module is Python", "Leave one of them out"
        raise ConfigError(what, "--module, --no-python", expected="one of the two", remedy=remedy)
    if not script:
        expected, remedy = "a training script after the options", "Example: train.py --epochs 10"
        raise ConfigError("nothing to run", "SCRIPT", expected=expected, remedy=remedy)
    argv = (script, *arguments)
    if options.module:
        _check_module(script)
        return Command(argv=argv, kind="module")
    if options.no_python:
        _check_program(script, script)
        return Command(argv=argv, kind="program")
    _check_script(Path(script))
    return Command(argv=argv, kind="script")


def _check_program(name: str, where: str) -> None:
    if shutil.which(name) is None:
        there = Path(name).is_file()
        got = "a file without execute permission" if there else "nothing of that name"
        remedy = f"chmod +x {name}" if there else "Check the path"
        raise ConfigError("not a program", where, got=got, expected="one that can be run", remedy=remedy)


def _check_module(name: str) -> None:
    """Look for the module's top-level package. What is below could only be found by importing the package."""
    top = name.partition(".")[0]
    # Workers of another Python ($PYTHON_EXEC) may have other modules.
    if not os.environ.get("PYTHON_EXEC") and not (
        top and (PathFinder.find_spec(top, [str(Path.cwd())]) or find_spec(top))
    ):
        got, expected = "nothing of that name here or installed", "a Python module"
        raise ConfigError("no such module", name, got=got, expected=expected, remedy="Check the name")


def _check_script(path: Path) -> None:
    name, expected = str(path), "a Python file that can be read"
    if not path.exists():
        got = f"no file at {path.absolute()}"
        raise ConfigError("no such script", name, got=got, expected=expected, remedy="Check the path")
    if path.is_dir() and not (path / "__main__.py").exists():
        raise ConfigError("not a script", name, got="a directory", expected=expected, remedy="Name the file")
    if not os.access(path, os.R_OK):
        raise ConfigError("a script that cannot be read", name, expected=expected, remedy=f"chmod +r {name}")


# Names, workers and GPUs.


def _new_run_id() -> str:
    adjectives, animals = _ADJECTIVES.split(), _ANIMALS.split()
    # The suffix is for safety: an agent that draws the name of another run would join that run. It has no characters
    # that look alike.
    rest = "".join(secrets.choice("abcdefghjkmnpqrstuvwxyz23456789") for _ in range(5))
    return f"{secrets.choice(adjectives)}-{secrets.choice(animals)}-{rest}"


def count_workers(wanted: int | str | None, env: Mapping[str, str]) -> int:
    """The number of workers on this node. GPUs are counted by their device files, without importing torch.

    Without a GPU, "auto" means one worker for each CPU, as under torchrun, and None one worker. "gpu" raises
    ConfigError then.
    """
    if isinstance(wanted, int):
        return wanted
    cpus = len(os.sched_getaffinity(0))
    if wanted == "cpu":
        return cpus
    visible = env.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        devices = len([item for item in visible.split(",") if item.strip() and item.strip() != "-1"])
    else:
        devices = gpus()
    if wanted == "gpu" and not devices:
        raise ConfigError(
            "no GPU is visible", "--nproc-per-node gpu", expected="at least one", remedy="Use auto or a number"
        )
    return devices or (cpus if wanted == "auto" else 1)


def own_gpus(workers: int, env: Mapping[str, str]) -> tuple[str, ...]:
    """A GPU for each worker, as CUDA_VISIBLE_DEVICES names it. Raises ConfigError if there are too few."""
    visible = env.get("CUDA_VISIBLE_DEVICES")
    names = [str(number) for number in range(workers)] if visible is None else visible.split(",")
    if len(names) < workers:
        raise ConfigError(
            "more workers than visible GPUs",
            "--virtual-local-rank",
            got=f"{workers} workers, CUDA_VISIBLE_DEVICES={visible}",
            expected="a GPU for each",
            remedy="Start fewer workers",
        )
    return tuple(name.strip() for name in names[:workers])


# etcd.


def where_etcd_is(options: EtcdOptions) -> tuple[tuple[Address, ...], Address | None]:
    """The endpoints to use, or the address at which to serve an embedded etcd.

    Neither: one on a socket, found by run id.

    Raises ConfigError, also for an etcd on another machine without TLS, unless --insecure-etcd accepts that.
    """
    etcd, serve = options.etcd, None
    if options.meet_at is not None:
        if _is_ours(options.meet_at.host) if options.serves is None else options.serves:
            serve = options.meet_at
        else:
            etcd = (options.meet_at,)
    check_security(etcd, options.insecure_etcd)
    return etcd, serve


def _is_ours(host: str) -> bool:
    """Whether this machine has the address."""
    try:
        resolve(host, "--rdzv-endpoint")
    except ConfigError:
        return False
    return True


def own_address(text: str | None, max_nodes: int) -> str | None:
    """The IP address that `--local-addr` gives, at which other nodes reach this one. Raises ConfigError."""
    if text is None:
        return None
    ip = resolve_for_others(text, "--local-addr")
    if max_nodes > 1 and is_loopback(Address("http", ip, 0)) and not is_loopback(Address("http", text, 0)):
        # /etc/hosts often maps a machine's own name to 127.0.1.1. A loopback address that was typed is meant.
        what, got = "a name at which only this machine can be reached", f"{text}, which is {ip} here"
        expected, remedy = "an address that the other nodes reach", "Give one that `ip -brief address` shows"
        raise ConfigError(what, "--local-addr", got=got, expected=expected, remedy=remedy)
    return ip


def read_credentials(options: EtcdOptions) -> Credentials:
    """How to authenticate to etcd. Raises ConfigError for files that cannot be read."""
    files = {name: getattr(options, f"etcd_{name}") for name in ("ca_file", "cert_file", "key_file", "password_file")}
    for name, path in files.items():
        if path is not None and not os.access(path, os.R_OK):
            option = options_of(options)[f"etcd_{name}"].names[0]
            expected, remedy = "a readable file", "Check the path and its permissions"
            raise ConfigError("a file that cannot be read", option, got=path, expected=expected, remedy=remedy)
    user = options.etcd_user
    if user is not None and plain(user) != user:
        raise ConfigError("not a user name", "--etcd-user", got=user, expected="text in UTF-8", remedy="Check it")
    return Credentials(user=user, **files)


# Output.


def _check_log_dir(directory: Path) -> None:
    """Raise ConfigError for a directory that cannot be made or written to.

    A disk that is full, failing or read-only is not the user's mistake: the agent warns, and training goes on.
    """
    there = directory
    try:
        there = next(each for each in (directory, *directory.parents) if each.exists())
        with tempfile.TemporaryDirectory(dir=there, prefix=".elasticrt-"):
            pass
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS):
            return
        got, expected = f"{there}: {error.strerror}", "a directory that can be made and written to"
        remedy = "Name another one. Without --log-dir it is elasticrt_runs"
        raise ConfigError(
            "the log directory cannot be used", "--log-dir", got=got, expected=expected, remedy=remedy
        ) from None


def prefix_of(options: RunOptions, workers: int, env: Mapping[str, str]) -> str:
    """What the console puts before each line of a worker."""
    usual = "[rank ${rank}] " if workers > 1 and options.events_fd < 0 else ""
    return env.get("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE", usual if options.prefix is None else options.prefix)
