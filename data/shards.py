"""Token files: llm.c's shards, written and read back as one stream; nanoGPT's headerless files, read.

A shard is 256 little-endian int32 (magic, version, token count, rest 0), then the tokens. The magic says their width:
20240520, version 1: uint16 (GPT-2); 20240801, version 7: uint32 (the vocabularies of Llama 3 and Qwen).

Records for SFT have a second file beside each shard, one byte a token, without a header: the sum of LABEL where the token is
one to learn, and BEGIN where a record begins.
"""

import datetime
import difflib
import glob
import hashlib
import json
import os
from typing import Any, BinaryIO

import numpy as np

from data.sources import NAMED
from data.tokenizers import char_tokenizer_from_nanogpt, check_identity
from engine.errors import UserError
from engine.untrusted import read_json

HEADER_BYTES = 1024
FORMATS: dict[int, tuple[int, np.dtype]] = {20240520: (1, np.dtype("<u2")), 20240801: (7, np.dtype("<u4"))}  # magic -> version, type of a token
META_VERSION = 1  # of meta.json
LABEL, BEGIN = 1, 2  # marks of a token
MAX_SHARD_TOKENS = 2**31 - 1  # the header's count is an int32
SCAN_TOKENS = 100_000_000  # up to so many, every id is looked at before step 0 (0.1 s); beyond, meta.json is trusted
SCAN_STEP = 1 << 22


def token_dtype(vocab_size: int) -> np.dtype:
    """The narrowest token type for ids below vocab_size."""
    return np.dtype("<u2") if vocab_size <= 65536 else np.dtype("<u4")


def write_all(file, data):
    """Writes all of data (anything with a buffer) to an unbuffered file, which may take less at a time."""
    view = memoryview(data).cast("B")
    while view:
        view = view[file.write(view):]


def sync_folder(folder):
    """Makes names written into folder survive a power cut."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


class ShardWriter:
    """Writes ids as shards <split>_000000.bin, <split>_000001.bin, ... of exactly shard_tokens tokens, the last one
    less. Nothing is kept in memory; a shard's count enters its header when it is full, and it is synced then.

    With `marked`, each shard has a file of marks beside it, <split>_000000.marks."""

    def __init__(self, folder: str, split: str, vocab_size: int, shard_tokens: int = 100_000_000, marked: bool = False):
        self.folder, self.split, self.vocab_size, self.shard_tokens = folder, split, vocab_size, shard_tokens
        self.dtype, self.marked = token_dtype(vocab_size), marked
        self.file: BinaryIO | None = None
        self.marks: BinaryIO | None = None
        self.shards, self.tokens, self.max_id = [], 0, 0

    def write(self, ids: np.ndarray, marks: np.ndarray | None = None) -> None:
        """Appends an integer array (n,) and, to a marked split, its marks (n,). An id outside the vocabulary is a UserError."""
        if len(ids) and not 0 <= ids.min() <= ids.max() < self.vocab_size:
            raise UserError(f"ids from {ids.min()} to {ids.max()} do not fit a vocabulary of {self.vocab_size:,}")
        ids = ids.astype(self.dtype, copy=False)
        while len(ids):
            if self.file is None:
                name = f"{self.split}_{len(self.shards):06d}.bin"
                self.file = open(os.path.join(self.folder, name), "w+b", buffering=0)
                self.file.write(bytes(HEADER_BYTES))  # magic 0: no shard yet
                if self.marked:
                    self.marks = open(marks_path(self.file.name), "w+b", buffering=0)
            part = np.ascontiguousarray(ids[:self.shard_tokens - self.tokens])
            write_all(self.file, part)
            if self.marked:
                write_all(self.marks, np.ascontiguousarray(marks[:len(part)], np.uint8))
                marks = marks[len(part):]
            self.tokens += len(part)
            self.max_id = max(self.max_id, int(part.max()))
            ids = ids[len(part):]
            if self.tokens == self.shard_tokens:
                self.finish_shard()

    def finish_shard(self):
        header = np.zeros(256, "<i4")
        magic = next(magic for magic, (_, dtype) in FORMATS.items() if dtype == self.dtype)
        header[:3] = magic, FORMATS[magic][0], self.tokens
        with self.file as file:
            file.seek(0)
            write_all(file, header)
            os.fsync(file.fileno())
        if self.marked:
            with self.marks as marks:
                os.fsync(marks.fileno())
        self.shards.append(describe_shard(file.name, self.tokens, self.max_id))
        self.file, self.tokens, self.max_id = None, 0, 0

    def close(self):
        """Completes the last shard. Returns a dict a shard: file, tokens, bytes (of the file), sha256, max_id."""
        if self.file is not None:
            self.finish_shard()
        return self.shards


def marks_path(path):
    """Where the marks of a shard's tokens are."""
    return os.path.splitext(path)[0] + ".marks"


def describe_shard(path, tokens, max_id):
    """What meta.json says of a complete shard."""
    def sha256(path):
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    described = {"file": os.path.basename(path), "tokens": tokens, "bytes": os.path.getsize(path), "sha256": sha256(path), "max_id": max_id}
    return {**described, "marks_sha256": sha256(marks_path(path))} if os.path.exists(marks_path(path)) else described


def fingerprint(tokenizer_fingerprint: str, shards: list[dict]) -> str:
    """One hash for what the tokens are and what they mean; dates and names do not enter it."""
    digest = hashlib.sha256(tokenizer_fingerprint.encode())
    for shard in shards:
        digest.update(shard["sha256"].encode() + shard.get("marks_sha256", "").encode())
    return digest.hexdigest()


def open_shard(path: str) -> np.ndarray:
    """The tokens of an llm.c shard, memory-mapped; a UserError where it is not a whole one."""
    size = os.path.getsize(path)
    header = np.fromfile(path, "<i4", 256)
    if len(header) < 256:
        raise UserError(f"{path} has {size:,} bytes, less than the {HEADER_BYTES:,} of a shard's header: it is "
                        "truncated; copy or prepare it again")
    magic, version, tokens = map(int, header[:3])
    if magic not in FORMATS:
        raise UserError(f"{path} begins with {magic}, not with a token shard's magic number ({known_magics()}); "
                        "prepare the data with prepare.py")
    expected_version, dtype = FORMATS[magic]
    if version != expected_version:
        raise UserError(f"{path} has version {version} of the shard format; version {expected_version} goes with "
                        f"magic {magic}; prepare the data again")
    expected = HEADER_BYTES + tokens * dtype.itemsize
    if size < expected or tokens < 0:
        raise UserError(f"{path} is truncated: its header promises {tokens:,} tokens, there are "
                        f"{(size - HEADER_BYTES) // dtype.itemsize:,}; copy or prepare it again")
    if size > expected:
        raise UserError(f"{path} has {size - expected:,} bytes more than the {tokens:,} tokens its header promises; "
                        "copy or prepare it again")
    return map_tokens(path, dtype, HEADER_BYTES, tokens)


def open_marks(path: str, tokens: int) -> np.ndarray:
    """The marks of a shard's tokens, memory-mapped; a UserError where there are not as many."""
    size = os.path.getsize(path) if os.path.isfile(path) else 0
    if size != tokens:
        raise UserError(f"{path} has {size:,} marks, its shard {tokens:,} tokens: copy or prepare the data again")
    return map_tokens(path, np.dtype(np.uint8), 0, tokens)


def known_magics():
    """The magic numbers of shards and what they stand for, for a message."""
    return ", ".join(f"{magic} for {dtype.itemsize * 8}-bit tokens" for magic, (_, dtype) in FORMATS.items())


def map_tokens(path, dtype, offset, tokens):
    """(tokens,) of a file from a byte offset on, mapped into memory."""
    return np.memmap(path, dtype, "r", offset, (tokens,)) if tokens else np.zeros(0, dtype)  # mmap refuses 0 bytes


def open_headerless(path):
    """The tokens of a nanoGPT train.bin or val.bin: uint16 and nothing else."""
    size = os.path.getsize(path)
    if size % 2:
        raise UserError(f"{path} has {size:,} bytes, but tokens take two bytes each and it has no header: it is "
                        "truncated; copy or prepare it again")
    return map_tokens(path, np.dtype("<u2"), 0, size // 2)


def begins_with_magic(path):
    """Whether a file begins as a shard of llm.c does."""
    start = np.fromfile(path, "<i4", 1)
    return len(start) == 1 and int(start[0]) in FORMATS


class TokenDataset:
    """The tokens of one split of a prepared folder as one stream. The folder holds our shards and meta.json, or bare
    llm.c shards (*train*.bin, *val*.bin, in the order of their names), or nanoGPT's train.bin and val.bin.

    n_tokens; vocab_size and tokenizer_identity (None where the files do not say); fingerprint, equal on machines that
    hold the same tokens; description, a line for the log; marked, whether the tokens are records for SFT. Opening raises a
    UserError where a file is not whole.
    """

    def __init__(self, path: str, split: str):
        if not os.path.isdir(path):
            raise UserError(f"no data folder {path}: expected a folder of token shards; make one with prepare.py")
        self.path, self.split = path, split
        self.meta: dict[str, Any] | None = None
        self.vocab_size = self.tokenizer_identity = None
        self.marks = []
        if os.path.exists(os.path.join(path, "meta.json")):
            self.open_prepared()
        else:
            self.open_bare()
        widths = {shard.dtype.itemsize * 8 for shard in self.shards}
        if len(widths) > 1:
            raise UserError(f"the {split} shards of {path} mix 16-bit and 32-bit tokens, so they come from different "
                            "tokenizers; keep one kind in a folder")
        self.marked = bool(self.marks)
        self.starts = np.cumsum([0] + [len(shard) for shard in self.shards])  # where each shard begins in the stream
        self.n_tokens = int(self.starts[-1])
        if self.n_tokens == 0:
            raise UserError(f"the {split} split of {path} has no tokens; prepare it again from more text")
        tokenizer = self.tokenizer_identity["name"] if self.tokenizer_identity else "unknown"
        plural = "" if len(self.files) == 1 else "s"
        self.description = (f"{path}: {split}, {self.n_tokens:,} tokens in {len(self.files)} shard{plural} of uint"
                            f"{widths.pop()}, {tokenizer} tokenizer")

    def open_prepared(self):
        self.meta = read_meta(self.path)
        described = self.meta["splits"].get(self.split, {}).get("shards")
        if not described:
            raise UserError(f"{self.path} has no {self.split} split; prepare it with --val_fraction above 0")
        self.vocab_size, self.tokenizer_identity = self.meta["vocab_size"], self.meta["tokenizer"]
        self.files, self.shards = [os.path.join(self.path, os.path.basename(d["file"])) for d in described], []
        for file, shard in zip(self.files, described):
            if not os.path.isfile(file):
                raise UserError(f"{file} is missing, though meta.json names it; copy or prepare the data again")
            tokens = open_shard(file)
            if len(tokens) != shard["tokens"]:
                raise UserError(f"{file} has {len(tokens):,} tokens, meta.json says {shard['tokens']:,}; they are not "
                                "of one preparation: copy or prepare the data again")
            if tokens.dtype != token_dtype(self.vocab_size):
                raise UserError(f"{file} has {tokens.dtype.itemsize * 8}-bit tokens, but meta.json has a vocabulary of "
                                f"{self.vocab_size:,}, which takes {token_dtype(self.vocab_size).itemsize * 8} bits; "
                                "prepare the data again")
            self.shards.append(tokens)
            if "marks_sha256" in shard:
                self.marks.append(open_marks(marks_path(file), len(tokens)))
        if len(self.marks) not in (0, len(self.shards)):
            raise UserError(f"{self.path}/meta.json has marks for some of the {self.split} shards alone; prepare the data again")
        if self.vocab_size != self.tokenizer_identity["vocab_size"]:
            raise UserError(f"{self.path}/meta.json has a vocabulary of {self.vocab_size:,} and a tokenizer of "
                            f"{self.tokenizer_identity['vocab_size']:,} ids; prepare the data again")
        self.fingerprint = fingerprint(self.tokenizer_identity["fingerprint"], described)

    def open_bare(self):
        self.files = sorted(filter(os.path.isfile, glob.glob(os.path.join(glob.escape(self.path),
                                                                          f"*{self.split}*.bin"))))
        if not self.files:
            raise UserError(f"{self.path} has no {self.split} tokens: expected meta.json and its shards, "
                            f"*{self.split}*.bin of llm.c, or nanoGPT's {self.split}.bin; of texts, python prepare.py {self.path} --name=mine makes them")
        if (len(self.files) == 1 and os.path.basename(self.files[0]) == f"{self.split}.bin"
                and not begins_with_magic(self.files[0])):
            self.shards = [open_headerless(self.files[0])]
            characters = os.path.join(self.path, "meta.pkl")
            if os.path.exists(characters):
                tokenizer = char_tokenizer_from_nanogpt(characters)
                self.vocab_size, self.tokenizer_identity = tokenizer.vocab_size, tokenizer.identity()
        else:
            self.shards = [open_shard(file) for file in self.files]
        # Checksums of 20 GB would take a minute at every start: size, head and tail tell copies apart well enough.
        digest = hashlib.sha256()
        for name in self.files:
            with open(name, "rb") as file:
                size = os.path.getsize(name)
                digest.update(size.to_bytes(8, "little") + file.read(1 << 16))
                file.seek(max(0, size - (1 << 16)))
                digest.update(file.read())
        self.fingerprint = digest.hexdigest()

    def read(self, start: int, count: int) -> np.ndarray:
        """int64 array (count,) of the tokens from start on; shards follow each other without a seam."""
        return self.gather(self.shards, np.int64, start, count)

    def read_marks(self, start: int, count: int) -> np.ndarray:
        """uint8 array (count,) of the marks of the tokens from start on."""
        return self.gather(self.marks, np.uint8, start, count)

    def gather(self, shards, dtype, start, count):
        if start < 0 or count < 0 or start + count > self.n_tokens:
            raise IndexError(f"tokens {start} to {start + count} of {self.path} {self.split}: it has {self.n_tokens}")
        out = np.empty(count, dtype)
        filled, shard = 0, int(np.searchsorted(self.starts, start, side="right")) - 1
        while filled < count:
            offset = start + filled - int(self.starts[shard])
            part = shards[shard][offset:offset + count - filled]
            out[filled:filled + len(part)] = part
            filled, shard = filled + len(part), shard + 1
        return out

    def check_ids(self, vocab_size: int) -> None:
        """Raises a UserError where a token's id is at or above vocab_size. Looks at every token, some megabytes at a
        time, unless there are more than SCAN_TOKENS and a meta.json that says what their highest id is."""
        if self.meta is not None and self.n_tokens > SCAN_TOKENS:
            for shard in self.meta["splits"][self.split]["shards"]:
                if shard["max_id"] >= vocab_size:
                    raise UserError(f"{self.path}/{shard['file']} has id {shard['max_id']} (meta.json), "
                                    + beyond(vocab_size, shard["max_id"]))
            return
        for path, shard in zip(self.files, self.shards):
            position, offset = 0, os.path.getsize(path) - len(shard) * shard.itemsize
            with open(path, "rb") as file:
                file.seek(offset)
                while len(tokens := np.fromfile(file, shard.dtype, SCAN_STEP)):
                    if tokens.max() >= vocab_size:
                        at = int((tokens >= vocab_size).argmax())
                        raise UserError(f"{path}: token {position + at:,} has id {tokens[at]}, "
                                        + beyond(vocab_size, int(tokens[at])))
                    position += len(tokens)


def beyond(vocab_size, i):
    """The end of a message on an id i that a vocabulary does not have."""
    return (f"but the model's vocabulary ends at {vocab_size - 1:,}: set vocab_size to {i + 1} or more, or prepare the "
            "data with the model's tokenizer")


def read_meta(folder: str) -> dict:
    """meta.json of a prepared folder, a dict; a UserError where it is not one."""
    path = os.path.join(folder, "meta.json")
    try:
        meta = read_json(path)
        version, vocab_size = meta["format_version"], meta["vocab_size"]
        numbers, texts = [version, vocab_size], []
        for shard in (shard for split in meta["splits"].values() for shard in split["shards"]):
            numbers += [shard["tokens"], shard["max_id"]]
            texts += [shard["file"], shard["sha256"], shard.get("marks_sha256", "")]
        if not all(type(n) is int and n >= 0 for n in numbers) or not all(isinstance(t, str) for t in texts):
            raise ValueError("a field has the wrong type")
        check_identity(meta["tokenizer"], path)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path} is not what prepare.py writes ({type(error).__name__}: {error}); prepare the data "
                        "again") from None
    if version != META_VERSION:
        raise UserError(f"{path} has format version {version}, this code reads {META_VERSION}; prepare the data again")
    return meta


def write_meta(folder: str, tokenizer, meta: dict) -> None:
    """Writes the tokenizer's files and meta.json, with the date, which completes a dataset."""
    tokenizer.save(folder)
    date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    with open(os.path.join(folder, "meta.json"), "w", encoding="utf-8") as file:
        json.dump({**meta, "date": date}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def find_dataset(name: str, root: str) -> str:
    """The folder of a dataset: name as a path, else data/<name> here (a nanoGPT checkout, say) or under root; one that holds
    tokens first. Raises UserError."""
    folder = os.path.join(root, "data", name)
    found = [path for path in (name, os.path.join("data", name), folder) if os.path.isdir(path)]
    full = [path for path in found if any("train" in file and file.endswith(".bin") for file in os.listdir(path))]
    if found:
        return (full or found)[0]
    there = sorted(os.path.basename(os.path.dirname(path)) for pattern in ("meta.json", "train*.bin")
                   for path in glob.glob(os.path.join(glob.escape(root), "data", "*", pattern)))
    nearest = difflib.get_close_matches(name, there, n=1)
    guess = f"did you mean {nearest[0]}? " if nearest else ""
    if os.path.isfile(name):
        raise UserError(f"{name} is a file, not a data set: python prepare.py {name} --tokenizer=byte --name=mine makes one of its text (byte needs no "
                        "download; gpt2 is another), then --dataset=mine")
    if name in NAMED:
        raise UserError(f"the data set {name} is not prepared yet: python prepare.py {name} makes it")
    raise UserError(f"no data set {name!r}: {guess}expected a folder that prepare.py has made, or a name under data/ (there: {', '.join(there) or 'none'}); "
                    "python prepare.py SOURCE --name=mine makes one of text files, folders or a hub data set")
