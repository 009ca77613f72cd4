"""What a checkpoint directory holds, and what follows from it. Pure.

A checkpoint is two files with one stem, `step-<step>-g<generation>-<nonce>`: the payload `.pt`, and the manifest, which
is called `.draft` until its commit was accepted and `.json` from then on. Each manifest names its parent: the history
of a run is the chain from its head to the root. The newest checkpoint has the highest serial number, and not always the
most steps: a run may have started over, or gone back.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from elasticrt.ipc.env import Commit

FORMAT = 2
PAYLOAD, DRAFT, MANIFEST = ".pt", ".draft", ".json"
MANIFEST_BYTES_MAX = 1 << 20
# Temporaries start with this; the rest of their name is the stem of what they would become.
TEMPORARY = ".saving-"

NAME = re.compile(
    rf"(?P<temporary>{re.escape(TEMPORARY)})?"
    r"(?P<stem>step-\d{1,18}-g\d{1,9}-(?P<nonce>[0-9a-f]{16}))(?(temporary)|(?P<suffix>\.pt|\.draft|\.json))"
)
"""The name of a file of a checkpoint, whose files have the stem in common. A temporary has no suffix, and any other one
of PAYLOAD, DRAFT and MANIFEST. Files with other names are left alone."""


def stem_of(step: int, generation: int, nonce: str) -> str:
    """The common part of a checkpoint's file names."""
    return f"step-{step}-g{generation}-{nonce}"


@dataclass(frozen=True)
class Manifest:
    """One checkpoint as its manifest describes it."""

    commit: Commit  # What was, or was to be, committed. Its `directory` is not trusted: directories move.
    run: str  # The run that wrote it, "" when it had no name.
    world_size: int  # Of the generation that wrote it.

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
        if {name: type(value) for name, value in fields.items()} != _KINDS:
            raise ValueError(f"it needs exactly the fields {sorted(_KINDS)}, each of its kind")
        manifest = cls(**{**fields, "commit": Commit.from_fields(fields["commit"])})
        commit = manifest.commit
        if stem_of(commit.step, commit.generation, commit.nonce) != stem or commit.file != stem + PAYLOAD:
            raise ValueError("it describes another file (renamed?)")
        return manifest


_KINDS = {"commit": dict, "run": str, "world_size": int}


def _check(fields: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True)
class History:
    """What a directory tells."""

    manifests: Mapping[str, Manifest]  # Those that can be read, by nonce, drafts among them.
    marked: frozenset[str]  # The nonces of all that are no drafts, readable or not.
    troubles: Sequence[str] = ()  # What is wrong with those that can't be read.

    def lineage(self, nonce: str) -> Iterator[Manifest]:
        """From the checkpoint `nonce` to its oldest known ancestor; ends where a manifest is missing."""
        seen: set[str] = set()
        while nonce in self.manifests and nonce not in seen:
            seen.add(nonce)
            manifest = self.manifests[nonce]
            yield manifest
            nonce = manifest.commit.parent

    def ancestors(self, commit: Commit, run: str) -> Iterator[Manifest]:
        """What `commit` of `run` descends from, newest first. Behind a manifest that cannot be read it is what the run
        had committed before."""
        while True:
            for manifest in self.lineage(commit.parent):
                yield manifest
                commit = manifest.commit
            older = [each for each in self._of(commit, run) if each.commit.serial < commit.serial]
            if commit.parent not in self.marked or not older:
                return
            yield older[0]
            commit = older[0].commit

    def beyond(self, head: Commit, run: str) -> list[Manifest]:
        """Newest first: what `run` has committed after its `head`. Nothing, unless etcd has forgotten it."""
        later = [each for each in self._of(head, run) if each.commit.serial > head.serial]
        return [each for each in later if each.commit.reached >= head.reached]

    def _of(self, commit: Commit, run: str) -> list[Manifest]:
        """Newest first: what `run` has committed in the history of `commit`."""
        return [each for each in self.committed() if each.run == run and each.commit.history == commit.history]

    def committed(self) -> list[Manifest]:
        """Newest first: what is no draft, and everything that one of these descends from."""
        nonces = {m.commit.nonce for marked in self.marked for m in self.lineage(marked)}
        return sorted(
            (self.manifests[n] for n in nonces), key=lambda m: (m.commit.serial, m.commit.nonce), reverse=True
        )

    def candidates(self) -> list[Manifest]:
        """What to try, in this order, when nothing says where to resume: the newest, its ancestors, then the others."""
        ordered = {m.commit.nonce: m for head in self.committed() for m in self.lineage(head.commit.nonce)}
        return list(ordered.values())

    @property
    def serial(self) -> int:
        """The highest serial number, 0 when there is none."""
        return max((m.commit.serial for m in self.manifests.values()), default=0)


def doomed(
    history: History, names: list[re.Match[str]], head: str, keep: int, before: frozenset[str]
) -> list[re.Match[str]]:
    """Files, of `names` as NAME matches them, that may be deleted now that the commit with the nonce `head` is there.

    Manifests come first.

    The `keep` newest committed checkpoints stay, whichever history they belong to; older ones go. What was never
    committed goes if its nonce was there `before`, when the head's writer claimed the directory.
    """
    committed = [manifest.commit for manifest in history.committed()]
    # Once a newer process has written a checkpoint, that process tidies up. Serial numbers say what is newer.
    # Generation numbers do not, because each store counts its own.
    if not committed or committed[0].nonce != head or history.serial > committed[0].serial:
        return []
    surplus = {commit.nonce for commit in committed[keep:]}
    known = {commit.nonce for commit in committed} | history.marked
    # Only the head's writer could commit since it claimed the directory. The writers of these cannot any more.
    orphans = {each for each in names if each["nonce"] in before and (each["temporary"] or each["nonce"] not in known)}
    gone = [each for each in names if each["nonce"] in surplus or each in orphans]
    return sorted(gone, key=lambda each: each["suffix"] == PAYLOAD)
