"""Whatever a worker writes before it fails, and however much of it, its node's report is read by everybody."""

from __future__ import annotations

import json
import os

import pytest

from elasticrt.ipc.messages import BuildDone, Unsaved, decode, encode
from elasticrt.rendezvous.records import Keys, Result
from elasticrt.rendezvous.view import View, apply
from elasticrt.store.protocol import Event, KeyValue
from elasticrt.workers.failures import Remains, failure_of, stalled_failure
from tests.unit.workers.states import ended, worker

KEYS = Keys("r")
PIECES = {"NUL": "\0", "CJK": "漢", "emoji": "🦊", "surrogate": "\udce9", "quote": '"', "escape": "\x1b[2J"}
"""What takes more bytes on its way than it has characters, or none at all."""


def _seen(report) -> object:
    """What a leader that reads the report knows of it; None where it takes it for somebody else's."""
    key = KEYS.report(report.generation, report.node)
    event = Event(key, KeyValue(key, report.encode(), 5, 5), 5)
    view = apply(View("node-0"), KEYS, [event], 0.0)
    return view.reports_by_key[key].record if key in view.reports_by_key else None


@pytest.mark.parametrize("piece", PIECES.values(), ids=PIECES)
def test_a_report_of_any_output_is_read_by_the_leader(piece):
    """Full lines of what grows on its way: in the output, the exception, the stacks and the log's path."""
    lines = [piece * 400 for _ in range(60)]
    said = json.dumps({"message": {"message": f"{piece * 300}: {piece * 3000}", "extraInfo": {}}})
    failed = [
        failure_of(worker("n0", rank, 1), Remains(1, error_file=said, last_lines=lines, log_path=f"/{piece * 2000}"))
        for rank in range(40)
    ]
    hung = [stalled_failure(node="n0", generation=1, message="no progress", stacks=dict.fromkeys(range(3), lines))]
    lost = failure_of(worker("n0", 0, 1), Remains(126, start_error=piece * 9000))
    for failures in (failed, hung, [lost]):
        report = ended(40, failures=tuple(failures))
        assert _seen(report) == report
        result = Result(attempt=1, status="failed", code=1, reason=piece * 5000, generation=1, text=piece * 9000)
        assert type(result).model_validate_json(result.encode()) == result


def test_the_last_line_is_in_the_report():
    """Of more output than a report holds, the end is what is shown, and where the whole of it is."""
    lines = [f"line {number} " + "漢" * 380 for number in range(59)] + ["ValueError: at last"]
    found = failure_of(worker("n0", 0, 1), Remains(1, last_lines=lines, log_path="/logs/rank-0.n0.err"))
    report = ended(1, failures=(found,))
    assert report.failure.text.endswith("  | ValueError: at last\n  log: /logs/rank-0.n0.err")


def test_a_report_gives_a_terminal_no_orders():
    """Colours are left out, and all else that a terminal obeys is shown as what it is."""
    said = json.dumps({"message": "ValueError: \x1b]0;owned\x07 \x9b2J \x1b[31mred\x1b[0m \u202etxt.exe"})
    found = failure_of(worker("n0", 0, 1), Remains(1, error_file=said))
    report = ended(1, failures=(found,))
    assert r"ValueError: \x1b]0;owned\x07 \x9b2J red \u202etxt.exe" in report.failure.text


def test_an_error_file_of_brackets_is_no_error_file():
    """A worker that writes nonsense as its error file costs the exception's name, and no thread of the agent."""
    assert failure_of(worker("n0", 0, 1), Remains(1, error_file="[" * 100_000)).code == 1


@pytest.mark.parametrize("piece", [*PIECES.values(), os.fsdecode(b"caf\xe9")])
def test_a_message_arrives_as_it_was(piece):
    """Between workers and their agent every text travels whole, of whatever it consists."""
    for message in (BuildDone(1, piece, piece * 200, piece * 1000), Unsaved(3, piece * 1000)):
        assert decode(encode(message)) == message


@pytest.mark.parametrize(
    "frame",
    [
        b"[" * 100_000,
        b'{"kind": ["ScriptDone"]}',
        b'{"kind": "ScriptDone", "code": "0"}',
        b'{"kind": "ScriptDone", "code": true}',
        b'{"kind": "ClaimBuild", "request": 1, "name": "x", "version": 5}',
        b'{"kind": "Save", "request": 1, "commit": [], "replaces": ""}',
    ],
)
def test_what_is_no_message_is_refused(frame):
    """Of another type, or as deep as no message: ValueError, and nothing else."""
    with pytest.raises(ValueError, match="not a message"):
        decode(frame)
