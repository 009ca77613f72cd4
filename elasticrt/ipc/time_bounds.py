"""How long an agent waits for what, in seconds, and why. Pure.

What a user may choose is in `settings`; waits of training processes are where they wait.
"""

# Going round.

LOOK_AGAIN_S = 0.1
"""Between two looks at what sends no word when it changes; an answer from etcd takes a tenth of that."""

LOOK_S = 0.25
"""Between two looks at the workers' steps."""

LOOK_IN_PLACE_S = 0.1
"""The same where workers go on in place: there it pays to be quick."""

LOOK_IDLE_S = 1.0
"""Between two looks for the first step of a script without a Loop, and at workers that others wait for."""

# Workers that do not get on.

STANDING_IN_PLACE_S = 0.25
"""How long steps have to stand where workers go on in place: taking a node out wrongly costs the time of a step."""

AWAY_S = 2.0
"""An agent that has not looked for so long was away itself: a stopped process, a suspended machine."""

STOPPED_S = 1.0
"""A worker that a signal has stopped (SIGSTOP) is ended after so long, when others wait for it: a debugger, which
stops processes in another way, is not meant ..."""

STOPPED_UNEXPECTED_S = 10.0
"""... and after so long when no step is to be expected of it, as in a pause."""

CLOSER_S = 3.0
"""When no step has come for so long, or for several times as long as usual, each agent looks where its workers are: not
in every slow step. It looks again after twice the time, and so on."""

FIRST_STEP_S = 5.0
"""The same before the first step of a process: it compiles, and does other things for the first time."""

PLACES_S = 2.5
"""So long later the agents of all nodes have done so, and that of rank 0 asks them. Stacks take STACKS_S_MAX."""

COMPARE_S = 10.0
"""Between two comparisons of what the nodes' own work takes. DDP measures one step in a hundred."""

BLAME_AGAIN_S = 60.0
"""People are told again after so long that the others wait for the same rank at the same place."""

LATE_S = 2.0
"""Of a worker that has not come back from its old generation so long after it got its new seat, if steps are to be
expected of it or it was meeting others, or sharing their state, the stacks are kept ..."""

SEATED_S_MAX = 10.0
"""... and so long after it, it is ended: the others do not wait for it any longer."""

START_S_MAX = 60.0
"""Newcomers wait for a generation's first step so long, in a script that is known to have a Loop ..."""

START_UNKNOWN_S = 3.0
"""... and so long in a script of which nothing is known."""

STACKS_S_MAX = 2.0
"""A signal handler writes its stacks in less than a millisecond, on an idle machine ..."""

STACKS_LOOK_S = 0.02
"""... and is looked at so often meanwhile."""

# Ends of workers.

SAY_AFTER_S = 5.0
"""People are told who is waited for at the end of a run, after so long."""

HOLD_SEEN_S = 0.002
"""A worker that did not see `stop` had written `entered` before it looked; its store buffer needs microseconds."""

EXIT_HOOKS_S = 0.1
"""What workers get between handing over and SIGKILL, for `finally`, `with` and exit hooks."""

PARENT_END_S = 5.0
"""A worker parent that was asked to end, has closed its channel, or was killed, needs milliseconds to take its workers
along."""

JOIN_AGAIN_S = 1.0
JOIN_AGAIN_S_MAX = 60.0
"""Between a failure of a worker that sets up beside the training and the next try: doubled each time, up to the
second."""

# Other agents.

PROBE_STEPS = 5
PROBE_STEP_S = 0.3
"""Between two tries of a question to another agent; after so many steps it is silent. Longer than the pauses of a busy
machine, shorter in all than any lease."""

AGREED_STEPS = 2
"""After so many steps it is silent if a witness says so, too."""

LISTEN_STEPS = 2
"""Tries of a question for an agent's generation, which is asked again every second."""
