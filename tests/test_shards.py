"""Token files: llm.c's format to the byte, one stream over many shards, and every damaged file told before step 0."""

import json
import os
import pickle
import shutil

import numpy as np
import pytest

import data.shards
from data.shards import ShardWriter, TokenDataset, find_dataset, fingerprint
from data.tokenizers import load_tokenizer
from engine.errors import UserError

pytestmark = pytest.mark.quick


def write_split(folder, split, ids, vocab_size=257, shard_tokens=1000, step=333):
    os.makedirs(folder, exist_ok=True)
    writer = ShardWriter(str(folder), split, vocab_size, shard_tokens)
    for start in range(0, len(ids), step):
        writer.write(ids[start:start + step])
    return writer.close()


def prepared(folder, vocab_size=257, n=2500, shard_tokens=1000):
    """A folder as prepare.py leaves it, its train ids, and its meta.json's dict."""
    ids = np.random.default_rng(0).integers(0, vocab_size, n)
    splits = {"train": {"shards": write_split(folder, "train", ids, vocab_size, shard_tokens)},
              "val": {"shards": write_split(folder, "val", ids[:700], vocab_size, shard_tokens)}}
    tokenizer = {**load_tokenizer("byte").identity(), "vocab_size": vocab_size}
    meta = {"format_version": 1, "vocab_size": vocab_size, "tokenizer": tokenizer, "splits": splits}
    save_meta(folder, meta)
    return ids, meta


def save_meta(folder, meta):
    with open(os.path.join(folder, "meta.json"), "w") as file:
        json.dump(meta, file)


def llmc_shard(path, ids, magic=20240520, version=1, count=None, dtype="<u2", extra=b""):
    header = np.zeros(256, "<i4")
    header[:3] = magic, version, len(ids) if count is None else count
    with open(path, "wb") as file:
        file.write(header.tobytes() + np.asarray(ids, dtype).tobytes() + extra)


def refused(told, path, split="train", vocab_size=None):
    """Opening (or check_ids) says no in one sentence that has every word of told."""
    with pytest.raises(UserError) as caught:
        dataset = TokenDataset(str(path), split)
        dataset.check_ids(vocab_size or 10**9)
    assert len(caught.value.sentences) == 1 and "\n" not in str(caught.value)
    for word in told.split("|"):
        assert word in str(caught.value), caught.value


@pytest.mark.parametrize("vocab_size, magic, version, dtype", [
    (257, 20240520, 1, "<u2"), (65536, 20240520, 1, "<u2"), (65537, 20240801, 7, "<u4"), (151669, 20240801, 7, "<u4")])
def test_a_shard_is_llmc_format_to_the_byte(tmp_path, vocab_size, magic, version, dtype):
    ids = np.array([0, 1, vocab_size - 1, 5])
    shards = write_split(tmp_path, "train", ids, vocab_size)
    llmc_shard(tmp_path / "expected", ids, magic, version, dtype=dtype)
    assert (tmp_path / "train_000000.bin").read_bytes() == (tmp_path / "expected").read_bytes()
    import hashlib

    content = (tmp_path / "train_000000.bin").read_bytes()
    assert shards == [{"file": "train_000000.bin", "tokens": 4, "bytes": len(content), "max_id": vocab_size - 1,
                       "sha256": hashlib.sha256(content).hexdigest()}]


@pytest.mark.parametrize("step", [1, 333, 10**6])
def test_shards_are_filled_exactly_whatever_the_writes(tmp_path, step):
    ids = np.arange(2500) % 257
    shards = write_split(tmp_path, "train", ids, shard_tokens=1000, step=step)
    assert [(s["file"], s["tokens"]) for s in shards] == [
        ("train_000000.bin", 1000), ("train_000001.bin", 1000), ("train_000002.bin", 500)]
    assert len(write_split(tmp_path / "exact", "train", ids[:2000], shard_tokens=1000, step=step)) == 2


def test_an_id_beyond_the_vocabulary_is_not_written(tmp_path):
    for ids in ([5, 257], [-1, 5], [70000]):
        with pytest.raises(UserError, match="vocabulary of 257"):
            write_split(tmp_path, "train", np.array(ids))


@pytest.mark.parametrize("vocab_size", [257, 151669])
def test_shards_are_read_as_one_stream(tmp_path, vocab_size):
    ids, _ = prepared(tmp_path, vocab_size)
    dataset = TokenDataset(str(tmp_path), "train")
    assert dataset.n_tokens == 2500 and len(dataset.files) == 3
    for start, count in [(0, 2500), (0, 1), (999, 1), (999, 2), (1000, 1), (500, 2000), (2499, 1), (700, 0), (2500, 0)]:
        part = dataset.read(start, count)
        assert part.dtype == np.int64 and np.array_equal(part, ids[start:start + count])
    for start, count in [(2499, 2), (-1, 1), (2501, 0)]:
        with pytest.raises(IndexError):
            dataset.read(start, count)
    assert dataset.vocab_size == vocab_size and dataset.tokenizer_identity["kind"] == "byte"
    assert "2,500 tokens in 3 shards" in dataset.description


def test_bare_llmc_shards_are_read_in_the_order_of_their_names(tmp_path):
    for name, first in [("train_000002", 10), ("train_000001", 0), ("val_000000", 90)]:
        llmc_shard(tmp_path / f"fineweb_{name}.bin", range(first, first + 10))
    dataset = TokenDataset(str(tmp_path), "train")
    assert np.array_equal(dataset.read(0, 20), np.arange(20))
    assert dataset.vocab_size is None and dataset.tokenizer_identity is None
    assert np.array_equal(TokenDataset(str(tmp_path), "val").read(0, 10), np.arange(90, 100))
    llmc_shard(tmp_path / "fineweb_train_000001.bin", [])  # an empty shard is nothing
    assert np.array_equal(TokenDataset(str(tmp_path), "train").read(0, 10), np.arange(10, 20))


def test_nanogpts_files_are_read_with_their_characters(tmp_path):
    np.arange(64, dtype="<u2").tofile(tmp_path / "train.bin")
    np.arange(9, dtype="<u2").tofile(tmp_path / "val.bin")
    dataset = TokenDataset(str(tmp_path), "train")
    assert np.array_equal(dataset.read(3, 61), np.arange(3, 64)) and dataset.tokenizer_identity is None
    chars = "".join(map(chr, range(32, 96)))
    meta = {"vocab_size": 64, "stoi": {c: i for i, c in enumerate(chars)}, "itos": dict(enumerate(chars))}
    (tmp_path / "meta.pkl").write_bytes(pickle.dumps(meta))
    dataset = TokenDataset(str(tmp_path), "val")
    assert dataset.vocab_size == 64 and dataset.tokenizer_identity["chars"] == chars and dataset.n_tokens == 9


def test_one_file_named_train_bin_may_be_a_shard_too(tmp_path):
    llmc_shard(tmp_path / "train.bin", range(10))
    assert np.array_equal(TokenDataset(str(tmp_path), "train").read(0, 10), np.arange(10))


def test_the_fingerprint_is_that_of_the_tokens(tmp_path):
    prepared(tmp_path / "a")
    prepared(tmp_path / "b")
    a, b = TokenDataset(str(tmp_path / "a"), "train"), TokenDataset(str(tmp_path / "b"), "train")
    assert a.fingerprint == b.fingerprint != TokenDataset(str(tmp_path / "a"), "val").fingerprint
    assert a.fingerprint == fingerprint(a.tokenizer_identity["fingerprint"], a.meta["splits"]["train"]["shards"])
    for name, last in [("c", 7), ("d", 7), ("e", 8)]:
        os.makedirs(tmp_path / name)
        llmc_shard(tmp_path / name / "x_train_1.bin", [*range(200_000 % 65536), last])
    c, d, e = (TokenDataset(str(tmp_path / name), "train").fingerprint for name in "cde")
    assert c == d != e


# ---- marks


def marked(folder, n=2500, last=None):
    """A folder of marked shards, its train ids and marks, and its meta.json's dict."""
    dice = np.random.default_rng(1)
    ids, marks = dice.integers(0, 257, n), dice.integers(0, 4, n)
    if last is not None:
        marks[-1] = last
    os.makedirs(folder, exist_ok=True)
    writer = ShardWriter(str(folder), "train", 257, 1000, marked=True)
    for start in range(0, n, 333):
        writer.write(ids[start:start + 333], marks[start:start + 333])
    meta = {"format_version": 1, "vocab_size": 257, "tokenizer": load_tokenizer("byte").identity(), "splits": {"train": {"shards": writer.close()}}}
    save_meta(folder, meta)
    return ids, marks, meta


def test_marks_stand_beside_their_tokens_over_the_shards_borders(tmp_path):
    ids, marks, meta = marked(tmp_path)
    assert [os.path.getsize(tmp_path / f"train_00000{i}.marks") for i in range(3)] == [1000, 1000, 500]
    assert (tmp_path / "train_000001.marks").read_bytes() == marks[1000:2000].astype(np.uint8).tobytes()
    dataset = TokenDataset(str(tmp_path), "train")
    assert dataset.marked
    for start, count in [(0, 2500), (999, 2), (500, 2000), (2499, 1), (1000, 0)]:
        assert np.array_equal(dataset.read(start, count), ids[start:start + count])
        part = dataset.read_marks(start, count)
        assert part.dtype == np.uint8 and np.array_equal(part, marks[start:start + count])
    prepared(tmp_path / "text")
    assert not TokenDataset(str(tmp_path / "text"), "train").marked


def test_the_fingerprint_is_that_of_the_marks_too(tmp_path):
    marked(tmp_path / "a", last=1)
    marked(tmp_path / "b", last=1)
    marked(tmp_path / "c", last=0)
    a, b, c = (TokenDataset(str(tmp_path / name), "train").fingerprint for name in "abc")
    assert a == b != c


def test_marks_that_do_not_go_with_their_shards_are_one_sentence(tmp_path):
    _, _, meta = marked(tmp_path)
    path = tmp_path / "train_000001.marks"
    content = path.read_bytes()
    for damaged, told in ((content[:-1], "has 999 marks, its shard 1,000 tokens"), (content + b"x", "has 1,001 marks"), (b"", "has 0 marks"), (None, "has 0 marks")):
        path.write_bytes(damaged) if damaged is not None else os.remove(path)
        refused(f"{path} {told}|again", tmp_path)
    path.write_bytes(content)
    TokenDataset(str(tmp_path), "train")
    del meta["splits"]["train"]["shards"][1]["marks_sha256"]
    save_meta(tmp_path, meta)
    refused("marks for some of the train shards alone|again", tmp_path)
    meta["splits"]["train"]["shards"][1]["marks_sha256"] = 5
    save_meta(tmp_path, meta)
    refused("meta.json is not what prepare.py writes", tmp_path)


# ---- refusals


def test_missing_folder_and_missing_split(tmp_path):
    refused("no data folder|nowhere|prepare.py", tmp_path / "nowhere")
    refused("has no train tokens|*train*.bin|prepare.py", tmp_path)
    prepared(tmp_path)
    meta = json.loads((tmp_path / "meta.json").read_text())
    meta["splits"]["val"]["shards"] = []
    save_meta(tmp_path, meta)
    refused("has no val split|--val_fraction", tmp_path, "val")


@pytest.mark.parametrize("damage, told", [
    (lambda data: data[:-1], "truncated|1,000 tokens, there are 999"),
    (lambda data: data[:1024 + 20], "truncated|1,000 tokens, there are 10"),
    (lambda data: data[:1000], "truncated|1,000 bytes|1,024"),
    (lambda data: b"", "truncated|0 bytes"),
    (lambda data: data + b"xyz", "3 bytes more than the 1,000 tokens"),
    (lambda data: b"\x01\x00\x00\x00" + data[4:], "begins with 1|20240520|20240801"),
    (lambda data: data[:4] + b"\x09" + data[5:], "version 9|version 1 goes with magic 20240520"),
    (lambda data: data[:8] + b"\xff\xff\xff\xff" + data[12:], "truncated|promises -1 tokens"),
    (lambda data: data[:8] + b"\xe7\x03\x00\x00" + data[12:-2], "has 999 tokens, meta.json says 1,000"),
])
def test_a_damaged_shard_is_one_sentence(tmp_path, damage, told):
    prepared(tmp_path)
    path = tmp_path / "train_000001.bin"
    path.write_bytes(damage(path.read_bytes()))
    refused(f"{path}|{told}", tmp_path)
    TokenDataset(str(tmp_path), "val")  # the other split is whole


def test_meta_that_does_not_go_with_its_shards(tmp_path):
    _, meta = prepared(tmp_path)
    save_meta(tmp_path, {**meta, "vocab_size": 151669})
    refused("train_000000.bin|16-bit tokens|vocabulary of 151,669|32 bits", tmp_path)
    save_meta(tmp_path, {**meta, "format_version": 99})
    refused("format version 99|reads 1", tmp_path)
    for broken in ({**meta, "splits": {"train": {}}}, {**meta, "vocab_size": "257"}, [], {}):
        save_meta(tmp_path, broken)
        refused("meta.json is not what prepare.py writes", tmp_path)
    (tmp_path / "meta.json").write_text('{"format')
    refused("meta.json is not what prepare.py writes", tmp_path)
    save_meta(tmp_path, meta)
    os.remove(tmp_path / "train_000002.bin")
    refused("train_000002.bin is missing", tmp_path)


def test_bare_files_that_cannot_be_right(tmp_path):
    (tmp_path / "train.bin").write_bytes(b"\x01\x00\x02")
    refused("train.bin has 3 bytes|two bytes each", tmp_path)
    (tmp_path / "train.bin").write_bytes(b"")
    refused("train split|no tokens", tmp_path)
    os.remove(tmp_path / "train.bin")
    (tmp_path / "my_train_1.bin").write_bytes(bytes(4000))
    refused("my_train_1.bin begins with 0", tmp_path)
    llmc_shard(tmp_path / "my_train_1.bin", range(5))
    llmc_shard(tmp_path / "my_train_2.bin", range(5), 20240801, 7, dtype="<u4")
    refused("mix 16-bit and 32-bit", tmp_path)
    os.remove(tmp_path / "my_train_2.bin")
    TokenDataset(str(tmp_path), "train")


def test_a_hostile_meta_pkl_beside_nanogpts_files_is_refused(tmp_path):
    np.arange(64, dtype="<u2").tofile(tmp_path / "train.bin")
    (tmp_path / "meta.pkl").write_bytes(b"cos\nsystem\n(S'touch " + str(tmp_path / "pwned").encode() + b"'\ntR.")
    refused("meta.pkl|os.system", tmp_path)
    assert not (tmp_path / "pwned").exists()


@pytest.mark.parametrize("kind", ["prepared", "llm.c", "nanoGPT"])
def test_an_id_beyond_the_models_vocabulary_is_found_wherever_it_is(tmp_path, kind, monkeypatch):
    monkeypatch.setattr(data.shards, "SCAN_STEP", 64)  # many steps, so that positions must add up
    ids = np.arange(2500) % 50
    ids[1700] = 222
    if kind == "prepared":
        _, meta = prepared(tmp_path)
        meta["splits"]["train"]["shards"] = write_split(tmp_path, "train", ids)
        save_meta(tmp_path, meta)
        name, position = "train_000001.bin", 700
    elif kind == "llm.c":
        llmc_shard(tmp_path / "a_train.bin", ids[:1600])
        llmc_shard(tmp_path / "b_train.bin", ids[1600:])
        name, position = "b_train.bin", 100
    else:
        ids.astype("<u2").tofile(tmp_path / "train.bin")
        name, position = "train.bin", "1,700"
    refused(f"{name}: token {position} has id 222|ends at 221|vocab_size to 223", tmp_path, vocab_size=222)
    TokenDataset(str(tmp_path), "train").check_ids(223)
    if kind == "prepared":
        monkeypatch.setattr(data.shards, "SCAN_TOKENS", 100)  # a corpus too large to look at: meta.json is trusted
        refused("train_000001.bin has id 222 (meta.json)|ends at 221", tmp_path, vocab_size=222)
        TokenDataset(str(tmp_path), "train").check_ids(223)


def test_a_dataset_is_found_by_path_then_by_name(tmp_path, monkeypatch):
    prepared(tmp_path / "root" / "data" / "books")
    root = str(tmp_path / "root")
    assert find_dataset("books", root) == os.path.join(root, "data", "books")
    assert find_dataset(str(tmp_path), root) == str(tmp_path)
    with pytest.raises(UserError, match="did you mean books.*prepare.py SOURCE"):
        find_dataset("bokos", root)
    with pytest.raises(UserError, match="shakespeare_char is not prepared yet: python prepare.py shakespeare_char"):
        find_dataset("shakespeare_char", root)
    (tmp_path / "input.txt").write_text("a text")
    with pytest.raises(UserError, match="input.txt is a file, not a data set: python prepare.py .*input.txt --tokenizer=byte"):
        find_dataset(str(tmp_path / "input.txt"), root)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "books").mkdir()  # a folder of something else
    assert find_dataset("books", root) == os.path.join(root, "data", "books")
    prepared(tmp_path / "data" / "books")  # as in a nanoGPT checkout that one stands in
    assert find_dataset("books", root) == os.path.join("data", "books")
    shutil.rmtree(tmp_path / "books")
    prepared(tmp_path / "books")
    assert find_dataset("books", root) == "books"
