"""The picture of the demo, docs/img/demo.svg, from a real one: `python -m tests.demo_picture`, on an idle machine."""

from __future__ import annotations

import html
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PICTURE = ROOT / "docs" / "img" / "demo.svg"
COLUMNS = 76
LINE_PX, LETTER_PX, TOP_PX, LEFT_PX = 19, 8, 48, 18
COLOURS = {"say": "#c9d1d9", "fault": "#ff9d7a", "good": "#7ee787", "prompt": "#79c0ff"}
FONT = 'font:13.3px ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace;white-space:pre'
TITLE = "The demo: three nodes train, one is killed, one joins, one leaves"

Line = tuple[str, str]
"""Which colour, and the text."""


def chosen(output: Sequence[str]) -> list[Line]:
    """What the picture shows of a demo's output: what was done, what came of it and what it cost, and the end."""
    lines: list[Line] = [("prompt", "$ python3 dev.py demo")]
    for text in output:
        kind = "fault" if text.startswith("!!") else "good" if text.startswith("-- the run ") else "say"
        if not text.startswith(("-- generation ", "-- the run ", "!! ")):
            continue
        what, paused, cost = text.partition(", paused ")
        lines += [(kind, part) for part in textwrap.wrap(what, COLUMNS, subsequent_indent="   ")]
        if paused:
            lines.append(("good", f"   paused {cost}"))
    return lines


def picture(lines: Sequence[Line]) -> str:
    """The lines as a terminal in SVG."""
    width, height = COLUMNS * LETTER_PX + 2 * LEFT_PX, TOP_PX + len(lines) * LINE_PX
    style = f"text{{{FONT}}}" + "".join(f".{name}{{fill:{colour}}}" for name, colour in COLOURS.items())
    size = f'width="{width}" height="{height}"'
    drawn = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="{TITLE}">',
        f"<style>{style}</style>",
        f'<rect {size} rx="8" fill="#0d1117"/>',
    ]
    for place, colour in enumerate(("#ff5f56", "#ffbd2e", "#27c93f")):
        drawn.append(f'<circle cx="{24 + 18 * place}" cy="16" r="5.5" fill="{colour}"/>')
    for number, (kind, text) in enumerate(lines):
        at = f'x="{LEFT_PX}" y="{TOP_PX + number * LINE_PX}" textLength="{len(text) * LETTER_PX}"'
        drawn.append(f'<text class="{kind}" {at} xml:space="preserve">{html.escape(text, quote=False)}</text>')
    return "\n".join([*drawn, "</svg>", ""])


def main() -> int:
    """Run the demo, and draw it if it has gone well."""
    done = subprocess.run(
        [sys.executable, "dev.py", "demo"], cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=1200, check=False
    )
    if done.returncode == 0:
        PICTURE.write_text(picture(chosen(done.stdout.splitlines())))
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
