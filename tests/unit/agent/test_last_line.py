"""What a terminal's last line says, and how it gives way to what is printed."""

from __future__ import annotations

import io
import re
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest

from elasticrt import events
from elasticrt.agent.console import Console
from elasticrt.agent.doing import Doing, doing, in_words
from elasticrt.agent.last_line import LastLine, fits
from elasticrt.event_log import EventLog
from elasticrt.ipc.messages import Step
from elasticrt.rendezvous.decision import Leave, Me, Register, Run, Wait
from elasticrt.rendezvous.records import HandoverRecord, Result
from elasticrt.story import sentences
from elasticrt.story.changes import Changes
from elasticrt.story.fold import Story
from elasticrt.story.report import paces, summary
from tests.unit.story.told import THREE_STEPS, begun, record, started, story

SPEC = SimpleNamespace(min_nodes=3, join_timeout_s=600.0)
ME = Me(record=SimpleNamespace(node="a", incarnation="1", warm=True), spec=SPEC)
COLD = replace(ME, record=SimpleNamespace(node="a", incarnation="1", warm=False))
OTHER = SimpleNamespace(node="a", incarnation="2", warm=True, address="10.0.0.9", probe_port=1, pid=7)
SEAT = object()


def view(*members: str, short: float | None = None, **fields: object) -> SimpleNamespace:
    """What a leader that may have a seat knows."""
    seated, newcomers = fields.pop("seated", False), fields.pop("newcomers", "")
    returned, ready = fields.pop("returned", ""), fields.pop("ready", "")
    basic = {
        "handover": None,
        "is_leader": True,
        "members_complete": True,
        "generation": None,
        "generation_number": 0,
        "roster_known": True,
    }
    # Who has come back since the generation began has another life, and may have set up already.
    lives = {
        name: SimpleNamespace(record=SimpleNamespace(incarnation=1 + (name in returned), ready=name in ready))
        for name in members
    }
    known = {**basic, "members": lives, "too_few_since": short, **fields}
    seated_nodes = [name for name in members if name not in newcomers]
    known["seats_in_rank_order"] = lambda: [SimpleNamespace(node=name, incarnation=1) for name in seated_nodes]
    return SimpleNamespace(**known, seat_of=lambda *_: SEAT if seated else None)


GENERATION = SimpleNamespace(record=SimpleNamespace(number=2, nodes=3, attempt=1, last=None, waits=False))
WAITING = SimpleNamespace(record=SimpleNamespace(number=2, nodes=2, attempt=1, last=None, waits=True))
HANDOVER = SimpleNamespace(record=HandoverRecord(generation=1, cause="b drained", step=120))


@pytest.mark.parametrize(
    ("me", "seen", "decision", "workers", "drain_until", "found"),
    [
        pytest.param(
            ME, view("a", "b", short=5.0), Wait("2 nodes; 3 needed"), "", None,
            Doing("waiting for nodes", "a, b here, 1 missing", 605.0), id="who is here, how many lack, until when",
        ),
        pytest.param(
            replace(ME, running_generation=2),
            view("a", "b", short=5.0, generation=WAITING, generation_number=2, seated=True),
            Wait("2 nodes; 3 needed"), "", None,
            Doing("waiting for nodes", "a, b here, 1 missing", 605.0), id="survivors wait with their state",
        ),
        pytest.param(
            replace(ME, running_generation=2),
            view("a", "b", is_leader=False, generation=WAITING, generation_number=2, seated=True),
            Wait("b leads"), "", None,
            Doing("waiting for nodes", "a, b here, 1 missing"), id="survivors wait, and another one leads",
        ),
        pytest.param(
            replace(ME, running_generation=2),
            view("a", "b", "c", newcomers="c", generation=WAITING, generation_number=2, seated=True),
            Wait("2 of 3 nodes ready; others are setting up", 9.0), "", None,
            Doing("waiting for nodes", "a, b here, c is setting up"), id="a newcomer is no missing node",
        ),
        pytest.param(
            replace(ME, running_generation=2),
            view(
                "a", "b", "c", newcomers="c", returned="b", ready="c", generation=WAITING, generation_number=2,
                seated=True,
            ),
            Wait("2 of 3 nodes ready; others are setting up", 9.0), "", None,
            Doing("waiting for nodes", "a, c here, b is setting up"), id="a newcomer is ready before one that is back",
        ),
        pytest.param(
            replace(ME, running_generation=2, spec=SimpleNamespace(min_nodes=5, join_timeout_s=600.0)),
            view(
                "a", "b", "c", "d", newcomers="cd", is_leader=False, generation=WAITING, generation_number=2,
                seated=True,
            ),
            Wait("b leads"), "", None,
            Doing("waiting for nodes", "a, b here, c, d are setting up, 1 missing"), id="newcomers, and too few",
        ),
        pytest.param(
            replace(ME, running_generation=2),
            view("a", "b", short=5.0, generation=GENERATION, generation_number=2, seated=True),
            Wait("training"), "", None, None, id="training, with fewer nodes than a new minimum",
        ),
        pytest.param(
            COLD, view("a", is_leader=False), Wait("b leads"), "", None, Doing("importing torch"), id="not warm"
        ),
        pytest.param(
            ME, view("a", is_leader=False), Wait("b leads"), "", None, Doing("waiting for the others", "b leads"),
            id="another one leads",
        ),
        pytest.param(
            ME, view("a", generation=GENERATION, generation_number=2), Wait("training"), "", None,
            Doing("standing by", "generation 2 has 3 nodes"), id="a standby",
        ),
        pytest.param(
            ME, view("a", generation=GENERATION, seated=True), Wait("training"), "preparing data", None,
            Doing("preparing data"), id="what its workers do",
        ),
        pytest.param(
            ME, view("a", generation=GENERATION, seated=True), Wait("training"), "", None, None, id="training"
        ),
        pytest.param(
            ME, view("a", generation=GENERATION, seated=True), Wait("c will join", 9.0), "", None,
            Doing("waiting", "c will join"), id="what the leader waits for",
        ),
        pytest.param(
            ME, view("a", generation=GENERATION, seated=True, handover=HANDOVER), Run("", None, None), "", 25.0,
            Doing("handing over", "b drained, all workers stop after step 120", 25.0), id="a node drains",
        ),
        pytest.param(
            replace(ME, record=OTHER), view(members={"a": SimpleNamespace(record=OTHER)}), Register(""), "", None,
            Doing("waiting for the others"), id="a former life of its own has the name",
        ),
        pytest.param(
            replace(ME, record=SimpleNamespace(**{**vars(OTHER), "pid": 8})),
            view(members={"a": SimpleNamespace(record=OTHER)}), Register(""), "", None,
            Doing("waiting for this node's name", "the agent with pid 7 at 10.0.0.9 uses it; stop one of the two"),
            id="another agent has the name",
        ),
    ],
)  # fmt: skip
def test_what_is_waited_for(me, seen, decision, workers, drain_until, found):  # noqa: PLR0917  Columns of a table.
    """All that takes long has a name, a state, and an end where it has one."""
    assert doing(me, seen, decision, workers=workers, drain_until=drain_until) == found


def test_waiting_in_words():
    """How long it lasts, and how long it may."""
    waits = Doing("waiting for nodes", "a, b here, 1 missing", 605.0)
    assert in_words(waits, 5.0, 17.0) == "waiting for nodes 12 s: a, b here, 1 missing; gives up in 9 min 48 s"
    assert in_words(Doing("preparing data"), 0.0, 150.0) == "preparing data 2 min 30 s"


def test_where_the_run_stands():
    """Generation, nodes of how many, step, speed, scalars, the checkpoint's age, goodput."""
    entries = [*THREE_STEPS, (5.0, "a", events.Step(1, 40, 3, {"loss": 0.12345})), (6.0, "a", events.Committed(38, 1))]
    said = sentences.now_at(story(entries), 9.0, 0.974, step=41)
    assert said == (
        "generation 1  2 nodes (1 to 4)  step 41  39.0 steps/s  epoch 3  loss 0.1235  checkpoint 38 (3 s ago)  "
        "goodput 97%"
    )
    assert sentences.now_at(Story(), 0.0) == ""


@pytest.mark.parametrize(
    ("reached", "lost", "said"),
    [
        (50, True, "step 50 is saved, steps 51 to 75 are not"),
        (50, False, "step 50 is saved; the node of rank 0 says whether step 75 is saved; to go on: the same command"),
        (75, False, "step 75 is saved; to go on: the same command"),
        (0, True, "no step is saved, steps 1 to 75 are not"),
    ],
)
def test_a_node_that_leaves_without_a_handover_says_what_is_not_saved(reached, lost, said, tmp_path, capsys):
    """As far as it knows: it was to save step 75; so does one that leaves after it."""
    options = SimpleNamespace(events_fd=-1, quiet=False, log_format="text")
    edges = SimpleNamespace(how_to_join=None, event_log=EventLog)
    console = Console(SimpleNamespace(node="a", run_dir=tmp_path, run_id="calm-fox", options=options), edges)
    head = SimpleNamespace(reached=reached) if reached else None
    console.left(Leave("not handed over within 15 s", save_step=75), head, lost=lost)
    assert said in capsys.readouterr().err


def test_a_leave_that_a_hang_keeps_from_saving_names_it(tmp_path, capsys):
    """What is not saved, the rank that makes no step, and what to do about it."""
    options = SimpleNamespace(events_fd=-1, quiet=False, log_format="text")
    edges = SimpleNamespace(how_to_join=None, event_log=EventLog)
    console = Console(SimpleNamespace(node="a", run_dir=tmp_path, run_id="calm-fox", options=options), edges)
    for event in (started(), begun(1, "a", "start"), events.FirstStep(1, 1, 0, None, None), events.Step(1, 75, 0, {})):
        console.events.write(event)
    console.events.write(events.Culprit(1, 75, 4.0, (0,), ("a",), "rank 0 on a sleeps"))
    console.left(Leave("not handed over within 15 s", save_step=75), None, lost=True)
    said = "no checkpoint; step 75 could not be saved: a left before the step was saved"
    assert said in paces(console.story), "for every view"
    said = r"are not; no step for [45] s after step 75: rank 0 on a sleeps\. A shorter --hang-timeout"
    assert re.search(said, capsys.readouterr().err)


def test_saves_that_fail_and_succeed_again(tmp_path, capsys):
    """The first checkpoint after one that could not be saved is told; others are not."""
    options = SimpleNamespace(events_fd=-1, quiet=False, log_format="text")
    edges = SimpleNamespace(how_to_join=None, event_log=EventLog)
    console = Console(SimpleNamespace(node="a", run_dir=tmp_path, run_id="calm-fox", options=options), edges)
    for event in (started(), begun(1, "a", "start"), events.Unsaved(60, 1, "No space left on device (ckpt)")):
        console.events.write(event)
    for step in (70, 80):
        console.committed(events.Committed(step, 1))
    assert capsys.readouterr().err == "elasticrt: step 70 is saved: checkpoints can be saved again\n"
    assert (tmp_path / "events-a.jsonl").read_text().count('"committed"') == 2


@pytest.mark.parametrize(
    ("nodes", "reached", "unsaved", "said"),
    [
        ("a", 50, 75, "step 75 was not handed over, and no checkpoint has it: steps 51 to 75 are lost\n"),
        ("ab", 50, None, "are lost unless another node's workers go on\n"),
        ("a", 75, None, ""),
    ],
    ids=["it has trained alone", "another one has trained", "it is saved"],
)
def test_a_late_leave_tells_what_is_lost(nodes, reached, unsaved, said, tmp_path, capsys):  # noqa: PLR0917  Columns.
    """While other nodes stand by, or train: a step that only this node had made is told to all views."""
    options = SimpleNamespace(events_fd=-1, quiet=True, log_format="text")
    edges = SimpleNamespace(how_to_join=None, event_log=EventLog)
    console = Console(SimpleNamespace(node="a", run_dir=tmp_path, run_id="calm-fox", options=options), edges)
    for event in (started(), begun(1, nodes, "start"), events.FirstStep(1, 1, 0, None, None)):
        console.events.write(event)
    console.left(Leave("late", others_go_on=True), SimpleNamespace(reached=reached), late_after=75)
    assert capsys.readouterr().err.endswith(said)
    assert (console.story.checkpoints.unsaved.step if console.story.checkpoints.unsaved else None) == unsaved


@pytest.mark.parametrize("go_on", [True, False])
def test_who_leaves_says_how_the_run_went(go_on, tmp_path, capsys):
    """The same lines as at the end of a run, before the one on how to go on, or to come back."""
    options = SimpleNamespace(events_fd=-1, quiet=False, log_format="text")
    edges = SimpleNamespace(how_to_join=None, event_log=EventLog)
    console = Console(SimpleNamespace(node="a", run_dir=tmp_path, run_id="calm-fox", options=options), edges)
    for event in (started(), begun(1, "ab", "start"), events.FirstStep(1, 1, 0, None, None), events.Step(1, 75, 0, {})):
        console.events.write(event)
    console.left(Leave("SIGINT received", others_go_on=go_on), None)
    said = capsys.readouterr().err.splitlines()
    assert said[0].startswith("elasticrt: generation 1: 2 nodes, world size 2, first step 1 after 0.")
    assert said[1].startswith("elasticrt: seen from this node: 75 steps")
    assert said[-2] == f"elasticrt: more: elasticrt report {tmp_path}"
    assert said[-1].startswith("elasticrt: to bring this node back" if go_on else "elasticrt: to go on")


def test_a_directory_that_could_not_be_made_is_not_named(tmp_path, capsys):
    """Where nothing is kept, no line at the end names a report of it."""
    options = SimpleNamespace(events_fd=-1, quiet=False, log_format="text")
    edges = SimpleNamespace(how_to_join=None, event_log=EventLog)
    (tmp_path / "runs").touch()
    run_dir = tmp_path / "runs" / "calm-fox"
    console = Console(SimpleNamespace(node="a", run_dir=run_dir, run_id="calm-fox", options=options), edges)
    for event in (started(), begun(1, "a", "start"), events.FirstStep(1, 1, 0, None, None)):
        console.events.write(event)
    console.left(Leave("SIGINT received"), None)
    said = capsys.readouterr().err
    assert "1 step" in said
    assert str(run_dir) not in said


@pytest.mark.parametrize("leaves", [True, False])
def test_a_node_that_has_stood_by_names_the_newest_checkpoint(leaves, tmp_path, capsys):
    """That of the run, which others have saved since it had a seat: when it leaves, and when the run ends."""
    options = SimpleNamespace(events_fd=-1, quiet=False, log_format="text")
    edges = SimpleNamespace(how_to_join=None, event_log=EventLog)
    console = Console(SimpleNamespace(node="a", run_dir=tmp_path, run_id="calm-fox", options=options), edges)
    stands_by = events.StandsBy(2, 1, "b joined", "join", 0, ("b",), 50, in_place=False, waits=False, age_s=0.0)
    stepped = (events.FirstStep(1, 1, 0, None, None), events.Step(1, 50, 0, {}), events.Committed(50, 1))
    for event in (started(), begun(1, "ab", "start"), *stepped, stands_by):
        console.events.write(event)
    if leaves:
        console.left(Leave("SIGTERM received"), SimpleNamespace(reached=60))
    else:
        result = {"attempt": 1, "status": "failed", "code": 1, "reason": "rank 0 on b", "generation": 2, "step": 60}
        console.ended(Result(**result), leads=True)
    said = capsys.readouterr().err
    assert "newest checkpoint: step 60" in said
    assert "step 60 is saved; to go on: " in said
    assert "step 50" not in said.partition("seen from this node")[2]


@pytest.mark.parametrize(("rank", "shown"), [(1, "epoch 3  loss 0.5  checkpoint 38"), (0, "step 1")])
def test_a_node_without_rank_0_knows_as_much(rank, shown, tmp_path):
    """Epoch, loss and checkpoint are rank 0's events; elsewhere they come from the own workers, and from the run."""
    options = SimpleNamespace(events_fd=-1, quiet=True)
    edges = SimpleNamespace(how_to_join=None, event_log=EventLog)
    console = Console(SimpleNamespace(node="a", run_dir=tmp_path, options=options), edges)
    for event in (started(), begun(1, "ba", "start"), events.WorkersStarted(1, (rank,), (11,))):
        console.events.write(event)
    console.events.write(events.FirstStep(1, 1, 0, None, None))
    written, now = (tmp_path / "events-a.jsonl").read_text(), time.monotonic()
    head = SimpleNamespace(record=SimpleNamespace(nonce="1f", reached=38, generation=1, size=7))
    console.note_step(1, rank, Step(40, 3, time.monotonic_ns(), 0, False, {"loss": 0.5}))
    console.tick(now, None, 40, head)
    assert shown in sentences.now_at(console.story, time.time())
    assert ("loss" in summary(console.story)[0]) is (rank != 0)
    assert (tmp_path / "events-a.jsonl").read_text() == written, "they are no events of this node"


class Terminal(io.StringIO):
    """One that keeps what is written."""

    def isatty(self) -> bool:
        """It is a terminal."""
        return True


def test_the_goodput_of_the_last_line_is_that_of_the_run(tmp_path, monkeypatch):
    """As soon as there is a step, and never much older: `status` would say the same."""
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    options = SimpleNamespace(events_fd=-1, quiet=False, log_format="text")
    edges = SimpleNamespace(how_to_join=None, event_log=EventLog)
    console = Console(SimpleNamespace(node="a", run_dir=tmp_path, run_id="calm-fox", options=options), edges)
    console.open_last_line()
    now = time.monotonic()
    console.tick(now, None)
    for event in (started(), begun(1, "a", "start"), events.WorkersStarted(1, (0,), (11,)), events.SetUp(1, {})):
        console.events.write(event)
    console.note_step(1, 0, Step(1, 0, time.monotonic_ns(), 0, True, {}))
    for later_s in (1.0, 2.0, 3.0):
        console.tick(now + later_s, None, 1)
        shown = terminal.getvalue().rpartition("goodput ")[2]
        assert shown.startswith(f"{console.story.goodput(now + console.clock_offset_s + later_s):.0%}")
    console.close_last_line()


STEP = events.FirstStep(2, 51, 50, 0.11, 0)
NO_LOOP = events.Recovery(2, 0.25, {"first_step": 250.0})
WARM = [(at + 1.0, node, event) for at, node, event in THREE_STEPS if node == "a"]


@pytest.mark.parametrize(
    ("after", "said"),
    [
        ([(6.1, STEP)], ["generation 2: b lost, 1 node, world size 1, paused 0.11 s after step 50, no step lost"]),
        (
            [(6.2, NO_LOOP)],
            ["generation 2: b lost, 1 node, world size 1, paused 0.25 s; what the script had not saved is done again"],
        ),
        (
            [(10.0, None), (10.5, STEP)],
            [
                "generation 2: b lost, 1 node, world size 1",
                "generation 2: paused 0.11 s after step 50, no step lost",
            ],
        ),
        ([(8.9, None)], []),
    ],
    ids=["with its cost at once", "without a Loop", "a late cost comes alone", "not before three seconds"],
)
def test_a_change_is_one_sentence(after, said):
    """An agent says a change as soon as its own node has stepped, or after three seconds."""
    changes, told = Changes(Story()), []
    for at, node, event in [*WARM, (6.0, "a", begun(2, "a", cause="b lost"))]:
        told += changes.fold(record(at, node, event))
    assert [text for _, text in told] == ["generation 1: 2 nodes, world size 2, first step 1 after 2.00 s"]
    told = []
    for at, event in after:
        told += changes.tick(at) if event is None else changes.fold(record(at, "a", event))
    assert [text for _, text in told] == said


def test_the_line_gives_way():
    """What is printed goes above it; while a line is unfinished that one stays the last."""
    terminal = io.StringIO()
    line = LastLine(terminal)
    line.draw("step 1")
    with line.aside(ends_line=True):
        terminal.write("words\n")
    line.draw("step 2")
    with line.aside(ends_line=False):
        terminal.write("50 %")
    line.draw("step 3")
    with line.aside(ends_line=True):
        terminal.write(" 100 %\n")
    line.draw("step 4")
    line.draw("")
    assert screen(terminal.getvalue()) == ["words", "50 % 100 %", ""]
    assert "step 3" not in terminal.getvalue()
    assert "step 4" in terminal.getvalue()


def screen(written: str) -> list[str]:
    """What a terminal shows of `written`, which goes back to a line's beginning and clears it."""
    lines = [""]
    for piece in written.replace("\r\x1b[K", "\r").replace("\x1b[K", "").split("\n"):
        lines[-1] = (lines[-1] + piece).rpartition("\r")[2]
        lines.append("")
    return lines[:-1]


def test_a_line_takes_no_more_than_its_row():
    """The terminal cuts it: the line is written while the terminal does not wrap, as it does again after that."""
    terminal = io.StringIO()
    LastLine(terminal).draw("step 1 of many")
    assert re.fullmatch(r"\r\x1b\[K\x1b\[\?7l.*step 1 of many.*\x1b\[\?7h", terminal.getvalue())


@pytest.mark.parametrize(("term", "there"), [("xterm", True), ("dumb", False), ("", False)])
def test_which_terminal(term, there):
    """A line can be taken back by a terminal that knows how, and by nothing else."""
    shown = SimpleNamespace(isatty=lambda: True)
    assert fits(shown, {"TERM": term}) is there
    assert not fits(io.StringIO(), {"TERM": "xterm"})
    assert not fits(None, {})
