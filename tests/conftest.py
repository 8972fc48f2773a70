"""What the tests share: real runs in processes of their own, and a small prepared data set."""

import contextlib
import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid

import pytest

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
ASSETS = os.path.join(os.path.dirname(ROOT), "shared", "assets")

# A model and a batch so small that a run takes as long as its imports; odd sizes on purpose.
TINY = {"n_layer": 2, "n_head": 3, "n_embd": 48, "block_size": 16, "batch_size": 2, "total_batch_size": 128, "max_iters": 20,
        "warmup_iters": 2, "learning_rate": 1e-2, "eval_interval": 0, "sample_tokens": 0, "threads": 1, "device": "cpu"}


HOSTS = {"a": "10.213.7.1", "b": "10.213.7.2"}  # two machines' addresses on the cable between them


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


def forked(n, *words, timeout=600):
    """Runs a script of the project in n processes that tests/forks.py starts in no time, as `python` or torchrun (n > 1) would."""
    if sys.platform != "linux":  # elsewhere a fork may not use what its parent has loaded
        return run_script(*words, timeout=timeout) if n == 1 else torchrun(n, *words, timeout=timeout)
    if not FORKS or FORKS[0].poll() is not None:
        FORKS[:] = [subprocess.Popen([sys.executable, os.path.join(ROOT, "tests", "forks.py")], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                                     start_new_session=True)]
    with tempfile.TemporaryDirectory() as folder:
        out, err = (os.path.join(folder, name) for name in ("out", "err"))
        print(json.dumps({"n": n, "words": [*map(str, words)], "env": dict(os.environ), "out": out, "err": err}), file=FORKS[0].stdin, flush=True)
        if not select.select([FORKS[0].stdout], [], [], timeout)[0]:
            os.killpg(FORKS[0].pid, signal.SIGKILL)
            FORKS[0].wait()
        code = FORKS[0].stdout.readline()
        texts = [open(path, encoding="utf-8").read() if os.path.exists(path) else "" for path in (out, err)]
    assert code, f"it did not end in {timeout} s:\n{texts[0][-3000:]}{texts[1][-3000:]}"
    return Finished(subprocess.CompletedProcess(words, int(code), *texts))


FORKS = []  # the process of forks.py, once it is needed


def pytest_unconfigure():
    for process in FORKS:
        process.stdin.close()
        process.wait()


def train(out_dir, data, config="tests/empty_config.py", expect=0, env=None, n=1, **settings):
    """A run of train.py in n processes on TINY settings, with `settings` over them; env: of a process that has to be started with it."""
    words = ["train.py", config, f"--out_dir={out_dir}", f"--dataset={data}", *as_args({**TINY, **settings})]
    result = run_script(*words, env=env) if env else forked(n, *words)
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


class Job:
    """A run of train.py in the background, alone or (n > 1, or options given) under torchrun; what it prints is in <out_dir>.log.

    before: words in front of the command, such as those that enter a network namespace.
    """

    def __init__(self, n, out_dir, data, options=("--standalone",), env=None, before=(), config="tests/empty_config.py", **settings):
        self.out_dir, self.log = str(out_dir), f"{out_dir}.log"
        starter = [sys.executable, "-u"] + (["-m", "torch.distributed.run", *options, f"--nproc_per_node={n}"] if n > 1 or options != ("--standalone",) else [])
        command = [*before, *starter, "train.py", str(config), f"--out_dir={out_dir}", f"--dataset={data}", *as_args({**TINY, **settings})]
        environment = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
        with open(self.log, "ab") as log:
            self.began = log.tell()
            self.process = subprocess.Popen(command, cwd=ROOT, env={**environment, **(env or {})}, stdout=log, stderr=log, stdin=subprocess.DEVNULL)

    @property
    def text(self):
        with open(self.log, encoding="utf-8", errors="replace") as f:
            f.seek(self.began)
            return f.read()

    @property
    def step(self):
        """The last update that it has said it made, 0 before the first."""
        return int(([0] + re.findall(r"^step ([\d,]+)/", self.text, re.M))[-1])

    def workers(self):
        """Process ids: torchrun's children, or the run itself where there is no torchrun."""
        return children(self.process.pid) or [self.process.pid]

    def wait_for(self, condition, seconds=120):
        """Waits until condition() holds; an error where the job ends before."""
        wait_for(lambda: condition() or self.process.poll() is not None, seconds)
        assert condition(), f"it ended with {self.process.returncode}:\n{self.text[-5000:]}"

    def end(self, seconds=240):
        """Its exit code, when it has ended; it and what it has started are killed where it does not."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"it did not end in {seconds} s:\n{self.text[-5000:]}") from None

    def kill(self):
        """kill -9 of the job and all that it has started, all at once: workers have sessions of their own and outlive torchrun."""
        for pid in [self.process.pid, *children(self.process.pid)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()


def on_machine(machines, host, data, out_dir, options=(), nodes="2", n=1, conf="", env=None, **settings):
    """A Job on one of two machines: torchrun with the words of the README; machine a hosts the rendezvous."""
    name, interface = machines[host]
    words = [f"--nnodes={nodes}", "--rdzv_backend=c10d", f"--rdzv_endpoint={HOSTS['a']}:29400", "--rdzv_id=two", f"--local_addr={HOSTS[host]}",
             f"--rdzv_conf=is_host={int(host == 'a')}{conf}", *options]
    return Job(n, out_dir, data, words, {"GLOO_SOCKET_IFNAME": interface, **(env or {})}, ["ip", "netns", "exec", name], **settings)


def children(pid):
    try:
        with open(f"/proc/{pid}/task/{pid}/children") as f:
            return [int(p) for p in f.read().split()]
    except FileNotFoundError:
        return []


def alive(pid):
    """Whether a process is there and no zombie, which has let go of its files too, once its last thread is gone."""
    try:
        with open(f"/proc/{pid}/stat") as f:
            return f.read().rsplit(")", 1)[1].split()[0] != "Z" or len(os.listdir(f"/proc/{pid}/task")) > 1
    except OSError:
        return False


def processes_of(out_dir):
    """Process ids of all that runs on a run's folder now, orphans too."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/cmdline", "rb") as f:
                words = f.read().decode(errors="replace").split("\0")
        except OSError:
            continue
        if f"--out_dir={out_dir}" in words:
            found.append(int(pid))
    return found


def wait_for(condition, seconds=60):
    deadline = time.time() + seconds
    while not condition():
        assert time.time() < deadline, "it did not happen"
        time.sleep(0.01)


def several(n, runs):
    """Makes several runs of train.py one after the other in one group of n processes (1: as without torchrun).

    runs: [(out_dir, data, settings over TINY)].
    """
    commands = json.dumps([["tests/empty_config.py", f"--out_dir={out}", f"--dataset={data}", *as_args({**TINY, **settings})] for out, data, settings in runs])
    result = forked(n, "tests/several.py", commands)
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


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    """What tests compute themselves is tiny: two threads would wait for each other longer than they compute, the more so beside other work."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """A byte-level data set whose training split holds 100 windows of 16 tokens."""
    from prepare import prepare

    folder = tmp_path_factory.mktemp("data")
    (folder / "text.txt").write_text(some_text(2000))
    return prepare(str(folder / "text.txt"), tokenizer="byte", val_fraction=0.2, workers=1, out=str(folder / "set"), quiet=True)


@pytest.fixture(scope="module")
def machines():
    """Namespaces bg<id>a and bg<id>b, each with an address on one cable; {"a": name, "b": name}."""
    tag = uuid.uuid4().hex[:6]
    names = {h: f"bg{tag}{h}" for h in HOSTS}

    def ip(*words):
        return subprocess.run(["ip", *words], capture_output=True, text=True)

    if not shutil.which("ip") or os.geteuid() or ip("netns", "add", names["a"]).returncode:
        pytest.skip("needs root, iproute2 and the right to make network namespaces")
    try:
        made = [ip("netns", "add", names["b"]), ip("link", "add", f"v{tag}a", "netns", names["a"], "type", "veth", "peer", "name", f"v{tag}b", "netns", names["b"])]
        for h, address in HOSTS.items():
            made += [ip("-n", names[h], "addr", "add", f"{address}/24", "dev", f"v{tag}{h}"), ip("-n", names[h], "link", "set", f"v{tag}{h}", "up"),
                     ip("-n", names[h], "link", "set", "lo", "up")]
        if any(m.returncode for m in made):
            pytest.skip("network namespaces cannot be joined here: " + "".join(m.stderr for m in made))
        yield {h: (names[h], f"v{tag}{h}") for h in HOSTS}
    finally:
        for name in names.values():
            ip("netns", "delete", name)


def write_records(folder, **splits):
    """A data set of records as prepare.py leaves one for SFT, by bytes. splits: train=[(ids, whether each is to be learnt)], val=..."""
    import numpy as np

    from data.shards import BEGIN, LABEL, ShardWriter, write_meta
    from data.tokenizers import load_tokenizer

    os.makedirs(folder, exist_ok=True)
    tokenizer, described = load_tokenizer("byte"), {}
    for split, found in splits.items():
        writer = ShardWriter(str(folder), split, tokenizer.vocab_size, shard_tokens=1000, marked=True)
        for ids, learn in found:
            marks = np.where(learn, LABEL, 0)
            marks[0] |= BEGIN
            writer.write(np.asarray(ids), marks)
        described[split] = {"shards": writer.close()}
    write_meta(folder, tokenizer, {"format_version": 1, "vocab_size": tokenizer.vocab_size, "tokenizer": tokenizer.identity(), "splits": described,
                                   "sft": {"train_on": "all"}})
    return str(folder)


def made_up_records(lengths, seed=0, labels=0.4):
    """[(ids, whether each is to be learnt)] for write_records: the last `labels` of each record's tokens are its answer."""
    import numpy as np

    rng = np.random.default_rng(seed)
    return [(rng.integers(97, 117, n), np.arange(n) >= n - max(1, round(labels * n))) for n in lengths]
