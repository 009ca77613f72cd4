"""`elasticrt report`, `runs`, `dashboard`, `events` and `logs`: what the directory of a run holds."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from elasticrt.cli.options import add_command, declare_log_dir, declare_run, options_given
from elasticrt.errors import EXIT_OK, ConfigError
from elasticrt.event_log import added
from elasticrt.ipc.file_modes import opener
from elasticrt.ipc.std_streams import has_reader, tell, write
from elasticrt.option_values import host_and_port, parsed, some_text, whole
from elasticrt.run_options import EtcdOptions, RunOptions
from elasticrt.story import report, run_dir, sentences
from elasticrt.story.board import board
from elasticrt.story.fold import Story
from elasticrt.story.sentences import trouble
from elasticrt.text import cut, json_text, plain

PAGE = Path(__file__).with_name("dashboard.html")
# How many runs `elasticrt runs` lists, and how much of each one's state.
RUNS_SHOWN, STATE_SHOWN_BYTES = 20, 160

REPORT = """\
examples:
  elasticrt report calm-fox-k7m2p
  elasticrt report elasticrt_runs/calm-fox-k7m2p --html report.html

Nodes without a shared directory each have the events of their own: copy them into one to see them together.
"""
RUNS = """\
examples:
  elasticrt runs
  elasticrt runs --log-dir /shared/runs
"""
DASHBOARD = """\
examples:
  elasticrt dashboard
  elasticrt dashboard --listen 0.0.0.0:8080      for other machines: the address has a token in it
"""
EVENTS = """\
examples:
  elasticrt events --follow                      of the newest run
  elasticrt events calm-fox-k7m2p | jq 'select(.event == "recovery")'
"""
LOGS = """\
examples:
  elasticrt logs                                 of the newest run, all ranks
  elasticrt logs 0 --follow                      of rank 0
  elasticrt logs calm-fox-k7m2p 0
"""


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Register the commands."""
    text = "show how a run went: where its time went, what changes cost"
    made = _command(subparsers, "report", show, text, REPORT, run=True)
    path = parsed(some_text, "--html", made.prog)
    made.add_argument("--html", metavar="FILE", type=path, help="write it to FILE, as the page of the dashboard")
    runs = _command(subparsers, "runs", show_runs, "list the runs of this machine, the newest first", RUNS)
    runs.add_argument("--json", action="store_true", help="print an object of JSON for each")
    text = "show the runs of this machine on a page of a browser, until interrupted"
    shown = _command(subparsers, "dashboard", show_dashboard, text, DASHBOARD)
    address = parsed(host_and_port("--listen", "127.0.0.1"), "--listen", shown.prog)
    text = "where (default: a free port of loopback)"
    shown.add_argument("--listen", metavar="[HOST:]PORT", type=address, default="0", help=text)
    text = "print what the agents of a run have written, as JSON lines"
    listed = _command(subparsers, "events", show_events, text, EVENTS, run=True)
    listed.add_argument("--follow", "-f", action="store_true", help="go on with what they write, until all have ended")
    logs = _command(subparsers, "logs", show_logs, "print what the workers of a run have printed", LOGS, run=True)
    number = parsed(whole(0, 10**9), "RANK", logs.prog)
    logs.add_argument("rank", metavar="RANK", nargs="?", type=number, help="only what was printed as this global rank")
    logs.add_argument("--follow", "-f", action="store_true", help="go on with what they print, until all have ended")


def _command(
    subparsers: argparse._SubParsersAction[Any], name: str, act: Any, text: str, epilog: str, *, run: bool = False
) -> argparse.ArgumentParser:
    more = "It reads directories of runs; no etcd is needed."
    parser = add_command(subparsers, name, act, text, more=more, epilog=epilog)
    if run:
        declare_run(parser, "the newest")
    else:
        declare_log_dir(parser)
    return parser


def directory_of(arguments: argparse.Namespace) -> Path:
    """The directory of the run that was named, as an option or by variables; without a name, of the newest.

    With --follow this waits for the run, and says so on stderr. Otherwise it raises ConfigError if there is none.
    """
    run, log_dir, said = arguments.run or options_given(arguments, EtcdOptions()).run_id, arguments.log_dir, False
    while True:
        found = next(run_dir.newest(log_dir), None) if run is None else run_dir.look_for(run, log_dir)
        if found is not None:
            return found
        if not getattr(arguments, "follow", False):
            break
        if not said:
            said = True
            tell(f"elasticrt: waiting for the first event of {run or 'a run'} in {log_dir}, until Ctrl-C\n")
        time.sleep(run_dir.LOOK_EVERY_S)
    if run is not None:
        return run_dir.find(run, log_dir)
    what, remedy = "there is no run here", "cd to where it was started, or name the directory with --log-dir"
    raise ConfigError(what, log_dir, expected="DIR/RUN/events-NODE.jsonl", remedy=remedy)


def show(arguments: argparse.Namespace) -> int:
    """Print the report, or write it as a page.

    Raises ConfigError for an unknown run, and for a file that can't be written.
    """
    story = run_dir.read(directory_of(arguments))
    now = story.now_if_running(time.time())
    if not arguments.html:
        write(sys.stdout, plain("\n".join(report.report(story, now))) + "\n")
        return EXIT_OK
    # Made first: an error in it must not leave the file of an earlier report empty.
    text = page(story, time.time())
    try:
        with open(arguments.html, "w", encoding="utf-8", opener=opener) as file:
            file.write(text)
    except OSError as error:
        what, remedy = "the report cannot be written", "Name a file in a directory that is there and may be written to"
        raise ConfigError(what, arguments.html, got=error.strerror, remedy=remedy) from None
    write(sys.stdout, f"written: {arguments.html}\n")
    return EXIT_OK


def page(story: Story, now: float) -> str:
    """The dashboard's page, in one file for good, with a run as it is at `now` (seconds since 1970) and its report."""
    told = report.report(story, story.now_if_running(now))
    saved = {"board": board(story, now), "text": "\n".join([story.run.text, *told]).lstrip()}
    # "</script>" in a text would end the element early.
    data = json_text(saved).replace("<", "\\u003c")
    script = f'<script type="application/json" id="saved">{data}</script>'
    return PAGE.read_text(encoding="utf-8").replace("<!-- saved -->", script)


def show_runs(arguments: argparse.Namespace) -> int:
    """Print a line for each run. Raises ConfigError for a missing directory, unless it is the default one."""
    if Path(arguments.log_dir).is_dir():
        run_dir.check_readable("a directory of runs that cannot be read", [Path(arguments.log_dir)])
    elif arguments.log_dir != RunOptions.log_dir:
        remedy = "Name the directory in which runs keep their logs"
        raise ConfigError("no such directory", "--log-dir", got=arguments.log_dir, remedy=remedy)
    if arguments.json:
        for story in map(run_dir.read, run_dir.newest(arguments.log_dir)):
            write(sys.stdout, json_text(report.as_object(story, story.now_if_running(time.time()))) + "\n")
        return EXIT_OK
    rows = [("run", "begun", "nodes", "steps", "goodput", "")]
    found = run_dir.newest(arguments.log_dir)
    for directory in islice(found, RUNS_SHOWN):
        story = run_dir.read(directory)
        begun = time.strftime("%Y-%m-%d %H:%M", time.localtime(story.begin))
        now = story.now_if_running(time.time())
        goodput = f"{story.goodput(now):.1%}"
        nodes = str(len(story.lives.nodes))
        state = sentences.state(story, now)
        slow = trouble(story, now) if state == "running" and now is not None else ""
        state = f"{state}; {slow}" if slow else state
        steps = f"{sentences.steps_made(story):,}" if story.has_step_numbers else "-"
        rows.append((directory.name, begun, nodes, steps, goodput, cut(state, STATE_SHOWN_BYTES)))
    lines = report.table(rows) if len(rows) > 1 else [f"no runs in {arguments.log_dir}"]
    if more := len(list(found)):
        lines.append(f"... and {more} more in {arguments.log_dir}")
    write(sys.stdout, plain("\n".join(lines)) + "\n")
    return EXIT_OK


def show_dashboard(arguments: argparse.Namespace) -> int:
    """Serve the page. Raises ConfigError if the address cannot be used."""
    from elasticrt.cli.dashboard import serve

    host, port = arguments.listen
    return serve(host, port, arguments.log_dir)


def show_events(arguments: argparse.Namespace) -> int:
    """Print the events of all nodes in the order of time; with --follow also new ones, until all agents have ended.

    Raises ConfigError if there are none.
    """
    directory, found = directory_of(arguments), False
    for lines, _ in _looks(arguments, directory):
        write(sys.stdout, "".join(f"{line}\n" for line in lines))
        found = found or bool(lines)
    if not (found or arguments.follow):
        raise run_dir.says_nothing(directory)
    return EXIT_OK


def show_logs(arguments: argparse.Namespace) -> int:
    """Print the workers' output, generation by generation; with --follow also new output, until all agents have ended.

    Raises ConfigError if none is kept.
    """
    run, rank = arguments.run or "", arguments.rank
    # `elasticrt logs 0` means rank 0 of the newest run, unless there is a run called 0.
    if rank is None and run.isdigit() and not any(path.is_dir() for path in (Path(run), Path(arguments.log_dir, run))):
        arguments.run, rank = None, int(run)
    directory = directory_of(arguments)
    pattern = f"generation-*/rank-{'*' if rank is None else rank}.*"

    def logs() -> list[Path]:
        found = [path for path in (directory / "logs").glob(pattern) if path.suffix in (".out", ".err")]
        # "generation-10" comes after "generation-9".
        return sorted(found, key=lambda path: (int(path.parent.name.rpartition("-")[2]), path.name))

    run_dir.check_readable("logs that cannot be read", [*directory.glob("logs"), *directory.glob("logs/*"), *logs()])
    if not logs() and not arguments.follow:
        got = "nothing was printed" + (f" as rank {rank}" if rank is not None else "")
        remedy = f"`elasticrt logs {directory}` prints those of all ranks; runs with --log-dir /dev/null keep none"
        where, expected = str(directory / "logs"), "files rank-R.NODE.out, .err"
        raise ConfigError("no logs", where, got=got, expected=expected, remedy=remedy)
    before, offsets = None, dict[Path, int]()
    for _, last in _looks(arguments, directory):
        for path in logs():
            for text in added(path, offsets, whole=not last):
                title = f"==> {path.relative_to(directory)} <==\n" if path != before else ""
                write(sys.stdout, title + text)
                before = path
    return EXIT_OK


def _looks(arguments: argparse.Namespace, directory: Path) -> Iterator[tuple[list[str], bool]]:
    """The new lines of each look at a run, and whether it is the last look.

    That is the first one, or with --follow the one after all agents have ended.
    """
    said = False

    def over(story: Story) -> bool:
        return not arguments.follow or not has_reader(sys.stdout) or bool(story.lives.all and not story.lives.alive())

    for _, news, last in run_dir.follow(directory, over):
        yield news, last
        if not (last or said):
            said = True
            tell(f"elasticrt: waiting for more of run {directory.name}, until its agents end or Ctrl-C\n")
