"""What goes wrong at a time: each kind of fault as one method."""

from __future__ import annotations

import copy
import math
from typing import TYPE_CHECKING, Any

from elasticrt.ipc.env import Commit
from elasticrt.rendezvous import transactions
from elasticrt.rendezvous.records import Keys, Member, SpecRecord, decode
from elasticrt.store.protocol import Delete, LeaseLost, Put, Txn
from tests.virtual.engine import require
from tests.virtual.plan import Fault

if TYPE_CHECKING:
    from tests.virtual.process import Process
    from tests.virtual.simulator import Simulator

BURST = 3

KEPT = ("revision", "_keys", "_values", "_history", "_leases", "_expiries")
"""What a copy of the memory server's data consists of."""

SLEEP_S = 10_000.0
"""A sleeper is woken when all has been submitted again."""


class Faults:
    """The faults of a plan, and how they stop."""

    def __init__(self, sim: Simulator) -> None:
        self.sim = sim
        self._pending: list[Fault] = []
        self._unsaid = {snag.on for snag in sim.plan.snags if snag.on}
        self._backup: dict[str, Any] = {}

    def has_said(self, on: str) -> bool:
        """Whether the story has said this."""
        return on not in self._unsaid

    def _heard(self, line: str) -> None:
        self._unsaid = {on for on in self._unsaid if on not in line}
        for fault in [fault for fault in self._pending if fault.on in line]:
            self._pending.remove(fault)
            self.sim.engine.after(fault.at, self._happen, fault)

    def schedule(self) -> None:
        """Put all of the plan's faults on the heap, and count those that are there from the beginning."""
        sim, plan = self.sim, self.sim.plan
        for fault in plan.faults:
            if fault.on:
                self._pending.append(fault)
            else:
                sim.engine.at(sim.began + fault.at, self._happen, fault)
        if self._pending or self._unsaid:
            sim.engine.heard = self._heard
        if any(plan.offsets) or any(rate != 1.0 for rate in plan.clock_rates):
            sim.fired["clock_skew"] += 1
        if len(plan.arrivals) >= BURST and not any(plan.arrivals):
            sim.fired["burst"] += 1

    def stop(self) -> None:
        """Nothing goes wrong from now on; the doomed are dead for good, everybody else comes back."""
        sim = self.sim
        sim.calm = True
        sim.engine.say("-----", "faults stop")
        sim.down_until = min(sim.down_until, sim.engine.now)
        self._thaw()
        sim.cut_etcd.clear()
        sim.cut_peers = {name: min(until, sim.engine.now) for name, until in sim.cut_peers.items()}
        sim.cut_pairs = {pair: min(until, sim.engine.now) for pair, until in sim.cut_pairs.items()}
        for process in list(sim.processes.values()):
            sim.unpause(process)
        for index in range(sim.plan.nodes):
            name = f"n{index}"
            if name in sim.plan.doomed:
                process = sim.processes.get(name)
                if process is not None and not process.gone and name == sim.plan.sleeper and sim.plan.again:
                    sim.pause(process, SLEEP_S)
                elif process is not None and not process.gone:
                    process.silent_death = sim.net.random() < 0.5
                    sim.kill(process, "is dead for good")
            else:
                sim.engine.after(sim.net.uniform(0.0, 3.0), sim.spawn, name)

    def _happen(self, fault: Fault) -> None:
        if self.sim.calm or self.sim.invariants.result_at is not None:
            return
        name = self.sim.leader() if fault.who == "leader" else fault.who
        process = self.sim.processes.get(name or "")
        if fault.who and fault.kind != "start" and (process is None or process.gone):
            return
        if process is not None:
            if fault.kind != "key_deleted":
                process.trouble_at = max(process.trouble_at, self.sim.engine.now + fault.for_s)
            self.sim.say(process, f"! {fault.kind}" + (f" for {fault.for_s:g} s" if fault.for_s else ""))
        else:
            self.sim.engine.say("etcd", f"! {fault.kind}" + (f" for {fault.for_s:g} s" if fault.for_s else ""))
        if getattr(self, fault.kind)(process, fault) is not False:
            self.sim.fired[fault.kind] += 1

    def _return(self, process: Process) -> None:
        sim = self.sim
        if sim.net.random() < sim.plan.returns and process.name not in sim.plan.doomed:
            sim.engine.after(sim.net.uniform(0.3, 12.0), sim.spawn, process.name)

    def crash(self, process: Process, fault: Fault) -> None:
        """SIGKILL of the agent."""
        self.sim.kill(process, "is killed")
        self._return(process)

    def start(self, process: Process | None, fault: Fault) -> None:
        """Somebody starts the agent again."""
        self.sim.spawn(fault.who)

    def power_loss(self, process: Process, fault: Fault) -> None:
        """The machine is gone without a word."""
        process.silent_death = True
        self.sim.kill(process, "loses power")
        self._return(process)

    def pause_node(self, process: Process, fault: Fault) -> None:
        """Agent and workers stop, then go on where they were."""
        self.sim.pause(process, fault.for_s)

    def pause_agent(self, process: Process, fault: Fault) -> None:
        """Only the agent stops; its workers go on."""
        self.sim.pause(process, fault.for_s, whole=False)

    def leader_hang(self, process: Process, fault: Fault) -> None:
        """The leader stops for longer than its lease."""
        self.sim.pause(process, fault.for_s)

    def cut_etcd(self, process: Process, fault: Fault) -> None:
        """A node cannot reach etcd."""
        self.sim.cut_etcd[process.name] = self.sim.engine.now + fault.for_s

    def cut_peers(self, process: Process, fault: Fault) -> None:
        """A node and its peers cannot reach each other."""
        self.sim.cut_peers[process.name] = self.sim.engine.now + fault.for_s

    def cut_all(self, process: Process, fault: Fault) -> None:
        """A node is alone."""
        self.cut_etcd(process, fault)
        self.cut_peers(process, fault)

    def cut_pair(self, process: Process, fault: Fault) -> bool:
        """Two nodes cannot reach each other; both reach everybody else."""
        other = self.sim.processes.get(fault.other)
        if other is None:
            return False
        other.trouble_at = process.trouble_at
        self.sim.cut_pairs[frozenset((process.name, fault.other))] = self.sim.engine.now + fault.for_s
        return True

    def missed(self, process: Process, fault: Fault) -> None:
        """What a node's watches would have told is compacted before they are connected again."""
        process.wire.miss(fault.for_s)

    def deaf_to(self, process: Process, fault: Fault) -> None:
        """A node's watches of one range miss what happens for a while."""
        process.wire.miss(fault.for_s, fault.other)

    def hears_late(self, process: Process, fault: Fault) -> None:
        """From now on a node's watches of one range tell everything later, by as much as the fault lasts."""
        process.wire.delay(fault.for_s, fault.other)

    def leave(self, process: Process, fault: Fault) -> None:
        """SIGTERM to the agent."""
        process.signal()
        self.sim.engine.after(8.0, self._return, process)

    def flap(self, process: Process, fault: Fault) -> None:
        """The agent dies and comes back, again and again."""
        for count in range(4):
            self.sim.engine.after(count * 2.5, self._flap, process.name)

    def _flap(self, name: str) -> None:
        process = self.sim.processes[name]
        if not self.sim.calm and not process.gone:
            self.sim.kill(process, "flaps")
            self.sim.engine.after(0.7, self.sim.spawn, name)

    def worker_failure(self, process: Process, fault: Fault) -> bool:
        """A worker raises; `other`: what makes its failure final, 5 or 6, or "early": before its first step."""
        living = process.group.living
        if not living:
            return False
        early, code = fault.other == "early", 0 if fault.other == "early" else int(fault.other or 0)
        living[-1].fail("it raises", collateral=False, final_code=code, early="0e" * 8 if early else "")
        return True

    def worker_killed(self, process: Process, fault: Fault) -> bool:
        """One worker is killed by somebody else; `other`: which, by its local rank, also one that has no seat yet."""
        found = [each for each in process.group.workers if each.alive]
        found = [each for each in found if fault.other in ("", str(each.env.local_rank))]
        if not found:
            return False
        self.sim.living.choice(found).die(-9)
        return True

    def two_workers_killed(self, process: Process, fault: Fault) -> bool:
        """Another worker, anywhere, within 50 ms of the first."""
        others = [each for each in self.sim.processes.values() if not each.gone and each.group.living]
        if not others or not self.worker_killed(process, fault):
            return False
        second = self.sim.living.choice(others)
        self.sim.engine.after(self.sim.living.uniform(0.0, 0.05), self.worker_killed, second, fault)
        return True

    def worker_stuck(self, process: Process, fault: Fault) -> bool:
        """A worker's main thread does nothing for a while, whatever is cut; without a time, for ever.

        Or in a pause, or in a save, or in a copy of its state; or it is "busy": it does something that is no step."""
        found = [each for each in process.group.workers if each.alive]
        for worker in found[:1]:
            if fault.other in ("pause", "save"):
                worker.page.stepping = 0
            if fault.other in ("save", "copy"):
                worker.page.halted_ns = 1
                self.sim.engine.after(fault.for_s, setattr, worker.page, "halted_ns", 0)
            worker.busy = fault.other == "busy"
            worker.stuck_until = self.sim.engine.now + fault.for_s if fault.for_s else math.inf
        return bool(found)

    def worker_stopped(self, process: Process, fault: Fault) -> bool:
        """A worker gets SIGSTOP, and nobody continues it; its agent lives."""
        found = [each for each in process.group.workers if each.alive]
        for worker in found[:1]:
            worker.stuck_until, worker.stopped = math.inf, True
        return bool(found)

    def worker_lost(self, process: Process, fault: Fault) -> bool:
        """A connection between two workers breaks, and both live."""
        found = [each for each in process.group.workers if each.alive and each.group is not None]
        for worker in found[:1]:
            worker.fail("peer closed", collateral=True)
        return bool(found)

    def torn_step(self, process: Process, fault: Fault) -> None:
        """A worker dies in the moment in which others have finished a step that it has not."""
        self.sim.torn = process.name

    def alone_ahead(self, process: Process, fault: Fault) -> None:
        """From now on all ranks but this node's take long to finish a step, and do not if one of these dies."""
        self.sim.ahead = process.name

    def collateral_first(self, process: Process, fault: Fault) -> bool:
        """The report of a consequence comes before that of the cause."""
        living = process.group.living
        if not living:
            return False
        living[-1].fail("peer closed", collateral=True)
        return True

    def outage(self, process: None, fault: Fault) -> None:
        """Nobody reaches etcd; its leases run on."""
        self.sim.trouble_at = self.sim.engine.now + fault.for_s
        if (
            self.sim.down_until < self.sim.engine.now - 1.0
        ):  # In less time agents may not have noticed that it was back.
            self.sim.down_since = self.sim.engine.now
        self.sim.down_until = max(self.sim.down_until, self.sim.engine.now + fault.for_s)

    def etcd_restart(self, process: None, fault: Fault) -> None:
        """etcd is down and its clock with it: leases are extended."""
        sim = self.sim
        self.outage(process, fault)
        if sim.frozen_since is None:
            sim.frozen_since = sim.engine.now
            sim.engine.after(fault.for_s, self._thaw)

    def _thaw(self) -> None:
        if self.sim.frozen_since is not None:
            self.sim.frozen_s += self.sim.engine.now - self.sim.frozen_since
            self.sim.frozen_since = None

    def leases_dropped(self, process: None, fault: Fault) -> None:
        """etcd forgets every lease at once, while all members live."""
        server = self.sim.server
        for kv in server.read(Keys("run").members).keys:
            server.revoke(kv.lease)

    def resubmit(self, _: None, fault: Fault) -> None:
        """Everything is killed and started again, with other options perhaps; one old agent may only be stopped."""
        sim = self.sim
        sim.trouble_at = sim.engine.now + 2 * sim.plan.spec.lease_ttl_s
        sim.spec = sim.plan.resubmitted or sim.spec
        for process in list(sim.processes.values()):
            if process.name == sim.plan.sleeper and not sim.plan.again:
                sim.pause(process, 12.0 + sim.net.uniform(0.0, 8.0))
            else:
                sim.kill(process, "is killed, to be submitted again")
        for index in range(sim.plan.nodes):
            sim.engine.after(sim.net.uniform(0.3, 6.0), sim.spawn, f"n{index}")

    def wiped(self, process: None, fault: Fault) -> None:
        """etcd's data are gone: an empty store answers."""
        self.sim.wipe()

    def resize(self, process: None, fault: Fault) -> bool:
        """The operator changes how many nodes the run may have to `other`, MIN:MAX; between reading and writing it is
        `for_s` slow."""
        found = self.sim.server.read(Keys("run").spec).keys
        if not found:
            return False
        record = decode(SpecRecord, found[0].key, found[0].value)
        least, most = map(int, fault.other.split(":"))
        spec = record.spec.model_copy(update={"min_nodes": least, "max_nodes": most})
        to = record.model_copy(update={"spec": spec})
        txn = transactions.change_spec(Keys("run"), to, found[0].mod_revision)
        self.sim.engine.after(fault.for_s, self._resize, txn, found[0].mod_revision)
        return True

    def _resize(self, txn: Txn, seen: int) -> None:
        now = self.sim.server.read(Keys("run").spec).keys
        done = self.sim.server.commit(txn).succeeded
        lost = done and (not now or now[0].mod_revision != seen)
        require(not lost, "S3", "a resize undoes what another has changed since it was read")

    def drain(self, process: Process, fault: Fault) -> bool:
        """The operator asks a node to drain; between reading and writing its key `for_s` pass."""
        found = self.sim.server.read(Keys("run").member(process.name)).keys
        if not found:
            return False
        member, spec = decode(Member, found[0].key, found[0].value), self.sim.server.read(Keys("run").spec).keys
        if self.sim.plan.leaves_within_s:  # Otherwise etcd may lose the wish.
            process.told_at = self.sim.engine.now + fault.for_s
        asked = [transactions.drain(Keys("run"), found[0], member.model_copy(update={"draining": True}))]
        if spec:
            told = decode(SpecRecord, spec[0].key, spec[0].value).telling(member.agent)
            asked.append(transactions.change_spec(Keys("run"), told, spec[0].mod_revision))
        compares = tuple(compare for each in asked for compare in each.compares)
        txn = Txn(compares, tuple(each for one in asked for each in one.operations), why="told to leave")
        self.sim.engine.after(fault.for_s, self._drain, process, txn)
        return True

    def _drain(self, process: Process, txn: Txn) -> None:
        try:
            done = self.sim.server.commit(txn).succeeded
        except LeaseLost:
            done = False
        if not done:
            process.told_at = None
        else:
            self.sim.engine.after(8.0, self._return, process)

    def deleted(self, process: None, fault: Fault) -> None:
        """Somebody deletes a part of the run's keys by hand."""
        sim = self.sim
        sim.invariants.running = False
        sim.server.commit(Txn((), (Delete(Keys("run").prefix + fault.other),), "by hand"))
        sim.lost_data()
        sim.invariants.take_over(sim.server.read(Keys("run").prefix))

    def backup(self, process: None, fault: Fault) -> None:
        """Somebody keeps a copy of etcd's data."""
        self._backup = {name: copy.deepcopy(vars(self.sim.server)[name]) for name in KEPT}

    def restored(self, process: None, fault: Fault) -> None:
        """etcd comes back from the copy: what it had acknowledged since is gone."""
        sim = self.sim
        sim.lost_data()
        sim.server.replace(sim.server.store_id)
        vars(sim.server).update(self._backup)
        sim.server.watch("/elasticrt/run/", sim.recorded, from_revision=1)

    def key_deleted(self, process: Process, fault: Fault) -> None:
        """Somebody deletes one member key by hand."""
        self.sim.server.commit(Txn((), (Delete(Keys("run").member(process.name)),), "by hand"))

    def compaction(self, process: None, fault: Fault) -> None:
        """etcd forgets its history."""
        if self.sim.server.revision > self.sim.server.compacted:
            self.sim.server.compact(self.sim.server.revision)

    def spoil(self, process: Process, fault: Fault) -> bool:
        """A bit of every copy in a node's memory is another one."""
        spoilt = {digest for digest, kept in self.sim.copies.items() if kept.node == process.name}
        self.sim.spoilt |= spoilt
        return bool(spoilt)

    def foreign_head(self, process: None, fault: Fault) -> None:
        """Somebody puts a checkpoint of another history, of step `other`, in place of the head by hand."""
        step, nonce = int(fault.other), "f" * 16
        self.sim.disk[nonce] = tuple((batch, nonce) for batch in range(1, step + 1))
        head = Commit(
            step=step, epoch=0, generation=0, nonce=nonce, parent="", directory="/ckpt", file="another",
            digest="d" * 64, size=1,
        )  # fmt: skip
        self.sim.server.commit(Txn((), (Put(Keys("run").checkpoint, head.to_json().encode()),), "by hand"))
