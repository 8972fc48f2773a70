"""Failure recovery: a rank that fails, faults told once, jobs that have ended for good, bad steps, slow ranks, and two jobs kept off one
folder. (watch.py: signals and hangs.)

Imports nothing heavy: a restarted worker of a job that has ended is gone before torch is loaded.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator
from typing import TYPE_CHECKING, NoReturn

from engine import voice
from engine.errors import EXIT_BAD_INPUT, EXIT_FAILED, EXIT_SIGNAL, Recoverable, UserError, full_disk_told, tell

if TYPE_CHECKING:
    from engine.processes import Place
    from engine.watch import Watch

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

STARTED = time.monotonic()
# Stops after which torchrun's restarts leave at once. Not SIGTERM: torchrun sends it when machines come and go, and starts again.
FOR_GOOD = ("SIGINT", "SIGUSR1", "time_limit")


class Stopped(BaseException):
    """A signal, by its name, before the first update: there is nothing to save. No Exception, so that no handler takes it for a fault."""


def parent_started() -> str:
    """When torchrun, the parent process, was started, in clock ticks since boot; "" where the system does not say."""
    try:
        with open(f"/proc/{os.getppid()}/stat") as f:
            return f.read().rsplit(")", 1)[1].split()[19]
    except OSError:
        return ""


def job_seconds() -> float:
    """Seconds since the command was started: torchrun's, where there is one, so that restarts count in."""
    ticks = parent_started() if "TORCHELASTIC_RUN_ID" in os.environ else ""
    if not ticks:
        return time.monotonic() - STARTED
    with open("/proc/uptime") as f:
        return float(f.read().split()[0]) - int(ticks) / os.sysconf("SC_CLK_TCK")


def job_mark() -> str | None:
    """A file that says that this torchrun's job has ended for good: torchrun starts the workers again, and they leave at once.
    None where there is no torchrun."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    # process ids come again, start times do not
    return os.path.join(tempfile.gettempdir(), f"boringgpt-{os.getuid()}-{os.getppid()}-{parent_started()}.ended")


def mark_ended(code: int) -> None:
    """Lets the workers that torchrun may start again leave with this code: a restart would not cure, or nobody wants one."""
    mark = job_mark()
    if mark and os.environ.get("TORCHELASTIC_RESTART_COUNT") != os.environ.get("TORCHELASTIC_MAX_RESTARTS"):  # else nobody comes after this
        with contextlib.suppress(OSError), open(mark, "x") as f:
            f.write(str(code))


def leave_if_ended() -> None:
    """Ends a worker that torchrun has started again after the job has ended for good."""
    mark, restarts = job_mark(), os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if mark is None or restarts == "0":
        return
    try:
        with open(mark) as f:
            if os.fstat(f.fileno()).st_uid != os.getuid():
                return  # somebody else's
            code = int(f.read() or EXIT_BAD_INPUT)
    except (OSError, ValueError):
        return
    if restarts == os.environ.get("TORCHELASTIC_MAX_RESTARTS") and os.environ.get("LOCAL_RANK") == "0":
        with contextlib.suppress(OSError):
            os.unlink(mark)  # nobody comes after these
    os._exit(code)


@contextlib.contextmanager
def told_once(place: Place, watch: Watch) -> Iterator[None]:
    """Around a rank's whole work: of a fault that all ranks share one tells; of a rank that fails, that rank alone, at once and
    without collectives, since the others may wait in one."""
    try:
        with full_disk_told(), voice.bar_at_work():
            yield
    except Stopped as stopped:
        if first_to(place, "stopped"):
            voice.say(f"{stopped}: leaving; nothing has been trained since the start")
        end_process(place, EXIT_SIGNAL, for_good=str(stopped) in FOR_GOOD)
    except UserError as error:
        if place.store is None:
            raise
        if place.speaks:
            tell(error)
        with contextlib.suppress(Exception):  # torchrun ends all ranks once one has left: rank 0 must have spoken by then
            if place.speaks:
                place.store.set("told", "1")
            place.store.wait(["told"], datetime.timedelta(seconds=10))
        end_process(place, EXIT_BAD_INPUT, for_good=not isinstance(error, Recoverable))
    except BaseException as error:
        if place.store is None or isinstance(error, SystemExit):
            raise
        if first_to(place, "failed"):
            # one write: other ranks' lines do not come in between
            write_error(f"error: rank {place.rank} on {place.host} failed at step {watch.step + 1}:\n{traceback.format_exc()}")
        end_process(place, EXIT_FAILED)


def first_to(place: Place, what: str) -> bool:
    """Whether this rank is the first of all to come here, or cannot know: the store may have died with its host, or the network."""
    answer = []

    def ask():
        with contextlib.suppress(Exception):
            answer.append(place.store is None or place.store.add(what, 1) == 1)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(timeout=5)
    return answer != [False]


def write_error(text: str) -> None:
    """Puts text on stderr in one write, behind what stdout holds."""
    sys.stdout.flush()
    os.write(sys.stderr.fileno(), text.encode())


def end_process(place: Place, code: int, for_good: bool = False) -> NoReturn:
    """Leaves at once, whatever other threads are at; for_good: what torchrun starts again leaves too."""
    if for_good:
        mark_ended(code)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


@contextlib.contextmanager
def usable(run: str) -> Iterator[None]:
    """Around work on a run's folder: what the operating system refuses there is the user's to mend."""
    try:
        with full_disk_told():
            yield
    except OSError as error:
        raise UserError(f"out_dir={run} cannot be used: {error.strerror}: {error.filename}; give another --out_dir, or move what is in the way") from error


class BadSteps:
    """Updates whose loss or gradient norm is not finite. Each is skipped; after `most` in a row the run goes back to its last
    checkpoint, in case the state is what is broken, and passes over their samples on the way; bad again before the next checkpoint,
    and it ends."""

    def __init__(self, most: int):
        self.most, self.in_row = most, 0
        self.found, self.ahead = {}, {}  # first sample -> samples: met, and to pass over
        self.went_back_to = None

    def skip(self, first: int, count: int, counts: bool) -> bool:
        """Notes a bad update; `counts` is False where float16 is only looking for its loss scale. True where it is one too many."""
        self.found[first] = count
        self.in_row += counts
        return self.in_row >= self.most

    def go_back(self, step: int, samples: int) -> bool:
        """The run is at the checkpoint of `step` again, its next sample is `samples`. False where it has been sent there before."""
        again = self.went_back_to == step
        self.went_back_to, self.in_row = step, 0
        self.ahead = {first: count for first, count in self.found.items() if first >= samples}
        return not again


class SlowRanks:
    """Names a rank whose own work takes longer than MARGIN times the median rank's for STEPS updates in a row: the others wait for it."""

    MARGIN, STEPS, LEAST_SECONDS = 1.25, 20, 0.002

    def __init__(self):
        self.rows = {}  # rank -> updates in a row

    def note(self, seconds: list[float]) -> list[tuple[int, float]]:
        """seconds: each rank's own work of an update. [(rank, times the median)] of ranks to name now."""
        median = sorted(seconds)[(len(seconds) - 1) // 2]
        slow = {r for r, s in enumerate(seconds) if s > self.MARGIN * median and s - median > self.LEAST_SECONDS}
        self.rows = {r: self.rows.get(r, 0) + 1 for r in slow}
        return [(r, seconds[r] / median) for r in sorted(slow) if self.rows[r] == self.STEPS]


class RunLock:
    """One job a run folder. The kernel drops the lock when its holder dies, so a dead job's lock file holds nobody up."""

    STALE_AFTER = 600  # seconds without a sign of life, on file systems without locks

    def __init__(self, out_dir: str):
        self.path = os.path.join(out_dir, "lock")
        self.file = open(self.path, "a+")
        try:
            if fcntl is None:
                raise OSError("no locks on this system")
            fcntl.lockf(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # a record lock: NFS knows it too, no child inherits it
        except (BlockingIOError, PermissionError):
            self._refuse()
        except OSError:
            holder = self._holder()
            alive = time.time() - os.path.getmtime(self.path) < self.STALE_AFTER
            if holder and alive and not (holder["host"] == socket.gethostname() and not _runs(holder["pid"])):
                self._refuse()
        self.touch()

    def touch(self) -> None:
        """Says who holds it, and that the holder lives."""
        self.file.seek(0)
        self.file.truncate()
        json.dump({"host": socket.gethostname(), "pid": os.getpid()}, self.file)
        self.file.flush()

    def release(self) -> None:
        """Lets the folder go; the file stays, empty."""
        self.file.seek(0)
        self.file.truncate()  # the empty file stays: deleting it would race with a job that has just opened it
        self.file.close()

    def _holder(self):
        self.file.seek(0)
        try:
            return json.load(self.file)
        except ValueError:
            return None

    def _refuse(self):
        holder = self._holder()
        who = f"process {holder['pid']} on {holder['host']}" if holder else "another process"
        raise UserError(f"{os.path.dirname(self.path)} is in use by {who}: stop that job, or give another --out_dir")


def _runs(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
