"""Checkpoints: complete or absent, plain names, nothing pickled.

    out/<run>/checkpoints/step_00001000/
        model.safetensors  optimizer.safetensors  [tokenizer.json]
        manifest.json      step, samples, files with sizes and checksums, where each tensor lies, config, versions

A checkpoint is written to a hidden folder beside the others, every file synced, the manifest last, then renamed: a folder
named step_* is complete. The manifest says of every tensor its global shape and which file holds which part of it, so a
checkpoint written in shards is read by the same lines.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import json
import math
import mmap
import os
import re
import shutil
import struct
import time
import zlib
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open

from data.shards import sync_folder
from data.tokenizers import Tokenizer, tokenizer_from_identity
from engine.errors import UserError, full_disk_told
from engine.sync import local, ranges, tensor_dim
from model import ModelConfig

if TYPE_CHECKING:
    from engine.processes import Place

FORMAT = "boringgpt-checkpoint"
VERSION = 2
PIECE = 4 << 20  # bytes written at a time
Parts = dict[str, dict[str, torch.Tensor]]  # {"model": {name: tensor}, "optimizer": {name: tensor}}
Pieces = Callable[[torch.Tensor], Generator[memoryview, None, None]]
Read = Callable[[slice], torch.Tensor]  # some rows of a tensor
Source = tuple[Sequence[int], Read]  # its whole shape
Sources = dict[str, Source]
DTYPES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.float64: "F64"}


class Damaged(Exception):
    """A checkpoint that is not what its manifest says."""


# ------------------------------------------------------------------------------------------------------------ writing


class SyncedFile:
    """A new file, on the disk when it is closed. Written past the page cache where the system can (O_DIRECT): a quarter of the CPU time,
    which training needs, and what is cached of the data set stays cached."""

    def __init__(self, path: str):
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | getattr(os, "O_BINARY", 0)
        try:
            self.fd, self.direct = os.open(path, flags | os.O_DIRECT, 0o666), True
        except (OSError, AttributeError):  # a file system, or a system, without it
            self.fd, self.direct = os.open(path, flags, 0o666), False
        self.buffer, self.filled, self.checksum = memoryview(mmap.mmap(-1, PIECE)), 0, 0  # mapped memory is aligned as O_DIRECT wants it

    def write(self, data: bytes | memoryview) -> None:
        """Takes more bytes; OSError where the disk is full."""
        self.checksum = zlib.crc32(data, self.checksum)
        at = 0
        while at < len(data):
            fits = min(len(data) - at, PIECE - self.filled)
            self.buffer[self.filled:self.filled + fits] = data[at:at + fits]
            self.filled, at = self.filled + fits, at + fits
            if self.filled == PIECE:
                self._put(PIECE)

    def _put(self, size):
        at = 0
        while at < size:
            try:
                at += os.write(self.fd, self.buffer[at:size])
            except OSError as error:
                if error.errno != errno.EINVAL or not self.direct:
                    raise
                self._go_indirect()  # it wants other sizes
        self.filled = 0

    def _go_indirect(self):
        import fcntl

        fcntl.fcntl(self.fd, fcntl.F_SETFL, fcntl.fcntl(self.fd, fcntl.F_GETFL) & ~os.O_DIRECT)
        self.direct = False

    def __enter__(self):
        return self

    def __exit__(self, kind, *error):
        try:
            if kind is None:
                if self.direct:  # the last piece has no even size
                    self._go_indirect()
                self._put(self.filled)
                os.fsync(self.fd)
        finally:
            os.close(self.fd)


def pieces(t: torch.Tensor) -> Generator[memoryview, None, None]:
    """The bytes of a tensor, a piece of at most PIECE at a time."""
    flat = t.detach().contiguous().reshape(-1)
    each = max(1, PIECE // flat.element_size())
    for start in range(0, flat.numel(), each):
        yield flat[start:start + each].cpu().view(torch.uint8).numpy().data


def write_safetensors(path: str, tensors: dict[str, torch.Tensor], pieces: Pieces = pieces, metadata: dict[str, str] | None = None) -> dict[str, Any]:
    """Writes {name: tensor} in the safetensors format, synced to disk; returns {"bytes", "crc32"}. With other `pieces` a tensor may be one of
    the meta device, whose bytes come when they are asked for.

    The safetensors package builds the whole file in memory first. This one reads, checks and writes a piece at a time: memory and bytes
    are those of one piece, and a full disk is noticed where it happens. CRC-32 finds what disks and networks do to a file, several times
    as fast as a cryptographic digest, which would not keep out anyone who can write the manifest.
    """
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    offset = 0
    for name, t in tensors.items():
        size = t.numel() * t.element_size()
        header[name] = {"dtype": DTYPES[t.dtype], "shape": list(t.shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    text = struct.pack("<Q", len(text)) + text
    with SyncedFile(path) as f:
        f.write(text)
        for t in tensors.values():
            with contextlib.closing(pieces(t)) as found:  # it may hold a lock
                for data in found:
                    f.write(data)
    return {"bytes": len(text) + offset, "crc32": f"{f.checksum:08x}"}


def write_json(path: str, value: Any) -> None:
    """Writes JSON so that the path holds all of it or what it held before."""
    with open(path + ".tmp", "w", encoding="utf-8") as f:
        json.dump(value, f, indent=1)
        f.flush()
        os.fsync(f.fileno())
    os.replace(path + ".tmp", path)


def file_checksum(path: str) -> str:
    """CRC-32 of a file's bytes, 8 hexadecimal digits."""
    checksum = 0
    with open(path, "rb", buffering=0) as f:
        while data := f.read(PIECE):
            checksum = zlib.crc32(data, checksum)
    return f"{checksum:08x}"


def json_checksum(value: Any) -> str:
    """SHA-256 of a JSON-able value, whatever the order of its keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def bytes_needed(parameters: Mapping[str, torch.Tensor]) -> int:
    """What a checkpoint of {name: parameter} and the AdamW state of those that are trained takes on disk, all ranks' files together, but for
    a few KB of text."""
    return sum((3 if p.requires_grad else 1) * p.numel() * p.element_size() for p in parameters.values())


def save(run: str, place: Place, parameters: Mapping[str, torch.Tensor], tensors: Parts, state: dict[str, Any], tokenizer: Tokenizer | None = None,
         before_rename: Callable[[], Any] = lambda: None, pieces: Pieces = pieces) -> tuple[str, int]:
    """Saves step state["step"] under run/checkpoints; `state` (JSON-able) goes into the manifest. Returns (folder, bytes).

    parameters: {name: parameter}, for the shapes and which rows of them lie here. tensors: {"model": {name: tensor}, "optimizer": {...}},
    those rows; ranks that do not write may give none. All ranks call it: every rank of an FSDP run writes the rows it holds, of others
    rank 0 writes all. UserError on every rank where a disk is full; what was there before is then untouched and nothing partial is left.
    before_rename() is called on rank 0 once all else is on the disk; pieces: what reads a tensor's bytes.
    """
    final = step_folder(run, state["step"])
    partial = os.path.join(os.path.dirname(final), "." + os.path.basename(final) + ".partial")
    try:
        with place.agreement():
            if place.speaks:
                shutil.rmtree(partial, ignore_errors=True)
                os.makedirs(partial)
        with place.agreement(), full_disk_told(final, bytes_needed(parameters)):
            if place.writes:
                write_part(partial, place, tensors, parameters, pieces)
        size = 0
        with place.agreement(), full_disk_told(final, bytes_needed(parameters)):
            if place.speaks:
                if tokenizer:
                    tokenizer.save(partial)
                size = finish(partial, final, place.parts, state, before_rename)
    except UserError:
        if place.speaks:
            shutil.rmtree(partial, ignore_errors=True)
        raise
    return final, size


def write_part(partial: str, place: Place, parts: Parts, parameters: Mapping[str, torch.Tensor], pieces: Pieces) -> None:
    """Writes what one rank holds, and what that is as part_<rank>.json for the manifest."""
    files, index, rank, writers = {}, {}, place.rank, place.parts
    for part, tensors in parts.items():
        file = f"{part}.safetensors" if writers == 1 else f"{part}_{rank:05d}_of_{writers:05d}.safetensors"
        index[part], here = {}, {}
        for name, t in tensors.items():
            p = parameters[name] if name in parameters else parameters[name.rpartition(".")[0]]
            index[part][name] = {"shape": list(p.shape), "pieces": []}
            if t.numel() and (rank % place.tp == 0 or tensor_dim(p) is not None):  # of what ranks that share layers hold whole, the first one's
                here[name] = t
                index[part][name]["pieces"] = [{"file": file, "offset": [first for first, _ in ranges(p)], "shape": list(t.shape)}]
        files[file] = write_safetensors(os.path.join(partial, file), here, pieces)
    write_json(os.path.join(partial, f"part_{rank:05d}.json"), {"files": files, "tensors": index})


def finish(partial: str, final: str, writers: int, state: dict[str, Any], before_rename: Callable[[], Any]) -> int:
    """Joins what the ranks wrote into one manifest and gives the folder its name; returns the bytes in it."""
    files, index = {}, {}
    for rank in range(writers):
        path = os.path.join(partial, f"part_{rank:05d}.json")
        with open(path, encoding="utf-8") as f:
            part = json.load(f)
        os.unlink(path)
        files.update(part["files"])
        for kind, tensors in part["tensors"].items():
            for name, entry in tensors.items():
                index.setdefault(kind, {}).setdefault(name, {"shape": entry["shape"], "pieces": []})["pieces"] += entry["pieces"]
    if holes := [name for kind in index.values() for name, entry in kind.items() if not covered(entry)]:
        raise RuntimeError(f"{partial} lacks rows of {', '.join(holes)}: a bug")
    manifest = {"format": FORMAT, "version": VERSION, **state, "files": files, "tensors": index}
    write_json(os.path.join(partial, "manifest.json"), {**manifest, "sha256": json_checksum(manifest)})
    sync_folder(partial)
    before_rename()
    os.rename(partial, final)
    sync_folder(os.path.dirname(final))
    return sum(f["bytes"] for f in files.values())


def covered(entry: dict[str, Any]) -> bool:
    """Whether a tensor's pieces in a manifest are all of it, each value once."""
    shape, pieces = entry["shape"], entry["pieces"]
    if any(not len(piece["offset"]) == len(piece["shape"]) == len(shape) for piece in pieces):
        return False
    boxes = sorted(tuple((a, a + n) for a, n in zip(piece["offset"], piece["shape"])) for piece in pieces)
    if any(not 0 <= a < b <= n for box in boxes for (a, b), n in zip(box, shape)):
        return False
    if sum(math.prod(b - a for a, b in box) for box in boxes) != math.prod(shape):
        return False
    # boxes are sorted by their first rows: one that meets another is not far behind it
    for i, box in enumerate(boxes):
        for other in boxes[i + 1:]:
            if other[0][0] >= box[0][1]:
                break
            if all(a < d and c < b for (a, b), (c, d) in zip(box, other)):
                return False
    return True


def copy_synced(source: str, target: str) -> None:
    """Copies a file; it is on the disk when this returns."""
    shutil.copyfile(source, target)
    with open(target, "rb+") as f:
        os.fsync(f.fileno())


def mark_best(run: str, step: int) -> None:
    """Makes checkpoints/best the checkpoint of `step`: hard links, so it costs no space until the original is deleted."""
    folder = os.path.join(run, "checkpoints")
    new, old, best = (os.path.join(folder, n) for n in (".best.partial", ".best.old", "best"))
    for leftover in (new, old):
        shutil.rmtree(leftover, ignore_errors=True)
    try:
        shutil.copytree(step_folder(run, step), new, copy_function=os.link)
    except OSError:  # a file system without hard links
        shutil.rmtree(new, ignore_errors=True)
        shutil.copytree(step_folder(run, step), new, copy_function=copy_synced)
    sync_folder(new)
    if os.path.isdir(best):
        os.rename(best, old)
    os.rename(new, best)
    sync_folder(folder)
    shutil.rmtree(old, ignore_errors=True)


def delete_old(run: str, keep_last: int, keep_every: int) -> None:
    """Deletes all but the newest keep_last checkpoints (-1: none) and those on multiples of keep_every."""
    steps = list_steps(run)
    for step in steps[:-keep_last] if keep_last > 0 else []:
        if not keep_every or step % keep_every:
            doomed = os.path.join(run, "checkpoints", f".step_{step:08d}.old")
            os.rename(step_folder(run, step), doomed)  # absent at once, then gone
            shutil.rmtree(doomed)


# ------------------------------------------------------------------------------------------------------------ finding


def step_folder(run: str, step: int) -> str:
    """The folder of a run's checkpoint of `step`, whether it exists or not."""
    return os.path.join(run, "checkpoints", f"step_{step:08d}")


def list_steps(run: str) -> list[int]:
    """The steps of a run's checkpoints in rising order: by number, whatever the file times or the spelling say."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        return sorted(int(m[1]) for n in os.listdir(os.path.join(run, "checkpoints")) if (m := re.fullmatch(r"step_(\d{8,})", n)))
    return []


def clear_leftovers(run: str) -> None:
    """Removes what a save that died left behind; a best that lost its place half-way through gets it back."""
    folder = os.path.join(run, "checkpoints")
    if os.path.isdir(os.path.join(folder, ".best.old")) and not os.path.isdir(os.path.join(folder, "best")):
        os.rename(os.path.join(folder, ".best.old"), os.path.join(folder, "best"))
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        for name in os.listdir(folder):
            if name.startswith("."):
                shutil.rmtree(os.path.join(folder, name), ignore_errors=True)


def set_aside(run: str, names: list[str]) -> str | None:
    """Moves files of a run into run/set_aside_<time>/: an earlier curve is never overwritten. Returns that folder or None."""
    names = [n for n in names if os.path.exists(os.path.join(run, n))]
    if not names:
        return None
    folder = os.path.join(run, time.strftime("set_aside_%Y%m%d_%H%M%S"))
    while os.path.exists(folder):
        folder += "_"
    for name in names:
        os.makedirs(os.path.dirname(os.path.join(folder, name)), exist_ok=True)
        os.rename(os.path.join(run, name), os.path.join(folder, name))
    return folder


def newest_complete(run: str, say: Callable[[str], Any], step: int | None = None) -> Checkpoint | None:
    """The Checkpoint with the highest step that is whole, or that of `step`; None where a run has none at all.

    A damaged one is named through say(sentence) and the one before it taken; UserError where all are damaged.
    """
    steps = list_steps(run)
    if step is not None:
        if step not in steps:
            raise UserError(f"{run} has no checkpoint of step {step}; it has {', '.join(map(str, steps)) or 'none'}")
        return open_checkpoint(step_folder(run, step))
    for candidate in reversed(steps):
        path = step_folder(run, candidate)
        try:
            checkpoint = Checkpoint(path)
            checkpoint.verify()
            return checkpoint
        except Damaged as damage:
            say(f"warning: {path} is damaged ({damage}); trying the one before it")
    if steps:
        raise UserError(f"every checkpoint in {os.path.join(run, 'checkpoints')} is damaged ({', '.join(map(str, steps))}); "
                        "restore one, or give --resume=never to set them aside and start anew")
    return None


def open_checkpoint(path: str) -> Checkpoint:
    """A verified Checkpoint; UserError where it is damaged."""
    try:
        checkpoint = Checkpoint(path)
        checkpoint.verify()
        return checkpoint
    except Damaged as damage:
        raise UserError(f"{path} is damaged: {damage}; another checkpoint of the run may be whole") from None


# ------------------------------------------------------------------------------------------------------------ reading


def check_types(manifest: dict[str, Any]) -> None:
    """KeyError, IndexError, TypeError or AttributeError where a manifest's fields are not of their types, or promise more values than its files have bytes."""
    def sizes(values):
        if not all(type(v) is int and v >= 0 for v in values):
            raise TypeError(f"{values!r:.100} are not sizes")
        return values

    sizes([manifest["step"], manifest["samples"], *(file["bytes"] for file in manifest["files"].values())])
    values = 0
    for entry in (entry for part in manifest["tensors"].values() for entry in part.values()):
        values += math.prod(sizes(entry["shape"]))
        for piece in entry["pieces"]:
            sizes([*piece["offset"], *piece["shape"]])
        if not covered(entry):
            raise TypeError("a tensor's pieces are not all of it, each value once")
    if values > sum(file["bytes"] for file in manifest["files"].values()):
        raise TypeError(f"{values:,} values do not fit its files")
    config = ModelConfig(**manifest["model"])
    if wrong := config.problems():
        raise TypeError(wrong[0])


class Checkpoint:
    """A checkpoint on disk: its manifest at once, its tensors when asked for."""

    def __init__(self, path: str, manifest: dict[str, Any] | None = None):
        """Reads path/manifest.json, or takes what another rank read of a folder that this one need not see."""
        self.path, self.manifest = path, manifest or self.read_manifest(path)
        self.step, self.samples = self.manifest["step"], self.manifest["samples"]

    @staticmethod
    def read_manifest(path: str) -> dict[str, Any]:
        """The manifest of a folder, a dict whose types and sizes hold together. Damaged where there is none, UserError where it is of another version."""
        try:
            with open(os.path.join(path, "manifest.json"), encoding="utf-8") as f:
                manifest = json.load(f)
        except (FileNotFoundError, NotADirectoryError):
            raise Damaged("manifest.json is missing") from None
        except OSError as error:
            raise Damaged(f"manifest.json cannot be read: {error.strerror}") from None
        except (ValueError, RecursionError) as error:
            raise Damaged(f"manifest.json is not JSON: {error}") from None
        if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
            raise Damaged("manifest.json is not that of a checkpoint")
        if manifest.pop("sha256", None) != json_checksum(manifest):
            raise Damaged("manifest.json does not have the checksum it was written with")
        if not isinstance(manifest.get("version"), int) or not isinstance(manifest.get("files"), dict) or not isinstance(manifest.get("tensors"), dict):
            raise Damaged("manifest.json lacks version, files or tensors")
        if manifest["version"] != VERSION:
            raise UserError(f"{path} has format version {manifest['version']}, this version of the project reads {VERSION}")
        try:
            check_types(manifest)
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise Damaged(f"manifest.json is not what a checkpoint has ({type(error).__name__}: {error})") from None
        named = {piece["file"] for part in manifest["tensors"].values() for entry in part.values() for piece in entry["pieces"]}
        if any(os.path.basename(file) != file for file in manifest["files"]) or not named <= set(manifest["files"]):
            raise Damaged("manifest.json names files outside the checkpoint")
        return manifest

    def verify(self) -> None:
        """Raises Damaged unless every file has the size and the checksum that the manifest names."""
        for name, expected in self.manifest["files"].items():
            path = os.path.join(self.path, name)
            if not os.path.isfile(path):
                raise Damaged(f"{name} is missing")
            if os.path.getsize(path) != expected["bytes"]:
                raise Damaged(f"{name} has {os.path.getsize(path):,} bytes, expected {expected['bytes']:,}")
            if file_checksum(path) != expected["crc32"]:
                raise Damaged(f"{name} does not have the checksum it was written with")

    def model_config(self) -> ModelConfig:
        """The architecture that the weights are of."""
        return ModelConfig(**self.manifest["model"])

    def tokenizer(self) -> Tokenizer | None:
        """That of the data it was trained on; None where nobody knew it. UserError where it is not to be had."""
        identity = self.manifest["tokenizer"]
        return tokenizer_from_identity(identity, self.path) if identity else None

    def names(self, part: str) -> list[str]:
        """Names of the tensors of a part, "model" or "optimizer"."""
        return list(self.manifest["tensors"][part])

    def read(self, part: str, name: str, rows: slice = slice(None)) -> torch.Tensor:
        """Some rows of a tensor, put together from the files that hold parts of it; only those are read."""
        entry = self.manifest["tensors"][part][name]
        first, behind, _ = rows.indices(entry["shape"][0])
        whole = None
        for piece in entry["pieces"]:
            start, length = piece["offset"][0], piece["shape"][0]
            a, b = max(first, start), min(behind, start + length)
            if a < b:  # opened for this tensor alone: what is read of a mapped file stays in this process's memory until it is closed
                with safe_open(os.path.join(self.path, piece["file"]), "pt") as f:
                    part = f.get_slice(name)[a - start:b - start]
                shape = [behind - first, *entry["shape"][1:]]
                if list(part.shape) == shape:
                    return part
                whole = part.new_empty(shape) if whole is None else whole
                there = (slice(a - first, b - first), *(slice(at, at + n) for at, n in zip(piece["offset"][1:], piece["shape"][1:])))
                whole[there] = part
        return torch.empty(0, *entry["shape"][1:]) if whole is None else whole

    def sources(self, part: str) -> Sources:
        """{name: (number of rows, function of a slice that reads those rows)} of a part, for fill()."""
        return {n: (self.manifest["tensors"][part][n]["shape"], functools.partial(self.read, part, n)) for n in self.names(part)}


@torch.no_grad()
def fill(place: Place, parameters: Mapping[str, torch.Tensor], tensors: Mapping[str, torch.Tensor], sources: Sources, where: str, send: bool = False) -> None:
    """Copies values into {name: this rank's tensor}, by name, a tensor at a time, only the rows that it holds.

    parameters: the model's, whose sharding the tensors (parameters themselves, or an optimizer's state named after them) follow.
    sources: {name: (shape, function of a slice of rows)}; with `send` rank 0 alone has them, and sends them to the others.
    UserError that lists what is missing, what is left over and what has another shape. Only rows of embeddings may differ in
    number: a vocabulary's padding (what is not there becomes zero), and positions beyond a smaller block_size.
    """
    owner = {name: parameters[name] if name in parameters else parameters[name.rpartition(".")[0]] for name in tensors}
    reads = place.speaks or not send
    with place.agreement():
        if reads:
            check_names(owner, sources, where)
    for name, t in tensors.items():
        t = local(t)
        if reads and t.numel():
            shape, read = sources[name]
            (first, behind), *columns = ranges(owner[name])
            found = min(behind, shape[0]) - first
            if found < len(t):
                t[max(0, found):].zero_()
            if found > 0:
                t[:found].copy_(read(slice(first, first + found))[(slice(None), *(slice(a, b) for a, b in columns))])
        if send:
            torch.distributed.broadcast(t, 0)


def check_names(owner: Mapping[str, torch.Tensor], sources: Sources, where: str) -> None:
    """UserError that lists every name and shape of {name: parameter} that {name: (shape, function of a slice)} does not fit; `where`: whose sources they are."""
    missing, unexpected = sorted(set(owner) - set(sources)), sorted(set(sources) - set(owner))
    problems = [f"{where} lacks {', '.join(missing)}"] if missing else []
    problems += [f"{where} has {', '.join(unexpected)}, which this model has no place for"] if unexpected else []
    for name in sorted(set(owner) & set(sources)):
        have, need = tuple(sources[name][0]), tuple(owner[name].shape)
        rows_may_differ = name.startswith(("wte.", "head.")) or name.startswith("wpe.") and have[0] > need[0]
        if have != need and not (rows_may_differ and have[1:] == need[1:]):
            problems.append(f"{where}: {name} has shape {have}, this model needs {need}")
    if problems:
        raise UserError(*problems)


def check_room(run: str, parameters: Mapping[str, torch.Tensor]) -> None:
    """UserError unless a checkpoint fits on the disk now, rather than after an hour of training."""
    needed, free = bytes_needed(parameters), shutil.disk_usage(run).free
    if free < needed:
        raise UserError(f"a checkpoint takes {needed:,} bytes and {os.path.abspath(run)} has {free:,} free: free some space, or give another "
                        "--out_dir")
