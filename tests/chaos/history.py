"""Checks on what the recorder wrote: ranks, resume points, and that every sample counted exactly once."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class GenerationRecord:
    """What the workers of one generation recorded."""

    starts: list[dict] = field(default_factory=list)
    batches: dict[int, list[str]] = field(default_factory=dict)  # step -> sample ids of all ranks


@dataclass
class History:
    """All generations of a run by number."""

    generations: dict[int, GenerationRecord]

    @classmethod
    def read(cls, directory: Path) -> History:
        """Read all records. The last line of a killed process may be cut."""
        generations: dict[int, GenerationRecord] = {}
        for path in sorted(directory.glob("*.jsonl")):
            for line in path.read_text().splitlines():
                try:
                    entry = json.loads(line)
                except ValueError:
                    continue
                record = generations.setdefault(entry["generation"], GenerationRecord())
                if entry["kind"] == "start":
                    record.starts.append(entry)
                else:
                    record.batches.setdefault(entry["step"], []).extend(entry["ids"])
        return cls(generations)

    def check_ranks(self) -> None:
        """S3: in each generation the ranks are 0..W-1, each once, and all agree on what they must agree on.

        A generation that was replaced while it started may have fewer starts than ranks, never two of one rank.
        """
        for number, record in self.generations.items():
            envs = [start["env"] for start in record.starts]
            (world,) = {int(env["WORLD_SIZE"]) for env in envs}
            ranks = sorted(int(env["RANK"]) for env in envs)
            assert len(set(ranks)) == len(ranks), f"generation {number} started a rank twice: {ranks}"
            assert set(ranks) <= set(range(world)), f"generation {number}: ranks {ranks} of world {world}"
            if self.stepped(number):
                assert ranks == list(range(world)), f"generation {number} stepped with ranks {ranks} of {world}"
            for name in ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT", "GROUP_WORLD_SIZE"):
                assert len({env[name] for env in envs}) == 1, f"generation {number} disagrees on {name}"
            assert len({start["resume"] for start in record.starts}) == 1

    def stepped(self, number: int) -> bool:
        """Whether a second step was begun in a generation, so that a first was completed by all."""
        return len(self.generations[number].batches) >= 2

    def resume(self, number: int) -> int:
        """The step a generation resumed from."""
        return int(self.generations[number].starts[0]["resume"])

    def counted(self) -> dict[int, list[str]]:
        """Sample ids by global step, along the history that counts: each generation up to the next resume point."""
        numbers = sorted(self.generations)
        steps: dict[int, list[str]] = {}
        for number in numbers:
            resume = self.resume(number)
            steps = {step: ids for step, ids in steps.items() if step <= resume}
            for step, ids in self.generations[number].batches.items():
                assert step > resume, f"generation {number} did step {step} though it resumed from {resume}"
                steps[step] = ids
        return steps

    def check_exactly_once(self, steps_per_epoch: int, epochs: int) -> None:
        """S5: the counted steps are 1..epochs*steps_per_epoch, and each epoch is the same set, each sample once."""
        steps = self.counted()
        assert sorted(steps) == list(range(1, epochs * steps_per_epoch + 1)), _gaps(steps, epochs * steps_per_epoch)
        reference: set[str] | None = None
        for epoch in range(epochs):
            ids: Counter[str] = Counter()
            for step in range(epoch * steps_per_epoch + 1, (epoch + 1) * steps_per_epoch + 1):
                ids.update(steps[step])
            twice = [sample for sample, count in ids.items() if count > 1]
            assert not twice, f"epoch {epoch}: {len(twice)} samples seen more than once"
            reference = reference or set(ids)
            assert set(ids) == reference, f"epoch {epoch}: {len(reference ^ set(ids))} samples differ from epoch 0"


def _gaps(steps: dict[int, list[str]], last: int) -> str:
    missing = sorted(set(range(1, last + 1)) - set(steps))
    extra = sorted(set(steps) - set(range(1, last + 1)))
    return f"missing steps {missing[:10]}, unexpected steps {extra[:10]}"
