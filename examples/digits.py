"""The data and the model of `mnist_ddp.py`: handwritten digits, and a small convolutional net.

If a directory has MNIST's own four IDX files (gzipped or not), these are the data. Otherwise the data are the digits
that come with scikit-learn: 1,797 images of 8x8 pixels, enlarged to MNIST's 28x28. Those for training are also moved by
two pixels in each direction, which makes 7,500. Nothing is downloaded.
"""

import gzip
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

MNIST_FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")


class Net(nn.Module):
    """Two convolutions and two linear layers. From images of shape (N, 1, 28, 28) to logits of shape (N, 10)."""

    def __init__(self, dropout: float = 0.0):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 3)
        self.conv2 = nn.Conv2d(32, 64, 3)
        self.fc1 = nn.Linear(64 * 12 * 12, 128)
        self.fc2 = nn.Linear(128, 10)
        self.dropout = dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.conv1(x))
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = F.dropout(x.flatten(1), self.dropout, self.training)
        x = F.dropout(F.relu(self.fc1(x)), 2 * self.dropout, self.training)
        return self.fc2(x)


def build(directory: Path, source: Path | None = None) -> None:
    """Write `train.pt` and `test.pt` into `directory`. Only one process calls this, see `elasticrt.prepare`."""
    splits = from_mnist(source) if source and has_mnist(source) else from_sklearn()
    for name, (images, labels) in splits.items():
        torch.save({"images": images, "labels": labels}, directory / f"{name}.pt")


def load(directory: Path) -> tuple[TensorDataset, TensorDataset]:
    """The datasets that `build` has written: images as floats around 0, labels as int64."""
    datasets = []
    for name in ("train", "test"):
        split = torch.load(directory / f"{name}.pt", weights_only=True)
        datasets.append(TensorDataset(split["images"].float().div(255).sub(0.1307).div(0.3081), split["labels"].long()))
    return datasets[0], datasets[1]


def from_sklearn() -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    from sklearn.datasets import load_digits

    digits = load_digits()
    small = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) * (255 / 16)
    # As in MNIST, a digit has 20 x 20 pixels in a field of 28 x 28.
    images = F.pad(F.interpolate(small, size=20, mode="bilinear"), (4, 4, 4, 4)).round().to(torch.uint8)
    labels = torch.tensor(digits.target, dtype=torch.uint8)
    shuffled = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, test = shuffled[:1500], shuffled[1500:]
    moves = [(0, 0), (0, 2), (0, -2), (2, 0), (-2, 0)]
    moved = torch.cat([images[train].roll(move, (2, 3)) for move in moves])
    return {"train": (moved, labels[train].repeat(len(moves))), "test": (images[test], labels[test])}


def has_mnist(source: Path) -> bool:
    return all((source / name).exists() or (source / f"{name}.gz").exists() for name in MNIST_FILES)


def from_mnist(source: Path) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    train_images, train_labels, test_images, test_labels = (read_idx(source / name) for name in MNIST_FILES)
    return {"train": (train_images.unsqueeze(1), train_labels), "test": (test_images.unsqueeze(1), test_labels)}


def read_idx(path: Path) -> torch.Tensor:
    """Read an IDX file of bytes.

    Its format: two zero bytes, the type, the number of dimensions, each size in four bytes, the data.
    """
    packed = path.with_name(path.name + ".gz")
    content = bytearray(gzip.decompress(packed.read_bytes()) if packed.exists() else path.read_bytes())
    dimensions = content[3]
    shape = [int.from_bytes(content[4 + 4 * i : 8 + 4 * i], "big") for i in range(dimensions)]
    return torch.frombuffer(content, dtype=torch.uint8, offset=4 + 4 * dimensions).reshape(shape).clone()
