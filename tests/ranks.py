"""What a group of processes is asked in the tests below it: `torchrun ... tests/ranks.py QUESTION FOLDER`; each rank writes an answer."""

import contextlib
import hashlib
import json
import os
import sys
import threading
import time

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import torch

from data.order import IGNORE, derive_seed
from engine import checkpoint as ckpt
from engine import optim, processes
from engine.config import Config, resolve
from engine.optim import make_optimizer
from engine.sync import Sync, local, row_range, shard
from model import GPT, ModelConfig, rope_table


def config(**settings):
    c = Config(out_dir="out", device="cpu", eval_interval=0, **settings)
    resolve(c)
    return c


def joined(c):
    place = processes.join()
    precision, backend = processes.start(place, c)
    processes.connect(place, backend)
    return place, precision


def joined_again(place, c, name):
    """The same processes in another mesh."""
    torch.distributed.destroy_process_group()
    place.store = torch.distributed.PrefixStore(name, place.store)
    precision, backend = processes.start(place, c)
    processes.connect(place, backend)
    return place, precision


def build(place, c, precision, model_config):
    if place.layout == "fsdp":
        with torch.device("meta"):
            model = GPT(model_config)
        shard(model, place, c, precision)
        model.to_empty(device="cpu")
        model.rope = rope_table(model_config) if model_config.pos == "rope" else None
    else:
        model = GPT(model_config)
    parameters = dict(model.named_parameters())
    ckpt.fill(place, parameters, parameters, model.first_values(0), "the first values")
    return model


def uneven_labels(folder):
    """The gradient of an update of 4 micro-batches whose rows carry 10 and 100 labels, under this group's layout."""
    place, gradients, _ = None, None, None
    for parallel in ("ddp", "fsdp") if "RANK" in os.environ else ("single",):
        c = config(parallel=parallel, batch_size=1, block_size=128, total_batch_size=4 * 128)
        if place is None:
            place, precision = joined(c)
        else:
            processes.choose_layout(place, c)
            place.mesh = torch.distributed.init_device_mesh("cpu", (1, place.ranks), mesh_dim_names=("dp_replicate", "dp_shard"))
        model = build(place, c, precision, ModelConfig(block_size=128, vocab_size=97, n_layer=2, n_head=2, n_embd=32))
        sync = Sync(model, place, c)
        generator = torch.Generator().manual_seed(0)
        x, y = (torch.randint(0, 97, (4, 128), generator=generator) for _ in range(2))
        labels = (10, 100, 100, 10)
        for row, n in enumerate(labels):
            y[row, n:] = IGNORE
        losses = []
        for i, j in enumerate(sync.mine):
            with sync.micro_step(i):
                loss = sync.model(x[j:j + 1], y[j:j + 1], divisor=sum(labels))
                loss.backward()
            losses.append(loss.detach())
            sync.after_backward(i)
        sync.finish_gradients()
        total, _ = sync.sum_losses(losses)
        gradients = {n: (p.grad.full_tensor() if parallel == "fsdp" else p.grad) for n, p in model.named_parameters()}
        torch.save({"loss": total, "norm": sync.gradient_norm().item(), "gradients": gradients}, os.path.join(folder, f"{parallel}-{place.ranks}-{place.rank}.pt"))


LABELLED = {"uneven": (10, 100, 100, 10), "none on rank 0": (0, 60, 0, 7)}  # labels of four records


def sft_gradients(folder, batch_size=1):
    """The gradients of an update over four records of LABELLED under this group's layouts, one record a row."""
    from conftest import write_records
    from data.packing import RecordReader
    from data.shards import TokenDataset

    place = None
    for parallel in ("ddp", "fsdp") if "RANK" in os.environ else ("single",):
        c = config(parallel=parallel, batch_size=batch_size, block_size=128, total_batch_size=4 * 128)
        if place is None:
            place, precision = joined(c)
        else:
            processes.choose_layout(place, c)
            place.mesh = torch.distributed.init_device_mesh("cpu", (1, place.ranks), mesh_dim_names=("dp_replicate", "dp_shard"))
        for name, counts in LABELLED.items():
            ids = torch.randint(0, 256, (4, 121), generator=torch.Generator().manual_seed(0)).numpy()
            found = [(ids[i, :n + 20], [k >= 20 for k in range(n + 20)]) for i, n in enumerate(counts)]
            reader = RecordReader(TokenDataset(write_records(os.path.join(folder, f"{name}-{parallel}-{place.rank}"), train=found), "train"), 128, pack=False)
            model = build(place, c, precision, ModelConfig(block_size=128, vocab_size=257, n_layer=2, n_head=2, n_embd=32))
            sync, losses, divisor = Sync(model, place, c), [], reader.labels(0, 4)
            for i, j in enumerate(sync.mine):
                x, y, documents = reader.batch(j * batch_size, batch_size)
                with sync.micro_step(i):
                    loss = sync.model(x, y, divisor=divisor, documents=documents)
                    loss.backward()
                losses.append(loss.detach())
                sync.after_backward(i)
            sync.finish_gradients()
            total, _ = sync.sum_losses(losses)
            gradients = {n: (p.grad.full_tensor() if parallel == "fsdp" else p.grad) for n, p in model.named_parameters()}
            torch.save({"loss": total, "gradients": gradients}, os.path.join(folder, f"{name}-{parallel}-{place.rank}.pt"))


def memory(folder):
    """Bytes that a rank of an FSDP group holds of a model whose blocks outweigh the rest, and its peak while it builds and loads."""
    c = config(parallel="fsdp", batch_size=1, block_size=32, total_batch_size=8 * 32)
    place, precision = joined(c)
    model_config = ModelConfig(block_size=32, vocab_size=257, n_layer=8, n_head=4, n_embd=512, tie_embeddings=False)
    whole = sum(p.numel() * 4 for p in GPT(model_config).parameters()) if place.rank == 0 else 0
    whole = int(place.from_first(whole))
    build(place, c, precision, ModelConfig(block_size=32, vocab_size=257, n_layer=1, n_head=4, n_embd=32))  # what is imported on the way is no model
    torch.distributed.barrier()
    with rising() as built:
        model = build(place, c, precision, model_config)
        optimizer = make_optimizer(model.named_parameters(), c)
        optimizer.state()
    sync = Sync(model, place, c)
    for _ in sync.mine:
        sync.model(torch.zeros(1, 32, dtype=torch.long), torch.zeros(1, 32, dtype=torch.long), divisor=256).backward()
    held = {"parameters": sum(local(p).numel() * 4 for p in model.parameters()), "gradients": sum(local(p.grad).numel() * 4 for p in model.parameters()),
            "optimizer": sum(t.numel() * 4 for t in optimizer.state().values())}
    with open(os.path.join(folder, f"memory-{place.rank}.json"), "w") as f:
        json.dump({"whole": whole, "built": built(), **held}, f)


def loading(folder):
    """How much memory a rank of an FSDP group takes to load weights of Hugging Face's layouts: parameters alone, no optimizer. Counts
    pages of mapped files that it has looked at, as the system does."""
    from engine.export import export
    from engine.families import Weights, open_weights

    c = config(parallel="fsdp", batch_size=1, block_size=32, total_batch_size=8 * 32)
    place, precision = joined(c)
    shape = dict(block_size=32, vocab_size=257, n_layer=6, n_head=4, n_embd=512)
    # larger than what torch and gloo take for themselves, and with no one tensor that is much of the whole
    for name, switches in (("qwen3", dict(norm="rmsnorm", pos="rope", mlp="swiglu", qk_norm=True, bias=False, tie_embeddings=False)), ("gpt2", {})):
        model_config = ModelConfig(**shape, **switches)
        path = os.path.join(folder, name)
        if place.speaks:
            model = GPT(model_config)
            export(Weights("random", model_config, model.first_values(0), None), None, path, lambda sentence: None)
        torch.distributed.barrier()
        with torch.device("meta"):
            model = GPT(model_config)
            toy = GPT(ModelConfig(**{**shape, "n_layer": 1, "n_embd": 32}, **switches))
        for m in (toy, model):
            shard(m, place, c, precision)
        toy.to_empty(device="cpu")  # what is imported on the way is no model
        torch.distributed.barrier()
        with rising() as peak:
            model.to_empty(device="cpu")
            parameters = dict(model.named_parameters())
            ckpt.fill(place, parameters, parameters, open_weights(path).sources, path)
        equal = True
        for n, p in parameters.items():
            first, behind = row_range(p)
            behind = min(behind, 257) if n in ("wte.weight", "head.weight") else behind  # a file has no padding
            equal &= torch.equal(local(p)[:max(0, behind - first)], model.first_value(n, p.shape, 0)[first:behind])
        with open(os.path.join(folder, f"loading-{name}-{place.rank}.json"), "w") as f:
            json.dump({"whole": sum(p.numel() * 4 for p in parameters.values()), "peak": peak(), "equal": equal,
                       "held": sum(local(p).numel() * 4 for p in parameters.values())}, f)
        torch.distributed.barrier()


def choices(folder):
    """The endings that FOLDER/weights, sharded, choose for the items of FOLDER/items.jsonl, in batches of 1, 2 and 5 items."""
    from data.tokenizers import byte_tokenizer
    from engine import hellaswag
    from engine.families import open_weights
    from engine.watch import Watch

    weights = open_weights(os.path.join(folder, "weights"), lambda sentence: None)
    items = hellaswag.read_items(os.path.join(folder, "items.jsonl"), 0, byte_tokenizer(), weights.model_config.block_size, 257)
    place, found = None, []
    for name, mesh in {"fsdp": dict(parallel="fsdp"), "tp": dict(tp=2)}.items():
        c = config(**mesh, batch_size=1, block_size=64, total_batch_size=8 * 64)
        place, precision = joined(c) if place is None else joined_again(place, c, name)
        model = build(place, c, precision, weights.model_config)
        parameters = dict(model.named_parameters())
        ckpt.fill(place, parameters, parameters, weights.sources, weights.path)
        with Watch(place) as watch:
            watch.start(c, 0)
            found += [hellaswag.choose(model, items, batch_size, place, precision, watch).tolist() for batch_size in (4, 8, 20)]
    with open(os.path.join(folder, f"choices-{place.rank}.json"), "w") as f:
        json.dump(found, f)


def attention(folder):
    """The largest errors of context parallelism's attention and gradients against scores written out, by case."""
    import numpy as np

    from engine.attention import Documents
    from engine.context_parallel import ContextParallel

    c = config(parallel="ddp", batch_size=1, block_size=64, total_batch_size=8 * 64, cp=processes.join().ranks)
    place, _ = joined(c)
    context, found = ContextParallel(place.context_group), {}
    B, T, D = 3, 64, 16
    padded = Documents([3, 7, 22, 32, 1, 31, 32, 64], B, padding=[False] * 5 + [True, False, False])
    for name, documents in {"whole": None, "documents": padded}.items():
        ids = torch.zeros(B, T) if documents is None else documents.ids()
        seen = (ids[:, :, None] == ids[:, None]).tril()[:, None]  # (B, 1, T, T)
        real = torch.ones(B, T, dtype=torch.bool) if documents is None else ~torch.from_numpy(np.repeat(documents.padding, documents.lengths)).view(B, T)
        for H, K, dtype in ((4, 4, torch.float32), (6, 2, torch.float32), (3, 1, torch.float32), (4, 2, torch.bfloat16)):
            torch.manual_seed(0)
            whole = [torch.randn(B, heads, T, D).to(dtype).requires_grad_() for heads in (H, K, K)]
            d_out = torch.randn(B, H, T, D).to(dtype) * real[:, None, :, None]
            q, k, v = (t.float().repeat_interleave(H // t.size(1), 1) for t in whole)
            y = (q @ k.mT / D**0.5).masked_fill(~seen, float("-inf")).softmax(-1) @ v
            y.backward(d_out.float())
            part = context.cut(torch.zeros(B, T, dtype=torch.int64), torch.zeros(B, T, dtype=torch.int64), documents)[2]
            own = [t.detach()[:, :, part.at].clone().requires_grad_() for t in whole]
            out = part.attend(*own)
            out.backward(d_out[:, :, part.at])
            errors = [((out - y[:, :, part.at]) * real[:, None, part.at, None]).abs().max()]
            errors += [(mine.grad.float() - t.grad[:, :, part.at].float()).abs().max() for mine, t in zip(own, whole)]
            found[f"{name} {H} {K} {dtype}"] = max(errors).item()
    with open(os.path.join(folder, f"attention-{place.ranks}-{place.rank}.json"), "w") as f:
        json.dump(found, f)


def documents(folder):
    """Loss and gradients of a batch of packed records with padding, of which few tokens bear labels, on the mesh that FOLDER/mesh.json says."""
    from engine.attention import Documents

    with open(os.path.join(folder, "mesh.json")) as f:
        meshes = json.load(f)
    shapes = {"gpt2": dict(n_kv_head=4, bias=True), "qwen3": dict(bias=False, norm="rmsnorm", pos="rope", mlp="swiglu", qk_norm=True, head_dim=20, tie_embeddings=False)}
    place = None
    for name, mesh in meshes.items():
        c = config(**{**dict(batch_size=3, block_size=32, total_batch_size=3 * 32), **mesh})
        place, precision = joined(c) if place is None else joined_again(place, c, name)
        for shape, more in shapes.items():
            model_config = ModelConfig(**{**dict(block_size=32, vocab_size=97, n_layer=2, n_head=4, n_kv_head=2, n_embd=48), **more})
            model = build(place, c, precision, model_config)
            sync = Sync(model, place, c)
            torch.manual_seed(0)
            x, y = (torch.randint(0, 97, (3, 32)) for _ in range(2))
            labels = torch.tensor([1, 2, 9, 30, 31, 40, 41, 42, 70])  # some ranks have none
            found = []
            for labelled, together in ((None, True), (None, False), (labels, False)):
                if place.group:  # the batch is the first group's; the others have one without labels
                    labelled = torch.tensor([], dtype=torch.int64)
                documents = Documents([32] * 3 if together else [3, 7, 6, 16, 1, 30, 1, 32], 3, labels=labelled,
                                      padding=None if together else [False] * 6 + [True, False])
                documents = None if together and labelled is None else documents  # whole rows
                targets = y if labelled is None else torch.full_like(y, IGNORE).view(-1).index_copy(0, labelled, y.view(-1)[labelled]).view(3, 32)
                with sync.micro_step(0):
                    loss = sync.model(x, targets, divisor=9.0, documents=documents)
                    loss.backward()
                sync.after_backward(0)
                total, _ = sync.sum_losses([loss.detach()])
                found.append({"loss": total, "norm": sync.gradient_norm().item(), "gradients": {
                    n: (p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad).clone() for n, p in model.named_parameters()}})
                for p in model.parameters():
                    p.grad = None
            torch.save(found, os.path.join(folder, f"{name}-{shape}-{place.rank}.pt"))


def context_memory(folder):
    """Bytes that autograd keeps of a forward pass over 2,048 tokens, whole and as a rank's part; and a step over 32,768 tokens."""
    c = config(batch_size=1, block_size=32768, total_batch_size=32768, cp=4)
    place, precision = joined(c)
    model_config = ModelConfig(block_size=32768, vocab_size=50304, n_layer=2, n_head=2, n_embd=32, bias=False, norm="rmsnorm", pos="rope", mlp="swiglu")
    model = build(place, c, precision, model_config)
    sync = Sync(model, place, c)

    def kept(tokens):
        parameters, seen = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}, {}

        def pack(t):
            if t.untyped_storage().data_ptr() not in parameters and t.shape != model.wte.weight.shape:
                seen[t.untyped_storage().data_ptr()] = t
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            model(tokens, tokens)
        return sum(t.untyped_storage().nbytes() for t in seen.values())

    tokens = torch.randint(0, 50304, (1, 2048))
    part = kept(tokens)
    context, model.context = model.context, None
    whole = kept(tokens)
    model.context = context
    torch.distributed.barrier()
    with rising() as peak:
        tokens = torch.randint(0, 50304, (1, 32768), generator=torch.Generator().manual_seed(0))
        loss = sync.model(tokens, tokens.roll(-1), divisor=32768)
        loss.backward()
        total, _ = sync.sum_losses([loss.detach()])
        norm = sync.gradient_norm().item()
    with open(os.path.join(folder, f"context-{place.rank}.json"), "w") as f:
        json.dump({"part": part, "whole": whole, "peak": peak(), "loss": total, "norm": norm}, f)


def owners(folder):
    """Which matrices this rank makes orthogonal in two steps of Muon on made-up gradients, as hashes, and the parameters after them, under
    DDP, FSDP and HSDP, or alone; rows that do not divide by the shards."""
    place, orthogonalize, seen = None, optim.orthogonalize, []

    def noted(g):
        seen.append(hashlib.sha256(g.contiguous().numpy().tobytes()).hexdigest())
        return orthogonalize(g)

    optim.orthogonalize = noted
    layouts = {"ddp": {}, "fsdp": dict(parallel="fsdp"), "hsdp": dict(parallel="fsdp", dp_replicate=2)} if "RANK" in os.environ else {"single": {}}
    for name, layout in layouts.items():
        c = config(**layout, optimizer="muon", deterministic=True, batch_size=1, block_size=16, total_batch_size=8 * 16)
        place, precision = joined(c) if place is None else joined_again(place, c, name)
        model = build(place, c, precision, ModelConfig(block_size=16, vocab_size=97, n_layer=2, n_head=3, n_embd=45, mlp_hidden=131, mlp="swiglu", bias=False))
        optimizer = make_optimizer(model.named_parameters(), c)
        seen.clear()
        for step in range(2):
            for n, p in model.named_parameters():
                whole = torch.empty(p.shape).normal_(generator=torch.Generator().manual_seed(derive_seed(n, step)))
                p.grad = whole if name in ("single", "ddp") else type(p).from_local(
                    whole[slice(*row_range(p))].contiguous(), p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride())
            optimizer.step(c.learning_rate, torch.tensor(2.0))
        parameters = {n: p.full_tensor() if hasattr(p, "full_tensor") else p.detach() for n, p in model.named_parameters()}
        torch.save({"seen": list(seen), "parameters": parameters}, os.path.join(folder, f"owners-{name}-{place.rank}.pt"))


@contextlib.contextmanager
def rising():
    """Yields a function that gives, inside or behind, by how many bytes this process has grown at most since the beginning."""
    before, peak, watching = rss(), [0], True

    def watch():
        while watching:
            peak.append(rss())
            time.sleep(0.0005)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield lambda: max(peak) - before
    finally:
        watching = False
        thread.join()


def rss():
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    globals()[sys.argv[1]](sys.argv[2])
    processes.disconnect()  # gloo's threads must not outlive the interpreter
