"""Trains a small GPT on characters, elastic. It learns to write something that looks like Python.

    python examples/char_gpt.py
    torchrun --standalone --nproc-per-node 2 examples/char_gpt.py
    elasticrt run --nnodes 1:4 examples/char_gpt.py

The text is the source code of this machine's standard library. Nothing is downloaded.
"""

import argparse
import sysconfig
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: N817  Everybody calls it DDP.
from torch.utils.data import DataLoader, Dataset

import elasticrt

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--steps", type=int, default=600)
parser.add_argument("--global-batch-size", type=int, default=32, help="samples per step, over all processes")
parser.add_argument("--micro-batch-size", type=int, default=None, help="the most samples in one forward")
parser.add_argument("--context", type=int, default=64, help="characters a prediction may look back")
parser.add_argument("--layers", type=int, default=3)
parser.add_argument("--width", type=int, default=96)
parser.add_argument("--heads", type=int, default=4)
parser.add_argument("--lr", type=float, default=2e-3)
parser.add_argument("--data-dir", type=Path, default=Path("data"))
parser.add_argument("--checkpoint-dir", type=Path, default=Path("ckpt-gpt"))
args = parser.parse_args()

# The data: all modules of the standard library in one text, ASCII only.


def build(directory: Path) -> None:
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = "\n\n".join(path.read_text(encoding="utf-8", errors="ignore") for path in sources)
    codes = [ord(c) for c in text if c == "\n" or " " <= c <= "~"]
    torch.save(torch.tensor(codes, dtype=torch.uint8), directory / "text.pt")


class Text(Dataset):
    """Pieces of `context` + 1 characters, as numbers: a character's code less 32. A line's end is 127 - 32 = 95."""

    def __init__(self, path: Path, context: int):
        codes = torch.load(path / "text.pt", weights_only=True).long()
        self.tokens = torch.where(codes == ord("\n"), 95, codes - 32)
        self.context = context

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.context

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        piece = self.tokens[i * self.context : (i + 1) * self.context + 1]
        return piece[:-1], piece[1:]


# The model: a plain GPT, without dropout.


class Block(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n, t, c = x.shape
        q, k, v = (part.view(n, t, self.heads, -1).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, dim=2))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(n, t, c))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, characters: int, context: int, layers: int, width: int, heads: int):
        super().__init__()
        self.token = nn.Embedding(characters, width)
        self.place = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, characters))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        place = self.place(torch.arange(tokens.shape[1], device=tokens.device))
        return self.head(self.blocks(self.token(tokens) + place))


@torch.no_grad()
def write(model: nn.Module, beginning: str, length: int) -> str:
    tokens = torch.tensor([[ord(c) - 32 for c in beginning]], device=ctx.device)
    for _ in range(length):
        logits = model(tokens[:, -args.context :])[0, -1]
        tokens = torch.cat([tokens, torch.multinomial(F.softmax(logits / 0.8, 0), 1).view(1, 1)], dim=1)
    return "".join("\n" if t == 95 else chr(t + 32) for t in tokens[0].tolist())


# Training.

ctx = elasticrt.init()
torch.manual_seed(0)
text = Text(elasticrt.prepare(args.data_dir / "stdlib", build), args.context)
sampler = elasticrt.ElasticBatchSampler(text, args.global_batch_size, micro_batch_size=args.micro_batch_size)
loader = DataLoader(text, batch_sampler=sampler)
model = DDP(GPT(96, args.context, args.layers, args.width, args.heads).to(ctx.device))
optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
# The learning rate rises for 50 steps, then falls to the end. OneCycleLR would not do: it saves its length in the
# checkpoint, and a restart with more --steps would fail.
scheduler = torch.optim.lr_scheduler.LambdaLR(
    optimizer, lambda step: max(0.0, min((step + 1) / 50, 1 - step / args.steps))
)
loop = elasticrt.Loop(args.checkpoint_dir, sampler=sampler, model=model, optimizer=optimizer, scheduler=scheduler)

for _epoch in loop.epochs(1000, max_steps=args.steps):
    for x, y in loop.batches(loader):
        with loop.step():
            loss = F.cross_entropy(model(x.to(ctx.device)).flatten(0, 1), y.to(ctx.device).flatten())
            loss.backward()
            if loop.complete:
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
                loop.report(loss=loss)
                step = loop.steps_done + 1
                if ctx.is_first and step % 50 == 0:
                    print(f"step {step}  loss {loss.item():.3f}  world size {ctx.world_size}", flush=True)

if ctx.is_first:
    print(write(model.module, "def ", 300))
