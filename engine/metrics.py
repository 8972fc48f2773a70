"""What a run leaves to look at: metrics.jsonl, loss.png, Weights & Biases, speed and MFU."""

import contextlib
import json
import os
import re
import sys
import threading
import time

import torch

from engine.matmul import linear

# Dense peak of the matrix units in TFLOP/s by dtype, from the makers' data sheets (without sparsity; float32 as TF32). The
# first that stands as a word in torch.cuda.get_device_name() counts; a device that is not here is measured.
GPU_PEAKS = [
    ("B300", {"bfloat16": 2250, "float16": 2250, "float32": 1100}),
    ("B200", {"bfloat16": 2250, "float16": 2250, "float32": 1100}),
    ("H200", {"bfloat16": 989, "float16": 989, "float32": 494}),
    ("H100 PCIe", {"bfloat16": 756, "float16": 756, "float32": 378}),
    ("H100", {"bfloat16": 989, "float16": 989, "float32": 494}),
    ("GH200", {"bfloat16": 989, "float16": 989, "float32": 494}),
    ("H20", {"bfloat16": 148, "float16": 148, "float32": 74}),
    ("A100", {"bfloat16": 312, "float16": 312, "float32": 156}),
    ("A800", {"bfloat16": 312, "float16": 312, "float32": 156}),
    ("L40S", {"bfloat16": 362, "float16": 362, "float32": 183}),
    ("L40", {"bfloat16": 181, "float16": 181, "float32": 90}),
    ("L4", {"bfloat16": 121, "float16": 121, "float32": 60}),
    ("A10G", {"bfloat16": 70, "float16": 70, "float32": 35}),
    ("A10", {"bfloat16": 125, "float16": 125, "float32": 62}),
    ("V100", {"float16": 125, "float32": 15.7}),
    ("T4", {"float16": 65, "float32": 8.1}),
    ("RTX 5090", {"bfloat16": 210, "float16": 210, "float32": 105}),
    ("RTX 4090", {"bfloat16": 165, "float16": 165, "float32": 83}),
    ("RTX 3090", {"bfloat16": 71, "float16": 71, "float32": 36}),
]


def peak_flops(device, dtype):
    """FLOP/s that the device's matrix products can reach: from the table for a known GPU, else measured, some 0.1 s."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        for known, peaks in GPU_PEAKS:
            if re.search(rf"\b{known}\b", name) and dtype in peaks:
                return peaks[dtype] * 1e12
    n = 1024 if device.type == "cpu" else 4096
    a, b = (torch.randn(n, n, device=device, dtype=getattr(torch, dtype)) for _ in range(2))
    best = float("inf")
    for _ in range(8):
        started = time.perf_counter()
        linear(a, b)[0, 0].item()  # reading one number waits for the product
        best = min(best, time.perf_counter() - started)
    return 2 * n**3 / best


class Metrics:
    """Appends to metrics.jsonl, keeps what the picture needs, and tells wandb where that was asked for."""

    def __init__(self, run, step, active=True):
        """Opens run/metrics.jsonl to go on after `step` updates: lines beyond it, and a torn last one, are cut off.

        A rank that is not active writes nothing.
        """
        self.run, self.path, self.active = run, os.path.join(run, "metrics.jsonl"), active
        self.wandb, self.file, self.lock = None, None, threading.Lock()  # a save in the background writes its line too
        self.go_back(step)

    def go_back(self, step):
        """Cuts off what lies beyond `step`: it comes again."""
        self.train, self.val, self.restarts = [], [], []  # (tokens, loss, lr, tokens_per_s), (tokens, loss), tokens
        self.general = []  # (tokens, loss on general text)
        self.tokens, self.val_losses = 0, {}  # of training; {step: loss}
        if not self.active:
            return
        if self.file:
            self.file.close()
        kept = []
        if os.path.exists(self.path):
            with open(self.path, encoding="utf-8", errors="replace") as f:
                for line in f:
                    try:
                        record = json.loads(line)
                        if record["step"] <= step:
                            self._remember(record)
                            kept.append(line)
                    except (ValueError, KeyError, TypeError):
                        continue  # torn by a crash, or nothing that was written here
        with open(self.path + ".tmp", "w", encoding="utf-8") as f:
            f.writelines(kept)
            f.flush()
            os.fsync(f.fileno())
        os.replace(self.path + ".tmp", self.path)
        self.file = open(self.path, "a", encoding="utf-8")

    def write(self, kind, step, **values):
        """One line: {"kind": ..., "step": ..., ...}, numbers in full precision."""
        if not self.active:
            return
        record = {"kind": kind, "step": step, **values}
        with self.lock:
            self.file.write(json.dumps(record) + "\n")
            self._remember(record)
        if self.wandb and kind != "event":
            prefix = "train" if kind == "train" else kind
            self.wandb.log({f"{prefix}/{k}": v for k, v in values.items() if v is not None}, step=step)

    def event(self, step, event, **values):
        self.write("event", step, event=event, **values)
        self.flush()

    def flush(self):
        if self.active:
            with self.lock:
                self.file.flush()

    def sync(self):
        """Puts all lines on the disk: a checkpoint's steps stand in the log before it is complete."""
        self.flush()
        if self.active:
            os.fsync(self.file.fileno())

    def _remember(self, record):
        if record["kind"] == "train":
            self.tokens = record["tokens"]
            self.train.append((self.tokens, record["loss"], record["lr"], record["tokens_per_s"]))
        elif record["kind"] == "val":
            self.val.append((self.tokens, record["loss"]))
            self.val_losses[record["step"]] = record["loss"]
            if record.get("general_loss") is not None:
                self.general.append((self.tokens, record["general_loss"]))
        elif record.get("event") == "resumed":
            self.restarts.append(self.tokens)

    def best(self):
        """(step, validation loss) of the best so far, the first of equals; (None, inf) before one. What a run started from is none of its own."""
        losses = {step: loss for step, loss in self.val_losses.items() if step}
        step = min(losses, key=losses.get, default=None)
        return step, losses.get(step, float("inf"))

    def forgetting(self):
        """A sentence on what the run cost on general text, or None where that was not looked at twice."""
        if len(self.general) < 2:
            return None
        first, last = self.general[0][1], self.general[-1][1]
        return f"general loss {'rose' if last > first else 'fell'} by {abs(last - first):.4f}, from {first:.4f} to {last:.4f}"

    def start_wandb(self, config, settings, run_id):
        """Starts or resumes a wandb run; returns its id. A run that cannot be followed there goes on without."""
        try:
            import wandb

            name = config.wandb_run_name or os.path.basename(os.path.normpath(config.out_dir))
            self.wandb = wandb.init(project=config.wandb_project, name=name, id=run_id, resume="allow", config=settings, dir=self.run)
            return self.wandb.id
        except Exception as error:  # its own errors are of many kinds; none is worth a training run
            print(f"wandb_log=True, but wandb did not start ({type(error).__name__}: {str(error).splitlines()[0]}): going on without it",
                  file=sys.stderr)
            return run_id

    def close(self):
        if self.active:
            self.file.close()
        if self.wandb:
            self.wandb.finish()

    def draw(self):
        """Draws run/loss.png: losses over tokens, learning rate and speed under them. 800 pixels wide."""
        if not self.active:
            return
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        figure = Figure(figsize=(8, 6), dpi=100, layout="constrained")
        FigureCanvasAgg(figure)
        top, middle, bottom = figure.subplots(3, 1, sharex=True, height_ratios=(4, 1, 1))
        thin = self.train[::max(1, len(self.train) // 4000)]
        if thin:
            tokens, losses, rates, speeds = zip(*thin)
            top.plot(tokens, losses, color="tab:blue", alpha=0.3, linewidth=0.8, label="training, each update")
            top.plot(tokens, smooth(losses), color="tab:blue", linewidth=1.5, label="training, smoothed")
            middle.plot(tokens, rates, color="tab:green")
            bottom.plot(tokens, speeds, color="tab:gray", linewidth=0.8)
            settled = [x for x in losses[len(losses) // 50:] + tuple(v for _, v in self.val + self.general) if x is not None and x < float("inf")]
            if settled:  # the fall from a random guess would squeeze the rest of the curve
                margin = 0.05 * (max(settled) - min(settled)) or 0.1
                top.set_ylim(min(settled) - margin, max(settled) + margin)
        if self.val:
            best = min(loss for _, loss in self.val)
            top.plot(*zip(*self.val), color="tab:orange", marker="o", markersize=4, label=f"validation, best {best:.4f}")
        if self.general:
            top.plot(*zip(*self.general), color="tab:purple", marker="s", markersize=4, label=f"general text, {self.general[0][1]:.4f} at first")
        for tokens in self.restarts:
            top.axvline(tokens, color="tab:red", linestyle=":", linewidth=1, label="resumed" if tokens == self.restarts[0] else None)
        top.set_ylabel("loss (nats a token)")
        top.set_title(os.path.basename(os.path.normpath(self.run)))
        if self.train or self.val:
            top.legend(loc="upper right")
        middle.set_ylabel("learning rate")
        bottom.set_ylabel("tokens/s")
        bottom.set_ylim(bottom=0)
        bottom.set_xlabel("tokens seen")
        bottom.xaxis.set_major_formatter(lambda x, _: short_number(x))
        bottom.yaxis.set_major_formatter(lambda x, _: short_number(x))
        for axes in (top, middle, bottom):
            axes.grid(alpha=0.3)
        picture = os.path.join(self.run, "loss.png")
        try:
            figure.savefig(picture + ".tmp", format="png")
            os.replace(picture + ".tmp", picture)
        except OSError as error:  # no picture is worth a run
            with contextlib.suppress(OSError):
                os.unlink(picture + ".tmp")
            print(f"warning: {picture} was not drawn: {error.strerror}", file=sys.stderr)


def describe(model, config, feed, place):
    """The few lines at the start of a log that say what is trained on what."""
    sizes = {n: (p.numel(), p.dim()) for n, p in model.named_parameters()}
    total = sum(size for size, _ in sizes.values())

    def count(*parts):
        return sum(size for name, (size, _) in sizes.items() if any(part in name for part in parts))

    per_epoch = feed.train.epoch * config.block_size / config.total_batch_size
    reference = " (GPT-2 124M's reference: 491,520)" if config.init_from == "scratch" else ""
    device = place.device
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{torch.get_num_threads()} threads"
    held_out = [f"\n{name}: {min(reader.dataset.n_tokens, config.eval_tokens):,} of {reader.dataset.n_tokens:,} tokens of {reader.dataset.path}"
                for name, reader in (("validation", feed.val), ("general text", feed.general)) if reader]
    layout = "" if place.layout == "single" else f", {place.layout} on {place.ranks} processes"
    if max(place.shape.values()) > 1:
        layout += f" ({', '.join(f'{axis} {n}' for axis, n in place.shape.items() if n > 1)})"
    return "\n".join((
        f"\nparameters: {total:,} ({count('wte', 'wpe', 'head.'):,} embeddings and head, {count('.attn.'):,} attention, {count('.mlp.'):,} mlp); "
        f"weight decay on {sum(size for size, dim in sizes.values() if dim >= 2):,}",
        f"data: {feed.train.description}{''.join(held_out)}",
        f"update: {config.total_batch_size:,} tokens = {config.micro_batches} micro-batches of {config.batch_size} x {config.block_size}{reference}; an "
        f"epoch is {per_epoch:,.1f} updates, this run {config.max_iters / per_epoch:.2f} epochs",
        f"device: {device.type} ({where}), {config.dtype}{', compiled' if config.compile else ''}{layout}{', deterministic' if config.deterministic else ''}\n"))


def smooth(values, weight=0.95):
    """Exponential moving average, corrected for its start (as Adam's)."""
    out, average, total = [], 0.0, 0.0
    for v in values:
        average, total = weight * average + (1 - weight) * v, weight * total + (1 - weight)
        out.append(average / total)
    return out


def short_number(x):
    """12345 -> 12.3k."""
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(x) >= size:
            return f"{x / size:.3g}{unit}"
    return f"{x:.3g}"


def short_time(seconds):
    """3725 -> 1h02m."""
    seconds = int(seconds)
    if seconds < 60:
        return f"{seconds}s"
    if seconds < 3600:
        return f"{seconds // 60}m{seconds % 60:02d}s"
    if seconds < 86400:
        return f"{seconds // 3600}h{seconds % 3600 // 60:02d}m"
    return f"{seconds // 86400}d{seconds % 86400 // 3600:02d}h"
