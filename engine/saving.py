"""When and in which thread a run's checkpoints are written, and which of them stay. (checkpoint.py: what is written, and how.)

With async_save the loop only waits for a copy of its state into CPU memory; a thread writes it. The thread's ranks meet in the
store, over a connection of their own, so that no collective of theirs comes between those of the loop.
"""

import contextlib
import dataclasses
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import torch

from engine import checkpoint as ckpt
from engine.recovery import usable
from engine.sync import local


class Saver:
    """Writes checkpoints one after the other: in the caller's thread, or with async_save behind its back."""

    def __init__(self, run, place, model, optimizer, config, tokenizer, metrics, lock, watch, saved_step):
        self.run, self.model, self.optimizer, self.config, self.tokenizer = run, model, optimizer, config, tokenizer
        self.metrics, self.lock, self.watch = metrics, lock, watch
        self.place = dataclasses.replace(place, store=place.own_store("saves"), agreements=0)
        self.step = saved_step  # of the newest checkpoint, complete or being written
        self.thread = ThreadPoolExecutor(1, "save", give_way) if config.async_save else None
        self.pending, self.copy = [], None

    def tensors(self):
        """What a checkpoint holds of this rank: {"model": {name: tensor}, "optimizer": {name: tensor}}."""
        return {"model": {n: local(p) for n, p in self.model.named_parameters()}, "optimizer": self.optimizer.state()}

    def save(self, state, last=False):
        """A checkpoint of state["step"], unless there is one; `last`: nothing follows that it could be written beside."""
        asked = time.perf_counter()
        self.wait()  # saves never overlap
        if self.step == state["step"]:
            return self._do(self._tidy)
        tensors, self.step = self.tensors(), state["step"]
        if self.thread and not last:
            tensors = self._copy(tensors) if self.place.writes else {}
            self._do(self._write, state, tensors, time.perf_counter() - asked)
        else:
            self._write(state, tensors, None)

    def mark_best(self, step):
        """Keeps the checkpoint of `step` apart as best, once it is complete."""
        self._do(self._mark_best, step)

    def wait(self):
        """Returns when all that was asked for is done; raises what went wrong in it."""
        while self.pending:
            self.pending.pop(0).result()

    def close(self):
        if self.thread:
            self.thread.shutdown()

    def _do(self, work, *arguments):
        if self.thread is None:
            return work(*arguments)
        future = self.thread.submit(work, *arguments)
        self.pending.append(future)
        # the loop stops on all ranks at one place, and finds the fault in wait()
        future.add_done_callback(lambda f: f.exception() and self.watch.ask("a checkpoint could not be written"))

    def _copy(self, tensors):
        """The tensors' values in CPU memory that is kept for this: fresh memory costs more than the copy."""
        if self.copy is None:
            pin = self.place.device.type == "cuda"
            self.copy = {part: {n: torch.empty(t.shape, dtype=t.dtype, pin_memory=pin) for n, t in found.items()} for part, found in tensors.items()}
        for part, found in tensors.items():
            for name, t in found.items():
                self.copy[part][name].copy_(t, non_blocking=True)
        if self.place.device.type == "cuda":
            torch.cuda.synchronize()
        return self.copy

    def _write(self, state, tensors, stalled):
        started = time.perf_counter()
        with usable(self.run):
            path, size = ckpt.save(self.run, self.place, self.model, tensors, state, self.tokenizer, self.metrics.sync)
        if not self.place.speaks:
            return
        seconds = time.perf_counter() - started
        self.metrics.event(state["step"], "saved", path=path, bytes=size, seconds=round(seconds, 3), stalled=round(seconds if stalled is None else stalled, 3))
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


def give_way():
    """Lets the calling thread run only where the loop's threads leave a core idle (Linux; elsewhere it has no say)."""
    with contextlib.suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
