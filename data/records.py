"""Records for SFT: what a file's objects say as conversations, and the sequences of tokens to learn from each.

Shapes are told by an object's own fields (SHAPES below), each object by itself; `fields` names them where they are called
otherwise: "question=ask,answer=reply" or "messages=dialog". Fields with other names are left alone. A record is refused, with
its number, or counted (skip_bad), unless it is a conversation that a person begins and that has an assistant's turn, none of
them empty; turns behind the last answer are dropped and counted, there is nothing to learn from them.
"""

import array
import bisect
import functools
import hashlib
import itertools
import json
import os
import re
import sys
import time
from dataclasses import dataclass

import numpy as np

from data.chat import answers_of
from data.report import Report, report_lines, write_report
from data.shards import BEGIN, LABEL, META_VERSION, ShardWriter, fingerprint, write_meta
from data.sources import Counts, Source, describe_files, extension, hub_rows, json_records, jsonl_records, list_files, near_miss, parquet_records, require_hub, short_json
from engine.errors import UserError

READERS = {".jsonl": jsonl_records, ".json": json_records, ".parquet": parquet_records}
CONVERSATIONS = ("messages", "conversations")  # lists of {"role", "content"} or {"from", "value"}
PAIRS = (("prompt", "completion"), ("instruction", "output"), ("instruction", "answer"), ("instruction", "response"),
         ("question", "answer"), ("question", "response"))  # texts; prompt and completion may be lists of messages
SHAPES = "messages, conversations, prompt/completion, instruction/input/output (or answer, response), question/answer (or response)"
ROLES = {"system": "system", "user": "user", "human": "user", "assistant": "assistant", "gpt": "assistant", "chatgpt": "assistant",
         "model": "assistant", "bot": "assistant", "tool": "tool", "function": "tool", "observation": "tool"}
MAPPED = ("messages", "system", "question", "input", "answer")  # what `fields` can name


class BadRecord(UserError):
    """A record that nothing can be learnt from; kind is what such records are counted as."""

    def __init__(self, kind, reason):
        super().__init__(reason)
        self.kind = kind


# --------------------------------------------------------------------------------------------------- where they come from


def open_records(source, split="train"):
    """The Source of a file (.jsonl, .json: a list, .parquet), a folder of them, a hub data set (owner/name:configuration) or
    "arithmetic"; its documents(counts, skip_bad) yields (where, record), a UserError in place of one that is broken."""
    if source == "arithmetic":
        def generated(counts, skip_bad):
            return ((f"arithmetic record {n}", record) for n, record in enumerate(arithmetic(), 1))

        return Source("arithmetic", generated, {"kind": "arithmetic", "version": 1}, tokenizer="byte")
    if os.path.exists(source):
        return local_records(source)
    if re.fullmatch(r"[\w.-]+/[\w.-]+(:[\w.-]+)?", source) and extension(source) not in READERS:
        dataset, _, config = source.partition(":")

        def rows(counts, skip_bad):
            return ((f"{dataset} row {n}", row) for n, row in enumerate(hub_rows(dataset, config or None, split)))

        description = {"kind": "hub", "dataset": dataset, "config": config or None, "split": split}
        return Source(dataset.split("/")[1], rows, description, tokenizer=None, connect=functools.partial(require_hub, dataset))
    raise UserError(f"no source of records {source!r}: {near_miss(source, ['arithmetic'])}arithmetic, the path of a {', '.join(READERS)} file or of a "
                    "folder of them, and hub data sets (owner/name) work")


def local_records(path):
    """The Source of records of a local file or of all such files in a folder; UserError where there are none."""
    single = os.path.isfile(path)
    name = os.path.splitext(os.path.basename(path))[0] if single else os.path.basename(os.path.abspath(path))
    files = [("", path)] if single else [pair for pair in list_files(path) if extension(pair[1]) in READERS]
    if not files or extension(files[0][1]) not in READERS:
        raise UserError(f"{path} holds no records: files that end in {', '.join(READERS)} do")

    def documents(counts, skip_bad):
        for _, full in files:
            for _, where, record in READERS[extension(full)](full, None, counts, skip_bad):
                yield where, record

    return Source(name, documents, describe_files(files), tokenizer=None)


def arithmetic():
    """Questions with known right answers, {"question": "What is 47 + 25?", "answer": "72"}: every a + b with a and b from 0 to 99, in
    an order that is always the same and follows no pattern (a step that has no divisor in common with their number)."""
    for i in range(10_000):
        a, b = divmod(i * 6_337 % 10_000, 100)
        yield {"question": f"What is {a} + {b}?", "answer": str(a + b)}


# ------------------------------------------------------------------------------------------------------------ what they say


@dataclass
class Conversation:
    """messages as a chat template takes them, the last of them an answer; tools or None; the record's shape; how many messages
    behind the last answer were dropped."""

    messages: list
    tools: list | None
    shape: str
    dropped: int


def parse_fields(text):
    """{"question": "ask", ...} of "question=ask,answer=reply"; UserError where it names nothing to learn from."""
    if not text:
        return {}
    pairs = [part.partition("=") for part in text.split(",")]
    fields = {ours.strip(): theirs.strip() for ours, _, theirs in pairs}
    if (not all(theirs for theirs in fields.values()) or len(fields) < len(pairs) or not set(fields) <= set(MAPPED)
            or ("messages" in fields) == ("question" in fields) or ("question" in fields) != ("answer" in fields)):
        raise UserError(f"fields={text}: expected messages=NAME, or question=NAME,answer=NAME and, if wanted, system=NAME and input=NAME, each the "
                        "name of a field of the records")
    return fields


def conversation(record, fields):
    """The Conversation of an object. BadRecord where it is none."""
    if not isinstance(record, dict):
        raise BadRecord("no objects", f"expected an object, found {short_json(record)}")
    shape, messages = shaped(record, fields)
    system = next((record[name] for name in ([fields["system"]] if "system" in fields else [] if fields else ["system", "system_prompt"])
                   if record.get(name)), None)
    if system is not None and not (messages and isinstance(messages[0], dict) and messages[0].get("role", messages[0].get("from")) == "system"):
        messages = [{"role": "system", "content": system}, *messages]
    messages = [message(m, i) for i, m in enumerate(messages, 1)]
    answers = answers_of(messages)
    if not answers:
        raise BadRecord("no assistant turn", "no turn of the assistant to learn from, only " + (", ".join(dict.fromkeys(m["role"] for m in messages)) or "nothing"))
    for k in answers:
        if not messages[k].get("tool_calls") and not messages[k]["content"].strip():
            raise BadRecord("empty answers", f"message {k + 1} is an empty answer")
    first = next(m["role"] for m in messages if m["role"] != "system")
    if first != "user":
        raise BadRecord("not begun by the user", f"the first turn is of role {first}, expected user")
    tools = record.get("tools") if isinstance(record.get("tools"), list) else None
    return Conversation(messages[:answers[-1] + 1], tools or None, shape, len(messages) - answers[-1] - 1)


def shaped(record, fields):
    """(name of the shape, list of messages not looked at yet) of an object."""
    if fields:
        question, answer, more = fields.get("question"), fields.get("answer"), fields.get("input")
        lists, pairs = [fields["messages"]] if "messages" in fields else [], [(question, answer)] if question else []
    else:
        lists, pairs, more = CONVERSATIONS, PAIRS, "input"
    name = next((name for name in lists if record.get(name) is not None), None)
    if name is not None:
        if not isinstance(record[name], list):
            raise BadRecord("wrong types", f"expected {name} to be a list of messages, found {short_json(record[name])}")
        return name, record[name]
    found = [pair for pair in pairs if all(record.get(name) is not None for name in pair)]
    if len(found) != 1:
        wanted = " or ".join("/".join(pair) for pair in found) + " both fit" if found else \
            f"expected {', '.join(fields.values()) if fields else SHAPES}, found the fields {', '.join(map(repr, record)) or 'none'}"
        raise BadRecord("no known shape", f"{wanted}; name them as in --fields=question=NAME,answer=NAME or --fields=messages=NAME")
    (question, answer), = found
    asked, answered = record[question], record[answer]
    shape = f"{question}/{answer}"
    if more and record.get(more) and isinstance(asked, str):
        if not isinstance(record[more], str):
            raise BadRecord("wrong types", f"expected {more} to be text, found {short_json(record[more])}")
        asked, shape = f"{asked}\n\n{record[more]}", f"{question}/{more}/{answer}"
    asked = asked if isinstance(asked, list) else [{"role": "user", "content": asked}]
    return shape, asked + (answered if isinstance(answered, list) else [{"role": "assistant", "content": answered}])


def message(given, number):
    """A message as chat templates take it, from either way to write one."""
    if not isinstance(given, dict):
        raise BadRecord("wrong types", f"message {number}: expected an object with role and content, or from and value, found {short_json(given)}")
    role, content = given.get("role", given.get("from")), given.get("content", given.get("value"))
    if not isinstance(role, str) or role.lower() not in ROLES:
        raise BadRecord("unknown roles", f"message {number}: unknown role {short_json(role)}: {', '.join(ROLES)} are known")
    role = ROLES[role.lower()]
    if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str) for part in content):
        content = "".join(part["text"] for part in content)
    calls = role == "assistant" and isinstance(given.get("tool_calls"), list) and given["tool_calls"]
    if content is None and calls:
        content = ""
    if not isinstance(content, str):
        raise BadRecord("wrong types", f"message {number}: expected its content to be text, found {short_json(content)}")
    more = {key: value for key, value in given.items() if key not in ("role", "from", "content", "value") and value is not None}
    return {**more, "role": role, "content": content}


# -------------------------------------------------------------------------------------------------------- what is learnt


@dataclass
class Fitted:
    """The examples [(ids, labelled)] of a conversation; whether history was cut; answers dropped, which with the message before them
    alone are too long, and the tokens of the shortest such."""

    examples: list
    cut: bool = False
    dropped: int = 0
    too_long: int = 0


def fit(template, talk, train_on, block_size):
    """The Fitted examples of a Conversation: with a block_size, each has block_size + 1 tokens at most, inputs and targets being a row.

    What is too long loses its oldest turns, system messages kept, until it fits and begins with the user. The answers that go
    with them are learnt in an example of their own, where they fit: each answer once.
    """
    fitted = Fitted([])
    messages, limit = talk.messages, float("inf") if block_size is None else block_size + 1

    def examples(start, stop, how):
        return template.examples(head + messages[start:stop], how, talk.tools)

    head = list(itertools.takewhile(lambda m: m["role"] == "system", messages))
    made = examples(len(head), len(messages), train_on)
    if all(len(ids) <= limit for ids, _ in made):
        fitted.examples = made
        return fitted
    # the windows, from the last to the first: messages[start:stop], of which "all" answers or the "last" are learnt
    windows, stop = [], len(messages)
    users = [i for i, m in enumerate(messages) if m["role"] == "user"]
    together = train_on == "all" and len(made) == 1
    while stop > len(head):
        before = users[:bisect.bisect_left(users, stop)]
        size = functools.cache(lambda u, before=before, stop=stop: max(len(ids) for ids, _ in examples(before[u], stop, "all" if together else "last")))
        u = bisect.bisect_left(range(len(before)), True, key=lambda u: size(u) <= limit)  # the fewer turns, the shorter
        if u < len(before):
            windows.append((before[u], stop))
            fitted.cut |= u > 0
        else:
            fitted.dropped += len(answers_of(messages[before[-1]:stop])) if together else 1
            fitted.too_long = min(fitted.too_long or size(len(before) - 1), size(len(before) - 1))
        if train_on == "last":
            break
        behind = before[min(u, len(before) - 1)] if together else answers_of(messages[:stop])[-1]
        stop = next((k + 1 for k in reversed(range(len(head), behind)) if messages[k]["role"] == "assistant"), 0)
    for start, stop in reversed(windows):
        fitted.examples += examples(start, stop, "all" if together else "last")
    return fitted


# --------------------------------------------------------------------------------------------------- what is written


class RecordSplit:
    """The marked shards of train or val while they are written. BUFFER tokens go to the disk at a time."""

    BUFFER = 1 << 16

    def __init__(self, folder, name, tokenizer, shard_tokens):
        self.writer = ShardWriter(folder, name, tokenizer.vocab_size, shard_tokens, marked=True)
        self.ids, self.marks = array.array("I"), bytearray()
        self.records = self.sequences = self.tokens = self.labels = 0

    def write(self, examples):
        """A record's examples [(ids, labelled)]."""
        for ids, labelled in examples:
            self.ids.extend(ids)
            marks = labelled * np.uint8(LABEL)
            marks[0] |= BEGIN
            self.marks += marks.tobytes()
            self.tokens += len(ids)
            self.labels += int(labelled.sum())
        self.records += 1
        self.sequences += len(examples)
        if len(self.ids) >= self.BUFFER:
            self.flush()

    def flush(self):
        self.writer.write(np.array(self.ids), np.array(self.marks))
        self.ids, self.marks = array.array("I"), bytearray()

    def close(self):
        self.flush()
        return {"documents": self.records, "sequences": self.sequences, "tokens": self.tokens, "labels": self.labels, "shards": self.writer.close()}


def write_records(folder, corpus, template, arguments, quiet):
    """Writes every file of a dataset of records into folder, meta.json last. Returns what there is to tell.

    arguments: prepare.py's, as meta.json has them."""
    start, threshold = time.time(), int(arguments["val_fraction"] * 2**64)
    splits, report = encode_records(folder, corpus, template, arguments, threshold, quiet)
    least, most = min(report.keys, default=0), max(report.keys, default=0)
    if threshold and least < most and not least < threshold <= most:
        # too few for their hashes to fall on both sides: again, with one record, and all that are equal to it, on the other
        for entry in os.scandir(folder):
            if entry.name != "lock":
                os.remove(entry.path)
        splits, report = encode_records(folder, corpus, template, arguments, least + 1 if least >= threshold else most, quiet)
    seconds, found = time.time() - start, report.result()
    if not found["labelled_tokens"]:
        raise UserError(f"{arguments['source']}: no answer is left to learn from: " + nothing_left(found, arguments["block_size"]))
    shards = [shard for split in splits.values() for shard in split["shards"]]
    tokenizer, unreasoned = template.tokenizer, found["answers_without_reasoning"] if "enable_thinking" in template.source else 0
    tokenizer.without_thinking = 0 < unreasoned == found["answers"]
    write_report(folder, found)
    write_meta(folder, tokenizer, {
        "format_version": META_VERSION, "fingerprint": fingerprint(tokenizer.fingerprint, shards), "tokenizer": tokenizer.identity(),
        "vocab_size": tokenizer.vocab_size, "eot_id": tokenizer.eot_id, "splits": splits, "source": corpus.description, "arguments": arguments,
        "sft": {"train_on": arguments["train_on"], "block_size": arguments["block_size"], "template": {"name": template.name, "hash": template.hash},
                **{key: found[key] for key in ("shapes", "records", "sequences", "labelled_tokens", "bad_records", "trailing_messages_dropped",
                                               "records_with_history_cut", "records_too_long", "answers_too_long")}},
    })
    train, val = splits["train"], splits["val"]
    lines = [f"{train['documents']:,} train and {val['documents']:,} val records in {seconds:.1f} s: {report.records / seconds:,.0f} records/s, by {template.name}"
             + (f"; the tokenizer has {len(tokenizer.added)} control tokens more, {' and '.join(tokenizer.added)}" if tokenizer.added else ""), *report_lines(found)]
    if unreasoned:
        lines.append(f"answers without reasoning: {unreasoned:,} of {found['answers']:,}, learnt as the template leaves thinking out: sample.py "
                     + ("asks for such" if tokenizer.without_thinking else "--thinking=false asks for such"))
    return "\n  ".join(lines)


def nothing_left(found, block_size):
    """Why no label is left, of what a Report found."""
    reasons = [f"{n:,} {kind}" for kind, n in found["bad_records"].items()]
    if found["bad_records"]:
        reasons.append(f"the last: {found['last_bad_record']}")
    if found["records_too_long"]:
        least = min(d["tokens"] for d in found["too_long"])
        reasons.append(f"{found['records_too_long']:,} too long for block_size={block_size} (the first of them from {least:,} tokens on): give a larger one")
    return "; ".join(reasons) or "it holds no records"


def encode_records(folder, corpus, template, arguments, threshold, quiet):
    """Writes the shards of all records, those whose key is below threshold as val; returns ({split: what meta.json says}, Report)."""
    from tqdm import tqdm

    splits = {name: RecordSplit(folder, name, template.tokenizer, arguments["shard_tokens"]) for name in ("train", "val")}
    report, counts, skip_bad = Report(), Counts(), arguments["skip_bad"]
    for where, record in tqdm(corpus.documents(counts, skip_bad), unit=" records", dynamic_ncols=True, disable=quiet or not sys.stderr.isatty()):
        try:
            if isinstance(record, UserError):
                raise record
            talk = conversation(record, arguments["fields"])
            fitted = fit(template, talk, arguments["train_on"], arguments["block_size"])
        except UserError as error:
            told = str(error) if error is record else f"{where}: {error}"
            if not skip_bad:
                raise error if error is record else UserError(f"{told}; mend it, or pass --skip_bad to count such records instead") from None
            report.add_bad("unreadable" if error is record else error.kind if isinstance(error, BadRecord) else "refused by the template", told)
            continue
        key = key_of(talk)
        report.add(where, key, talk, fitted)
        if fitted.examples:
            splits["val" if key < threshold else "train"].write(fitted.examples)
    report.replaced = counts.replaced
    return {name: split.close() for name, split in splits.items()}, report


def key_of(talk):
    """A number of 64 bits that a conversation's content gives: equal ones fall into the same split."""
    content = json.dumps([talk.messages, talk.tools], sort_keys=True, default=str)
    return int.from_bytes(hashlib.sha256(content.encode()).digest()[:8], "big")
