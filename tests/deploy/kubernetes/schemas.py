"""What Kubernetes itself says about a manifest, for every version that we support."""

from __future__ import annotations

import json

import pytest

from tests.deploy.kubernetes.finding import Doc, jobs

kubernetes_validate = pytest.importorskip(
    "kubernetes_validate", reason="kubernetes-validate is not installed (it comes with the dev extra)"
)

OLDEST = (1, 29)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


VERSIONS = sorted(
    (version for version in set(kubernetes_validate.utils.all_versions()) if _numbers(version)[:2] >= OLDEST),
    key=_numbers,
)
CUSTOM = {"JobSet": "jobset.x-k8s.io/v1alpha2", "PodMonitor": "monitoring.coreos.com/v1"}
"""Kinds that no Kubernetes has by itself."""


_taken: set[tuple[str, str]] = set()


def check(doc: Doc, version: str) -> None:
    """Raise unless the schema of a version takes it; of a JobSet its Jobs, as those of a Job."""
    question = (json.dumps(doc, sort_keys=True), version)
    if question in _taken:  # Overlays share most of their documents.
        return
    if doc["kind"] in CUSTOM:
        assert doc["apiVersion"] == CUSTOM[doc["kind"]]
        for number, spec in enumerate(jobs([doc])):
            of_job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": f"job-{number}"}, "spec": spec}
            kubernetes_validate.validate(of_job, version, strict=True)
    else:
        kubernetes_validate.validate(doc, version, strict=True)
    _taken.add(question)
