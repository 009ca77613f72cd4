"""The agent's time limits and intervals, in seconds, with their reasons. Pure.

Times that a user may choose are in `settings`. Those of training processes are beside the code that waits.
"""

# Intervals.

LOOK_AGAIN_S = 0.1
"""How often the agent looks at what sends no event when it changes. An answer from etcd takes a tenth of this."""

LOOK_S = 0.2
"""How often the agent looks at the workers' steps. Each look takes a millisecond, which a busy machine takes from the
training."""

LOOK_IDLE_S = 1.0
"""How often it looks for the first step of a script without a Loop, and at workers that others wait for."""

# Workers without progress.

STANDING_IN_PLACE_S = 0.25
"""How long steps must stand still before the agents probe each other, if workers go on in place. Taking out a healthy
node then costs only the time of a step."""

AWAY_S = 2.0
"""An agent that has not looked for so long was stopped or suspended itself."""

STOPPED_S = 1.0
"""A worker that is stopped by a signal is ended after this time, whatever it was doing: others wait for it, or soon
will. Debuggers stop processes in another way, which does not count."""

CLOSER_S = 3.0
"""Without a step for this time, and for several times the usual one, each agent takes the stacks of its workers. A
single slow step is not worth that. The agent does so again after twice the time, and so on."""

FIRST_STEP_S = 5.0
"""The same limit before the first step of a process, which compiles."""

PLACES_S = (0.5, 2.5)
"""So long after it took the stacks, the agent of rank 0 asks the others where their workers are: first when agents
usually have their workers' stacks, which takes milliseconds, and again when all agents have them, which takes
STACKS_S_MAX at most."""

FOUND_S = (0.5, 2.0)
"""So much later the node of rank 0 knows who is waited for, and the others ask it. After the same time once more the
leader knows as well; nodes that do not know rank 0's node ask the leader."""

COMPARE_S = 10.0
"""How often the nodes' own work is compared."""

LATE_S = 2.0
"""If a worker has not taken its new seat after this time, its stacks are kept, unless it may be busy elsewhere: no step
was expected of it, and it was neither meeting the other ranks nor sharing their state."""

SEATED_S_MAX = 10.0
"""After this time such a worker is ended, and the others go on without it. After a planned change this happens only if
the worker does nothing, or has been late for --hang-timeout: nothing has failed that would keep it from coming."""

SEATED_WAITING_S_MAX = 5.0
"""The same limit in a generation that makes no step but saves: nodes that leave do not wait for long."""

START_S_MAX = 60.0
"""How long newcomers wait for a generation's first step, if the script is known to have a Loop."""

START_UNKNOWN_S = 3.0
"""The same limit if it is not known whether the script has a Loop."""

STACKS_S_MAX = 2.0
"""How long to wait for a worker's stacks. On an idle machine the worker needs less than a millisecond."""

STACKS_ASKED_S, STACKS_RUNS_S = 0.3, 1.0
"""A worker that has not written its stack by then gets a signal: after the first time if its main thread sleeps, after
the second if it runs."""

STACKS_LOOK_S = 0.02
"""How often to look whether stacks have come."""

# Ends of workers.

SAY_AFTER_S = 5.0
"""How long after the end of the others the workers that still run are reported."""

HOLD_SEEN_S = 0.002
"""After this time a worker has either seen `stop`, or its `entered` can be read: store buffers need microseconds."""

EXIT_HOOKS_S = 0.1
"""How long workers have between a handover and SIGKILL, for `finally`, `with` and exit hooks."""

PARENT_END_S = 5.0
"""How long a worker parent may take to end with its workers. It needs milliseconds; `proc.HELPER_MAX_S` at most, if it
waits for helpers of the workers."""

JOIN_AGAIN_S = 1.0
JOIN_AGAIN_S_MAX = 60.0
"""The pause between the failure of a worker that sets up beside the training and the next try. It doubles up to the
maximum."""

# Other agents.

PROBE_STEPS = 5
PROBE_STEP_S = 0.3
"""The number of tries after which another agent counts as silent, and the time of each. One try is longer than the
pauses of a busy machine, and all tries together are shorter than a lease."""

AGREED_STEPS = 2
"""The number of tries if a witness does not hear the agent either."""

LISTEN_STEPS = 2
"""Tries of a question for an agent's generation. It is asked again every second."""

WORKERS_STEPS = 3
"""Tries of a question for an agent's workers. Witnesses are asked with the second one."""
