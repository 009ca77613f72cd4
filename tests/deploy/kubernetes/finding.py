"""Rules about our manifests, and how to find things in a rendering.

A rule takes the documents of one rendering and returns complaints. `BROKE` says for each what has happened without it
("seen": on a real cluster), or what would.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

Doc = dict[str, Any]
Rule = Callable[[Sequence[Doc]], Iterator[str]]

RULES: dict[str, Rule] = {}
BROKE: dict[str, str] = {}

UNITS = {"": 1, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}


def rule(broke: str) -> Callable[[Rule], Rule]:
    """Register a rule with what happened without it."""

    def register(check: Rule) -> Rule:
        RULES[check.__name__] = check
        BROKE[check.__name__] = broke
        return check

    return register


def of_kind(docs: Sequence[Doc], kind: str) -> list[Doc]:
    """All documents of one kind."""
    return [doc for doc in docs if doc["kind"] == kind]


def jobs(docs: Sequence[Doc]) -> list[Doc]:
    """The `spec` of each Job, also of those inside a JobSet."""
    own = [doc["spec"] for doc in of_kind(docs, "Job")]
    return own + [
        each["template"]["spec"] for doc in of_kind(docs, "JobSet") for each in doc["spec"].get("replicatedJobs", ())
    ]


def pods(docs: Sequence[Doc]) -> Iterator[tuple[str, Doc]]:
    """A name for people, and the template, of everything that makes pods."""
    for spec in jobs(docs):
        yield "Job", spec["template"]
    for doc in of_kind(docs, "StatefulSet"):
        yield f"StatefulSet {doc['metadata']['name']}", doc["spec"]["template"]


def containers(template: Doc) -> list[Doc]:
    """All containers of a pod, those for its start included."""
    return [*template["spec"].get("initContainers", ()), *template["spec"]["containers"]]


def settings(docs: Sequence[Doc]) -> dict[str, str]:
    """The agents' options by variable."""
    return {name: text for doc in of_kind(docs, "ConfigMap") for name, text in doc["data"].items()}


def labels(template: Doc) -> dict[str, str]:
    """A pod's labels."""
    return template["metadata"].get("labels", {})


def selects(selector: Doc, of_pod: dict[str, str]) -> bool:
    """Whether a selector (also a Service's, which is labels alone) matches a pod's labels."""
    for each in selector.get("matchExpressions", ()):
        assert each["operator"] == "In", "an operator that this lint does not know"
        if of_pod.get(each["key"]) not in each["values"]:
            return False
    by_labels = selector.get("matchLabels", {} if "matchExpressions" in selector else selector)
    return all(of_pod.get(name) == value for name, value in by_labels.items())


def means(selector: Doc, template: Doc, keys: Sequence[str] = ("name", "component", "instance")) -> bool:
    """Whether a selector matches a pod's labels, and by each of `keys` that the pod has: not others' as well."""
    of_pod = labels(template)
    named = {*selector.get("matchLabels", selector), *(each["key"] for each in selector.get("matchExpressions", ()))}
    return selects(selector, of_pod) and {*of_pod} & {f"app.kubernetes.io/{key}" for key in keys} <= named


def quantity(text: str) -> int:
    """`512Mi` in bytes."""
    match = re.fullmatch(r"([0-9]+)(|Ki|Mi|Gi|Ti)", text)
    assert match, f"a quantity that this lint cannot read: {text}"
    return int(match[1]) * UNITS[match[2]]
