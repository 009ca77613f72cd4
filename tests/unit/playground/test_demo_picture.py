"""The picture of the demo is drawn from what a demo prints."""

from __future__ import annotations

import xml.etree.ElementTree as ET

from tests.demo_picture import chosen, picture

OUTPUT = """\
setup: the digits are prepared in data/ (0.1 s)
-- run calm-fox, etcd embedded, logs in runs/x
node-0 | epoch 0
-- generation 1: 3 nodes, world size 3, first step 1 after 6.58 s
.. generation 1  3 nodes (1 to 4)  step 81
!! step 150: kill node 2  (SIGKILL to pid 13083)
-- generation 2: node-2 lost (agent ended), 2 nodes, world size 2, paused 0.20 s after step 150, no step lost
-- the run succeeded: all 2 workers ended with exit code 0
"""


def test_what_is_drawn() -> None:
    """What was done, what came of it, what it cost, and the end; as SVG that can be read."""
    lines = chosen(OUTPUT.splitlines())
    assert lines == [
        ("prompt", "$ python3 dev.py demo"),
        ("say", "-- generation 1: 3 nodes, world size 3, first step 1 after 6.58 s"),
        ("fault", "!! step 150: kill node 2  (SIGKILL to pid 13083)"),
        ("say", "-- generation 2: node-2 lost (agent ended), 2 nodes, world size 2"),
        ("good", "   paused 0.20 s after step 150, no step lost"),
        ("good", "-- the run succeeded: all 2 workers ended with exit code 0"),
    ]
    drawn = ET.fromstring(picture(lines))
    assert [text.text for text in drawn if text.tag.endswith("text")] == [text for _, text in lines]
