"""What ranks send each other and how long they wait for it: `--comm_report=N` counts N updates of the run itself, after some that warm up.

Counted is what torch.distributed and DTensor are asked for, as rings send it: (n-1)/n of a buffer for an all-gather, a reduce-scatter or an
all-to-all over n ranks, twice that for an all-reduce; engine/plan.py plans it in the same way. Not seen: DTensor's collectives where blocks are
compiled. Waiting is the time inside collectives, or in the wait for one that runs beside other work; under DDP, from the last bucket that
is sent to the end of the backward. On CUDA it is the time for which the stream of the kernels stands still.
"""

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from engine.errors import UserError

Moment = Any  # seconds, or a torch.cuda.Event
WARMUP = 3  # updates before a report: the first ones compile, tune and take memory

KINDS = ("parameters", "gradients", "Muon's matrices", "keys and values", "activations", "losses and norms")

# collectives of torch.distributed and of DTensor: how often a buffer goes round, and what it is where nobody says what it is about
COLLECTIVES = {"all_gather_single": (1, "parameters"), "reduce_scatter_single": (1, "gradients"), "all_to_all_single": (1, "gradients"),
               "all_reduce": (2, "gradients")}
OF_DTENSOR = {"all_gather_single": (1, "activations"), "reduce_scatter_single": (1, "activations"), "all_reduce": (2, "gradients")}

_thread = threading.local()  # kind: what is sent now is about; inside: a collective that is counted, or timed, already
_report = None  # the one that listens now


@contextlib.contextmanager
def about(kind: str) -> Iterator[None]:
    """Around collectives, or a function that calls some: what they carry, one of KINDS."""
    before, _thread.kind = getattr(_thread, "kind", None), kind
    try:
        yield
    finally:
        _thread.kind = before


def mark(cuda: bool) -> Moment:
    """This moment, or on CUDA the one at which the current stream comes here; seconds_between() two of them."""
    if not cuda:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def seconds_between(start: Moment, end: Moment) -> float:
    """Events must be over."""
    return end - start if isinstance(start, float) else start.elapsed_time(end) / 1e3


def waited(start: Moment, end: Moment) -> None:
    """Tells the report that listens, if any, of a wait that it cannot see."""
    if _report is not None:
        _report.waits.append((start, end))


class CommReport:
    """Counts bytes by kind and the time waited in each of N updates, and tells of them; nothing where comm_report is 0."""

    def __init__(self, config, place, step: int):
        """step: updates made until now. UserError where there is nobody to send to, or too few updates follow from the start; a run that goes on
        near its end has no report, and goes on."""
        self.config, self.place, self.made, self.updates = config, place, 0, config.comm_report
        if self.updates and place.ranks == 1:
            raise UserError(f"comm_report={self.updates} is about what processes send each other and this is one alone: torchrun --standalone "
                            "--nproc_per_node=N train.py ... starts several")
        if self.updates and config.max_iters - step < WARMUP + self.updates:
            too_few = (f"comm_report={self.updates} takes {WARMUP + self.updates} updates, {WARMUP} of them to warm up, and {config.max_iters - step} follow until "
                       f"max_iters={config.max_iters}")
            if not step:
                raise UserError(f"{too_few}: a larger --max_iters would work")
            place.say(f"note: {too_few}: there will be no report")
            self.updates = 0
        self.first, self.cuda, self.replaced = step + WARMUP + 1, place.device.type == "cuda", []
        self.seconds, self.total, self.all_waits = 0.0, Counter(), []  # of the updates so far
        self.sent, self.waits = Counter(), []  # of this one

    def update_begins(self) -> None:
        if not WARMUP <= self.made < WARMUP + self.updates:
            return
        self.sent, self.waits = Counter(), []  # one that was not finished does not count
        if not self.replaced:
            self.listen()

    def update_done(self, step: int, seconds: float, metrics) -> None:
        """To be called after each update, which took so many seconds, before anything else is sent."""
        self.made += 1
        if not self.replaced:
            return
        self.stop_listening()
        self.seconds, self.total, self.all_waits = self.seconds + seconds, self.total + self.sent, self.all_waits + self.waits
        if self.made == WARMUP + self.updates:
            self.tell(step, metrics)

    # ---- listening

    def listen(self) -> None:
        """Puts a counter before each collective and a clock around each wait; stop_listening() takes them away."""
        global _report
        import torch.distributed._functional_collectives as functional

        self.stream = torch.cuda.current_stream() if self.cuda else None
        for name, (times, kind) in COLLECTIVES.items():
            self.replace(dist, name, lambda f, times=times, kind=kind: self.counted(f, times, kind))
        self.replace(dist.Work, "wait", self.timed)
        if not self.config.compile:  # what has been traced goes by what was there
            for name, (times, kind) in OF_DTENSOR.items():
                self.replace(functional, name, lambda f, name=name, times=times, kind=kind: self.counted_of_dtensor(f, name, times, kind))
            self.replace(functional, "wait_tensor", self.timed)
        if self.cuda and self.place.layout == "fsdp":  # there one stream waits for another, not for a Work
            from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

            self.replace(FSDPParamGroup, "wait_for_unshard", self.timed)
            self.replace(FSDPParamGroup, "finalize_backward", self.timed)
        _report = self

    def stop_listening(self) -> None:
        global _report
        _report = None
        for owner, name, plain in reversed(self.replaced):
            setattr(owner, name, plain)
        self.replaced = []

    def replace(self, owner, name, wrap):
        plain = getattr(owner, name)
        self.replaced.append((owner, name, plain))
        setattr(owner, name, wrap(plain))

    def note(self, kind, times, ranks, whole):
        self.sent[getattr(_thread, "kind", None) or kind] += times * (ranks - 1) / ranks * whole

    def counted(self, function, times, kind):
        """A collective of torch.distributed; its largest tensor is the whole buffer."""
        timed = self.timed(function)

        def wrapped(*args, **kwargs):
            tensors = [t for t in (*args, *kwargs.values()) if isinstance(t, torch.Tensor)]
            self.note(kind, times, dist.get_world_size(kwargs.get("group")), max(t.numel() * t.element_size() for t in tensors))
            return function(*args, **kwargs) if kwargs.get("async_op") else timed(*args, **kwargs)
        return wrapped

    def counted_of_dtensor(self, function, name, times, kind):
        """A collective of DTensor, which names its group as (mesh, dimension); what it returns is waited for where it is used."""
        def wrapped(t, *args, **kwargs):
            mesh, dim = next(a for a in (*args, *kwargs.values()) if isinstance(a, tuple))
            ranks = mesh.size(dim)
            self.note(kind, times, ranks, t.numel() * t.element_size() * (ranks if name == "all_gather_single" else 1))
            return function(t, *args, **kwargs)
        return wrapped

    def timed(self, function):
        """A function that waits for other ranks."""
        def wrapped(*args, **kwargs):
            if getattr(_thread, "inside", False) or self.cuda and torch.cuda.current_stream() != self.stream:
                return function(*args, **kwargs)
            _thread.inside, start = True, mark(self.cuda)
            try:
                return function(*args, **kwargs)
            finally:
                _thread.inside = False
                self.waits.append((start, mark(self.cuda)))
        return wrapped

    # ---- telling

    def tell(self, step: int, metrics) -> None:
        """Says what all ranks have found, a table and two sentences, and puts it into metrics.jsonl."""
        from engine.plan import planned_traffic

        if self.cuda:
            torch.cuda.synchronize()
        mine = [self.seconds, sum(seconds_between(*wait) for wait in self.all_waits), *(self.total[kind] for kind in KINDS)]
        mine = torch.tensor(mine, dtype=torch.float64, device=self.place.device) / self.updates
        rows = mine.new_empty(self.place.ranks * len(mine))
        dist.all_gather_single(rows, mine)
        rows = rows.view(self.place.ranks, -1).tolist()
        if not self.place.speaks:
            return
        sent = {kind: [row[2 + i] for row in rows] for i, kind in enumerate(KINDS) if any(row[2 + i] for row in rows)}
        planned = planned_traffic(self.config, self.place)
        shares = [waits / seconds for seconds, waits, *_ in rows]
        metrics.event(step, "communication", updates=[self.first, self.first + self.updates - 1], sent=sent, planned=planned,
                      waiting=[round(s, 4) for s in shares], seconds=rows[0][0])
        self.place.say("\n".join((f"communication of updates {self.first} to {self.first + self.updates - 1}: bytes that rank 0 sends in one, as rings do",
                                  *table({kind: found[0] for kind, found in sent.items()}, planned),
                                  *(["  (what DTensor sends is not seen with compile=True)"] if self.config.compile and self.place.tp > 1 else []),
                                  *what_it_means(shares, rows[0][0], self.place))))


def table(sent: dict[str, float], planned: dict[str, int]) -> list[str]:
    """Lines with what was counted, what the plan says and the first over the second, by kind."""
    from engine.plan import size

    lines = [f"  {'kind':<18}{'measured':>12}{'planned':>12}{'ratio':>8}"]
    for kind in [k for k in KINDS if k in sent or k in planned]:
        b, expected = sent.get(kind, 0.0), planned.get(kind)
        lines.append(f"  {kind:<18}{size(b):>12}" + (f"{size(expected):>12}{b / expected:>8.3f}" if expected else f"{'-':>12}{'-':>8}"))
    return lines


def what_it_means(shares: list[float], seconds: float, place) -> list[str]:
    """Two sentences on the share of an update that each rank waits."""
    least, most = (pick(range(len(shares)), key=lambda rank: shares[rank]) for pick in (min, max))
    mean = sum(shares) / len(shares)
    told = (f"an update takes {seconds * 1e3:,.1f} ms; of that ranks wait {mean:.0%} on average, rank {most} the most, {shares[most]:.0%}, and rank {least} "
            f"on {place.hosts[least]} the least, {shares[least]:.0%}")
    if shares[most] - shares[least] > 0.15:
        return [told, f"the others wait for rank {least}: what it does by itself takes longest"]
    if mean > 0.2:
        return [told, "all wait alike, for what is on its way: a larger total_batch_size, fewer processes or a faster link would make it less"]
    return [told, "little of it: more processes would still make it faster"]
