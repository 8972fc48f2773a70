"""The programs that draw a run while it goes on, told what metrics.jsonl is told: Weights & Biases and TensorBoard, where asked for.

None of them is worth a run: what cannot start or breaks on the way is told in one sentence, and the run goes on without it.
"""

from __future__ import annotations

import functools
import glob
import json
import os
import struct
import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from engine import voice

if TYPE_CHECKING:
    from engine.config import Config


class Wandb:
    """A run on wandb.ai, or in a folder for `wandb sync` with WANDB_MODE=offline. id: what a resumed run goes on under.

    wandb cannot take back what it has been told, and of what it was told just before a kill it may have lost the end. So a start looks up what
    it has, and tells it the rest of metrics.jsonl; updates that are made again are the same to the last bit and are not told again.
    """

    def __init__(self, run: str, config: Config, settings: dict[str, Any], run_id: str | None, records: Iterable[dict[str, Any]]):
        """settings: the resolved ones, a dict. records: the lines of metrics.jsonl."""
        import wandb

        name = config.wandb_run_name or os.path.basename(os.path.normpath(run))
        self.known = steps_offline(run, run_id) if run_id else {}  # kind -> the last step of it that wandb has
        terminal, sys.stdin = sys.stdin, open(os.devnull)  # who is not logged in would be asked, and a run does not wait for an answer
        try:
            self.run = wandb.init(project=config.wandb_project, name=name, id=run_id, resume="allow", config=settings, dir=run)
        finally:
            sys.stdin.close()
            sys.stdin = terminal
        self.id = self.run.id
        for key, value in dict(self.run.summary).items():  # of a run that is resumed on a server
            if key.endswith("/step"):
                self.known[key.removesuffix("/step")] = value
        # a step metric of ours: wandb drops what comes for a step below its own counter, and an evaluation follows its update
        self.run.define_metric("step")
        self.run.define_metric("*", step_metric="step")
        for record in records:
            if record["kind"] != "event":
                self.write(record.pop("kind"), record.pop("step"), record)

    def write(self, kind: str, step: int, values: dict[str, Any]) -> None:
        """Tells a line of metrics.jsonl, {name: value}, unless wandb has one of its kind for this step or a later one."""
        if step > self.known.get(kind, -1):
            self.known[kind] = step
            self.run.log({"step": step, f"{kind}/step": step, **{f"{kind}/{name}": v for name, v in values.items() if v is not None}})

    def go_back(self, step: int) -> None:
        pass  # see above

    def flush(self) -> None:
        pass  # a process of wandb's has it already

    def close(self) -> None:
        self.run.finish()


def steps_offline(run: str, run_id: str) -> dict[str, int]:
    """{kind: the last step of it} in the files of earlier starts of an offline wandb run."""
    known = {}
    for path in glob.glob(os.path.join(glob.escape(run), "wandb", f"offline-run-*-{run_id}", "*.wandb")):
        for row in read_offline(path):
            known.update({key.removesuffix("/step"): value for key, value in row.items() if key.endswith("/step")
                          and value > known.get(key.removesuffix("/step"), -1)})
    return known


def read_offline(path: str) -> list[dict[str, Any]]:
    """The rows of a .wandb file, [{key: value}]: protocol buffers in a log of LevelDB's form, blocks of 32 KiB, of which the last may be torn."""
    from wandb.proto.wandb_internal_pb2 import Record

    with open(path, "rb") as f:
        content = f.read()
    at, whole, rows = 7, b"", []  # after wandb's own header
    while at + 7 <= len(content):
        if 32768 - at % 32768 < 7:  # no header of a record fits into what is left of the block
            at += 32768 - at % 32768
            continue
        size, part = struct.unpack("<HB", content[at + 4:at + 7])
        whole, at = whole + content[at + 7:at + 7 + size], at + 7 + size
        if at > len(content):
            break
        if part in (1, 4):  # a whole record, or the last part of one
            record, whole = Record.FromString(whole), b""
            if record.WhichOneof("record_type") == "history":
                rows.append({item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item})
    return rows


class TensorBoard:
    """Event files in <run>/tensorboard, for `tensorboard --logdir=<run>`."""

    def __init__(self, run: str, step: int):
        self.folder = os.path.join(run, "tensorboard")
        self.open(step)

    def open(self, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(self.folder, purge_step=step + 1)  # TensorBoard forgets what it has of later steps

    def write(self, kind: str, step: int, values: dict[str, Any]) -> None:
        """Tells the numbers of a line of metrics.jsonl, {name: value}."""
        for name, value in values.items():
            if isinstance(value, (int, float)):
                self.writer.add_scalar(f"{kind}/{name}", value, step)

    def go_back(self, step: int) -> None:
        self.writer.close()
        self.open(step)

    def flush(self) -> None:
        self.writer.flush()

    def close(self) -> None:
        self.writer.close()


class Trackers:
    """Those that a run was asked to tell, as long as they work."""

    def __init__(self):
        self.active = {}  # the setting that asks for it -> a Wandb or a TensorBoard

    def start(self, setting: str, make: Callable[[], Any]) -> Any:
        """Starts the tracker that make() gives; returns it, or None."""
        self.active[setting] = None
        return self._try(setting, "did not start", lambda: self.active.update({setting: make()}))

    def tell(self, method: str, *arguments: Any) -> None:
        """Calls a method of each."""
        for setting, tracker in list(self.active.items()):
            self._try(setting, "broke", functools.partial(self._call, tracker, method, *arguments))

    def _call(self, tracker, method, *arguments):
        getattr(tracker, method)(*arguments)

    def _try(self, setting, what, work):
        try:
            work()
        except Exception as error:  # their own errors are of many kinds
            why = (str(error).splitlines() or [""])[0]
            voice.warn(f"{setting}=True, but {setting.removesuffix('_log')} {what} ({type(error).__name__}: {why}): going on without it")
            del self.active[setting]
        return self.active.get(setting)
