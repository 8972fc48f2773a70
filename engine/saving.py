"""When and in which thread a run's checkpoints are written, and which of them stay. (checkpoint.py: what is written, and how.)

With async_save a thread writes while the loop goes on. It reads the state where it lies, for as long as the next update has not come;
only what it has not read by then is copied. The thread's ranks meet in the store, over a connection of their own, so that no
collective of theirs comes between those of the loop.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
import time
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import torch

from engine import checkpoint as ckpt
from engine.recovery import RunLock, usable
from engine.resume import best_step
from engine.sync import Sync, local

if TYPE_CHECKING:
    from data.tokenizers import Tokenizer
    from engine.config import Config
    from engine.metrics import Metrics
    from engine.optim import AdamW, Muon
    from engine.processes import Place
    from engine.watch import Watch
    from model import GPT


class Saver:
    """Writes checkpoints one after the other: in the caller's thread, or with async_save behind its back."""

    def __init__(self, run: str, place: Place, sync: Sync, model: GPT, optimizer: AdamW | Muon, config: Config, tokenizer: Tokenizer | None, metrics: Metrics,
                 lock: RunLock, watch: Watch, saved_step: int | None):
        self.run, self.sync, self.optimizer, self.config, self.tokenizer = run, sync, optimizer, config, tokenizer
        self.parameters = dict(model.named_parameters())  # now: in a forward pass FSDP's modules show whole parameters in place of shards
        self.metrics, self.lock, self.watch = metrics, lock, watch
        self.place = dataclasses.replace(place, store=place.own_store("saves"), agreements=0)
        self.step = saved_step  # of the newest checkpoint, complete or being written
        self.thread = ThreadPoolExecutor(1, "save", give_way) if config.async_save else None
        self.pending, self.snapshot, self.buffers = [], None, {}

    def save(self, state: dict[str, Any], last: bool = False) -> bool:
        """A checkpoint of state["step"], unless there is one; `last`: nothing follows that it could be written beside.

        False, and nothing is written, where a weight or a number of the optimizer's state is not finite on any rank.
        """
        asked = time.perf_counter()
        self.wait()  # saves never overlap
        if self.step == state["step"]:
            self._do(self._tidy)
            return True
        tensors = {"model": {n: local(p) for n, p in self.parameters.items()}, "optimizer": self.optimizer.state()}
        if not self.sync.all_finite([t for part in tensors.values() for t in part.values()]):
            return False
        self.step = state["step"]
        if self.thread and not last:
            changing = {"model": {n: t for n, t in tensors["model"].items() if self.parameters[n].requires_grad}, "optimizer": tensors["optimizer"]}
            self.snapshot = Snapshot(changing, self.buffers, self.place.device) if self.place.writes else None
            self._do(self._write, state, tensors, self.snapshot, time.perf_counter() - asked)
        else:
            self._write(state, tensors)
        return True

    def before_update(self) -> None:
        """To be called before the state changes: what the thread has not read of it yet is copied."""
        if self.snapshot:
            self.snapshot.copy_rest()
            self.snapshot = None

    def mark_best(self, step: int) -> None:
        """Keeps the checkpoint of `step` apart as best, once it is complete."""
        self._do(self._mark_best, step)

    def mend_best(self) -> None:
        """A run killed between a validation loss and the mark of its step as best gets the mark now."""
        best, _ = self.metrics.best()
        if self.place.speaks and best in ckpt.list_steps(self.run) and best != best_step(self.run):
            self.mark_best(best)

    def wait(self) -> None:
        """Returns when all that was asked for is done; raises what went wrong in it."""
        while self.pending:
            self.pending.pop(0).result()

    def close(self) -> None:
        """Returns when the thread has done what it was asked for."""
        if self.thread:
            self.thread.shutdown()

    def _do(self, work, *arguments):
        if self.thread is None:
            return work(*arguments)
        future = self.thread.submit(work, *arguments)
        self.pending.append(future)
        # the loop stops on all ranks at one place, and finds the fault in wait()
        future.add_done_callback(self._written)

    def _written(self, future):
        if future.exception():
            self.watch.ask("a checkpoint could not be written")

    def _write(self, state, tensors, snapshot=None, stalled=None):
        started = time.perf_counter()
        with usable(self.run):
            path, size = ckpt.save(self.run, self.place, self.parameters, tensors, state, self.tokenizer, self.metrics.sync,
                                   snapshot.pieces if snapshot else ckpt.pieces)
        if not self.place.speaks:
            return
        seconds = time.perf_counter() - started
        stalled = stalled + snapshot.stalled if snapshot else seconds
        self.metrics.event(state["step"], "saved", path=path, bytes=size, seconds=round(seconds, 3), stalled=round(stalled, 3))
        self.place.say(f"saved {path}")
        self._tidy()

    def _tidy(self):
        if self.place.speaks:
            with usable(self.run):
                ckpt.delete_old(self.run, self.config.keep_last, self.config.keep_every)
                self.lock.touch()

    def _mark_best(self, step):
        with usable(self.run):
            ckpt.mark_best(self.run, step)


class Snapshot:
    """The state of one step, for a thread that writes it while the loop goes on to the next update.

    The thread reads a piece at a time, with the lock held; copy_rest() waits for the piece it is at and copies what lies beyond.
    """

    def __init__(self, tensors: dict[str, dict[str, torch.Tensor]], buffers: dict[str, torch.Tensor], device: torch.device):
        """tensors: {part: {name: tensor}} that change in an update, in the order in which they are read. buffers: CPU memory to copy to, kept from save to save,
        since fresh memory costs more than the copy."""
        self.tensors = {id(t): (f"{part}/{name}", t) for part, found in tensors.items() for name, t in found.items()}
        self.buffers, self.cuda, self.stalled = buffers, device.type == "cuda", 0.0
        self.copies, self.read, self.copied = {}, set(), None  # by id of the tensor
        self.lock, self.gate = threading.Lock(), threading.Event()
        self.gate.set()
        if self.cuda:
            self.stream, self.ready = torch.cuda.Stream(device), torch.cuda.current_stream(device).record_event()

    def pieces(self, t: torch.Tensor) -> Generator[memoryview, None, None]:
        """The bytes of a tensor, a piece at a time."""
        flat, each = t.detach().view(-1), max(1, ckpt.PIECE // t.element_size())
        for start in range(0, flat.numel(), each):
            self.gate.wait()
            with self.lock:
                here = self.copies.get(id(t))
                if here is None:
                    yield self._to_cpu(flat[start:start + each]).view(torch.uint8).numpy().data
            if here is not None:
                if self.copied:
                    self.copied.synchronize()
                yield here.view(-1)[start:start + each].view(torch.uint8).numpy().data
        self.read.add(id(t))

    def _to_cpu(self, piece):
        if not self.cuda:
            return piece
        with torch.cuda.stream(self.stream):  # beside what the loop computes
            self.stream.wait_event(self.ready)
            return piece.cpu()

    def copy_rest(self) -> None:
        """Copies what the thread has not read of the state, which may change once this returns."""
        started = time.perf_counter()
        self.gate.clear()
        with self.lock:
            for key, (name, t) in self.tensors.items():
                if key in self.read:
                    continue
                if name not in self.buffers:
                    self.buffers[name] = torch.empty(t.shape, dtype=t.dtype, pin_memory=self.cuda)
                self.copies[key] = self.buffers[name].copy_(t, non_blocking=True)
            if self.cuda:  # copies and update follow each other on the device; the thread waits for them, the loop does not
                self.copied = torch.cuda.current_stream().record_event()
        self.gate.set()
        self.stalled = time.perf_counter() - started


def give_way() -> None:
    """Lets the calling thread run only where the loop's threads leave a core idle (Linux; elsewhere it has no say)."""
    with contextlib.suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
