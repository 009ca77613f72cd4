"""`elasticrt status`, `drain`, `stop` and `resize`: look at a live run from outside, and change it.

Each is a read and at most one fenced transaction; what follows is done by the run's own agents.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from elasticrt.cli.configure import read_credentials, where_etcd_is
from elasticrt.cli.options import declare, read
from elasticrt.cli.report import declare_log_dir
from elasticrt.cli.torchrun_flags import MeetingFlags
from elasticrt.errors import EXIT_OK, ConfigError, RendezvousTimeoutError, StoreError, explain
from elasticrt.ipc.env import Commit
from elasticrt.ipc.std_streams import write
from elasticrt.ipc.time_bounds import LOOK_AGAIN_S
from elasticrt.ipc.wording import counted
from elasticrt.option_values import option, parse_nodes, positive_seconds
from elasticrt.run_options import EtcdOptions
from elasticrt.store.address import parse_endpoints
from elasticrt.story import run_dir
from elasticrt.story.report import as_object, head, sums
from elasticrt.text import plain

E = TypeVar("E", bound=EtcdOptions)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from elasticrt.rendezvous.records import Generation, Keys, Member, Result, SpecRecord
    from elasticrt.store.protocol import KeyValue, Store


@dataclass(frozen=True, kw_only=True)
class DrainOptions(EtcdOptions):
    """Of `elasticrt drain`."""

    timeout_s: float = option("--timeout T", 120.0, "wait so long until it has left", positive_seconds)


@dataclass(frozen=True, kw_only=True)
class StopOptions(EtcdOptions):
    """Of `elasticrt stop`."""

    timeout_s: float = option("--timeout T", 120.0, "wait so long until all nodes have left", positive_seconds)


ASKED_AT_ONCE = 64
"""Nodes that one transaction asks to leave; etcd takes 128 operations."""

WATCH_EVERY_S = 2.0
CLEAR = "\033[H\033[J"

TRIES = 20
"""A member's key changes a few times in a recovery; more changes in a row than this mean that something is wrong."""


STATUS = """\
examples:
  elasticrt status                            of the newest run
  elasticrt status calm-fox-k7m2p --watch
  elasticrt status calm-fox-k7m2p --etcd https://10.0.0.5:2379 --etcd-ca-file ca.pem
"""
STOP = """\
examples:
  elasticrt stop calm-fox-k7m2p                            its agents, or its directory, are on this machine
  elasticrt stop digits --etcd http://10.0.0.5:2379 --insecure-etcd
"""
DRAIN = """\
example:
  elasticrt drain node-3 --run-id calm-fox-k7m2p
"""
RESIZE = """\
example:
  elasticrt resize 1:8 --run-id calm-fox-k7m2p
"""


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Register the commands."""
    status = _command(
        subparsers, "status", show, "show a run: its nodes, generation, newest checkpoint, goodput", STATUS
    )
    status.set_defaults(func=show_status)
    _declare_run(status, "the run's id, or its directory (default: the newest)")
    status.add_argument(
        "--json", action="store_true", help="print an object of JSON, of what the run's directory tells"
    )
    status.add_argument("--watch", action="store_true", help="look again every 2 s until the run has ended")
    told = "end a whole run in order: all nodes save the present step and leave; the same --run-id goes on after it"
    stop = _command(subparsers, "stop", stop_all, told, STOP, kind=StopOptions)
    stop.set_defaults(func=stop_run)
    _declare_run(stop, "the run's id, or its directory")
    told = "make a node hand over and leave; no step is lost"
    drain = _command(subparsers, "drain", drain_node, told, DRAIN, kind=DrainOptions)
    drain.add_argument("name", metavar="NODE", help="the node's name, as `elasticrt status` shows it")
    resize = _command(subparsers, "resize", resize_run, "change how many nodes a live run may have", RESIZE)
    resize.add_argument("nodes", metavar="MIN:MAX", type=_nodes, help="nodes, e.g. 1:8; one number for both")


def _command(
    subparsers: argparse._SubParsersAction[Any],
    name: str,
    act: Callable[..., int],
    text: str,
    examples: str,
    *,
    kind: type[EtcdOptions] = EtcdOptions,
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = subparsers.add_parser(
        name,
        help=text,
        description=f"{text[0].upper()}{text[1:]}.",
        epilog=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    declare(parser, kind, MeetingFlags)
    parser.set_defaults(func=lambda arguments: _main(act, arguments, kind()))
    return parser


def _declare_run(parser: argparse.ArgumentParser, text: str) -> None:
    parser.add_argument("run", metavar="RUN", nargs="?", help=text)
    declare_log_dir(parser)


def _options(arguments: argparse.Namespace, base: E) -> E:
    flags = read(MeetingFlags(), arguments, os.environ)
    return flags.placed(read(base, arguments, os.environ))


def _named(arguments: argparse.Namespace, base: E) -> tuple[str, E]:
    """The id of the run that is meant, "" where none was named; the options."""
    options, run = _options(arguments, base), arguments.run
    if run is None:
        return options.run_id or "", options
    directory = Path(run)
    return run_dir.read(directory).run_id if "/" in run and run_dir.has_events(directory) else run, options


def _which_run() -> ConfigError:
    return ConfigError(explain("which run?", "--run-id", expected="the name that `elasticrt run` has printed"))


def _main(act: Callable[..., int], arguments: argparse.Namespace, base: EtcdOptions) -> int:
    from elasticrt.rendezvous.records import Keys

    options = _options(arguments, base)
    if options.run_id is None:
        raise _which_run()
    with _store(options.run_id, options) as store:
        return act(store, Keys(options.run_id), arguments, options)


@contextmanager
def _store(run_id: str, options: EtcdOptions, directory: Path | None = None) -> Iterator[Store]:
    """The run's etcd: as given, else the one that agents on this machine have started, or have noted in `directory`."""
    from elasticrt.store.embedded import find
    from elasticrt.store.etcd import EtcdStore

    etcd, _ = where_etcd_is(options)
    if not etcd:
        served = find(run_id)
        noted = run_dir.read(directory).etcd if directory is not None and run_dir.has_events(directory) else ""
        if served is not None:
            etcd = (served.address,)
        elif noted.startswith("http"):  # Its agents have accepted it; a socket of this machine's has ended with it.
            etcd = parse_endpoints(noted)
        else:
            raise ConfigError(
                explain(
                    "no agent of this run is on this machine",
                    f"run {run_id}",
                    expected="one that lives, or --etcd",
                    remedy="A run elsewhere needs --etcd ENDPOINTS; of one that has ended `elasticrt report` tells",
                )
            )
    store = EtcdStore(etcd, read_credentials(options))
    try:
        yield store
    finally:
        store.close()


# Looking.


def show_status(arguments: argparse.Namespace) -> int:
    """Print where a run stands, or how it ended; without an id the newest run's. Raises ConfigError for no such run."""
    run_id, options = _named(arguments, EtcdOptions())
    if not run_id:
        found = run_dir.newest(arguments.log_dir)
        if not found:
            raise _which_run()
        run_id = found[0].name
    while True:
        ended = _look(run_id, options, arguments)
        if ended or not arguments.watch:
            return EXIT_OK
        time.sleep(WATCH_EVERY_S)
        write(sys.stdout, CLEAR if sys.stdout.isatty() and not arguments.json else "")


def _look(run_id: str, options: EtcdOptions, arguments: argparse.Namespace) -> bool:
    """Print what is so: of a live run by its etcd, and of any by its directory. Whether it has ended."""
    from elasticrt.rendezvous.records import Keys

    story = None
    if arguments.json or run_dir.has_events(Path(arguments.log_dir, run_id)):
        story = run_dir.read(run_dir.find(run_id, arguments.log_dir))
    now = story.present(time.time()) if story is not None else None
    if story is not None and arguments.json:
        write(sys.stdout, json.dumps(as_object(story, now)) + "\n")
        return story.result is not None
    try:
        with _store(run_id, options) as store:
            show(store, Keys(run_id), arguments, options)
    except ConfigError:
        if story is None or options.etcd:  # Where an etcd was named, it should know of the run.
            raise
        write(sys.stdout, plain("\n".join(head(story, now))) + "\n")
        return True
    if story is not None:
        write(sys.stdout, plain("\n".join(sums(story, now))) + "\n")
    return story is not None and story.result is not None


def show(store: Store, keys: Keys, _: argparse.Namespace, __: EtcdOptions) -> int:
    """Print what etcd knows of the run. Raises ConfigError when there is no such run."""
    from elasticrt.rendezvous.records import Generation, Result

    spec = _spec(store, keys)[0]
    generation, head = _read(store, keys.generation, Generation), _read(store, keys.checkpoint, Commit)
    result = _read(store, keys.result(spec.attempt), Result)
    lines = describe(keys.run_id, spec, _members(store, keys), generation=generation, head=head, result=result)
    write(sys.stdout, "\n".join(lines) + "\n")
    return EXIT_OK


def describe(
    run_id: str,
    spec: SpecRecord,
    members: Mapping[str, tuple[Member, KeyValue]],
    *,
    generation: Generation | None,
    head: Commit | None,
    result: Result | None,
) -> list[str]:
    """The lines of `elasticrt status`. Pure."""
    state = f"{result.status}: {result.reason}" if result else "alive" if members else "nobody is here"
    lines = [f"run {run_id}: {state}", f"options: {spec.spec.min_nodes} to {counted(spec.spec.max_nodes, 'node')}"]
    if generation is not None:
        size = f"{counted(generation.nodes, 'node')}, {counted(generation.world_size, 'worker')}"
        lines.append(f"generation {generation.number}: {size} ({generation.cause})")
    if head is not None:
        lines.append(f"newest checkpoint: step {head.step} of generation {head.generation}")
    for name, (member, _) in sorted(members.items()):
        running = generation is not None and member.generation == generation.number
        word = "draining" if member.draining else "training" if running else "standby" if member.warm else "starting"
        lines.append(f"  {name}: {word}, {counted(member.workers, 'worker')}, {member.address}, pid {member.pid}")
    return lines


# Changing.


def drain_node(store: Store, keys: Keys, arguments: argparse.Namespace, options: DrainOptions) -> int:
    """Ask a node to drain and wait until it has left. Raises ConfigError, RendezvousTimeoutError, StoreError."""
    from elasticrt.rendezvous import transactions

    name, deadline = arguments.name, time.monotonic() + options.timeout_s
    life = ""
    while time.monotonic() < deadline:
        members = _members(store, keys)
        if not life and name not in members:
            raise ConfigError(
                explain("no such node", f"run {keys.run_id}", got=name, expected=f"one of {_list(members)}")
            )
        member, value = members.get(name, (None, None))
        life = life or (member.incarnation if member else "")
        if member is None or value is None or member.incarnation != life:
            write(sys.stdout, f"{name} has left run {keys.run_id}\n")
            return EXIT_OK
        if not member.draining:
            store.commit(transactions.drain(keys, value, member.model_copy(update={"draining": True})))
            continue
        time.sleep(LOOK_AGAIN_S)
    raise RendezvousTimeoutError(
        explain(
            "the node is still there",
            f"node {name}",
            got=f"no farewell within {options.timeout_s:g} s",
            expected="it to hand over and leave",
            remedy="It goes on trying: look again with `elasticrt status`, or end its agent by SIGTERM",
        )
    )


def stop_run(arguments: argparse.Namespace) -> int:
    """End the whole run. Raises ConfigError for no such run, RendezvousTimeoutError, StoreError."""
    from elasticrt.rendezvous.records import Keys

    run_id, options = _named(arguments, StopOptions())
    if not run_id:
        raise _which_run()
    with _store(run_id, options, Path(arguments.log_dir, run_id)) as store:
        return stop_all(store, Keys(run_id), arguments, options)


def stop_all(store: Store, keys: Keys, _: argparse.Namespace, options: StopOptions) -> int:
    """Ask all nodes to drain, together, so that they save; wait until all have left, who comes meanwhile as well."""
    from elasticrt.rendezvous import transactions
    from elasticrt.rendezvous.records import Result
    from elasticrt.store.protocol import Txn

    deadline, attempt = time.monotonic() + options.timeout_s, _spec(store, keys)[0].attempt
    members = _members(store, keys)
    if not members:
        raise ConfigError(explain("the run is not alive", f"run {keys.run_id}", expected="a node that takes part"))
    write(sys.stdout, f"run {keys.run_id}: {counted(len(members), 'node')} told to save and leave\n")
    while members and time.monotonic() < deadline:
        asked = [
            transactions.drain(keys, value, member.model_copy(update={"draining": True}))
            for member, value in members.values()
            if not member.draining
        ][:ASKED_AT_ONCE]
        if asked:
            compares = tuple(compare for each in asked for compare in each.compares)
            operations = tuple(operation for each in asked for operation in each.operations)
            store.commit(Txn(compares, operations, why=f"{counted(len(asked), 'node')} are asked to drain"))
        else:
            time.sleep(LOOK_AGAIN_S)
        members = _members(store, keys)
    if members:
        raise RendezvousTimeoutError(
            explain(
                "nodes are still there",
                f"run {keys.run_id}",
                got=f"{_list(members)} after {options.timeout_s:g} s",
                expected="all of them to save and leave",
                remedy="They go on trying: look again with `elasticrt status`, or end their agents by SIGTERM",
            )
        )
    result, saved = _read(store, keys.result(attempt), Result), _read(store, keys.checkpoint, Commit)
    ended = f"{result.status}: {result.reason}" if result is not None else "stopped"
    step = f"; step {saved.reached:,} is saved" if saved is not None else ""
    write(sys.stdout, f"run {keys.run_id} {ended}{step}\n")
    return EXIT_OK


def resize_run(store: Store, keys: Keys, arguments: argparse.Namespace, _: EtcdOptions) -> int:
    """Change the numbers of nodes. Raises ConfigError, StoreError."""
    from elasticrt.rendezvous import transactions

    least, most = arguments.nodes
    for _again in range(TRIES):
        record, seen = _spec(store, keys)
        members = _members(store, keys)
        if not members:
            raise ConfigError(explain("the run is not alive", f"run {keys.run_id}", remedy="Start it with new options"))
        changed = record.spec.model_copy(update={"min_nodes": least, "max_nodes": most})
        new = record.model_copy(update={"spec": changed, "resized": True})
        if changed == record.spec or store.commit(transactions.resize(keys, new, seen)).succeeded:
            write(sys.stdout, f"run {keys.run_id} may have {least} to {counted(most, 'node')}; it has {len(members)}\n")
            return EXIT_OK
    raise StoreError(explain("the run's options keep changing", f"run {keys.run_id}", remedy="Try again"))


def _nodes(text: str) -> tuple[int, int]:
    return parse_nodes(text, "MIN:MAX")


def _spec(store: Store, keys: Keys) -> tuple[SpecRecord, int]:
    from elasticrt.rendezvous.records import SpecRecord, decode

    found = store.read(keys.spec).get(keys.spec)
    if found is None:
        raise ConfigError(
            explain("no such run", f"run {keys.run_id}", expected="a run in this etcd", remedy="Check --run-id, --etcd")
        )
    return decode(SpecRecord, keys.spec, found.value), found.mod_revision


def _members(store: Store, keys: Keys) -> dict[str, tuple[Member, KeyValue]]:
    from elasticrt.rendezvous.records import Member, decode

    found = store.read(keys.members).keys
    return {each.key[len(keys.members) :]: (decode(Member, each.key, each.value), each) for each in found}


def _read(store: Store, key: str, kind: Any) -> Any:
    from elasticrt.rendezvous.records import decode

    found = store.read(key).get(key)
    return decode(kind, key, found.value) if found is not None else None


def _list(members: Mapping[str, Any]) -> str:
    return ", ".join(sorted(members)) or "(nobody is here)"
