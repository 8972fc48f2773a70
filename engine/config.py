"""A run's settings: defaults, then a config file, then the command line, each value checked.

Names that nanoGPT has mean what they mean there, and its config files run as they are. `python train.py --help` prints
the class Config below: it is the reference.
"""

import dataclasses
import difflib
import inspect
import math
import os
import runpy
import subprocess
import sys
import types
import typing
from dataclasses import dataclass

from engine import lora, matmul
from engine.errors import UserError
from model import ModelConfig

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


@dataclass
class Config:
    """Every setting of a run. A value comes from here, a config file or the command line, the last of these counts; None: found at the start."""

    # the run
    out_dir: str | None = None  # the run's folder (default: out/<name of the config file>)
    seed: int = 1337  # weights, data order and dropout follow from it
    max_iters: int = 600_000  # updates to make; the last one is always saved (num_epochs says it in another way)
    # scratch | a run or checkpoint folder to branch from | a nanoGPT ckpt.pt | a Hugging Face folder or name (NAME@REVISION) | resume; --model too
    init_from: str = "scratch"
    init_optimizer: bool = True  # branching from a checkpoint of ours takes the optimizer's state along
    resize_vocab: bool = False  # the vocabulary of init_from's weights may grow to vocab_size or the data's: new rows start from first values
    resume: str = "auto"  # auto: the same command goes on where it stopped | never: an earlier run is set aside
    resume_step: int | None = None  # go back to the checkpoint of this step (later ones are set aside)
    plan: int = 0  # train nothing, say what the run takes on this many processes (0: train)
    plan_gpu: str = "H100"  # the GPU that a plan is for
    rehearse: bool = False  # train nothing, try the run at toy size with a process killed on the way
    profile: int = 0  # updates to put under torch.profiler, after three that warm up: a table and a trace (0: none)
    comm_report: int = 0  # updates of which to tell what ranks send each other and how long they wait, after three that warm up (0: none)
    check: bool = False  # train nothing, see whether the processes reach each other and how fast
    allow_change: bool = False  # resume although something that changes the curve was changed

    # model; see ModelConfig in model.py
    n_layer: int = 12
    n_head: int = 12
    n_kv_head: int | None = None
    n_embd: int = 768
    head_dim: int | None = None
    mlp_hidden: int | None = None
    block_size: int = 1024
    vocab_size: int | None = None  # default: the tokenizer's
    bias: bool = False
    qkv_bias: bool | None = None
    o_bias: bool | None = None
    dropout: float = 0.0
    norm: str = "layernorm"  # layernorm | rmsnorm
    norm_eps: float = 1e-5
    pos: str = "learned"  # learned | rope
    rope_theta: float = 10000.0
    rope_scaling: float | None = None  # pos=rope: a context so many times as long as the one of the model that goes on
    rope_scaling_type: str = "llama3"  # llama3 | linear (position interpolation) | yarn
    rope_original_context: int = 8192  # llama3, yarn (default with init_from: the context of those weights)
    rope_low_freq_factor: float = 1.0
    rope_high_freq_factor: float = 4.0
    rope_beta_slow: float = 1.0
    rope_beta_fast: float = 32.0
    rope_attention_factor: float | None = None
    mlp: str = "gelu"  # gelu (exact, as nanoGPT) | gelu_tanh (as OpenAI's GPT-2) | swiglu | relu2
    qk_norm: bool = False
    tie_embeddings: bool = True

    # data and batch
    task: str = "pretrain"  # pretrain | sft: records (questions and answers, chats) of which the answers alone are learnt
    dataset: str = "openwebtext"  # a folder, or the name of one under data/; sft: also a file or folder of records, or a data set of the hub
    num_epochs: float | None = None  # how often to see all of the data: max_iters follows from it
    document_mask: bool = False  # attention and positions stay inside each document of a window, as the end-of-text token tells them
    train_on: str = "all"  # sft: all | last, which answers of a conversation are learnt
    pack: bool = True  # sft: as many records a row as there is room for, each attended alone | False: one a row, padded
    fields: str | None = None  # sft: the names of the records' fields where they are not found by themselves, as prepare.py takes them
    skip_bad: bool = False  # sft: count bad records instead of stopping at the first
    general_dataset: str | None = None  # a prepared data set whose loss is told beside the validation loss: what a run costs on other text
    replay_dataset: str | None = None  # sft: a prepared data set, windows of which are trained on between the records, against forgetting
    replay_fraction: float = 0.0  # and the part of the samples that they are
    batch_size: int = 12  # sequences a process takes at a time: a micro-batch
    total_batch_size: int | None = None  # tokens an update is made of, over all micro-batches and processes
    gradient_accumulation_steps: int | None = None  # nanoGPT's way to say it: micro-batches an update (default 40)

    # optimizer
    optimizer: str = "adamw"  # adamw | muon (on the blocks' matrices, AdamW on the rest)
    learning_rate: float = 6e-4
    muon_learning_rate: float = 0.02  # of Muon's matrices; it follows the same schedule
    min_lr: float | None = None  # where the decay ends (default: learning_rate / 10)
    lr_schedule: str = "cosine"  # cosine | wsd | linear | constant, each after the warmup
    warmup_iters: int = 2000
    lr_decay_iters: int | None = None  # the update at which min_lr is reached (default: max_iters of the first start)
    decay_fraction: float = 0.2  # wsd: the part of lr_decay_iters that the final, linear decay takes
    weight_decay: float = 0.1  # on matrices and embeddings, not on biases and norms
    beta1: float = 0.9
    beta2: float = 0.95
    grad_clip: float = 1.0  # 0: no clipping
    lora_rank: int = 0  # 0: all weights are trained | r: they are frozen, and low-rank adapters beside the blocks' matrices are trained
    lora_alpha: float | None = None  # what an adapter adds is times lora_alpha / lora_rank (default: 2 lora_rank)
    lora_targets: str = "all"  # the matrices that have one: all, or a list such as q,v out of q,k,v,o,gate,up,down

    # the scale: how the processes that torchrun starts share the work
    parallel: str = "auto"  # auto (ddp under torchrun, else single) | single | ddp | fsdp
    dp_replicate: int = 1  # fsdp: copies of the sharded model (HSDP); shards in each are the processes over this
    cp: int = 1  # context parallelism: processes that share every sequence, a head and a tail part each
    tp: int = 1  # tensor parallelism: processes that share every layer
    deterministic: bool = False  # the same bits on 1, 2, 4, 8 processes: sums in a fixed order, 1 thread unless told
    reshard_after_forward: bool = True  # fsdp: free a block's gathered parameters until its backward
    cpu_offload: bool = False  # fsdp: shards live in CPU memory
    # none | selective: compute a block's MLP again in the backward instead of keeping what is in it | block: the whole block
    activation_checkpointing: str = "none"
    activation_budget: float | None = None  # GB a device for what a micro-batch keeps for its backward: each block gets the cheapest of these that fits
    check_replicas_interval: int = 0  # updates between comparisons of the replicas' parameters (0: none)
    collective_seconds: int = 300  # how long a collective of a step may wait for a late rank before the run is given up

    # the machine
    device: str = "auto"  # auto | cpu | cuda | cuda:N | mps
    dtype: str = "auto"  # auto | float32 | bfloat16 | float16
    float8: bool = False  # the blocks' matrix products in float8, by torchao, on a GPU that has it (Ada, Hopper and later)
    compile: bool | None = None  # torch.compile, a block at a time (default: on cuda)
    attention: str = "auto"  # auto (the fastest kernel there is) | plain (scores written out: to see whether a kernel is at fault)
    threads: int = 0  # CPU threads (0: as torch chooses)
    backend: str = "auto"  # of torch.distributed: auto (nccl on cuda, else gloo) | nccl | gloo

    # checkpoints
    save_interval: int | None = None  # updates between checkpoints (default: eval_interval)
    keep_last: int = 2  # checkpoints to keep (-1: all)
    keep_every: int = 0  # also keep each checkpoint whose step is a multiple of this (0: none)

    async_save: bool = False  # write in the background: state is read where it lies, only what the next update would change is copied before it does

    # recovery
    max_bad_steps: int = 3  # updates in a row skipped for a loss or gradient that is not finite, before going back to the last checkpoint
    watchdog_seconds: int = 600  # without a sign of life of the loop, before all ranks print their stacks and end (0: never)
    time_limit: float = 0.0  # seconds after which the run saves and leaves, counted from the start of the command (0: none)

    # evaluation and logs
    eval_interval: int = 2000  # updates between evaluations (0: none)
    eval_tokens: int | None = None  # validation tokens (default: eval_iters * batch_size * block_size)
    eval_only: bool = False
    hellaswag: str | None = None  # score this .jsonl at each evaluation: a path, or OWNER/NAME/FILE.jsonl on the hub
    hellaswag_items: int = 0  # the first so many of its items (0: all 10,042)
    log_interval: int = 1  # updates between lines on the console; metrics.jsonl has every update
    sample_interval: int = 0  # updates between sample texts (0: one at the end)
    sample_tokens: int = 256  # length of a sample text (0: none)
    wandb_log: bool = False
    wandb_project: str = "boringgpt"
    wandb_run_name: str | None = None  # default: the name of the run's folder
    tensorboard_log: bool = False  # event files in the run's folder; needs the package tensorboard

    # nanoGPT's other names, turned into the ones above
    eval_iters: int = 200
    decay_lr: bool = True  # False: lr_schedule=constant, warmup_iters=0
    always_save_checkpoint: bool = True  # False: keep_last=1; the best by validation loss is kept apart in any case

    def __post_init__(self):
        self.given = {}  # key -> where its value comes from, for those that do not come from the defaults

    @property
    def micro_batches(self):
        return self.total_batch_size // (self.batch_size * self.block_size)


FIELDS = {f.name: f for f in dataclasses.fields(Config)}


def reference():
    """Every setting with what is to be said about it, as it stands in this file and in model.py."""
    return "\n".join(inspect.getsource(kind).partition("\n    def ")[0] for kind in (Config, ModelConfig))


# What a change of a setting means to a run that goes on. Architecture: it cannot. Curve: only when asked for. Rest: free.
ROPE = ("rope_theta rope_scaling rope_scaling_type rope_original_context rope_low_freq_factor rope_high_freq_factor rope_beta_slow rope_beta_fast "
        "rope_attention_factor").split()  # which positions turn how far: weights with rope fit any of it, and have to learn it
ARCHITECTURE = [*"n_layer n_head n_kv_head n_embd head_dim mlp_hidden block_size vocab_size bias qkv_bias o_bias norm norm_eps pos".split(), *ROPE,
                *"mlp qk_norm tie_embeddings".split()]
ADAPTERS = ("lora_rank", "lora_alpha", "lora_targets")  # what the trained parameters are: as fixed as the architecture
CURVE = ("seed dropout batch_size total_batch_size optimizer learning_rate muon_learning_rate min_lr lr_schedule warmup_iters lr_decay_iters "
         "decay_fraction weight_decay beta1 beta2 grad_clip dtype float8 deterministic task train_on pack document_mask replay_fraction").split()

# Other words for settings above, and what asks for something else than a run
NOT_OF_A_RUN = "eval_iters decay_lr always_save_checkpoint plan plan_gpu rehearse profile check".split()

OTHER_NAMES = {"model": "init_from"}

CHOICES = {
    "task": ("pretrain", "sft"),
    "train_on": ("all", "last"),
    "resume": ("auto", "never"),
    "optimizer": ("adamw", "muon"),
    "lr_schedule": ("cosine", "wsd", "linear", "constant"),
    "dtype": ("auto", "float32", "bfloat16", "float16"),
    "backend": ("auto", "nccl", "gloo"),
    "attention": ("auto", "plain"),
    "parallel": ("auto", "single", "ddp", "fsdp"),
    "activation_checkpointing": ("none", "selective", "block"),
}
AT_LEAST = {
    "max_iters": 0, "batch_size": 1, "total_batch_size": 1, "gradient_accumulation_steps": 1, "warmup_iters": 0,
    "lr_decay_iters": 1, "threads": 0, "save_interval": 1, "keep_every": 0, "eval_interval": 0, "eval_tokens": 1,
    "eval_iters": 1, "log_interval": 1, "sample_interval": 0, "sample_tokens": 0, "max_bad_steps": 1, "learning_rate": 0, "muon_learning_rate": 0,
    "min_lr": 0, "weight_decay": 0, "grad_clip": 0, "resume_step": 0, "seed": 0, "dp_replicate": 1, "cp": 1, "tp": 1, "check_replicas_interval": 0,
    "collective_seconds": 1, "lora_rank": 0, "plan": 0, "profile": 0, "comm_report": 0, "hellaswag_items": 0, "watchdog_seconds": 0, "time_limit": 0,
}


# ------------------------------------------------------------------------------------------------ reading one value


def expected_type(field):
    """(type, whether None is allowed) of a dataclass field annotated T or T | None."""
    options = typing.get_args(field.type)
    return (options[0], True) if options else (field.type, False)


FORMS = {int: "an integer, such as 1000", float: "a number, such as 3e-4", bool: "true or false", str: "a text"}


def check_value(field, value, where):
    """The value of a config file's assignment as the field's type; UserError where it is another one."""
    key, (kind, optional) = field.name, expected_type(field)
    if value is None and optional:
        return None
    if kind is float and type(value) is int:
        return float(value)
    if kind is bool and type(value) is int and value in (0, 1):
        return bool(value)
    if type(value) is not kind:
        raise UserError(f"{where}: {key}={value!r} is {_a(type(value).__name__)}, expected {FORMS[kind]}")
    if kind is float and not math.isfinite(value):
        raise UserError(f"{where}: {key}={value} is not finite, expected {FORMS[kind]}")
    return value


def parse_value(field, text, where):
    """The value that a command-line text stands for."""
    key, (kind, optional) = field.name, expected_type(field)
    if optional and text.lower() == "none":
        return None
    if kind is bool:
        if text.lower() in ("true", "false", "1", "0"):
            return text.lower() in ("true", "1")
    elif kind is str:
        return text
    else:
        try:
            return check_value(field, kind(text), where)
        except ValueError:
            pass
    raise UserError(f"{where}: {key}={text!r}: expected {FORMS[kind]}")


def _a(noun):
    return f"an {noun}" if noun[0] in "aeiou" else f"a {noun}"


def nearest(name, names):
    """', did you mean X?' for the nearest of `names`, or nothing."""
    initials = [n for n in names if name and "".join(part[0] for part in n.split("_") if part) == name]  # lr, wd
    found = initials or difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f"; did you mean {found[0]}?" if found else ""


# ---------------------------------------------------------------------------------------------- reading all of them


def find_config_file(name):
    """The path of a config file given as a path (here, or in the repository) or as a rung's bare name."""
    for path in (name, os.path.join(ROOT, name), os.path.join(ROOT, "configs", name + ".py")):
        if os.path.isfile(path):
            return path
    rungs = sorted(f[:-3] for f in os.listdir(os.path.join(ROOT, "configs")) if f.endswith(".py"))
    if "=" in name:
        raise UserError(f"{name} is neither a config file nor an option: did you mean --{name}?")
    stem = os.path.splitext(os.path.basename(name))[0]
    raise UserError(f"there is no config file {name}{nearest(stem, rungs)}; the rungs in configs/ are {', '.join(rungs)}")


def read_config_file(path, known):
    """The assignments of a config file, checked; names that start with _, modules and functions are its own business."""
    if ROOT not in sys.path:
        sys.path.insert(0, ROOT)  # for `from configs.gpt2_124m import *`
    try:
        found = runpy.run_path(path)
    except UserError:
        raise
    except SyntaxError as error:
        raise UserError(f"{path}, line {error.lineno}: not Python: {error.msg}") from None
    except (Exception, SystemExit) as error:
        raise UserError(f"{path}: running it failed: {type(error).__name__}: {error}") from None
    values, problems = {}, []
    for name, value in found.items():
        key = OTHER_NAMES.get(name, name)
        if key.startswith("_") or isinstance(value, (types.ModuleType, type)) or callable(value):
            continue
        if key not in known:
            problems.append(f"{path}: unknown setting {key!r}{nearest(key, known)}")
            continue
        try:
            values[key] = check_value(known[key], value, path)
        except UserError as error:
            problems += error.sentences
    if problems:
        raise UserError(*problems)
    return values


def read_command_line(argv, known):
    """(config files, {key: value}) from `file.py --key=value --key value --flag ...`; the last of a key counts."""
    files, values, problems = [], {}, []
    words = list(argv)
    while words:
        word = words.pop(0)
        if not word.startswith("-"):
            files.append(word)
            continue
        key, equals, text = word.lstrip("-").partition("=")
        key = OTHER_NAMES.get(key, key)
        if key not in known:
            problems.append(f"command line: unknown setting {word.split('=')[0]!r}{nearest(key, known)}")
            if not equals and words and not words[0].startswith("--"):
                words.pop(0)
            continue
        if not equals:
            is_flag = expected_type(known[key])[0] is bool and (not words or words[0].lower() not in ("true", "false", "1", "0"))
            if is_flag:
                text = "true"
            elif words and not words[0].startswith("--"):
                text = words.pop(0)
            else:
                problems.append(f"command line: --{key} has no value, expected {FORMS[expected_type(known[key])[0]]}")
                continue
        try:
            values[key] = parse_value(known[key], text, "command line")
        except UserError as error:
            problems += error.sentences
    if problems:
        raise UserError(*problems)
    return files, values


def read_settings(settings, argv, default_file=None):
    """Sets the fields of a dataclass object from config files and the command line; returns (given, the last file or None).

    given: {key: where its value comes from}, for those that do not come from the defaults.
    """
    known = {f.name: f for f in dataclasses.fields(settings)}
    files, values = read_command_line(argv, known)
    files = [find_config_file(f) for f in files or [default_file] if f]
    sources = [(path, read_config_file(path, known)) for path in files] + [("command line", values)]
    given = {}
    for where, found in sources:
        for key, value in found.items():
            setattr(settings, key, value)
            given[key] = where
    return given, files[-1] if files else None


def load_config(argv, default_file):
    """The Config that a command line asks for, its values checked one by one; resolve() checks them together."""
    config = Config()
    config.given, file = read_settings(config, argv, default_file)
    if config.out_dir is None:
        config.out_dir = os.path.join("out", os.path.splitext(os.path.basename(file))[0])
    check_ranges(config)
    check_task(config)
    return config


def check_ranges(config):
    """UserError with a sentence for each setting that no run could use."""
    c, problems = config, []
    for key, choices in CHOICES.items():
        if getattr(c, key) not in choices:
            problems.append(f"{key}={getattr(c, key)}: expected one of {', '.join(choices)}{nearest(getattr(c, key), choices)}")
    for key, least in AT_LEAST.items():
        if getattr(c, key) is not None and getattr(c, key) < least:
            problems.append(f"{key}={getattr(c, key)}: expected at least {least}")
    for key in ("beta1", "beta2"):
        if not 0 <= getattr(c, key) < 1:
            problems.append(f"{key}={getattr(c, key)}: expected a number from 0 up to, but not, 1")
    if not 1e-6 <= c.decay_fraction <= 1:
        problems.append(f"decay_fraction={c.decay_fraction}: expected a number above 0, 1 at most, such as 0.2")
    if not c.out_dir:
        problems.append("out_dir is empty: expected the path of the run's folder, such as out/run")
    if c.optimizer == "muon" and c.learning_rate == 0:
        problems.append("learning_rate=0 with optimizer=muon, whose rate follows it: expected a number above 0")
    if c.activation_budget is not None and c.activation_budget <= 0:
        problems.append(f"activation_budget={c.activation_budget:g}: expected GB above 0, such as 20")
    if c.activation_budget is not None and c.activation_checkpointing != "none":
        problems.append(f"activation_checkpointing={c.activation_checkpointing} and activation_budget={c.activation_budget:g}, which chooses it block by "
                        "block: leave one of the two out (activation_checkpointing=none where a config file has it)")
    if c.lora_alpha is not None and c.lora_alpha <= 0:
        problems.append(f"lora_alpha={c.lora_alpha}: expected a number above 0, such as 2 * lora_rank")
    if c.lora_rank > 0 and "init_from" not in c.given:
        problems.append(f"lora_rank={c.lora_rank} adapts weights that are there already: expected init_from=, a run, a Hugging Face folder or name "
                        "(init_from=scratch where random frozen weights are meant)")
    if c.lora_rank > 0 and c.resize_vocab:
        problems.append(f"resize_vocab adds rows of first values, which lora_rank={c.lora_rank} would freeze: expected one of the two")
    if c.hellaswag and not c.eval_interval and not c.eval_only:
        problems.append(f"hellaswag={c.hellaswag} is scored at each evaluation and eval_interval=0 has none: eval_interval=250 would work")
    if c.threads > 4 * (os.cpu_count() or 1):
        problems.append(f"threads={c.threads}: this machine has {os.cpu_count()} cores")
    if c.keep_last == 0 or c.keep_last < -1:
        problems.append(f"keep_last={c.keep_last}: expected a number of checkpoints from 1 on, or -1 for all")
    if problems:
        raise UserError(*problems)


def check_task(config):
    """UserError where settings of the data contradict each other. Of max_iters and num_epochs what was typed counts."""
    c, problems = config, []
    if c.num_epochs is not None and c.given.get("max_iters") == "command line":
        if c.given["num_epochs"] == "command line":
            problems.append(f"max_iters={c.max_iters} and num_epochs={c.num_epochs:g} both say how long to train: give one of the two")
        c.num_epochs = None
    if c.num_epochs is not None and c.num_epochs <= 0:
        problems.append(f"num_epochs={c.num_epochs:g}: expected a number above 0, such as 3 or 0.5")
    if not 0 <= c.replay_fraction < 1:
        problems.append(f"replay_fraction={c.replay_fraction:g}: expected a number from 0 up to, but not, 1, such as 0.1")
    if bool(c.replay_dataset) != bool(c.replay_fraction):
        problems.append(f"replay_dataset={c.replay_dataset} with replay_fraction={c.replay_fraction:g}: replaying text takes both, such as "
                        "--replay_dataset=stdlib --replay_fraction=0.1")
    if c.task != "sft":
        problems += [f"{key}={getattr(c, key)} is about records, which task=sft trains on: leave it out, or give --task=sft"
                     for key in ("train_on", "pack", "fields", "skip_bad", "replay_dataset") if getattr(c, key) != FIELDS[key].default]
    if problems:
        raise UserError(*problems)


def resolve(config):
    """Turns nanoGPT's names into ours and fills in what follows from other settings; UserError where the batch does not fit."""
    c = config
    if not c.decay_lr:
        c.lr_schedule, c.warmup_iters = "constant", 0
    if not c.always_save_checkpoint and "keep_last" not in c.given:
        c.keep_last = 1
    if c.min_lr is None:
        c.min_lr = c.learning_rate / 10
    if c.lr_decay_iters is None:
        c.lr_decay_iters = max(1, c.max_iters)
    if c.eval_tokens is None:
        c.eval_tokens = c.eval_iters * c.batch_size * c.block_size
    if c.save_interval is None:
        c.save_interval = c.eval_interval or max(1, c.max_iters)
    resolve_batch(c)


def resolve_batch(c):
    """total_batch_size and gradient_accumulation_steps from each other; UserError where they do not fit."""
    micro = c.batch_size * c.block_size
    if c.block_size < 1:
        raise UserError(f"block_size={c.block_size}: expected at least 1")
    pair = ("total_batch_size", "gradient_accumulation_steps")
    by_hand = [k for k in pair if c.given.get(k) == "command line"]
    if len(by_hand) == 1:  # what was typed wins over what the config file says in the other way
        setattr(c, pair[by_hand[0] == pair[0]], None)
    if c.total_batch_size is None:
        c.total_batch_size = micro * (c.gradient_accumulation_steps or 40)
    down = c.total_batch_size // micro * micro
    if down != c.total_batch_size:
        rows = c.total_batch_size // c.block_size if c.total_batch_size % c.block_size == 0 else 0
        sizes = sorted(sorted((b for b in range(1, rows + 1) if rows % b == 0), key=lambda b: abs(b - c.batch_size))[:4])
        same = f"batch_size={' or '.join(map(str, sizes))} (the same tokens an update) or " if sizes else ""
        works = " or ".join(str(v) for v in (down, down + micro) if v)
        raise UserError(f"total_batch_size={c.total_batch_size} tokens is not a multiple of batch_size * block_size = "
                        f"{c.batch_size} * {c.block_size} = {micro}: {same}total_batch_size={works} would work")
    if c.gradient_accumulation_steps not in (None, c.micro_batches):
        raise UserError(f"gradient_accumulation_steps={c.gradient_accumulation_steps} and total_batch_size="
                        f"{c.total_batch_size} contradict each other: {c.total_batch_size} tokens are {c.micro_batches} "
                        f"micro-batches of {c.batch_size} * {c.block_size}; give one of the two")
    c.gradient_accumulation_steps = c.micro_batches


# ------------------------------------------------------------------------------------------------------- showing it


def as_dict(config):
    """The resolved settings, JSON-able, in the order of the class."""
    return {name: getattr(config, name) for name in FIELDS if name not in NOT_OF_A_RUN}


def table(config):
    """Every resolved setting, for the start of a log; a * marks those that were given."""
    cells = [f"{'*' if k in config.given else ' '}{k} = {'-' if v is None else v}" for k, v in as_dict(config).items()]
    width = max(len(c) for c in cells) + 2
    columns = max(1, min(4, 120 // width))
    rows = -(-len(cells) // columns)
    return "\n".join("".join(c.ljust(width) for c in cells[r::rows]).rstrip() for r in range(rows))


def make_model_config(config):
    """The ModelConfig of a run, its derived sizes, and those of the adapters, written back to the config; UserError where it cannot be built."""
    keys = ModelConfig.__dataclass_fields__
    model_config = ModelConfig(**{k: getattr(config, k) for k in keys})
    if problems := model_config.problems():
        raise UserError(*problems)
    for key in keys:
        setattr(config, key, getattr(model_config, key))
    lora.resolve(config, model_config)
    return model_config


def versions(device):
    """What the bits of a run depend on besides its settings: versions of Python, torch and this code, and the processor that computes (a GPU's name)."""
    import torch

    processor = torch.cuda.get_device_name(device) if device.type == "cuda" else matmul.processor()
    return {"python": sys.version.split()[0], "torch": torch.__version__, "git": git_revision(), "processor": processor}


def git_revision():
    """The commit this code is at, with + where files were changed; None outside a git checkout."""
    try:
        out = subprocess.run(["git", "describe", "--always", "--abbrev=40", "--dirty=+", "--exclude=*"], cwd=ROOT,
                             capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return out.stdout.strip() or None
