"""Speed and memory beside a nanoGPT checkout, on this machine, both scripts run as their users run them.

    python -m tests.bench --peer PATH_TO_NANOGPT [--repeats 5] [--only char,124m,loss] [--text input.txt] [--json out/bench.json]

Each repeat starts nanoGPT's train.py and ours on the same token file with the same settings, and lets them run in turns: one stands
still (SIGSTOP) while the other makes its updates, a fraction of a second to a few seconds long. The ratio of a turn is of two times
that follow each other, so that a machine whose speed drifts, or that others use as well, does not decide; the ratio of a
repeat is the median of its turns. Above 1 is in our favour. Nothing is written into the checkout.

`loss` is the time to nanoGPT's final loss: its README's CPU run of 2,000 updates on tiny shakespeare (--text) against
configs/shakespeare_char_cpu.py, a model of the same size on the same split. Seconds are between the lines of the first and the
last update, times n / (n - 1): neither start, evaluation nor checkpoint is in them, on either side. Both final checkpoints are then
evaluated by the same code, over all windows of the validation split.
"""

import argparse
import atexit
import json
import os
import pickle
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time

import numpy as np

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

SHAPES = {  # name: (vocabulary, (turns, updates in each), settings that both scripts know)
    "char": (65, (30, 10), dict(n_layer=4, n_head=4, n_embd=128, block_size=64, batch_size=12)),  # nanoGPT's CPU shakespeare_char
    "6x384": (65, (16, 1), dict(n_layer=6, n_head=6, n_embd=384, block_size=256, batch_size=8)),
    "124m-1024": (50304, (1, 1), dict(n_layer=12, n_head=12, n_embd=768, block_size=1024, batch_size=8)),  # for memory; 2 pairs at most
    "124m": (50304, (8, 1), dict(n_layer=12, n_head=12, n_embd=768, block_size=512, batch_size=2)),
}
WARMUP = 2  # updates that are not counted
FIRST = {"nanogpt": "iter 0:", "ours": "step 1/"}  # how the line of a script's first update begins
UPDATES = 2000  # of nanoGPT's CPU example
EXAMPLE = ["config/train_shakespeare_char.py", "--device=cpu", "--compile=False", "--eval_iters=20", "--log_interval=1", "--block_size=64", "--batch_size=12",
           "--n_layer=4", "--n_head=4", "--n_embd=128", f"--max_iters={UPDATES}", f"--lr_decay_iters={UPDATES}", "--dropout=0.0"]  # as its README has it
RECOMPUTED = {"124m-1024": ("selective", "block")}  # shapes that are also run with activation checkpointing, beside nanoGPT without


def prepare_workplace(folder, peer, text):
    """A folder from which nanoGPT's train.py runs, with its data: it reads configurator.py and data/ from where it stands."""
    for name in ("train.py", "model.py", "configurator.py", "config"):
        os.symlink(os.path.join(os.path.abspath(peer), name), os.path.join(folder, name))
    for name, (vocab, _, _) in SHAPES.items():
        chars = [chr(48 + i) for i in range(vocab)] if vocab == 65 else None
        write_data(os.path.join(folder, "data", name), [np.random.default_rng(0).integers(0, vocab, 200_000)] * 2, chars)
    if text is not None:
        chars = sorted(set(text))  # as its data/shakespeare_char/prepare.py: the first int(0.9 n) characters are train
        ids = np.array([chars.index(c) for c in text])
        write_data(os.path.join(folder, "data", "shakespeare_char"), np.split(ids, [int(len(ids) * 0.9)]), chars)


def write_data(folder, splits, chars):
    os.makedirs(folder)
    for split, ids in zip(("train", "val"), splits):
        ids.astype("<u2").tofile(os.path.join(folder, f"{split}.bin"))
    if chars:
        with open(os.path.join(folder, "meta.pkl"), "wb") as f:
            pickle.dump({"vocab_size": len(chars), "itos": dict(enumerate(chars)), "stoi": {c: i for i, c in enumerate(chars)}}, f)


class Script:
    """A script that runs while it is asked to: `lines`, [(seconds since the start, line)], is what it has written so far."""

    def __init__(self, command, folder):
        self.started, self.lines = time.perf_counter(), []
        self.process = subprocess.Popen([sys.executable, "-u", *command], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        atexit.register(self.process.kill)  # one that stands still does not outlive a benchmark that was broken off

    def until(self, words, n=1):
        """Lets it run to its n-th line from here that begins with `words`, where it stands still; returns the seconds that took."""
        os.kill(self.process.pid, signal.SIGCONT)
        started = time.perf_counter()
        for line in self.process.stdout:
            self.lines.append((time.perf_counter() - self.started, line))
            n -= line.startswith(words)
            if not n:
                os.kill(self.process.pid, signal.SIGSTOP)
                return time.perf_counter() - started
        return self.end()

    def end(self):
        """Lets it run to its end; returns its peak memory in MB."""
        os.kill(self.process.pid, signal.SIGCONT)
        for line in self.process.stdout:
            self.lines.append((time.perf_counter() - self.started, line))
        _, status, usage = os.wait4(self.process.pid, 0)
        if status:
            sys.exit("".join(line for _, line in self.lines[-20:]))
        return usage.ru_maxrss / 1024


def run(command, folder):
    """Runs a script; returns its lines, [(seconds since the start, line)], and peak memory in MB."""
    script = Script(command, folder)
    peak = script.end()
    return script.lines, peak


def when(lines, words):
    """Seconds to the first line that begins with `words`."""
    return next(seconds for seconds, line in lines if line.startswith(words))


def measure(shape, folder, n):
    """One pair: {"nanogpt": {...}, "ours": {...}} with a turn's updates in ms each, [ms of a step], seconds to the first step, peak MB."""
    _, (turns, updates), settings = SHAPES[shape]
    common = [f"--{k}={v}" for k, v in {**settings, "dataset": shape, "gradient_accumulation_steps": 1, "dropout": 0.0, "device": "cpu", "dtype": "float32",
                                        "compile": False, "max_iters": WARMUP + turns * updates, "log_interval": 1, "eval_interval": 10**6, "eval_iters": 1}.items()]
    found = {"nanogpt": {}, "ours": {}}
    for kind in ("none", *RECOMPUTED.get(shape, ())):
        out_dir, tag = f"ours-{shape}-{n}-{kind}", "" if kind == "none" else f", {kind}"
        sides = {"nanogpt": ("iter ", ["train.py", f"--out_dir=out-{shape}", *common]),
                 "ours": ("step ", [os.path.join(ROOT, "train.py"), os.path.join(ROOT, "tests", "empty_config.py"), f"--out_dir={out_dir}", *common,
                                    f"--dataset={os.path.join(folder, 'data', shape)}", "--eval_interval=0", "--sample_tokens=0", f"--activation_checkpointing={kind}"])}
        scripts = {}
        for side, (words, command) in sides.items():
            scripts[side] = Script(command, folder)
            found[side][f"first_s{tag}"] = scripts[side].until(FIRST[side])
            scripts[side].until(words, WARMUP - 1)
            found[side][f"step_ms{tag}"] = []
        for _ in range(turns):
            for side, (words, _) in sides.items():
                found[side][f"step_ms{tag}"].append(scripts[side].until(words, updates) * 1e3 / updates)
        for side, script in scripts.items():
            found[side][f"peak_mb{tag}"] = script.end()
        shutil.rmtree(os.path.join(folder, out_dir))  # its checkpoint
    return found


def time_to_loss(folder, n):
    """One pair: {"nanogpt": {...}, "ours": {...}} with seconds of the training alone and the final validation loss."""
    theirs, ours = f"out-loss-{n}", f"ours-loss-{n}"
    data = os.path.join(folder, "data", "shakespeare_char")
    lines, _ = run(["train.py", *EXAMPLE, f"--out_dir={theirs}", f"--eval_interval={UPDATES}"], folder)
    last = f"iter {UPDATES - 1}:"  # its evaluation and checkpoint come after that line
    found = {"nanogpt": {"seconds": (when(lines, last) - when(lines, "iter 0:")) * UPDATES / (UPDATES - 1), "updates": UPDATES,
                         "own_estimate": float(re.search(rf"step {UPDATES}:.*val loss ([\d.]+)", "".join(line for _, line in lines))[1])}}
    lines, _ = run([os.path.join(ROOT, "train.py"), os.path.join(ROOT, "configs", "shakespeare_char_cpu.py"), f"--dataset={data}", f"--out_dir={ours}",
                    "--device=cpu", "--eval_interval=0", "--sample_tokens=0", "--log_interval=1"], folder)
    updates = int(re.search(r"^step 1/([\d,]+)", "".join(line for _, line in lines), re.M)[1].replace(",", ""))
    found["ours"] = {"seconds": (when(lines, f"step {updates:,}/") - when(lines, "step 1/")) * updates / (updates - 1), "updates": updates}
    for side, weights in {"nanogpt": os.path.join(theirs, "ckpt.pt"), "ours": ours}.items():
        evaluated, _ = run([os.path.join(ROOT, "train.py"), os.path.join(ROOT, "tests", "empty_config.py"), f"--init_from={weights}", f"--dataset={data}",
                            "--init_optimizer=False", "--eval_only", "--eval_tokens=1000000000", "--batch_size=64", "--gradient_accumulation_steps=1", "--device=cpu",
                            f"--out_dir=evaluated-{side}-{n}"], folder)
        found[side]["loss"] = float(re.search(r"validation loss ([\d.]+)", "".join(line for _, line in evaluated))[1])
    return found


def flops_per_token(vocab, s):
    """Of a step, both scripts' models at a shape: 6 a weight of the products, and attention's (nanoGPT's estimate_mfu; PaLM, appendix B)."""
    return 6 * (12 * s["n_layer"] * s["n_embd"] ** 2 + vocab * s["n_embd"]) + 12 * s["n_layer"] * s["n_embd"] * s["block_size"]


def ratio(theirs, ours):
    """Of one pair: of two values, or the median over turns that followed each other."""
    return statistics.median(a / b for a, b in zip(theirs, ours)) if isinstance(ours, list) else theirs / ours


def compare(shape, pairs, what, unit):
    """Prints and returns a row: medians of both sides, and the ratio's median, lowest and highest."""
    ratios = sorted(ratio(p["nanogpt"][what], p["ours"][what]) for p in pairs)
    theirs, ours = (statistics.median(np.ravel([p[side][what] for p in pairs])) for side in ("nanogpt", "ours"))
    row = {"shape": shape, "what": what, "nanogpt": theirs, "ours": ours, "ratio": statistics.median(ratios), "low": ratios[0], "high": ratios[-1]}
    print(f"{shape:>6} {unit:<20} nanoGPT {theirs:9.1f}   ours {ours:9.1f}   ratio {row['ratio']:.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})", flush=True)
    return row


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", required=True, help="a nanoGPT checkout")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", default=",".join((*SHAPES, "loss")), help=f"what to measure, of {', '.join(SHAPES)}, loss")
    parser.add_argument("--text", help="tiny shakespeare (default: the checkout's data/shakespeare_char/input.txt), for `loss`")
    parser.add_argument("--json", default=os.path.join(ROOT, "out", "bench.json"))
    args = parser.parse_args()
    only, text = args.only.split(","), args.text or os.path.join(args.peer, "data", "shakespeare_char", "input.txt")
    if unknown := set(only) - {*SHAPES, "loss"}:
        sys.exit(f"--only={args.only}: {', '.join(unknown)} is none of {', '.join(SHAPES)}, loss")
    if "loss" in only and not os.path.isfile(text):
        sys.exit(f"there is no {text}, which `loss` trains on: give --text, or leave `loss` out of --only")
    has = json.loads(subprocess.run([sys.executable, "-m", "tests.bench.peak"], cwd=ROOT, check=True, capture_output=True, text=True).stdout)
    peak = has["gflops"]
    machine = f"{has['processor']}, {os.cpu_count()} cores, {has['threads']} threads, torch {has['torch']}, matmul peak {peak:.0f} GFLOP/s"
    print(f"{time.strftime('%Y-%m-%d')}, {machine}; medians of {args.repeats} pairs, ratio nanoGPT / ours with its lowest and highest")
    table = []
    with tempfile.TemporaryDirectory() as folder:
        prepare_workplace(folder, args.peer, open(text, encoding="utf-8").read() if "loss" in only else None)
        for shape in only:
            if shape == "loss":
                table.append(row_of_loss([time_to_loss(folder, n) for n in range(args.repeats)]))
                continue
            pairs = [measure(shape, folder, n) for n in range(min(args.repeats, 2) if shape in RECOMPUTED else args.repeats)]
            vocab, _, settings = SHAPES[shape]
            tokens = settings["batch_size"] * settings["block_size"]
            rows = [("step_ms", "ms a step"), ("first_s", "s to the first step"), ("peak_mb", "MB peak")]
            rows += [(f"{what}, {kind}", f"{unit}, {kind}") for kind in RECOMPUTED.get(shape, ()) for what, unit in rows if what != "first_s"]
            for what, unit in rows:
                row = compare(shape, pairs, what, unit)
                if what == "step_ms":
                    row["tokens_per_s"] = {side: tokens / row[side] * 1e3 for side in ("nanogpt", "ours")}
                    row["share_of_peak"] = {side: flops_per_token(vocab, settings) * t / 1e9 / peak for side, t in row["tokens_per_s"].items()}
                    print(f"{'':>6} {'share of the peak':<20} nanoGPT {row['share_of_peak']['nanogpt']:9.0%}   ours {row['share_of_peak']['ours']:9.0%}")
                table.append(row)
    os.makedirs(os.path.dirname(os.path.abspath(args.json)), exist_ok=True)
    with open(args.json, "w") as f:
        json.dump({"date": time.strftime("%Y-%m-%d"), "machine": machine, "matmul_gflops": peak, "repeats": args.repeats, "rows": table}, f, indent=1)


def row_of_loss(pairs):
    row = {**compare("loss", pairs, "seconds", "s to nanoGPT's loss"), "pairs": pairs}
    for p in pairs:
        print(f"{'':>6} validation loss      nanoGPT {p['nanogpt']['loss']:9.4f}   ours {p['ours']['loss']:9.4f}   after {p['nanogpt']['updates']:,} and "
              f"{p['ours']['updates']:,} updates (nanoGPT's own estimate {p['nanogpt']['own_estimate']:.4f})")
    row["reached"] = all(p["ours"]["loss"] <= p["nanogpt"]["loss"] for p in pairs)
    if not row["reached"]:
        print(f"{'':>6} not reached: ours is above nanoGPT's, the ratio does not count")
    return row


if __name__ == "__main__":
    main()
