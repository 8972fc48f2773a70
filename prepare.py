"""Text, or records to fine-tune on, -> token shards that train.py reads.

    python prepare.py stdlib                                     # the Python standard library, byte tokens; no network
    python prepare.py shakespeare_char                           # nanoGPT's first dataset
    python prepare.py corpus.jsonl --tokenizer o200k_base        # .txt .jsonl .json .parquet, or a folder of them
    python prepare.py fineweb10B                                 # 10B GPT-2 tokens from the Hugging Face hub
    python prepare.py owner/name --text_field text --split train # any dataset of the hub
    python prepare.py my.jsonl --task=sft --tokenizer=PATH       # conversations, for the model whose tokenizer is at PATH

writes data/<name>/: train_000000.bin ..., val_000000.bin ... (see data/shards.py) and meta.json. All is written beside
it, in data/.<name>.partial, and renamed at the very end: a dataset is complete or it does not exist.

Records (see data/records.py) are rendered by the tokenizer's chat template; marks beside the tokens say which of them are the
assistant's, and report.json what the records are like. Their folder's name ends in a hash of what it is made from and how.
"""

import argparse
import collections
import contextlib
import difflib
import fcntl
import hashlib
import json
import os
import shutil
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from data.shards import MAX_SHARD_TOKENS, META_VERSION, SCAN_STEP, ShardWriter, describe_shard, fingerprint, open_shard, read_meta, sync_folder, write_meta
from data.sources import NAMED, Counts, open_source
from data.tokenizers import char_tokenizer, load_tokenizer
from engine.errors import EXIT_SIGNAL, UserError, full_disk, is_full_disk, run_as_script

ROOT = os.path.dirname(os.path.abspath(__file__))
BATCH = 1 << 19  # characters a worker takes at a time: enough that handing over costs nothing, little enough memory


def prepare(source: str, name: str | None = None, tokenizer=None, val_fraction: float | None = None, workers: int | None = None,
            shard_tokens: int = 100_000_000, text_field: str = "text", split: str = "train", file: str | None = None, skip_bad: bool = False,
            eot: str | None = None, out: str | None = None, overwrite: bool = False, quiet: bool = False, task: str = "pretrain",
            train_on: str = "all", block_size: int | None = None, fields: str | None = None) -> str:
    """Prepares source (see data/sources.py; for task "sft" data/records.py) and returns the dataset's folder, data/<name> or
    out. A complete dataset made from the same source with the same arguments is left as it is. Raises UserError.

    For sft, tokenizer may be a Tokenizer; train_on is "all" or "last" answers; records longer than a row of block_size (None: of any
    length) are cut between turns; fields names the records' fields ("question=ask,answer=reply")."""
    if val_fraction is not None and not 0 <= val_fraction < 1:
        raise UserError(f"--val_fraction {val_fraction}: expected a number from 0 to below 1, such as 0.05")
    if workers is not None and workers < 1:
        raise UserError(f"--workers {workers}: expected 1 or more; leave it out to use every core")
    if not 1 <= shard_tokens <= MAX_SHARD_TOKENS:
        raise UserError(f"--shard_tokens {shard_tokens}: expected 1 to {MAX_SHARD_TOKENS:,}")
    if task == "sft":
        if file is not None or text_field != "text":
            raise UserError("--file and --text_field are about text: give the records' file as the source, and their fields with --fields")
        return prepare_records(source, name, tokenizer, val_fraction, shard_tokens, split, skip_bad, eot, out, overwrite, quiet, train_on,
                               block_size, fields)
    if task != "pretrain":
        raise UserError(f"--task {task}: expected pretrain or sft")
    if train_on != "all" or block_size is not None or fields:
        raise UserError("--train_on, --block_size and --fields are about records: add --task=sft")
    corpus = open_source(source, text_field, split, file, skip_bad, val_fraction)
    if val_fraction is not None:
        corpus.val_fraction, corpus.val_tokens, corpus.ready_made = val_fraction, 0, None
    tokenizer = tokenizer or corpus.tokenizer
    if tokenizer != "gpt2" or shard_tokens != 100_000_000:
        corpus.ready_made = None
    arguments = {"source": source, "file": file, "tokenizer": tokenizer, "tokenizer_file": file_hash(tokenizer),
                 "val_fraction": corpus.val_fraction, "val_tokens": corpus.val_tokens, "shard_tokens": shard_tokens,
                 "text_field": text_field, "split": split, "skip_bad": skip_bad, "eot": eot}

    def write(partial):
        return write_dataset(partial, corpus, arguments, workers or cores(), quiet)

    return make_dataset(folder_of(name or corpus.name, out), corpus, arguments, write, overwrite, quiet)


def prepare_records(source, name, tokenizer, val_fraction, shard_tokens, split, skip_bad, eot, out, overwrite, quiet, train_on, block_size, fields):
    """prepare() for task "sft"."""
    from data.chat import ChatTemplate, with_turns
    from data.records import open_records, parse_fields, write_records

    if train_on not in ("all", "last"):
        raise UserError(f"--train_on {train_on}: expected all or last, the answers of a record that are learnt")
    if block_size is not None and block_size < 1:
        raise UserError(f"--block_size {block_size}: expected at least 1 token, a row of the model's context")
    fields, corpus = parse_fields(fields), open_records(source, split)
    if tokenizer is None and corpus.tokenizer is None:
        raise UserError("no tokenizer given: records are prepared for one model, name its tokenizer with --tokenizer=PATH, gpt2 or byte")
    tokenizer = tokenizer or corpus.tokenizer
    template = ChatTemplate(with_turns(load_tokenizer(tokenizer, eot) if isinstance(tokenizer, str) else tokenizer))
    template.require_end_of_turn()
    arguments = {"source": source, "task": "sft", "tokenizer_fingerprint": template.tokenizer.fingerprint[:16], "template": template.hash,
                 "val_fraction": 0.05 if val_fraction is None else val_fraction, "shard_tokens": shard_tokens, "split": split, "skip_bad": skip_bad,
                 "train_on": train_on, "block_size": block_size, "fields": fields}
    if name is None:
        made_from = {**corpus.description, **arguments, "source": None}
        name = f"{corpus.name}-{hashlib.sha256(json.dumps(made_from, sort_keys=True).encode()).hexdigest()[:8]}"

    def write(partial):
        return write_records(partial, corpus, template, arguments, quiet)

    return make_dataset(folder_of(name, out), corpus, arguments, write, overwrite, quiet)


def folder_of(name, out):
    """The folder of a dataset: out, or data/<name>."""
    if os.path.basename(name) != name or name.startswith("."):
        raise UserError(f"--name {name}: expected the name of a folder inside data/; --out takes a path")
    return os.path.abspath(out or os.path.join(ROOT, "data", name))


def make_dataset(folder, corpus, arguments, write, overwrite, quiet):
    """Has write(partial folder) make a dataset, unless it is there already, and gives it its name. Returns the folder."""
    try:
        if already_there(folder, corpus, arguments, overwrite, quiet):
            return folder
        with held(partial := beside(folder, "partial")):
            finish_replacement(folder)
            if already_there(folder, corpus, arguments, overwrite, quiet):  # another process has just finished it
                return folder
            if corpus.connect:
                corpus.connect()
            told = write(partial)
            publish(partial, folder)
    except OSError as error:
        if is_full_disk(error):
            raise full_disk(folder, None, error) from None
        raise UserError(f"{error.filename or folder}: {error.strerror or error}") from None
    if not quiet:
        print(f"{folder}: {told}")
    return folder


def cores():
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def file_hash(tokenizer):
    """Tells a tokenizer.json that was trained anew under its old path from the one a dataset was made with."""
    path = os.path.join(tokenizer, "tokenizer.json") if os.path.isdir(tokenizer) else tokenizer
    if not os.path.isfile(path):
        return None
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]


# ---- complete or absent


def beside(folder, role):
    """The hidden folder next to a data set's that is used for `role`."""
    return os.path.join(os.path.dirname(folder), f".{os.path.basename(folder)}.{role}")


def already_there(folder, corpus, arguments, overwrite, quiet):
    """True where folder is the dataset asked for. Anything else found there is a UserError, unless it is a dataset
    and may be overwritten."""
    if os.path.isfile(folder):
        raise UserError(f"{folder} is a file; give another --name or --out")
    if not os.path.isdir(folder) or not os.listdir(folder):
        return False
    if not os.path.exists(os.path.join(folder, "meta.json")):
        raise UserError(f"{folder} holds something that prepare.py did not write; give another --name or --out")
    if overwrite:
        return False
    meta = read_meta(folder)
    then, now = {**meta["source"], **meta["arguments"]}, {**corpus.description, **arguments}
    # the stamp of a local source's files says more than its path, which is another one from another folder
    differing = [f"{key} was {then.get(key)}, is {now.get(key)}" for key in now
                 if key not in ("source", "file") and then.get(key) != now.get(key)]
    if differing:
        raise UserError(f"{folder} is there already, made otherwise ({'; '.join(differing)}): pass --overwrite to "
                        "replace it, or another --name")
    if not quiet:
        print(f"{folder} is there already, made from the same source with the same arguments")
    return True


@contextlib.contextmanager
def held(partial):
    """Holds the partial folder, emptied of what a killed run left, for this process alone; removes it in the end."""
    os.makedirs(partial, exist_ok=True)
    with open(os.path.join(partial, "lock"), "w") as lock:
        def ours():  # not renamed, nor another one since we opened it
            return os.path.exists(lock.name) and os.path.samestat(os.stat(lock.name), os.fstat(lock.fileno()))

        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            alone = ours()
        except BlockingIOError:
            alone = False
        if not alone:
            raise UserError(f"another process is preparing this dataset in {partial}; wait for it, or give another "
                            "--name")
        try:
            for entry in os.scandir(partial):
                if entry.name != "lock":
                    os.remove(entry.path)
            yield
        finally:
            if ours():
                shutil.rmtree(partial, ignore_errors=True)


def finish_replacement(folder):
    """What a kill between publish's renames left: the old dataset alone, or both."""
    old = beside(folder, "old")
    if os.path.isdir(old) and not os.path.exists(folder):
        os.rename(old, folder)
    shutil.rmtree(old, ignore_errors=True)


def publish(partial, folder):
    """Gives the complete dataset its name. Under --overwrite, the old one goes only now."""
    sync_folder(partial)
    old = beside(folder, "old")
    if os.path.isdir(folder) and os.listdir(folder):
        os.rename(folder, old)
    os.rename(partial, folder)
    sync_folder(os.path.dirname(folder))
    shutil.rmtree(old, ignore_errors=True)
    os.remove(os.path.join(folder, "lock"))


# ---- text to shards


class Split:
    """The shards of train or val while they are written, and what meta.json says of them."""

    def __init__(self, folder, name, tokenizer, separated, shard_tokens):
        self.writer = ShardWriter(folder, name, tokenizer.vocab_size, shard_tokens)
        self.separator = tokenizer.eot_id if separated else None
        self.lengths = np.array([len(data or b"") for data in tokenizer.token_bytes])  # bytes of text an id stands for
        if self.separator is not None:
            self.lengths[self.separator] = 0
        self.tokens = self.documents = self.text_bytes = 0

    def write(self, ids):
        self.writer.write(ids)
        self.count(ids)

    def count(self, ids):
        self.tokens += len(ids)
        self.text_bytes += int(self.lengths[ids].sum())
        if self.separator is not None:
            self.documents += int(np.count_nonzero(ids == self.separator))

    def close(self):
        shards = self.writer.close()
        documents = self.documents if self.separator is not None else int(self.tokens > 0)
        return {"documents": documents, "tokens": self.tokens, "text_bytes": self.text_bytes, "shards": shards}


def write_dataset(folder, corpus, arguments, workers, quiet):
    """Writes every file of the dataset into folder, meta.json last. Returns what there is to tell, one line."""
    start, counts, note = time.time(), Counts(), ""
    tokenizer = make_tokenizer(corpus, arguments["tokenizer"], arguments["eot"])
    separated = corpus.separated and tokenizer.eot_id is not None

    def new_split(name):
        return Split(folder, name, tokenizer, separated, arguments["shard_tokens"])

    train, val = new_split("train"), new_split("val")
    ready = corpus.ready_made and fetch_ready_made(corpus.ready_made, {"train": train, "val": val})
    if not ready:
        encode_corpus(corpus, tokenizer, separated, train, val, workers, counts, quiet)
    splits, total = {"train": train.close(), "val": val.close()}, train.tokens + val.tokens
    if not total:
        bad = f"; the last of {counts.bad:,} bad records: {counts.why}" if counts.bad else ""
        raise UserError(f"{arguments['source']} holds no text ({counts.empty:,} empty documents){bad}")
    if corpus.val_fraction and total > 1 and not (train.tokens and val.tokens):
        splits = cut_again(folder, splits, corpus.val_fraction, new_split)
        note = f"; too few documents to hold whole ones out, so the last {corpus.val_fraction:g} of the tokens are val"
    shards = [shard for split in splits.values() for shard in split["shards"]]
    meta = {
        "format_version": META_VERSION, "fingerprint": fingerprint(tokenizer.fingerprint, shards),
        "tokenizer": tokenizer.identity(), "vocab_size": tokenizer.vocab_size, "eot_id": tokenizer.eot_id,
        "splits": splits, "empty_documents_dropped": counts.empty, "bad_records_skipped": counts.bad,
        "characters_replaced": counts.replaced, "source": corpus.description, "arguments": arguments,
        "ready_made": corpus.ready_made[0] if ready else None,
    }
    write_meta(folder, tokenizer, meta)
    return summary(splits, counts, time.time() - start) + note


def make_tokenizer(corpus, spec, eot):
    """The Tokenizer that --tokenizer asks for; UserError where it has no end-of-text token and texts are to be parted."""
    if spec == "char":
        if eot is not None:
            raise UserError(f"--eot {eot}: the char tokenizer has one end-of-text token of its own; leave --eot out")
        # one more pass over the text, before the one that encodes it
        pieces = (piece for _, _, pieces in corpus.documents(Counts()) for piece in pieces)
        return char_tokenizer(pieces, with_eot=not corpus.one_text)
    tokenizer = load_tokenizer(spec, eot)
    if tokenizer.eot_id is None and not corpus.one_text:
        named = ", ".join(sorted(tokenizer.special_tokens)) or "none, so another tokenizer is needed"
        raise UserError(f"the tokenizer {spec} has no token known to end a text, which must stand between documents: "
                        f"name one with --eot TOKEN; its special tokens are {named}")
    return tokenizer


def encode_corpus(corpus, tokenizer, separated, train, val, workers, counts, quiet):
    """All of the corpus into the Splits train and val."""
    from tqdm import tqdm

    def encode(batch):
        return encode_batch(tokenizer, batch)

    start, batches = time.time(), batch_documents(corpus.documents(counts), corpus.val_fraction, separated, counts)
    with tqdm(total=corpus.total_bytes, unit="B", unit_scale=True, dynamic_ncols=True,
              disable=quiet or not sys.stderr.isatty()) as bar:
        for ids in in_order(encode, batches, workers):
            # the first val_tokens tokens are val, wherever the document they end in goes on: so FineWeb is cut
            room = max(0, corpus.val_tokens - val.tokens)
            val.write(ids["val"])
            val.write(ids["train"][:room])
            train.write(ids["train"][room:])
            bar.update(counts.read - bar.n)
            bar.set_postfix_str(f"{(train.tokens + val.tokens) / (time.time() - start):,.0f} tokens/s", refresh=False)


def held_out(key, val_fraction):
    """Whether a document is for validation: a function of its name alone, so of no worker count and no run."""
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big") < val_fraction * 2**64


def batch_documents(documents, val_fraction, separated, counts):
    """Lists of about BATCH characters of (split, piece of text), with None for a document's end. Empty documents are
    dropped and counted."""
    batch, size = [], 0
    for split, key, pieces in documents:
        split = split or ("val" if held_out(key, val_fraction) else "train")
        empty = True
        for piece in pieces:
            batch.append((split, piece))
            size, empty = size + len(piece), False
            if size >= BATCH:
                yield batch
                batch, size = [], 0
        if empty:
            counts.empty += 1
        elif separated:
            batch.append((split, None))
    if batch:
        yield batch


def encode_batch(tokenizer, batch):
    """{"train": ids, "val": ids} of a batch. Runs in a worker's thread."""
    parts: dict[str, list[np.ndarray]] = {"train": [np.zeros(0, np.uint16)], "val": [np.zeros(0, np.uint16)]}
    documents: dict[str, list[str]] = {"train": [], "val": []}
    held = None  # (split, piece), the last one, of which the end of a document may come next

    def add(split, ids=None):
        """Puts down what has come of a split: whole documents, which are encoded together, then ids behind them."""
        if documents[split]:
            parts[split].append(tokenizer.encode_documents(documents[split]))
            documents[split] = []
        if ids is not None:
            parts[split].append(ids)

    for split, text in batch:
        if text is None and held:
            documents[split].append(held[1])
        elif text is None:  # the document came with the batch before
            add(split, np.array([tokenizer.eot_id], np.uint32))
        elif held:  # more of it comes, or nothing stands between documents
            add(held[0], tokenizer.encode_numpy(held[1]))
        held = (split, text) if text is not None else None
    if held:
        add(held[0], tokenizer.encode_numpy(held[1]))
    for split in parts:
        add(split)
    return {split: np.concatenate(arrays) for split, arrays in parts.items()}


def in_order(function, items, workers):
    """function(item) for every item, in order, by as many threads: tiktoken and tokenizers leave Python's lock while
    they work, and threads share one tokenizer and die with their process. At most 2 * workers items are under way, so
    that memory does not follow the corpus."""
    if workers == 1:
        yield from map(function, items)
        return
    pool = ThreadPoolExecutor(workers)
    pending = collections.deque()
    try:
        for item in items:
            pending.append(pool.submit(function, item))
            if len(pending) >= 2 * workers:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def cut_again(folder, splits, val_fraction, new_split):
    """All tokens lie in one split: writes them anew, the last val_fraction of them as val."""
    files = []
    for shard in splits["train"]["shards"] + splits["val"]["shards"]:
        files.append(os.path.join(folder, "all_" + shard["file"]))
        os.rename(os.path.join(folder, shard["file"]), files[-1])
    total = splits["train"]["tokens"] + splits["val"]["tokens"]
    train, val = new_split("train"), new_split("val")
    for path in files:
        tokens = open_shard(path)
        for start in range(0, len(tokens), SCAN_STEP):
            part = tokens[start:start + SCAN_STEP]
            room = max(0, total - max(1, int(total * val_fraction)) - train.tokens)
            train.write(part[:room])
            val.write(part[room:])
        os.remove(path)
    return {"train": train.close(), "val": val.close()}


def fetch_ready_made(ready_made, splits):
    """Fills the Splits with a hub dataset's finished shards, hard-linked from the hub's cache where that is on the same
    disk, and checked. False where the hub does not give them."""
    from huggingface_hub import hf_hub_download

    dataset, val_files, train_files = ready_made
    try:
        local = {split: [hf_hub_download(dataset, file, repo_type="dataset") for file in files]
                 for split, files in (("val", val_files), ("train", train_files))}
    except Exception as error:  # taken away, renamed, no network half way: the text itself can still be streamed
        if is_full_disk(error):
            raise
        print(f"no ready-made shards from {dataset} ({type(error).__name__}): encoding the text", file=sys.stderr)
        return False
    for split, files in local.items():
        adopt_shards(files, splits[split])
    return True


def adopt_shards(files, split):
    """Puts finished shards (paths) under our names into a Split, each looked at token by token."""
    for i, file in enumerate(files):
        tokens, max_id = open_shard(file), 0
        for start in range(0, len(tokens), SCAN_STEP):
            part = tokens[start:start + SCAN_STEP]
            max_id = max(max_id, int(part.max()))
            if max_id >= split.writer.vocab_size:
                raise UserError(f"{file} has id {max_id}, but the vocabulary ends at "
                                f"{split.writer.vocab_size - 1}: the file is damaged, or of another tokenizer")
            split.count(part)
        path = os.path.join(split.writer.folder, f"{split.writer.split}_{i:06d}.bin")
        try:
            os.link(os.path.realpath(file), path)
        except OSError:  # another disk
            shutil.copyfile(file, path)
        split.writer.shards.append(describe_shard(path, len(tokens), max_id))


# ---- told to the person


def summary(splits, counts, seconds):
    """What was prepared and how fast, in a sentence."""
    documents, tokens, text_bytes = (sum(split[what] for split in splits.values())
                                     for what in ("documents", "tokens", "text_bytes"))
    told = [f"{documents:,} documents"]
    told += [f"{n:,} {what}" for n, what in ((counts.empty, "empty ones dropped"), (counts.bad, "bad records skipped"),
                                             (counts.replaced, "characters replaced")) if n]
    return (f"{', '.join(told)}; {splits['train']['tokens']:,} train and {splits['val']['tokens']:,} val "
            f"tokens; {text_bytes / 1e6:,.1f} MB in {seconds:.1f} s: {text_bytes / 1e6 / seconds:,.1f} MB/s, "
            f"{tokens / seconds:,.0f} tokens/s")


# ---- the command line


class Parser(argparse.ArgumentParser):
    """Whose complaints are sentences of ours."""

    def error(self, message):
        raise UserError(message)


def parse(argv):
    """prepare's arguments from the command line, a dict; a UserError for what it does not know."""
    parser = Parser(prog="prepare.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                    allow_abbrev=False)
    parser.add_argument("source", nargs="?", help=f"{', '.join(NAMED)}, a local file or folder, or a hub dataset")
    parser.add_argument("--name", help="the dataset's name: its folder is data/<name> (default: the source's name)")
    parser.add_argument("--out", help="the dataset's folder, where it is not to be data/<name>")
    parser.add_argument("--tokenizer", help="byte, char, gpt2, cl100k_base, o200k_base, or path to a tokenizer.json (default: the named "
                                                "source's, else gpt2, which is downloaded once; byte needs no download)")
    parser.add_argument("--eot", metavar="TOKEN", help="the special token that ends a document")
    parser.add_argument("--val_fraction", type=float, help="share of the documents held out for validation (default: 0.05; a named source has its own)")
    parser.add_argument("--workers", type=int, help="threads that encode (default: every core)")
    parser.add_argument("--shard_tokens", type=int, default=100_000_000, help="tokens a shard (default: %(default)s)")
    parser.add_argument("--text_field", default="text", help="the records' field that holds the text")
    parser.add_argument("--split", default="train", help="which split of a hub dataset to take")
    parser.add_argument("--file", help="a local copy of a named source, for machines without a network")
    parser.add_argument("--skip_bad", action="store_true", help="count broken records instead of stopping at them")
    parser.add_argument("--task", default="pretrain", help="pretrain (text) or sft (records)")
    parser.add_argument("--train_on", default="all", help="sft: which answers of a record are learnt, all or last")
    parser.add_argument("--block_size", type=int, help="sft: tokens of a row; longer records are cut between turns")
    parser.add_argument("--fields", help="sft: the records' fields, as in question=ask,answer=reply or messages=dialog")
    parser.add_argument("--overwrite", action="store_true", help="replace a dataset of this name")
    arguments, unknown = parser.parse_known_args(argv)
    if unknown:
        options = [f"--{key}" for key in vars(arguments) if key != "source"]
        nearest = difflib.get_close_matches(unknown[0].partition("=")[0], options, n=1)
        guess = f"did you mean {nearest[0]}? " if nearest else ""
        raise UserError(f"unknown argument {unknown[0]}: {guess}prepare.py takes one source and {' '.join(options)}")
    if arguments.source is None:
        raise UserError(f"no source given: expected {', '.join(NAMED)}, a local file or folder, or owner/name on the "
                        "hub; for example: python prepare.py stdlib")
    return vars(arguments)


def main():
    """The command line; returns an exit code."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        prepare(**parse(sys.argv[1:]))
    except KeyboardInterrupt:
        print("interrupted: nothing was kept", file=sys.stderr)
        return EXIT_SIGNAL


if __name__ == "__main__":
    run_as_script(main)
