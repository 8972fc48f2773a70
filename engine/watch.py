"""Watching over a run: what asks it to save and leave, at the same place on every rank, and what has stopped moving.

A thread in each rank looks around a few times a second. Ranks agree to stop through torchrun's store, not through collectives,
so it costs the loop nothing: each rank counts the pieces of work (micro-batches, evaluation batches) that it has started, every
rank in the same order. Once a stop is asked for, each rank's thread publishes its count and lets its rank start no further piece;
the highest count is where all stop. A rank behind it still has pieces to make, since the others may wait for it in those.
"""

import contextlib
import datetime
import faulthandler
import os
import signal
import tempfile
import threading
import time
from collections.abc import Iterator

from engine import voice
from engine.config import Config
from engine.errors import EXIT_FAILED, EXIT_SIGNAL
from engine.processes import WORK_SECONDS, Place, set_timeout
from engine.recovery import FOR_GOOD, Stopped, end_process, first_to, write_error

LOOK_SECONDS = 0.2
ANSWER_SECONDS = 10  # for another rank's thread to answer; after that it is taken for dead
FIRST_STEP_SECONDS = 20  # torchrun kills 30 s after SIGTERM, a compilation may take longer


class Watch:
    """Signals, time limit, watchdog and orphans of one rank. Before start() a signal raises Stopped: there is nothing to save.

    step: finished updates, kept by the loop. stopped: all ranks stand at the same place, for good.
    """

    def __init__(self, place: Place):
        self.place, self.step, self.stopped = place, 0, False
        self.reason = None  # what asks for a stop: a signal's name, time_limit, or words
        self.started, self.target = 0, None  # pieces of work that this rank has begun; where all stop
        self.lock, self.settled, self.closed = threading.Lock(), threading.Event(), threading.Event()
        self.thread: threading.Thread | None = None
        self.halting, self.posted, self.patient = False, False, False
        self.parent = os.getppid()

    def __enter__(self):
        for name in ("SIGTERM", "SIGINT", "SIGUSR1"):  # USR1: Slurm's warning
            if hasattr(signal, name):
                signal.signal(getattr(signal, name), self._signalled)
        return self

    def __exit__(self, *error):
        self.closed.set()
        if self.thread:
            self.thread.join(timeout=2)
            faulthandler.cancel_dump_traceback_later()

    def _signalled(self, number, frame):
        name = signal.Signals(number).name
        if self.thread is None:
            raise Stopped(name)
        if self.reason and number == signal.SIGINT:
            raise KeyboardInterrupt  # Ctrl-C for the second time
        self.ask(name)

    def ask(self, reason: str) -> None:
        """Asks all ranks to stop at their next common place; from any thread."""
        self.reason = self.reason or reason

    def start(self, config: Config, step: int) -> None:
        """From here on a stop is agreed on and saves, and standing still is noticed."""
        self.config, self.step, self.first_step = config, step, step
        self.store = self.place.own_store("watch")
        self.moved = time.monotonic()
        self.thread = threading.Thread(target=self._look_around, name="watch", daemon=True)
        self.thread.start()

    def here(self) -> bool:
        """Whether all ranks stop before the next piece of work. Every rank asks at the same places in the same order."""
        self.moved = time.monotonic()
        if self.store is None:
            self.stopped = self.reason is not None
            return self.stopped
        with self.lock:
            if not self.halting:
                self.started += 1
                return False
        self.settled.wait()  # the thread ends the process where another rank does not answer
        self.stopped = self.started >= self.target
        self.started += not self.stopped
        return self.stopped

    def moves(self) -> None:
        """A sign of life from work that has no pieces."""
        self.moved = time.monotonic()

    @contextlib.contextmanager
    def unhurried(self) -> Iterator[None]:
        """Around what one rank may do while the others wait: saving, evaluation, sample texts. Collectives and standing still have an
        hour in it."""
        self.patient = True
        set_timeout(self.place, WORK_SECONDS)
        yield
        set_timeout(self.place, self.config.collective_seconds)
        self.moves()
        self.patient = False

    # ------------------------------------------------------------------------------------------------ the thread's side

    def _look_around(self):
        asked = None
        while not self.closed.wait(max(LOOK_SECONDS, self.place.ranks / 500)):  # the store serves all ranks
            if "TORCHELASTIC_RUN_ID" in os.environ and os.getppid() != self.parent:
                self._leave(EXIT_FAILED, "its torchrun is gone")
            if self.config.time_limit and self.place.speaks and time.monotonic() - self.place.job_started > self.config.time_limit:
                self.ask("time_limit")
            try:
                self._agree()
                hung = self._hung()
            except Exception as error:  # the store went with its host
                if self.reason:
                    self._leave(EXIT_FAILED, f"told to stop ({self.reason}), it cannot reach the others: {error}")
                hung = self._stands_still()
            if hung:
                self._dump()
            if self.reason and not self.stopped and self.step == self.first_step:
                asked = asked or time.monotonic()
                if time.monotonic() - asked > FIRST_STEP_SECONDS:
                    if first_to(self.place, "stopped"):
                        voice.say(f"{self.reason}: leaving in the first step, which has not ended: nothing of this start is saved, what earlier ones saved is")
                    end_process(self.place, EXIT_SIGNAL, for_good=self.reason in FOR_GOOD)

    def _agree(self):
        if self.store is None or self.target is not None:
            return
        if self.reason and not self.posted:
            self.store.compare_set("stop", "", self.reason)  # the first reason stands
            self.posted = True
        if not self.store.check(["stop"]):
            return
        with self.lock:
            self.halting = True
        self.reason = self.store.get("stop").decode()
        self.store.set(f"stop/{self.place.rank}", str(self.started))
        keys = [f"stop/{r}" for r in range(self.place.ranks)]
        try:
            self.store.wait(keys, datetime.timedelta(seconds=ANSWER_SECONDS))
        except Exception:
            silent = ", ".join(k.removeprefix("stop/") for k in keys if not self.store.check([k]))
            self._leave(EXIT_FAILED, f"told to stop ({self.reason}), it finds that rank {silent} does not answer; the last checkpoint stands")
        self.target = max(int(self.store.get(k)) for k in keys)
        self.settled.set()

    def _leave(self, code, why):
        if first_to(self.place, "failed"):
            write_error(f"error: rank {self.place.rank} on {self.place.host} leaves at step {self.step + 1}: {why}\n")
        end_process(self.place, code)

    # ------------------------------------------------------------------------------------------------------ the watchdog

    def _stands_still(self):
        if not self.config.watchdog_seconds:
            return False
        compiling = self.config.compile and self.step == self.first_step
        limit = max(self.config.watchdog_seconds, WORK_SECONDS) if self.patient or compiling or self.stopped else self.config.watchdog_seconds
        # where even this thread cannot run, the C code of faulthandler does the same
        faulthandler.dump_traceback_later(limit + 60, exit=True)
        return time.monotonic() - self.moved > limit

    def _hung(self):
        """Whether this rank, or any other, has stood still for too long."""
        if self._stands_still():
            if self.store is not None:
                self.store.set("hung", "1")
            return True
        return self.store is not None and self.store.check(["hung"])

    def _dump(self):
        """Every rank's stacks to the log, and a hard end, so that torchrun starts again."""
        with tempfile.TemporaryFile() as f:
            faulthandler.dump_traceback(f)
            f.seek(0)
            stacks = f.read().decode(errors="replace")
        write_error(f"error: no step was finished in watchdog_seconds={self.config.watchdog_seconds}: rank {self.place.rank} on {self.place.host} "
                    f"was in step {self.step + 1} for {time.monotonic() - self.moved:.0f} s; where it stands:\n{stacks}")
        if self.store is not None:
            with contextlib.suppress(Exception):  # torchrun ends all once one has left: each is to have spoken by then
                self.store.add("dumped", 1)
                deadline = time.monotonic() + 5
                while self.store.add("dumped", 0) < self.place.ranks and time.monotonic() < deadline:
                    time.sleep(0.05)
        end_process(self.place, EXIT_FAILED)
