"""What deploy/README.md and deploy/kubernetes/README.md tell people to type exists, spelled like that."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from functools import cache
from pathlib import Path

import pytest

from elasticrt.cli.main import build_parser
from tests.deploy.kubernetes.rendering import DEPLOY, kubectl, overlay

ROOT = DEPLOY.parents[1]
PAGES = (ROOT / "deploy" / "README.md", DEPLOY / "README.md")


def typed(page: Path) -> list[list[str]]:
    """All commands of a page, from its code blocks and its tables, as words; both sides of a pipe, and inside `$()`."""
    text = page.read_text()
    lines = [line for block in re.findall(r"```\n(.*?)```", text, re.DOTALL) for line in block.splitlines()]
    lines += re.findall(r"`((?:kubectl|elasticrt|inside) [^`]*)`", text)
    lines += re.findall(r"\$\((kubectl [^)|]*)", text)
    sides = (side for line in lines for side in line.split(" | "))
    known = re.compile(r"\s*(kubectl|elasticrt|inside|deploy/)")
    words = (shlex.split(side, comments=True) for side in sides if known.match(side))
    return [each for each in words if each]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.parent.name)
def test_paths_exist(page: Path) -> None:
    """Every link leads somewhere, and every path of this repository in a command is there."""
    links = re.findall(r"\]\(([^)#]+)\)", page.read_text())
    paths = [page.parent / link for link in links if "://" not in link]
    paths += [ROOT / word for words in typed(page) for word in words if word.startswith("deploy/")]
    paths += [page.parent / word for words in typed(page) for word in words if word.startswith("kubernetes/")]
    assert paths
    assert [path for path in paths if not path.exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.parent.name)
def test_our_own_commands_are_understood(page: Path) -> None:
    """Every `elasticrt` command, also inside a pod, has options that there are."""
    ours = [words[words.index("elasticrt") :] for words in typed(page) if "elasticrt" in words]
    assert ours
    for words in ours:
        if len(words) > 2:  # Otherwise it is only named.
            build_parser().parse_args([word.replace("...", "http://etcd:2379") for word in words[1:]])


@cache
def flags(command: str) -> set[str]:
    """The flags of one of kubectl's commands, with their short forms."""
    done = subprocess.run(
        [kubectl(), *command.split(), "--help"], capture_output=True, text=True, timeout=60, check=True
    )
    everywhere = subprocess.run([kubectl(), "options"], capture_output=True, text=True, timeout=60, check=True)
    text = done.stdout + everywhere.stdout
    found = re.findall(r"^\s+(?:(-\w), )?--([a-z-]+)=", text, re.MULTILINE)
    return {name for _, name in found} | {short[1:] for short, _ in found if short}


def test_kubectl_has_these_commands_and_flags() -> None:
    """Every flag is one of its command's, and every patch is JSON about fields of a Job."""
    found = [words for page in PAGES for words in typed(page) if words[0] == "kubectl" and len(words) > 2]
    assert len(found) > 10
    for words in found:
        command = " ".join(words[1:3]) if words[1] in ("config", "create") else words[1]
        own = words[: words.index("--")] if "--" in words else words
        used = {word.lstrip("-").partition("=")[0] for word in own if word.startswith("-")}
        assert used <= flags(command), " ".join(words)
        assert not any(word.startswith("job/") for word in words), "any of its pods, a failed one too"
        if "--patch" in words:
            patch = json.loads(words[words.index("--patch") + 1])
            assert set(patch["spec"]) == {"parallelism", "completions"}


def test_cleaning_up_leaves_the_claim_alone() -> None:
    """What the page says to delete is all of the tls overlay, but for the claim with the checkpoints."""
    (words,) = [each for each in typed(DEPLOY / "README.md") if "statefulset" in "".join(each)]
    (names,) = [re.findall(r"\((.*)\)", word)[0].split(", ") for word in words if "name in" in word]
    chosen = [doc for doc in overlay("tls") if doc["metadata"]["labels"]["app.kubernetes.io/name"] in names]
    left = [doc["kind"] for doc in chosen if doc["kind"].lower() not in words[2].split(",")]
    assert (len(chosen), left) == (len(overlay("tls")), ["PersistentVolumeClaim"])
