"""What a run says of itself while it trains: a line each log_interval updates and for each unusual one; on a terminal a bar under them."""

import statistics
import sys

import torch

from engine import voice
from engine.metrics import peak_flops, short_number, short_time, smooth

WINDOW = 128  # updates before one that it is compared with, as in llm.c
UNUSUAL = 5  # standard deviations above their mean: about one update in a million by chance, were they normal


class Console:
    """Tells of each update what is due. Rank 0 speaks; the others measure their part of the peak beside it."""

    def __init__(self, place, config, metrics, flops_per_token: int, dtype: str):
        self.place, self.config, self.metrics = place, config, metrics
        self.flops_per_token, self.dtype, self.peak = flops_per_token, dtype, None  # the peak is of all devices together
        self.line_seconds = self.line_updates = 0  # what the next line is about
        self.shown, self.terminal = 0, place.speaks and sys.stdout.isatty()

    def speed(self, seconds: float) -> dict:
        """What metrics.jsonl has about an update that took so long."""
        rate = self.config.total_batch_size / seconds
        mfu = round(self.flops_per_token * rate / self.peak, 4) if self.peak else None
        if self.peak is None:  # not before the first update: a CPU's is measured, 0.1 s
            self.peak = peak_flops(self.place.device, self.dtype) * self.place.ranks
        return {"tokens_per_s": round(rate, 1), "mfu": mfu, "step_ms": round(seconds * 1e3, 3)}

    def update(self, step: int, seconds: float) -> None:
        """Tells of the update that metrics.jsonl has just got, where a line is due."""
        if not self.place.speaks:
            return
        config = self.config
        self.line_seconds, self.line_updates = self.line_seconds + seconds, self.line_updates + 1
        each = self.line_seconds / self.line_updates
        unusual = self.unusual()
        if step == 1 or step % config.log_interval == 0 or step == config.max_iters or unusual:
            self.place.say(self.line(step, each, unusual))
            self.metrics.flush()
            self.line_seconds = self.line_updates = 0
        if self.terminal:
            most = config.max_iters
            voice.draw_bar(step, most, f"step {step:,}/{most:,}, loss {self.metrics.train[-1][1]:.3f}, {short_time(each * (most - step))} left")

    def unusual(self) -> str:
        """What stands out in the last update, in words, or "": a loss or gradient norm far above those of the WINDOW before it."""
        found = []
        for name, column in (("loss", 1), ("gradient norm", 4)):
            score = z_score([row[column] for row in self.metrics.train[-WINDOW - 1:]])
            if score > UNUSUAL:
                found.append(f"{name} {score:.1f} standard deviations above its mean")
        return ", ".join(found)

    def line(self, step: int, each: float, unusual: str) -> str:
        """each: seconds an update took, on average since the last line."""
        most, rate, peak = self.config.max_iters, self.config.total_batch_size / each, self.peak if step > 1 else None
        _, loss, lr, _, grad_norm = self.metrics.train[-1]
        smoothed = smooth([row[1] for row in self.metrics.train[-200:]])[-1]  # the weight of what lies before is 0.95^200 = 4e-5
        a_device = f" ({short_number(rate / self.place.ranks)} a device)" if self.place.ranks > 1 else ""
        parts = [f"step {step:,}/{most:,}".ljust(len(f"step {most:,}/{most:,}")), f"loss {loss:.4f}, smoothed {smoothed:.4f}", f"lr {lr:.2e}",
                 f"norm {grad_norm:.2f}", f"{each * 1e3:,.1f} ms", f"{short_number(rate)} tokens/s{a_device}",
                 *([f"mfu {self.flops_per_token * rate / peak:.0%}"] if peak else []), f"{peak_memory(self.place.device) / 1e9:.2f} GB",
                 f"{short_time(each * (most - step))} left"]
        if unusual:
            parts.append(f"\x1b[1;31munusual: {unusual}\x1b[0m" if self.terminal else f"unusual: {unusual}")
        return " | ".join(parts)


def z_score(values: list[float]) -> float:
    """How many standard deviations the last value is above the mean of the WINDOW before it; 0 where there are fewer, or all are one."""
    *before, last = values
    if len(before) < WINDOW:
        return 0.0
    mean = statistics.fmean(before)
    deviation = statistics.fmean((x - mean) ** 2 for x in before) ** 0.5
    return (last - mean) / deviation if deviation else 0.0


def peak_memory(device: torch.device) -> int:
    """The most bytes of the device's memory that this process has held: torch's on an accelerator, all of the process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if device.type == "mps":
        return torch.mps.driver_allocated_memory()
    try:
        with open("/proc/self/status") as f:
            return next(int(line.split()[1]) * 1024 for line in f if line.startswith("VmHWM:"))
    except OSError:
        import resource  # macOS, where it counts in bytes

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
