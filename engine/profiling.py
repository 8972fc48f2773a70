"""Where an update's time goes: `--profile=N` puts N updates under torch.profiler, after some that warm up, and the run goes on."""

import os
from typing import Any

import torch

from engine.config import Config
from engine.errors import UserError
from engine.processes import Place
from engine.recovery import usable

WARMUP = 3  # updates before: the first compile and tune, the last already runs under the profiler


class Profiler:
    """Rank 0's updates under torch.profiler: a table of the most expensive operations, a Chrome trace and on cuda a memory snapshot."""

    def __init__(self, config: Config, place: Place, step: int):
        """step: updates made until now. UserError where too few follow."""
        self.profile, self.place, self.made, self.first = None, place, 0, step + WARMUP + 1
        if not config.profile:
            return
        if config.max_iters - step < WARMUP + config.profile:
            raise UserError(f"profile={config.profile} takes {WARMUP + config.profile} updates, {WARMUP} of them to warm up, and {config.max_iters - step} follow "
                            f"until max_iters={config.max_iters}: a larger --max_iters, or another --out_dir, would work")
        self.updates, self.folder = config.profile, os.path.join(config.out_dir, "profile")
        if place.speaks:
            cuda = [torch.profiler.ProfilerActivity.CUDA] if place.device.type == "cuda" else []
            self.profile = torch.profiler.profile(
                activities=[torch.profiler.ProfilerActivity.CPU, *cuda], record_shapes=True, acc_events=True,
                schedule=torch.profiler.schedule(wait=WARMUP - 2, warmup=1, active=config.profile, repeat=1), on_trace_ready=self.write)

    def update_done(self) -> None:
        """To be called after each update."""
        if self.profile is None:
            return
        self.made += 1
        if self.made == WARMUP and self.place.device.type == "cuda":
            torch.cuda.memory._record_memory_history(max_entries=1_000_000)
        if self.made == 1:
            self.profile.start()
        else:
            self.profile.step()
        if self.made == WARMUP + self.updates:
            self.profile.stop()
            self.profile = None

    def write(self, profile: torch.profiler.profile) -> None:
        """Puts down what was found; torch.profiler calls it after the last update."""
        last = self.first + self.updates - 1
        name = os.path.join(self.folder, f"updates_{self.first}_to_{last}")
        with usable(self.folder):
            os.makedirs(self.folder, exist_ok=True)
            profile.export_chrome_trace(name + ".json.gz")
            if self.place.device.type == "cuda":
                torch.cuda.memory._dump_snapshot(name + ".memory.pickle")
                torch.cuda.memory._record_memory_history(enabled=None)
        self.place.say(f"{table(profile.key_averages(), self.updates, self.place.device.type)}\n{name}.json.gz has when each ran: open it in ui.perfetto.dev"
                       + (f"; {name}.memory.pickle who holds memory: pytorch.org/memory_viz" if self.place.device.type == "cuda" else ""))


def table(events: list[Any], updates: int, device: str, rows: int = 10) -> str:
    """The operations that take most time themselves, without what they call. events: of key_averages(), times in microseconds."""
    def own(event):
        return event.self_device_time_total if device == "cuda" else event.self_cpu_time_total

    events = [e for e in events if not e.key.startswith("ProfilerStep")]
    total = sum(map(own, events)) or 1
    lines = [f"{own(e) / total:5.1%} {own(e) / updates / 1e3:10,.2f} ms {e.count / updates:8,.0f} calls an update   {e.key[:90]}"
             for e in sorted(events, key=own, reverse=True)[:rows]]
    return f"the {len(lines)} most expensive of {len(events)} operations on {device}, over {updates} updates:\n" + "\n".join(lines)
