"""`elasticrt status`: where a run stands, of a live run by its etcd, and of any by its directory."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable
from pathlib import Path

from elasticrt.cli.live_run import LiveRun, live_here, named_run, opened, options_given, which_run
from elasticrt.errors import EXIT_OK, ConfigError
from elasticrt.ipc.env import Commit
from elasticrt.ipc.std_streams import has_reader, write
from elasticrt.ipc.wording import counted
from elasticrt.rendezvous.records import Generation, Member, Result, SpecRecord
from elasticrt.run_options import EtcdOptions
from elasticrt.store.protocol import StoreUnavailable
from elasticrt.story import run_dir
from elasticrt.story.fold import Story, cause_of
from elasticrt.story.report import as_object, head, sums
from elasticrt.story.sentences import lasted, state
from elasticrt.text import json_text, plain

WATCH_EVERY_S = 2.0
CLEAR = "\033[H\033[J"


def main(arguments: argparse.Namespace) -> int:
    """Print where a run stands, or how it ended; without an id of the newest run that lives here, else of the newest.

    Raises ConfigError for no such run.
    """
    options = options_given(arguments, EtcdOptions())
    named = named_run(arguments, options)
    if named is None:
        newest = next(iter(live_here(arguments.log_dir)), None) or next(run_dir.newest(arguments.log_dir), None)
        if newest is None:
            raise which_run()
        named = newest.name, newest
    while not look(*named, arguments, options) and arguments.watch and has_reader(sys.stdout):
        time.sleep(WATCH_EVERY_S)
        write(sys.stdout, CLEAR if sys.stdout.isatty() and not arguments.json else "")
    return EXIT_OK


def look(run_id: str, directory: Path, arguments: argparse.Namespace, options: EtcdOptions) -> bool:
    """Print the state of the run; whether it has ended."""
    story = run_dir.read(directory) if run_dir.has_events(directory) else None
    if arguments.json:
        story = story or run_dir.read(run_dir.find(run_id, arguments.log_dir))
        write(sys.stdout, json_text(as_object(story, story.present(time.time()))) + "\n")
        return story.result is not None or not story.alive()
    try:
        since = story.waits_since if story is not None else None
        with opened(run_id, directory, options) as run:
            over = story is not None and not story.alive()
            without_nodes = state(story) if story is not None and over else "no node is here: they are leaving, or lost"
            standing = story.standing(time.time()) if story is not None else ""
            waited_s = None if since is None else time.time() - since
            ended = show(run, without_nodes, story, waited_s=waited_s, standing=standing)
    except (ConfigError, StoreUnavailable) as error:
        away = isinstance(error, StoreUnavailable)  # The run may train on without etcd, and its directory tells of it.
        # An etcd that was named should know of a run that is alive.
        if story is None or (options.etcd and not away and story.alive()):
            raise
        story = run_dir.read(directory)  # It may have ended meanwhile, and its etcd with it.
        write(sys.stdout, plain("\n".join(head(story, story.present(time.time())))) + "\n")
        if story.result is not None or not story.alive():
            return True
        if away and not arguments.watch:
            raise
        told = "etcd does not answer" if away else "told by its directory alone"
        write(sys.stdout, plain(f"{told}: {error}\n"))
        return not away and story.present(time.time()) is None
    if story is not None:
        write(sys.stdout, plain("\n".join(sums(story, story.present(time.time())))) + "\n")
    return ended or (story is not None and story.result is not None)


def show(
    run: LiveRun, without_nodes: str, story: Story | None = None, *, waited_s: float | None = None, standing: str = ""
) -> bool:
    """Print what etcd knows of the run; whether it has ended by that. See `describe`.

    Raises ConfigError for no such run.
    """
    spec, _ = run.spec()
    generation = run.record(run.keys.generation, Generation)
    if generation is not None:
        cause = cause_of(story, generation.number, generation.cause)
        generation = generation.model_copy(update={"cause": cause})
    ended = [life for life in story.lives if life.code is not None or life.gone_at is not None] if story else []
    gone = {(life.node, life.pid) for life in ended}  # Etcd keeps the keys of killed agents for a lease term.
    members = [member for member, _ in run.members().values() if (member.node, member.pid) not in gone]
    result = run.record(run.keys.result(spec.attempt), Result)
    lines = describe(
        run.keys.run_id,
        spec,
        members,
        generation=generation,
        saved=run.record(run.keys.checkpoint, Commit),
        result=result,
        without_nodes=without_nodes,
        waited_s=waited_s,
        standing=standing,
    )
    write(sys.stdout, "\n".join(lines) + "\n")
    begun = generation is not None if story is None else not story.alive()
    return result is not None or (begun and not members)


def describe(
    run_id: str,
    spec: SpecRecord,
    members: Iterable[Member],
    *,
    generation: Generation | None,
    saved: Commit | None,
    result: Result | None,
    without_nodes: str,
    waited_s: float | None = None,
    standing: str = "",
) -> list[str]:
    """The lines about a run with this spec, members, current generation, newest checkpoint and result. Pure.

    `without_nodes`: the state of a run that has neither members nor a result. `waited_s`: for how many seconds it has
    been waiting for nodes; None: not known. `standing`: that no step is made, and for whom the others wait; "": steps
    are made, as far as is known.
    """
    members, waits = list(members), generation is not None and generation.waits
    missing = spec.spec.min_nodes - len(members)
    leaving = "all its nodes leave" if all(member.draining for member in members) else ""
    alive = (standing or leaving or "alive") if members else without_nodes
    said = f"{result.status}: {result.reason}" if result else alive
    if members and result is None and missing > 0 and (waits or not any(member.generation for member in members)):
        said = f"waits for {counted(missing, 'more node')}"
        left_s = spec.spec.join_timeout_s - (waited_s or 0.0)
        said += f", no step for {lasted(waited_s)}; gives up in {lasted(left_s)}" if waited_s is not None else ""
    if generation is not None and waits and result is None and missing <= 0 < spec.spec.min_nodes - generation.nodes:
        newcomers = [member.node for member in members if member.generation != generation.number]
        said = f"waits until {', '.join(newcomers)} can train"
        said += f", no step for {lasted(waited_s)}" if waited_s is not None else ""
    lines = [f"run {run_id}: {said}", f"options: {spec.spec.min_nodes} to {counted(spec.spec.max_nodes, 'node')}"]
    if generation is not None:
        size = f"{counted(generation.nodes, 'node')}, {counted(generation.world_size, 'worker')}"
        over = all(member.generation != generation.number for member in members)
        name = "generation" if not over or result is not None else "last generation"
        lines.append(f"{name} {generation.number}: {size} ({generation.cause})")
    if saved is not None:
        lines.append(f"newest checkpoint: step {saved.step} of generation {saved.generation}")
    for member in members:
        running = generation is not None and member.generation == generation.number
        runs = "waiting" if waits else "standing still" if standing else "training"
        stands_by = "standby" if any(each.generation for each in members) else "waiting"
        word = "draining" if member.draining else runs if running else stands_by if member.warm else "starting"
        lines.append(
            f"  {member.node}: {word}, {counted(member.workers, 'worker')}, {member.address}, pid {member.pid}"
        )
    return lines
