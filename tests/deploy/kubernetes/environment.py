"""A container's environment, worked out as the kubelet does it: one pass over its entries, in their order."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from tests.deploy.kubernetes.finding import Doc, of_kind

REFERENCE = re.compile(r"\$(?:\$|\(([^)]*)\))")
"""`$(NAME)`, or `$$`, which stands for one `$`. Any other `$` is itself."""


def expanded(text: str, env: Mapping[str, str]) -> str:
    """The text with each `$(NAME)` that is defined replaced; the others stay as they are."""
    return REFERENCE.sub(lambda found: "$" if found[1] is None else env.get(found[1], found[0]), text)


class Entry(NamedTuple):
    """One variable: its text, and what is defined before it."""

    name: str
    text: str
    before: dict[str, str]


def undefined(text: str, env: Mapping[str, str]) -> list[str]:
    """The names in a text that are not defined."""
    return [name for name in REFERENCE.findall(text) if name and name not in env]


def environment(docs: Sequence[Doc], container: Doc, fields: Mapping[str, str]) -> dict[str, str]:
    """What the container's process finds, `fields` being the pod's own (`metadata.name`)."""
    return {name: expanded(text, before) for name, text, before in entries(docs, container, fields)}


def entries(docs: Sequence[Doc], container: Doc, fields: Mapping[str, str]) -> Iterator[Entry]:
    """All variables: first those of `envFrom`, then the entries in their order."""
    maps = {doc["metadata"]["name"]: doc["data"] for doc in of_kind(docs, "ConfigMap")}
    env: dict[str, str] = {}
    for each in container.get("envFrom", ()):
        taken = maps.get(each.get("configMapRef", {}).get("name"), {})
        env |= {each.get("prefix", "") + name: text for name, text in taken.items()}
    for name, text in env.items():
        yield Entry(name, text.replace("$", "$$"), {})  # A ConfigMap's text is taken as it is.
    for each in container.get("env", ()):
        text = each.get("value", "")
        if "valueFrom" in each:
            path = each["valueFrom"].get("fieldRef", {}).get("fieldPath", "")
            text = fields.get(path, f"<{path}>").replace("$", "$$")
        yield Entry(each["name"], text, dict(env))
        env[each["name"]] = expanded(text, env)
