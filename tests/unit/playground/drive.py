"""Plays a simulation whose agents are `fake_agent.py`: `drive.py NODES BEHAVIOUR STEPS DIRECTORY [FAULT ...]`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from elasticrt.playground.fault_plan import parse_fault
from elasticrt.playground.local_cluster import Screen, Simulation, play

nodes, behaviour, steps, directory, *faults = sys.argv[1:]
simulation = Simulation(
    run_id="calm-fox",
    nodes=int(nodes),
    min_nodes=1,
    max_nodes=9,
    workers_per_node=1,
    command=(behaviour, steps, directory),
    faults=tuple(parse_fault(fault) for fault in faults),
    agent=(sys.executable, str(Path(__file__).with_name("fake_agent.py"))),
)
sys.exit(play(simulation, Screen(sys.stdout, os.environ)))
