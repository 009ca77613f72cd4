"""Finds the run that a command means, its etcd and its records there: for `status`, `drain`, `stop` and `resize`."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elasticrt.cli.configure import read_credentials, where_etcd_is
from elasticrt.errors import ConfigError
from elasticrt.event_log import store_of, writers
from elasticrt.option_values import check_name
from elasticrt.rendezvous.records import Keys, Member, Result, SpecRecord, decode
from elasticrt.run_options import EtcdOptions
from elasticrt.store.address import parse_endpoints
from elasticrt.store.embedded import EmbeddedServer, find
from elasticrt.store.etcd import EtcdStore
from elasticrt.store.protocol import Address, KeyValue, Store, StoreUnavailable
from elasticrt.story import run_dir
from elasticrt.story.fold import Story
from elasticrt.story.sentences import state


def named_run(arguments: argparse.Namespace, options: EtcdOptions) -> tuple[str, Path] | None:
    """The id and the directory of the run that RUN or the options name; None if neither does.

    Raises ConfigError if RUN is a path without a run, or cannot be a name.
    """
    run = arguments.run or options.run_id
    if run is None:
        return None
    # A name below --log-dir comes before a directory of the same name here.
    below = Path(arguments.log_dir, run)
    if "/" in run or (run_dir.has_events(Path(run)) and not run_dir.has_events(below)):
        directory = run_dir.find(run, arguments.log_dir)
        return run_dir.read(directory).run.run_id, directory
    return check_name(run, "RUN"), below


def live_run(arguments: argparse.Namespace, options: EtcdOptions) -> AbstractContextManager[LiveRun]:
    """The named run; without a name, the only run below --log-dir that has agents on this machine.

    Raises ConfigError if there are none or several: a command that changes a run must not guess.
    """
    named = named_run(arguments, options)
    if named is None:
        live = live_here(arguments.log_dir)
        if len(live) != 1:
            raise which_run(sorted(directory.name for directory in live))
        named = live[0].name, live[0]
    return opened(*named, options)


def live_here(log_dir: str) -> list[Path]:
    """The runs below `log_dir` with agents on this machine, the newest first.

    A run's etcd outlives its agents for a moment.
    """
    return [path for path in run_dir.newest(log_dir) if not run_dir.has_ended(path) and _lives_here(path)]


def _lives_here(directory: Path) -> bool:
    """Whether agents of a run live here: they serve its etcd, or use a named etcd and are processes of this machine."""
    try:
        story = run_dir.read(directory)
    # Events without the start of an agent: nobody can tell where it lives.
    except ConfigError:
        return False
    if story.run.result is not None or not story.lives.alive():
        return False
    return _served(directory.name, story)[0] is not None or bool(run_dir.alive_here(story))


def _served(run_id: str, story: Story | None) -> tuple[EmbeddedServer | None, str]:
    """The etcd that agents on this machine have started for a run; None if there is none.

    Another directory's run may have the same id and that etcd. Then it is None, and the text says how to name that run.

    Args:
        run_id: the run's id.
        story: what the run's directory tells; None: it has no events.
    """
    served = find(run_id)
    if served is None or story is None or story.run.etcd == str(served.address):
        return served, ""
    how = f"name its directory, or give --etcd {served.address}"
    return None, f"A live run of that name belongs to another directory, or is starting: {how}"


def which_run(live: Sequence[str] = ()) -> ConfigError:
    """The error if no run is named. `live` are those that may be meant."""
    got = f"{len(live)} live runs on this machine" if live else "no live run on this machine"
    expected = f"one of {', '.join(live)}" if live else "the name that `elasticrt run` has printed"
    remedy = "Name it: `elasticrt runs` lists them, with --log-dir DIR those that log elsewhere"
    return ConfigError("no run was named", "RUN", got=got, expected=expected, remedy=remedy)


@dataclass(frozen=True)
class LiveRun:
    """A run, by its keys in etcd. Its `directory` has events if the run is on this machine."""

    store: Store
    keys: Keys
    directory: Path

    def spec(self) -> tuple[SpecRecord, int]:
        """What the run's nodes have agreed on, and the revision of that record.

        Raises ConfigError if there is no such run.
        """
        found = self.store.read(self.keys.spec).get(self.keys.spec)
        if found is None:
            where, expected, remedy = f"run {self.keys.run_id}", "a run in this etcd", "Check its name, and --etcd"
            raise ConfigError("no such run", where, expected=expected, remedy=remedy)
        return decode(SpecRecord, self.keys.spec, found.value), found.mod_revision

    def members(self) -> dict[str, tuple[Member, KeyValue]]:
        """The run's members by their nodes' names, with their keys."""
        found = self.store.read(self.keys.members).keys
        return {
            each.key[len(self.keys.members) :]: (decode(Member, each.key, each.value), each)
            for each in sorted(found, key=lambda each: each.key)
        }

    def record(self, key: str, kind: Any) -> Any:
        """The record of this kind at `key`; None if there is none."""
        found = self.store.read(key).get(key)
        return decode(kind, key, found.value) if found is not None else None

    def without_nodes(self) -> ConfigError:
        """The error about a run without any node: it is starting, or it is over."""
        where, expected = f"run {self.keys.run_id}", "a node that takes part"
        spec = self.record(self.keys.spec, SpecRecord)
        result = None if spec is None else self.record(self.keys.result(spec.attempt), Result)
        if result is not None:
            return has_ended(self.keys.run_id, f"{result.status}: {result.reason}")
        # A node writes the spec with its own key. So all nodes that the run had are gone, or out of etcd's reach.
        if spec is not None:
            remedy = f"The same `elasticrt run` with --run-id {self.keys.run_id} goes on with it"
            return ConfigError("this run has no nodes", where, expected=expected, remedy=remedy)
        remedy = f"Wait until `elasticrt status {self.keys.run_id}` shows it"
        return ConfigError("no node of this run has registered yet", where, expected=expected, remedy=remedy)


def has_ended(run_id: str, how: str, remedy: str = "") -> ConfigError:
    """The error about a run that has a result."""
    remedy = remedy or f"`elasticrt report {run_id}` tells more"
    return ConfigError("the run has ended", f"run {run_id}", got=how, expected="a live run", remedy=remedy)


@contextmanager
def opened(run_id: str, directory: Path, options: EtcdOptions) -> Iterator[LiveRun]:
    """The run in its etcd. Raises ConfigError if that etcd is not known, StoreUnavailable if it does not answer.

    It is the etcd of `options`; otherwise the one that agents have noted in the run's `directory`; if they have noted
    none, the one that agents have started on this machine.

    Raises ConfigError, too, if the `options` name another etcd than that of the living agents that write to
    `directory`: there a run of the same id belongs to another directory.
    """
    named = where_etcd_is(options)[0]
    endpoints = named or _etcd_of(run_id, directory)
    store = EtcdStore(endpoints, read_credentials(options))
    try:
        run = LiveRun(store, Keys(run_id), directory)
        if named:
            _check_store(run, ",".join(map(str, named)))
        yield run
    except StoreUnavailable as error:
        remedy = f"`elasticrt doctor --etcd {','.join(map(str, endpoints))}` looks for the reason"
        raise StoreUnavailable(f"{error}. {remedy}") from error
    finally:
        store.close()


def _check_store(run: LiveRun, named: str) -> None:
    """Raise ConfigError if living agents write to the run's directory, and none of them is in the `named` etcd."""
    living = writers(run.directory)
    story = run_dir.read(run.directory) if living else None
    # The starts of agents tell nothing of a fresh embedded etcd that has taken the place of theirs.
    if story is None or story.run.etcd == named:
        return
    here = run.store.read(run.keys.spec).store_id
    if all(store_of(run.directory / name) != here for name in living):
        what, where = "the living run of this directory is in another etcd", str(run.directory)
        remedy = "Leave --etcd out, or name the directory of the other run with --log-dir"
        raise ConfigError(what, where, expected=f"--etcd {story.run.etcd}", remedy=remedy)


def _etcd_of(run_id: str, directory: Path) -> tuple[Address, ...]:
    story = run_dir.read(directory) if run_dir.has_events(directory) else None
    served, another = _served(run_id, story)
    if served is not None:
        return (served.address,)
    # An address that the run's agents have accepted. A socket is of use only on its machine, and that of an embedded
    # etcd only as long as agents live.
    if story is not None and (
        story.run.etcd.startswith("http") or (story.run.result is None and run_dir.alive_here(story))
    ):
        return parse_endpoints(story.run.etcd)
    if story is not None and (story.run.result is not None or not story.lives.alive()):
        raise has_ended(run_id, state(story), another)
    run_dir.check_events(directory)
    raise ConfigError(
        "the etcd of this run is not known on this machine",
        f"run {run_id}",
        got=f"no events in {directory}, and no etcd that agents have started for it",
        expected="its name, as `elasticrt runs` has it",
        remedy=another or "Name the directory of its logs with --log-dir, or its etcd with --etcd",
    )
