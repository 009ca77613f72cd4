"""How a directed plan is written: small, quick, and nothing drawn."""

from __future__ import annotations

from elasticrt.spec import RunSpec
from tests.virtual.plan import Fault, Plan, Snag


def spec_for(nodes: int, **changes: object) -> RunSpec:
    """Options for so many nodes."""
    return RunSpec(**{"min_nodes": 1, "max_nodes": nodes, "command": ("script", "train.py"), "join": "now", **changes})


def story(name: str, nodes: int, *troubles: Fault | Snag, spec: RunSpec | None = None, **changes: object) -> Plan:
    """A plan of this name in which only these troubles happen."""
    standard: dict[str, object] = {
        "workers": (1,) * nodes,
        "arrivals": tuple(0.1 * index for index in range(nodes)),
        "offsets": (0.0,) * nodes,
        "clock_rates": (1.0,) * nodes,
        "commit_every": 1,
        "safety_s": 25.0,
        "returns": 0.0,
        "seats_per_chunk": 1,  # So that rosters are to be read, as in large runs.
    }
    return Plan(
        seed=name,
        nodes=nodes,
        spec=spec or spec_for(nodes),
        faults=tuple(each for each in troubles if isinstance(each, Fault)),
        snags=tuple(each for each in troubles if isinstance(each, Snag)),
        **{**standard, **changes},
    )
