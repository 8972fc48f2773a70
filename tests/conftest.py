"""What the tests share: real runs in processes of their own, and a small prepared data set."""

import json
import os
import subprocess
import sys

import pytest

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
ASSETS = os.path.join(os.path.dirname(ROOT), "shared", "assets")

# A model and a batch so small that a run takes as long as its imports; odd sizes on purpose.
TINY = {"n_layer": 2, "n_head": 3, "n_embd": 48, "block_size": 16, "batch_size": 2, "total_batch_size": 128, "max_iters": 20,
        "warmup_iters": 2, "learning_rate": 1e-2, "eval_interval": 0, "sample_tokens": 0, "threads": 1, "device": "cpu"}


def as_args(settings):
    return [f"--{key}={value}" for key, value in settings.items()]


class Finished:
    """What a finished process left: code, out, err, and its lines that begin with `error:`."""

    def __init__(self, done):
        self.code, self.out, self.err = done.returncode, done.stdout, done.stderr
        self.errors = [line for line in self.err.splitlines() if line.startswith("error:")]


def run_script(name, *args, cwd=ROOT, env=None, timeout=300, **options):
    """Runs train.py, sample.py or prepare.py as a person would."""
    done = subprocess.run([sys.executable, os.path.join(ROOT, name), *map(str, args)], cwd=cwd, env={**os.environ, **(env or {})},
                          capture_output=True, text=True, encoding="utf-8", timeout=timeout, stdin=subprocess.DEVNULL, **options)
    return Finished(done)


def train(out_dir, data, config="empty", expect=0, env=None, **settings):
    """A run of train.py on TINY settings, with `settings` over them."""
    config = os.path.join(ROOT, "tests", "empty_config.py") if config == "empty" else config
    result = run_script("train.py", config, f"--out_dir={out_dir}", f"--dataset={data}", *as_args({**TINY, **settings}), env=env)
    assert result.code == expect, result.out + result.err
    return result


def records(run, kind="train"):
    """The lines of a run's metrics.jsonl of one kind."""
    with open(os.path.join(run, "metrics.jsonl"), encoding="utf-8") as f:
        return [r for r in map(json.loads, f) if r["kind"] == kind]


def curve(run):
    """{step: (loss, gradient norm, learning rate)} of a run, in full precision."""
    found = records(run)
    assert len(found) == len({r["step"] for r in found}), "a step stands in metrics.jsonl twice"
    return {r["step"]: (r["loss"], r["grad_norm"], r["lr"]) for r in found}


def tensors(run, step):
    """Every tensor of a checkpoint, weights and the optimizer's state, whole, as bytes."""
    from engine.checkpoint import open_checkpoint

    c = open_checkpoint(os.path.join(run, "checkpoints", f"step_{step:08d}"))
    return {f"{part}/{name}": c.read(part, name).numpy().tobytes() for part in ("model", "optimizer") for name in c.names(part)}


def torchrun(n, *command, env=None, timeout=300, options=()):
    """Runs a script of the project under torchrun with n processes, without OMP_NUM_THREADS in the environment."""
    environment = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
    done = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={n}", *options, *map(str, command)],
                          cwd=ROOT, env={**environment, **(env or {})}, capture_output=True, text=True, timeout=timeout, stdin=subprocess.DEVNULL)
    return Finished(done)


def several(n, runs):
    """Makes several runs of train.py one after the other in one group of n processes (1: without torchrun); starting costs seconds.

    runs: [(out_dir, data, settings over TINY)].
    """
    commands = json.dumps([["tests/empty_config.py", f"--out_dir={out}", f"--dataset={data}", *as_args({**TINY, **settings})] for out, data, settings in runs])
    result = torchrun(n, "tests/several.py", commands, timeout=600) if n > 1 else run_script("tests/several.py", commands, timeout=600)
    assert result.code == 0, result.out[-3000:] + result.err[-5000:]
    return result


def steps(run):
    return sorted(int(n[5:]) for n in os.listdir(os.path.join(run, "checkpoints")) if n.startswith("step_"))


def some_text(n_bytes, seed=0):
    """Words in lines, the same for a seed."""
    import random

    rng, words = random.Random(seed), "def return import class self for in if else print None True value name list data".split()
    lines = []
    while sum(map(len, lines)) < n_bytes:
        lines.append(" ".join(rng.choice(words) for _ in range(rng.randint(3, 9))) + "\n")
    return "".join(lines)[:n_bytes]


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """A byte-level data set whose training split holds 100 windows of 16 tokens."""
    from prepare import prepare

    folder = tmp_path_factory.mktemp("data")
    (folder / "text.txt").write_text(some_text(2000))
    return prepare(str(folder / "text.txt"), tokenizer="byte", val_fraction=0.2, workers=1, out=str(folder / "set"), quiet=True)
