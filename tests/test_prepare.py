"""prepare.py through its own command line: what it writes, what it refuses, and that it leaves no half dataset."""

import json
import os
import random
import re
import subprocess
import sys
import time

import numpy as np
import pytest

from data.shards import TokenDataset, read_meta
from data.sources import open_source
from data.tokenizers import load_tokenizer, tokenizer_from_identity
from engine.errors import UserError
from prepare import Split, adopt_shards, in_order, prepare
from test_tokenizers import ASSETS, gpt2, qwen3, small_json

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
SHAKESPEARE = os.path.join(ASSETS, "tinyshakespeare.txt")
ENV = {**os.environ, "PYTHONPATH": ROOT}
if os.path.exists(os.path.join(ASSETS, "tiktoken")):
    ENV.setdefault("TIKTOKEN_CACHE_DIR", os.path.abspath(os.path.join(ASSETS, "tiktoken")))
needs_shakespeare = pytest.mark.skipif(not os.path.exists(SHAKESPEARE), reason="no tinyshakespeare in ../shared/assets")


def command(*args):
    return [sys.executable, os.path.join(ROOT, "prepare.py"), *map(str, args)]


def run(*args, cwd=None, **options):
    return subprocess.run(command(*args), cwd=cwd, env=ENV, capture_output=True, text=True, **options)


def done(*args, **options):
    result = run(*args, **options)
    assert result.returncode == 0 and not result.stderr, result.stderr
    return result.stdout


def refused(*args, **options):
    """The one sentence with which the command line says no."""
    result = run(*args, **options)
    assert result.returncode == 2 and not result.stdout, result
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1, result.stderr
    return result.stderr


def ids_of(folder, split):
    dataset = TokenDataset(str(folder), split)
    return dataset.read(0, dataset.n_tokens)


def checksums(folder):
    return [shard["sha256"] for split in read_meta(folder)["splits"].values() for shard in split["shards"]]


def write_jsonl(path, texts, **fields):
    with open(path, "w", encoding="utf-8") as file:
        file.writelines(json.dumps({"text": text, **fields}, ensure_ascii=False) + "\n" for text in texts)


def documents(n, seed=0):
    dice = random.Random(seed)
    return [" ".join(dice.choice(["the", "cat's", "sat\n", "日本", "1234", "<|endoftext|>"])
                     for _ in range(dice.randrange(1, 60))) for _ in range(n)]


# ---- what it writes


@pytest.mark.quick
def test_the_standard_library_in_process(tmp_path):
    began = time.time()
    folder = prepare("stdlib", workers=1, out=str(tmp_path / "stdlib"), quiet=True)
    assert time.time() - began < 10
    meta, train, val = read_meta(folder), ids_of(folder, "train"), ids_of(folder, "val")
    assert 8e6 < len(train) + len(val) < 20e6 and 0.02 < len(val) / len(train) < 0.1
    assert meta["source"]["python"] == sys.version.split()[0]
    assert tokenizer_from_identity(meta["tokenizer"], folder).kind == "byte"
    parts = [meta["splits"][split] for split in ("train", "val")]
    separators = (train == 256).sum() + (val == 256).sum()
    assert sum(part["documents"] for part in parts) == separators == meta["source"]["files"] - meta[
        "empty_documents_dropped"]
    assert sum(part["text_bytes"] for part in parts) == meta["source"]["bytes"]
    with open(json.__file__, "rb") as file:
        whole = file.read()
    # separators become 0xff, which is nowhere in UTF-8: a file is wholly in one of the splits
    assert sum(ids.clip(max=255).astype(np.uint8).tobytes().split(b"\xff").count(whole) for ids in (train, val)) == 1
    assert prepare("stdlib", workers=1, out=folder, quiet=True) == folder
    again = prepare("stdlib", workers=3, out=str(tmp_path / "again"), quiet=True)
    assert read_meta(again)["fingerprint"] == meta["fingerprint"]


@pytest.mark.quick
@needs_shakespeare
def test_tiny_shakespeare_is_cut_and_numbered_as_in_nanogpt(tmp_path):
    gpt2()
    for source, train, val, vocab_size in (("shakespeare", 301_966, 36_059, 50257),
                                           ("shakespeare_char", 1_003_854, 111_540, 65)):
        folder = tmp_path / source
        told = done(source, "--file", SHAKESPEARE, f"--out={folder}")
        assert f"{train:,} train and {val:,} val tokens" in told and "MB/s" in told and "tokens/s" in told
        assert TokenDataset(str(folder), "train").vocab_size == vocab_size
        with open(SHAKESPEARE, encoding="utf-8") as file:
            text = file.read()
        tokenizer = tokenizer_from_identity(read_meta(folder)["tokenizer"], folder)
        assert tokenizer.decode(ids_of(folder, "train")) == text[:int(0.9 * len(text))]
        assert tokenizer.decode(ids_of(folder, "val")) == text[int(0.9 * len(text)):]
    assert tokenizer.chars == "".join(sorted(set(text))) and tokenizer.eot_id is None


@pytest.mark.quick
def test_documents_keep_their_words_and_are_separated_once_each(tmp_path):
    texts = [*documents(300), "", "", "\n", "<|endoftext|>"]
    write_jsonl(tmp_path / "d.jsonl", texts)
    told = done("d.jsonl", "--tokenizer", "byte", "--val_fraction", "0.2", "--out", "d", cwd=tmp_path)
    assert "302 documents, 2 empty ones dropped" in told
    found = []
    for split in ("train", "val"):
        ids = ids_of(tmp_path / "d", split)
        assert ids[-1] == 256
        found += [bytes(part.astype(np.uint8)).decode() for part in np.split(ids[ids != 256], np.cumsum(
            np.diff(np.flatnonzero(np.r_[256, ids] == 256)) - 1)[:-1])]
    assert sorted(found) == sorted(text for text in texts if text)
    splits = read_meta(tmp_path / "d")["splits"]
    assert splits["train"]["documents"] + splits["val"]["documents"] == 302
    assert 30 < splits["val"]["documents"] < 95


@pytest.mark.quick
def test_one_or_three_workers_write_the_same_bytes(tmp_path):
    gpt2()
    source = tmp_path / "source"
    source.mkdir()
    write_jsonl(source / "a.jsonl", documents(20_000))
    (source / "b.txt").write_text("\n".join(documents(9000, seed=1)), encoding="utf-8")  # several pieces
    (source / "c.md").write_text("read me")
    for workers in (1, 3):
        done("source", "--workers", workers, "--shard_tokens=50000", "--out", f"w{workers}", cwd=tmp_path)
    assert checksums(tmp_path / "w1") == checksums(tmp_path / "w3") and len(checksums(tmp_path / "w1")) > 5


@pytest.mark.quick
def test_results_come_in_order_and_reading_ahead_is_bounded():
    taken, dice = [], random.Random(0)

    def items():
        for i in range(60):
            taken.append(i)
            yield i

    def work(i):
        time.sleep(dice.random() / 100)
        return i

    for expected, i in enumerate(in_order(work, items(), workers=3)):
        assert i == expected and len(taken) <= i + 6


@pytest.mark.quick
def test_a_text_file_is_one_text_whose_end_is_val(tmp_path):
    text = "ab" * 4000 + "é" * 2000 + "end!"
    (tmp_path / "t.txt").write_text(text, encoding="utf-8")
    done("t.txt", "--tokenizer=byte", "--val_fraction=0.25", "--out", "t", cwd=tmp_path)
    size = len(text.encode())
    cut = int(size * 0.75) + 1  # one byte on: it fell inside an é
    assert bytes(ids_of(tmp_path / "t", "train").astype("u2")[:-1].astype(np.uint8)) == text.encode()[:cut]
    assert bytes(ids_of(tmp_path / "t", "val").astype("u2")[:-1].astype(np.uint8)) == text.encode()[cut:]
    assert ids_of(tmp_path / "t", "train")[-1] == ids_of(tmp_path / "t", "val")[-1] == 256
    done("t.txt", "--tokenizer=char", "--out", "c", cwd=tmp_path)  # a single text needs no separator
    assert TokenDataset(str(tmp_path / "c"), "val").vocab_size == len(set(text))


@pytest.mark.quick
def test_every_kind_of_file_gives_the_same_documents(tmp_path):
    texts = documents(50)
    write_jsonl(tmp_path / "d.jsonl", texts, id=1)
    with open(tmp_path / "d.json", "w") as file:
        json.dump([{"body": text} for text in texts], file, indent=2)
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table({"text": texts, "n": range(50)}), tmp_path / "d.parquet")
    (tmp_path / "d").mkdir()
    for i, text in enumerate(texts):
        (tmp_path / "d" / f"{i:02d}.TXT").write_text(text, encoding="utf-8")
    (tmp_path / "d" / "picture.png").write_bytes(b"\x89")
    (tmp_path / "d" / ".hidden.txt").write_bytes(b"\xff")
    sums = set()
    for source, *options in (["d.jsonl"], ["d.json", "--text_field=body"], ["d.parquet"], ["d"]):
        done(source, *options, "--tokenizer=byte", "--val_fraction=0", "--out=o_" + source, cwd=tmp_path)
        sums.add(tuple(checksums(tmp_path / ("o_" + source))))
        with pytest.raises(UserError, match="no val split"):
            TokenDataset(str(tmp_path / ("o_" + source)), "val")
    assert len(sums) == 1


def test_a_large_json_list_is_read_in_parts(tmp_path):
    texts = documents(3000) + ["x" * 5_000_000 + "\n"] + documents(3000, seed=1)
    for name, dump in (("list.json", lambda f: json.dump([{"text": t} for t in texts], f, indent=1)),
                       ("lines.jsonl", lambda f: f.writelines(json.dumps({"text": t}) + "\n" for t in texts))):
        with open(tmp_path / name, "w") as file:
            dump(file)
        done(name, "--tokenizer=byte", "--val_fraction=0", "--out", name + ".d", cwd=tmp_path)
    assert checksums(tmp_path / "list.json.d") == checksums(tmp_path / "lines.jsonl.d")


@pytest.mark.quick
def test_windows_habits_do_no_harm(tmp_path):
    (tmp_path / "w.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "one"}\r\n\r\n{"text": null}\r\n{"text": "two"}')
    told = done("w.jsonl", "--tokenizer=byte", "--val_fraction=0", "--out=w", cwd=tmp_path)
    assert "2 documents, 1 empty ones dropped" in told
    assert load_tokenizer("byte").decode(ids_of(tmp_path / "w", "train")) == "one<|endoftext|>two<|endoftext|>"
    (tmp_path / "w.txt").write_bytes(b"\xef\xbb\xbfa\r\nb")
    done("w.txt", "--tokenizer=byte", "--val_fraction=0", "--out=t", cwd=tmp_path)
    assert load_tokenizer("byte").decode(ids_of(tmp_path / "t", "train")) == "a\r\nb<|endoftext|>"


@pytest.mark.quick
def test_too_few_documents_to_hold_out_still_give_a_val_split(tmp_path):
    write_jsonl(tmp_path / "few.jsonl", ["a" * 3000])
    told = done("few.jsonl", "--tokenizer=byte", "--val_fraction=0.1", "--shard_tokens=1000", "--out=f", cwd=tmp_path)
    assert "too few documents" in told
    assert len(ids_of(tmp_path / "f", "train")) == 2701 and len(ids_of(tmp_path / "f", "val")) == 300
    assert sorted(os.listdir(tmp_path / "f")) == ["meta.json", *(f"train_00000{i}.bin" for i in range(3)),
                                                  "val_000000.bin"]
    assert ids_of(tmp_path / "f", "val")[-1] == 256
    write_jsonl(tmp_path / "tiny.jsonl", ["ab"])
    done("tiny.jsonl", "--tokenizer=byte", "--out=y", cwd=tmp_path)
    assert list(ids_of(tmp_path / "y", "val")) == [256]


def test_a_vocabulary_beyond_16_bits_is_written_in_32(tmp_path):
    qwen3()
    write_jsonl(tmp_path / "d.jsonl", documents(20))
    done("d.jsonl", "--tokenizer", os.path.abspath(os.path.join(ASSETS, "qwen3")), "--out=q", cwd=tmp_path)
    dataset = TokenDataset(str(tmp_path / "q"), "train")
    assert dataset.shards[0].dtype == np.uint32 and dataset.vocab_size == 151669
    again = tokenizer_from_identity(dataset.tokenizer_identity, str(tmp_path / "q"))
    ids = np.concatenate([ids_of(tmp_path / "q", split) for split in ("train", "val")])
    assert (ids == again.eot_id).sum() == 20 and again.eot_id == 151643


@pytest.mark.quick
def test_the_end_token_can_be_named_and_must_be_where_none_is_known(tmp_path):
    write_jsonl(tmp_path / "d.jsonl", documents(20))
    small_json(tmp_path / "t", special=("<stop>", "<pad>"))
    told = refused("d.jsonl", "--tokenizer=./t", "--out=d", cwd=tmp_path)
    assert "--eot TOKEN" in told and "<pad>, <stop>" in told
    done("d.jsonl", "--tokenizer=./t", "--eot", "<stop>", "--out=d", cwd=tmp_path)
    meta = read_meta(tmp_path / "d")
    assert (ids_of(tmp_path / "d", "train") == meta["eot_id"]).sum() == meta["splits"]["train"]["documents"]


@pytest.mark.quick
def test_skip_bad_counts_what_it_passes_over(tmp_path):
    lines = [b'{"text": "one"}', b'{"text": ', b'[1]', b'{"body": "x"}', b'{"text": 5}', b'{"text": "t\xffo"}',
             b"[" * 100_000]
    (tmp_path / "d.jsonl").write_bytes(b"\n".join(lines))
    told = done("d.jsonl", "--skip_bad", "--tokenizer=byte", "--val_fraction=0", "--out=d", cwd=tmp_path)
    assert "2 documents, 5 bad records skipped, 1 characters replaced" in told
    assert load_tokenizer("byte").decode(ids_of(tmp_path / "d", "train")) == "one<|endoftext|>t\ufffdo<|endoftext|>"
    meta = read_meta(tmp_path / "d")
    assert (meta["bad_records_skipped"], meta["characters_replaced"]) == (5, 1)


def test_bad_bytes_are_found_wherever_a_chunk_ends(tmp_path):
    good = ("a" + "é日\U0001f600" * 400_000).encode()  # 1 MB chunks end inside characters
    for at in (0, 1_048_575, 1_048_577, len(good)):
        while at < len(good) and good[at] & 0xC0 == 0x80:
            at += 1
        (tmp_path / "t.txt").write_bytes(good[:at] + b"\xff" + good[at:])
        assert f"byte {at} " in refused("t.txt", "--tokenizer=byte", "--val_fraction=0", "--out=t", cwd=tmp_path)
    (tmp_path / "t.txt").write_bytes(good[:-1])  # the last character is cut off
    assert "unexpected end of data" in refused("t.txt", "--tokenizer=byte", "--val_fraction=0", "--out=t", cwd=tmp_path)
    (tmp_path / "t.txt").write_bytes(good)
    done("t.txt", "--tokenizer=byte", "--val_fraction=0", "--out=t", cwd=tmp_path)
    assert load_tokenizer("byte").decode(ids_of(tmp_path / "t", "train")[:-1]) == good.decode()


@pytest.mark.quick
def test_a_terminal_gets_a_progress_bar(tmp_path):
    import pty
    import termios

    (tmp_path / "t.txt").write_text("a word\n" * 300_000)
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 120))
    result = subprocess.run(command("t.txt", "--tokenizer=byte", "--out=t"), cwd=tmp_path, env=ENV, stderr=theirs,
                            stdout=subprocess.PIPE)
    shown = b""
    while not shown.endswith(b"\n"):  # the bar ends its line when it is full
        shown += os.read(ours, 100_000)
    os.close(theirs)
    os.close(ours)
    assert result.returncode == 0 and re.search(r"MB/s, [\d,]+ tokens/s", shown.decode()), shown
    assert b"2.10M/2.10M" in shown


# ---- what it refuses


def broken_json(path):
    write_jsonl(path / "d.jsonl", ["a", "b"])
    with open(path / "d.jsonl", "a") as file:
        file.write('{"text": "c"\n')


REFUSALS = {  # what is there, the arguments, what the sentence must say
    "unknown option": (None, "stdlib --tokeniser byte", "--tokeniser|did you mean --tokenizer?"),
    "unknown option with =": (None, "stdlib --val_fractio=0.1", "did you mean --val_fraction?"),
    "two sources": (None, "stdlib more", "unknown argument more|one source"),
    "no source": (None, "", "no source|stdlib"),
    "unknown source": (None, "shakespear_char", "did you mean shakespeare_char?|stdlib"),
    "missing value": (None, "stdlib --name", "--name"),
    "fraction 1": (None, "stdlib --val_fraction 1", "--val_fraction 1.0|below 1"),
    "fraction below 0": (None, "stdlib --val_fraction -0.1", "--val_fraction -0.1"),
    "fraction nan": (None, "stdlib --val_fraction nan", "--val_fraction nan"),
    "fraction word": (None, "stdlib --val_fraction half", "--val_fraction|half"),
    "no workers": (None, "stdlib --workers 0", "--workers 0|1 or more"),
    "no shard": (None, "stdlib --shard_tokens 0", "--shard_tokens 0"),
    "shard beyond int32": (None, "stdlib --shard_tokens 3000000000", "2,147,483,647"),
    "unknown tokenizer": (None, "stdlib --tokenizer gtp2", "'gtp2'|did you mean gpt2"),
    "name with a slash": (None, "stdlib --name ../x", "--name ../x|--out"),
    "eot of bytes": (None, "stdlib --eot <s>", "--eot <s>"),
    "file for stdlib": (None, "stdlib --file x", "--file x"),
    "file missing": (None, "shakespeare_char --file no.txt", "no.txt|No such file"),
    "unknown extension": (lambda p: (p / "a.xyz").write_text("a"), "a.xyz", "a.xyz|.jsonl"),
    "folder of pictures": (lambda p: (p / "a.png").write_text("a"), ".", "1 x .png|.txt"),
    "empty text": (lambda p: (p / "d.txt").write_text(""), "d.txt --tokenizer=byte", "d.txt holds no text"),
    "only empty documents": (lambda p: write_jsonl(p / "d.jsonl", ["", ""]), "d.jsonl --tokenizer=byte",
                             "d.jsonl holds no text (2 empty documents)"),
    "only bad lines": (lambda p: (p / "d.jsonl").write_text("1\n2\n"), "d.jsonl --tokenizer=byte --skip_bad",
                       "holds no text|2 bad records|line 2|found 2"),
    "broken line": (broken_json, "d.jsonl --tokenizer=byte", "d.jsonl line 3|not JSON|--skip_bad"),
    "no such field": (lambda p: write_jsonl(p / "d.jsonl", ["a"], id=1), "d.jsonl --text_field=body --tokenizer=byte",
                      "d.jsonl line 1|no field 'body'|'text', 'id'|--text_field"),
    "field of another type": (lambda p: write_jsonl(p / "d.jsonl", [["a"]]), "d.jsonl --tokenizer=byte",
                              'line 1|["a"]|expected a string'),
    "not a list": (lambda p: (p / "d.json").write_text('{"text": "a"}'), "d.json --tokenizer=byte", "JSON list|.jsonl"),
    "list cut off": (lambda p: (p / "d.json").write_text('[{"text": "a"}, {"te'), "d.json --tokenizer=byte", "item 2"),
    "not parquet": (lambda p: (p / "d.parquet").write_text("nonsense"), "d.parquet --tokenizer=byte", "as parquet"),
    "Latin-1 text": (lambda p: (p / "d.txt").write_bytes(b"caf\xe9 x"), "d.txt --tokenizer=byte",
                     "d.txt|byte 3|UTF-8|--skip_bad"),
    "Latin-1 line": (lambda p: (p / "d.jsonl").write_bytes(b'{"text": "a"}\n{"text": "\xe9"}\n'),
                     "d.jsonl --tokenizer=byte", "byte 24"),
}


@pytest.mark.quick
@pytest.mark.parametrize("case", REFUSALS)
def test_bad_input_is_one_sentence_and_leaves_nothing(case, tmp_path):
    make, arguments, told = REFUSALS[case]
    if make:
        make(tmp_path)
    before = sorted(os.listdir(tmp_path))
    sentence = refused(*arguments.split(), "--out", "out", cwd=tmp_path)
    for words in told.split("|"):
        assert words in sentence, sentence
    assert sorted(os.listdir(tmp_path)) == before


@pytest.mark.quick
def test_a_missing_parquet_field_is_named(tmp_path):
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table({"body": ["a"], "n": [1]}), tmp_path / "d.parquet")
    assert "'body', 'n'" in refused("d.parquet", "--tokenizer=byte", "--out=d", cwd=tmp_path)


@pytest.mark.quick
def test_without_a_network_the_local_way_is_named(tmp_path, monkeypatch):
    for variable in ("http_proxy", "https_proxy", "HTTPS_PROXY", "HTTP_PROXY"):
        monkeypatch.setitem(ENV, variable, "http://127.0.0.1:9")  # refused at once, whether there is a network or not
    monkeypatch.delitem(ENV, "HF_HUB_OFFLINE", raising=False)
    assert "--file PATH" in refused("shakespeare_char", "--out=s", cwd=tmp_path)
    for source in ("openwebtext", "fineweb10B", "fineweb_edu10B", "owner/name"):
        assert "cannot reach" in refused(source, "--out=o", cwd=tmp_path)
    assert not os.listdir(tmp_path)


# ---- the hub


@pytest.mark.quick
def test_finished_shards_are_linked_and_looked_at(tmp_path):
    tokenizer = load_tokenizer("byte")
    ids = np.array([256, 65, 66, 256, 67])
    for folder in ("cache", "out"):
        (tmp_path / folder).mkdir()
    made = Split(str(tmp_path / "cache"), "x", tokenizer, True, 3)
    made.write(ids)
    files = [str(tmp_path / "cache" / shard["file"]) for shard in made.close()["shards"]]
    split = Split(str(tmp_path / "out"), "train", tokenizer, True, 3)
    adopt_shards(files, split)
    told = split.close()
    assert (told["documents"], told["tokens"], told["text_bytes"]) == (2, 5, 3)
    assert [(s["file"], s["tokens"], s["max_id"]) for s in told["shards"]] == [
        ("train_000000.bin", 3, 256), ("train_000001.bin", 2, 256)]
    assert os.path.samefile(files[0], tmp_path / "out" / "train_000000.bin")
    small = Split(str(tmp_path / "out"), "val", tokenizer, True, 3)
    small.writer.vocab_size = 256
    with pytest.raises(UserError, match="has id 256.*ends at 255"):
        adopt_shards(files, small)


def test_fineweb10b_takes_the_ready_made_shards(tmp_path, monkeypatch):
    """The whole path, with the hub's own library reading its cache as it does without a network."""
    gpt2()
    snapshot = tmp_path / "hub" / "datasets--kjj0--fineweb10B-gpt2" / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    refs = snapshot.parent.parent / "refs"
    refs.mkdir()
    (refs / "main").write_text("0" * 40)
    val, train = open_source("fineweb10B").ready_made[1:]
    for i, name in enumerate(val + train):
        header = np.zeros(256, "<i4")
        header[:3] = 20240520, 1, 10
        (snapshot / name).write_bytes(header.tobytes() + np.array([50256, *[i] * 9], "<u2").tobytes())
    for name, value in (("HF_HUB_OFFLINE", "1"), ("HF_HUB_CACHE", tmp_path / "hub"), ("HF_HOME", tmp_path / "home")):
        monkeypatch.setitem(ENV, name, str(value))
    done("fineweb10B", "--out=f", cwd=tmp_path)
    assert np.array_equal(ids_of(tmp_path / "f", "val"), [50256] + [0] * 9)
    assert np.array_equal(ids_of(tmp_path / "f", "train")[1::10], np.arange(1, 104))
    assert read_meta(tmp_path / "f")["ready_made"] == "kjj0/fineweb10B-gpt2"


def test_a_dataset_of_the_hub_is_streamed(tmp_path):
    """By the datasets library, from a folder of parquet files, which it takes for a dataset of the hub."""
    import pyarrow
    import pyarrow.parquet

    from data.sources import Counts, hub_source

    texts = ["one", "", "<|endoftext|>", None, "x" * 700_000]
    (tmp_path / "set" / "data").mkdir(parents=True)
    pyarrow.parquet.write_table(pyarrow.table({"body": texts, "n": range(5)}),
                                tmp_path / "set" / "data" / "train-00000-of-00001.parquet")
    source = hub_source("set", str(tmp_path / "set"), None, "body", "train", skip_bad=False)
    read = [(key, "".join(pieces)) for _, key, pieces in source.documents(Counts())]
    assert read == [(str(i), text or "") for i, text in enumerate(texts)]
    for field, split, told in (("text", "train", "'body', 'n'"), ("body", "dev", "dev")):
        with pytest.raises(UserError, match=told):
            list(hub_source("set", str(tmp_path / "set"), None, field, split, skip_bad=False).documents(Counts()))


def test_the_first_tokens_of_fineweb_are_its_validation(tmp_path, monkeypatch):
    import data.sources

    monkeypatch.setattr(data.sources, "FINEWEB_VAL_TOKENS", 1000)
    monkeypatch.setattr(data.sources, "HUB", {"fineweb_edu10B": (str(tmp_path / "set"), None)})
    monkeypatch.setattr(data.sources, "require_hub", lambda dataset: None)
    (tmp_path / "set").mkdir()
    write_jsonl(tmp_path / "set" / "train.jsonl", ["a" * 300] * 10)
    folder = prepare("fineweb_edu10B", tokenizer="byte", out=str(tmp_path / "f"), quiet=True)
    train, val = ids_of(folder, "train"), ids_of(folder, "val")
    assert len(val) == 1000 and len(train) == 2010
    whole = np.concatenate([val, train])
    assert np.array_equal(np.flatnonzero(whole == 256), np.arange(300, 3010, 301))
