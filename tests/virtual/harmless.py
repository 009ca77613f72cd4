"""Mutants that nothing catches because nothing goes wrong, each with the reason why, and why its rule stands."""

from __future__ import annotations

_FOR_PEOPLE = (
    "harmless because the restart is the same: the leader waits a moment so that the report names the cause (of a "
    "hang: what all nodes were doing) and not its consequence, for people."
)
_IN_WORDS = "harmless because only the words differ, in which people are told why a node leaves or a generation begins."
_UNSEEN = (
    "harmless because no story or seed that was tried shows it, which is less than that nothing can go wrong: history "
)
HARMLESS: dict[str, str] = {
    "write_report without _unchanged(key, before)": (
        _UNSEEN + "201471 did, in which a late report replaced the next one, until the times of the protocol moved. "
        "tests/unit/rendezvous/test_member.py checks the rule by itself."
    ),
    "free_preparation without _unchanged(key, claimed_mod)": (
        "harmless because a builder whose claim is gone publishes nothing, and whoever claims looks at the data first: "
        "at worst two build at the same time. The rule keeps them from it."
    ),
    "a leader hears of its own report as late as of others'": (
        _UNSEEN + "105498 did (S18) until the times of the protocol moved. It takes a leader that decides within the "
        "delay of its own watch."
    ),
    "a head that another wrote is overwritten": (
        "harmless because only rank 0 of the current generation commits, one commit at a time, and its generation "
        "begins at the head that was compared when it was published: the head it replaces is the head it knows. "
        "The rule turns a worker's own mistake, such as two Loops in one run, into a refusal."
    ),
    "_end_after_data_loss without: view.is_leader and view.generation is not None": (
        "harmless because a view that has found its store to be another one is empty: it names no leader, and "
        "every member ends with the same code by itself."
    ),
    "_follow without: not trouble or me.started_generation != view.generation_number": (
        "harmless because it costs one probe: whoever has failed in an older generation is a newcomer in this "
        "one, and asks whether the leader lives. A dead leader may be fenced by anybody."
    ),
    "_start_anew without: too_few is not None": (
        "harmless because the next line asks when the min-nodes-th member was ready, and there is no such member: "
        "nothing can be published. What the rule decides is broken by the mutant of min-nodes, which is caught."
    ),
    "survivors without: view.generation is None or view.ended_nodes": (
        "harmless because no worker ends well before rank 0 has saved the last step: whoever could still go on in "
        "place then has only to end, and ends well whether or not it takes its seat. The rule has all ranks do again "
        "what a script does after its loop if one of them dies in that."
    ),
    "_lead without: final.collateral and context.now < until": _FOR_PEOPLE,
    "_after_failure without: failure.collateral": _FOR_PEOPLE,
    "_after_failure without: context.now < until": _FOR_PEOPLE,
    "_after_failure without: failure.stalled and len(failed) < len(context.seats)": _FOR_PEOPLE,
    "_after_failure without: pending_seats and context.now < until": (
        "harmless because a restart from an older copy costs steps, and no promise is made of how many; "
        "test_a_restart_waits_for_the_copies_of_survivors watches the rule."
    ),
    "_seats_yet_to_report without: context.in_place or not any((context.me.copy, *(entry.record.memory for entry in": (
        "harmless because it only spares the wait of a quarter of a second where no copy can come; "
        "test_a_restart_does_not_wait_for_long_or_without_copies watches the rule."
    ),
    "_leave_drained without: others_go_on": _IN_WORDS,
    "_after_waiting without: context.draining_seats": _IN_WORDS,
    "_after_waiting without: new": _IN_WORDS,
    "_probe_unreachable_again without: unreachable and isinstance(decision, Wait)": (
        "harmless because an agent with a health page looks around once a second: who is asked again is asked a second "
        "later at most. The rule serves one that has been started without the page."
    ),
    "_is_suspected without: context.has_left(seat)": (
        "harmless because the question is answered at once, by an agent that is still ending or by its closed "
        "port; only a machine that goes off in the instant it leaves would be waited for, one and a half seconds."
    ),
    "_fence_or_wait without: context.now < term_over": (
        "harmless because a leader that cannot hear most of the others then gives its place up after one and a "
        "half seconds and not after a lease term: it costs this node's life where the leases of dead nodes might "
        "have told."
    ),
    "_after_loss without: (wait := wait_for_save(context, lost)) is not None": (
        "harmless because rank 0 then saves the same step once more in the generation that follows. The rule spares "
        "nodes that leave the time of a second checkpoint, which they may not have."
    ),
    "take_part_in_handover without: me.running_generation != view.generation_number": (
        "harmless because an agent without workers of this generation then holds nobody, and its next generation "
        "begins with nothing held. The rule spares torchrun's plug-in a report on a generation that it has no part in."
    ),
    "_lead without: view.generation is None or view.generation.record.attempt != view.spec.record.at": (
        "harmless because the seats of an attempt that has ended are not read by the next one, and a generation that "
        "seats nobody is followed by one from whoever is there, as this rule says at once."
    ),
}
