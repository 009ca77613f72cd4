"""What a script does, it does alike in a forked worker and under `python -u`: same output, same errors, same code."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap

import pytest

from elasticrt.settings import Command

ADDRESS = re.compile(r"0x[0-9a-f]+")
WITHOUT_TORCH = {
    "terminated": "import os, signal\nos.kill(os.getpid(), signal.SIGTERM)\nimport time; time.sleep(30)",
    "own handler of SIGTERM": "import os, signal, sys\n"
    "signal.signal(signal.SIGTERM, lambda n, f: sys.exit(n + 1))\nos.kill(os.getpid(), signal.SIGTERM)\nprint('no')",
    "alarm": "import signal\nsignal.setitimer(signal.ITIMER_REAL, 0.05)\nsignal.pause()",
    "handler and interrupted call": "import os, signal\nsignal.signal(signal.SIGUSR1, lambda n, f: print('got', n))\n"
    "os.kill(os.getpid(), signal.SIGUSR1)\nprint(signal.sigtimedwait([signal.SIGUSR2], 0.01))",
    "sigchld": "import os, signal\nsignal.signal(signal.SIGCHLD, lambda n, f: print('child'))\n"
    "pid = os.fork()\nif pid == 0: os._exit(3)\nprint(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))",
    "no child is there": "import os\ntry: os.wait()\nexcept ChildProcessError as e: print(e)",
    "broken pipe": "import os\nr, w = os.pipe()\nos.close(r)\nos.write(w, b'x')",
    "signals of a child program": "import subprocess, sys\nprint(subprocess.run([sys.executable, '-c',"
    "'import signal; print([str(signal.getsignal(n)) for n in (2, 13, 15, 17)])'], capture_output=True).stdout)",
    "environment of a child program": "import os, subprocess, sys\nos.environ['MINE'] = 'x'\nprint(subprocess.run("
    "[sys.executable, '-c', 'import os; print(os.environ[\"MINE\"])'], capture_output=True).stdout)",
    "warnings": "import warnings\ndef f(): warnings.warn('old', DeprecationWarning)\nf()\nwarnings.warn('mine')\n"
    "print(len(warnings.filters) > 0, warnings.filters[:1] == [])",
    "logging": "import logging\nlogging.info('no')\nlogging.warning('yes')\nlogging.basicConfig(level=20)\n"
    "logging.getLogger('mine').info('now')\nprint(logging.root.level, len(logging.root.handlers))",
    "thread's exception": "import threading\nt = threading.Thread(target=lambda: 1 / 0)\nt.start(); t.join()",
    "unraisable": "class A:\n    def __del__(self): raise ValueError('in del')\nA()\nprint('on')",
    "recursion": "import sys\ndef f(n): return n and f(n - 1)\nprint(f(900), sys.getrecursionlimit())\n"
    "try: f(10 ** 6)\nexcept RecursionError: print('too deep')",
    "standard input": "import sys\ntry: input()\nexcept EOFError as e: print(e)\n"
    "print(sys.stdin.isatty(), sys.stdin.fileno())",
    "closed output": "import sys\nsys.stdout.close()\nprint('x', file=sys.stderr)",
    "random seeds": "import random\nrandom.seed(7)\nprint(random.random(), random.getrandbits(64))",
    "numbers and collector": "import decimal, gc, sys, locale, resource, os, time\n"
    "print(decimal.getcontext(), gc.isenabled(), gc.get_threshold(), sys.getswitchinterval(), os.nice(0),"
    "locale.setlocale(locale.LC_ALL), time.tzname,"
    "[resource.getrlimit(n) for n in range(10)], locale.getpreferredencoding(), gc.get_count()[2] < 5, gc.garbage)",
    "threads and processes": "import os, threading, multiprocessing as mp, concurrent.futures, asyncio\n"
    "print(threading.main_thread().ident == threading.get_ident(), threading.get_native_id() == os.getpid(),"
    "os.getpgid(0) == os.getsid(0), len(os.listdir('/proc/self/task')), mp.active_children(),"
    "mp.get_start_method(True))\n"
    "with concurrent.futures.ThreadPoolExecutor(2) as pool: print(list(pool.map(str, range(3))))\n"
    "async def main(): await asyncio.sleep(0); return 4\nprint(asyncio.run(main()))",
    "its own source": "import inspect, pickle, __main__\ndef f(): return 5\n"
    "print(inspect.getsource(f), pickle.loads(pickle.dumps(f))(), inspect.getfile(f) == __file__, f.__module__)",
    "its own functions in processes": "import multiprocessing as mp\ndef f(x): return x * x\n"
    "if __name__ == '__main__':\n    with mp.get_context('forkserver').Pool(1) as pool: print(pool.map(f, [1, 2, 3]))",
    "shared memory": "from multiprocessing import shared_memory\nm = shared_memory.SharedMemory(create=True, size=10)\n"
    "m.buf[0] = 7\nprint(m.buf[0])\nm.close(); m.unlink()",
    "fault handler": "import faulthandler, signal, sys\nprint(faulthandler.is_enabled())\n"
    "faulthandler.register(signal.SIGUSR1, file=sys.stdout, all_threads=False)\nprint('on')",
    "traceback of a chain": "def f(): raise ExceptionGroup('several', [ValueError(1), KeyError(2)])\nf()"
    if sys.version_info >= (3, 11)
    else "raise ValueError('one') from KeyError('two')",
    "notes and long lines": "try:\n    eval('1 +')\nexcept SyntaxError as e:\n    raise RuntimeError('outer') from e",
    "names of the interpreter": "import sys\n"
    "print(exit.__class__, help, sys.prefix, sys.base_prefix, sys.warnoptions, sys.dont_write_bytecode,"
    "sys.implementation.name, sys.executable, copyright is not None)",
    "writes to its own main": "import sys, __main__\n__main__.late = 1\n"
    "print(late, sys.modules['__main__'] is __main__)",
    "leaves by execv": "import os, sys\nos.execv(sys.executable, [sys.executable, '-c', 'print(41 + 1)'])",
    "exit in a fork": "import os, sys\npid = os.fork()\nif pid == 0: sys.exit(6)\n"
    "print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))",
    "hooks in order": "import atexit, threading, time\n"
    "atexit.register(print, 'last')\natexit.register(print, 'first')\n"
    "threading.Thread(target=lambda: (time.sleep(0.05), print('thread'))).start()\nprint('end')",
    "hook that raises": "import atexit\n@atexit.register\ndef bad(): raise ValueError('in hook')\nprint('end')",
}


@pytest.mark.parametrize("body", WITHOUT_TORCH.values(), ids=WITHOUT_TORCH)
def test_a_script_behaves_alike(warm, python, tmp_path, body):
    """Signals, children, warnings, logging, threads, pools, tracebacks, hooks: as under plain Python."""
    expected = python(body, tmp_path)
    result = warm.run(body, tmp_path)
    told = (result.codes[0], result.out[0], ADDRESS.sub("0x", result.err[0]))
    assert told == (expected.returncode, expected.stdout, ADDRESS.sub("0x", expected.stderr))


WITH_TORCH = """
    import os, random, sys, warnings
    before = dict(os.environ)
    import numpy, torch
    import torch.nn as nn
    from torch.nn.parallel import DistributedDataParallel
    print({name: value for name, value in os.environ.items() if before.get(name) != value})
    print([each[:3] for each in warnings.filters if each[2] in (UserWarning, RuntimeWarning)][:5])
    print(torch.get_default_dtype(), torch.is_grad_enabled(), torch.get_num_interop_threads(), torch.get_num_threads())
    print(torch.are_deterministic_algorithms_enabled(), torch.backends.mkldnn.enabled, numpy.geterr())
    print(torch.cuda.is_initialized(), torch.distributed.is_initialized(), torch.utils.data.get_worker_info())
    print(torch.get_rng_state().shape, torch.initial_seed() > 0, torch.is_inference_mode_enabled())
    for seed in (0, 1):
        torch.manual_seed(seed), numpy.random.seed(seed), random.seed(seed)
        print(torch.rand(3), torch.randn(2), torch.randperm(5), numpy.random.rand(2), random.random())
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        loss = model(torch.randn(3, 4)).square().mean()
        optimizer.zero_grad(); loss.backward(); optimizer.step()
    print(loss.item(), [p.sum().item() for p in model.parameters()])
    torch.nn.functional.softmax(torch.ones(2))
    torch.zeros(2).view(3)
    """


def test_a_script_with_torch_behaves_alike(warm, tmp_path):
    """State, seeded numbers, three steps of training, a warning and an error of torch: as under plain Python."""
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(WITH_TORCH))
    expected = subprocess.run(
        [sys.executable, "-u", str(script)],
        cwd=tmp_path,
        env=warm.base_env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    warm.start(Command((str(script),)), tmp_path)
    result = warm.finish()
    assert expected.returncode == 1
    assert "shape '[3]' is invalid" in expected.stderr
    assert (result.codes[0], result.out[0], result.err[0]) == (expected.returncode, expected.stdout, expected.stderr)


def test_data_loading_with_a_seed(warm, python, tmp_path):
    """Shuffled batches from DataLoader workers, their seeds and their augmentation are those of plain Python."""
    body = """
        import random
        import torch
        from torch.utils.data import DataLoader, Dataset
        class Noisy(Dataset):
            def __len__(self): return 8
            def __getitem__(self, k): return k + torch.rand(1) + random.random()
        if __name__ == "__main__":
            torch.manual_seed(3)
            random.seed(3)
            loader = DataLoader(Noisy(), batch_size=3, shuffle=True, num_workers=2)
            for epoch in range(2):
                print([batch.tolist() for batch in loader])
        """
    expected = python(body, tmp_path)
    result = warm.run(body, tmp_path)
    assert (result.codes[0], result.out[0], result.err[0]) == (0, expected.stdout, expected.stderr)
    assert expected.stdout.count("[[[") == 2
