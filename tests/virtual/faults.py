"""What goes wrong at a time: each kind of fault as one method."""

from __future__ import annotations

from typing import TYPE_CHECKING

from elasticrt.rendezvous.records import Keys
from elasticrt.store.protocol import Delete, Txn
from tests.virtual.plan import Fault

if TYPE_CHECKING:
    from tests.virtual.process import Process
    from tests.virtual.simulator import Simulator

BURST = 3


class Faults:
    """The faults of a plan, and how they stop."""

    def __init__(self, sim: Simulator) -> None:
        self.sim = sim

    def schedule(self) -> None:
        """Put all of the plan's faults on the heap, and count those that are there from the beginning."""
        sim, plan = self.sim, self.sim.plan
        for fault in plan.faults:
            sim.engine.at(sim.began + fault.at, self._happen, fault)
        if any(plan.offsets) or any(rate != 1.0 for rate in plan.clock_rates):
            sim.fired["clock_skew"] += 1
        if len(plan.arrivals) >= BURST and not any(plan.arrivals):
            sim.fired["burst"] += 1

    def stop(self) -> None:
        """Nothing goes wrong from now on; the doomed are dead for good, everybody else comes back."""
        sim = self.sim
        sim.calm = True
        sim.engine.say("-----", "faults stop")
        sim.down_until = 0.0
        self._thaw()
        sim.cut_etcd.clear()
        sim.cut_peers.clear()
        for process in list(sim.processes.values()):
            sim.unpause(process)
        for index in range(sim.plan.nodes):
            name = f"n{index}"
            if name in sim.plan.doomed:
                process = sim.processes.get(name)
                if process is not None and not process.gone:
                    process.silent_death = sim.net.random() < 0.5
                    sim.kill(process, "is dead for good")
            else:
                sim.engine.after(sim.net.uniform(0.0, 3.0), sim.spawn, name)

    def _happen(self, fault: Fault) -> None:
        if self.sim.calm or self.sim.invariants.result_at is not None:
            return
        name = self.sim.leader() if fault.who == "leader" else fault.who
        process = self.sim.processes.get(name or "")
        if fault.who and (process is None or process.gone):
            return
        if process is not None:
            if fault.kind != "key_deleted":
                process.trouble_at = self.sim.engine.now + fault.for_s
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
        """A worker raises."""
        living = process.group.living
        if not living:
            return False
        living[-1].fail("it raises", collateral=False)
        return True

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

    def key_deleted(self, process: Process, fault: Fault) -> None:
        """Somebody deletes one member key by hand."""
        self.sim.server.commit(Txn((), (Delete(Keys("run").member(process.name)),), "by hand"))

    def compaction(self, process: None, fault: Fault) -> None:
        """etcd forgets its history."""
        if self.sim.server.revision > self.sim.server.compacted:
            self.sim.server.compact(self.sim.server.revision)
