"""All rules about our manifests."""

from __future__ import annotations

from collections.abc import Sequence

from tests.deploy.kubernetes import lint_around, lint_etcd, lint_pods
from tests.deploy.kubernetes.finding import BROKE, RULES, Doc

__all__ = ["BROKE", "RULES", "complaints", "lint_around", "lint_etcd", "lint_pods"]


def complaints(docs: Sequence[Doc]) -> dict[str, list[str]]:
    """What each rule has to say; rules without complaints are left out."""
    found = {name: list(check(docs)) for name, check in RULES.items()}
    return {name: texts for name, texts in found.items() if texts}
