"""elasticrt.spawn from IPython's cells, as a notebook runs them."""

from IPython.core.interactiveshell import InteractiveShell

shell = InteractiveShell.instance()
CELLS = (
    "import torch, torch.distributed as dist\nfrom torch import nn\nimport elasticrt\nWIDTH = 4",
    "class Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
    "        self.layer = nn.Linear(WIDTH, 1)\n    def forward(self, x):\n        return self.layer(x)",
    "def train(i, start):\n    dist.init_process_group('gloo')\n    total = torch.tensor([start + i])\n"
    "    dist.all_reduce(total)\n    return total.item(), tuple(Net()(torch.zeros(2, WIDTH)).shape)",
    "values = elasticrt.spawn(train, args=(1.0,), nprocs=2)",
)
for cell in CELLS:
    shell.run_cell(cell, store_history=True).raise_error()
assert shell.user_ns["values"] == {0: (3.0, (2, 1)), 1: (3.0, (2, 1))}, shell.user_ns["values"]
print("result: both values", flush=True)
