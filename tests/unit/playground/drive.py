"""Plays a simulation whose agents are `fake_agent.py`: `drive.py NODES BEHAVIOUR STEPS DIRECTORY [FAULT ...]`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from elasticrt.playground.fault_plan import parse_fault
from elasticrt.playground.local_cluster import Screen, Simulation, play

nodes, behaviour, steps, directory, *faults = sys.argv[1:]
simulation = Simulation(
    nodes=int(nodes),
    words=("--run-id", "calm-fox", "--nnodes", "1:9", "--nproc-per-node", "1", behaviour, steps, directory),
    faults=tuple(parse_fault(fault) for fault in faults),
    agent=(sys.executable, str(Path(__file__).with_name("fake_agent.py"))),
)
sys.exit(play(simulation, Screen(sys.stdout, os.environ)))
