"""The lint's own idea of a container's environment is the kubelet's."""

from __future__ import annotations

import pytest

from tests.deploy.kubernetes.environment import environment, expanded, undefined

ENV = {"A": "1", "B": "$(A)", "EMPTY": ""}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("$(A)", "1"),
        ("x-$(A)-$(A)", "x-1-1"),
        ("$(EMPTY)", ""),
        ("$(B)", "$(A)"),  # Once: what comes out is not looked at again.
        ("$(C)", "$(C)"),
        ("$()", "$()"),
        ("$$(A)", "$(A)"),
        ("$$$(A)", "$1"),
        ("$$$$(A)", "$$(A)"),
        ("$A ${A} $", "$A ${A} $"),
        ("$(A", "$(A"),
        ("$($(A))", "$($(A))"),  # The name ends at the first bracket.
    ],
)
def test_expanded(text: str, expected: str) -> None:
    """As in the cases of Kubernetes' own expansion."""
    assert expanded(text, ENV) == expected


@pytest.mark.parametrize(("text", "names"), [("$(A)$(C)$$(D)", ["C"]), ("$(A) $B $(", []), ("$(C)$(D)", ["C", "D"])])
def test_undefined(text: str, names: list[str]) -> None:
    """Names that stay as they are; an escaped one is no name."""
    assert undefined(text, ENV) == names


def test_an_entry_sees_what_comes_before_it() -> None:
    """ConfigMaps first, taken as they are, then the entries in order; a later one of the same name wins."""
    maps = [{"kind": "ConfigMap", "metadata": {"name": "options"}, "data": {"FROM": "map", "RAW": "$(FROM)", "X": "0"}}]
    container = {
        "envFrom": [{"configMapRef": {"name": "options"}}],
        "env": [
            {"name": "EARLY", "value": "$(POD)/$(FROM)"},
            {"name": "POD", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
            {"name": "LATE", "value": "$(POD)/$(RAW)"},
            {"name": "X", "value": "$(X)1"},
        ],
    }
    assert environment(maps, container, {"metadata.name": "p-0"}) == {
        "FROM": "map", "RAW": "$(FROM)", "EARLY": "$(POD)/map", "POD": "p-0", "LATE": "p-0/$(FROM)", "X": "01",
    }  # fmt: skip
