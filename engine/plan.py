"""What a run will take, before any machine is asked for it: memory, traffic, disk, hours. `--plan=N` prints it for N processes.

The model is built on torch's meta device, shapes without memory, and so is the optimizer: what they hold is counted on the very
objects that a run trains with, cut as FSDP2 cuts them. No GPU and no data are needed.
"""

import copy
import dataclasses
import math
from collections import Counter
from typing import NamedTuple

import torch

from data.shards import TokenDataset, find_dataset
from data.sources import open_source
from engine import config as settings
from engine import recompute
from engine.errors import UserError
from engine.families import open_weights
from engine.feed import read_folders
from engine.lora import add_adapters
from engine.loss import LOSS_CHUNK
from engine.metrics import GPU_PEAKS, short_number, short_time
from engine.optim import make_optimizer
from engine.processes import Place, check_batch, choose_layout, choose_precision
from engine.resume import take_architecture
from engine.sync import deal, power_of_two_in, shard_rows
from engine.tensor_parallel import cut_dim
from model import GPT

ASSUMED_MFU = 0.4  # of the peak; dense models of these sizes reach 0.3 to 0.5 where the network keeps up (PaLM, arXiv 2204.02311, table 3)

ASSUMED_UPDATES = 1000  # where num_epochs says how long to train, of data that are not here

EXACT = ("weights", "gradients", "optimizer")  # kinds of memory; the others are estimated

# GB (1e9 bytes) of a GPU's memory, from the makers' data sheets; the larger where it is sold in two sizes
GPU_MEMORY = {"B300": 288, "B200": 180, "H200": 141, "H100 PCIe": 80, "H100": 80, "GH200": 96, "H20": 96, "A100": 80, "A800": 80, "L40S": 48,
              "L40": 48, "L4": 24, "A10G": 24, "A10": 24, "V100": 32, "T4": 16, "RTX 5090": 32, "RTX 4090": 24, "RTX 3090": 24}


def plan(config, world: int) -> dict:
    """What a run of a loaded Config takes on `world` processes of the GPU config.plan_gpu, as a dict; sizes in bytes.

    memory: {kind: bytes on the busiest device, rank 0's}. Weights, gradients and optimizer are exact; what is worked with beside
    them, activations and logits are estimates (see working_bytes, recompute.peak_bytes, logit_bytes). on_host: the kinds that cpu_offload
    moves there. shards: [(weights, gradients, optimizer)] of each rank of a replica, exact. sent: {"collective of kind": bytes that a rank
    sends in one update}, with rings (see sent_bytes). checkpoint: exact but for some KB of names. hours: at ASSUMED_MFU.
    UserError where the settings do not fit together, or not that many processes.
    """
    c = copy.copy(config)
    place = Place(ranks=world, store=True)  # as if torchrun had started them
    choose_layout(place, c)
    peaks = gpu_peaks(c.plan_gpu)
    precision = choose_precision("cuda", c.dtype, "bfloat16" in peaks)
    c.device, c.dtype = c.device if c.device != "auto" else "cuda", precision.dtype
    if c.init_from not in ("scratch", "resume"):
        try:
            take_architecture(c, open_weights(c.init_from).model_config, c.init_from)
        except UserError:
            if "n_layer" not in c.given:  # the settings do not say the shape either
                raise
    vocabulary = find_vocabulary(c)
    settings.resolve_batch(c)
    how_long = find_updates(c)
    settings.resolve(c)
    check_batch(place, c)
    model = meta_model(c)
    with torch.device("meta"):
        shapes = {n: tuple(p.shape) for n, p in model.named_parameters()}
        trained = [n for n, p in model.named_parameters() if p.requires_grad]
        state = {n: tuple(t.shape) for n, t in make_optimizer(model.named_parameters(), c).state().items()}
    here = {n: cut(n, shape, place.tp) for n, shape in shapes.items()}  # what ranks that share layers have of each
    linears, root, norms = groups_of(model, place)

    shards = []
    for index in range(place.shards):
        weights, of_trained = (4 * sum(held(here[n], place.shards, index) for n in names) for names in (here, trained))
        of_optimizer = 4 * sum(held(cut(n.rpartition(".")[0], shape, place.tp), place.shards, index) for n, shape in state.items())
        shards += [(weights, of_trained, of_optimizer)] * place.tp
    element = precision.element
    memory = dict(zip(EXACT, shards[0]))
    memory["working copies"] = working_bytes(c, place, linears, root, element)
    if c.deterministic:
        memory["sums in order"] = tree_bytes(memory["gradients"], c.micro_batches // place.groups, place)
    kinds = recompute.choose(c, element)
    memory["activations"] = recompute.peak_bytes(c, element, kinds)
    memory["logits"] = logit_bytes(model, c, element)
    flops = model.flops_per_token() * c.total_batch_size * c.max_iters
    peak = peaks[precision.dtype] * 1e12
    return {
        "processes": world, "layout": place.layout, "replicas": place.replicas, "mesh": place.shape, "groups": place.groups, "dtype": precision.dtype,
        "vocabulary": vocabulary, "parameters": sum(math.prod(s) for s in shapes.values()), "trained": sum(math.prod(shapes[n]) for n in trained),
        "batch": (c.micro_batches, c.batch_size, c.block_size), "tokens_per_update": c.total_batch_size, "updates": c.max_iters, "how_long": how_long,
        "tokens": c.total_batch_size * c.max_iters, "flops_per_token": model.flops_per_token(), "flops": flops,
        "memory": memory, "on_host": EXACT if c.cpu_offload and place.layout == "fsdp" else (), "shards": shards,
        "recompute": kinds,
        "sent": sent_bytes(c, place, kinds, linears, root, element, norms),
        "checkpoint": 4 * sum(math.prod(s) for s in (*shapes.values(), *state.values())),
        "gpu": c.plan_gpu, "gpu_memory": GPU_MEMORY[c.plan_gpu] * 10**9, "peak": peak, "hours": flops / (world * peak * ASSUMED_MFU) / 3600,
    }


class Part(NamedTuple):
    """A parameter as a rank has it, or its part of one that ranks share by layers."""

    shape: tuple
    trained: bool


def meta_model(c):
    """The GPT of a run's settings, without memory."""
    with torch.device("meta"):
        model = GPT(settings.make_model_config(c))
        add_adapters(model, c)
    return model


def groups_of(model, place):
    """The Parts of a whole GPT's parameters in the groups that sync.shard() makes, the blocks' Linears and the root; and the blocks' norms among
    the latter."""
    in_blocks = {f"blocks.{i}.{m}.{kind}" for i, block in enumerate(model.blocks) for m, module in block.named_modules()
                 if isinstance(module, torch.nn.Linear) for kind, _ in module.named_parameters()}
    parts = {n: Part(cut(n, tuple(p.shape), place.tp), p.requires_grad) for n, p in model.named_parameters()}
    return ([part for n, part in parts.items() if n in in_blocks], [part for n, part in parts.items() if n not in in_blocks],
            [part for n, part in parts.items() if n.startswith("blocks.") and "norm" in n])


def planned_traffic(c, place) -> dict[str, int]:
    """{kind: bytes that a rank sends in an update} of a run whose settings are resolved, on the processes of its Place."""
    linears, root, norms = groups_of(meta_model(c), place)
    sent: Counter = Counter()
    element = 4 if c.dtype == "float32" else 2
    for name, b in sent_bytes(c, place, recompute.choose(c, element), linears, root, element, norms).items():
        sent[name.partition(" of ")[2]] += b
    return dict(sent)


def gpu_peaks(name):
    """{type: FLOP/s} of a GPU by its name; UserError where it is not known."""
    peaks = dict(GPU_PEAKS)
    if name not in peaks:
        raise UserError(f"plan_gpu={name}: its peak is not known{settings.nearest(name, list(peaks))}; known are {', '.join(peaks)}")
    return peaks[name]


def find_vocabulary(c):
    """Fills in vocab_size as train.py would, from the data where it lies here already; returns where it comes from."""
    if c.vocab_size:
        return f"{c.vocab_size:,}"
    try:
        c.vocab_size = TokenDataset(find_dataset(c.dataset, settings.ROOT), "train").vocab_size
        where = f"of the data set {c.dataset}"
    except UserError:
        try:
            tokenizer = open_source(c.dataset).tokenizer
            c.vocab_size = {"byte": 257, "gpt2": 50257}[tokenizer]  # known without loading it, which may take a network
            where = f"of the tokenizer {tokenizer}, which prepare.py takes for {c.dataset}"
        except (UserError, KeyError):
            where = "GPT-2's, since the data set is not here to ask; --vocab_size=N says otherwise"
    c.vocab_size = c.vocab_size or 50304
    return f"{c.vocab_size:,} ({where})"


def cut(name, shape, tp):
    """The shape of what one of `tp` ranks that share a parameter has of it."""
    dim = cut_dim(name)
    return tuple(n // tp if i == dim else n for i, n in enumerate(shape))


def find_updates(c):
    """Fills in max_iters where num_epochs says how long to train, from the data where it lies here already; returns how it was found."""
    if c.num_epochs is None:
        return ""
    try:
        folders = {key: find_dataset(name, settings.ROOT) for key in ("dataset", "replay_dataset") if (name := getattr(c, key))}
        opened = dataclasses.replace(c, eval_interval=0, eval_only=False, general_dataset=None)
        read_folders(opened, None, folders, lambda sentence: None)
        c.max_iters = opened.max_iters
        return f" (num_epochs={c.num_epochs:g})"
    except UserError:
        c.max_iters = ASSUMED_UPDATES
        return f" (assumed: num_epochs={c.num_epochs:g} follows from the data, which is not prepared here; --max_iters=N says otherwise)"


def held(shape, shards, index):
    """Elements of a parameter that shard `index` of `shards` holds: whole rows, as sync.ranges has them."""
    each = shard_rows(shape[0], shards)
    rows = min(shape[0], (index + 1) * each) - min(shape[0], index * each)
    return rows * math.prod(shape[1:])


def padded(parameters, shards):
    """Elements of parameters once each shard is filled up to the first one's rows, which is how they travel."""
    return sum(shards * held(p.shape, shards, 0) for p in parameters)


def with_gradients(parameters):
    """The trained ones of some Parts."""
    return [p for p in parameters if p.trained]


def working_bytes(c, place, linears, root, element):
    """What a device holds beside its own shards while it computes; an estimate of the peak.

    Single and DDP: autocast's copies of the blocks' weights, kept from forward to backward. FSDP2: the root group whole, its weights
    from forward to backward and its gradients until they are scattered, and two blocks' weights (one in use, one on its way;
    all of them without reshard_after_forward). A group's gradients exist in the computing type and as the float32 buffer of the
    reduce-scatter; the largest one counts.
    """
    cast = element if element < 4 else 0
    block = padded(linears, place.shards) // c.n_layer
    if place.layout != "fsdp":
        return cast * block * c.n_layer
    whole = padded(root, place.shards)
    gathered = 4 * whole + element * block * (min(2, c.n_layer) if c.reshard_after_forward else c.n_layer)
    block, whole = padded(with_gradients(linears), place.shards) // c.n_layer, padded(with_gradients(root), place.shards)
    return gathered + 4 * whole + max(4 * whole, (element + 4) * block)


def tree_bytes(gradient_bytes, each, place):
    """deterministic=True: sums that wait in sync.TreeSum, one a level below the top, and under DDP what is sent and received."""
    run = power_of_two_in(each) if place.layout != "fsdp" and place.cp == 1 else 1
    waiting = (run.bit_length() - 1) + ((each // run).bit_length() - 1)
    return gradient_bytes * (waiting + (3 if place.layout == "ddp" and place.ranks > 1 else 0))


def logit_bytes(model, c, element):
    """The loss's own (engine.loss): logits of LOSS_CHUNK tokens, in float32 and, under autocast, in the computing type before
    and after; the head's gradient, made with them in float32 unless it is frozen, and autocast's copy of the head."""
    rows, columns = model.wte.weight.shape
    rows //= c.tp
    chunk, gradient = min(c.batch_size * c.block_size // c.cp, LOSS_CHUNK), 4 if model.wte.weight.requires_grad else 0
    return chunk * rows * (4 + (2 * element if element < 4 else 0)) + rows * columns * (gradient + (element if element < 4 else 0))


def sent_bytes(c, place, kinds, linears, root, element, norms) -> dict[str, int]:
    """{"collective of kind": bytes that one rank sends in an update}, counted for rings: (n-1)/n of a buffer for an all-gather or a
    reduce-scatter over n ranks, twice that for an all-reduce (Patarasuk and Yuan, 2009).

    DDP all-reduces float32 gradients once an update. FSDP, each micro-batch: blocks gathered for the forward and, resharded, for the
    backward, in the computing type; the root once, in float32; all gradients reduce-scattered in float32. HSDP all-reduces a rank's
    shard of their sum over the replicas once an update. Muon, once an update: shards to their matrix's owner and back, or under DDP what
    the owners made to all (sync.Owners). Context parallelism gathers keys and values and scatters their gradients, tensor parallelism
    moves the residual stream, in float32. Losses, norms and evaluation are left out: some bytes, or rare. norms: those in the blocks.
    Only what is trained has gradients.
    """
    def ring(n):
        return (n - 1) / n

    each, n, sent = c.micro_batches // place.groups, place.shards, Counter()
    if place.cp > 1:  # gathered for the forward (twice where it is computed again) and for the backward
        of_block = element * c.batch_size * c.block_size * 2 * c.n_kv_head // place.tp * c.head_dim
        sent["all-gather of keys and values"] += each * ring(place.cp) * (2 * c.n_layer + kinds.count("block")) * of_block
        sent["reduce-scatter of keys and values"] += each * ring(place.cp) * c.n_layer * of_block
    if place.tp > 1:
        tokens = c.batch_size * c.block_size // place.cp
        whole = 4 * tokens * c.n_embd
        # a sub-layer gathers its tokens and scatters its sums, in the backward the other way round; the embeddings scatter theirs
        forward, embeddings = 2 * c.n_layer, 1 if c.pos == "rope" else 1 + 1 / c.batch_size
        scatters = kinds.count("block")  # what is made again ends before a block's last scatter
        again = 2 * scatters + kinds.count("selective")
        sent["all-gather of activations"] += each * ring(place.tp) * ((2 * forward + again + embeddings + 1) * whole + 4 * tokens * place.tp)
        sent["reduce-scatter of activations"] += each * ring(place.tp) * (2 * forward + scatters + embeddings) * whole
        sent["all-reduce of activations"] += each * 2 * ring(place.tp) * (whole + 4)
        # of norms, from each rank's tokens
        sent["all-reduce of gradients"] += each * 2 * ring(place.tp) * 4 * sum(math.prod(p.shape) for p in with_gradients(norms))
    if place.layout != "fsdp" and place.ranks > 1:
        buffer = 4 * sum(math.prod(p.shape) for p in with_gradients((*linears, *root)))
        if c.optimizer == "muon":
            sent["all-gather of Muon's matrices"] += muon_bytes(linears, place.ranks, 1)
        if c.deterministic:  # sync.exchange, once for each subtree
            run = power_of_two_in(each) if place.cp == 1 else 1
            times = each // run * ring(place.ranks) * (buffer + -buffer // 4 % place.ranks * 4)
            sent["all-to-all of gradients"] += times
            sent["all-gather of gradients"] += times
        else:
            sent["all-reduce of gradients"] += 2 * ring(place.ranks) * buffer
    elif place.layout == "fsdp":
        blocks, whole = padded(linears, n), padded(root, n)
        gathered = element * blocks * (2 if c.reshard_after_forward else 1) + 4 * whole
        scattered = 4 * padded(with_gradients((*linears, *root)), n)
        sent["all-gather of parameters"] += each * ring(n) * gathered
        sent["all-to-all of gradients" if c.deterministic else "reduce-scatter of gradients"] += each * ring(n) * scattered
        if c.optimizer == "muon":
            sent["all-to-all of Muon's matrices"] += 2 * muon_bytes(linears, n, n)
        if (r := place.replicas) > 1 and c.deterministic:
            sent["all-gather of gradients"] += each * (r - 1) * scattered / n
        elif r > 1:
            sent["all-reduce of gradients"] += 2 * ring(r) * scattered / n
    return {kind: round(b) for kind, b in sent.items() if b}


def muon_bytes(linears, ranks, shards):
    """Bytes that a rank sends when the ranks exchange matrices of sync.Owners once, in float32."""
    shapes = [p.shape for p in with_gradients(linears) if len(p.shape) == 2]
    return round(4 * (ranks - 1) * deal(shapes, ranks, shards)[1])


# ---------------------------------------------------------------------------------------------------------- showing it


def print_plan(config, say) -> None:
    """Says what a run of a loaded Config takes on config.plan processes."""
    p = plan(config, config.plan)
    memory, room, kinds = p["memory"], p["gpu_memory"], []
    for kind, b in memory.items():
        where = "  exact" if kind in EXACT else "  estimated"
        kinds.append(f"  {kind:<16}{size(b):>10}{where}{', in the memory of the host' if kind in p['on_host'] else ''}")
    total = sum(b for kind, b in memory.items() if kind not in p["on_host"])
    layout = {"single": "one process", "ddp": f"{p['processes']} processes, DDP", "fsdp": f"{p['processes']} processes, FSDP"}[p["layout"]]
    if max(p["mesh"].values()) > 1:
        layout += f" ({', '.join(f'{axis} {n}' for axis, n in p['mesh'].items() if n > 1)})"
    micro, rows, length = p["batch"]
    trained = "" if p["trained"] == p["parameters"] else f", of which {p['trained']:,} are trained"
    lines = [
        f"plan: {layout}, {p['dtype']} on {p['gpu']}; nothing is trained",
        f"parameters      {p['parameters']:,}{trained}; vocabulary {p['vocabulary']}",
        f"tokens          {p['tokens_per_update']:,} an update ({micro} micro-batches of {rows} x {length}, {micro // p['groups']} a "
        f"{'process' if p['groups'] == p['processes'] else 'group'}) "
        f"x {p['updates']:,} updates = {short_number(p['tokens'])}{p['how_long']}",
        f"FLOPs           {short_number(p['flops_per_token'])} a token, {p['flops']:.3g} in all",
        f"time            {p['hours']:,.1f} hours ({short_time(3600 * p['hours'])}) at {ASSUMED_MFU:.0%} of the peak of {p['peak'] / 1e12:,.0f} TFLOP/s, "
        "assumed: a short run's mfu says what is reached",
        "memory of the fullest device", *kinds,
        f"  {'together':<16}{size(total):>10}  of the {size(room)} of {p['gpu']}" + (": too much" if total > room else ""),
    ]
    if total > room:
        lines.append(f"  what helps: {', '.join(what_helps(config, p)) or 'a larger GPU'}")
    if len(set(p["shards"])) > 1:
        alike = {held: [r for r, other in enumerate(p["shards"]) if other == held] for held in p["shards"]}
        lines.append("weights, gradients and optimizer of a replica's ranks: " + "; ".join(
            f"{ranks[0]} to {ranks[-1]}: {', '.join(map(size, held))}" for held, ranks in alike.items()))
    if config.activation_budget is not None:
        kinds = p["recompute"]
        lines.append("activation checkpointing by activation_budget, of blocks: " + ", ".join(f"{kinds.count(k)} {k}" for k in recompute.KINDS if k in kinds))
    lines.append("sent by a rank in an update: " + (", ".join(f"{size(b)} ({kind})" for kind, b in p["sent"].items()) or "nothing"))
    lines.append(f"a checkpoint    {size(p['checkpoint'])} on disk")
    say("\n".join(lines))


def what_helps(c, p):
    """Settings that lower the memory a device needs, the cheapest first."""
    found = [f"batch_size={c.batch_size // 2}"] if c.batch_size > 1 else []
    if c.activation_budget is None and c.activation_checkpointing != "block":
        found.append(f"activation_checkpointing={'selective or ' if c.activation_checkpointing == 'none' else ''}block")
    if p["layout"] != "fsdp":
        found.append("parallel=fsdp")
    elif p["replicas"] > 1:
        found.append(f"dp_replicate={p['replicas'] // 2}")
    else:
        found += ["more processes"] + ([] if c.cpu_offload else ["cpu_offload=True"])
    return found


def size(b):
    """Bytes in decimal units: 1234567890 -> 1.23 GB."""
    for unit, name in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "KB")):
        if b >= unit:
            return f"{b / unit:.3g} {name}" if b / unit < 999.5 else f"{b / unit:,.0f} {name}"
    return f"{b:.0f} B"
