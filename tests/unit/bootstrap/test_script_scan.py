"""What a script sets before its imports is found by reading it."""

from __future__ import annotations

import pytest

from elasticrt.bootstrap.script_scan import early_spawn, early_write, first_imports, parse

TORCH = "import torch\n"


@pytest.mark.parametrize(
    ("source", "variable"),
    [
        # Before the imports, in every spelling.
        ("import os\nos.environ['OMP_NUM_THREADS'] = '4'\n" + TORCH, "OMP_NUM_THREADS"),
        ("import os\nos.environ['TORCH_LOGS'] = str(1)\nimport numpy", "TORCH_LOGS"),
        ("import os\nos.environ.setdefault('OMP_NUM_THREADS', '4')\n" + TORCH, "OMP_NUM_THREADS"),
        ("import os\nos.environ.update(OMP_NUM_THREADS='4')\n" + TORCH, "variables"),
        ("import os\nos.environ |= {'A': 'b'}\n" + TORCH, "variables"),
        ("import os\nos.environ.update(read())\n" + TORCH, "variables"),
        ("import os\nos.putenv('OMP_NUM_THREADS', '4')\n" + TORCH, "OMP_NUM_THREADS"),
        ("import os\ndel os.environ['SET']\n" + TORCH, "SET"),
        ("import os\nos.environ.pop('SET', None)\n" + TORCH, "SET"),
        ("import os\nfor name in names: os.environ[name] = '1'\n" + TORCH, "variables"),
        ("import os\nfor name in names: os.environ.pop(name)\n" + TORCH, "variables"),
        ("import os\nos.environ.clear()\n" + TORCH, "variables"),
        ("from os import environ as e\ne['OMP_NUM_THREADS'] = '4'\n" + TORCH, "OMP_NUM_THREADS"),
        ("import os as o\no.environ['A'], o.environ['MASTER_PORT'] = 'x', 'y'\n" + TORCH, "A"),
        ("from dotenv import load_dotenv\nload_dotenv()\n" + TORCH, "variables"),
        ("import os\nif True:\n    os.environ['MKL_NUM_THREADS'] = '1'\n" + TORCH, "MKL_NUM_THREADS"),
        ("import os\ndef early():\n    os.environ['A'] = '1'\nearly()\n" + TORCH, "A"),
        ("import os\ndef main():\n    os.environ['A'] = '1'\n    import torch\nmain()", "A"),
        ("import os\nif TYPE_CHECKING:\n    import torch\nos.environ['A'] = '1'\nimport mine", "A"),
        ("import os\nos.environ['A'] = '1'\nfrom . import model", "A"),
        ("import os\nos.environ['SET'] = 'other'\n" + TORCH, "SET"),
        # A fork sees these as a fresh interpreter does.
        (TORCH + "import os\nos.environ['OMP_NUM_THREADS'] = '4'\nimport mine", ""),
        ("import os\n" + TORCH + "def main():\n    os.environ['A'] = '1'\n    import mine", ""),
        ("import os\ntry:\n    import torch\nexcept ImportError: raise\nos.environ['A'] = '1'\nimport mine", ""),
        ("import os\nimport mine\nos.environ['A'] = '1'", ""),
        ("import os\nos.environ['A'] = '1'\nimport sys, json", ""),
        ("import os\nos.environ['MASTER_ADDR'] = 'localhost'\nos.environ['RANK'] = '0'\n" + TORCH, ""),
        ("import os\nos.environ['CUDA_VISIBLE_DEVICES'] = '0'\nos.environ['NCCL_DEBUG'] = 'INFO'\n" + TORCH, ""),
        ("import os\nos.environ['PYTHONHASHSEED'] = '0'\nos.environ['WANDB_MODE'] = 'offline'\n" + TORCH, ""),
        ("import os\nprint(os.environ['A'], os.environ.get('B'))\n" + TORCH, ""),
        ("mine = {}\nmine['A'] = '1'\nmine.update(B='2')\n" + TORCH, ""),
        ("x = = 1", ""),
        ("\0", ""),
        ("", ""),
    ],
)
def test_early_writes(source, variable):
    """A write before an import counts, unless torch is there already or the variable is read late."""
    found = early_write(parse(source))
    assert bool(found) == bool(variable), found
    assert variable in found


def test_the_reason_names_both_lines():
    """The words say which line sets what, and before which import."""
    source = "import os\n\nos.environ['OMP_NUM_THREADS'] = '4'\nimport json\nimport numpy as np\nimport torch\n"
    assert early_write(parse(source)) == "line 3 sets OMP_NUM_THREADS before `import numpy` in line 5"


@pytest.mark.parametrize(
    ("source", "called"),
    [
        ("import torch.multiprocessing as mp\nmp.spawn(f, nprocs=2)", "mp.spawn"),
        ("from torch import multiprocessing\ndef main():\n    multiprocessing.spawn(f)", "multiprocessing.spawn"),
        ("import torch\ntorch.multiprocessing.spawn(f)", "torch.multiprocessing.spawn"),
        ("from torch.multiprocessing import spawn\nspawn(f)", "spawn"),
        ("import torch.multiprocessing as mp\nmp.start_processes(f)", "mp.start_processes"),
        ("import elasticrt\nelasticrt.spawn(f)", ""),
        ("import torch.multiprocessing as mp\nmp.Queue()", ""),
        ("import mp\nmp.spawn(f)", ""),
        ("def spawn(f): pass\nspawn(f)", ""),
        ("not python", ""),
    ],
)
def test_early_spawn(source, called):
    """A script that starts its training processes by mp.spawn is found, under whatever name it has the function."""
    found = early_spawn(parse(source))
    assert (f" calls {called}," in found) if called else found == ""


LIBRARIES = ["numpy", "scipy.stats", "PIL.Image"]


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ('"""Text."""\nimport os, numpy as np\nfrom scipy import stats\nimport mine\nimport PIL.Image', LIBRARIES),
        ("import numpy, scipy.stats, PIL.Image\nX = 1\nimport einops", LIBRARIES),
        ("from __future__ import annotations\nfrom . import scipy\nimport torchvision", ["torchvision"]),
        ("import os\nos.chdir('x')\nimport scipy", []),
        ("try:\n    import scipy\nexcept ImportError: pass", []),
        ("import pandas", []),
    ],
)  # fmt: skip
def test_what_a_script_begins_with(source, names):
    """Imports of well-known libraries that come before anything else of the script's are known ahead."""
    assert first_imports(parse(source)) == names
