"""The dashboard's picture in the documentation: `python -m tests.bench.screenshot [--dark] [--phone] [FILE]`.

Three nodes of this machine train a small GPT; one worker and one node are killed, one node joins. When that is over, a
headless Chromium takes a picture of the page.
"""

from __future__ import annotations

import argparse
import base64
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.browser import browser

ROOT = Path(__file__).resolve().parents[2]
FAULTS = ("step 150: kill worker 1", "step 300: kill node 2", "step 450: add node", "step 700: drain node 1")
SIZE, PHONE = (1000, 1080), (390, 1700)
STEPS_MAX = 900


def main() -> None:
    """As above."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path, nargs="?", default=ROOT / "docs" / "img" / "dashboard.png")
    parser.add_argument("--dark", action="store_true")
    parser.add_argument("--phone", action="store_true")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as kept:
        runs = Path(kept) / "runs"
        runs.mkdir()
        program = [sys.executable, "-m", "elasticrt"]
        faults = [word for fault in FAULTS for word in ("--fault", fault)]
        script = [str(ROOT / "examples" / "char_gpt.py"), "--steps", str(STEPS_MAX), "--checkpoint-dir", f"{kept}/ckpt"]
        simulate = [*program, "simulate", "--nodes", "3", "--nnodes", "1:4", "--run-id", "small-gpt"]
        command = [*simulate, "--join", "now", "--log-dir", str(runs), *faults, *script, "--data-dir", f"{kept}/data"]
        subprocess.run(command, check=True, cwd=kept, stdout=sys.stderr, env={**os.environ, "OMP_NUM_THREADS": "1"})
        shown = [*program, "dashboard", "--log-dir", str(runs)]
        with subprocess.Popen(shown, stdout=subprocess.PIPE, text=True) as served:
            try:
                assert served.stdout is not None
                with browser(Path(kept) / "browser") as page:
                    width, height = PHONE if given.phone else SIZE
                    page.ask(
                        "Emulation.setDeviceMetricsOverride",
                        width=width, height=height, deviceScaleFactor=1, mobile=given.phone,
                    )  # fmt: skip
                    wanted = [{"name": "prefers-color-scheme", "value": "dark" if given.dark else "light"}]
                    page.ask("Emulation.setEmulatedMedia", features=wanted)
                    page.ask("Page.navigate", url=served.stdout.readline().strip())
                    page.wait_for("document.querySelectorAll('#told li').length > 6")
                    page.wait_for("!document.getElementById('heat').hidden")
                    given.file.parent.mkdir(exist_ok=True)
                    given.file.write_bytes(base64.b64decode(page.ask("Page.captureScreenshot")["data"]))
            finally:
                served.kill()


if __name__ == "__main__":
    main()
