"""examples/from_tutorials: what is taught and what becomes of it, in a few lines, both with a killed worker."""

from __future__ import annotations

import difflib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.compat.styles import EXAMPLES, Style, both

FOLDER = "from_tutorials"
PAIRS = sorted(path.name for path in (EXAMPLES / FOLDER).iterdir() if (path / "before.py").exists())
LINES_MAX = 9
ONE = ("--standalone", "--nproc-per-node", "1")
TWO_BY_TWO = ("--nnodes", "2", "--nproc-per-node", "2")


def _style(name: str, *arguments: str, **fields: object) -> Style:
    return Style(name, f"{name}.py", arguments, folder=FOLDER, **fields)  # type: ignore[arg-type]  # Checked by running.


SCRIPTS = (
    _style("dataparallel/before", options=ONE, nodes=1, victim=0, resumes=False),
    _style("dataparallel/after", options=TWO_BY_TWO),
    _style("mp_spawn/before", options=ONE, nodes=1, victim=0, inner=True, resumes=False),
    _style("mp_spawn/after", command="python", options=(), nodes=1, victim=1),
    _style("mnist_article/before", "-g", "2", options=ONE, nodes=1, victim=0, inner=True, resumes=False),
    _style("mnist_article/after", "-n", "2", "-g", "2", command="python", options=(), victim=0),
    _style("yolo_loader/before", options=TWO_BY_TWO, victim=2, resumes=False),
    _style("yolo_loader/after", options=TWO_BY_TWO, victim=0),
    _style("slurm_job/before", options=("--as-srun", *TWO_BY_TWO), resumes=False),
    _style("slurm_job/after", options=TWO_BY_TWO, victim=1),
)


@pytest.mark.parametrize("pair", PAIRS)
def test_at_most_nine_lines(pair: str) -> None:
    """Before and after differ in at most nine lines: so many are taken out, and so many put in.

    A line that is only indented further, because it is in the step's block now, does not count.
    """
    scripts = ((EXAMPLES / FOLDER / pair / f"{name}.py").read_text() for name in ("before", "after"))
    before, after = ([line.strip() for line in script.splitlines()] for script in scripts)
    changes = [line for line in difflib.ndiff(before, after) if line[:1] in "+-" and line[2:].strip()]
    counts = [sum(line.startswith(sign) for line in changes) for sign in "+-"]
    assert 0 < max(counts) <= LINES_MAX, "\n".join(changes)


def test_every_script_is_run() -> None:
    """No pair is left out of the tests with a killed worker."""
    assert {style.name for style in SCRIPTS} == {
        f"{pair}/{name}" for pair in PAIRS if pair != "download" for name in ("before", "after")
    }


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("style", SCRIPTS, ids=lambda style: style.name)
def test_a_script(style: Style, tmp_path: Path) -> None:
    """W01: each ends with the result of the undisturbed run; what was taught begins again, what it becomes goes on."""
    outcome, problem = both(style, tmp_path)
    assert problem == "", outcome.output


class _Rows(ThreadingHTTPServer):
    """Serves one small file, and counts. With `together` no answer begins before so many requests are there."""

    def __init__(self, together: int) -> None:
        super().__init__(("127.0.0.1", 0), _Answer)
        self.requests = 0
        self.barrier = threading.Barrier(together)
        numbers = [[(row * 37 + column * 11) % 17 / 17 for column in range(9)] for row in range(256)]
        self.content = "\n".join(",".join(map(str, row)) for row in numbers).encode()


class _Answer(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        assert isinstance(self.server, _Rows)
        self.server.requests += 1
        self.server.barrier.wait(30)
        self.send_response(200)
        self.end_headers()
        self.wfile.write(self.server.content)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing is logged."""


@contextmanager
def _server(together: int) -> Iterator[_Rows]:
    with _Rows(together) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize(("name", "downloads"), [("before", 4), ("after", 2)])
def test_download(name: str, downloads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """download=True fetches the data once in every process, all at the same time; prepare once on each node."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    style = _style(f"download/{name}", options=TWO_BY_TWO, resumes=name == "after")
    # All of an undisturbed run's requests are held until the last has come, so none of them can find a file.
    with _server(downloads) as server:
        url = f"http://127.0.0.1:{server.server_address[1]}/rows.csv"
        outcome, problem = both(replace(style, arguments=(url,)), tmp_path)
        assert problem == "", outcome.output
        assert server.requests == 2 * downloads, "two runs"
        assert outcome.output.count(" downloads") == downloads, "the restart has found them"
