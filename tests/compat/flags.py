"""The page of torchrun's flags, made from the table and from the tests that ran: `python -m tests.compat.flags`.

It runs the tests of each flag and writes FLAGS.md beside this file; the exit code is 1 if one of them failed.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from pathlib import Path

from elasticrt.cli.run import KINDS
from elasticrt.cli.torchrun_flags import REFUSED
from elasticrt.option_values import options_of

REPOSITORY = Path(__file__).resolve().parents[2]
PAGE = Path(__file__).with_name("FLAGS.md")
TABLE = "tests/compat/test_flags.py"
REFUSAL = f"{TABLE}::test_what_is_refused_says_why_and_what_to_use"

_ENVIRONMENT = "tests/integration/agent/test_environment_of_workers.py"
_OUTPUT = f"{_ENVIRONMENT}::test_flags_of_one_node_in_workers_and_on_the_console"
_MEETING = f"{_ENVIRONMENT}::test_the_environment_is_the_same_on_all_nodes_and_after_a_restart"
_LOGS = "tests/unit/workers/test_logs.py"

TAKEN = (
    "--nnodes", "--nproc-per-node", "--rdzv-backend", "--rdzv-endpoint", "--rdzv-id", "--rdzv-conf", "--standalone",
    "--max-restarts", "--monitor-interval", "--start-method", "--role", "--module", "--no-python", "--log-dir",
    "--redirects", "--tee", "--local-ranks-filter", "--node-rank", "--master-addr", "--master-port", "--local-addr",
    "--signals-to-handle", "--shutdown-timeout", "--virtual-local-rank",
)  # fmt: skip

SHOWN: dict[str, tuple[str, ...]] = {
    "--nnodes": (_MEETING,),
    "--nproc-per-node": (_OUTPUT, _MEETING),
    "--rdzv-backend": ("tests/integration/agent/test_meeting.py::test_an_agent_serves_the_endpoint_that_it_owns",),
    "--rdzv-endpoint": ("tests/integration/agent/test_meeting.py::test_an_agent_serves_the_endpoint_that_it_owns",),
    "--rdzv-id": (_OUTPUT,),
    "--rdzv-conf": (f"{TABLE}::test_what_rdzv_conf_means", f"{TABLE}::test_what_rdzv_conf_cannot_mean"),
    "--max-restarts": ("tests/integration/agent/test_endings.py::test_the_report_names_the_cause",),
    "--monitor-interval": (_OUTPUT,),
    "--start-method": ("tests/integration/worker/test_methods.py::test_exec_workers",),
    "--role": (_OUTPUT,),
    "--log-dir": (_OUTPUT,),
    "--redirects": (_OUTPUT, f"{_LOGS}::test_filters"),
    "--tee": (_OUTPUT,),
    "--local-ranks-filter": (f"{_LOGS}::test_filters",),
    "--node-rank": (_MEETING, "tests/unit/rendezvous/test_seat_order.py::test_newcomers_sit_as_they_wish"),
    "--master-addr": (_MEETING,),
    "--master-port": (_MEETING, f"{TABLE}::test_one_node_leaves_the_port_to_the_script"),
    "--signals-to-handle": (f"{_ENVIRONMENT}::test_a_signal_of_ones_own_makes_the_node_leave_and_reaches_the_workers",),
    "--shutdown-timeout": (f"{_ENVIRONMENT}::test_a_restart_grants_the_shutdown_timeout",),
    "--virtual-local-rank": (_OUTPUT,),
}
"""Where each flag's effect is seen beyond its setting."""

DIFFERS = {
    "--nproc-per-node": "without it there is a worker for each GPU, else one; xpu is refused: give the number",
    "--rdzv-backend": "etcd and etcd-v2 are refused: agents meet in etcd v3 (--etcd)",
    "--rdzv-id": "without it, one is made from the endpoint, and runs again after success; or made up and printed",
    "--rdzv-conf": "others are refused by name, with what to use in their place",
    "--max-restarts": "without it: three without newly committed steps (torchrun: none); lost and joining nodes cost "
    "none",
    "--start-method": "it concerns scripts as well; the default is fork, and forkserver means the same",
    "--role": "one for all nodes of a run; part of the console's prefix with --tee",
    "--log-dir": "files are logs/generation-G/rank-R.NODE.out and .err; those of earlier generations stay",
    "--redirects": "files are kept of all streams anyway",
    "--node-rank": "a hint for newcomers: nodes that stay keep their ranks",
    "--master-addr": "workers' own MASTER_ADDR is the node with rank 0; for one node, both flags are left to the "
    "script",
    "--master-port": "workers' own MASTER_PORT is another one in each generation",
    "--signals-to-handle": "signals beyond the usual four are passed on to the workers",
    "--shutdown-timeout": "without it 10 s when the node leaves, and nothing on a restart; also "
    "TORCH_ELASTIC_SHUTDOWN_TIMEOUT",
}
"""Where a flag does not do what it does under torchrun."""

_TEXTS = {name: option.text for kind in KINDS for option in options_of(kind).values() for name in option.names}


def meaning(name: str) -> str:
    """What a flag does here; of one that is refused, why, and what to use in its place."""
    return REFUSED.get(name) or _TEXTS[name]


def exists(name: str) -> bool:
    """Whether there is such a test: a file, or a function or class in it; parameters in brackets are not looked at."""
    path, _, function = name.partition("::")
    file = REPOSITORY / path
    if not file.is_file():
        return False
    if not function:
        return True
    wanted = function.partition("[")[0].split("::")[-1]
    tree = ast.parse(file.read_text())
    return any(isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == wanted for node in ast.walk(tree))


def run(names: list[str]) -> dict[str, list[bool]]:
    """Run these tests in one pytest; for each `path::function` (and each path) whether its cases passed."""
    with tempfile.TemporaryDirectory() as directory:
        report = Path(directory, "report.xml")
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow"]
        command += [f"--junitxml={report}", "-o", "junit_family=xunit1", *names]
        subprocess.run(command, cwd=REPOSITORY, env=dict(os.environ), stdout=subprocess.DEVNULL, check=False)
        cases = ET.parse(report).getroot().iter("testcase")
        found: dict[str, list[bool]] = {}
        for case in cases:
            path, name = case.get("file", ""), case.get("name", "")
            passed = not any(case.find(word) is not None for word in ("failure", "error", "skipped"))
            for key in {path, f"{path}::{name.partition('[')[0]}", f"{path}::{name}"}:
                found.setdefault(key, []).append(passed)
    return found


def main() -> int:
    """Run, write the page, print what did not pass; the exit code."""
    changes = f"{TABLE}::test_leaving_it_out_changes_something"
    of = {name: (f"{changes}[{name}]", *SHOWN.get(name, ())) for name in TAKEN} | dict.fromkeys(REFUSED, (REFUSAL,))
    found = run(sorted({name for names in of.values() for name in names}))
    lines = [
        "# torchrun's flags",
        "",
        "Made by `python -m tests.compat.flags` from `elasticrt/cli/torchrun_flags.py` and the tests that ran.",
        "All are taken with dashes or underscores; those with PET also from that variable.",
        "",
        "| flag | | here | where that differs | tests |",
        "|---|---|---|---|---|",
    ]
    failed = []
    for name, tests in of.items():
        results = [passed for test in tests for passed in found.get(test, [False])]
        word = "refused" if name in REFUSED else "PET"
        verdict = "passed" if all(results) else f"**{results.count(False)} of {len(results)} failed**"
        lines.append(f"| `{name}` | {word} | {meaning(name)} | {DIFFERS.get(name, '')} | {verdict} |")
        failed += [] if all(results) else [name]
    PAGE.write_text("\n".join([*lines, ""]))
    print(f"{len(TAKEN)} flags taken, {len(REFUSED)} refused; {len(failed)} with failing tests: {failed}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
