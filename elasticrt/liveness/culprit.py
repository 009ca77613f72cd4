"""Finds the ranks for which the others wait, when steps stand still. Pure.

The stack of a rank's main thread shows what the rank does. It waits in a collective, or it is in backward, or it does
something else: the script's own code, a data loader, a save. In backward a rank either computes gradients or waits for
their all-reduce: the number of collectives that the rank has begun tells these two apart. If all ranks wait, torch's
flight recorder shows in which collectives, and the kernel shows whether the peer has acknowledged the data that a rank
has sent.

The finding is a warning. It ends no worker.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from elasticrt.ipc.flights import read
from elasticrt.ipc.wording import listed
from elasticrt.text import cut

PLACE_MAX_BYTES = 120
# A finding names at most so many links between nodes.
LINKS_MAX = 4
# If more ranks than this are late, and more than half of all, no rank is singled out. A reason describes at most so
# many ranks.
RANKS_MAX = 4

# The part of a reason that says who waits. It changes between two looks at the same stand.

_WAITING = re.compile(r"(; |, and )(rank \d+ waits|\d+ ranks wait) .*")
# A frame of a stack as `faulthandler` writes it.
_FRAME = re.compile(r'\s*File "(?P<file>[^"]*)", line (?P<line>\d+) in (?P<name>.*)')
# Files that are not the script's own code.
_LIBRARY = re.compile(
    r"/site-packages/|/dist-packages/|/lib/python3|^<|/torchinductor_|/elasticrt/(train|distributed|data|checkpoint)/"
)
_LOADER = re.compile(r"/torch/utils/data/|/elasticrt/train/batches\.py$|/elasticrt/data/")
# Files of torch.compile. They are on the stack while a function is being compiled, and not while compiled code runs.
_COMPILER = re.compile(
    r"/torch/_dynamo/(convert_frame|output_graph|symbolic_convert)\.py$|/triton/compiler/|"
    r"/torch/_inductor/(async_compile\.py|codecache\.py|codegen/|compile_fx\.py|fx_passes/|graph\.py|lowering\.py|scheduler\.py)"
)

# What a library's function does, by its file.
_KINDS = (
    ("gradients", re.compile(r"/torch/autograd/|/torch/nn/parallel/distributed\.py$|/torch/_tensor\.py$")),
    ("collective", re.compile(r"/torch/distributed/|/elasticrt/distributed/(collectives|barrier|group_store)\.py$")),
    ("loader", _LOADER),
    ("save", re.compile(r"/elasticrt/train/saving\.py$|/elasticrt/checkpoint/|/torch/serialization\.py$")),
)

# The kernel's letters for a process that neither runs nor sleeps as usual, in words.
STATES = {
    "T": "is stopped by a signal (SIGSTOP)",
    "t": "is stopped by a debugger",
    "D": "waits inside the kernel, as for a disk or a file server",
    "Z": "has ended, and its agent does not know yet",
}


@dataclass(frozen=True)
class Position:
    """Where one rank is, and what it does there.

    Attributes:
        rank: the global rank.
        step: the last step that the rank has finished.
        stepping: whether a step is expected of the rank: not in `loop.pause`, between epochs, or in a save.
        state: the kernel's letter for the state of the rank's main thread.
        doing: what the main thread does: "collective", "gradients" (forward or backward of DDP, waiting or not),
            "compile", "loader", "save", "code", or "" if its stack is unknown.
        place: the place in the script, such as "train.py:12 in step".
        begun: the number of collectives that the rank has begun in the default process group; 0 if unknown.
        flights: the rank's collectives by torch's flight recorder, as `ipc.flights` writes them; "" if unknown.
        unheard: the addresses that do not acknowledge the rank's data, separated by commas.
        node: the rank's node. `find` fills it in.
    """

    rank: int
    step: int
    stepping: bool
    state: str
    doing: str
    place: str = ""
    begun: int = 0
    flights: str = ""
    unheard: str = ""
    node: str = ""

    def __post_init__(self) -> None:
        """Cut a place that is too long, because another agent may have sent any text."""
        object.__setattr__(self, "place", cut(self.place, PLACE_MAX_BYTES))


@dataclass(frozen=True)
class Culprit:
    """A finding: the ranks for which the others wait.

    Attributes:
        ranks: the global ranks of the culprits; empty if no rank is to blame.
        nodes: the nodes of these ranks, each once; or the nodes that do not answer, or those at the ends of a cut link.
        reason: what these ranks do, and where the others wait, in words.
        resting: no step is expected of these ranks (`loop.pause`, or between epochs), so the wait may be intended.
        step: the last step that all workers had finished on the node that has found this.
    """

    ranks: tuple[int, ...]
    nodes: tuple[str, ...]
    reason: str
    resting: bool = False
    step: int = 0

    @property
    def key(self) -> str:
        """The reason without the ranks that wait. Equal keys are the same finding, possibly at another time."""
        return _WAITING.sub("", self.reason)


def doing(stack: Sequence[str]) -> tuple[str, str]:
    """What a main thread does (see `Position.doing`), and its place in the script. `stack`: innermost line first."""
    frames = [found for line in stack if (found := _FRAME.match(line))]
    files = [frame["file"] for frame in frames]
    own = next((number for number, file in enumerate(files) if not _LIBRARY.search(file)), len(files))
    if not frames:
        return "", ""
    frame = frames[own if own < len(frames) else 0]
    place = f"{frame['file'].rpartition('/')[2]}:{frame['line']} in {frame['name']}"
    # The compiler first: while a function is compiled, the stack may also have the function that called it, such as
    # DDP's forward or a tensor's backward.
    if any(_COMPILER.search(file) for file in files[:own]):
        return "compile", place
    # Only frames of libraries that the script's innermost function has called, innermost first.
    for file in files[:own]:
        for kind, pattern in _KINDS:
            if pattern.search(file):
                return kind, place
    return ("loader" if any(_LOADER.search(file) for file in files[own:]) else "code"), place


def find(
    by_node: Mapping[str, Sequence[Position]],
    silent: Mapping[str, str] | None = None,
    names: Mapping[str, str] | None = None,
    own: str = "",
    *,
    again: bool = False,
    alone: bool = False,
) -> Culprit | None:
    """Find the ranks for which the others wait. Returns None if no rank waits, or if too many are late.

    The idea: a rank that waits in a collective is a victim, so the ranks that do not wait are to blame. If all wait, in
    this order of certainty: a node that does not answer, a link that acknowledges nothing, a rank whose flight recorder
    is behind, a rank in another collective than most.

    Args:
        by_node: the positions of each node's ranks; empty for a node whose steps do not stand still so far.
        silent: the nodes that have not answered `own`, each with another node that reaches it; "" if none is known to.
        names: the nodes by their addresses.
        own: the node that has asked the others.
        again: whether `own` will ask once more. What the positions tell of collectives may still be from before the
            stand, so until then only ranks that do something else than train are blamed, and only if all nodes have
            told their positions.
        alone: whether the run has a single worker. Nobody waits for it, so it is blamed if a step is expected of it,
            unless it compiles.
    """
    if again and (silent or not all(by_node.values())):
        return None
    all_ranks = [replace(each, node=node) for node, positions in by_node.items() for each in positions]
    most = max((each.begun for each in all_ranks), default=0)
    # A stopped or ended process cannot go on, wherever its stack is.
    halted = [each for each in all_ranks if each.state in ("T", "t", "Z")]
    if halted:
        return _culprit(halted, all_ranks, most)
    if alone:
        return _culprit([each for each in all_ranks if each.stepping and each.doing != "compile"], all_ranks, most)
    waiting = [each for each in all_ranks if _waits(each, most)]
    busy = [each for each in all_ranks if not _waits(each, most) and not (again and each.doing == "gradients")]
    if not waiting:
        return None
    if busy:
        return _culprit([each for each in busy if not _rests(each)] or busy, all_ranks, most)
    if again:
        return None
    if silent:
        return _silence(silent, own, waiting)
    if not all(by_node.values()):
        return None
    return _cut_link(all_ranks, names or {}) or _out_of_order(all_ranks) or _odd_one_out(all_ranks)


def _rests(position: Position) -> bool:
    """Whether a rank is in `loop.pause` or between two epochs, and in no library that explains its wait."""
    return not position.stepping and position.doing in ("code", "")


def _waits(position: Position, most: int) -> bool:
    """Whether a rank waits for others. `most`: the most collectives that any rank has begun.

    In backward, DDP begins an all-reduce for each bucket of gradients. A rank that has begun fewer than another one
    still computes gradients. A rank that has begun as many as any has given up its gradients, and waits for their sum.
    """
    if position.doing == "collective":
        return True
    return position.doing == "gradients" and position.begun >= most


def _are_few(blamed: Sequence[Position], all_ranks: Sequence[Position]) -> bool:
    return 0 < len(blamed) <= max(RANKS_MAX, len(all_ranks) // 2)


def _culprit(blamed: list[Position], all_ranks: list[Position], most: int) -> Culprit | None:
    if not _are_few(blamed, all_ranks):
        return None
    blamed = sorted(blamed, key=lambda each: each.rank)
    waiting = [each for each in all_ranks if each not in blamed and _waits(each, most)]
    said = [*_names(blamed), *([_waiting(waiting, " for it")] if waiting else [])]
    return _named(blamed, "; ".join(said), resting=all(_rests(each) and each.state != "T" for each in blamed))


def _silence(silent: Mapping[str, str], own: str, waiting: list[Position]) -> Culprit:
    """The finding when nodes do not answer `own`. If another node reaches each of them, the links are to blame."""
    lost = [node for node, witness in silent.items() if not witness]
    if lost:
        verb = "does" if len(lost) == 1 else "do"
        return Culprit((), tuple(lost), f"{listed(lost)} {verb} not answer, and {_waiting(waiting, '')}")
    links = [f"{own} and {node}" for node in silent]
    signs = [f"{witness} reaches {node}" for node, witness in silent.items()]
    reason = f"{_link(links)}: {' and '.join(signs[:LINKS_MAX])}, and {own} does not; {_waiting(waiting, '')}"
    return Culprit((), (own, *silent), reason)


def _link(ends: Sequence[str]) -> str:
    return f"no data passes between {', between '.join(ends[:LINKS_MAX])}"


def _cut_link(all_ranks: list[Position], names: Mapping[str, str]) -> Culprit | None:
    """The finding when all ranks wait and a peer does not acknowledge data: a link is to blame, and no rank."""
    ends = {
        (each.node, names.get(address, address)): each.rank
        for each in sorted(all_ranks, key=lambda one: one.rank, reverse=True)
        for address in each.unheard.split(",")
        if address
    }
    if not ends:
        return None
    links = dict.fromkeys(tuple(sorted(pair)) for pair in ends)
    (sender, receiver), rank = next(reversed(ends.items()))
    nodes = tuple(dict.fromkeys(name for pair in links for name in pair if name in names.values()))
    sign = f"{receiver} acknowledges nothing that rank {rank} on {sender} has sent"
    return Culprit((), nodes, f"{_link([' and '.join(pair) for pair in links])}: {sign}; {_waiting(all_ranks, '')}")


def _out_of_order(all_ranks: list[Position]) -> Culprit | None:
    """The finding when all ranks wait, but in different collectives by torch's flight recorder; None if it shows none.

    To blame are the ranks that have not begun the collective in which the others wait. If there are none, the ranks are
    to blame that have begun another operation than most under the same number.
    """
    flights = {each.rank: {flight.group: flight for flight in read(each.flights)} for each in all_ranks}
    for group in sorted({name for mine in flights.values() for name in mine}):
        known = {rank: mine[group] for rank, mine in flights.items() if group in mine}
        waiting = {rank: flight for rank, flight in known.items() if flight.awaits}
        if len(known) < 2 or not waiting:
            continue
        first = min(flight.awaits for flight in waiting.values())
        usual = Counter(flight.what for flight in waiting.values() if flight.awaits == first).most_common(1)[0][0]
        late = [rank for rank, flight in known.items() if flight.begun < first]
        other = [rank for rank, flight in waiting.items() if flight.awaits == first and flight.what != usual]
        if not late and len(waiting) == 2 * len(other):
            # One rank against one: the flight recorder does not tell which of them is wrong. `_odd_one_out` decides, by
            # the places in the script.
            continue
        blamed = [each for each in all_ranks if each.rank in (late or other)]
        if _are_few(blamed, all_ranks):
            number = f"number {first} of {group}"
            words = f"has not begun {usual}" if late else f"is in {known[other[0]].what} instead of {usual}"
            return _named(blamed, f"{'; '.join(_names(blamed))}, and {words} ({number}), in which the others wait")
    return None


def _odd_one_out(all_ranks: list[Position]) -> Culprit:
    """The finding when all ranks wait: to blame are the ranks in another collective than most.

    Of groups of the same size, one that has called a collective by itself is to blame before one in backward, and then
    the one that has begun the fewest collectives.
    """
    groups: dict[tuple[str, str, int], list[Position]] = {}
    for each in all_ranks:
        groups.setdefault((each.doing, each.place, each.begun), []).append(each)
    if len(groups) == 1:
        first = all_ranks[0]
        where = f" at {first.place}" if first.place else ""
        return Culprit((), (), f"all {len(all_ranks)} ranks wait in the same collective{where}: no rank is to blame")
    ordered = sorted(groups.values(), key=lambda group: (len(group), group[0].doing != "collective", group[0].begun))
    odd, usual = ordered[0], ordered[-1][0]
    return _named(odd, f"{'; '.join(_names(odd))}, others in another one at {usual.place or 'an unknown place'}")


def _named(blamed: list[Position], reason: str, *, resting: bool = False) -> Culprit:
    nodes = tuple(dict.fromkeys(each.node for each in blamed))
    return Culprit(tuple(each.rank for each in blamed), nodes, reason, resting)


def _names(blamed: list[Position]) -> list[str]:
    return [f"rank {each.rank} on {each.node} {_what(each)}" for each in blamed[:RANKS_MAX]]


def _waiting(waiting: list[Position], what: str) -> str:
    """Which ranks wait, and where, in words. `what` is put after the verb."""
    first = waiting[0]
    who = f"rank {first.rank} waits" if len(waiting) == 1 else f"{len(waiting)} ranks wait"
    return f"{who}{what} in a collective{f' at {first.place}' if first.place else ''}"


def _what(position: Position) -> str:
    """What a rank does, in words that follow its name. For how long is said once, by the sentence around them."""
    # "D" alone says little. The place in the script, if it is known, says more: it tells which file or lock it is.
    if position.state in STATES and (position.state != "D" or not position.place):
        return STATES[position.state]
    at = f": {position.place}" if position.place else ""
    if _rests(position):
        return f"is in no step (loop.pause, or between epochs){at}"
    words = {
        "collective": "waits in a collective",
        "gradients": "computes gradients",
        "compile": "compiles (torch.compile)",
        "loader": "waits for its data loader",
        "save": "saves",
        "code": "is in the script's own code",
        "": "does not say what it does",
    }
    return f"{words.get(position.doing, position.doing)}{at}"
