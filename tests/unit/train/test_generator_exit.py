"""Telling `break` and `return` from an exception, when a generator is closed."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

import pytest

from elasticrt.train import generator_exit

verdicts: list[bool] = []


def _numbers() -> Iterator[int]:
    try:
        for i in range(5):
            try:
                yield i
            except GeneratorExit:
                verdicts.append(generator_exit.on_purpose(sys._getframe(1)))
                raise
    finally:
        pass


def _wrapped(inner: Iterator[int]) -> Iterator[int]:
    """What tqdm does."""
    try:
        for x in inner:  # noqa: UP028  A frame of its own, that loops, is the point.
            yield x
    finally:
        pass


def _deep(x: int) -> int:
    if x == 2:
        raise KeyError(x)
    return x


def _by_break():
    for x in _numbers():
        if x == 2:
            break


def _by_return():
    for x in _numbers():
        if x == 2:
            return x
    return None


def _by_break_in_with():
    for x in _numbers():
        with contextlib.nullcontext():
            if x == 2:
                break


def _by_break_with_finally():
    for x in _numbers():
        try:
            if x == 2:
                break
        finally:
            len("x")


def _by_break_after_an_exception():
    for x in _numbers():
        try:
            _deep(x)
        except KeyError:
            break


def _by_break_of_enumerate():
    for _, x in enumerate(_numbers()):
        if x == 2:
            break


def _by_break_of_a_wrapper():
    for _, x in enumerate(_wrapped(_wrapped(_numbers()))):
        if x == 2:
            return x
    return None


def _by_assignment():
    iterator = _numbers()
    next(iterator)
    iterator = 5
    return iterator + 1


def _error_raised():
    for x in _numbers():
        if x == 2:
            raise KeyError


def _error_in_a_call():
    for x in _numbers():
        y = _deep(x)
    return y


def _error_in_an_operator():
    for x in _numbers():
        {}[x]


def _error_in_with():
    for x in _numbers():
        with contextlib.nullcontext():
            _deep(x)


def _error_with_finally():
    for x in _numbers():
        try:
            _deep(x)
        finally:
            len("x")


def _error_reraised():
    for x in _numbers():
        try:
            _deep(x)
        except KeyError:  # noqa: TRY203  To be raised again is the point.
            raise


def _error_through_wrappers():
    for _, x in enumerate(_wrapped(_wrapped(_numbers()))):
        _deep(x)


def _error_caught_outside():
    try:
        for x in _numbers():
            _deep(x)
    except KeyError:
        return


@pytest.mark.parametrize("script", [f for name, f in list(globals().items()) if name.startswith(("_by_", "_error_"))])
def test_why_the_loop_was_left(script):
    """Every way of leaving a for loop is told apart, also through enumerate and generators around ours."""
    verdicts.clear()
    with contextlib.suppress(KeyError):
        script()
    assert verdicts == [script.__name__.startswith("_by_")]


def test_unknown_is_an_exception():
    """An explicit close says nothing about why: the step is then not counted."""
    verdicts.clear()
    iterator = _numbers()
    next(iterator)
    iterator.close()
    assert verdicts == [False]
    assert not generator_exit.on_purpose(None)
