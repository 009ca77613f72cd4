"""What an agent exports to Prometheus after two generations, a checkpoint and a copy of its state."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from elasticrt import events
from elasticrt.agent.health_state import HealthState
from elasticrt.agent.metrics import Metrics
from tests.unit.story.told import Entry, begun, record, started, warm

NOTED = HealthState("calm-fox", "a", "member", 100.0, 60.0, lease="connected", etcd_answer_s=0.001, step=61)

PHASES = {"detect": 30.0, "agree": 10.0, "script": 10.0, "init": 10.0, "restore": 10.0, "first_step": 10.0}
TOLD: list[Entry] = [
    (0.0, "a", started()),
    (1.0, "a", warm()),
    (2.0, "a", begun(1, "ab", "start", in_place=False)),
    (2.5, "a", events.WorkersStarted(1, (0,), (11,))),
    (4.0, "a", events.FirstStep(1, 1, 0, None, 0)),
    (4.0, "a", events.SetUp(1, {"start": 500, "script": 500, "init": 250, "restore": 250, "first_step": 500})),
    (9.0, "a", events.Progress(1, 50, 0.5, 0.25, 0.0, samples=3200, own_s=(0.07,))),
    (9.5, "a", events.Committed(50, 1, 1 << 20, 0.4)),
    (9.6, "a", events.Copied(1, 50, 4096)),
    (10.0, "a", events.MemberLost("b", "its port refuses")),
    (10.01, "a", begun(2, "a")),
    (10.05, "a", events.FirstStep(2, 61, 59, 0.08, 1)),
    (10.05, "a", events.Recovery(2, 0.08, PHASES)),
]


def exported_text() -> str:
    """As it is scraped."""
    metrics = Metrics()
    for entry in TOLD:
        metrics.fold(record(*entry))
    return metrics.text(replace(NOTED, slow=("b", 3.5)), 100.0).decode()


def values(metrics: Metrics, node: str, now: float) -> dict[str, float]:
    """Of all series of `node` at `now`: by the bucket, or by the name where there is none."""
    text = metrics.text(replace(NOTED, node=node), now).decode()
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return {each.labels.get("bucket") or each.name.removeprefix("elasticrt_"): each.value for each in samples}


def exported_samples() -> list[Any]:
    """The same, parsed: each with its name, labels and value."""
    return [sample for family in text_string_to_metric_families(exported_text()) for sample in family.samples]
