"""An agent's times, in seconds, with their reasons. Pure.

Times that a user may choose are in `settings`. Those of training processes are beside the code that waits.
"""

# Intervals.

LOOK_AGAIN_S = 0.1
"""Between two looks at what sends no event when it changes. An answer from etcd takes a tenth of that."""

LOOK_S = 0.2
"""Between two looks at the workers' steps. Each takes the agent a millisecond, on a busy machine from the training."""

LOOK_IDLE_S = 1.0
"""Between two looks for the first step of a script without a Loop, and at workers that others wait for."""

# Workers without progress.

STANDING_IN_PLACE_S = 0.25
"""How long steps have to stand if workers go on in place. Taking out a healthy node then costs the time of a step."""

AWAY_S = 2.0
"""An agent that has not looked for so long was stopped or suspended itself."""

STOPPED_S = 1.0
"""A worker that is stopped by a signal is ended after this time, whatever it does: others wait for it, or soon will. A
debugger stops processes in another way, and is not meant."""

CLOSER_S = 3.0
"""Without a step for this time, and several times the usual, each agent takes the stacks of its workers. A single slow
step is not worth that. It does so again after twice the time, and so on."""

FIRST_STEP_S = 5.0
"""The same before the first step of a process, which compiles."""

PLACES_S = (0.5, 2.5)
"""So long after a look the agent of rank 0 asks the others where their workers are: once when agents usually have their
stacks, which takes milliseconds, and again when all of them have: that takes STACKS_S_MAX at most."""

FOUND_S = (0.5, 2.0)
"""So much later the node of rank 0 knows who is waited for, and is asked for it; as much later again the leader knows
it too, which is asked by nodes that do not know the first."""

COMPARE_S = 10.0
"""Between two comparisons of the nodes' own work."""

BLAME_AGAIN_S = 60.0
"""Before the same finding about the same rank is reported again."""

LATE_S = 2.0
"""The stacks of a worker are kept if it has not taken its new seat after this time, unless it may be busy elsewhere: no
step was expected of it, and it was neither meeting others nor sharing their state."""

SEATED_S_MAX = 10.0
"""After this time such a worker is ended, and the others go on without it. After a planned change only if it does
nothing, or has been late for --hang-timeout: nothing has failed that would keep it from coming."""

SEATED_WAITING_S_MAX = 5.0
"""The same where the others make no step but save: nodes that leave do not wait for long."""

START_S_MAX = 60.0
"""How long newcomers wait for a generation's first step, if the script is known to have a Loop."""

START_UNKNOWN_S = 3.0
"""The same if it is not known whether the script has one."""

STACKS_S_MAX = 2.0
"""How long to wait for a worker's stacks. On an idle machine it needs less than a millisecond."""

STACKS_ASKED_S, STACKS_RUNS_S = 0.3, 1.0
"""A worker that has not written its stack by then gets a signal: sooner if its main thread sleeps than if it runs."""

STACKS_LOOK_S = 0.02
"""Between two looks for them."""

# Ends of workers.

SAY_AFTER_S = 5.0
"""When others have ended, the workers that run on are reported after this time."""

HOLD_SEEN_S = 0.002
"""After this time a worker has either seen `stop`, or its `entered` can be read: store buffers need microseconds."""

EXIT_HOOKS_S = 0.1
"""Between a handover and SIGKILL, for `finally`, `with` and exit hooks of workers."""

PARENT_END_S = 5.0
"""How long a worker parent may take to end with its workers. It needs milliseconds."""

JOIN_AGAIN_S = 1.0
JOIN_AGAIN_S_MAX = 60.0
"""Between a failure of a worker that sets up beside the training and the next try. It doubles up to the maximum."""

# Other agents.

PROBE_STEPS = 5
PROBE_STEP_S = 0.3
"""The number of tries after which another agent is silent, and the time of each. A step is longer than the pauses of a
busy machine, and all of them are shorter than a lease."""

AGREED_STEPS = 2
"""The same number if a witness hears nothing either."""

LISTEN_STEPS = 2
"""Tries of a question for an agent's generation. It is asked again every second."""

WORKERS_STEPS = 3
"""Tries of a question for an agent's workers. Witnesses are asked with the second one."""
