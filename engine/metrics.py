"""What a run leaves to look at: metrics.jsonl, loss.png, speed and MFU; and whether several runs drew one curve.

    python -m engine.metrics out/a out/b ...           where each first differs from the first one, and by how many last-bit units
    python -m engine.metrics out/a out/b --out=ab.png  the picture of all of them in another place than curves.png beside out/a

Exit code 0: what the runs both have is the same to the last bit; 1: it is not; 2: there is nothing to compare.
"""

import contextlib
import json
import os
import re
import struct
import sys
import threading
import time
from typing import TextIO

import torch

from engine import voice
from engine.errors import EXIT_FAILED, UserError, run_as_script
from engine.matmul import linear
from engine.trackers import TensorBoard, Trackers, Wandb

# Dense peak of the matrix units in TFLOP/s by dtype, from the makers' data sheets (without sparsity; float32 as TF32). The
# first that stands as a word in torch.cuda.get_device_name() counts; a device that is not here is measured.
GPU_PEAKS: list[tuple[str, dict[str, float]]] = [
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


def peak_flops(device: torch.device, dtype: str) -> float:
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
    """Appends to metrics.jsonl, keeps what the picture needs, and tells wandb and TensorBoard where that was asked for."""

    def __init__(self, run: str, step: int, active: bool = True):
        """Opens run/metrics.jsonl to go on after `step` updates: lines beyond it, and a torn last one, are cut off.

        A rank that is not active writes nothing.
        """
        self.run, self.path, self.active = run, os.path.join(run, "metrics.jsonl"), active
        self.file: TextIO | None = None
        self.trackers, self.lock = Trackers(), threading.Lock()  # a save in the background writes its line too
        self.go_back(step)

    def go_back(self, step: int) -> None:
        """Cuts off what lies beyond `step`: it comes again."""
        self.train, self.val, self.restarts = [], [], []  # (tokens, loss, lr, tokens_per_s, grad_norm), (tokens, loss), tokens
        self.general, self.right = [], []  # (tokens, loss on general text); share of answers
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
        self.trackers.tell("go_back", step)

    def write(self, kind: str, step: int, **values) -> None:
        """One line: {"kind": ..., "step": ..., ...}, numbers in full precision."""
        if not self.active:
            return
        record = {"kind": kind, "step": step, **values}
        with self.lock:
            self.file.write(json.dumps(record) + "\n")
            self._remember(record)
        if self.trackers.active and kind != "event":
            self.trackers.tell("write", kind, step, values)

    def event(self, step: int, event: str, **values) -> None:
        self.write("event", step, event=event, **values)
        self.flush()

    def flush(self) -> None:
        if self.active:
            with self.lock:
                self.file.flush()

    def sync(self) -> None:
        """Puts all lines on the disk: a checkpoint's steps stand in the log before it is complete."""
        self.flush()
        if self.active:
            os.fsync(self.file.fileno())
            self.trackers.tell("flush")

    def _remember(self, record):
        if record["kind"] == "train":
            self.tokens = record["tokens"]
            self.train.append((self.tokens, record["loss"], record["lr"], record["tokens_per_s"], record["grad_norm"]))
        elif record["kind"] == "val":
            self.val.append((self.tokens, record["loss"]))
            self.val_losses[record["step"]] = record["loss"]
            if record.get("general_loss") is not None:
                self.general.append((self.tokens, record["general_loss"]))
            if record.get("accuracy") is not None:
                self.right.append(record["accuracy"])
        elif record.get("event") == "resumed":
            self.restarts.append(self.tokens)

    def best(self) -> tuple[int | None, float]:
        """(step, validation loss) of the best so far, the first of equals; (None, inf) before one. What a run started from is none of its own."""
        losses = {step: loss for step, loss in self.val_losses.items() if step}
        step = min(losses, key=losses.get, default=None)
        return step, losses.get(step, float("inf"))

    def what_it_brought(self) -> list[str]:
        """Sentences on what a run has gained and cost: answers that are right, the loss on general text (forgetting)."""
        said = []
        if len(self.right) > 1:
            said.append(f"answers right: {self.right[0]:.1%} at the start, {self.right[-1]:.1%} at the end")
        if len(self.general) > 1:
            first, last = self.general[0][1], self.general[-1][1]
            said.append(f"general loss {'rose' if last > first else 'fell'} by {abs(last - first):.4f}, from {first:.4f} to {last:.4f}")
        return said

    def start_trackers(self, config, settings: dict, step: int, run_id: str | None) -> str | None:
        """Starts wandb, or resumes its run `run_id`, and TensorBoard, as the config says. Returns the id of the wandb run there is now, or None."""
        if config.tensorboard_log:
            self.trackers.start("tensorboard_log", lambda: TensorBoard(self.run, step))
        if config.wandb_log:
            with open(self.path, encoding="utf-8") as f:
                wandb = self.trackers.start("wandb_log", lambda: Wandb(self.run, config, settings, run_id, map(json.loads, f)))
            return wandb.id if wandb else run_id
        return run_id

    def close(self) -> None:
        if self.active:
            self.file.close()
        self.trackers.tell("close")

    def draw(self) -> None:
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
            tokens, losses, rates, speeds, _ = zip(*thin)
            top.plot(tokens, losses, color="tab:blue", alpha=0.3, linewidth=0.8, label="training, each update")
            # smoothed from both ends: from one alone it lags behind a curve that falls
            both = [(a + b) / 2 for a, b in zip(smooth(list(losses)), reversed(smooth(list(losses[::-1]))))]
            top.plot(tokens, both, color="tab:blue", linewidth=1.5, label="training, smoothed")
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
        try:
            write_picture(figure, os.path.join(self.run, "loss.png"))
        except OSError as error:  # no picture is worth a run
            voice.warn(f"warning: {os.path.join(self.run, 'loss.png')} was not drawn: {error.strerror}")


def write_picture(figure, path: str) -> None:
    """Writes a matplotlib figure as PNG, whole or not at all; OSError where the folder does not take it."""
    try:
        figure.savefig(path + ".tmp", format="png")
        os.replace(path + ".tmp", path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(path + ".tmp")
        raise


# --------------------------------------------------------------------------------------------------- comparing runs

NOT_OF_THE_CURVE = ("kind", "step", "tokens_per_s", "mfu", "step_ms")  # what a line says besides what was computed


def read_curve(run: str) -> dict[tuple[int, str], dict]:
    """{(step, kind): {name: value}} of the lines of a run (its folder, or a metrics.jsonl) that are no events, in the order of steps.

    A last line that is torn off belongs to a run that is being written or was killed. UserError for anything else that is no log of ours.
    """
    path = run if os.path.isfile(run) else os.path.join(run, "metrics.jsonl")
    try:
        with open(path, encoding="utf-8") as f:
            lines = f.read().split("\n")[:-1]
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{run} cannot be compared: {path}: {getattr(error, 'strerror', None) or 'not UTF-8'}; expected the folder of a run, which "
                        "has a metrics.jsonl") from None
    curve = {}
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
            key = int(record["step"]), record["kind"]
            if key[1] == "train":
                float(record["loss"]), int(record["tokens"])
        except (ValueError, KeyError, TypeError):
            raise UserError(f"{path}, line {number} is no line of a run's metrics: expected JSON with kind, step, and of an update loss and tokens") from None
        if key[1] == "event":
            continue
        if key in curve:
            raise UserError(f"{path}, line {number}: step {key[0]} ({key[1]}) stands there for the second time; a run writes each once")
        curve[key] = {k: v for k, v in record.items() if k not in NOT_OF_THE_CURVE}
    if not any(kind == "train" for _, kind in curve):
        raise UserError(f"{path} has no update yet: expected a run that has made some")
    return dict(sorted(curve.items(), key=lambda item: (item[0][0], item[0][1] != "train", item[0][1])))


def compare(first: dict, other: dict, a: str, b: str) -> tuple[bool, list[str]]:
    """(whether two curves of read_curve(), by the names a and b, are one in what both have; sentences that say so or where they part)."""
    ours, theirs = ({step for step, kind in curve if kind == "train"} for curve in (first, other))
    both = ours & theirs
    if not both:
        return False, [f"{a} and {b} have no update in common: {updates(ours)} and {updates(theirs)}"]
    if holes := [step for step in ours ^ theirs if min(both) < step < max(both)]:
        return False, [f"{a} and {b} differ: update {min(holes):,} is in {a if min(holes) in ours else b} only"]
    alone = [f"only {name} has {updates(steps)}" for name, steps in ((a, ours - theirs), (b, theirs - ours)) if steps]
    common = [key for key in first if key in other]
    parted = {key: names for key in common if (names := [n for n in first[key] if n in other[key] and not same(first[key][n], other[key][n])])}
    if not parted:
        rest = len(common) - len(both)
        return True, [f"{a} and {b} are identical: {updates(both)}{f' and {rest:,} evaluations' if rest else ''}, to the last bit", *alone]
    step, kind = next(iter(parted))
    values = [difference(n if kind == "train" else f"{kind} {n}", first[step, kind][n], other[step, kind][n]) for n in parted[step, kind]]
    far, where = max((abs(first[key]["loss"] - other[key]["loss"]) / (abs(first[key]["loss"]) or 1), key[0]) for key in common if key[1] == "train")
    return False, [f"{a} and {b} first differ at step {step:,}: {'; '.join(values)}",
                   f"over {updates(both)} their losses are at most {far:.1e} apart, relative to the loss, at step {where:,}", *alone]


def same(a, b) -> bool:
    """Whether two values are one to the last bit: NaN is NaN, and 0.0 is not -0.0."""
    return repr(a) == repr(b)


def difference(name: str, a, b) -> str:
    """'loss 3.0 and 3.0000002, 1 float32 ulp apart'."""
    numbers = all(isinstance(x, (int, float)) for x in (a, b))
    return f"{name} {a!r} and {b!r}" + (f", {last_bit_units(a, b)} apart" if numbers else "")


def last_bit_units(a: float, b: float) -> str:
    """How far two numbers are apart in units in the last place (ulps), '3 float32 ulps', or '12.0%' where it is more than
    rounding: of float32 where both are such, as losses are, else of
    float64. Floats of one sign stand in the order of their bits read as integers, so the distance of those is the count of steps between them."""
    if isinstance(a, int) and isinstance(b, int):
        return f"{abs(a - b):,}"
    for name, real, integer in (("float32", "f", "I"), ("float64", "d", "Q")):  # noqa: B007
        try:
            if name == "float64" or all(same(struct.unpack(real, struct.pack(real, x))[0], x) for x in (a, b)):
                break
        except OverflowError:
            continue
    sign = 1 << (8 * struct.calcsize(integer) - 1)
    at = [n if n < sign else sign - n for n in (struct.unpack(integer, struct.pack(real, x))[0] for x in (a, b))]
    distance = abs(at[0] - at[1])
    if distance > 10**6:
        return f"{abs(a - b) / max(abs(a), abs(b)):.1%}"
    return f"{distance:,} {name} ulp{'s' if distance != 1 else ''}"


def updates(steps: set[int]) -> str:
    """'updates 1 to 49, 101 to 200'."""
    spans = []
    for step in sorted(steps):
        if spans and spans[-1][1] == step - 1:
            spans[-1][1] = step
        else:
            spans.append([step, step])
    return f"update{'s' if len(steps) > 1 else ''} " + ", ".join(f"{a:,} to {b:,}" if a < b else f"{a:,}" for a, b in spans)


def draw_over_each_other(curves: dict[str, dict], path: str) -> None:
    """Draws {name: curve of read_curve()} into one PNG, 800 pixels wide: losses over tokens and, under them, how far each is from the first's."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 6), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    first, most = next(iter(curves)), 0
    for i, (name, curve) in enumerate(curves.items()):
        tokens = {step: values["tokens"] for (step, kind), values in curve.items() if kind == "train"}
        loss = {step: values["loss"] for (step, kind), values in curve.items() if kind == "train"}
        val = {step: values["loss"] for (step, kind), values in curve.items() if kind == "val" and step in tokens}
        thin, width = list(tokens)[::max(1, len(tokens) // 4000)], 1.2 * (len(curves) - i)  # where all are one curve, each colour shows
        top.plot([tokens[s] for s in thin], [loss[s] for s in thin], color=f"C{i}", alpha=0.8, linewidth=width, label=name)
        top.plot([tokens[s] for s in val], list(val.values()), "o", color=f"C{i}", markersize=4 + 2 * width, markerfacecolor="none")
        apart = [(tokens[s], abs(loss[s] - curves[first][s, "train"]["loss"])) for s in thin if (s, "train") in curves[first]]
        if i and apart:
            bottom.plot(*zip(*apart), color=f"C{i}", linewidth=1)
            most = max(most, *(d for _, d in apart))
    top.set_ylabel("loss (nats a token)")
    top.set_title("training loss; circles: validation")
    top.legend(loc="upper right")
    bottom.set_ylabel("distance to\nthe first's loss")
    bottom.set_ylim(0, 1.1 * most or 1e-7)
    bottom.ticklabel_format(axis="y", scilimits=(-3, 3))
    bottom.set_xlabel("tokens seen")
    bottom.xaxis.set_major_formatter(lambda x, _: short_number(x))
    for axes in (top, bottom):
        axes.grid(alpha=0.3)
    write_picture(figure, path)


def main(argv: list[str]) -> int:
    """Compares and draws the runs of a command line; returns the exit code."""
    if not argv or "--help" in argv:
        print(__doc__)
        return 0
    runs, options = [[word for word in argv if word.startswith("--") == dashed] for dashed in (False, True)]
    if wrong := [word for word in options if not word.startswith("--out=") or word == "--out="]:
        raise UserError(f"{wrong[0]}: expected folders of runs and, for another place of their picture, --out=FILE.png")
    if not runs:
        raise UserError("no run was named: expected the folders of two or more, such as out/a out/b")
    runs = list(dict.fromkeys(os.path.normpath(run) for run in runs))
    curves = {run: read_curve(run) for run in runs}
    picture = options[-1].removeprefix("--out=") if options else os.path.join(os.path.dirname(runs[0]), "curves.png")
    found = [compare(curves[runs[0]], curves[run], runs[0], run) for run in runs[1:]]
    for _, sentences in found:
        print("\n".join(sentences))
    try:
        draw_over_each_other(curves, picture)
    except OSError as error:
        raise UserError(f"{picture} cannot be written: {error.strerror}; --out=FILE.png takes another place") from None
    print(f"drawn over each other: {picture}")
    return 0 if all(one for one, _ in found) else EXIT_FAILED


def describe(model: torch.nn.Module, config, feed, place) -> str:
    """The few lines at the start of a log that say what is trained on what."""
    sizes = {n: (p.numel(), p.dim()) for n, p in model.named_parameters()}
    trained = {n for n, p in model.named_parameters() if p.requires_grad}
    adapters = f"trained: {sum(sizes[n][0] for n in trained):,}, adapters of rank {config.lora_rank} beside {config.lora_targets}; " if config.lora_rank else ""
    total = sum(size for size, _ in sizes.values())

    def count(*parts):
        return sum(size for name, (size, _) in sizes.items() if any(part in name for part in parts))

    per_epoch = feed.train.epoch * config.block_size / config.total_batch_size
    reference = " (nanoGPT's GPT-2 124M: 491,520)" if config.init_from == "scratch" else ""
    by_heart = ", by heart" if config.max_iters > 40 * per_epoch else ""
    padded = f" of {config.vocab_size:,} tokens, padded to {model.config.padded_vocab_size:,}" if config.vocab_size < model.config.padded_vocab_size else ""
    device = place.device
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{torch.get_num_threads()} threads"
    held_out = [f"\n{name}: {min(reader.dataset.n_tokens, config.eval_tokens):,} of {reader.dataset.n_tokens:,} tokens of {reader.dataset.path}"
                for name, reader in (("validation", feed.val), ("general text", feed.general)) if reader]
    layout = "" if place.layout == "single" else f", {place.layout} on {place.ranks} processes"
    if max(place.shape.values()) > 1:
        layout += f" ({', '.join(f'{axis} {n}' for axis, n in place.shape.items() if n > 1)})"
    return "\n".join((
        f"\nparameters: {total:,} ({count('wte', 'wpe', 'head.'):,} embeddings and head{padded}, {count('.attn.'):,} attention, {count('.mlp.'):,} mlp); "
        f"{adapters}weight decay on {sum(size for n, (size, dim) in sizes.items() if dim >= 2 and n in trained):,}",
        f"data: {feed.train.description}{''.join(held_out)}",
        f"update: {config.total_batch_size:,} tokens = {config.micro_batches} micro-batches of {config.batch_size} x {config.block_size}{reference}; an "
        f"epoch is {per_epoch:,.1f} updates, this run {config.max_iters / per_epoch:.2f} epochs{by_heart}",
        f"device: {device.type} ({where}), {config.dtype}{', compiled' if config.compile else ''}{layout}{', deterministic' if config.deterministic else ''}\n"))


def smooth(values: list[float], weight: float = 0.95) -> list[float]:
    """Exponential moving average, corrected for its start (as Adam's)."""
    out, average, total = [], 0.0, 0.0
    for v in values:
        average, total = weight * average + (1 - weight) * v, weight * total + (1 - weight)
        out.append(average / total)
    return out


def short_number(x: float) -> str:
    """12345 -> 12.3k."""
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(x) >= size:
            return f"{x / size:.3g}{unit}"
    return f"{x:.3g}"


def short_time(seconds: float) -> str:
    """3725 -> 1h02m."""
    seconds = int(seconds)
    if seconds < 60:
        return f"{seconds}s"
    if seconds < 3600:
        return f"{seconds // 60}m{seconds % 60:02d}s"
    if seconds < 86400:
        return f"{seconds // 3600}h{seconds % 3600 // 60:02d}m"
    return f"{seconds // 86400}d{seconds % 86400 // 3600:02d}h"


if __name__ == "__main__":
    run_as_script(lambda: main(sys.argv[1:]))
