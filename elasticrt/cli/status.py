"""`elasticrt status`: where a run stands; for a live run by its etcd, for any run by its directory."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from elasticrt.cli.live_run import LiveRun, live_here, named_run, opened, which_run
from elasticrt.cli.options import options_given
from elasticrt.errors import EXIT_OK, ConfigError
from elasticrt.ipc.env import Commit
from elasticrt.ipc.std_streams import has_reader, write
from elasticrt.ipc.wording import counted
from elasticrt.rendezvous.records import Generation, Result
from elasticrt.run_options import EtcdOptions
from elasticrt.store.protocol import StoreRefused, StoreUnavailable
from elasticrt.story import run_dir
from elasticrt.story.fold import Story, cause_of
from elasticrt.story.report import as_object, head, sums
from elasticrt.story.sentences import state
from elasticrt.text import json_text, plain

WATCH_EVERY_S = 2.0
# Moves a terminal's cursor to the top and clears what is below.
CLEAR = "\033[H\033[J"


def main(arguments: argparse.Namespace) -> int:
    """Print where a run stands, or how it ended. Without a name: the newest run that lives here, otherwise the newest.

    Raises ConfigError if there is no such run.
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
    """Print the state of the run. Returns whether it has ended."""
    story = run_dir.read(directory) if run_dir.has_events(directory) else None
    if arguments.json:
        story = story or run_dir.read(run_dir.find(run_id, arguments.log_dir))
        write(sys.stdout, json_text(as_object(story, story.now_if_running(time.time()))) + "\n")
        return story.run.result is not None or not story.lives.alive()
    try:
        with opened(run_id, directory, options) as run:
            lines, ended = show(run, story, time.time())
    except (ConfigError, StoreUnavailable, StoreRefused) as error:
        # The run may train on without etcd, and its directory tells of it.
        away = not isinstance(error, ConfigError)
        # An etcd that was named should know of a run that is alive, so the error is about the name.
        if story is None or (options.etcd and not away and story.lives.alive()):
            raise
        # Read again: the run may have ended meanwhile, and its etcd with it.
        story = run_dir.read(directory)
        now = story.now_if_running(time.time())
        write(sys.stdout, plain("\n".join(head(story, now))) + "\n")
        if story.run.result is not None or not story.lives.alive():
            return True
        if away and not arguments.watch:
            raise
        told = "etcd does not answer: " if isinstance(error, StoreUnavailable) else "from the run's directory alone: "
        write(sys.stdout, plain(f"{told}{error}\n"))
        return not away and now is None
    if story is not None:
        lines += sums(story, story.now_if_running(time.time()))
        ended = ended or story.run.result is not None
    write(sys.stdout, plain("\n".join(lines)) + "\n")
    return ended


def show(run: LiveRun, story: Story | None, now: float) -> tuple[list[str], bool]:
    """The lines about what etcd knows of the run at `now`, and whether the run has ended by that.

    The `story` of the run's directory, if there is one, also tells what the nodes of a run that goes on do. Raises
    ConfigError if there is no such run.
    """
    spec, _ = run.spec()
    generation, saved = run.record(run.keys.generation, Generation), run.record(run.keys.checkpoint, Commit)
    result = run.record(run.keys.result(spec.attempt), Result)
    # etcd keeps the member keys of killed agents for a lease term. Agents are compared by their node as well, because
    # in containers the next agent often has the same process id.
    newest = {(life.node, life.pid): life for life in story.lives.all} if story is not None else {}
    gone = {who for who, life in newest.items() if life.code is not None or life.gone_at is not None}
    members = [member for member, _ in run.members().values() if (member.node, member.pid) not in gone]
    over = story is not None and not story.lives.alive()
    stands = story is not None and story.standstill is not None
    needed, waits = spec.spec.min_nodes, generation is not None and generation.waits
    running = [member.node for member in members if generation is not None and member.generation == generation.number]
    # The events tell of a wait since when it lasts, once the nodes have agreed on it.
    chapter = story.generations.newest if story is not None else None
    knows = story is not None and story.now_if_running(now) is not None
    # After a resize, or without a Loop, all nodes of a generation may train on below the minimum.
    goes_on = generation is not None and not waits and len(running) >= generation.nodes
    if result is not None:
        said = f"{result.status}: {result.reason}"
    elif not members:
        said = state(story) if story is not None and over else "no node answers: they are leaving, stopped, or lost"
    elif len(members) < needed and not (goes_on or (knows and chapter is not None and chapter.lacks_nodes)):
        said = f"waits for {counted(needed - len(members), 'more node')}"
    elif story is not None and knows:
        said = state(story, now)
    else:
        said = "alive"
    lines = [f"run {run.keys.run_id}: {said}", f"options: {needed} to {counted(spec.spec.max_nodes, 'node')}"]
    if generation is not None:
        size = f"{counted(generation.nodes, 'node')}, {counted(generation.world_size, 'worker')}"
        left = result is None and not running
        name, cause = "last generation" if left else "generation", cause_of(story, generation.number, generation.cause)
        lines.append(f"{name} {generation.number}: {size} ({cause})")
    # The directory tells of the checkpoint as well. It knows of a newer one if etcd was restored from a backup.
    if saved is not None and (story is None or saved.reached > story.checkpoints.newest):
        lines.append(f"newest checkpoint: step {saved.reached} of generation {saved.generation}")
    sets_up = chapter is not None and generation is not None and chapter.number == generation.number
    sets_up = sets_up and chapter is not None and chapter.stepped_at is None
    runs = "waiting" if waits else "standing still" if stands else "setting up" if sets_up else "training"
    for member in members:
        stands_by = "standby" if any(each.generation for each in members) else "waiting"
        others = stands_by if member.warm else "starting"
        word = "draining" if member.draining else runs if member.node in running else others
        lines.append(
            f"  {member.node}: {word}, {counted(member.workers, 'worker')}, {member.address}, pid {member.pid}"
        )
    begun = over if story is not None else generation is not None
    return lines, result is not None or (begun and not members)
