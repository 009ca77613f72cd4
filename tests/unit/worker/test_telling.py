"""What a worker tells its parent of its imports, and what the parent believes."""

from __future__ import annotations

import json
import os
import socket
import sys
import types
from importlib.machinery import ModuleSpec

import pytest

from elasticrt.worker import learn


@pytest.mark.parametrize(
    ("name", "listed"),
    [
        ("torch", True),
        ("torch.nn", True),
        ("torchvision.transforms", True),
        ("torchaudio", True),
        ("numpy.linalg", True),
        ("scipy", True),
        ("PIL.Image", True),
        ("einops", True),
        ("safetensors.torch", True),
        ("mine", False),
        ("mine.torch", False),
        ("numpyro", False),
        ("pandas", False),
        ("transformers", False),
    ],
)
def test_the_short_list(name, listed):
    """Only well-known libraries whose import does nothing but take time are learnt."""
    assert learn.is_listed(name) is listed


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (b'{"einops": "/x/einops.py", "mine": "/x/mine.py"}', {"einops": "/x/einops.py"}),
        (b'{"einops": 3}', {}),
        (b"[]", {}),
        (b"\xff\x00", {}),
        (b"", {}),
    ],
)
def test_what_the_parent_believes(data, told):
    """Names on the short list with a file each; anything else that a script writes there is nothing."""
    assert learn.read(data) == told


@pytest.fixture
def pair():
    """The two ends of what workers tell through."""
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    for end in ends:
        end.setblocking(False)
    yield ends
    for end in ends:
        end.close()


def module(monkeypatch, name, origin):
    """Put a module into this process as if it had been imported from `origin`."""
    made = types.ModuleType(name)
    made.__spec__ = ModuleSpec(name, None, origin=origin)
    made.__spec__.has_location = origin is not None
    monkeypatch.setitem(sys.modules, name, made)


def test_telling(pair, monkeypatch, tmp_path):
    """Each call tells the listed modules that are new since the last, in order, but for those beside the script.

    The first call tells even that there are none: the script has met its group by then.
    """
    (tmp_path / "torchmine.py").write_text("")
    monkeypatch.setitem(sys.modules, "the_marker", types.ModuleType("the_marker"))
    tell = learn.Telling(pair[0], str(tmp_path))
    tell()
    assert json.loads(pair[1].recv(100)) == {}
    tell()
    with pytest.raises(BlockingIOError):
        pair[1].recv(100)
    module(monkeypatch, "einops", "/lib/einops.py")
    module(monkeypatch, "mine", "/lib/mine.py")
    module(monkeypatch, "einops.made_up", None)
    module(monkeypatch, "torchmine", str(tmp_path / "torchmine.py"))
    module(monkeypatch, "safetensors", "/lib/safetensors/__init__.py")
    tell()
    told = {"einops": "/lib/einops.py", "safetensors": "/lib/safetensors/__init__.py"}
    assert list(json.loads(pair[1].recv(10000)).items()) == list(told.items())
    tell()
    module(monkeypatch, "torchaudio", "/lib/torchaudio.py")
    tell()
    assert json.loads(pair[1].recv(10000)) == {"torchaudio": "/lib/torchaudio.py"}


def test_telling_much(pair, monkeypatch, tmp_path):
    """What one message could not hold comes in several, and is complete."""
    monkeypatch.setitem(sys.modules, "the_marker", types.ModuleType("the_marker"))
    tell = learn.Telling(pair[0], str(tmp_path))
    told = {f"scipy.part_{n}": f"/lib/{'long_' * 40}/{n}.py" for n in range(250)}
    for name, origin in told.items():
        module(monkeypatch, name, origin)
    tell()
    heard: dict[str, str] = {}
    for _ in range(3):
        heard |= learn.read(pair[1].recv(learn._TOLD_MAX_BYTES))
    assert list(heard.items()) == list(told.items())


def test_telling_nobody(pair, monkeypatch, tmp_path):
    """A parent that is gone, and a descriptor that the script has given to something else, are no error."""
    monkeypatch.setitem(sys.modules, "the_marker", types.ModuleType("the_marker"))
    tell = learn.Telling(pair[0], str(tmp_path))
    module(monkeypatch, "einops", "/lib/einops.py")
    reader, writer = os.pipe()
    os.dup2(writer, pair[0].fileno())
    os.close(writer)
    tell()
    os.set_blocking(reader, False)
    with pytest.raises(BlockingIOError):
        os.read(reader, 100)
    os.close(reader)
    pair[1].close()
    module(monkeypatch, "safetensors", "/lib/safetensors.py")
    tell()
