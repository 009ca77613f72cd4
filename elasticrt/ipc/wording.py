"""Words for people. Pure."""

from __future__ import annotations


def counted(number: int, noun: str) -> str:
    """`1 node`, `3 nodes`, `1,240 steps`."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")
