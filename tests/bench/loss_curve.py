"""The loss curve of a run whose world goes 4, 2, 3, 1, 4 with kills in between, beside that of one left alone.

    python -m tests.bench.loss_curve

writes loss_curve.txt and loss_curve.svg under tests/bench/results. `tests/chaos/test_loss_curve.py` checks the same.
Beside the plain model there is one with batch norm over all ranks, one with each rank's own batch norm (which is bound
to notice), and the two that are broken on purpose.
"""

from __future__ import annotations

import json
import math
import secrets
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.bench.raw import this_run
from tests.cluster import REPOSITORY, TOGETHER, Cluster, kill

SCRIPT = REPOSITORY / "tests" / "bench" / "curve_ddp.py"
RESULTS = REPOSITORY / "tests" / "bench" / "results"
STEPS_PER_EPOCH = 18
EPOCHS = 25
STEPS_BETWEEN = 12
PAUSE_S = 0.1
DRAINED = 143
"""How an agent ends that was told to leave."""
LEFT, TOP, WIDTH, HEIGHT = 60, 40, 700, 320


@dataclass(frozen=True)
class Curve:
    """One run: the loss of every step that counted, the world size it was trained with, and the final weights.

    `again`: how many steps were trained a second time, and the largest relative difference of their losses.
    """

    losses: dict[int, float]
    worlds: dict[int, int]
    weights: dict[str, list[float]]
    again: int
    again_differs: float


def read(directory: Path) -> Curve:
    """The record of a run. A step that was trained again counts as it was trained last."""
    losses: dict[int, float] = {}
    worlds: dict[int, int] = {}
    weights: dict[str, list[float]] = {}
    again, differs = 0, 0.0
    for line in (directory / "losses.jsonl").read_text().splitlines():
        entry = json.loads(line)
        if "weights" in entry:
            weights = entry["weights"]
            continue
        step = entry["step"]
        if step in losses:
            again += 1
            differs = max(differs, _relative(losses[step], entry["loss"]))
        losses[step], worlds[step] = entry["loss"], entry["world"]
    return Curve(losses, worlds, weights, again, differs)


def largest_difference(one: Curve, other: Curve) -> float:
    """Of the two losses of a step, relative to the larger, over the steps that both have."""
    return max(_relative(one.losses[step], other.losses[step]) for step in set(one.losses) & set(other.losses))


def weights_differ(one: Curve, other: Curve) -> float:
    """The largest absolute difference of a final weight."""
    return max(abs(a - b) for name in one.weights for a, b in zip(one.weights[name], other.weights[name], strict=True))


def _relative(one: float, other: float) -> float:
    return abs(one - other) / max(abs(one), abs(other), 1e-12)


def run(directory: Path, *, disturb: bool, epochs: int = EPOCHS, kind: str = "whole") -> Curve:
    """Train with four nodes. With `disturb` the world goes 4, 2, 3, 1, 4, with workers and a node killed as well.

    Raises RuntimeError when a node ends in any way but well, drained or killed by us.
    """
    options = ["--nnodes", "1:4", "--join", "now", *TOGETHER, "--max-restarts", "20"]
    script = [str(SCRIPT), str(directory), str(epochs), str(PAUSE_S), kind]
    with Cluster(directory, f"curve-{secrets.token_hex(4)}", options, script) as cluster:
        for index in range(4):
            cluster.start(f"node-{index}")
        _await_world(cluster, 4)
        if disturb:
            _disturb(cluster)
        codes = cluster.ended(timeout_s=240.0)
        if not set(codes.values()) <= {0, DRAINED, -signal.SIGKILL} or 0 not in codes.values():
            raise RuntimeError(f"{codes}\n{cluster.story()}")
    return read(directory)


def _disturb(cluster: Cluster) -> None:
    """Six events, with some steps between."""
    _train_on(cluster)
    _leave(cluster, "node-1")
    _leave(cluster, "node-3")
    _await_world(cluster, 2)
    _train_on(cluster)
    kill(cluster.holder_of_rank(1).worker_pids()[1])
    _train_on(cluster)
    _join(cluster, 3, "node-4")
    _train_on(cluster)
    kill(cluster.agents["node-2"].pid)
    _await_world(cluster, 2)
    _leave(cluster, "node-4")
    _await_world(cluster, 1)
    _train_on(cluster)
    kill(cluster.holder_of_rank(0).worker_pids()[0])
    _train_on(cluster)
    _join(cluster, 4, "node-5", "node-6", "node-7")
    _train_on(cluster)


def _join(cluster: Cluster, size: int, *names: str) -> None:
    """New nodes come to a world of `size`. However long they take, not many steps go by."""
    slow = cluster.directory / "slow"
    slow.touch()
    for name in names:
        cluster.start(name)
    _await_world(cluster, size)
    slow.unlink()


def _train_on(cluster: Cluster) -> None:
    cluster.wait_for_step_after(cluster.last_step() + STEPS_BETWEEN)


def _leave(cluster: Cluster, name: str) -> None:
    cluster.agents[name].process.send_signal(signal.SIGTERM)


def _await_world(cluster: Cluster, size: int) -> None:
    def reached() -> bool:
        generations = cluster.events("generation")
        return bool(generations) and generations[-1]["world_size"] == size

    cluster.wait(f"a world of {size}", reached, timeout_s=120.0)


def draw(calm: Curve, disturbed: Curve) -> str:
    """Both losses against the step, on a logarithmic scale, and the world sizes below. Pure."""
    steps = max(calm.losses)
    low = math.floor(math.log10(min(*calm.losses.values(), *disturbed.losses.values())))
    high = math.ceil(math.log10(max(*calm.losses.values(), *disturbed.losses.values())))

    def x(step: int) -> float:
        return LEFT + WIDTH * step / steps

    def y(loss: float) -> float:
        return TOP + HEIGHT * (high - math.log10(loss)) / (high - low)

    parts = ['<rect width="100%" height="100%" fill="white"/>']
    parts += [_text(LEFT, 20, "Loss of every global batch: undisturbed at world size 4, and with worlds 4-2-3-2-1-4")]
    for power in range(low, high + 1):
        parts.append(_line([(LEFT, y(10.0**power)), (LEFT + WIDTH, y(10.0**power))], "#ddd", 1))
        parts.append(_text(LEFT - 44, y(10.0**power) + 4, f"{10.0**power:g}"))
    parts.append(_line([(x(step), y(loss)) for step, loss in sorted(calm.losses.items())], "#c9a227", 5))
    parts.append(_line([(x(step), y(loss)) for step, loss in sorted(disturbed.losses.items())], "#0b7a75", 1.5))
    base = TOP + HEIGHT + 70
    stairs = [(x(step), base - 12 * world) for step, world in sorted(disturbed.worlds.items())]
    parts.append(_line(stairs, "#5b7db1", 2))
    parts += [_text(LEFT - 44, base - 12 * world + 4, f"W = {world}") for world in (1, 4)]
    parts += [_text(x(step) - 8, base + 16, str(step)) for step in range(0, steps + 1, max(1, steps // 9))]
    parts.append(_text(LEFT + WIDTH - 230, TOP + 16, "thick: undisturbed; thin: disturbed"))
    size = f'width="{LEFT + WIDTH + 30}" height="{base + 30}" viewBox="0 0 {LEFT + WIDTH + 30} {base + 30}"'
    start = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="11">'
    return "\n".join([start, *parts, "</svg>", ""])


def _line(points: Sequence[tuple[float, float]], colour: str, width: float) -> str:
    path = " ".join(f"{across:.1f},{down:.1f}" for across, down in points)
    return f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{width}"/>'


def _text(x: float, y: float, words: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" fill="#222">{words}</text>'


def about(calm: Curve, disturbed: Curve, name: str) -> list[str]:
    """How two runs of one model differ, in lines. Pure."""
    last = calm.losses[max(calm.losses)]
    return [
        name,
        f"  steps                                  {len(calm.losses)} and {len(disturbed.losses)}",
        f"  world sizes of the disturbed run       {sorted(set(disturbed.worlds.values()))}",
        f"  steps that were trained a second time  {disturbed.again} (losses differ by {disturbed.again_differs:.2g})",
        f"  loss, first to last                    {calm.losses[1]:.4f} to {last:.2g} ({calm.losses[1] / last:.0f} x)",
        f"  largest relative difference of a loss  {largest_difference(calm, disturbed):.2g}",
        f"  largest difference of a final weight   {weights_differ(calm, disturbed):.2g}",
    ]


STORIES = {
    "whole": "a model without batch norm, double precision",
    "single": "the same in single precision",
    "syncnorm": "with batch norm over all ranks",
    "localnorm": "with batch norm of each rank's own slice: not the same model at another world size",
}
BROKEN = {
    "unweighted": "broken on purpose: gradients not weighted",
    "shifted": "broken on purpose: one batch skipped at each restart",
}


def main() -> None:
    """All runs, the comparisons, the picture."""
    ran = this_run(secrets.token_hex(4), {})
    lines = [f"{ran.command}   ({ran.date}, commit {ran.commit})", f"{ran.machine}; {ran.versions}"]
    curves: dict[tuple[str, bool], Curve] = {}
    with tempfile.TemporaryDirectory(prefix="ert-curve-") as name:
        for kind in (*STORIES, *BROKEN):
            for disturb in (True,) if kind in BROKEN else (False, True):
                directory = Path(name) / f"{kind}-{disturb}"
                directory.mkdir()
                began = time.monotonic()
                curves[kind, disturb] = run(directory, disturb=disturb, kind=kind)
                sys.stdout.write(f"{kind}, {'disturbed' if disturb else 'calm'}: {time.monotonic() - began:.0f} s\n")
                sys.stdout.flush()
    for kind, words in STORIES.items():
        lines += ["", *about(curves[kind, False], curves[kind, True], words)]
    for kind, words in BROKEN.items():
        lines += ["", *about(curves["whole", False], curves[kind, True], words)]
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "loss_curve.txt").write_text("\n".join(lines) + "\n")
    (RESULTS / "loss_curve.svg").write_text(draw(curves["whole", False], curves["whole", True]))
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
