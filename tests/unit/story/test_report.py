"""What is reported of a run: as text, as a page, and by the commands that read its directory."""

from __future__ import annotations

import json
import os
import re
import shlex
import threading
import time
from datetime import datetime, timezone
from pathlib import Path

import pytest

from elasticrt import events
from elasticrt.cli.main import main
from elasticrt.story.report import columns, generation_table, head, report, seconds, summary
from tests.servers import wait_until
from tests.unit.story.told import THREE_STEPS, begun, started, story, warm, write

PAUSE = {"detect": 100.0, "agree": 200.0, "stop": 0.0, "script": 50.0, "init": 50.0, "restore": 100.0}
LOST = [
    *THREE_STEPS,
    (8.0, "a", events.Step(1, 40, 0, {"loss": 0.5})),
    (10.0, "a", events.MemberLost("b", "b lost")),
    (10.0, "a", begun(2, "a", "lost", "b lost")),
    (10.5, "a", events.FirstStep(2, 31, 30, 0.5, 10)),
    (10.5, "a", events.Recovery(2, 0.5, PAUSE)),
    (12.0, "a", events.Step(2, 60, 1, {"loss": 0.25})),
    (12.0, "a", events.Committed(60, 2)),
    (13.0, "a", events.Result("succeeded", 0, "all ended well")),
    (13.0, "a", events.AgentStopped(0)),
]
TEXT = """\
run calm-fox: succeeded: all ended well
2 nodes: a, b
60 steps, 7.4 steps/s, loss 0.25; newest checkpoint: step 60
goodput 62.4% of 22.5 s on 2 nodes; set-up 13.3%, start 8.9%, waiting for nodes 6.7%
1 change of membership, the longest pause 0.50 s; 10 steps done again

where the time went  all nodes         a                 b
train                  14.0 s  62.38%     8.0 s  61.80%     6.0 s  63.16%
redone steps           0.47 s   2.07%    0.47 s   3.58%  -
detect                 0.10 s   0.44%    0.10 s   0.77%  -
agree                  0.20 s   0.89%    0.20 s   1.54%  -
re-form                0.60 s   2.67%    0.35 s   2.69%    0.25 s   2.63%
set-up                  3.0 s  13.33%     1.5 s  11.54%     1.5 s  15.79%
restore                0.60 s   2.67%    0.35 s   2.69%    0.25 s   2.63%
start                   2.0 s   8.89%     1.0 s   7.69%     1.0 s  10.53%
waiting for nodes       1.5 s   6.67%     1.0 s   7.69%    0.50 s   5.26%
total                  22.5 s 100.00%    13.0 s 100.00%     9.5 s 100.00%

generation  cause   nodes  world size  from step  pause   steps done again  longest phases
1           start   2      2           0          -       0          start 0.50 s, script 0.50 s, first_step 0.50 s
2           b lost  1      1           30         0.50 s  10                agree 0.20 s, detect 0.10 s, restore 0.10 s

failures by node
  b: 1 (b lost)

what happened (UTC)
1970-01-01 00:00:02  generation 1: 2 nodes, world size 2
1970-01-01 00:00:04  first step 1 after 2.00 s
1970-01-01 00:00:10  b lost
1970-01-01 00:00:10  generation 2: b lost, 1 node, world size 1
1970-01-01 00:00:10  paused 0.50 s after step 40, 10 steps done again
1970-01-01 00:00:13  the run succeeded: all ended well"""


def words_of(text):
    """The words of each line, but for rules."""
    return [line.split() for line in text.splitlines() if set(line) != {"-"}]


def test_the_report_as_text():
    """Result, goodput, the time of the run and of each node, the generations with their cost, the failures."""
    assert words_of("\n".join(report(story(LOST)))) == words_of(TEXT)


def test_a_run_of_many_nodes_and_generations():
    """Many nodes have no column each, no line is without end, and each generation is there, with what happened."""
    many = [
        (float(at), name, events.AgentStarted(1, "r", "e", "d", "m", 1, 99))
        for at, name in enumerate(f"n{place}" for place in range(40))
    ]
    changes = [(50.0 + number, "n0", begun(number, "ab", "lost", "a lost")) for number in range(1, 60)]
    lines = report(story([*many, *changes]))
    assert max(map(len, lines)) <= 130
    assert "40 nodes: n0, n1, n10, n11, n12 and 35 more" in lines
    assert [line.split()[:3] for line in lines if "a lost  " in line] == [[str(at), "a", "lost"] for at in range(1, 60)]
    assert len([line for line in lines if " generation " in line]) == 59
    assert any(line.endswith("all nodes") for line in lines)


def test_a_long_cause_is_wrapped():
    """What has hung, and who waits for it, may be at its end."""
    cause = f"no progress for 30 s after step 20: rank 2 on b waits for its {'very ' * 20}own code, train.py:46"
    text = "\n".join(generation_table(story([*THREE_STEPS, (10.0, "a", begun(2, "a", "failure", cause))])))
    assert " ".join(re.sub(r" {2,}1 {2,}1 .*", "", text).split()).endswith(cause)
    assert max(map(len, text.splitlines())) < 200


def test_a_node_that_has_stood_by_counts_the_steps_since_it_was_let_in():
    """In the lines at its end, which are of its own events; one that was never let in has none."""
    stood_by = [
        (0.0, "c", started()),
        (0.5, "c", events.StandsBy(**vars(begun(1, "ab", "start")), age_s=0.0)),
        (1.0, "c", warm()),
    ]
    let_in = [
        (30.0, "c", begun(2, "abc", "join")),
        (31.0, "c", events.FirstStep(2, 501, 500, None, None)),
        (36.0, "c", events.Progress(2, 551, 0.0, 0.0, 0.0)),
    ]
    assert summary(story(stood_by)) == []
    assert summary(story([*stood_by, *let_in]))[0] == "seen from this node: 51 steps, 10.0 steps/s"


def test_a_node_that_stands_by_at_the_end_claims_no_more_than_it_knows():
    """The newest step is known by its commit; its own last step tells the speed, and numbers of that are not shown."""
    told = [
        *THREE_STEPS,
        (7.0, "a", events.Step(1, 30, 0, {"loss": 3.5})),
        (8.0, "a", events.StandsBy(**vars(begun(2, "c", "failure")))),
        (60.0, "a", events.Committed(300, 2)),
    ]
    line = summary(story(told))[0]
    assert line.startswith("seen from this node: 300 steps, ")
    assert line.endswith("newest checkpoint: step 300")
    assert float(line.split(", ")[1].removesuffix(" steps/s; newest checkpoint: step 300")) < 30
    assert "loss" not in line


@pytest.mark.parametrize(("saved", "said"), [(60, "step 60"), (50, "step 50, and nothing after it is saved")])
def test_steps_that_a_run_that_succeeded_has_not_saved_are_told(saved, said):
    """Its script has ended inside the loop, by `sys.exit(0)` for one."""
    ends = [(9.0, "a", events.Step(1, 60, 0)), (9.1, "a", events.Committed(saved, 1))]
    told = story([*THREE_STEPS, *ends, (10.0, "a", events.Result("succeeded", 0, "all ended well"))])
    assert any(line.endswith(f"; newest checkpoint: {said}") for line in head(told))


def test_a_file_without_its_end_claims_nothing_of_saves():
    """The node of rank 0 has saved, and the end of its file is cut off: what it saved last is not known."""
    ends = [(9.1, "a", events.Committed(50, 1)), (9.5, "b", events.Progress(1, 60, 0.0, 0.0, 0.0))]
    told = story([*THREE_STEPS, *ends, (10.0, "b", events.Result("succeeded", 0, "all ended well"))])
    assert any(line.endswith("; newest checkpoint: step 50") for line in head(told))


def test_a_node_does_not_know_what_others_have_saved():
    """It had rank 0 once. Since then another node saves, whose events are elsewhere."""
    moved = [(9.0, "a", events.Committed(50, 1)), (9.5, "a", begun(2, "ac", "join")), (9.9, "a", events.Step(2, 60, 0))]
    told = story([*THREE_STEPS, *moved, (10.0, "a", events.Result("succeeded", 0, "all ended well"))])
    assert any(line.endswith("; newest checkpoint: step 50") for line in head(told))


def test_a_run_without_a_step_claims_nothing():
    """It was at its end already: neither a goodput nor that no step was lost."""
    nothing = [entry for entry in THREE_STEPS if entry[0] < 4.0]
    ends = [(5.0, "a", events.Committed(60, 1)), (6.0, "a", events.Result("succeeded", 0, "all ended well"))]
    told = story([*nothing, *ends])
    assert head(told)[2:] == ["0 steps; newest checkpoint: step 60", "0 changes of membership"]


@pytest.mark.parametrize(
    ("value_s", "text"), [(0.07, "0.07 s"), (99.95, "100.0 s"), (612.34, "612.3 s"), (1000.0, "17 min")]
)
def test_durations_can_be_compared(value_s, text):
    """In seconds up to a thousand."""
    assert seconds(value_s) == text


@pytest.fixture
def run(tmp_path, monkeypatch):
    """The directory of the runs: one of them is that of `LOST`, with half a line at its end."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ELASTICRT_LOG_DIR", raising=False)
    directory = tmp_path / "elasticrt_runs" / "calm-fox"
    (directory / "logs" / "generation-1").mkdir(parents=True)
    (directory / "logs" / "generation-1" / "rank-0.a.out").write_text("hello\n")
    write(directory, LOST)
    with (directory / "events-b.jsonl").open("ab") as file:
        file.write(b'{"v": 1, "eve')
    write(tmp_path / "others" / "mute-fox", LOST)
    (tmp_path / "others" / "void-fox").mkdir()
    (tmp_path / "others" / "void-fox" / "events-a.jsonl").write_text("null")
    return tmp_path


@pytest.mark.parametrize("words", [["calm-fox"], ["elasticrt_runs/calm-fox"], []])
def test_an_ended_run_is_reported_from_its_directory(run, capsys, words):
    """By its name, by its directory, or as the newest; no etcd is asked."""
    assert main(["report", *words]) == 0
    assert words_of(capsys.readouterr().out) == words_of(TEXT)


def test_a_page_needs_nothing_else(run, capfd):
    """The page is one file: the run is inside it as data that cannot end the script, and nothing is loaded."""
    write(run / "elasticrt_runs" / "calm-fox", [(14.0, "a", events.Failure("ValueError: </pre><b>"))])
    assert main(["report", "--html", "report.html"]) == 0
    text = (run / "report.html").read_text()
    data = text.partition('id="saved">')[2].partition("</script>")[0]
    saved = json.loads(data)
    assert saved["board"]["tiles"]["goodput"] == "62.4%"
    assert saved["board"]["points"][0][2].keys() == {"loss"}
    assert "run calm-fox: succeeded: all ended well" in saved["text"]
    assert "ValueError: </pre><b>" in saved["text"]
    assert "<" not in data
    assert not [word for word in ("src=", "url(http", "@import", "https://") if word in text]
    assert capfd.readouterr().out == "written: report.html\n"
    assert main(["report", "--html", "nowhere/report.html"]) == 2
    assert "cannot be written (nowhere/report.html): got No such file" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("words", "code", "shown"),
    [
        ("runs", 0, "calm-fox"),
        ("status", 0, "run calm-fox: succeeded: all ended well\n2 nodes: a, b\n"),
        ("status --run-id calm-fox --watch", 0, "goodput 62.4%"),
        ("status --run-id other", 2, "the etcd of this run is not known on this machine (run other)"),
        ("logs calm-fox 0", 0, "==> logs/generation-1/rank-0.a.out <==\nhello\n"),
        ("logs calm-fox 7", 2, "got nothing was printed as rank 7; expected files"),
        (
            "logs others/mute-fox 0",
            2,
            "got nothing was printed as rank 0; expected files rank-R.NODE.out, .err. `elasticrt logs",
        ),
        ("events others/void-fox", 2, "no usable events in this directory (others/void-fox): got no event of an agent"),
        ("report other", 2, "no such run (other)"),
        ("report ''", 2, "not a usable value (RUN): got ''; expected some text"),
        ("stop ''", 2, "not a usable value (RUN): got ''; expected some text"),
        ("report --html ''", 2, "not a usable value (--html): got ''; expected some text"),
        ("runs --log-dir ''", 2, "not a usable value (--log-dir): got ''; expected some text"),
        ("run --log-dir '' train.py", 2, "not a usable value (--log-dir): got ''; expected some text"),
        ("runs --log-dir nowhere", 2, "no such directory (--log-dir): got nowhere"),
        ("events --log-dir nowhere", 2, "there is no run here (nowhere)"),
    ],
)
def test_what_a_directory_tells(run, capfd, words, code, shown):
    """The commands that read a run's directory say what is there, or in one line what is not."""
    assert main(shlex.split(words)) == code
    said = capfd.readouterr()
    assert shown in said.out + said.err


@pytest.mark.parametrize(("command", "code"), [("report", 2), ("status", 2), ("stop", 2)])
def test_events_that_cannot_be_read(command, code, tmp_path, monkeypatch, capfd):
    """It is said of which file, and why: not that there is no such run."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    (tmp_path / "keen-koala").mkdir()
    path = tmp_path / "keen-koala" / "events-a.jsonl"
    path.symlink_to("nowhere")  # Permissions do not stop root.
    assert main([command, "keen-koala", "--log-dir", str(tmp_path)]) == code
    said = capfd.readouterr().err
    assert f"events that cannot be read ({path}): got No such file or directory. Check the path and its perm" in said


def test_logs_that_cannot_be_read(run, capfd):
    """They are not taken for workers that have printed nothing."""
    path = run / "elasticrt_runs" / "calm-fox" / "logs" / "generation-2"
    path.symlink_to("nowhere")
    assert main(["logs", "calm-fox", "7"]) == 2
    assert "logs that cannot be read (" in capfd.readouterr().err


def test_nodes_are_in_the_order_of_their_names():
    """As `status` shows them, whichever agent was first."""
    entries = [(at, {"a": "n2", "b": "n1"}[node], event) for at, node, event in THREE_STEPS]
    assert head(story(entries))[1] == "2 nodes: n1, n2"
    assert list(columns(story(entries))) == ["all nodes", "n1", "n2"]


def test_the_list_of_runs_says_which_node_is_slow(tmp_path, capsys):
    """As `status` and `report` do, while the run goes on."""
    begin = time.time() - 10.0
    entries = [*THREE_STEPS, (9.0, "a", events.Straggler(1, 30, "b", 0.04, 0.01))]
    write(tmp_path / "slowly", [(begin + at, node, event) for at, node, event in entries])
    assert main(["runs", "--log-dir", str(tmp_path)]) == 0
    assert "  running; b is slow: its own work takes 40 ms of a step" in capsys.readouterr().out


def test_the_state_of_an_ended_run_for_programs(run, capsys):
    """`status --json` is one object with the result, the seconds by bucket, the generations and the failures."""
    assert main(["status", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["run_id"], found["result"]["status"], found["step"]) == ("calm-fox", "succeeded", 60)
    assert sum(found["seconds_by_node"]["a"].values()) == pytest.approx(13.0)
    assert [each["number"] for each in found["generations"]] == [1, 2]
    assert [each["node"] for each in found["failures"]] == ["b"]
    assert main(["runs", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == found


@pytest.mark.parametrize("command", [["report"], ["events"], ["events", "-f"], ["logs"], ["status"]])
@pytest.mark.parametrize("variable", ["ELASTICRT_RUN_ID", "PET_RDZV_ID", "PET_RDZV_ENDPOINT"])
def test_a_run_that_a_variable_names(run, command, variable, monkeypatch, capfd):
    """All views take it as `elasticrt run` does, for the newest only where nothing is named."""
    monkeypatch.setenv(variable, "no-such-run")
    if "-f" in command:
        write(run / "elasticrt_runs" / "no-such-run", [entry for entry in LOST if entry[1] == "a"])
        assert main(command) == 0
        assert "waiting for" not in capfd.readouterr().err
    else:
        assert main(command) == 2
        assert "no-such-run" in capfd.readouterr().err


@pytest.mark.parametrize(("command", "shown"), [("events", '"agent_stopped"'), ("logs", "==> logs/generation-1/")])
def test_following_ends_with_the_run(run, command, shown, capsys):
    """At once for one that has ended; else it says that it waits, also for the first event, and ends with the last."""
    assert main([command, "calm-fox", "--follow"]) == 0
    said = capsys.readouterr()
    assert shown in said.out
    assert said.err == ""
    directory = run / "elasticrt_runs" / "keen-koala"
    following = threading.Thread(target=main, args=([command, "keen-koala", "--follow"],))
    following.start()
    waits = "elasticrt: waiting for the first event of keen-koala in elasticrt_runs, until Ctrl-C\n"
    wait_until(lambda: waits in capsys.readouterr().err, "it says what it waits for", 20)
    (directory / "logs" / "generation-1").mkdir(parents=True)
    (directory / "logs" / "generation-1" / "rank-0.a.out").write_text("half a line")
    write(directory, [entry for entry in LOST if entry[1] == "a"])
    following.join(20)
    assert not following.is_alive()
    assert shown in capsys.readouterr().out


def test_runs_that_have_ended_are_not_read_to_find_one(run):
    """To choose the newest run, or the one that lives, takes a little of each other's events only."""
    assert [main([word]) for word in ("status", "stop")] == [0, 2]  # What they import is read once.
    directory = run / "elasticrt_runs" / "old-owl"
    directory.mkdir()
    line = events.encode(events.Step(1, 1, 0, {}), "a", 0.0, datetime.now(timezone.utc)) + b"\n"
    (directory / "events-a.jsonl").write_bytes(line * (4_000_000 // len(line)))
    write(directory, LOST[-2:])
    os.utime(directory / "events-a.jsonl", (1, 1))
    before = _read_bytes()
    assert [main([word]) for word in ("status", "stop")] == [0, 2]
    assert _read_bytes() - before < 1_000_000


def _read_bytes() -> int:
    return int(re.search(r"rchar: (\d+)", Path("/proc/self/io").read_text())[1])


def test_events_come_in_the_order_of_time(run, capsys):
    """The lines of all nodes, merged; a line that is half is left out."""
    assert main(["events", "calm-fox"]) == 0
    found = [events.decode(line) for line in capsys.readouterr().out.splitlines()]
    assert [(each.time, each.node, each.event) for each in found if each] == LOST


def test_what_is_run_again_after_success_is_another_story() -> None:
    """`--again` begins anew: only the newest training is told."""
    again = [(20.0 + at, node, event) for at, node, event in THREE_STEPS]
    more = [(26.0, "a", events.Step(1, 9, 0, {})), (26.0, "a", events.Committed(9, 1))]
    told = story([*LOST, *again, *more])
    assert report(told) == report(story([*again, *more]))
    late = story([*LOST[:-1], (13.1, "c", started()), (13.2, "a", events.AgentStopped(0))])
    assert late.steps.newest == 60, "who comes while the others end begins nothing"


@pytest.mark.parametrize(("steps", "says"), [(False, "no step was seen"), (True, "steps are not counted")])
def test_a_run_whose_steps_have_no_numbers(*, steps: bool, says: str) -> None:
    """A run that succeeds without a step may have a Loop that had nothing left to do."""
    entries = [(at, node, event) for at, node, event in THREE_STEPS if at < 4]
    made = [(4.0, "a", events.SetUp(1, {"start": 500, "script": 1500}))] if steps else []
    told = story([*entries, *made, (9.0, "a", events.Result("succeeded", 0, "all ended"))])
    assert any(line.startswith(says) for line in report(told))
