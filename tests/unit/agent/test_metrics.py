"""`/metrics`: what an agent's own events and notes amount to, in Prometheus' words."""

from __future__ import annotations

import re
import sys
import time
import urllib.error
import urllib.request
from dataclasses import replace

import pytest

from elasticrt import events
from elasticrt.agent.health_server import HealthServer
from elasticrt.agent.metrics import Metrics
from elasticrt.story.buckets import BUCKETS, totals
from tests.unit.agent.exported import NOTED, TOLD, exported_samples, values
from tests.unit.story.test_stood_still import BEFORE, WENT_ON
from tests.unit.story.test_too_few_nodes import BEGINS
from tests.unit.story.told import THREE_STEPS, Entry, begun, record, started, story, warm


def value(name: str, **labels: str) -> float:
    """Of one series."""
    (found,) = [each.value for each in exported_samples() if each.name == f"elasticrt_{name}" and each.labels == labels]
    return float(found)


def test_views_of_a_story() -> None:
    """Changes by cause, the time by bucket, recoveries by phase, steps done again, checkpoints and copies."""
    assert value("generations_total", kind="lost") == 1
    assert value("steps_redone_total") == 1
    assert value("failures_total") == 1
    assert (value("checkpoint_step"), value("checkpoint_timestamp_seconds"), value("checkpoints_total")) == (50, 9.5, 1)
    assert (value("checkpoint_bytes"), value("checkpoint_duration_seconds")) == (1 << 20, 0.4)
    assert (value("samples"), value("own_work_seconds", rank="0")) == (3200, 0.07)
    assert (value("copy_step"), value("copy_bytes")) == (50, 4096)
    assert value("recovery_seconds_sum", phase="pause") == 0.08
    assert value("recovery_seconds_count", phase="agree") == 1
    assert [value("recovery_seconds_bucket", phase="pause", le=limit) for limit in ("0.05", "0.1", "+Inf")] == [0, 1, 1]
    assert (value("ready"), value("lease_connected"), value("etcd_answer_seconds")) == (0, 1, 0.001)
    assert value("info", run_id="calm-fox", node="a", version="0.1.0") == 1


def test_the_time_in_buckets_adds_up() -> None:
    """Together they are the node's life so far."""
    spent = {each.labels["bucket"]: each.value for each in exported_samples() if "bucket_seconds" in each.name}
    assert sum(spent.values()) == pytest.approx(100.0)
    assert (spent["data wait"], spent["checkpoint stall"], spent["detect"]) == pytest.approx((0.5, 0.25, 0.03))


@pytest.mark.parametrize("node", ["a", "b"])
def test_a_hang_is_counted_while_it_lasts_and_once_as_a_failure(node: str) -> None:
    """Its seconds at each scrape; the failure for the node that the others have waited for, by that node."""
    metrics = Metrics()
    for entry in THREE_STEPS:
        if entry[1] == node:
            metrics.fold(record(*entry))
    metrics.fold(record(8.0, node, events.Progress(1, 20, 0.0, 0.0, 0.0)))
    metrics.fold(record(10.0, node, events.Culprit(1, 20, 4.0, (1,), ("b",), "rank 1 sleeps")))
    found = [values(metrics, node, now) for now in (20.0, 50.0)]
    assert [each["detect"] for each in found] == pytest.approx([14.0, 44.0])
    metrics.fold(record(51.0, node, begun(2, "ab", "failure", "no progress")))
    phases = {"detect": 44_900.0, "agree": 100.0, "script": 500.0, "first_step": 500.0}
    metrics.fold(record(52.0, node, events.Recovery(2, 46.0, phases)))
    after = values(metrics, node, 52.0)
    assert after["failures_total"] == float(node == "b")
    assert after["detect"] == pytest.approx(44.9, abs=0.2)
    assert sum(after[bucket] for bucket in BUCKETS) == pytest.approx(52.0 - (node == "b") * 0.5)


def test_the_time_of_a_script_without_a_loop_is_counted() -> None:
    """While its optimizers make steps, and while it is known that they stand still: as the report counts it."""
    metrics = Metrics()
    told = [each for each in TOLD[:6] if not isinstance(each[2], events.FirstStep)]
    told += [(at, "a", events.Progress(1, 0, 0.0, 0.0, 0.0, beats=int(at))) for at in (9.0, 14.0, 19.0)]
    for entry in told:
        metrics.fold(record(*entry))
    before = values(metrics, "a", 19.5)
    assert (before["train"], before["detect"]) == pytest.approx((15.5, 0.0))
    metrics.fold(record(24.0, "a", events.Culprit(1, 20, 4.0, (1,), ("b",), "rank 1 sleeps")))
    found = [values(metrics, "a", now) for now in (30.0, 40.0)]
    assert [(each["train"], each["detect"]) for each in found] == [pytest.approx((16.0, each)) for each in (10.0, 20.0)]
    metrics.fold(record(41.0, "a", events.GoesOn(1, 20)))
    metrics.fold(record(44.0, "a", events.Progress(1, 0, 0.0, 0.0, 0.0, beats=23)))
    metrics.fold(record(49.0, "a", events.Progress(1, 0, 0.0, 0.0, 0.0, beats=28)))
    after = values(metrics, "a", 50.0)
    assert (after["train"], after["detect"]) == pytest.approx((25.0, 21.0))


@pytest.mark.parametrize("node", ["a", "b"])
@pytest.mark.parametrize(
    "hang",
    [
        pytest.param(WENT_ON, id="after a step"),
        pytest.param(
            [
                *BEFORE,
                *((19.0, each, events.FirstStep(1, 41, 40, None, 0)) for each in "ab"),
                *((19.0, each, events.SetUp(1, {"start": 500, "first_step": 15_500})) for each in "ab"),
                *((23.0, each, events.Progress(1, 60, 0.0, 0.0, 0.0)) for each in "ab"),
            ],
            id="in the first step",
        ),
    ],
)
def test_a_hang_is_as_long_as_in_the_report(node: str, hang: list[Entry]) -> None:
    """Of the same node, whenever it is asked: while it lasts, and when the steps have gone on."""
    metrics, whole = Metrics(), totals(story(hang).spans_by_node()[node])["detect"]
    told = sorted((entry for entry in hang if entry[1] == node), key=lambda entry: entry[0])
    found = []
    for now in (18.9, 21.0, told[-1][0]):
        while told and told[0][0] <= now:
            metrics.fold(record(*told.pop(0)))
        found.append(values(metrics, node, now)["detect"])
    assert found == pytest.approx([whole - 0.1, whole, whole], abs=0.11)


def test_a_wait_for_nodes_is_counted_while_it_lasts() -> None:
    """As the report does."""
    metrics = Metrics()
    for entry in BEGINS:
        if entry[1] == "a":
            metrics.fold(record(*entry))
    found = [values(metrics, "a", now) for now in (20.5, 80.5)]
    assert [each["waiting for nodes"] - 1.0 for each in found] == pytest.approx([10.0, 70.0])


def test_the_time_of_a_node_that_stands_by_is_counted_while_it_does() -> None:
    """Whether it has trained before or not, and whether a worker has set up or not; the generations as well."""
    metrics = Metrics()
    metrics.fold(record(0.0, "c", started()))
    without = [events.StandsBy(**vars(begun(each, "ab")), age_s=0.0) for each in (1, 2)]
    metrics.fold(record(0.5, "c", without[0]))
    metrics.fold(record(1.0, "c", warm()))
    found = [values(metrics, "c", now) for now in (21.0, 51.0)]
    metrics.fold(record(60.0, "c", events.Ready(0)))
    metrics.fold(record(70.0, "c", without[1]))
    found.append(values(metrics, "c", 81.0))
    assert [each["standby"] for each in found] == pytest.approx([20.0, 50.0, 80.0])
    assert [each["start"] for each in found] == pytest.approx([1.0, 1.0, 1.0])


def test_what_keeps_the_run_from_its_pace_is_what_the_agent_has_noted() -> None:
    """The same that `/ready` says: for how long no step was made, and who is slow."""
    text = Metrics().text(replace(NOTED, standing_s=14.5, slow=("n1", 3.5)), 100.0).decode()
    assert "\nelasticrt_standing_seconds 14.5\n" in text
    assert '\nelasticrt_slow{slow="n1"} 3.5\n' in text
    assert "elasticrt_slow{" not in Metrics().text(NOTED, 100.0).decode()


@pytest.mark.parametrize("installed", [True, False])
def test_at_the_health_port(installed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prometheus gets its text; without prometheus-client it is said in a sentence what to install."""
    if not installed:
        monkeypatch.setitem(sys.modules, "prometheus_client", None)
        monkeypatch.delitem(sys.modules, "elasticrt.agent.metrics")
    server = HealthServer("127.0.0.1", 0, replace(NOTED, turned_at=time.monotonic()))
    try:
        for entry in TOLD:
            server.fold(record(*entry))
        if installed:
            with urllib.request.urlopen(f"{server.url}/metrics", timeout=10) as answer:
                assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
                assert b'elasticrt_generations_total{kind="lost"} 1.0' in answer.read()
        else:
            with pytest.raises(urllib.error.HTTPError, match="501") as refused:
                urllib.request.urlopen(f"{server.url}/metrics", timeout=10)
            with refused.value as answer:
                assert b"pip install 'elasticrt[metrics]'" in answer.read()
    finally:
        server.close()


def test_ranks_of_a_generation_before_are_not_exported() -> None:
    """A node may have another rank after a change: what it measured for the old one is nobody's now."""
    metrics = Metrics()
    told = [*TOLD[:3], (2.5, "a", events.WorkersStarted(1, (2,), (11,)))]
    told += [(9.0, "a", events.Progress(1, 50, 0.0, 0.0, 0.0, own_s=(0.07,))), (10.0, "a", begun(2, "a"))]
    told += [(10.1, "a", events.WorkersStarted(2, (0,), (11,)))]
    told += [(15.0, "a", events.Progress(2, 99, 0.0, 0.0, 0.0, own_s=(0.02,)))]
    for entry in told:
        metrics.fold(record(*entry))
    text = metrics.text(NOTED, 100.0).decode()
    assert re.findall(r'elasticrt_own_work_seconds\{.*rank="(\d)".*\} (\S+)', text) == [("0", "0.02")]
