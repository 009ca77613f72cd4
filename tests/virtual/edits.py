"""The mutants made by hand: (module, function, a piece of it, what stands there instead)."""

from __future__ import annotations

# ruff: noqa: E501  Pieces of code, one mutant a line.

_R, _A, _W = "elasticrt.rendezvous.", "elasticrt.agent.", "elasticrt.workers."
_DECIDE, _VIEW, _CONTEXT, _SEATS = _R + "decide", _R + "view", _R + "leader_context", _R + "seats"
_TRANSACTIONS, _REPLICA, _COMMIT = _R + "transactions", _R + "replica", _A + "store_proxy"
_PLANNED = _R + "reconfiguration"
_SHARE, _OFFER = "elasticrt.checkpoint.state_transfer", "elasticrt.checkpoint.newest_offer"
_READ_BACK = "known is not None and known.nonce == head.nonce"
_ALL_REPORTED = "all(context.has_reported(seat, "

Edit = tuple[str, str, str, str]

EDITS: dict[str, tuple[Edit, ...]] = {
    "no compare-and-swap": ((_TRANSACTIONS, "publish", "_generation_unchanged(keys, view.generation_value),", ""),),
    "lease as permission to publish": (
        (_TRANSACTIONS, "publish", "_generation_unchanged(keys, view.generation_value),", ""),
        (_TRANSACTIONS, "publish", "_unchanged(keys.checkpoint, mod_revision_of(view.head)),", ""),
    ),
    "identity by name": ((_VIEW, "View.seat_of", "and seat.incarnation == member.incarnation", ""),),
    "no fence on commit": ((_TRANSACTIONS, "commit", "_generation_unchanged(keys, generation_value),", ""),),
    "commit by whatever generation is current": (
        (_A + "agent", "Agent._store_request", "if view.generation and current else", "if view.generation else"),
    ),
    "no nonce read-back": ((_COMMIT, "StoreProxy._save", _READ_BACK, "False"),),
    "a head that another wrote is overwritten": (
        (_COMMIT, "StoreProxy._refusal", 'if (known.nonce if known is not None else "") != request.replaces:', "if False:"),
    ),
    "resume where the last generation did": (
        (_CONTEXT, "publish", "resume=view.head.record if view.head else None", "resume=view.generation.record.resume if view.generation else None"),
    ),
    "everybody leads": ((_VIEW, "View.is_leader", "self.leader_node == self.node", "self.leader_node is not None"),),
    "the youngest leads": ((_REPLICA, "Replica.complete", "self.read(range_, limit=1, by_create=True)", "self.read(range_)"),),
    "silence fences a majority": (
        (_DECIDE, "_fence_or_wait", "if not context.isolated:", "if True:"),
    ),
    "of two a silent one is given up without another question": (
        (_DECIDE, "_fence_or_wait", "if context.now >= ask_again > verdict.asked_at:", "if False:"),
    ),
    "what went before a leader saw all keys is as old as it was then": ((_VIEW, "apply_range", "if not view.members_complete:", "if False:"),),
    "a member forgets that it did not hear the leader of before": (
        (_DECIDE, "_judge_silent_leader", "life not in lives and each.asked_at >= since", "life == leader.record.incarnation"),
    ),
    "only a life that goes on shows that others can be reached": (
        (_DECIDE, "_judge_silent_leader", 'each.kind != "silent"', 'each.kind == "alive"'),
    ),
    "a member believes what it heard before it registered last": (
        (_DECIDE, "_follow", "max(*trouble, view.members[me.record.node].since)", "max(trouble)"),
    ),
    "an isolated leader takes silence for death": ((_DECIDE, "_lost_at", "or not context.isolated", "or True"),),
    "an isolated leader passes over who has come back": (
        (_DECIDE, "_is_suspected", "if key is not None and context.isolated and not context.is_back_unheard(seat):", "if False:"),
    ),
    "a fenced node that registers again at once is waited for": (
        (_DECIDE, "_lost_at", "context.has_left(seat) or context.is_back_unheard(seat)", "context.has_left(seat)"),
    ),
    "who has lost its key is not asked": ((_DECIDE, "_is_suspected", "if key is None:", "if False:"),),
    "an old silence is believed": (
        (_DECIDE, "_is_suspected", "max(context.generation_seen_at, vanished - SILENCE_TERMS * term_s)", "-math.inf"),
        (_DECIDE, "_is_suspected", "has_answered or context.is_training", "has_answered"),
    ),
    "a silence is believed although steps go on": ((_DECIDE, "_is_suspected", "has_answered or context.is_training", "has_answered"),),
    "a next life is asked only when it is warm": ((_DECIDE, "_unprobed_newcomers", " or entry.record.node in view.seats", ""),),
    "who has come back is not asked before the next generation": ((_DECIDE, "_probe_unreachable_again", "Wait | Publish", "Wait"),),
    "who was out of reach is not asked when another has answered since": (
        (_DECIDE, "_probe_unreachable_again", " if asked_at >= context.answered_probe_at else context.now", ""),
    ),
    "a leader hears of its own report as late as of others'": (
        (_REPLICA, "Replica.write", "for operation in txn.operations:", "for operation in () if ' reports ' in txn.why else txn.operations:"),
    ),
    "a node's goodbye takes its failure with it": (
        (_R + "member", "Member.leave", "last is not None and last.generation == view.generation_number", "False"),
    ),
    "a key that is gone is a death": ((_DECIDE, "_lost_at", "return away_since + context.spec.lease_ttl_s", "return -math.inf"),),
    "a lost key is never a death": (
        (_DECIDE, "_lost_at", "return away_since + context.spec.lease_ttl_s", "return math.inf"),
        (_DECIDE, "_lost_at", "if verdict is not None and verdict.kind != \"alive\":", "if False:"),
    ),
    "reports of an older generation count": (
        (_VIEW, "View.reports", "if entry.record.generation == self.generation_number", ""),
        (_VIEW, "_apply_generation", "if report.record.generation >= entry.record.number", ""),
        (_VIEW, "_apply_report", " and entry.record.generation >= view.generation_number", ""),
    ),
    "members that left are seated": ((_CONTEXT, "startable_members", "left | absent", "absent"),),
    "cold members are seated": ((_VIEW, "_apply_member", "ready = entry.record.warm and not entry.record.draining", "ready = True"),),
    "old deliveries replace newer reads": (
        (_VIEW, "_known_revision", "covers(range_, key)", "False"),
        (_VIEW, "_known_revision", "view.written_revisions.get(key, 0)", "0"),
        (_VIEW, "_stored", "old.mod_revision >= value.mod_revision", "False"),
        (_REPLICA, "Replica.complete", "if not found.keys and", "if False and"),  # Else an old generation is seen to be.
    ),
    "a key made anew keeps its seniority": ((_VIEW, "_apply_member", "leader_node = None if is_created_anew and view.leader_node == node else view.leader_node", "leader_node = view.leader_node"),),
    "a seat from the last generation's roster": ((_VIEW, "View.roster_known", "self.generation is None or self.roster_nonce == self.generation.record.nonce", "True"),),
    "silence is for ever": ((_DECIDE, "_fence_or_wait", "and verdict.asked_at >= key.since", ""),),
    "numbers skip": ((_CONTEXT, "publish", "in view.members.values())]) + 1", "in view.members.values())]) + 2"),),
    "ranks count nodes": ((_SEATS, "seats_for", "offset += workers", "offset += 1"),),
    "max-nodes is not looked at": ((_SEATS, "seat_order", "[:most]", ""),),
    "min-nodes is not looked at": (
        (_CONTEXT, "decide_if_too_few", "if ready >= spec.min_nodes:", "if ready >= 1:"),
        (_CONTEXT, "settled_at", "ready[spec.min_nodes - 1] + spec.settle_max_s", "ready[0] + spec.settle_max_s"),
    ),
    "nobody asks whether enough are left": ((_CONTEXT, "re_form", "return too_few or publish(", "return publish("),),
    "the deadline for min-nodes is at once": ((_CONTEXT, "decide_if_too_few", "view.too_few_since + spec.join_timeout_s", "view.too_few_since + 1.0"),),
    "failures are not counted": ((_CONTEXT, "restarts_after", "before.total + 1", "before.total"),),
    "the budget is never spent": ((_DECIDE, "_after_failure", "> spec.max_restarts:", "> 10**6:"),),
    "a worker that was killed costs a restart": (
        (_CONTEXT, "restarts_after", "failure.killed if has_state else", "has_state and False or"),
    ),
    "a worker that was killed costs none, whoever has the state": (
        (_CONTEXT, "restarts_after", "failure.killed if has_state else", "failure.killed or"),
    ),
    "what follows from a failure costs no restart": (
        (_CONTEXT, "restarts_after", "failure.collateral and in_first_step", "failure.collateral"),
    ),
    "a lost connection knows of no steps": ((_A + "supervisor", "Supervisor._fail", "self._with_steps(failure)", "failure"),),
    "workers set up beside a run that ends": (
        (_A + "supervisor", "Supervisor._can_start_beside", "beside[0].last is not None", "False"),
    ),
    "as many as before save again and again": ((_DECIDE, "_after_failure", "fewer or not failure.collateral", "True"),),
    "the budget is one less": ((_DECIDE, "_after_failure", "> spec.max_restarts:", ">= spec.max_restarts:"),),
    "a lost node costs a restart": (
        (_CONTEXT, "re_form", "or context.generation.restarts", 'or context.generation.restarts.model_copy(update={"total": 1 + context.generation.restarts.total})'),
    ),
    "success with the first node that is done": ((_DECIDE, "_lead", _ALL_REPORTED + '"ok")', 'any(context.has_reported(seat, "ok")'),),
    "a failed publish is tried again unread": ((_REPLICA, "Replica.write", "yield from self.refresh()", "yield from () if txn.why.startswith('generation ') else self.refresh()"),),
    "a failed report is tried again unread": ((_REPLICA, "Replica.write", "yield from self.refresh()", "yield from () if ' reports ' in txn.why else self.refresh()"),),
    "the leader does not follow reports": ((_VIEW, "watched_ranges", "keys.all_reports,", ""),),
    "a resync is taken for the end": ((_REPLICA, "Replica.fold_notice", "self._drop_watch(notice.range)", "pass"),),
    "workers of the last generation live on": (
        (_A + "supervisor", "Supervisor.run", "self._end_workers()", "pass"),
    ),
    "a node that was left out keeps its workers": (
        (_A + "agent", "Agent.end_before_rejoin", "self.supervisor.kill()", "pass"),
        (_A + "agent", "Agent.end_before_rejoin", "while not self.supervisor.are_gone()", "while False"),
    ),
    "workers that were released get the stop timeout twice": (
        (_A + "supervisor", "Supervisor.stop", "+ grace_s", "+ 2 * grace_s"),
    ),
    "only workers that run bind a life": ((_DECIDE, "_take_seat", "max(me.running_generation, me.seated_generation)", "me.running_generation"),),
    "a lease that is gone ends the agent": ((_A + "event_loop", "EventLoop._do", "StoreUnavailable, LeaseLost, StoreBlocked", "StoreUnavailable, StoreBlocked"),),
    "who has not the claim publishes": (
        (_COMMIT, "_is_ours", "record.incarnation == asked.incarnation and ", ""),
    ),
    "a new life keeps its claims": ((_R + "member", "Member.begin_life", 'failed_at=None, lease="lost")', "failed_at=None)"),),
    "a lease that was given up comes back with the next life": (
        (_R + "member", "Member._lease_changed", 'if self.me.lease != "lost":', "if True:"),
    ),
    "two build": ((_COMMIT, "_taken", 'if record.state == "building":', "if False:"),),
    "a copy that is older than the head is resumed from": (
        (_CONTEXT, "_newest_copy", "head.reached if head is not None else -1", "-1"),
    ),
    "an ancestor is resumed from although the head is here": (
        (_OFFER, "choose", "(each[1].kind, ", "(each[1].kind == OLDER, "),
    ),
    "nobody goes back behind a checkpoint that nobody has": (
        (_OFFER, "choose", "if best.kind != NOTHING:", "if best.kind >= RESUME:"),
    ),
    "a copy that does not descend from the head is resumed from": (
        (_CONTEXT, "_newest_copy", "head is not None and head.generation != before.number and head.nonce not in known", "False"),
    ),
    "a leader's copy from an older generation counts": ((_CONTEXT, "_newest_copy", " and me.seated_generation == before.number", ""),),
    "a copy of a former life counts": (
        (_CONTEXT, "_newest_copy", " and report.record.incarnation == life", ""),
    ),
    "rank 0 is not where the copy is": ((_CONTEXT, "publish", "if holder is not None:", "if False:"),),
    "copies of the last generation are kept": ((_W + "snapshot_cache", "SnapshotCache.renew", "each not in chosen[:1]", "not each"),),
    "what a fenced node holds comes back with it": ((_A + "supervisor", "Supervisor.kill", "self.seating.memory.close()", "pass"),),
    "what etcd has forgotten was never saved": ((_A + "agent", "Agent._newest_checkpoint", "(found, self.last_commit, ", "(found, "),),
    "a damaged copy is offered again": ((_W + "snapshot_cache", "SnapshotCache.forget", "self._drop(self._copies[:1])", "pass"),),
    "all start anew, whoever could go on": ((_CONTEXT, "publish", "in_place = len(ready) >= least", "in_place = False"),),
    "with --join failure newcomers need no loss": ((_R + "reconfiguration", "_wanted_join", 'spec.join != "failure" or after_loss', "True"),),
    "newcomers come in with a loss": ((_CONTEXT, "publish", "len(stay) >= least:", "False:"),),
    "newcomers of a node that goes on come in with a loss": ((_CONTEXT, "publish", "entry.record.ready - entry.record.new", "entry.record.ready"),),
    "a node forgets which of its workers are new": ((_A + "supervisor", "Supervisor.describe", '"new": beside,', '"new": 0,'),),
    "who has come in counts as a newcomer until its key says otherwise": ((_CONTEXT, "as_reported", '"new": ready - seat.workers', '"new": entry.record.new'),),
    "all go on, and nobody has the state": ((_CONTEXT, "publish", "if any_has_state(view, able) else []", ""), (_CONTEXT, "survivors", "entry.record.ready and entry.record.has_state", "entry.record.ready")),
    "a node has as many seats as workers, alive or not": (
        (_SEATS, "seats_for", "member.ready if in_place else member.workers", "member.workers"),
    ),
    "workers that are ready beside their node's seat are not let in": (
        (_PLANNED, "_has_workers_to_let_in", "or (context.in_place and entry.record.ready > seat.workers)", ""),
    ),
    "the silence of a life is forgotten with its key": (
        (_VIEW, "View.newest_verdict", "gone.incarnation if gone is not None", "gone.incarnation if False"),
    ),
    "a key counts, and not the report that is newer": ((_CONTEXT, "as_reported", "else _with_fields(entry, newer)", "else entry"),),
    "a key counts, and not the seat that it does not tell of": ((_CONTEXT, "as_reported", "_with_fields(entry, {", "entry if True else _with_fields(entry, {"),),
    "who waits leaves the head on the disk of a node that is lost": (
        (_OFFER, "adds", " or (lacks_head and step == committed)", ""),
    ),
    "who waits puts an earlier step in place of the head": (
        (_OFFER, "adds", "lacks_head and step == committed", "lacks_head"),
    ),
    "below min-nodes survivors wait and save nothing": ((_CONTEXT, "re_form", "if waits and any_has_state", "if False and any_has_state"),),
    "survivors keep the state in their collectives while new workers set up": ((_CONTEXT, "re_form", "waits = isinstance(too_few, Wait) or (too_few is None and not context.others_go_on)", "waits = not isinstance(too_few, Finish) and not context.others_go_on"),),
    "those that have the state leave, and the others start anew": ((_CONTEXT, "LeaderContext.others_go_on", " and (not self.in_place or any_has_state(self.view, stay))", ""),),
    "a step that does not end is waited for by those that leave": ((_CONTEXT, "leave_deadline", "if not (context.draining_seats", "if True or not (context.draining_seats"),),
    "who ends before it takes its seat has ended well": ((_A + "supervisor", "Supervisor._seated_ended", "event.code == 0 and not self.pages", "False and not self.pages"),),
    "a long save is waited for no longer than a step": (
        (_CONTEXT, "LeaderContext.drain_patience_s", "SAVING_SHARE if self.me.saves", "DRAIN_SHARE if self.me.saves"),
    ),
    "who waits for a pause waits as for a step": ((_CONTEXT, "leave_deadline", "context.others_go_on and standing_since is None", "standing_since is None"),),
    "the only copies leave with their node": ((_CONTEXT, "re_form", 'if kind in ("failure", "lost") and', "if False and"),),
    "a node that has copies and no workers leaves at once": ((_A + "agent", "Agent.drain", "or self.supervisor.seating.memory.newest", ""),),
    "the copy that all resume from leaves before they have": ((_PLANNED, "_wanted_change", "context.generation.memory is not None", "False"),),
    "who leaves leaves its state to the one that hangs": ((_PLANNED, "_replace_without_step", "if context.draining_seats and", "if False and"),),
    "who leaves is left out before it has saved": ((_PLANNED, "_after_waiting", "if missing and (until is None", "if False and (until is None"),),
    "nobody remembers how far a handover was": ((_CONTEXT, "LeaderContext.progress", "[self.generation.reached, ", "[0, "),),
    "below min-nodes survivors that drain are left out": ((_CONTEXT, "re_form", "draining=not saved", "draining=False"),),
    "below min-nodes survivors do not wait for those that set up": ((_CONTEXT, "decide_if_too_few", "if ready >= spec.min_nodes:", "if len(startable_members(view)) >= spec.min_nodes:"),),
    "who dies before all have met is found by its lease": (
        (_A + "worker_pages", "WorkerPages.unmet_since", "if times >= 1 else None", "if False else None"),
    ),
    "who does not come back from the cut is waited for": (
        (_A + "supervisor", "Supervisor._go_on", "self._check_seats_at = self._clock.monotonic() + LATE_S", "self._check_seats_at = None"),
    ),
    "a node none of whose workers came along runs them": ((_W + "group_state", "GroupState.went_on", "bool(ranks)", "True"),),
    "a busy worker is ended when a node drains": ((_A + "supervisor", "Supervisor._end_unseated", "self._spares_busy and", "False and"),),
    "who is busy is ended when the node that drains has left": ((_A + "supervisor", "Supervisor._go_on", "still or generation.kind", "generation.kind"),),
    "one lost worker ends all of its node": ((_A + "supervisor", "Supervisor._failed", "if not self._able_in_place():", "if True:"),),
    "places of a node are counted by local rank": ((_W + "environment", "worker_env", "local_rank if place is None else place", "local_rank"),),
    "a stopped worker is waited for": ((_A + "supervisor", "Supervisor._end_stopped", "in pids.items() if pid in over", "in ()"),),
    "a stopped newcomer is waited for": ((_A + "supervisor", "Supervisor._end_stopped", "in beside.items() if pid in over", "in ()"),),
    "nobody sets up for the lost beside the training": ((_A + "supervisor", "Supervisor._start_missing", "if missing and", "if False and"),),
    "the state of one that is behind is shared": ((_SHARE, "chain", "furthest = max(", "furthest = min("),),
    "those that are level are not told from those behind": ((_SHARE, "chain", "if step != furthest", "if step < 0"),),
}  # fmt: skip
