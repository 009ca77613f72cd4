"""The names and manifests of checkpoints, the histories that they form, and which files may be deleted. Pure.

A checkpoint is two files with one stem, `step-<step>-g<generation>-<nonce>`: the payload `.pt`, and the manifest. The
manifest is called `.draft` until its commit is accepted, and `.json` from then on. Each manifest names its parent. The
history of a run is the chain of parents from its head to the root. The newest checkpoint is the one with the highest
serial number, which does not always have the most steps: a run may have started over, or gone back.
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
# How the name of a temporary file begins. The rest of its name is the stem of the checkpoint.
TEMPORARY = ".saving-"

NAME = re.compile(
    rf"(?P<temporary>{re.escape(TEMPORARY)})?"
    r"(?P<stem>step-\d{1,18}-g\d{1,9}-(?P<nonce>[0-9a-f]{16}))(?(temporary)|(?P<suffix>\.pt|\.draft|\.json))"
)
"""Matches the name of a file that belongs to a checkpoint. A temporary file has no suffix; any other has one of
PAYLOAD, DRAFT and MANIFEST. Files with other names are left alone."""


def stem_of(step: int, generation: int, nonce: str) -> str:
    """The part that the names of a checkpoint's files have in common."""
    return f"step-{step}-g{generation}-{nonce}"


@dataclass(frozen=True)
class Manifest:
    """One checkpoint, as its manifest describes it.

    Attributes:
        commit: the commit that was made or asked for. Its `directory` is not trusted, because directories are moved.
        run: the id of the run that wrote the checkpoint; "" if the run had no name.
        world_size: the number of processes in the generation that wrote the checkpoint; 0 if that is not known.
    """

    commit: Commit
    run: str
    world_size: int

    def to_json(self) -> bytes:
        """The content of the file: plain JSON, with a digest of all other fields in `check`."""
        # By way of text, so that the digest is of the fields as `from_json` will parse them.
        fields = json.loads(json.dumps({"format": FORMAT, **asdict(self)}))
        return json.dumps({**fields, "check": _check(fields)}, sort_keys=True, indent=1).encode() + b"\n"

    @classmethod
    def from_json(cls, text: bytes | bytearray, stem: str) -> Manifest:
        """Parse the manifest that was found under `stem`. Raises ValueError that says what is wrong."""
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
    """The checkpoints in a directory, as their manifests describe them.

    Attributes:
        manifests: the manifests and drafts that can be read, by nonce.
        marked: the nonces of all manifests that are not drafts, readable or not.
        troubles: what is wrong with files that can't be used.
    """

    manifests: Mapping[str, Manifest]
    marked: frozenset[str]
    troubles: Sequence[str] = ()

    def lineage(self, nonce: str) -> Iterator[Manifest]:
        """The manifests from the checkpoint `nonce` to its oldest known ancestor. Ends where a manifest is missing."""
        # Manifests in a directory may be forged or damaged, so that parents form a circle.
        seen: set[str] = set()
        while nonce in self.manifests and nonce not in seen:
            seen.add(nonce)
            manifest = self.manifests[nonce]
            yield manifest
            nonce = manifest.commit.parent

    def ancestors(self, commit: Commit, run: str) -> Iterator[Manifest]:
        """What `commit` of `run` descends from, newest first.

        Where a manifest in the chain cannot be read, it goes on with what the run had committed before, in the same
        history.
        """
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
        """What `run` has committed after its `head`, newest first. There is something only if etcd has lost commits."""
        later = [each for each in self._of(head, run) if each.commit.serial > head.serial]
        return [each for each in later if each.commit.reached >= head.reached]

    def _of(self, commit: Commit, run: str) -> list[Manifest]:
        """What `run` has committed in the history of `commit`, newest first."""
        return [each for each in self.committed() if each.run == run and each.commit.history == commit.history]

    def committed(self) -> list[Manifest]:
        """The checkpoints that were committed, newest first: those that are marked, and all their ancestors."""
        # An ancestor may still be a draft: its writer died between the commit and the mark. It was committed, because
        # a commit names only a commit as its parent.
        nonces = {m.commit.nonce for marked in self.marked for m in self.lineage(marked)}
        return sorted(
            (self.manifests[n] for n in nonces), key=lambda m: (m.commit.serial, m.commit.nonce), reverse=True
        )

    def candidates(self) -> list[Manifest]:
        """The checkpoints to try, in order, if nothing says where to resume: the newest, its ancestors, the others."""
        ordered = {m.commit.nonce: m for head in self.committed() for m in self.lineage(head.commit.nonce)}
        return list(ordered.values())

    @property
    def serial(self) -> int:
        """The highest serial number of a manifest or draft; 0 when there is none."""
        return max((m.commit.serial for m in self.manifests.values()), default=0)


def deletable_files(
    history: History, names: list[re.Match[str]], head: str, keep: int, before: frozenset[str]
) -> list[re.Match[str]]:
    """The files that may be deleted now that a new commit is there, manifests before payloads.

    The newest committed checkpoints stay, whichever history they belong to; older ones go. Files of a checkpoint that
    was never committed go only if they were there when the new commit's writer claimed the directory.

    Args:
        history: the checkpoints in the directory.
        names: the files in the directory, as NAME matches them.
        head: the nonce of the new commit.
        keep: how many committed checkpoints stay.
        before: the nonces that were in the directory when the writer claimed it.
    """
    committed = [manifest.commit for manifest in history.committed()]
    # Once a newer process has written a checkpoint, that process tidies up. Newer is what has a higher serial number.
    # Generation numbers do not tell, because each store counts its own.
    if not committed or committed[0].nonce != head or history.serial > committed[0].serial:
        return []
    surplus = {commit.nonce for commit in committed[keep:]}
    known = {commit.nonce for commit in committed} | history.marked
    # Since the writer of the head claimed the directory, it alone could commit. So what was there before and is not
    # committed never will be.
    orphans = {each for each in names if each["nonce"] in before and (each["temporary"] or each["nonce"] not in known)}
    gone = [each for each in names if each["nonce"] in surplus or each in orphans]
    # A crash in between leaves payloads without manifests, and never a manifest whose payload is missing.
    return sorted(gone, key=lambda each: each["suffix"] == PAYLOAD)
