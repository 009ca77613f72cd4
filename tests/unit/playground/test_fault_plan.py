"""The fault grammar: what it takes, what it refuses, and when a fault is due."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticrt.errors import ConfigError
from elasticrt.playground.fault_plan import Fault, parse_fault


@pytest.mark.parametrize(
    ("text", "meaning"),
    [
        ("step 50: kill node 2", {"step": 50, "what": "kill node", "number": 2}),
        ("12s: add node", {"after_s": 12.0, "what": "add node"}),
        ("step 80: drain node 1", {"step": 80, "what": "drain node", "number": 1}),
        ("step 30: kill worker 3", {"step": 30, "what": "kill worker", "number": 3}),
        ("1.5s:kill node 0", {"after_s": 1.5, "what": "kill node"}),
        ("  step  7 :  add  node  ", {"step": 7, "what": "add node"}),
        ("0s: kill worker 0", {"after_s": 0.0, "what": "kill worker"}),
        ("step 1000000000: add node", {"step": 10**9, "what": "add node"}),
    ],
)
def test_a_fault_is_read_as_written(text, meaning):
    """Each form of the grammar says when and what, and keeps its words."""
    assert parse_fault(text) == Fault(text, **meaning)


@pytest.mark.parametrize(
    "text",
    [
        "",
        ":",
        "kill node 2",
        "step 50 kill node 2",
        "step 50:",
        ": kill node 2",
        "step: kill node 2",
        "step 0: kill node 2",
        "step -1: kill node 2",
        "step five: kill node 2",
        "step 5.5: kill node 2",
        "step 1e3: kill node 2",
        "step 007: kill node 2",
        "step 1_000: kill node 2",
        "step ٣: kill node 2",
        "step 10000000000: add node",
        "Step 50: kill node 2",
        "step 50: kill node",
        "step 50: kill node two",
        "step 50: kill node -1",
        "step 50: kill node 10000",
        "step 50: kill nodes 2",
        "step 50: kill node 2 now",
        "step 50: kill node 2; add node",
        "step 50: kill worker 1,2",
        "step 50: add node 3",
        "step 50: kill node 2 for 6s",
        "12: add node",
        "12 s: add node",
        "-1s: add node",
        "nans: add node",
        "infs: add node",
        "100000s: add node",
        "12s: add node\n",
        "12s: explode",
        "12s: drain worker 1",
        "12s: add node: kill node 1",
    ],
)
def test_anything_else_is_refused_with_the_grammar(text):
    """What the grammar does not know is a ConfigError that shows the grammar and the text as written."""
    with pytest.raises(ConfigError) as caught:
        parse_fault(text)
    assert caught.value.exit_code == 2
    assert "drain node K" in str(caught.value)
    shown = text if text.isprintable() else repr(text)
    assert f"(--fault): got {shown}" in str(caught.value)


@given(st.text(max_size=60))
def test_no_text_does_anything_but_parse_or_be_refused(text):
    """Any text is either a fault or a ConfigError."""
    try:
        fault = parse_fault(text)
    except ConfigError:
        return
    assert fault.text == text


KILL = parse_fault("step 50: kill node 2")
ADD = parse_fault("12s: add node")
DRAIN = parse_fault("step 80: drain node 1")


@pytest.mark.parametrize(
    ("step", "elapsed_s", "due"),
    [
        (0, 0.0, []),
        (49, 11.9, []),
        (50, 0.0, [KILL]),
        (0, 12.0, [ADD]),
        (79, 13.0, [KILL, ADD]),
        (900, 900.0, [KILL, ADD, DRAIN]),
    ],
)
def test_a_fault_is_due_when_its_step_or_second_has_come(step, elapsed_s, due):
    """It does not mind that steps were skipped between two looks."""
    assert [fault for fault in (KILL, ADD, DRAIN) if fault.is_due(step, elapsed_s)] == due
