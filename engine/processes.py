"""Process management and communication backend: from torchrun's environment to ranks, device, backend and device mesh.

torchrun gives every process RANK, WORLD_SIZE, LOCAL_RANK and a key-value store at MASTER_ADDR:MASTER_PORT. What ranks must agree
on before the first collective (a wrong setting, missing data) goes through that store: it works while nothing else does.
"""

import contextlib
import datetime
import glob
import hashlib
import json
import math
import os
import secrets
import socket
import threading
import time
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from engine import attention, context_parallel, matmul, voice
from engine.config import ROOT, as_dict
from engine.errors import UserError
from engine.float8 import check_float8, check_tokens
from engine.loss import softmax_gradient
from engine.recovery import job_seconds

JOIN_SECONDS = int(os.environ.get("BORINGGPT_JOIN_SECONDS", 60))  # for every rank to show up
WORK_SECONDS = 3600  # for a rank that has work to do between two words: a checkpoint's checksums, a data set to prepare


@dataclass
class Place:
    """Where this process stands among the others."""

    rank: int = 0
    ranks: int = 1  # all there are: replicas x data-parallel shards x cp x tp, the last changing fastest
    local_rank: int = 0
    store: Any = None  # torchrun's key-value store; None where there is one process
    layout: str = "single"  # single | ddp | fsdp
    replicas: int = 1  # HSDP: copies of the sharded model
    cp: int = 1  # ranks that share each sequence
    tp: int = 1  # ranks that share each layer
    device: Any = None
    mesh: Any = None  # fsdp: how parameters are held, (dp_replicate, dp_shard[, tp]); ranks that share a sequence hold shards each
    context_group: Any = None  # cp: the ranks that share this one's sequences
    host: str = field(default_factory=socket.gethostname)
    hosts: list = field(default_factory=list)  # each rank's, once all have said so
    agreements: int = 0
    job_started: float = field(default_factory=lambda: time.monotonic() - job_seconds())  # of the oldest torchrun in it; on rank 0
    patience: int = JOIN_SECONDS  # seconds to wait for another rank's word; longer once all have come

    @property
    def groups(self):
        """Groups of cp * tp ranks that take micro-batches of their own: data parallelism."""
        return self.ranks // (self.cp * self.tp)

    @property
    def group(self):
        return self.rank // (self.cp * self.tp)

    @property
    def shards(self):
        """FSDP's cut of every parameter: ranks that share a sequence hold shards too."""
        return self.ranks // (self.replicas * self.tp) if self.layout == "fsdp" else 1

    @property
    def parts(self):
        """Ranks that hold parts of the model which differ; the ranks after them hold the same again."""
        return self.shards * self.tp

    @property
    def writes(self):
        """Whether this rank writes to checkpoints."""
        return self.rank < self.parts

    @property
    def shape(self):
        """The device mesh as a run's config.json has it."""
        sharded = self.layout == "fsdp"
        return {"dp_replicate": self.replicas, "dp_shard": self.groups // self.replicas if sharded else 1, "cp": self.cp, "tp": self.tp}

    @property
    def speaks(self):
        """Only one rank tells what all know."""
        return self.rank == 0

    @property
    def shard_group(self):
        return self.mesh["dp_shard"].get_group()

    @property
    def tensor_group(self):
        return self.mesh["tp"].get_group()

    @property
    def replica_group(self):
        return self.mesh["dp_replicate"].get_group()

    def say(self, sentence):
        """Prints, once for all ranks."""
        if self.speaks:
            voice.say(sentence)

    def meet(self):
        """Agrees with the other ranks on keys of their own for this start, and on how old the job is. torchrun's store may hold what an
        earlier start left, and its count of restarts is another on a machine that has just come: so each rank asks rank 0, under a word
        that nobody has used before, for the word that this start goes by."""
        deadline, word, age = time.monotonic() + JOIN_SECONDS, secrets.token_hex(8), job_seconds()
        if self.speaks:
            missing = set(range(1, self.ranks))
            while missing:
                for rank in sorted(missing):
                    if self.store.check([f"{word}/here/{rank}"]):
                        age = max(age, float(self.store.get(f"{word}/here/{rank}")))
                        missing.remove(rank)
                    elif self.store.check([f"asks/{rank}"]):
                        self.store.set(f"answer/{self.store.get(f'asks/{rank}').decode()}", word)
                if missing and time.monotonic() > deadline:
                    raise UserError(self.not_come(sorted(missing), JOIN_SECONDS))
                time.sleep(0.002)
        else:
            self.store.set(f"asks/{self.rank}", word)
            if not self.wait_for(f"answer/{word}", JOIN_SECONDS):
                raise UserError(self.not_come([0], JOIN_SECONDS))
            word = self.store.get(f"answer/{word}").decode()
            self.store.set(f"{word}/here/{self.rank}", str(age))
        self.job_started = time.monotonic() - age
        self.store = dist.PrefixStore(word, self.store)

    def not_come(self, ranks, seconds):
        return (f"after {seconds} s rank {', '.join(map(str, ranks))} of {self.ranks} had not come as far as rank {self.rank}: look at its own log; a host "
                "that cannot be reached or a different command on it are the usual causes")

    def from_first(self, value):
        """Rank 0's value (JSON-able) on every rank."""
        if self.store is None:
            return value
        self.agreements += 1
        key = f"first/{self.agreements}"
        if self.speaks:
            self.store.set(key, json.dumps(value))
        elif not self.wait_for(key, WORK_SECONDS):
            raise UserError(self.not_come([0], WORK_SECONDS))
        return json.loads(self.store.get(key))

    def wait_for(self, key, seconds):
        """Whether a key appears in the store within so many seconds. It is looked for: Python sees no signal inside the store's own wait, and
        each short wait of the store's that ends without the key is two lines of warnings in the log."""
        started = time.monotonic()
        while not self.store.check([key]):
            waited = time.monotonic() - started
            if waited > seconds:
                return False
            time.sleep(min(0.5, 0.001 + waited / 20))
        return True

    def own_store(self, name):
        """A connection to the store for another thread, with keys of its own: a wait in one holds up whoever shares it. None alone."""
        return self.store and dist.PrefixStore(name, self.store.clone())

    @contextlib.contextmanager
    def agreement(self):
        """A block of checks that all ranks make: where any of them finds a fault, all end here, and each fault is told once."""
        try:
            yield
            sentences = []
        except UserError as error:
            if self.store is None:
                raise
            sentences = list(error.sentences)
        if self.store is None:
            return
        self.agreements += 1
        found = self.tell_all(f"agreement/{self.agreements}", sentences)
        self.patience = WORK_SECONDS
        if any(found):
            raise UserError(*dict.fromkeys(s for rank in found for s in rank))

    def tell_all(self, key, value):
        """Every rank's value (JSON-able), in rank order, through the store; UserError that names ranks that did not come."""
        self.store.set(f"{key}/{self.rank}", json.dumps(value))
        found, missing, deadline = [], [], time.monotonic() + self.patience
        for rank in range(self.ranks):
            if self.wait_for(f"{key}/{rank}", max(1, deadline - time.monotonic())):
                found.append(json.loads(self.store.get(f"{key}/{rank}")))
            else:
                missing.append(rank)
        if missing:
            raise UserError(self.not_come(missing, self.patience))
        return found


def join() -> Place:
    """This process's Place: alone, or one of torchrun's, connected to its store."""
    if not {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR"} <= set(os.environ):
        return Place()
    place = Place(rank=int(os.environ["RANK"]), ranks=int(os.environ["WORLD_SIZE"]), local_rank=int(os.environ["LOCAL_RANK"]))
    store, _, _ = next(dist.rendezvous("env://", timeout=datetime.timedelta(seconds=JOIN_SECONDS)))
    place.store = dist.PrefixStore("boringgpt", store)
    place.meet()
    return place


def choose_layout(place, config):
    """single, ddp or fsdp, and how many replicas; UserError where the ranks do not fit the settings."""
    layout, shared = config.parallel, config.cp * config.tp
    if layout == "auto":
        layout = "fsdp" if config.dp_replicate > 1 or config.tp > 1 else "ddp" if place.ranks > 1 or config.cp > 1 else "single"
    problems = []
    if layout in ("ddp", "fsdp") and place.store is None:
        problems.append(f"parallel={layout} needs the processes that torchrun starts: torchrun --standalone --nproc_per_node=N train.py ...; "
                        "python train.py alone takes parallel=single")
    if layout == "single" and place.ranks > 1:
        problems.append(f"parallel=single, but torchrun started {place.ranks} processes: parallel=ddp or fsdp would use them")
    if config.dp_replicate > 1 and layout != "fsdp":
        problems.append(f"dp_replicate={config.dp_replicate} makes replicas of a sharded model: parallel=fsdp would work")
    elif place.store is not None and place.ranks % (config.dp_replicate * shared):
        problems.append(wrong_mesh(place.ranks, config))
    if config.tp > 1 and layout != "fsdp" and place.store is not None:
        problems.append(f"tp={config.tp} under parallel={layout}: what tensor parallelism leaves whole is kept by fsdp, on one shard too; parallel=fsdp "
                        "or auto would work")
    if config.deterministic and place.ranks & (place.ranks - 1):
        problems.append(f"deterministic=True sums in a binary tree over the processes: {place.ranks} is no power of two, "
                        f"{1 << (place.ranks.bit_length() - 1)} or {1 << place.ranks.bit_length()} would work")
    if problems:
        raise UserError(*problems)
    place.layout, place.replicas, place.cp, place.tp = layout, config.dp_replicate, config.cp, config.tp


def wrong_mesh(ranks, config):
    """The sentence on a mesh whose sizes do not divide the number of processes."""
    asked = {k: getattr(config, k) for k in ("dp_replicate", "cp", "tp") if getattr(config, k) > 1}
    product = math.prod(asked.values())
    works = []
    for key, value in asked.items():
        others = product // value
        fits = [str(v) for v in range(1, ranks + 1) if ranks % (others * v) == 0]
        works += [f"{key}={' or '.join(fits)}"] if fits else []
    works.append(f"{-(-ranks // product) * product} processes")
    return f"{' * '.join(f'{k}={v}' for k, v in asked.items())} does not divide {ranks} processes: {', or '.join(works)} would work"


def choose_device(requested: str) -> torch.device:
    """The torch.device for `requested` (auto | cpu | cuda | cuda:N | mps); auto takes the fastest there is."""
    if requested == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
        return torch.device(name)
    try:
        device = torch.device(requested)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda", "mps"):
        raise UserError(f"device={requested}: expected auto, cpu, cuda, cuda:N or mps")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UserError(f"device={requested}: torch sees {torch.cuda.device_count()} CUDA devices here; device=auto would work")
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise UserError(f"device={requested}: torch sees no MPS device here; device=auto would work")
    return device


@dataclass
class Precision:
    """What the matrix products are computed in, and whether small gradients need scaling up to survive it."""

    dtype: str
    autocast: torch.dtype | None
    loss_scaling: bool

    @property
    def element(self):
        """Bytes of a number that matrix products read."""
        return self.autocast.itemsize if self.autocast else 4

    def context(self, device_type):
        return torch.autocast(device_type, self.autocast) if self.autocast else contextlib.nullcontext()


def choose_precision(device_type: str, requested: str, bf16_supported: bool) -> Precision:
    """The Precision for a device type (cpu, cuda, mps) and a dtype setting; a pure function, so that it has a table test.

    auto: bfloat16 on a CUDA device that has it, else float16 there; float32 on mps and cpu (bfloat16 is slower on a CPU
    without matrix units for it).
    """
    if requested == "auto":
        requested = ("bfloat16" if bf16_supported else "float16") if device_type == "cuda" else "float32"
    if requested == "bfloat16" and device_type == "cuda" and not bf16_supported:
        raise UserError("dtype=bfloat16: this CUDA device does not have it; dtype=float16 or float32 would work")
    if requested == "float32":
        return Precision("float32", None, False)
    return Precision(requested, getattr(torch, requested), requested == "float16")


def use_device(config) -> tuple[torch.device, Precision]:
    """Takes the device and the numbers that a config asks for; returns (device, Precision) and writes them into the config."""
    device = choose_device(config.device)
    if config.threads:
        torch.set_num_threads(config.threads)
    if device.type == "cpu":
        matmul.set_allocator()
    bf16 = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    precision = choose_precision(device.type, config.dtype, bf16)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.backends.cuda.matmul.allow_tf32 = True  # as nanoGPT: float32 products on the tensor cores
        torch.backends.cudnn.allow_tf32 = True
    config.device, config.dtype = device.type, precision.dtype
    if config.compile is None:
        config.compile = device.type == "cuda"
    return device, precision


def use_attention(kind: str) -> None:
    """auto: the fastest kernel there is; plain: none, on a CPU either, whatever the names of the switches say."""
    for switch in (torch.backends.cuda.enable_flash_sdp, torch.backends.cuda.enable_mem_efficient_sdp, torch.backends.cuda.enable_cudnn_sdp):
        switch(kind != "plain")


def start(place: Place, config) -> tuple[Precision, str]:
    """Sets this process up as the config says, alone or among others; returns (Precision, backend) and fills in the Place."""
    choose_layout(place, config)
    if config.deterministic:
        if "threads" not in config.given:
            config.threads = 1  # a LayerNorm's weight gradient has other last bits on two threads
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # a debugging aid that costs a pass over each new tensor
    if place.store is not None and config.device in ("auto", "cuda") and torch.cuda.is_available():
        config.device = f"cuda:{place.local_rank}"  # each process of a machine its own
    place.device, precision = use_device(config)
    use_attention(config.attention)
    if config.float8:
        check_float8(config, place.device)
    backend = ("nccl" if place.device.type == "cuda" else "gloo") if config.backend == "auto" else config.backend
    if place.store is not None or config.given.get("backend") == "command line":  # nanoGPT's configs name one on a single process too
        if backend == "nccl" and place.device.type != "cuda":
            raise UserError(f"backend=nccl works on cuda devices and this run is on {place.device.type}: backend=gloo or auto would work")
        if backend == "gloo" and place.device.type == "cuda":
            raise UserError("backend=gloo does not carry cuda tensors here: backend=nccl or auto would work, or device=cpu")
    return precision, backend


def check_batch(place: Place, config) -> None:
    """UserError unless the update's micro-batches can be shared out evenly, and each sequence and layer."""
    if config.float8:
        check_tokens(config)
    if place.cp > 1:
        from engine.context_parallel import check_context
        check_context(config, place)
    if place.tp > 1:
        from engine.tensor_parallel import check_tensor
        check_tensor(config, place)
    if config.micro_batches % place.groups:
        works = [str(w) for w in range(1, config.micro_batches + 1) if config.micro_batches % w == 0 and not (config.deterministic and w & (w - 1))]
        sizes = [b for b in range(1, config.batch_size) if config.total_batch_size % (b * config.block_size * place.groups) == 0]
        takers = "processes" if place.groups == place.ranks else f"groups of cp * tp = {place.cp} * {place.tp} processes"
        smaller = f"batch_size={sizes[-1]} (the same curve in smaller micro-batches), " if sizes else ""
        raise UserError(f"an update of {config.micro_batches} micro-batches (total_batch_size={config.total_batch_size} over batch_size * block_size = "
                        f"{config.batch_size} * {config.block_size}) cannot be shared by {place.groups} {takers}: {', '.join(works)} would work, or "
                        f"{smaller}total_batch_size={-(-config.micro_batches // place.groups) * place.groups * config.batch_size * config.block_size} (another curve)")


def compare_ranks(place, config, data_fingerprint):
    """UserError unless all machines run the same code on the same settings and tokens; paths and names may differ."""
    if place.store is None:
        return
    local_keys = ("out_dir", "dataset", "general_dataset", "replay_dataset", "init_from", "hellaswag", "wandb_run_name")
    settings = {k: v for k, v in as_dict(config).items() if k not in local_keys}
    digest = hashlib.sha256()
    for folder in ("", "engine", "data"):
        for path in sorted(glob.glob(os.path.join(glob.escape(ROOT), folder, "*.py"))):
            with open(path, "rb") as f:
                digest.update(f.read())
    said = place.tell_all("settings", {"settings": settings, "code": digest.hexdigest(), "data": data_fingerprint, "host": place.host})
    place.hosts = [other["host"] for other in said]
    first, problems = said[0], []
    for rank, other in enumerate(said):
        where = f"rank {rank} on {other['host']}"
        problems += [f"{k}={other['settings'][k]} on {where}, {k}={v} on rank 0: start every machine with the same settings"
                     for k, v in first["settings"].items() if other["settings"].get(k) != v]
        if other["code"] != first["code"]:
            problems.append(f"{where} runs other code than rank 0: bring every machine to the same version")
        if other["data"] != first["data"]:
            problems.append(f"the data set (or the file of hellaswag) on {where} holds other tokens than that of rank 0: copy it, or prepare it there in the same way")
    if problems:
        raise UserError(*problems)


def check_shared_folder(place: Place, run: str) -> None:
    """UserError where FSDP's ranks do not all see the run's folder, into which each writes its shards."""
    if place.layout != "fsdp" or place.ranks == 1:
        return
    path = os.path.join(run, place.from_first(f".seen_{os.getpid()}_{time.time_ns()}"))
    try:
        if place.speaks:
            open(path, "x").close()
        place.tell_all("written", True)
        sees = place.tell_all("seen", os.path.exists(path))
    finally:
        if place.speaks and os.path.exists(path):
            os.unlink(path)
    if not all(sees):
        blind = ", ".join(str(r) for r, s in enumerate(sees) if not s)
        raise UserError(f"rank {blind} does not see what rank 0 writes into out_dir={place.from_first(run)}: under FSDP every rank writes its shards "
                        "there, so a disk that all machines share would work, or parallel=ddp, which needs none")


def connect(place: Place, backend: str) -> None:
    """Makes the process group and the device mesh, and lets a first all-reduce pass: after this, collectives work."""
    if place.store is None:
        return
    with names_the_missing(place):
        dist.init_process_group(backend, store=dist.PrefixStore("group", place.store), rank=place.rank, world_size=place.ranks,
                                timeout=datetime.timedelta(seconds=WORK_SECONDS), device_id=place.device if place.device.type == "cuda" else None)
        if place.layout == "fsdp":
            shape = {"dp_replicate": place.replicas, "dp_shard": place.shards} | ({"tp": place.tp} if place.tp > 1 else {})
            place.mesh = dist.init_device_mesh(place.device.type, tuple(shape.values()), mesh_dim_names=tuple(shape))
        if place.cp > 1:
            place.context_group = dist.init_device_mesh(place.device.type, (place.groups, place.cp, place.tp),
                                                        mesh_dim_names=("dp", "cp", "tp"))["cp"].get_group()
        ones = torch.ones((), device=place.device)
        dist.all_reduce(ones)
        if ones.item() != place.ranks:
            raise RuntimeError(f"a first all-reduce over {place.ranks} ranks gave {ones.item()}")


@contextlib.contextmanager
def names_the_missing(place):
    """Around the first collective, which hangs where the network does: after JOIN_SECONDS rank 0 says who has not come through."""
    store = place.store.clone()  # a connection of its own: the other one may be waiting

    def give_up():
        store.add("failed", 1)  # what other ranks meet from here on follows from this
        missing = [str(r) for r in range(place.ranks) if not store.check([f"through/{r}"])]
        voice.warn(f"error: rank {', '.join(missing)} of {place.ranks} did not come through a first all-reduce in {JOIN_SECONDS} s, though the store at "
              f"{os.environ.get('MASTER_ADDR')} was reached: where a machine has several networks, NCCL_SOCKET_IFNAME (GLOO_SOCKET_IFNAME on CPU) names "
              "the one to take; without InfiniBand, NCCL_IB_DISABLE=1")
        os._exit(1)

    timer = threading.Timer(JOIN_SECONDS, give_up if place.speaks else lambda: None)
    timer.daemon = True
    timer.start()
    yield
    place.store.set(f"through/{place.rank}", "1")
    place.store.wait([f"through/{r}" for r in range(place.ranks)], datetime.timedelta(seconds=JOIN_SECONDS))
    timer.cancel()


def set_timeout(place: Place, seconds: float) -> None:
    """How long a collective may take from here on: short in the loop's steps, where a rank that is late is a rank that is lost."""
    if place.store is None:
        return
    groups = [dist.group.WORLD] + ([place.shard_group, place.replica_group] if place.mesh else []) + ([place.context_group] if place.cp > 1 else []) \
        + ([place.tensor_group] if place.tp > 1 else [])
    for group in groups:
        dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=seconds), group)


def disconnect():
    """Leaves the process group, once all ranks have come here."""
    if dist.is_initialized():
        dist.barrier()  # nobody closes the door on one who is still saving
        dist.destroy_process_group()


def compile_blocks(model, device, say):
    """torch.compile on each block: one compilation serves all, and parameter names stay plain; and on the loss between its products. Eager, with one warning, where
    the compiler it needs is missing."""
    from torch._inductor import cpp_builder

    try:
        cpp_builder.get_cpp_compiler()  # on a GPU too: it builds the kernels' launchers
    except Exception as error:
        say(f"warning: compile=True needs a C++ compiler and there is none ({str(error).splitlines()[0]}): running eagerly; "
            "install g++ or clang++ to compile")
        return
    # Pieces of rows are others in each batch: compiled, they would be so again and again. As a decorator where they are defined,
    # disable would import torch._dynamo, a second of every start.
    attention.attend_in_pieces = torch.compiler.disable(attention.attend_in_pieces)
    context_parallel.Part.attend = torch.compiler.disable(context_parallel.Part.attend)
    for block in model.blocks:
        block.compile()
    model.softmax = torch.compile(softmax_gradient, dynamic=False)
