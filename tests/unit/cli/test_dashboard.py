"""`elasticrt dashboard`: what it shows, to whom, and that a browser can draw it."""

from __future__ import annotations

import http.client
import json
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from elasticrt import events
from elasticrt.cli.dashboard import Server
from elasticrt.story.board import board
from tests.browser import browser
from tests.unit.story.told import THREE_STEPS, Entry, begun, story, write

KILLED: list[Entry] = [
    (10.0, "a", events.MemberLost("b", "its port refuses")),
    (10.01, "a", begun(2, "a", cause="lost node b: its port refuses")),
    (10.05, "a", events.FirstStep(2, 61, 60, 0.08, 0)),
]
LOSSES: list[Entry] = [(4.0 + at, "a", events.Step(1, 10 * at, 0, {"loss": 2.0 / at})) for at in range(1, 6)]
SCORE: Entry = (9.1, "a", events.Step(1, 51, 0, {"loss": 0.4, "accuracy": 0.5}))
"""A number that was first reported after an epoch."""

WORK: list[Entry] = [
    (9.5, "a", events.Progress(1, 50, 0.0, 0.0, 0.0, own_s=(0.02,))),
    (9.6, "b", events.Progress(1, 50, 0.0, 0.0, 0.0, own_s=(0.05,))),
    (9.7, "a", events.Committed(50, 1, 2_500_000, 0.4)),
]


def test_what_is_shown() -> None:
    """Nodes with their ranks, the time in the ribbon, the curves, and what happened in sentences."""
    shown = board(story([*THREE_STEPS, *LOSSES, *WORK, *KILLED]), 11.0)
    assert json.loads(json.dumps(shown)) == shown
    assert shown["tiles"]["world size"] == "1"
    assert shown["tiles"]["step"] == "61"
    assert [(node["name"], node["state"]) for node in shown["nodes"]] == [("a", "training"), ("b", "gone")]
    assert set(shown["ribbons"]) == {"a", "b"}
    assert shown["end"] == shown["ribbons"]["a"][-1][1] == 11.0
    assert [point[1] for point in shown["points"]] == [10, 20, 30, 40, 50]
    assert shown["work"] == {"rank 0": [[9.5, 20.0]], "rank 1": [[9.6, 50.0]]}
    assert shown["saves"] == {"text": "1 checkpoint; the newest: step 50, 2.5 MB in 0.40 s", "at": [9.7]}
    said = [text for _, _, text in shown["sentences"]]
    assert "generation 2: lost node b: its port refuses, 1 node, world size 1" in said
    assert "paused 0.08 s after step 60, no step lost" in said


def test_a_curve_of_steps_without_numbers() -> None:
    """A script that reports none has its steps drawn as well: live, later, and in a report."""
    steps: list[Entry] = [(5.0 + at, "a", events.Step(1, at, 0)) for at in range(3)]
    assert board(story([*THREE_STEPS, *steps]), 11.0)["points"] == [[5.0, 0, {}], [6.0, 1, {}], [7.0, 2, {}]]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    """One on loopback, with a run."""
    write(tmp_path / "calm-fox", [*THREE_STEPS, *LOSSES])
    with Server("127.0.0.1", 0, str(tmp_path)) as served:
        thread = threading.Thread(target=served.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        yield served
        served.shutdown()
        thread.join(10)


def ask(server: Server, path: str, host: str = "127.0.0.1", method: str = "GET") -> tuple[int, Any]:
    """The status, and the answer, which may still be told."""
    connection = http.client.HTTPConnection(*server.server_address[:2], timeout=10)
    connection.request(method, path, headers={"Host": host})
    answer = connection.getresponse()
    return answer.status, answer


def test_who_is_answered(server: Server) -> None:
    """The page and the runs, by an address or a name of this machine; without the token nobody, where there is one."""
    assert ask(server, "/runs")[1].read() == b'["calm-fox"]'
    status, page = ask(server, "/")
    assert (status, "default-src 'none'" in page.headers["Content-Security-Policy"]) == (200, True)
    assert b"http" not in page.read(), "nothing is loaded from elsewhere"
    assert {ask(server, path)[0] for path in ("/x", "/updates?run=..", "/updates", "http://[/")} == {404}
    assert ask(server, "/", "evil.example")[0] == 403
    assert ask(server, "/", method="POST")[0] == 501
    server.token = "a secret"
    assert [ask(server, path)[0] for path in ("/", "/runs?token=a", "/?token=a%20secret")] == [403, 403, 200]


def test_clients_that_are_gone(server: Server, capfd: pytest.CaptureFixture[str]) -> None:
    """Of a connection that is reset, in a request or before an answer, nothing is printed, and others get answers."""
    for sent in (b"GET / HT", b"GET / HTTP/9.9\r\n\r\n", b"\x16\x03\x01\x02\x00\x01", b"GET / HTTP/1.1\r\n\r\n") * 5:
        with socket.create_connection(("127.0.0.1", server.server_address[1])) as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            connection.sendall(sent)
    assert ask(server, "/runs")[0] == 200
    for thread in [each for each in threading.enumerate() if "process_request" in each.name]:
        thread.join(10)
    assert capfd.readouterr() == ("", "")


def test_other_addresses_need_a_token(tmp_path: Path) -> None:
    """On loopback the address is enough; anywhere else it has a token in it."""
    with Server("127.0.0.1", 0, str(tmp_path)) as own, Server("0.0.0.0", 0, str(tmp_path)) as open_to_all:
        assert own.url == f"http://127.0.0.1:{own.server_address[1]}/"
        assert len(open_to_all.token) > 30
        assert open_to_all.url.endswith(f"/?token={open_to_all.token}")


def test_a_place_without_runs_is_named(tmp_path: Path) -> None:
    """A page that has nothing to show yet says so, with where it looks: `--log-dir` may be mistyped."""
    command = [sys.executable, "-m", "elasticrt", "dashboard", "--log-dir", "nowhere"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=tmp_path) as served:
        assert served.stdout is not None
        url, said = (served.stdout.readline() for _ in range(2))
        served.terminate()
    assert url.startswith("http://127.0.0.1:")
    assert said == "no runs in nowhere yet; --log-dir names another place\n"


def test_updates_follow_the_events(server: Server, tmp_path: Path) -> None:
    """What is known is told at once, and again when the agents have written more."""
    status, answer = ask(server, "/updates?run=calm-fox")
    assert (status, answer.headers["Content-Type"]) == (200, "text/event-stream")
    sizes = (json.loads(line[6:])["tiles"]["world size"] for line in answer if line.startswith(b"data: "))
    assert next(sizes) == "2"
    write(tmp_path / "calm-fox", KILLED)
    assert next(size for size in sizes if size != "2") == "1"
    answer.close()


@pytest.mark.slow
def test_in_a_browser(tmp_path: Path) -> None:
    """The page draws a run and follows it, fits on a phone, in the dark as well, and its console has no error.

    It opens the run that its address asks for, and no other one where there is none of that name.
    """
    (tmp_path / "runs").mkdir(exist_ok=True)
    write(tmp_path / "runs" / "calm-fox", [*THREE_STEPS, *LOSSES, SCORE, *WORK])
    command = [sys.executable, "-m", "elasticrt", "dashboard", "--log-dir", str(tmp_path / "runs")]
    with browser(tmp_path / "browser") as page, subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as served:
        try:
            assert served.stdout is not None
            url = served.stdout.readline().strip()
            page.ask("Emulation.setDeviceMetricsOverride", width=390, height=844, deviceScaleFactor=2, mobile=True)
            dark = [{"name": "prefers-color-scheme", "value": "dark"}]
            page.ask("Emulation.setEmulatedMedia", features=dark)
            page.ask("Page.navigate", url=url)
            page.wait_for("document.body.innerText.includes('b training')")
            assert page.value("document.querySelectorAll('canvas').length") == 8, (
                "nodes, checkpoints, ranks, steps/s, loss, accuracy"
            )
            assert page.value("document.documentElement.scrollWidth") <= 390
            assert page.value("getComputedStyle(document.body).colorScheme") == "light dark"
            write(tmp_path / "runs" / "calm-fox", KILLED)
            took_s = page.wait_for("document.body.innerText.includes('lost node b')")
            print(f"shown {took_s:.2f} s after the node was lost")
            assert page.value("document.body.innerText.includes('b gone')")
            write(tmp_path / "runs" / "keen-koala", THREE_STEPS)
            for run, step in (("calm-fox", 61), ("keen-koala", 1)):
                page.ask("Page.navigate", url=f"{url}?run={run}")
                page.wait_for(f"at('runs').value === '{run}' && document.title.includes(': {step} steps')")
            page.ask("Page.navigate", url=f"{url}?run=no-run")
            page.wait_for("document.body.innerText.includes('no such run here yet')")
            assert page.errors == []
        finally:
            served.kill()
