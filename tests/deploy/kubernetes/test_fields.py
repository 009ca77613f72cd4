"""What happens when a field of a manifest gets lost: somebody notices."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from tests.deploy.kubernetes.finding import Doc
from tests.deploy.kubernetes.lint import complaints
from tests.deploy.kubernetes.rendering import overlay
from tests.deploy.kubernetes.schemas import VERSIONS, check, kubernetes_validate

UNNEEDED = {
    r"[A-Z]\w+/[a-z]+: metadata\.labels(\..*)?": "for people: selectors look at those of pods",
    r"Service/\w+: spec\.ports\.0\.name": "one port needs no name",
    r"ConfigMap/train: data\.NCCL_\w+": "which interface, and what is logged: NCCL has defaults",
    r"JobSet/train: spec\.failurePolicy(\.maxRestarts)?": "by default no restarts",
    r"JobSet/train: spec\.replicatedJobs\.0\.(name|replicas|template\.metadata.*)": "its own API server says",
    r"Service/\w+: spec\.ports\.\d\.targetPort": "by default the port's own number, which is the container's",
    r"NetworkPolicy/\w+: .*\.protocol": "by default TCP",
    r"\w+/train: spec\..*podReplacementPolicy": "by default Failed, where there is a podFailurePolicy",
    r"\w+/train: spec\..*podFailurePolicy\..*\.containerName": "by default all containers; there is one",
    r"\w+/train: spec\..*podFailurePolicy\..*\.status": "by default True",
    r"\w+/train: .*\.containers\.0\.args\.[012]": "test_names.py: the command, its script and the script's own options",
    r"StatefulSet/etcd: .*\.containers\.0\.command(\.0)?": "the image's own command is the same",
    r"\w+/\w+: .*\.livenessProbe\.periodSeconds": "by default 10, the same",
    r"\w+/train: .*\.readinessProbe\.failureThreshold": "by default 3: a pod is not ready after 15 s in place of 10",
}
"""Fields that nothing breaks without, and why."""


def paths(value: Any, above: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Where to find each field and each item of a list, at any depth."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in inside:
        yield (*above, key)
        yield from paths(each, (*above, key))


def refused(docs: list[Doc], changed: Doc) -> bool:
    """Whether a rule complains, or cannot even read it, or the newest version's schema does not take it."""
    try:
        if complaints(docs):
            return True
        check(changed, VERSIONS[-1])
    except (AssertionError, AttributeError, LookupError, TypeError, ValueError, kubernetes_validate.ValidationError):
        return True
    return False


def unmissed(name: str) -> Iterator[str]:
    """The fields and items of an overlay that nobody misses."""
    docs = overlay(name)
    for doc in docs:
        for path in list(paths(doc)):
            inner: Any = doc
            for key in path[:-1]:
                inner = inner[key]
            kept = inner.copy()
            del inner[path[-1]]
            if not refused(docs, doc):
                yield f"{doc['kind']}/{doc['metadata']['name']}: {'.'.join(map(str, path))}"
            inner.clear()
            inner.update(kept) if isinstance(inner, dict) else inner.extend(kept)
    assert docs == overlay(name)


def test_every_field_is_needed() -> None:
    """Each field, and each item of a list, is missed when it is left out; or it is known why it need not be."""
    found = {where for name in ("tls", "gpu", "jobset") for where in unmissed(name)}
    known = {where: [pattern for pattern in UNNEEDED if re.fullmatch(pattern, where)] for where in found}
    assert [where for where, patterns in known.items() if not patterns] == []
    assert {pattern for patterns in known.values() for pattern in patterns} == set(UNNEEDED), "the reasons for others"
