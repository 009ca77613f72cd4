"""A headless Chromium, spoken to over a pipe; tests that need one skip loudly without it."""

from __future__ import annotations

import itertools
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

WAIT_S = 60.0


class Page:
    """One page. `errors`: what its console has said that is an error, and what its scripts have thrown."""

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._to, self._from = to_browser, from_browser
        self._numbers = itertools.count(1)
        self._text = b""
        self._session = ""
        self.errors: list[Any] = []
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.ask(f"{domain}.enable")

    def ask(self, method: str, **params: Any) -> Any:
        """One command's result."""
        number = next(self._numbers)
        session = {"sessionId": self._session} if self._session else {}
        message = {"id": number, "method": method, "params": params, **session}
        os.write(self._to, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + WAIT_S
        while (answer := self._heard(deadline)).get("id") != number:
            self._note(answer)
        assert "error" not in answer, answer
        return answer["result"]

    def value(self, expression: str) -> Any:
        """What a JavaScript expression is on the page by now."""
        return self.ask("Runtime.evaluate", expression=expression, returnByValue=True)["result"].get("value")

    def wait_for(self, expression: str) -> float:
        """Wait until an expression is true; the seconds that it took."""
        began = time.monotonic()
        while not self.value(expression):
            assert time.monotonic() < began + WAIT_S, (
                f"never true: {expression}; {self.value('document.body.innerText')}"
            )
            time.sleep(0.02)
        return time.monotonic() - began

    def _heard(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._text:
            assert select.select([self._from], [], [], max(0.0, deadline - time.monotonic()))[0], "Chromium is silent"
            piece = os.read(self._from, 1 << 16)
            assert piece, "Chromium has ended"
            self._text += piece
        line, _, self._text = self._text.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        return message

    def _note(self, message: dict[str, Any]) -> None:
        params = message.get("params", {})
        thrown = message.get("method") == "Runtime.exceptionThrown"
        if thrown or params.get("entry", {}).get("level") == "error" or params.get("type") == "error":
            self.errors.append(params)


@contextmanager
def browser(directory: Path) -> Iterator[Page]:
    """A page of a Chromium that keeps its files in `directory`."""
    program = shutil.which("chromium")
    if program is None:
        pytest.skip("no chromium: apt-get install chromium")
    (to_read, to_write), (from_read, from_write) = os.pipe(), os.pipe()
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
    options += ["--remote-debugging-pipe", f"--user-data-dir={directory}"]
    command = ["bash", "-c", f'exec "$@" 3<&{to_read} 4>&{from_write}', "_", program, *options]
    with subprocess.Popen(command, pass_fds=(to_read, from_write), stderr=subprocess.DEVNULL) as process:
        os.close(to_read)
        os.close(from_write)
        try:
            yield Page(to_write, from_read)
        finally:
            os.close(to_write)  # Then it ends, and takes its children along.
            os.close(from_read)
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
