"""The state of numpy's global generator: noted quickly where nothing was drawn, made plain values, put back, seeded.

numpy may not be in use, and is never imported here.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any

import torch

from elasticrt.errors import CheckpointError, explain

_WORDS_BYTES = 2500
"""Of the usual generator in memory: 624 numbers of 4 bytes and its position among them."""


class _Usual:
    """The state of the usual generator, MT19937. To get it takes 0.08 ms, in which numpy makes 624 numbers one by one.

    Where nothing was drawn since the last time it is what it was then: the words in memory tell. A normal number that
    the generator keeps for the next call is not among them. So a state with one in it is not remembered; and where
    there was none, there is one now only if numbers were drawn, or a state was put in: `forget` says so.
    """

    def __init__(self) -> None:
        self._generator: object = None
        self._memory: Any = None
        self._words = b""
        self._state: Any = None

    def forget(self) -> None:
        """Another state is being put in."""
        self._words, self._state = b"", None

    def note(self, numpy: Any, generator: Any) -> Any:
        """`numpy.random.get_state()`, of `generator`."""
        if generator is not self._generator:
            self._memory = (ctypes.c_char * _WORDS_BYTES).from_address(generator.ctypes.state_address)
            self._generator = generator
        words = self._memory.raw
        if words == self._words:
            return self._state
        state = numpy.random.get_state()
        told = state[1].tobytes() + state[2].to_bytes(4, sys.byteorder)
        keeps_one = state[3]
        self._words, self._state = (words, state) if words == told and not keeps_one else (b"", None)
        return state


_usual = _Usual()


def note() -> Any:
    """The state now, for `plain`; None where numpy is not in use."""
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return None
    generator = _current(numpy)
    if generator is None:
        return numpy.random.get_state()
    if type(generator) is numpy.random.MT19937:
        return _usual.note(numpy, generator)
    return numpy.random.get_state(legacy=False)


def seed(number: int) -> None:
    """`numpy.random.seed`, which knows the usual generator only, for any; `number`: 32 bits."""
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return
    generator = _current(numpy)
    if generator is None or type(generator) is numpy.random.MT19937:
        numpy.random.seed(number)
    else:
        numpy.random.set_state({**type(generator)(number).state, "has_gauss": 0, "gauss": 0.0})


def plain(noted: Any) -> Any:
    """What was noted as plain values: a list for the usual generator, a dict for another one."""
    if isinstance(noted, dict):
        return _without_arrays(noted)
    name, keys, position, has_gauss, cached = noted
    return [str(name), torch.from_numpy(keys.astype("int64")), position, has_gauss, cached]


def put_back(state: Any) -> None:
    """The reverse, where numpy is in use. Raises CheckpointError when the script uses another generator now."""
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return
    _usual.forget()
    if not isinstance(state, dict):
        name, keys, position, has_gauss, cached = state
        state = (name, numpy.array(keys.tolist(), dtype="uint32"), position, has_gauss, cached)
    try:
        numpy.random.set_state(state)
    except (ValueError, TypeError) as error:
        raise CheckpointError(
            explain(
                "numpy's generator is not the one that was saved",
                "numpy.random",
                got=numpy.random.get_state(legacy=False)["bit_generator"],
                expected=state["bit_generator"] if isinstance(state, dict) else state[0],
                remedy="Call numpy.random.set_bit_generator before the Loop as when it was saved",
            )
        ) from error


def _current(numpy: Any) -> Any:
    """The global generator; None before numpy 1.24, where it is the usual one and can't be had."""
    return numpy.random.get_bit_generator() if hasattr(numpy.random, "get_bit_generator") else None


def _without_arrays(value: Any) -> Any:
    """A state as numpy gives it in a dict, with lists for its arrays."""
    if isinstance(value, dict):
        return {key: _without_arrays(each) for key, each in value.items()}
    return value.tolist() if hasattr(value, "tolist") else value
