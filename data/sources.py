"""Where text comes from. A source gives documents, a document gives pieces of bounded size, so that memory follows
neither the corpus nor its longest text."""

import codecs
import difflib
import functools
import hashlib
import itertools
import json
import os
import platform
import re
import sysconfig
from dataclasses import dataclass

from engine.errors import UserError

SHAKESPEARE_URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
SHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
HUB = {  # our name -> dataset on the hub, its configuration
    "openwebtext": ("Skylion007/openwebtext", None),
    "fineweb10B": ("HuggingFaceFW/fineweb", "sample-10BT"),
    "fineweb_edu10B": ("HuggingFaceFW/fineweb-edu", "sample-10BT"),
}
NAMED = ("stdlib", "shakespeare_char", "shakespeare", *HUB)
FINEWEB_VAL_TOKENS = 100_000_000  # everyone's validation split of FineWeb: the first shard of this size
FINEWEB_SHARDS = ("kjj0/fineweb10B-gpt2", ["fineweb_val_000000.bin"],
                  [f"fineweb_train_{i:06d}.bin" for i in range(1, 104)])  # GPT-2 tokens of fineweb10B, ready-made

TEXT_FILES = (".txt .md .rst .tex .py .pyi .c .h .cc .cpp .hpp .cu .java .js .ts .go .rs .rb .sh .sql .html .css .xml "
              ".yaml .yml .toml").split()
CHUNK = 1 << 20  # bytes of a text file read at once
PIECE, WINDOW = 1 << 18, 1 << 16  # characters: a long text is cut at the first good place at or after PIECE


@dataclass
class Source:
    """documents(counts) yields (split, key, pieces): split "train" or "val" where the source itself decides, else None;
    key, a str that names the document; pieces, its text in strs (none for an empty one), used up before the next."""
    name: str
    documents: object
    description: dict  # for meta.json, and to see whether a prepared dataset is of this very source
    tokenizer: str = "gpt2"
    val_fraction: float = 0.05
    val_tokens: int = 0  # instead of val_fraction: so many tokens from the start are val
    total_bytes: int = None  # what counts.read reaches, where it is known
    one_text: bool = False  # the corpus is a single text: a separator is welcome, not needed
    separated: bool = True  # end-of-text after each document
    connect: object = None  # called before the long work: finds out that there is no network
    ready_made: tuple = None  # hub dataset of finished GPT-2 shards, its val files, its train files


@dataclass
class Counts:
    """What happened on the way: bytes read, empty documents dropped, bad records skipped, characters replaced."""
    read: int = 0
    empty: int = 0
    bad: int = 0
    replaced: int = 0
    why: str = ""  # the last bad record's fault


def open_source(name, text_field="text", split="train", file=None, skip_bad=False, val_fraction=None):
    """The Source called name: one of NAMED, a local file or folder, or a dataset of the hub (owner/name, or
    owner/name:configuration). Opens nothing big yet. Raises UserError."""
    if file is not None and name not in NAMED[1:]:
        raise UserError(f"--file {file}: it takes a local copy of {', '.join(NAMED[1:])}; give the path as the source")
    if name == "stdlib":
        return stdlib_source()
    if name in ("shakespeare", "shakespeare_char"):
        return shakespeare_source(name, file)
    if name in HUB and file is not None:
        return local_source(file, text_field, skip_bad, val_fraction, name=name)
    if name in HUB:
        return hub_source(name, *HUB[name], text_field, split, skip_bad)
    if os.path.exists(name):
        return local_source(name, text_field, skip_bad, val_fraction)
    if re.fullmatch(r"[\w.-]+/[\w.-]+(:[\w.-]+)?", name) and extension(name) not in known_extensions():
        dataset, _, config = name.partition(":")
        return hub_source(dataset.split("/")[1], dataset, config or None, text_field, split, skip_bad)
    if name == "arithmetic":
        raise UserError("arithmetic is a source of records, not of text: prepare it with --task=sft")
    raise UserError(f"no source {name!r}: {near_miss(name, NAMED)}{', '.join(NAMED)}, the path of a text file or folder, and hub "
                    "datasets (owner/name) work")


def near_miss(name, known):
    """"did you mean ...? ", or nothing."""
    nearest = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {nearest[0]}? " if nearest else ""


def known_extensions():
    """The endings of files that hold text or records."""
    return [*TEXT_FILES, ".jsonl", ".json", ".parquet"]


def extension(path):
    """The ending of a path in lower case, with its dot."""
    return os.path.splitext(path)[1].lower()


# ---- texts that every machine has, or fetches in a second


def stdlib_source():
    """The running Python's standard library: the text that is on every machine where this code runs."""
    root, files = sysconfig.get_paths()["stdlib"], []
    # pydoc_data is one file of manual text, a fifteenth of everything
    left_out = {"test", "tests", "idle_test", "site-packages", "dist-packages", "pydoc_data", "__pycache__"}
    for folder, folders, names in os.walk(root):
        folders[:] = [f for f in folders if f not in left_out]
        # written at install time, so different on machines with the same Python
        files += [os.path.join(folder, n) for n in names
                  if n.endswith(".py") and not n.startswith(("_sysconfigdata", "sitecustomize", "usercustomize"))]
    named = sorted((os.path.relpath(path, root).replace(os.sep, "/"), path) for path in files)
    if not named:
        raise UserError(f"this Python keeps no .py files in {root}; prepare a text file of your own instead")
    total = sum(os.path.getsize(path) for _, path in named)

    def documents(counts):
        for relative, path in named:
            yield None, relative, cut_text(read_text(path, counts, skip_bad=True))

    description = {"kind": "stdlib", "python": platform.python_version(), "files": len(named), "bytes": total}
    return Source("stdlib", documents, description, tokenizer="byte", total_bytes=total)


def shakespeare_source(name, file):
    """Tiny shakespeare with nanoGPT's split: the first int(0.9 n) characters are train; no end-of-text anywhere."""
    @functools.cache
    def text():
        if file is not None:
            return "".join(read_text(file, Counts(), skip_bad=False))
        import urllib.request

        try:
            with urllib.request.urlopen(SHAKESPEARE_URL, timeout=60) as response:
                data = response.read()
        except OSError as error:
            raise UserError(f"cannot fetch {SHAKESPEARE_URL} ({getattr(error, 'reason', error)}): connect to the "
                            "network, or give a local copy with --file PATH") from None
        if hashlib.sha256(data).hexdigest() != SHAKESPEARE_SHA256:
            raise UserError(f"{SHAKESPEARE_URL} gave {len(data):,} bytes that are not tiny shakespeare; give a local "
                            "copy with --file PATH")
        return data.decode()

    def documents(counts):
        counts.read, train = len(text()), int(0.9 * len(text()))
        yield "train", "train", cut_text([text()[:train]])
        yield "val", "val", cut_text([text()[train:]])

    origin = {"url": SHAKESPEARE_URL} if file is None else describe_files([("", file)])
    tokenizer = "char" if name == "shakespeare_char" else "gpt2"
    return Source(name, documents, {"kind": name, **origin}, tokenizer, val_fraction=0.1, one_text=True,
                  separated=False, connect=text)


# ---- local files


def local_source(path, text_field, skip_bad, val_fraction, name=None):
    """A file, or every file of a folder whose kind is known. A .jsonl line, a .json list's item, a parquet row and a
    text file of a folder are documents; a text file given alone is one text, whose end is val."""
    if not os.path.exists(path):
        raise UserError(f"no file or folder {path}")
    single = os.path.isfile(path)
    name = name or (os.path.splitext(os.path.basename(path))[0] if single else os.path.basename(os.path.abspath(path)))
    files = [("", path)] if single else list_files(path)
    kinds = {extension(full) for _, full in files}
    if single and not kinds <= {*known_extensions()}:
        raise UserError(f"{path} has no extension that says how to read it; {' '.join(known_extensions())} work")
    description = describe_files(files)
    total = None if ".parquet" in kinds else description["bytes"]  # parquet is compressed: what is read is more
    if single and kinds <= {*TEXT_FILES}:
        fraction = 0.05 if val_fraction is None else val_fraction

        def halves(counts):
            middle = char_border(path, int(total * (1 - fraction)))
            yield "train", "train", cut_text(read_text(path, counts, skip_bad, 0, middle))
            if middle < total:
                yield "val", "val", cut_text(read_text(path, counts, skip_bad, middle, total))

        return Source(name, halves, description, total_bytes=total, one_text=True)

    def documents(counts):
        for relative, full in files:
            if extension(full) in TEXT_FILES:
                yield None, relative, cut_text(read_text(full, counts, skip_bad))
                continue
            records = {".jsonl": jsonl_records, ".json": json_records, ".parquet": parquet_records}[extension(full)]
            for number, where, record in records(full, text_field, counts, skip_bad):
                text = text_of(record, text_field, where, counts, skip_bad)
                if text is not None:
                    yield None, f"{relative}:{number}", cut_text(in_chunks(text))

    return Source(name, documents, description, total_bytes=total)


def list_files(folder):
    """(relative name, path) of a folder's files of known kinds, sorted; hidden ones are left out."""
    found, others = [], {}
    for where, folders, names in os.walk(folder):
        folders[:] = [f for f in folders if not f.startswith(".")]
        for name in names:
            if name.startswith("."):
                continue
            path, kind = os.path.join(where, name), extension(name)
            if kind in known_extensions():
                found.append((os.path.relpath(path, folder).replace(os.sep, "/"), path))
            else:
                others[kind or "no extension"] = others.get(kind or "no extension", 0) + 1
    if not found:
        seen = ", ".join(f"{n} x {kind}" for kind, n in sorted(others.items())) or "nothing"
        raise UserError(f"{folder} holds no text: found {seen}; {' '.join(known_extensions())} work")
    return sorted(found)


def describe_files(files):
    """Enough to see that files (relative name, path) have changed since they were prepared, without reading them."""
    digest, total = hashlib.sha256(), 0
    for relative, path in files:
        try:
            status = os.stat(path)
        except OSError as error:
            raise UserError(f"cannot read {path}: {error.strerror}") from None
        digest.update(f"{relative} {status.st_size} {status.st_mtime_ns}\n".encode())
        total += status.st_size
    return {"kind": "files", "files": len(files), "bytes": total, "stamp": digest.hexdigest()[:16]}


def read_text(path, counts, skip_bad, start=0, stop=None):
    """Yields the bytes [start, stop) of a UTF-8 file as strs of about CHUNK bytes, as they are (no newline is changed)
    but for a byte-order mark. Bytes that are no UTF-8 are a UserError, or replaced and counted with skip_bad."""
    with open(path, "rb") as file:
        stop = os.path.getsize(path) if stop is None else stop
        if start == 0 and file.read(3) == codecs.BOM_UTF8:
            start = 3
        file.seek(start)
        held = b""  # a last character that may not be whole yet
        while start + len(held) < stop:
            data = file.read(min(CHUNK, stop - start - len(held)))
            counts.read += len(data)
            at_end = not data or start + len(held) + len(data) >= stop
            data = held + data
            border = len(data) if at_end else last_border(data)
            if not border:
                break
            yield decode(data[:border], path, start, counts, skip_bad)
            start, held = start + border, data[border:]


def last_border(data):
    """Where the last character of UTF-8 data begins, if it is not ASCII (it may not be whole), else the end."""
    end = len(data)
    while end > max(0, len(data) - 3) and data[end - 1] & 0xC0 == 0x80:
        end -= 1
    return end - 1 if end and data[end - 1] >= 0xC0 else end


def char_border(path, position):
    """The first byte at or after position of a UTF-8 file that begins a character."""
    with open(path, "rb") as file:
        file.seek(position)
        following = file.read(3)
    return position + next((i for i, byte in enumerate(following) if byte & 0xC0 != 0x80), len(following))


def decode(data, path, position, counts, skip_bad):
    """bytes -> str; position is where they stand in the file."""
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        if not skip_bad:
            raise UserError(f"{path} is not valid UTF-8 at byte {position + error.start} ({error.reason}): convert it "
                            "to UTF-8, or pass --skip_bad to have such bytes replaced and counted") from None
    text = data.decode(errors="replace")
    counts.replaced += text.count("\ufffd") - data.count("\ufffd".encode())
    return text


# ---- pieces of a text


def in_chunks(text):
    """A text in pieces of CHUNK characters."""
    return (text[i:i + CHUNK] for i in range(0, len(text), CHUNK))


def cut_text(chunks):
    """Joins the strs of one text and cuts it anew into pieces of PIECE characters or a little more.

    The cuts depend on the text alone, never on how it came. Between an ASCII letter and a newline no pre-tokenizer of
    GPT-2, cl100k_base, o200k_base, Llama 3 or Qwen joins anything, so the ids of the pieces are those of the whole
    text. (A tokenizer that puts a space before each text, as Llama 2's does, adds one token a cut.)
    """
    buffer = ""
    for chunk in chunks:
        buffer += chunk
        while len(buffer) >= PIECE + WINDOW:
            cut = good_cut(buffer)
            yield buffer[:cut]
            buffer = buffer[cut:]
    if buffer:
        yield buffer


def good_cut(text):
    """The first cut from PIECE on, within WINDOW, that changes no ids; else one at a word's end; else PIECE."""
    for pattern in (r"[A-Za-z](?=\n)", r"[A-Za-z](?=\s)", r"\S(?=\s)"):
        match = re.compile(pattern).search(text, PIECE - 1, PIECE + WINDOW)
        if match:
            return match.end()
    return PIECE


# ---- records


def text_of(record, text_field, where, counts, skip_bad):
    """The text of a record ("" for null); a UserError where it has none, or None and counted with skip_bad."""
    try:
        if isinstance(record, UserError):
            raise record
        if not isinstance(record, dict):
            raise UserError(f"{where}: expected an object with a field {text_field!r}, found {short_json(record)}")
        if text_field not in record:
            raise UserError(no_field(where, text_field, record))
        text = record[text_field]
        if not isinstance(text, str | None):
            raise UserError(f"{where}: the field {text_field!r} is {short_json(text)}, expected a string")
    except UserError as error:
        if not skip_bad:
            raise
        counts.bad, counts.why = counts.bad + 1, str(error)
        return None
    return "" if text is None else text


def no_field(where, text_field, fields):
    """The message on a record without the field that holds the text."""
    return (f"{where}: no field {text_field!r}, there are {', '.join(map(repr, fields)) or 'none'}; name the one that "
            "holds the text with --text_field")


def short_json(value):
    """A value as JSON, 60 characters at most."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else text[:60] + "..."


def jsonl_records(path, text_field, counts, skip_bad):
    """(line number, where, record) of each line that is not blank; a UserError stands for a record that is broken."""
    offset = 0
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            counts.read += len(line)
            where = f"{path} line {number}"
            text = decode(line, path, offset, counts, skip_bad)
            offset += len(line)
            if number == 1:
                text = text.removeprefix("\ufeff")
            if not text or text.isspace():
                continue
            try:
                record = json.loads(text)
            except json.JSONDecodeError as error:
                record = UserError(f"{where} is not JSON: {error.msg} at character {error.colno}; mend it, or pass "
                                   "--skip_bad to count such lines instead")
            except (ValueError, RecursionError) as error:  # an int of 5,000 digits, 1,000 brackets
                record = UserError(f"{where} cannot be read as JSON: {error}; mend it, or pass --skip_bad")
            line = text = None  # a line may have 20 MB, and its record holds them again
            yield number, where, record


def json_records(path, text_field, counts, skip_bad):
    """(number, where, record) of a file that holds one list, an item at a time."""
    decoder, chunks = json.JSONDecoder(), read_text(path, counts, skip_bad)
    between = re.compile(r"[\s,]*")
    buffer = "".join(itertools.islice(chunks, 1))
    at, line = len(buffer) - len(buffer.lstrip()), 1
    if buffer[at:at + 1] != "[":
        found = "one object" if buffer[at:at + 1] == "{" else short_json(buffer[at:at + 20]) if buffer[at:] else "nothing"
        raise UserError(f"{path}: expected a JSON list of objects, found {found}; a file of one object a line should end in .jsonl")
    at += 1
    for number in itertools.count(1):
        while True:
            at = between.match(buffer, at).end()
            if buffer[at:at + 1] == "]":
                return
            try:
                item, at = decoder.raw_decode(buffer, at)
                break
            except (ValueError, RecursionError) as error:
                where, reason = getattr(error, "pos", 0), getattr(error, "msg", error)
                whole = not str(reason).startswith("Unterminated string") and at <= where < len(buffer) - 16  # what follows cannot mend it
                # The item may go on in what follows. Reading as much again each time, a long one is not parsed often.
                more = "" if whole else "".join(itertools.islice(chunks, max(1, (len(buffer) - at) // CHUNK)))
                if not more:
                    raise UserError(f"{path} line {line + buffer.count(chr(10), 0, max(at, where))}: item {number} is broken or the list does not end "
                                    f"({reason})") from None
                line += buffer.count("\n", 0, at)
                buffer, at = buffer[at:] + more, 0
        yield number, f"{path} item {number}", item


def parquet_records(path, text_field, counts, skip_bad):
    """(row number, where, record) of a parquet file, a few rows at a time; without a text_field, all of a row."""
    import pyarrow
    import pyarrow.parquet

    try:
        # Without the read-ahead that is the default, which keeps whole row groups.
        file = pyarrow.parquet.ParquetFile(path, pre_buffer=False, buffer_size=CHUNK)
        if text_field is not None and text_field not in file.schema_arrow.names:
            raise UserError(no_field(path, text_field, file.schema_arrow.names))
        number = 0
        for batch in file.iter_batches(batch_size=64, columns=None if text_field is None else [text_field], use_threads=False):
            counts.read += batch.nbytes
            for values in zip(*batch.columns):
                number += 1
                where = f"{path} row {number}"
                try:
                    record = {name: value.as_py() for name, value in zip(batch.schema.names, values)}
                except UnicodeDecodeError as error:
                    record = UserError(f"{where} is not valid UTF-8 at its byte {error.start}; pass --skip_bad to "
                                       "count such rows instead")
                yield number, where, record
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"{path} cannot be read as parquet: {str(error).splitlines()[0]}") from None


# ---- the hub


def hub_source(name, dataset, config, text_field, split, skip_bad):
    """A dataset of the Hugging Face hub, streamed: nothing but token shards reaches the disk."""
    def documents(counts):
        for number, row in enumerate(hub_rows(dataset, config, split)):
            text = text_of(row, text_field, f"{dataset} row {number}", counts, skip_bad)
            if text is not None:
                counts.read += len(text)
                yield None, str(number), cut_text(in_chunks(text))

    description = {"kind": "hub", "dataset": dataset, "config": config, "split": split}
    source = Source(name, documents, description, val_fraction=0.0005 if name == "openwebtext" else 0.005)
    source.connect = functools.partial(require_hub, dataset)
    if name.startswith("fineweb"):
        source.val_tokens = FINEWEB_VAL_TOKENS
    if name == "fineweb10B":
        source.ready_made = FINEWEB_SHARDS
    return source


def hub_rows(dataset, config, split):
    """The rows of a hub dataset, as they come over the network; a UserError for whatever its libraries raise."""
    import datasets

    try:
        yield from datasets.load_dataset(dataset, config, split=split, streaming=True)
    except UserError:
        raise
    except Exception as error:  # requests', httpx's, huggingface_hub's, pyarrow's and datasets' own kinds
        reason = (str(error).splitlines() or [""])[0]
        raise UserError(f"the hub dataset {dataset} cannot be read: {reason or type(error).__name__}") from error


def require_hub(dataset):
    """A UserError where the hub cannot be reached; its own library tries for half a minute and prints 12 lines."""
    endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    if os.environ.get("HF_HUB_OFFLINE", "0").lower() in ("1", "true", "yes", "on"):
        return  # what is in its cache may do
    import ssl
    import urllib.error
    import urllib.request

    try:
        urllib.request.urlopen(urllib.request.Request(endpoint, method="HEAD"), timeout=20).close()
    except urllib.error.HTTPError:
        pass  # it answers
    except OSError as error:
        if not isinstance(getattr(error, "reason", None), ssl.SSLError):  # the hub's library brings certificates
            raise UserError(f"cannot reach {endpoint} for {dataset} ({getattr(error, 'reason', error)}): connect to "
                            "the network, or prepare a local file or folder of .txt, .jsonl or .parquet") from None
