"""Do the processes reach each other, and how fast? `torchrun ... train.py --check` says so in some seconds and leaves.

Times are the best of several tries: what the links can do, not what else the machines did. Bandwidths are as nccl-tests defines
them (its doc/PERFORMANCE.md): an all-reduce of S bytes over n ranks in t seconds has bus bandwidth 2 (n-1)/n S/t, which is what a
ring's slowest link carries.
"""

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from engine.processes import Place

TRIES = 10


def check(place: Place, say: Callable[[str], Any]) -> None:
    """Prints, once, every rank's host, device and versions, the all-reduce's latency and bandwidth and the slowest link. All
    ranks call it once the process group is up."""
    here = describe(place)
    if place.ranks == 1:
        say(f"one process on {place.host}: {here['device']}, torch {here['torch']}; there is nothing to connect\n"
            "torchrun --standalone --nproc_per_node=N train.py --check tries N processes")
        return
    found = place.tell_all("check", here)
    rows = [(str(r), f["host"], f["device"], f["torch"], f["nccl"]) for r, f in enumerate(found)]
    say(table([("rank", "host", "device", "torch", "NCCL"), *rows]))
    for key in ("torch", "nccl"):
        if len({f[key] for f in found}) > 1:
            say(f"warning: not all ranks have the same version of {'NCCL' if key == 'nccl' else key}: install the same everywhere")

    on_cpu = place.device.type == "cpu"
    many = 8_000_000 if on_cpu else 64_000_000  # bytes; enough that latency does not count
    latency = all_reduce_seconds(place, 4)
    seconds = all_reduce_seconds(place, many)
    n = place.ranks
    say(f"all-reduce over {n} processes ({dist.get_backend()}): {latency * 1e6:,.0f} us for 4 bytes; {many // 10**6} MB in {seconds * 1e3:,.2f} ms, "
        f"{rate(2 * (n - 1) / n * many / seconds)} on the bus")

    links = [(r, (r + 1) % n) for r in range(n if n > 2 else 1)]
    times = {link: link_seconds(place, link, many // 8) for link in links}  # one after the other: each has the network to itself

    def name(link):
        a, b = link
        return f"rank {a} on {found[a]['host']} to rank {b} on {found[b]['host']}, {rate(many // 8 / times[link])}"

    slowest, fastest = max(times, key=times.get), min(times, key=times.get)
    say(f"slowest link: {name(slowest)}" + (f"; fastest: {name(fastest)}" if len(links) > 1 else ""))
    if times[slowest] > 3 * times[fastest]:
        between = "machines" if found[slowest[0]]["host"] != found[slowest[1]]["host"] else "devices of one machine"
        say(f"the slowest link is {times[slowest] / times[fastest]:.1f} times slower than the fastest, between {between}: every all-reduce waits for it")


def describe(place: Place) -> dict[str, str]:
    """This rank's host, device and versions, in words."""
    device = torch.cuda.get_device_name(place.device) if place.device.type == "cuda" else f"threads: {torch.get_num_threads()}"
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if place.device.type == "cuda" and dist.is_nccl_available() else "-"
    return {"host": place.host, "device": f"{place.device} ({device})", "torch": torch.__version__, "nccl": nccl}


def best_seconds(place: Place, once: Callable[[], Any]) -> float:
    """The shortest time of once(), which every rank calls, of TRIES after one to warm up; the slowest rank's."""
    times = []
    for _ in range(1 + TRIES):
        dist.barrier()
        synchronize(place)
        started = time.perf_counter()
        once()
        synchronize(place)
        times.append(time.perf_counter() - started)
    slowest = torch.tensor(min(times[1:]), device=place.device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return slowest.item()


def synchronize(place: Place) -> None:
    """Waits until the device has done what it was given."""
    if place.device.type == "cuda":
        torch.cuda.synchronize()


def all_reduce_seconds(place: Place, size: int) -> float:
    """Seconds of an all-reduce of `size` bytes over all ranks."""
    buffer = torch.zeros(size // 4, device=place.device)
    return best_seconds(place, lambda: dist.all_reduce(buffer))


def link_seconds(place: Place, link: tuple[int, int], size: int) -> float:
    """Seconds that `size` bytes take from one rank to another: half of there and back. All other ranks wait."""
    a, b = link
    buffer = torch.zeros(size // 4, device=place.device)

    def once():
        for source, target in ((a, b), (b, a)):
            if place.rank == source:
                wait(dist.P2POp(dist.isend, buffer, target))
            elif place.rank == target:
                wait(dist.P2POp(dist.irecv, buffer, source))

    return best_seconds(place, once) / 2


def wait(operation: dist.P2POp) -> None:
    """Makes one send or receive, and returns when it is done."""
    for work in dist.batch_isend_irecv([operation]):  # batched: NCCL then takes the communicator that it has
        work.wait()


def rate(bytes_per_second: float) -> str:
    """Bytes a second, in words."""
    return f"{bytes_per_second / 1e9:.2f} GB/s"


def table(rows: list[tuple[str, ...]]) -> str:
    """Rows of cells as lines, each column as wide as its widest cell."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(row, widths)).rstrip() for row in rows)
