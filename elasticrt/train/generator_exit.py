"""Tells why a `for` loop over one of our generators has ended early.

It ends by `break` or `return`, by an exception, or because an iterator around the generator has ended first. Python
closes the generator in the same way (GeneratorExit) in each case, but a training step may be counted only after `break`
and `return`.

The frame that has let go of the generator shows the difference, by the bytecode instruction at which it stands:

- `break` or `return`: the instruction that drops the iterator of the loop.
- An exception: the instruction that has raised.
- An iterator around the generator, such as `islice` or `zip`, has ended: the instruction of the loop itself. An
  exception that an iterator in this frame has raised looks the same.

This was measured on CPython 3.10 to 3.13, also through enumerate, zip, tqdm and generators of the user's own. Any other
instruction counts as an exception: then a step is trained again, but never counted twice.
"""

from __future__ import annotations

import dis
from types import FrameType

# The instructions that let go of an iterator and cannot raise: at the end of `break` and `return`, or an assignment to
# the variable that holds the iterator.
_DROPS = ("POP_TOP", "POP_ITER", "STORE_FAST", "STORE_NAME", "STORE_GLOBAL")
# The instructions at which a generator of the user's own stands while it is being closed. Its caller knows why.
_CLOSING = ("YIELD_VALUE", "RESUME")


def by_an_iterator(frame: FrameType | None) -> bool:
    """Whether a generator is being closed because an iterator around it has ended. `frame` is its caller."""
    frame = _holder(frame)
    if frame is None:
        return False
    name, code, at = _instruction(frame), frame.f_code.co_code, frame.f_lasti
    # Python 3.14 drops the iterator by a POP_ITER right after the loop (END_FOR). `break` uses a POP_ITER elsewhere.
    return name == "FOR_ITER" or (name == "POP_ITER" and at >= 2 and dis.opname[code[at - 2]] == "END_FOR")


def on_purpose(frame: FrameType | None) -> bool:
    """Whether a generator is being closed by `break`, `return` or assignment. `frame` is the generator's caller."""
    frame = _holder(frame)
    return frame is not None and _instruction(frame).startswith(_DROPS)


def _holder(frame: FrameType | None) -> FrameType | None:
    """The frame that has let go of the generator: `frame`, or one of its callers.

    If `frame` belongs to a generator that is being closed as well, its caller has let go, and so on. None if unknown.
    """
    while frame is not None and frame.f_lasti >= 0 and _instruction(frame) in _CLOSING:
        frame = frame.f_back
    return frame if frame is not None and frame.f_lasti >= 0 else None


def _instruction(frame: FrameType) -> str:
    """The name of the instruction at which `frame` stands."""
    return dis.opname[frame.f_code.co_code[frame.f_lasti]]
