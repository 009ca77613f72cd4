"""What our batch scripts ask of SLURM, read without one."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest

from tests.deploy.slurm.lab import ALLOC, ARRAY, ETCD

AGENTS = {
    "ntasks-per-node": "1",  # One agent per node; it starts the node's workers.
    "exclusive": "",  # Its workers take the whole node.
    "requeue": "",  # Sites may say otherwise; a lost node then ends what it ran.
    "open-mode": "append",  # What was said before the requeue is kept.
    "signal": "B:USR1@120",  # To the script alone: it requeues before the time limit.
    "job-name": "elastic",
}
ASKED: dict[Path, dict[str, str]] = {
    ARRAY: {**AGENTS, "array": "0-3", "nodes": "1", "output": "%x-%A_%a.out"},
    # --no-kill: the job outlives the loss of a node. srun needs it as well.
    ALLOC: {**AGENTS, "nodes": "4", "no-kill": "", "output": "%x-%j.out"},
    # --no-requeue: started again it would be elsewhere, and empty.
    ETCD: {"job-name": "etcd", "nodes": "1", "ntasks": "1", "cpus-per-task": "1", "mem": "1G", "no-requeue": "",
           "open-mode": "append", "output": "%x-%j.out"},
}  # fmt: skip
STEPS: dict[Path, list[str]] = {
    # Sites set the first two otherwise, and then one ended agent takes all others with it.
    ARRAY: ["--kill-on-bad-exit=0", "--wait=0", "elasticrt", "run", "$@", "&"],
    ALLOC: ["--no-kill", "--kill-on-bad-exit=0", "--wait=0", "elasticrt", "run", "$@", "&"],
}
TRAPS = {
    ARRAY: "trap 'requeue \"the time limit is near\"' USR1",
    ALLOC: "trap requeue USR1",
    ETCD: "trap 'kill $etcd' TERM",
}
WAITS = "while kill -0 $step 2>/dev/null; do wait $step; done"


def complaints(script: Path, text: str) -> list[str]:
    """What is missing in a script, or is there and not known here."""
    lines = text.splitlines()
    first = next(number for number, line in enumerate(lines) if line and not line.startswith("#"))
    asked = dict(re.findall(r"^#SBATCH --([a-z-]+)=?(\S*)$", "\n".join(lines[:first]), re.MULTILINE))
    found = [f"--{name}: {asked.get(name)}, wanted {ASKED[script].get(name)}" for name in {*asked, *ASKED[script]}
             if asked.get(name) != ASKED[script].get(name)]  # fmt: skip
    found += [f"line {number + 1}: SLURM does not read it" for number, line in enumerate(lines)
              if line.startswith("#SBATCH") and number > first]  # fmt: skip
    steps = [shlex.split(line)[1:] for line in lines if line.startswith("srun ")]
    if steps != [each for each in [STEPS.get(script)] if each]:
        found.append(f"srun {steps}")
    if TRAPS[script] not in lines:
        found.append(f"no line {TRAPS[script]}")
    if script in STEPS and f"\n{WAITS}" not in text:
        found.append("a signal ends `wait`, and the script with it")
    return found


@pytest.mark.parametrize("script", ASKED, ids=lambda script: script.stem)
def test_a_script_asks_for_what_it_needs(script: Path) -> None:
    """It is bash, and its options, the step's options and the traps are those that the tests on a SLURM have shown."""
    subprocess.run(["bash", "-n", script], check=True, timeout=20)
    assert complaints(script, script.read_text()) == []


@pytest.mark.parametrize("script", ASKED, ids=lambda script: script.stem)
def test_each_option_is_missed(script: Path) -> None:
    """Without one of its options, with one that is commented out or comes too late, a script is no longer taken."""
    text = script.read_text()
    options = re.findall(r"^#SBATCH .*$", text, re.MULTILINE)
    words = [word for step in STEPS.get(script, ()) if step.startswith("--") for word in [f" {step}"]]
    assert len(options) == len(ASKED[script])
    mutants = [text.replace(f"\n{option}\n", "\n", 1) for option in options]
    mutants += [text.replace(f"\n{option}\n", f"\n#{option}\n", 1) for option in options]
    mutants += [text.replace(f"\n{option}\n", "\n", 1) + f"{option}\n" for option in options]
    mutants += [re.sub(rf"(?m)^srun(.*){word}", r"srun\1", text) for word in words]
    mutants += [text.replace(TRAPS[script], ":"), re.sub(r"(?m)^(srun .*) &$", r"\1", text + "srun elasticrt run\n")]
    assert [mutant for mutant in mutants if mutant == text or not complaints(script, mutant)] == []
