"""What a checkpoint directory holds, and what follows from it. Pure.

A checkpoint is three files with one stem, `step-<step>-g<generation>-<nonce>`: the payload `.pt`, the manifest `.json`
and, once the commit was accepted, the mark `.committed`. Each manifest names its parent, so that the directory is a
tree and the history of a run is the chain from its head to the root. The newest one is told by a serial number, because
after starting over, or going back, the newest has not the most steps.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from elasticrt.ipc.env import Commit

FORMAT = 1
PAYLOAD, MANIFEST, MARK = ".pt", ".json", ".committed"
MANIFEST_BYTES_MAX = 1 << 20
TEMPORARY = ".saving-"
"""Temporaries start with this; the rest of their name, up to a dot if any, is the stem of what they would become."""

_NAME = re.compile(r"(step-(\d{1,18})-g(\d{1,9})-([0-9a-f]{16}))(\.pt|\.json|\.committed)")


def stem_of(step: int, generation: int, nonce: str) -> str:
    """The common part of a checkpoint's file names."""
    return f"step-{step}-g{generation}-{nonce}"


@dataclass(frozen=True)
class Name:
    """A file name that follows the pattern, taken apart."""

    stem: str
    step: int
    generation: int
    nonce: str
    suffix: str

    @classmethod
    def parse(cls, name: str) -> Name | None:
        """None for any other name: such files are nobody's business."""
        match = _NAME.fullmatch(name)
        if match is None:
            return None
        stem, step, generation, nonce, suffix = match.groups()
        return cls(stem, int(step), int(generation), nonce, suffix)


@dataclass(frozen=True)
class Manifest:
    """One checkpoint as its manifest describes it.

    Attributes:
        commit: what was, or was to be, committed. Its `directory` is not trusted: directories move.
        run: the run that wrote it, "" when it had no name.
        world_size: of the generation that wrote it.
        about: for readers: position, sampler, versions.
    """

    commit: Commit
    run: str
    world_size: int
    about: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> bytes:
        """The file's content: plain JSON, with a digest of all the rest of it in `check`."""
        fields = json.loads(json.dumps({"format": FORMAT, **asdict(self)}))
        return json.dumps({**fields, "check": _check(fields)}, sort_keys=True, indent=1).encode() + b"\n"

    @classmethod
    def from_json(cls, text: bytes | bytearray, stem: str) -> Manifest:
        """Parse the manifest found under `stem`. Raises ValueError saying what is wrong."""
        try:
            fields = json.loads(text.decode())
        except RecursionError:
            raise ValueError("it is nested too deep") from None
        check = fields.pop("check", None) if isinstance(fields, dict) else None
        if not isinstance(fields, dict) or fields.get("format") != FORMAT:
            raise ValueError(f"it is not of format {FORMAT} (made by a newer elasticrt?)")
        if check != _check(fields):
            raise ValueError("its content is not what was written")
        del fields["format"]
        if set(fields) != set(cls.__dataclass_fields__):
            raise ValueError(f"it needs exactly the fields {sorted(cls.__dataclass_fields__)}")
        commit = Commit.from_fields(fields.pop("commit"))
        if stem_of(commit.step, commit.generation, commit.nonce) != stem or commit.file != stem + PAYLOAD:
            raise ValueError("it describes another file (renamed?)")
        for name, kind in (("world_size", int), ("run", str), ("about", dict)):
            if type(fields[name]) is not kind:
                raise ValueError(f"field {name!r}: got {fields[name]!r:.80}; expected {kind.__name__}")
        return cls(commit=commit, **fields)


def _check(fields: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True)
class History:
    """The manifests of a directory by nonce, and the nonces that carry a commit mark (readable manifest or not)."""

    manifests: Mapping[str, Manifest]
    marked: frozenset[str]

    def lineage(self, nonce: str) -> Iterator[Manifest]:
        """From the checkpoint `nonce` to its oldest known ancestor; ends where a manifest is missing."""
        seen: set[str] = set()
        while nonce in self.manifests and nonce not in seen:
            seen.add(nonce)
            manifest = self.manifests[nonce]
            yield manifest
            nonce = manifest.commit.parent

    def beyond(self, nonce: str, run: str) -> list[Manifest]:
        """Newest first: what `run` has committed on top of its head `nonce`. Nothing, unless etcd has forgotten it."""
        for head in self.committed():
            if head.run != run:
                continue
            later: list[Manifest] = []
            for manifest in self.lineage(head.commit.nonce):
                if manifest.commit.nonce == nonce:
                    return later
                later.append(manifest)
                if manifest.commit.parent == nonce:
                    return later
        return []

    def committed(self) -> list[Manifest]:
        """Newest first: everything marked, and everything that a marked one descends from."""
        nonces = {m.commit.nonce for marked in self.marked for m in self.lineage(marked)}
        return sorted(
            (self.manifests[n] for n in nonces), key=lambda m: (m.commit.serial, m.commit.nonce), reverse=True
        )

    def candidates(self) -> list[Manifest]:
        """What to try, in this order, when nothing says where to resume: the newest, its ancestors, then the others."""
        newest_first = self.committed()
        ordered = {m.commit.nonce: m for head in newest_first for m in self.lineage(head.commit.nonce)}
        return list(ordered.values())

    @property
    def serial(self) -> int:
        """The highest serial number, 0 when there is none."""
        return max((m.commit.serial for m in self.manifests.values()), default=0)


def doomed(history: History, names: list[Name], head: str, keep: int, before: frozenset[str]) -> list[str]:
    """Stems that may be deleted now that `head` is committed.

    Kept are the newest of the head's chain, of `keep` different steps, and everything that could belong to somebody
    newer: without a commit, more steps than the head or not there `before`. What other histories have committed (before
    somebody started over) goes as soon as the chain has so many, all of them newer: until then it is what there is to
    go back to. Nothing goes where somebody newer has written a checkpoint: then this process is no longer the one to
    tidy up.

    Generation numbers tell nothing here, because each store counts its own; who is newer is told by serial numbers.

    Args:
        history: what the directory tells.
        names: the files in it.
        head: the commit's nonce; its writer was the only one that could commit since it claimed the directory.
        keep: how many to keep.
        before: nonces that were there when its writer claimed the directory. Who wrote them cannot commit any more.
    """
    chain = [m.commit for m in history.lineage(head)]
    if not chain or history.serial > chain[0].serial:
        return []
    steps = list(dict.fromkeys(c.step for c in chain))[:keep]
    kept = {c.nonce: c.serial for c in chain if c.step in steps}
    surplus = {c.nonce for c in chain} - set(kept)
    committed = {m.commit.nonce: m.commit.serial for m in history.committed()}
    if len(steps) == keep:
        surplus |= {nonce for nonce, serial in committed.items() if nonce in before and serial < min(kept.values())}
    stems: dict[str, None] = {}
    for name in names:
        orphan = name.nonce in before and name.nonce not in {*committed, *history.marked} and name.step <= chain[0].step
        if name.nonce not in kept and (name.nonce in surplus or orphan):
            stems[name.stem] = None
    return list(stems)
