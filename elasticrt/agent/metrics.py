"""Exports an agent's metrics to Prometheus, from its own events and from what it last noted about itself.

Only the thread of the health port uses this file, and only `agent.health_server` imports it: prometheus-client comes
with the extra `metrics`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from prometheus_client import Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

import elasticrt
from elasticrt import events
from elasticrt.agent import health_state
from elasticrt.agent.health_state import HealthState
from elasticrt.story.buckets import BUCKETS, totals
from elasticrt.story.fold import Story

PAUSE = "pause"
"""The label of a whole recovery, beside those of its phases."""

# The upper bounds of the histogram's buckets.
LIMITS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)

# A histogram is made anew for each answer, so the time of its creation says nothing.
disable_created_metrics()  # type: ignore[no-untyped-call]


class Metrics(Collector):
    """The metrics of one node. prometheus-client knows it as a collector."""

    def __init__(self) -> None:
        self._story = Story()
        # The seconds of each bucket as they were last exported.
        self._exported = dict.fromkeys(BUCKETS, 0.0)
        self._copied: events.Copied | None = None
        self._state: HealthState | None = None
        self._now = self._told_at = 0.0

    def fold(self, record: events.Record) -> None:
        """Take note of an event of this node, in its `record`."""
        self._story.fold(record)
        if isinstance(record.event, events.Copied):
            self._copied = record.event

    def text(self, state: HealthState, now: float) -> bytes:
        """All metrics in Prometheus' text format, with the agent's `state`, at `now` (monotonic seconds)."""
        self._state, self._now = state, now
        # The story of one agent has at most one life.
        for life in self._story.lives.all[-1:]:
            self._told_at = life.begin - life.started_at + now
            spent = totals(life.spans.spans_until(self._told_at))
            # The time of a bucket that is not final may still shrink, but a Prometheus counter must never fall. It
            # stands still until the bucket has caught up.
            self._exported = {name: max(before, spent.get(name, 0.0)) for name, before in self._exported.items()}
        return generate_latest(self)

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics. prometheus-client calls this for each answer."""
        assert self._state is not None
        yield from self._of_node(self._state)
        yield from self._of_story(self._story, self._state.node)

    def _of_node(self, state: HealthState) -> Iterator[Metric]:
        about = {"run_id": state.run_id, "node": state.node, "version": elasticrt.__version__}
        yield InfoMetricFamily("elasticrt", "The run and the node.", about)
        ready = health_state.ready(state, self._now).ok
        yield _gauge("ready", "1 while the node trains, or could at once.", int(ready))
        yield _gauge("lease_connected", "1 while etcd keeps this node's lease.", int(state.lease == "connected"))
        yield _gauge("etcd_away_seconds", "For how long etcd has not answered.", state.etcd_away_s or 0.0)
        yield _gauge("etcd_answer_seconds", "How long etcd's newest answer to a keep-alive took.", state.etcd_answer_s)
        yield _gauge("generation", "The run's generation.", state.generation)
        yield _gauge("nodes", "Nodes of the generation.", state.nodes)
        yield _gauge("world_size", "Workers of the generation.", state.world_size)
        yield _gauge("step", "The last step that all workers of this node have finished.", state.step)
        yield _gauge("standing_seconds", "For how long no step has been made, once it is known why.", state.standing_s)
        text = "How many times as long as the others' the own work of a slow node takes, as rank 0's node has found."
        slow = GaugeMetricFamily("elasticrt_slow", text, labels=["slow"])
        if state.slow is not None:
            slow.add_metric([state.slow[0]], state.slow[1])
        yield slow

    def _of_story(self, story: Story, node: str) -> Iterator[Metric]:
        kinds = Counter(chapter.kind for chapter in story.generations.all)
        yield _counter("generations", "Generations that this node has seen, by why they were made.", "kind", kinds)
        yield _gauge("restarts", "Failures that count against --max-restarts.", story.generations.newest.restarts)
        yield _counter("bucket_seconds", "What the node's time went into.", "bucket", self._exported)
        own_work = GaugeMetricFamily(
            "elasticrt_own_work_seconds", "A rank's own work in a step: without waiting for others.", labels=["rank"]
        )
        _, here = story.generations.workers.get(node, (0, {}))
        # Only this node's present ranks: in an earlier generation the node may have had others.
        for rank in here:
            if rank in story.steps.work:
                own_work.add_metric([str(rank)], story.steps.work[rank][-1][1])
        yield own_work
        yield from _recoveries(story)
        away_s = sum(end - begin for begin, end in story.lives.times_without_etcd(self._told_at))
        yield _counter("etcd_unanswered_seconds", "How long etcd did not answer this node, in all.", "", {"": away_s})
        redone = sum(chapter.redone or 0 for chapter in story.generations.all)
        # All nodes write an event about a hang. It counts on the node that has it.
        failed = sum(not each.hang or each.node == node for each in story.failures.all)
        yield _counter("steps_redone", "Steps that this node has done again.", "", {"": redone})
        yield _counter("failures", "Its workers that failed or hung, and nodes it has taken out.", "", {"": failed})
        if story.steps.samples:
            yield _gauge("samples", "Samples that the run has trained on, over all epochs.", story.steps.samples)
        yield _counter("checkpoints", "Checkpoints that this node has committed.", "", {"": story.checkpoints.count})
        for _, saved in story.checkpoints.committed[-1:]:
            yield _gauge("checkpoint_step", "The newest of them.", saved.step)
            yield _gauge("checkpoint_bytes", "Its size.", saved.bytes)
            yield _gauge("checkpoint_duration_seconds", "From its copy to its commit.", saved.took_s)
            yield _gauge(
                "checkpoint_timestamp_seconds", "When it was committed, since 1970.", story.checkpoints.newest_at
            )
        if self._copied is not None:
            yield _gauge("copy_step", "The newest copy of the state in this node's memory.", self._copied.step)
            yield _gauge("copy_bytes", "Its size.", self._copied.bytes)


def _gauge(name: str, text: str, value: float | None) -> Metric:
    """A metric with one number; without a number if `value` is None, because it is unknown."""
    found = GaugeMetricFamily(f"elasticrt_{name}", text)
    if value is not None:
        found.add_metric([], value)
    return found


def _counter(name: str, text: str, label: str, values: dict[str, Any]) -> Metric:
    """A metric of numbers that only grow, by the values of `label`; "" for a single number without a label."""
    found = CounterMetricFamily(f"elasticrt_{name}", text, labels=[label] if label else [])
    for of, value in values.items():
        found.add_metric([of] if label else [], value)
    return found


def _recoveries(story: Story) -> Iterable[Metric]:
    """The histogram of how long recoveries took on this node, as a whole and by phase."""
    text = "From the last step before a change to the first after it."
    found = Histogram("elasticrt_recovery_seconds", text, ["phase"], registry=None, buckets=LIMITS_S)
    found.labels(PAUSE)
    for chapter in story.generations.all:
        if chapter.pause_s is not None:
            for phase, took_s in {PAUSE: chapter.pause_s, **chapter.phases}.items():
                found.labels(phase).observe(took_s)
    return found.collect()
