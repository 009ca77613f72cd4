"""Print what was checked of our manifests: `python -m tests.deploy.kubernetes > deploy/kubernetes/checked.txt`."""

from __future__ import annotations

import subprocess

import kubernetes_validate

from tests.deploy.kubernetes.lint import BROKE, complaints
from tests.deploy.kubernetes.rendering import OVERLAYS, kubectl, overlay
from tests.deploy.kubernetes.schemas import VERSIONS, check


def verdict(name: str, version: str) -> str:
    """Of one version about one overlay."""
    docs = overlay(name)
    for doc in docs:
        try:
            check(doc, version)
        except kubernetes_validate.ValidationError as error:
            return f"{doc['kind']}: {error.message}"
    return f"{len(docs)} ok"


def main() -> None:
    """Print the tables."""
    client = subprocess.run([kubectl(), "version", "--client"], capture_output=True, text=True, check=True, timeout=60)
    print("Rendered by " + ", ".join(line.lower() for line in client.stdout.splitlines()))
    print(
        f"Schemas: kubernetes-validate {kubernetes_validate.__version__} --strict; documents that each version takes\n"
    )
    print("".join(f"{word:>9}" for word in ("", *(version.removesuffix(".0") for version in VERSIONS))))
    for name in OVERLAYS:
        print(f"{name:>9}" + "".join(f"{verdict(name, version):>9}" for version in VERSIONS))
    print("\nRules of our own, which no schema has; what breaks without each (seen: on a real cluster)\n")
    for name, broke in BROKE.items():
        print(f"{name}\n    {broke}")
    for name in OVERLAYS:
        found = complaints(overlay(name))
        print(f"\n{name}: {len(BROKE)} rules, complaints: {found or 'none'}", end="")
    print()


if __name__ == "__main__":
    main()
