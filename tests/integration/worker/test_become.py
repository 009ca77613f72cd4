"""A forked worker is indistinguishable from `python -u script`: the same script says the same both ways."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from elasticrt.settings import Command

PROBE = """\
import json, os, signal, sys, threading
import __main__
spec = __main__.__spec__
print(json.dumps({
    "globals": sorted(set(globals()) - {"json", "os", "signal", "sys", "threading", "spec"}),
    "name": __name__, "file": __file__, "package": __package__, "doc": __doc__, "cached": __cached__,
    "spec": spec and (spec.name, spec.origin, spec.parent), "loader": type(__loader__).__name__,
    "main is this": vars(__main__) is globals(), "builtins": type(__builtins__).__name__,
    "argv": sys.argv, "orig_argv": sys.orig_argv[1:], "path": sys.path, "flags": list(sys.flags),
    "executable": sys.executable, "cwd": os.getcwd(), "hooks": sys.excepthook is sys.__excepthook__,
    "out": [sys.stdout.encoding, sys.stdout.errors, sys.stdout.write_through, sys.stdout.line_buffering,
            sys.stdout.name, type(sys.stdout.buffer).__name__],
    "err": [sys.stderr.errors, sys.stderr.line_buffering, type(sys.stderr.buffer).__name__],
    "stdin": [sys.stdin.read(), sys.stdin.encoding],
    "signals": {int(n): str(signal.getsignal(n)).split(" at ")[0] for n in sorted(signal.valid_signals()) if n < 32},
    "mask": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])), "wakeup": signal.set_wakeup_fd(-1),
    "threads": [t.name for t in threading.enumerate()], "main thread": threading.current_thread().name,
    "umask": os.umask(0o22), "trace": sys.gettrace(), "limit": sys.getrecursionlimit(),
    "user's": os.environ.get("MY_OWN"), "python's": sorted(n for n in os.environ if n.startswith("PYTHON")),
}))
"""


@pytest.fixture
def place(tmp_path):
    """A directory with the probe as a script, behind a link, as a module and as a package."""
    for name in ("probe.py", "package/__main__.py", "package/__init__.py", "sub/other.py"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("" if name.endswith("__init__.py") else PROBE)
    (tmp_path / "sub" / "link.py").symlink_to("../probe.py")
    return tmp_path


@pytest.mark.parametrize(
    ("kind", "argv"),
    [
        ("script", ("probe.py", "a", "--b=c d")),
        ("script", ("./probe.py",)),
        ("script", ("sub/../probe.py",)),
        ("script", ("sub/link.py",)),
        ("script", ("{place}/sub/other.py", "--", "-x")),
        ("module", ("probe", "x")),
        ("module", ("package", "--y")),
        ("module", ("sub.other",)),
    ],
)
def test_a_script_sees_what_python_would_show(warm, place, kind, argv):
    """Argv, path, `__main__`, streams, signals, flags, cwd and stdin are those of `python -u`."""
    argv = tuple(part.format(place=place) for part in argv)
    command = [sys.executable, "-u", *(["-m"] if kind == "module" else []), *argv]
    env = {**warm.base_env, "MY_OWN": "value"}
    expected = subprocess.run(
        command, cwd=place, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True, timeout=30
    )
    # Standard input belongs to local rank 0; the second worker has none, as the plain run here.
    warm.start(Command(argv, kind), place, 2, env={"MY_OWN": "value"})
    result = warm.finish(2)
    assert result.codes == {0: 0, 1: 0}, result.err
    assert json.loads(result.out[1]) == json.loads(expected.stdout)


def test_it_is_a_fork(warm, tmp_path):
    """The comparison above is not one of Python with itself: torch is there before the script asks for it."""
    result = warm.run("import sys; print('torch' in sys.modules, 'torch._dynamo' in sys.modules)", tmp_path)
    assert (warm.warm.method, warm.warm.reason, result.out[0]) == ("fork", "", "True True\n")


SENTINEL = """
class Sentinel(type):
    def __getattribute__(cls, name):
        raise AttributeError(f"type object 'CLIENT' has no attribute {name!r}")
class CLIENT(metaclass=Sentinel): pass
"""
EXITS = {
    "end": "pass",
    "zero": "import sys; sys.exit(0)",
    "none": "import sys; sys.exit()",
    "three": "import sys; sys.exit(3)",
    "big": "import sys; sys.exit(259)",
    "negative": "import sys; sys.exit(-1)",
    "text": "import sys; sys.exit('that was it')",
    "object": "raise SystemExit([1, 2])",
    "error": "def f():\n    raise ValueError('wrong')\nf()",
    "chain": "try:\n    1 / 0\nexcept ZeroDivisionError as e:\n    raise KeyError('k') from e",
    "syntax": "x = = 1",
    "own base exception": "class Stop(BaseException): pass\nraise Stop('here')",
    "interrupt": "raise KeyboardInterrupt",
    "interrupted by signal": "import os, signal; os.kill(os.getpid(), signal.SIGINT)",
    "hard": "import os; os._exit(9)",
    "hook": "import sys\nsys.excepthook = lambda *a: print('hooked', a[0], file=sys.stderr)\nraise ValueError",
    "broken hook": "import sys\ndef hook(*a): raise TypeError('in hook')\nsys.excepthook = hook\nraise ValueError(1)",
    "exit hooks": "import atexit, sys\natexit.register(print, 'hook 1')\natexit.register(print, 'hook 2')\nsys.exit(4)",
    "hook after error": "import atexit\natexit.register(print, 'hook')\nraise ValueError",
    "thread is joined": "import threading, time\n"
    "threading.Thread(target=lambda: (time.sleep(0.1), print('thread done'))).start()\nraise ValueError",
    "thread is joined after success": "import threading, time\n"
    "threading.Thread(target=lambda: (time.sleep(0.1), print('thread done'))).start()",
    "unflushed file": "f = open('left.txt', 'w')\nf.write('x' * 10)\nraise ValueError",
    "unflushed in a module": "import types, sys\nm = types.ModuleType('m')\nsys.modules['m'] = m\n"
    "m.f = open('left.txt', 'w')\nm.f.write('y' * 10)\nsys.exit(2)",
    "unflushed stream of C": "import ctypes\nlibc = ctypes.CDLL(None)\nlibc.fopen.restype = ctypes.c_void_p\n"
    "libc.fputs(b'z' * 10, ctypes.c_void_p(libc.fopen(b'left.txt', b'w')))\nraise ValueError",
    "finalizer": "class A:\n    def __del__(self): print('deleted')\na = A()\nraise ValueError",
    "weak finalizer": "import weakref\nclass A: pass\na = A()\nweakref.finalize(a, print, 'late')\nraise ValueError",
    "exit in a thread": "import threading, sys\n"
    "t = threading.Thread(target=sys.exit)\nt.start(); t.join(); print('on')",
    "class without a class": "f = open('left.txt', 'w')\nf.write('z')\n" + SENTINEL + "raise ValueError",
    "class without a class, success": "f = open('left.txt', 'w')\nf.write('z')\n" + SENTINEL,
    "no module": SENTINEL + "import sys\nsys.modules['torch_of_mine'] = sys.modules['zz'] = CLIENT\nraise ValueError",
    "no output": "import sys\nsys.stdout = None",
    "output without flush": "import sys\nclass Log:\n    def write(self, text): pass\nsys.stdout = Log()\nprint(1)\n"
    "sys.unraisablehook = lambda *a: None",
    "closed output": "import sys\nsys.stdout.close()",
    "own file": "import io\nclass File(io.RawIOBase):\n    def writable(self): raise KeyError\nfile = File()\n"
    "raise ValueError",
    "unflushed file after success": "f = open('left.txt', 'w')\nf.write('x' * 10)",
    "finalizer in a cycle": "class A:\n    def __del__(self): print('deleted')\na = A()\na.self = a",
    "archive after success": "import zipfile\nz = zipfile.ZipFile('left.zip', 'w')\nz.writestr('a', 'b')\n"
    "import atexit, os\nprint(os.path.getsize('left.zip') > 0)",
    "daemon thread after success": "import threading, time\nclass A:\n    def __del__(self): print('gone')\na = A()\n"
    "threading.Thread(target=lambda: [time.sleep(0.001) for _ in range(100000)], daemon=True).start()",
    "hooks after an exit hook's error": "import atexit\nclass Broken:\n    def __repr__(self): return 'hook'\n"
    "    def __call__(self): 1 / 0\natexit.register(print, 'on')\natexit.register(Broken())",
    "mutual reference": "import gc\nx = []\nx.append(x)\nprint(gc.isenabled())\nraise ValueError",
}


@pytest.mark.parametrize("body", EXITS.values(), ids=EXITS)
def test_exit_codes_and_tracebacks(warm, python, tmp_path, body):
    """Code, output and traceback at the end of a script are Python's, and files it left open are flushed."""
    plain = tmp_path / "plain"
    plain.mkdir()
    forked = tmp_path / "forked"
    forked.mkdir()
    expected = python(body, plain)
    result = warm.run(body, forked)
    assert result.codes[0] == expected.returncode
    assert result.out[0] == expected.stdout
    assert result.err[0].replace(str(forked), str(plain)) == expected.stderr
    left = [(place / "left.txt").read_text() if (place / "left.txt").exists() else "" for place in (plain, forked)]
    assert left[0] == left[1]
    assert bool(left[0]) is ("left.txt" in body)


@pytest.mark.parametrize("code", [0, 3])
def test_torch_is_taken_apart_by_nobody(warm, tmp_path, code):
    """Libraries of operators and process groups stay until the end: what tidies them up may wait for ever."""
    body = f"""
        import sys, weakref
        class Witness: pass
        witness = Witness()
        def tell():
            print(["group"] * dist.is_initialized() + [each for each in library._defs if each.startswith("mine")])
        weakref.finalize(witness, tell)
        import torch.distributed as dist
        from torch import library
        mine = library.Library("mine", "DEF")
        mine.define("f(Tensor x) -> Tensor")
        import elasticrt
        elasticrt.init(backend="gloo")
        sys.exit({code})
    """
    result = warm.run(body, tmp_path)
    assert (result.codes[0], result.out[0], result.err[0]) == (code, "['group', 'mine::f']\n", "")


def test_a_module_that_is_missing_is_named_in_pythons_words(warm, tmp_path):
    """It ends with Python's own message and code."""
    command = [sys.executable, "-u", "-m", "missing_module"]
    expected = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=30)
    warm.start(Command(("missing_module",), "module"), tmp_path)
    result = warm.finish()
    assert (result.codes[0], result.err[0]) == (expected.returncode, expected.stderr)


def test_environment_is_the_users(warm, tmp_path):
    """The user's variables arrive, our credentials do not, the contract's are readable, descriptors are real."""
    body = """
        import os
        from elasticrt.ipc.channel import Channel
        from elasticrt.ipc.env import WorkerEnv
        from elasticrt.ipc.status_page import StatusPage
        env = WorkerEnv.from_env(os.environ)
        StatusPage(env.page_fd).finished(7, 1)
        kinds = [os.readlink(f"/proc/self/fd/{fd}").split(":")[0] for fd in (env.channel_fd, env.listen_fd)]
        print(os.environ["MINE"], env.rank, env.generation, kinds, sorted(os.listdir("/proc/self/fd")))
        raise ValueError
        """
    result = warm.run(body, tmp_path, env={"MINE": "yes"})
    words = result.out[0].split()
    assert words[:2] == ["yes", "0"], result.err
    assert "['socket', 'socket']" in result.out[0]
    failure = result.ended[0].failure
    assert failure is not None
    assert "after step 7" in failure.text


def test_no_descriptor_of_another_worker(warm, tmp_path):
    """A worker holds its streams, channel, page (and its mapping), listening socket; no other's."""
    body = "import os; print(sorted(map(int, os.listdir('/proc/self/fd')))[:-1].__len__())"
    result = warm.run(body, tmp_path, workers=2)
    assert [result.out[0], result.out[1]] == ["7\n", "6\n"]


def test_threads_of_torch(warm, tmp_path):
    """Torch uses OMP_NUM_THREADS threads, and a matrix product with several of them works after the fork."""
    body = """
        import os, torch
        x = torch.ones(600, 600)
        print(torch.get_num_threads(), float((x @ x).sum()))
        """
    result = warm.run(body, tmp_path, env={"OMP_NUM_THREADS": "2"})
    assert result.out[0] == f"2 {600.0**3}\n", result.err


def test_random_numbers_differ(warm, tmp_path):
    """Unseeded draws of four workers and of two restarts are all different, in torch, numpy and Python."""
    body = """
        import torch, random, numpy
        print(torch.initial_seed(), torch.rand(1).item(), random.random(), numpy.random.rand())
        """
    draws = []
    for _ in range(2):
        result = warm.run(body, tmp_path, workers=4)
        draws += [number for out in result.out.values() for number in out.split()]
    assert len(draws) == 32
    assert len(set(draws)) == 32


def test_error_file(warm, tmp_path):
    """W01: an uncaught exception is in torchelastic's error file, and the report has it with the traceback."""
    result = warm.run("def f():\n    raise ValueError('no such thing')\nf()", tmp_path)
    failure = result.ended[0].failure
    assert failure is not None
    assert failure.summary == "rank 0 on node-0: exit code 1: ValueError: no such thing"
    assert (failure.code, failure.collateral, failure.final_code) == (1, False, 0)
    *_, last, log = failure.text.splitlines()
    assert last == "  | ValueError: no such thing"
    assert log.endswith("rank-0.node-0.err")
    (path,) = (tmp_path / "run" / "logs" / f"generation-{warm.generation}").glob("rank-0.node-0.*.error.json")
    fields = json.loads(path.read_text())["message"]
    assert fields["message"] == "ValueError: no such thing"
    assert "in f" in fields["extraInfo"]["py_callstack"]
    assert int(fields["extraInfo"]["timestamp"]) > 0


@pytest.mark.parametrize(("name", "code"), [("CheckpointError", 5), ("PreparationError", 6), ("ConfigError", 0)])
@pytest.mark.parametrize("recorded", [False, True])
def test_final_errors(warm, tmp_path, name, code, recorded):
    """Errors that a restart cannot cure are marked final, with `@record` and without; the process still exits 1."""
    body = f"""
        from elasticrt.errors import {name}
        from torch.distributed.elastic.multiprocessing.errors import record
        def main():
            raise {name}("cannot go on")
        {"record(main)" if recorded else "main"}()
        """
    result = warm.run(body, tmp_path)
    failure = result.ended[0].failure
    assert failure is not None
    assert (result.codes[0], failure.final_code) == (1, code)
    # An error with an exit code of its own is named without the worker's.
    assert f"rank 0 on node-0: {name}: " in failure.summary if code else f"exit code 1: {name}: " in failure.summary


@pytest.mark.parametrize("given", ['resume="never"', 'memory=2, resume="auto"'])
def test_a_wrong_call_is_not_a_traceback_of_ours(warm, tmp_path, given):
    """A mistake in a call of ours: what is wrong, the line of the script, and where the traceback is; no more."""
    body = f"""
        import elasticrt
        def main():
            loop = elasticrt.Loop("ck", {given})
        main()
        """
    said = warm.run(body, tmp_path).err[0].splitlines()
    what = "unknown value" if "never" in given else "not a share of the time"
    assert said[0].startswith(f"rank 0: ConfigError: {what} (Loop(")
    assert said[1] == f'  called at {tmp_path}/script.py, line 4: loop = elasticrt.Loop("ck", {given})'
    kept = tmp_path / "run" / said[2].removeprefix("  traceback: ")
    assert len(said) == 3
    assert "in __init__" in json.loads(kept.read_text())["message"]["extraInfo"]["py_callstack"]


@pytest.mark.parametrize(
    ("call", "says"),
    [
        ("elasticrt.Loop('other', sampelr=3)", "TypeError: not stateful (Loop(sampelr=)): got int"),
        ("loop.epochs('3')", "TypeError: total is not a whole number (epochs): got '3'"),
        ("loop.pause('x').__enter__()", "ConfigError: the Loop is not running (pause)"),
        ("elasticrt.init().sum(torch.ones(3))", "TypeError: not a number (sum)"),
    ],
)
def test_a_wrong_call_is_shown_at_the_line_of_the_script(warm, tmp_path, call, says):
    """Also for a type that is wrong, and where libraries stand between the script and us."""
    body = f"""
        import torch, elasticrt
        loop = elasticrt.Loop("ck")
        {call}
        """
    said = warm.run(body, tmp_path).err[0].splitlines()
    assert said[0].startswith(f"rank 0: {says}")
    assert said[1] == f"  called at {tmp_path}/script.py, line 4: {call}"
    assert len(said) == 3


def test_a_wrong_call_is_shown_as_the_script_wants_it(warm, tmp_path):
    """A hook of the script's own for uncaught exceptions gets a mistake in a call of ours, as it gets all others."""
    body = """
        import sys, elasticrt
        sys.excepthook = lambda kind, error, trace: print("mine:", kind.__name__)
        elasticrt.Loop("ck", resume="never")
        """
    result = warm.run(body, tmp_path)
    assert (result.out[0], result.err[0]) == ("mine: ConfigError\n", "")


def test_fault_handler_works(warm, tmp_path):
    """`faulthandler` in a script shows the script's own stack on a crash."""
    body = "import faulthandler, ctypes\nfaulthandler.enable()\ndef crash():\n    ctypes.string_at(0)\ncrash()"
    result = warm.run(body, tmp_path)
    assert result.codes[0] == -11
    assert "Segmentation fault" in result.err[0]
    assert "in crash" in result.err[0]


def test_stdin_is_for_local_rank_0(session_mark, tmp_path):
    """Standard input of the agent is read by local rank 0; others have an empty one."""
    body = f"""
        import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})
        from pathlib import Path
        from rig import Rig
        rig = Rig("fork")
        result = rig.run("import sys; print(repr(sys.stdin.read()))", Path({str(tmp_path)!r}), workers=2)
        rig.close()
        print(result.out[0].strip(), result.out[1].strip())
        """
    script = tmp_path / "agent.py"
    script.write_text("\n".join(line[8:] for line in body.splitlines()))
    done = subprocess.run(
        [sys.executable, str(script)], input="hello", capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout == "'hello' ''\n", done.stderr
