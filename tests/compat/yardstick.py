"""What torch checks of its own launcher and agents, and where we check the same: `python -m tests.compat.yardstick`.

The behaviours are those of torch's tests of torchrun, the launcher's API, the agent, its processes, logs, error files
and rendezvous, in words of our own; no code of theirs is here. A behaviour is checked by the tests that are named, or
has no counterpart, with the reason.
"""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import dataclass

from tests.compat.flags import exists

_ENV = "tests/integration/agent/test_environment_of_workers.py"
_SAME = f"{_ENV}::test_the_environment_is_the_same_on_all_nodes_and_after_a_restart"
_FLAGS_SEEN = f"{_ENV}::test_flags_of_one_node_in_workers_and_on_the_console"
_GRACE = f"{_ENV}::test_a_restart_grants_the_shutdown_timeout"
_USR1 = f"{_ENV}::test_a_signal_of_ones_own_makes_the_node_leave_and_reaches_the_workers"
_RECORD = f"{_ENV}::test_torchs_own_record_is_understood"
_FLAGS = "tests/compat/test_flags.py"
_CASES = f"{_FLAGS}::test_leaving_it_out_changes_something"
_BAD = f"{_FLAGS}::test_a_bad_value_is_one_line_and_code_2"
_OPTIONS = "tests/unit/cli/test_run_options.py"
_ENDINGS = "tests/integration/agent/test_endings.py"
_MEETING = "tests/integration/agent/test_meeting.py::test_an_agent_serves_the_endpoint_that_it_owns"
_LOGS = "tests/unit/workers/test_logs.py"
_REPORT = "tests/unit/workers/test_failures.py"
_BECOME = "tests/integration/worker/test_become.py"
_GROUP = "tests/integration/worker/test_group.py"
_GUARD = "tests/integration/worker/test_guard.py"
_PROTOCOL = "tests/virtual/test_protocol.py"
_LOSSES = "tests/virtual/test_losses.py"
_SPAWN = "tests/compat/test_spawn.py"
_PLUGIN = "tests/compat/test_torchrun_plugin.py"

NO_BLOB = "Members, generation and reports are keys of their own in etcd; there is no shared state that all rewrite."
NO_TIMER = "There are no timers in user code: steps that stand still are seen by the agent (--hang-timeout)."


@dataclass(frozen=True)
class Behaviour:
    """One thing that torch's tests check. `tests`: ours for it; `why_not`: why there is none."""

    area: str
    what: str
    tests: tuple[str, ...] = ()
    why_not: str = ""


def _area(area: str, *rows: tuple[str, str] | tuple[str, tuple[str, ...]]) -> list[Behaviour]:
    return [
        Behaviour(area, what, (), how.removeprefix("-"))
        if isinstance(how, str) and how[:1] == "-"
        else Behaviour(area, what, (how,) if isinstance(how, str) else how)
        for what, how in rows
    ]


BEHAVIOURS = [
    *_area(
        "command line",
        ("a Python script runs with all its workers and arguments", _FLAGS_SEEN),
        ("a program that is not Python runs with --no-python", "tests/integration/worker/test_methods.py"),
        ("--no-python and --module together are refused", f"{_OPTIONS}::test_a_mistake_is_one_line_and_code_2"),
        ("without a number of workers there is one, or one per GPU", f"{_OPTIONS}::test_defaults"),
        ("--nproc-per-node takes a number", _CASES),
        ("--nproc-per-node auto is the GPUs, else the CPUs", f"{_FLAGS}::test_workers_of_this_node"),
        ("--nproc-per-node gpu is the GPUs", f"{_OPTIONS}::test_workers_are_counted_by_what_is_visible"),
        ("--nproc-per-node gpu without any GPU is an error", f"{_OPTIONS}::test_gpu_without_any_is_refused"),
        ("--nproc-per-node with an unknown word is an error", _BAD),
        ("--nproc-per-node xpu counts Intel's GPUs", "-Refused by name: give the number. There was none to try it on."),
        ("all options can come from PET_* variables", _CASES),
        ("PET_* of a switch is off with 0 and on with 1", f"{_FLAGS}::test_the_command_line_wins_over_ours_and_theirs"),
        ("the command line wins over PET_*", f"{_FLAGS}::test_the_command_line_wins_over_ours_and_theirs"),
        ("--nnodes takes N or MIN:MAX and nothing else", f"{_OPTIONS}::test_a_mistake_is_one_line_and_code_2"),
        (
            "an elastic run of one node starts with fewer than its maximum",
            f"{_PROTOCOL}::test_members_below_max_start_after_a_quiet_time",
        ),
        ("several agents at one c10d endpoint are one run", _MEETING),
        ("--standalone needs no endpoint and has a name of its own", _CASES),
        ("--run-path runs a Python file", "-Refused by name: without --module and --no-python that is so."),
        ("--master-addr, --master-port and --node-rank are a whole launch", _SAME),
        ("a worker that raises makes the launcher fail", f"{_ENDINGS}::test_the_report_names_the_cause"),
        ("an error of the agent itself is not hidden", f"{_ENDINGS}::test_no_etcd_is_one_line_and_code_4"),
        ("the rendezvous is closed when the run has ended", f"{_ENDINGS}::test_a_finished_run_leaves_only_its_record"),
        (
            "trouble while closing does not hide why workers failed",
            "-The result is in etcd, and said, before anything is closed.",
        ),
        ("is_torchelastic_launched() is true in workers", _SAME),
        ("and false in a script that runs alone", "-It is torch's own function, and nothing of ours runs then."),
        ("--logs-specs takes a plug-in's name", f"{_FLAGS}::test_what_is_refused_says_why_and_what_to_use"),
        ("env:// makes a group of all workers", _SAME),
        (
            "tcp:// at an address of the script's own makes one, too",
            f"{_GROUP}::test_a_script_with_an_address_of_its_own",
        ),
        (
            "with one node --master-port stays free for the script",
            f"{_FLAGS}::test_one_node_leaves_the_port_to_the_script",
        ),
        (
            "--tee shows lines with a prefix that can be chosen",
            (_FLAGS_SEEN, f"{_FLAGS}::test_a_prefix_from_the_environment"),
        ),
        ("--virtual-local-rank: local rank 0 and one GPU for each", (_FLAGS_SEEN, _CASES)),
        ("--virtual-local-rank with too few GPUs is an error", f"{_FLAGS}::test_too_few_gpus_are_refused"),
        (
            "compiled code is the same on all ranks under --virtual-local-rank",
            "-It needs two GPUs, which nobody had here.",
        ),
    ),
    *_area(
        "torch.distributed.launch",
        (
            "scripts get --local-rank without --use-env",
            "-Who runs such a script writes the argument with ${local_rank}.",
        ),
        ("and no argument with it", "-The same."),
        ("${local_rank} in arguments is filled in", "tests/unit/cli/test_run_options.py::test_local_rank_in_arguments"),
    ),
    *_area(
        "launcher's API",
        ("a function runs on all ranks and its values come back by rank", f"{_SPAWN}::test_a_script"),
        ("it can be called from a notebook", f"{_SPAWN}::test_notebook_cells"),
        ("bad arguments are refused before anything starts", f"{_SPAWN}::test_a_call_that_cannot_be"),
        ("the workers end with a caller that dies", f"{_SPAWN}::test_a_caller_that_dies"),
        ("the signals to handle reach workers by a variable", _SAME),
        ("and are the usual four by default", (_SAME, _CASES)),
        ("the agent's address can be given", _CASES),
        ("metrics configuration is applied", "-torch's own does nothing with it; events are in the run's directory."),
    ),
    *_area(
        "environment",
        ("all variables of the contract are set", _SAME),
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING is 1", _SAME),
        ("unless the user says otherwise", f"{_FLAGS}::test_what_the_user_has_set_stays"),
        ("OMP_NUM_THREADS is 1 with several workers", (_SAME, f"{_FLAGS}::test_what_the_user_has_set_stays")),
        ("unless the user says otherwise (threads)", f"{_FLAGS}::test_what_the_user_has_set_stays"),
        ("CUDA_VISIBLE_DEVICES is passed on", _FLAGS_SEEN),
        (
            "MASTER_ADDR and MASTER_PORT can be overridden by the script",
            (_SAME, f"{_GROUP}::test_a_script_with_an_address_of_its_own"),
        ),
        ("a workers' store is promised only when there is one", _SAME),
        ("the user's own variables reach workers", f"{_BECOME}::test_environment_is_the_users"),
        ("a watchdog is set up by TORCHELASTIC_TIMER_FILE", f"-{NO_TIMER}"),
        ("a health check is set up by a port", "tests/integration/agent/test_asked.py::test_from_the_start_to_the_end"),
    ),
    *_area(
        "agent",
        ("workers that sum over all ranks succeed, on one node", f"{_GROUP}::test_a_group_meets_on_the_given_socket"),
        ("on several nodes with as many workers each", _SAME),
        ("on nodes with different numbers of workers", "tests/virtual/test_simulator.py"),
        ("ranks are a permutation, consecutive on each node", (_SAME, "tests/unit/rendezvous/test_seat_order.py")),
        (
            "roles have ranks of their own",
            "-All nodes of a run have one role, which is agreed on; another one is refused.",
        ),
        (
            "a failure is told with rank, exit code and its error file",
            (f"{_ENDINGS}::test_the_report_names_the_cause", f"{_BECOME}::test_error_file"),
        ),
        (
            "restarts are counted down and the run fails when none is left",
            (f"{_LOSSES}::test_the_budget_is_the_runs", f"{_ENDINGS}::test_the_report_names_the_cause"),
        ),
        ("a membership change costs no restart", f"{_PROTOCOL}::test_a_join_is_free_and_keeps_the_order"),
        (
            "an agent that is killed and started again does no harm",
            f"{_ENDINGS}::test_a_dead_agents_name_is_taken_over_at_once",
        ),
        ("a node may come later", "tests/integration/trouble/test_by_hand.py"),
        ("a node may go", f"{_ENDINGS}::test_a_signal_makes_a_node_leave_at_once"),
        (
            "workers that end at different times succeed together",
            (f"{_GROUP}::test_rank_0_lingers", f"{_PROTOCOL}::test_success_needs_every_rank"),
        ),
        ("a worker that fails after others have ended fails the run", f"{_LOSSES}::test_a_late_failure_runs_all_again"),
        (
            "an exit barrier that times out does not hang the agent",
            f"{_GROUP}::test_a_lingering_worker_ends_with_its_agent",
        ),
        ("the exit barrier's time can be set", "-There is none: success is agreed on in etcd, without a time limit."),
        ("workers are ended when the agent is", f"{_GUARD}::test_the_agent_is_killed"),
        ("a signal to the agent ends its workers", f"{_ENDINGS}::test_a_signal_makes_a_node_leave_at_once"),
        ("the very signal reaches the workers", _USR1),
        ("the shutdown timeout is kept on restarts", _GRACE),
        ("the shutdown timeout of the environment", f"{_FLAGS}::test_the_shutdown_timeout_of_torch"),
        (
            "what ignores SIGTERM is killed",
            (f"{_GUARD}::test_term_then_kill", f"{_ENDINGS}::test_a_second_signal_cuts_the_grace_short"),
        ),
        (
            "remote calls (torch.distributed.rpc) between workers",
            "-RPC groups cannot be re-formed; this runtime is for data parallel training.",
        ),
        (
            "a worker stuck in the kernel (D state) is given up",
            "-It counts as gone after 2 s; no test can put a process into that state.",
        ),
    ),
    *_area(
        "processes",
        ("streams are named 0 to 3 or by local rank, and nothing else", (_CASES, _BAD)),
        ("a mapping leaves other ranks alone", f"{_FLAGS}::test_streams_by_local_rank"),
        ("local ranks beyond nine can be named", f"{_FLAGS}::test_streams_by_local_rank"),
        ("a log directory that is a file does no harm", f"{_LOGS}::test_files_that_cannot_be_written"),
        (
            "/dev/null as log directory keeps nothing",
            (
                f"{_FLAGS}::test_without_a_place_for_logs_there_are_none",
                f"{_LOGS}::test_nothing_is_kept_when_nothing_should_be",
            ),
        ),
        ("only the chosen local ranks are shown", f"{_LOGS}::test_filters"),
        ("redirected streams are in files and not on the console", (_FLAGS_SEEN, f"{_LOGS}::test_filters")),
        ("lines that match go into one more file", "-Refused by name: all lines are in files, for grep."),
        ("commas in filters can be escaped", "-As above."),
        ("logs of earlier attempts stay", (_SAME, f"{_LOGS}::test_files")),
        ("an exit code that is not 0 is a failure", f"{_BECOME}::test_exit_codes_and_tracebacks"),
        (
            "a signal is a failure with the signal's name",
            (f"{_GUARD}::test_signals_are_named", f"{_GUARD}::test_a_real_crash_is_a_signal"),
        ),
        ("the others are ended when one fails", f"{_GROUP}::test_a_peer_that_dies_is_the_cause"),
        ("a program that cannot be started is said", f"{_GUARD}::test_a_program_that_cannot_be_executed"),
        (
            "nothing is left when a worker ends, not even a zombie",
            (
                f"{_GUARD}::test_nothing_outlives_a_worker_that_ended",
                f"{_GUARD}::test_nothing_outlives_a_killed_worker",
            ),
        ),
        (
            "start methods spawn and fork",
            ("tests/integration/worker/test_methods.py::test_exec_workers", f"{_BECOME}::test_it_is_a_fork"),
        ),
        (
            "workers started in a thread do not break signals",
            "tests/integration/worker/test_methods.py::test_the_thread_that_started_the_parent_ends",
        ),
        ("workers are bound to the CPUs of their GPU's node", "-Refused by name: numactl, or the script, does it."),
        ("of its socket, a share of it, a complex of cores", "-As above."),
        ("cores are divided as evenly as it goes", "-As above."),
        ("too few cores are an error", "-As above."),
        ("only allowed CPUs are used", "-As above."),
        ("signals to handle are names of signals", (_CASES, _BAD)),
    ),
    *_area(
        "console",
        ("lines of several workers do not mix", f"{_LOGS}::test_lines_of_two_workers_do_not_mix"),
        ("each line has its prefix", f"{_LOGS}::test_a_prefix_in_torchruns_words"),
        (
            "nothing is lost between the last line and the end",
            f"{_LOGS}::test_an_unfinished_line_is_shown_and_ended_by_another_worker",
        ),
        ("bytes that are no text do no harm", f"{_LOGS}::test_without_prefix_bytes_are_untouched"),
        ("a file that does not exist yet is no trouble", "-Output comes through pipes; no file is followed."),
        ("output of C libraries is kept, too", f"{_BECOME}::test_fault_handler_works"),
        ("a console that is gone stops nobody", f"{_LOGS}::test_a_console_that_is_gone"),
    ),
    *_area(
        "errors",
        ("@record writes the error file", _RECORD),
        ("without @record the error file is written all the same", f"{_BECOME}::test_error_file"),
        ("an error file that is no JSON does no harm", f"{_REPORT}::test_summaries"),
        ("a message that is plain text is understood", f"{_REPORT}::test_summaries"),
        (
            "the first failure is the cause",
            (f"{_REPORT}::test_first_cause", f"{_LOSSES}::test_the_cause_is_told_from_its_consequences"),
        ),
        ("the report names rank, node, code, error and log", f"{_REPORT}::test_the_report_that_people_read"),
        ("an unknown signal has a name all the same", f"{_REPORT}::test_summaries"),
        ("sys.exit keeps its code", f"{_BECOME}::test_exit_codes_and_tracebacks"),
        ("faults in C code leave a traceback", f"{_BECOME}::test_fault_handler_works"),
        (
            "the agent copies the cause to its own error file",
            "-An agent under another agent would need it; the report and the event `failure` say it.",
        ),
    ),
    *_area(
        "rendezvous",
        ("rdzv-conf is key=value with commas", (_CASES, _BAD)),
        ("values that make no sense are refused", f"{_FLAGS}::test_what_rdzv_conf_cannot_mean"),
        (
            "endpoints are host, host:port, IPv6",
            ("tests/unit/store/test_address.py", f"{_OPTIONS}::test_where_etcd_is"),
        ),
        ("whether an address is this machine's is found out", (_MEETING, f"{_OPTIONS}::test_where_etcd_is")),
        ("or can be told (is_host)", f"{_FLAGS}::test_what_rdzv_conf_means"),
        ("the run starts at the maximum at once", f"{_PROTOCOL}::test_members_at_max_start_at_once"),
        ("and below it after the last call", f"{_PROTOCOL}::test_members_below_max_start_after_a_quiet_time"),
        (
            "it waits for the minimum, and not for ever",
            (
                f"{_ENDINGS}::test_below_min_nodes_all_end_with_the_same_words",
                f"{_LOSSES}::test_below_min_nodes_all_end_alike_at_the_deadline",
            ),
        ),
        ("a node beyond the maximum waits and replaces a lost one", f"{_LOSSES}::test_standby_replaces_a_lost_node"),
        ("a late node joins, and the run is formed anew", f"{_PROTOCOL}::test_a_join_is_free_and_keeps_the_order"),
        ("several late nodes cost one re-formation", f"{_PROTOCOL}::test_a_burst_of_joins_is_one_generation"),
        (
            "a node whose heartbeat ends is taken out",
            (
                f"{_LOSSES}::test_a_dead_node_without_evidence_goes_with_its_lease",
                f"{_LOSSES}::test_a_dead_node_is_fenced_without_waiting_for_its_lease",
            ),
        ),
        ("a node that comes back late finds itself replaced", f"{_LOSSES}::test_a_paused_member_finds_itself_replaced"),
        ("a node that leaves is gone at once", f"{_PROTOCOL}::test_leaving_is_at_once_and_free"),
        ("a finished run is closed for late nodes", f"{_PROTOCOL}::test_a_finished_run_is_not_run_again_by_accident"),
        (
            "each generation has a store of its own",
            (_SAME, f"{_GROUP}::test_a_stale_worker_never_joins", f"{_PLUGIN}::test_a_worker_crashes"),
        ),
        (
            "all nodes read the same address of rank 0 after it has changed",
            (_SAME, f"{_PROTOCOL}::test_rank_zero_may_leave_and_so_may_all"),
        ),
        (
            "other options of a joining node are an error",
            f"{_ENDINGS}::test_other_options_are_refused_with_the_difference",
        ),
        ("an unreachable store is an error", f"{_ENDINGS}::test_no_etcd_is_one_line_and_code_4"),
        ("a store that is away for a while is waited for", f"{_ENDINGS}::test_an_outage_of_etcd_restarts_nobody"),
        (
            "what is stored is read strictly",
            "tests/unit/rendezvous/test_records.py::test_anything_else_is_refused_by_name",
        ),
        ("a rendezvous of others plugs into torchrun", f"{_PLUGIN}::test_a_worker_crashes"),
        ("the shared state is sanitised, and changed by compare-and-set with retries", f"-{NO_BLOB}"),
        (
            "heartbeats of the wall clock are compared",
            "-Liveness is a lease of etcd's; no clock of a node is compared with another's.",
        ),
        ("file and etcd v2 stores", "-Agents meet in etcd v3 alone; the other back ends are refused by name."),
        (
            "an etcd server for tests is started and stopped",
            "tests/integration/store/test_embedded.py::test_ends_soon_after_the_result",
        ),
    ),
    *_area(
        "timers, metrics, control",
        ("timers that expire end a worker", f"-{NO_TIMER}"),
        ("metrics are recorded", "-Events in the run's directory say what happened and how long it took."),
        ("events go to a handler that is named", (_FLAGS_SEEN, _BAD)),
        ("stacks of workers can be asked for", "tests/integration/agent/test_hang.py::test_a_hang_is_shown_and_ended"),
        (
            "a worker's control server answers",
            "-Workers serve nothing; the agent answers for its node (--health-port).",
        ),
        ("a sampler goes on after a change of the world's size", "tests/unit/data/test_samplers.py"),
    ),
]


def missing() -> set[str]:
    """Names of tests that are not there."""
    return {name for behaviour in BEHAVIOURS for name in behaviour.tests if not exists(name)}


def main() -> int:
    """Print the table and the count; the exit code."""
    for behaviour in BEHAVIOURS:
        how = ", ".join(behaviour.tests) or f"no counterpart: {behaviour.why_not}"
        print(f"{behaviour.area}: {behaviour.what}: {how}")
    gone = missing()
    checked = Counter(behaviour.area for behaviour in BEHAVIOURS if behaviour.tests)
    areas = ", ".join(f"{area} {number}" for area, number in checked.items())
    named = {name for behaviour in BEHAVIOURS for name in behaviour.tests}
    without = len(BEHAVIOURS) - checked.total()
    print(f"{len(BEHAVIOURS)} behaviours that torch tests: {checked.total()} checked by {len(named)} tests ({areas});")
    print(f"{without} without a counterpart, each with its reason")
    if gone:
        print(f"missing: {', '.join(sorted(gone))}")
    return 1 if gone else 0


if __name__ == "__main__":
    sys.exit(main())
