"""What a prepared set of records is like: counted while it is made, kept in its folder as report.json, told in a dozen lines.

Near duplicates by MinHash (Broder 1997): 32 hash functions over the words of a record three by three, in 4 bands of 8. A record is one
where an earlier record agrees with it in a band and in 26 of the 32: about 80% of these threes are in both. 72 bytes a record are
kept, whatever its length.
"""

import heapq
import json
import os
import shutil
import zlib
from array import array
from collections import Counter

import numpy as np

from data.tokenizers import whole
from engine.errors import UserError
from engine.untrusted import read_json

FILE = "report.json"
BANDS, ROWS, ALIKE = 4, 8, 26
MAX_WORDS = 10_000  # of a record are looked at for near duplicates
LEAST_CUT_OFF = 80  # characters of an answer that can look cut off
LONGEST = 10


def odd_numbers(count, seed):
    """Fixed odd 64-bit numbers (splitmix64)."""
    state = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(seed)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        state = (state ^ (state >> np.uint64(shift))) * np.uint64(factor)
    return state ^ (state >> np.uint64(31)) | np.uint64(1)


MULTIPLY, ADD, JOIN = odd_numbers(BANDS * ROWS, 1), odd_numbers(BANDS * ROWS, 2), odd_numbers(ROWS, 3)


def signature(text):
    """uint8 array (BANDS * ROWS,) and uint64 array (BANDS,): texts that share most of their words in the same order agree in most of the
    first, and in one of the second."""
    words = text.lower().encode("utf-8", "surrogatepass").split()[:MAX_WORDS] or [b""]
    hashed = np.fromiter(map(zlib.crc32, words), np.uint64, len(words))
    if len(hashed) > 2:
        hashed = hashed[:-2] * JOIN[0] + hashed[1:-1] * JOIN[1] + hashed[2:] * JOIN[2]
    least = ((hashed[:, None] * MULTIPLY + ADD) >> np.uint64(32)).min(0)  # (BANDS * ROWS,)
    return least.astype(np.uint8), (least.reshape(BANDS, ROWS) * JOIN).sum(1, dtype=np.uint64)


def looks_cut_off(answer):
    """Whether an answer of some length ends within a sentence or a block of code: with a letter, digit, comma, colon, hyphen or opening
    bracket, or after an odd number of ``` lines."""
    answer = answer.rstrip()
    return len(answer) >= LEAST_CUT_OFF and (answer[-1].isalnum() or answer[-1] in ",;:-([{" or answer.count("```") % 2 == 1)


class Report:
    """Counts over the records of a data set as they are prepared; some integers a record are kept."""

    def __init__(self):
        self.keys, self.bands, self.signatures = array("Q"), array("Q"), bytearray()  # of each record that is kept
        self.lengths, self.labels = array("I"), array("I")  # of each sequence
        self.shapes, self.bad, self.why = Counter(), Counter(), ""
        self.records = self.answers = self.cut_off = self.unreasoned = self.trailing = self.replaced = 0
        self.cut_records = self.dropped_records = self.dropped_answers = 0
        self.dropped, self.longest = [], []

    def add_bad(self, kind, why):
        """A record that was passed over."""
        self.bad[kind] += 1
        self.why = whole(why)

    def add(self, where, key, talk, fitted):
        """A Conversation of records.py, its key (an int of 64 bits, equal for equal ones) and its Fitted examples."""
        self.records += 1
        self.shapes[talk.shape] += 1
        self.trailing += talk.dropped
        self.cut_records += fitted.cut
        self.dropped_answers += fitted.dropped
        if not fitted.examples:
            self.dropped_records += 1
            if len(self.dropped) < 5:
                self.dropped.append({"record": where, "tokens": fitted.too_long})
            return
        self.keys.append(key)
        signed, bands = signature(" ".join(m["content"] for m in talk.messages))
        self.signatures += signed.tobytes()
        self.bands.extend(bands.tolist())
        for ids, labelled in fitted.examples:
            self.lengths.append(len(ids))
            self.labels.append(int(labelled.sum()))
        for message in talk.messages:
            if message["role"] == "assistant":
                self.answers += 1
                self.cut_off += looks_cut_off(message["content"])
                self.unreasoned += "</think>" not in message["content"] and not message.get("reasoning_content")
        longest = max(len(ids) for ids, _ in fitted.examples)
        words = next(m["content"] for m in talk.messages if m["role"] == "user")[:200].split()[:8]
        entry = (longest, -self.records, {"record": where, "tokens": longest, "begins": whole(" ".join(words)[:80])})
        (heapq.heappush if len(self.longest) < LONGEST else heapq.heappushpop)(self.longest, entry)

    def duplicates(self):
        """(exact, near): records equal to an earlier one, and others that are nearly so."""
        first = np.sort(np.unique(np.array(self.keys), return_index=True)[1])
        bands, signatures = np.array(self.bands).reshape(-1, BANDS)[first], np.frombuffer(bytes(self.signatures), np.uint8).reshape(-1, BANDS * ROWS)[first]
        near = np.zeros(len(first), bool)
        for column in bands.T:
            _, earliest, group = np.unique(column, return_index=True, return_inverse=True)
            others = earliest[group]  # of each record the first that has the same band
            near |= (others < np.arange(len(first))) & ((signatures == signatures[others]).sum(1) >= ALIKE)
        return len(self.keys) - len(first), int(near.sum())

    def result(self):
        """All of it, as report.json has it."""
        exact, near = self.duplicates()
        lengths, labelled = np.array(self.lengths), int(np.array(self.labels, np.int64).sum())
        tokens = int(lengths.sum(dtype=np.int64))
        return {
            "records": self.records, "shapes": dict(self.shapes), "sequences": len(lengths), "tokens": tokens, "labelled_tokens": labelled,
            "labelled_share": labelled / tokens if tokens else 0.0,
            "lengths": {str(p): int(np.percentile(lengths, p, method="nearest")) for p in (1, 10, 50, 90, 99, 100)} if tokens else {},
            "answers": self.answers, "answers_that_look_cut_off": self.cut_off, "answers_without_reasoning": self.unreasoned,
            "exact_duplicates": exact, "near_duplicates": near, "trailing_messages_dropped": self.trailing, "records_with_history_cut": self.cut_records,
            "records_too_long": self.dropped_records, "answers_too_long": self.dropped_answers, "too_long": self.dropped,
            "characters_replaced": self.replaced, "bad_records": dict(self.bad), "last_bad_record": self.why,
            "longest": [entry for *_, entry in sorted(self.longest, key=lambda e: e[:2], reverse=True)],
        }


def report_lines(report):
    """The lines in which a person reads a report."""
    r, lengths = report, report["lengths"]
    lines = [f"records: {r['records']:,} ({', '.join(f'{name} {n:,}' for name, n in r['shapes'].items())}), {r['answers']:,} answers",
             f"tokens: {r['tokens']:,} in {r['sequences']:,} sequences, {r['labelled_tokens']:,} of them ({r['labelled_share']:.1%}) to learn",
             f"lengths: {lengths['50']:,} tokens in the middle, 90% up to {lengths['90']:,}, 99% up to {lengths['99']:,}, the longest {lengths['100']:,}",
             f"duplicates: {r['exact_duplicates']:,} exact, {r['near_duplicates']:,} near (MinHash, about 80% in common)",
             f"answers that look cut off: {r['answers_that_look_cut_off']:,}"]
    if r["bad_records"]:
        lines.append(f"bad records skipped: {', '.join(f'{kind} {n:,}' for kind, n in r['bad_records'].items())}; the last: {r['last_bad_record']}")
    if r["characters_replaced"]:
        lines.append(f"bytes that are no UTF-8, replaced: {r['characters_replaced']:,}")
    if r["trailing_messages_dropped"]:
        lines.append(f"messages behind the last answer, dropped: {r['trailing_messages_dropped']:,}")
    if r["records_with_history_cut"]:
        lines.append(f"records longer than a row, cut between turns: {r['records_with_history_cut']:,}")
    if r["answers_too_long"]:
        named = ", ".join(f"{d['record']} ({d['tokens']:,} tokens)" for d in r["too_long"])
        more = r["records_too_long"] - len(r["too_long"])
        lines.append(f"answers longer than a row with what they answer, dropped: {r['answers_too_long']:,}; records dropped with them: "
                     f"{r['records_too_long']:,}" + (f": {named}" if named else "") + (f" and {more:,} more" if more else ""))
    lines.append("the longest: " + "; ".join(f"{e['record']} ({e['tokens']:,}: {e['begins']})" for e in r["longest"][:3]))
    return lines


def read_report(folder):
    """The report of a prepared folder. UserError where there is none."""
    path = os.path.join(folder, FILE)
    try:
        report = read_json(path)
        report_lines(report)
        return report
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path} is not a report of prepare.py ({type(error).__name__}: {error}); prepare the data again") from None


def copy_report(folder, out_dir):
    """Puts a data set's report into a run's folder."""
    shutil.copyfile(os.path.join(folder, FILE), os.path.join(out_dir, FILE))


def write_report(folder, report):
    """Writes a report, a dict, beside the data set it is about, synced."""
    with open(os.path.join(folder, FILE), "w", encoding="utf-8") as file:
        json.dump(report, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
