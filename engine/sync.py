"""Parameter synchronization: DDP, FSDP2 and HSDP, gradients as sums over the whole update, and sums in a fixed order.

An update's gradient is the sum over its M micro-batches, each already divided by the update's count of labelled tokens.
D data-parallel ranks share them out. By default the sum is made as it comes: DDP adds up locally and all-reduces once, FSDP
reduce-scatters each micro-batch. With deterministic=True it is made in one binary tree over the micro-batches' index, whatever
D: leaves 0 and 1, 2 and 3, ... meet first, then those sums, as a binary counter counts. Each rank takes aligned runs of
leaves, so that a subtree is summed where it lies and ranks exchange only subtree sums; the same bits come out for every D.
"""

import contextlib
import hashlib
from typing import Any

import torch
import torch.distributed as dist

from engine.communication import about, mark, seconds_between, waited
from engine.context_parallel import ContextParallel
from engine.errors import Recoverable
from engine.tensor_parallel import parallelize

Parameter = Any  # a torch.Tensor, or a DTensor of which a part lies here


def local(t: Parameter) -> torch.Tensor:
    """The part of a tensor that lies on this rank, sharing its memory: all of it, but for a DTensor's shard of rows."""
    return t.detach().to_local() if hasattr(t, "to_local") else t


def shard_of(t: Parameter, dim: str = "dp_shard") -> tuple:
    """(shards, this rank's index among them, process group) of a parameter over a dimension of the mesh; (1, 0, None) where it is whole."""
    if not hasattr(t, "to_local") or dim not in t.device_mesh.mesh_dim_names:
        return 1, 0, None
    return t.device_mesh.size(t.device_mesh.mesh_dim_names.index(dim)), t.device_mesh.get_local_rank(dim), t.device_mesh.get_group(dim)


def tensor_dim(t: Parameter) -> int | None:
    """The dimension in which tensor parallelism cuts a parameter, None where each rank of it has the whole."""
    if not hasattr(t, "to_local") or "tp" not in t.device_mesh.mesh_dim_names:
        return None
    placement = t.placements[t.device_mesh.mesh_dim_names.index("tp")]
    return placement.dim if placement.is_shard() else None


def shard_rows(rows: int, shards: int) -> int:
    """Rows of a parameter in each shard but the last ones, which may have fewer: FSDP2 cuts dimension 0 as torch.chunk does."""
    return -(-rows // shards)


def ranges(t: Parameter) -> list[tuple[int, int]]:
    """[(first, behind the last)] in each dimension of a parameter, of what this rank holds: tensor parallelism's part in even cuts, and of
    that FSDP's shard of rows."""
    found = [(0, n) for n in t.shape]
    if (dim := tensor_dim(t)) is not None:
        ranks, index, _ = shard_of(t, "tp")
        each = t.size(dim) // ranks
        found[dim] = index * each, (index + 1) * each
    shards, index, _ = shard_of(t)
    first, behind = found[0]
    each = shard_rows(behind - first, shards)
    found[0] = min(behind, first + index * each), min(behind, first + (index + 1) * each)
    return found


def row_range(t: Parameter) -> tuple[int, int]:
    """(first, behind the last) row of a parameter that this rank holds."""
    return ranges(t)[0]


class Owners:
    """Ranks that hold parts or copies of some matrices share work that needs each matrix whole: one rank of the group does it, once.

    parameters: (rows, columns) each, all held alike. FSDP: shards of rows meet at the matrix's owner and what it makes of them goes back,
    in two all-to-alls, within a replica. DDP: every rank has all of them already, and an all-gather brings what the owners made. What
    travels is filled up to what the rank with most to do has, so that all send alike.
    """

    def __init__(self, parameters: list[Parameter]):
        self.sharded = hasattr(parameters[0], "to_local")
        self.ranks, self.rank, self.group = shard_of(parameters[0])
        if not self.sharded and dist.is_initialized():
            self.ranks, self.rank = dist.get_world_size(), dist.get_rank()
        # offloaded shards travel and are worked on where the layers run
        self.device = parameters[0].device_mesh.device_type if self.sharded else parameters[0].device
        self.shapes = [tuple(p.shape) for p in parameters]
        self.dealt, self.length = deal(self.shapes, self.ranks, self.ranks if self.sharded else 1)

    def work_on_whole(self, parts: list[torch.Tensor], work) -> list[torch.Tensor]:
        """This rank's rows of each matrix -> its rows of work(matrix), (rows, columns) float32 of the same shape."""
        if self.ranks == 1:
            return [work(part) for part in parts]
        mine = self.dealt[self.rank]
        if not self.sharded:
            done = self.joined([work(parts[i]) for i in mine])
            with about("Muon's matrices"):
                done = all_gather(done)
            return self.rows_of(done, [rows for rows, _ in self.shapes])
        each = [shard_rows(rows, self.ranks) for rows, _ in self.shapes]  # of the padded shards, the same on all ranks
        sent = torch.stack([self.joined([filled(parts[i], each[i]) for i in owned]) for owned in self.dealt])  # (owners, length)
        received = torch.empty_like(sent)
        with about("Muon's matrices"):
            dist.all_to_all_single(received, sent, group=self.group)  # (ranks, length): every rank's rows of mine
        at = 0
        for i in mine:
            rows, columns = self.shapes[i]
            here = received[:, at:at + each[i] * columns]
            here.copy_(filled(work(here.reshape(-1, columns)[:rows]), self.ranks * each[i]).reshape(self.ranks, -1))
            at += each[i] * columns
        with about("Muon's matrices"):
            dist.all_to_all_single(sent, received, group=self.group)
        return [whole[:len(part)].to(part.device) for whole, part in zip(self.rows_of(sent, each), parts)]

    def joined(self, matrices):
        """(length,): matrices one after the other."""
        flat = torch.cat([m.to(self.device, torch.float32).reshape(-1) for m in matrices] or [torch.empty(0, device=self.device)])
        return torch.nn.functional.pad(flat, (0, self.length - len(flat)))

    def rows_of(self, gathered, each):
        """(owners, length) -> [(each, columns)] of every matrix, in order."""
        out = [None] * len(self.shapes)
        for owned, flat in zip(self.dealt, gathered):
            at = 0
            for i in owned:
                columns = self.shapes[i][1]
                out[i] = flat[at:at + each[i] * columns].view(-1, columns)
                at += each[i] * columns
        return out


def deal(shapes: list[tuple[int, ...]], ranks: int, shards: int) -> tuple[list[list[int]], int]:
    """([indices of the matrices that each rank owns], elements of a shard of the most that one owns): the costliest first, each to the
    rank that has least to do. The cost is that of optim.orthogonalize: some products with the short side twice."""
    work, dealt = [0] * ranks, [[] for _ in range(ranks)]
    for i in sorted(range(len(shapes)), key=lambda i: -min(shapes[i]) ** 2 * max(shapes[i])):
        rank = min(range(ranks), key=lambda r: work[r])
        dealt[rank].append(i)
        work[rank] += min(shapes[i]) ** 2 * max(shapes[i])
    return dealt, max(sum(shard_rows(shapes[i][0], shards) * shapes[i][1] for i in owned) for owned in dealt)


def filled(t, rows):
    """t (n, columns) with rows of zeros behind, up to `rows`."""
    return torch.nn.functional.pad(t, (0, 0, 0, rows - t.size(0)))


class TreeSum:
    """Adds values (lists of tensors) that come one after the other in the order of a binary tree. Level k holds a sum of 2^k
    leaves or nothing, as a binary counter's digit k: memory for log2(leaves) values."""

    def __init__(self):
        self.levels = []

    def add(self, value: list[torch.Tensor]) -> None:
        for k, older in enumerate(self.levels):
            if older is None:
                self.levels[k] = value
                return
            torch._foreach_add_(older, value)  # the same bits as value + older
            value, self.levels[k] = older, None
        self.levels.append(value)

    def total(self) -> list[torch.Tensor] | None:
        """The sum of all that came; what is left over at the end is added from the smallest subtree up."""
        total = None
        for value in self.levels:
            if value is not None and total is not None:
                torch._foreach_add_(value, total)
            total = value if value is not None else total
        self.levels = []
        return total


def tree_sum(parts: list[torch.Tensor]) -> torch.Tensor:
    """Sums a list of tensors, one for each rank in order, as TreeSum would; a power of two of them, or TreeSum's order for the rest."""
    tree = TreeSum()
    for part in parts:
        tree.add([part])
    return tree.total()[0]


def split_micro_batches(count: int, ranks: int, rank: int, run: int) -> list[int]:
    """Which of an update's `count` micro-batches a rank takes, in order: runs of `run` neighbours, dealt round."""
    return [start + i for start in range(rank * run, count, ranks * run) for i in range(run)]


def power_of_two_in(n: int) -> int:
    """The largest power of two that divides n."""
    return n & -n


class Sync:
    """What the ranks of a run do together, for one layout: single, ddp or fsdp (with replicas: HSDP).

    `model` is called in the loop; `plain` is the module whose parameters, or whose adapters, are trained.
    """

    def __init__(self, plain: Any, place, config):
        self.plain, self.model, self.place, self.deterministic = plain, plain, place, config.deterministic
        self.ranks, self.layout = place.ranks, place.layout
        self.parameters = list(plain.parameters())
        self.trained = [p for p in self.parameters if p.requires_grad]  # with adapters these alone have gradients
        # what all ranks of a layer hold whole, the first one's norm counts
        self.counted = [p for p in self.trained if place.rank % place.tp == 0 or tensor_dim(p) is not None]
        each = config.micro_batches // place.groups
        # neighbours go to one rank where their sum is made there; FSDP exchanges every micro-batch, and so do ranks that share sequences
        self.run = power_of_two_in(each) if self.deterministic and self.layout != "fsdp" and place.cp == 1 else 1
        self.mine = split_micro_batches(config.micro_batches, place.groups, place.group, self.run)
        self.inner, self.outer = TreeSum(), TreeSum()
        self.own = OwnWork(plain, place, waits=self.layout == "fsdp" and not config.compile)
        if place.cp > 1:
            plain.context = ContextParallel(place.context_group, self.own.waiting_apart)
        if place.tp > 1:
            plain.tensor.wait_apart(self.own.waiting_apart, dtensor=not config.compile)
        self.last_bucket = None  # DDP: when the last bucket of gradients was sent
        if self.layout == "ddp" and not self.deterministic:
            self.wrap_ddp()

    # ---- the layouts

    def wrap_ddp(self):
        """DDP with its division by the number of ranks taken out: gradients are sums here."""
        from torch.nn.parallel import DistributedDataParallel

        devices = [self.place.device] if self.place.device.type == "cuda" else None
        self.model = DistributedDataParallel(self.plain, device_ids=devices, forward_sync_buffers=False, gradient_as_bucket_view=True)

        def sum_hook(group, bucket):
            self.last_bucket = mark(self.own.cuda)
            return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda f: f.value()[0])

        self.model.register_comm_hook(None, sum_hook)

    # ---- one update

    def micro_step(self, i: int) -> contextlib.AbstractContextManager:
        """The context of this rank's i-th forward and backward of an update: gradients meet in the last one only."""
        if i == 0:
            self.own.start_update()
        if self.layout == "fsdp" and self.place.replicas > 1 and not self.deterministic:
            self.plain.set_requires_all_reduce(i == len(self.mine) - 1)  # replicas meet once an update: 1/32 of the network for 32 micro-batches
        if self.model is not self.plain and i < len(self.mine) - 1:
            return self.model.no_sync()
        return contextlib.nullcontext()

    def after_backward(self, i: int) -> None:
        """Deterministic: moves the micro-batch's gradients from the parameters into the tree."""
        self.own.start_piece()
        if self.last_bucket is not None:  # all that was left to do was to wait for the buckets
            waited(self.last_bucket, self.own.started)
            self.last_bucket = None
        if not self.deterministic:
            return
        gradients = [local(p.grad) for p in self.trained]
        for p in self.trained:
            p.grad = None
        self.inner.add(gradients)
        if (i + 1) % self.run == 0:
            subtree = self.inner.total()
            self.outer.add(exchange(subtree) if self.layout == "ddp" and self.ranks > 1 else subtree)

    def finish_gradients(self) -> None:
        """Deterministic: the tree's total becomes the parameters' gradients."""
        if not self.deterministic:
            return
        for p, total in zip(self.trained, self.outer.total()):
            if hasattr(p, "to_local"):
                total = type(p).from_local(total, p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride())
            p.grad = total

    # ---- sums over all ranks

    @about("losses and norms")
    def sum_losses(self, losses: list[torch.Tensor]) -> tuple[float, list[float]]:
        """(The sum of all micro-batches' losses over all ranks, each rank's seconds of own work); `losses` are this rank's, in the order
        of `mine`. One small all-gather, in tree order."""
        if self.ranks == 1:
            return tree_sum(losses).item(), [self.own.seconds()]
        parts = torch.stack(losses)
        gathered = all_gather(torch.cat((parts, parts.new_tensor([self.own.seconds()])))).cpu()  # (ranks, each + 1)
        rows = of_groups(gathered[:, :-1], self.place)
        ordered = torch.empty(rows.numel())
        for group, row in enumerate(rows):
            ordered[split_micro_batches(rows.numel(), len(rows), group, self.run)] = row
        return tree_sum(list(ordered)).item(), gathered[:, -1].tolist()

    @torch.no_grad()
    def all_finite(self, tensors: list[torch.Tensor]) -> bool:
        """Whether every number in every rank's list of tensors is finite, on every rank."""
        tensors = [t for t in tensors if t.numel()]
        # the 2-norm takes 1/20 of the time of isfinite() on a CPU; it overflows for numbers that are finite, above 1e19
        norms = torch._foreach_norm(tensors) if tensors else []
        finite = not norms or bool(torch.stack([n.float() for n in norms]).isfinite().all()) or all(bool(t.isfinite().all()) for t in tensors)
        return bool(all_gather(torch.tensor(float(finite), device=self.place.device)).all()) if self.ranks > 1 else finite

    @torch.no_grad()
    @about("losses and norms")
    def gradient_norm(self) -> torch.Tensor:
        """The 2-norm of the whole gradient, the same on every rank and, when deterministic, for every layout."""
        gradients = [local(p.grad) for p in self.counted]
        if not self.deterministic:
            squares = torch.stack([g.square().sum() if g.numel() else g.new_zeros(()) for g in gradients]).sum() \
                if self.layout == "fsdp" else torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients))).square()
            if self.layout == "fsdp":
                squares = squares.to(self.place.device)
                dist.all_reduce(squares, group=self.place.shard_group)
                if self.place.tp > 1:
                    dist.all_reduce(squares, group=self.place.tensor_group)
            return squares.sqrt()
        rows = [row_squares(g) for g in gradients]
        if self.layout == "fsdp":
            rows = gather_rows(rows, self.counted, self.place.shard_group)
        squares = fold(torch.cat(rows))
        if self.place.tp > 1:
            squares = tree_sum(list(all_gather(squares, self.place.tensor_group)))
        return squares.sqrt().float()

    def check_replicas(self) -> None:
        """Recoverable that names the ranks whose parameters are not those of most: replicas are bit-equal or something is broken."""
        if self.place.ranks == self.place.parts:
            return  # no two ranks hold the same
        digest = hashlib.sha256()
        for p in self.parameters:
            digest.update(local(p).cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
        mine = torch.frombuffer(bytearray(digest.digest()[:8]), dtype=torch.int64).to(self.place.device)
        rows = all_gather(mine)[:, 0].tolist()
        parts = self.place.parts
        wrong = []
        for part in range(parts):  # ranks that hold the same
            held = rows[part::parts]
            usual = max(held, key=held.count)
            wrong += [i * parts + part for i, h in enumerate(held) if h != usual]
        if wrong:
            raise Recoverable(f"the parameters of rank {', '.join(map(str, sorted(wrong)))} are not those of its replicas any more: broken memory or a "
                            "bug; the checkpoints before this step are of the ranks that agreed")


class OwnWork:
    """How long a rank works by itself in an update: reading batches and the forward passes, but for what FSDP waits for in them. A rank
    that is slow shows here; in the rest of a step all wait for it alike.

    waits: where a layer's parameters are gathered before it, that is subtracted (inside a compiled block it cannot be seen).
    """

    def __init__(self, model, place, waits):
        self.cuda, self.pieces, self.started = place.device.type == "cuda", [], None
        if place.ranks == 1:
            return  # nobody to be compared with
        model.register_forward_hook(self.after_forward)
        for module in [model, *[block.attn.q for block in model.blocks]] if waits else []:  # the first of each group that is gathered
            module.register_forward_pre_hook(self.before_waiting, prepend=True)
            module.register_forward_pre_hook(self.after_waiting)

    def start_update(self):
        self.pieces = []
        self.start_piece()

    def start_piece(self):
        self.started = mark(self.cuda)

    def note(self, start, end, sign=1):
        if start is not None and torch.is_grad_enabled():
            self.pieces.append((sign, start, end))

    def before_waiting(self, *_):
        self.waiting = mark(self.cuda)

    def after_waiting(self, *_):
        self.note(self.waiting, mark(self.cuda), sign=-1)

    def after_forward(self, *_):
        self.note(self.started, mark(self.cuda))
        self.started = None

    @contextlib.contextmanager
    def waiting_apart(self):
        """Around a wait for other ranks inside an operation; one of the backward does not count."""
        start = mark(self.cuda)
        yield
        if self.started is not None:
            self.pieces.append((-1, start, mark(self.cuda)))

    def seconds(self) -> float:
        """Of the update's pieces so far; on CUDA only once the last of them is over."""
        if self.cuda and self.pieces:
            self.pieces[-1][2].synchronize()
        return sum(sign * seconds_between(start, end) for sign, start, end in self.pieces)


@torch.no_grad()
@about("gradients")
def exchange(gradients: list[torch.Tensor]) -> list[torch.Tensor]:
    """Sums lists of tensors over all ranks in tree order, the same result on each: shards change places in one all-to-all (the bytes
    of a reduce-scatter), each rank adds up its shard, and an all-gather brings the sums back."""
    ranks = dist.get_world_size()
    flat = torch.cat([g.reshape(-1) for g in gradients])
    padded = torch.nn.functional.pad(flat, (0, -len(flat) % ranks)).view(ranks, -1)
    received = torch.empty_like(padded)
    dist.all_to_all_single(received, padded)
    summed = tree_sum(list(received))
    dist.all_gather_single(padded.view(-1), summed)
    out, at = [], 0
    for g in gradients:
        out.append(padded.view(-1)[at:at + g.numel()].view(g.shape))
        at += g.numel()
    return out


def all_gather(t: torch.Tensor, group=None) -> torch.Tensor:
    """(ranks, *shape of t): every rank's t, in rank order."""
    out = t.new_empty(dist.get_world_size(group) * t.numel())
    dist.all_gather_single(out, t.reshape(-1), group=group)
    return out.view(-1, *t.shape)


def of_groups(values: torch.Tensor, place) -> torch.Tensor:
    """(ranks, n) losses of every rank's micro-batches -> (groups, n), those of whole micro-batches: ranks that share sequences have a part
    of each loss, ranks that share layers the same."""
    return tree_sum(list(values.view(place.groups, place.cp, place.tp, -1)[:, :, 0].unbind(1)))


def fold(x: torch.Tensor) -> torch.Tensor:
    """Sums the last dimension by adding its second half to its first until one is left: only elementwise additions, whose rounding
    depends neither on the number of rows nor on the machine's vector width."""
    while (n := x.size(-1)) > 1:
        half = n // 2
        x = torch.cat((x[..., :half] + x[..., half:2 * half], x[..., 2 * half:]), dim=-1)
    return x[..., 0] if x.size(-1) else x.new_zeros(x.shape[:-1])


def row_squares(g: torch.Tensor) -> torch.Tensor:
    """Each row's sum of squares in float64, (rows,): a row lies whole on one rank however a matrix is sharded."""
    g = g.double().square()
    return fold(g.flatten(1)) if g.dim() > 1 else g


def gather_rows(rows: list[torch.Tensor], parameters: list[torch.Tensor], group) -> list[torch.Tensor]:
    """This rank's row sums of every parameter -> those of whole parameters (tensor parallelism's parts of them), on every rank."""
    ranks = dist.get_world_size(group)
    lengths = [p.size(0) // (shard_of(p, "tp")[0] if tensor_dim(p) == 0 else 1) for p in parameters]
    sizes = [shard_rows(n, ranks) for n in lengths]  # of the padded shards, the same on all ranks
    flat = torch.cat([torch.nn.functional.pad(r, (0, n - len(r))) for r, n in zip(rows, sizes)])
    gathered = all_gather(flat, group)  # (ranks, all rows of a rank)
    out, at = [], 0
    for length, n in zip(lengths, sizes):
        out.append(gathered[:, at:at + n].reshape(-1)[:length])
        at += n
    return out


# ---------------------------------------------------------------------------------------------------------------- FSDP


class TreeReduceScatter:
    """FSDP2's reduce-scatter with a fixed order of its sums: an all-to-all of shards, then a local sum in tree order."""

    def allocate(self, size, *, dtype, device):
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
        received = torch.empty_like(input_tensor)
        dist.all_to_all_single(received, input_tensor, group=group)
        output_tensor.copy_(tree_sum(list(received.view(dist.get_world_size(group), -1))))


def shard(model: Any, place, config, precision) -> None:
    """Shards a GPT in place with FSDP2, a block at a time: each block's Linears are one group that is gathered for its forward and
    backward (in the autocast type, where there is one), everything else is the root's, in float32.

    With tp > 1 layers are first cut over the ranks that share them. With replicas (HSDP) gradients are also summed over them: by FSDP2, or
    deterministic, by a hook in tree order.
    """
    from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

    if place.tp > 1:
        parallelize(model, place.mesh["tp"])
    mesh = place.mesh["dp_shard"] if config.deterministic or place.replicas == 1 else place.mesh["dp_replicate", "dp_shard"]
    offload = CPUOffloadPolicy(pin_memory=place.device.type == "cuda") if config.cpu_offload else OffloadPolicy()
    common = dict(mesh=mesh, offload_policy=offload)
    linears = MixedPrecisionPolicy(param_dtype=precision.autocast, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard([m for m in block.modules() if isinstance(m, torch.nn.Linear)], mp_policy=linears,
                    reshard_after_forward=config.reshard_after_forward, **common)
    fully_shard(model, reshard_after_forward=False, **common)
    for module in model.modules():
        if not isinstance(module, FSDPModule):
            continue
        module.set_gradient_divide_factor(1.0)  # gradients are sums here
        module.set_force_sum_reduction_for_comms(True)
        if config.deterministic:
            module.set_custom_reduce_scatter(TreeReduceScatter())  # type: ignore[arg-type]
            if place.replicas > 1:
                module.set_all_reduce_hook(about("gradients")(lambda part: part.copy_(tree_sum(list(all_gather(part, place.replica_group))))))  # type: ignore[arg-type]
