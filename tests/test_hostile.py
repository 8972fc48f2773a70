"""Files that mean harm: none of them runs code or takes memory that it does not fill, and each ends in one sentence and exit code 2."""

import json
import os
import pickle
import resource
import struct
import time
import zipfile

import pytest
import torch

from conftest import run_script
from data.shards import TokenDataset
from data.tokenizers import byte_tokenizer, char_tokenizer_from_nanogpt, load_tokenizer, tokenizer_from_identity
from engine.checkpoint import json_checksum, write_safetensors
from engine.errors import UserError
from engine.export import export
from engine.families import Weights, open_weights
from engine.untrusted import LARGEST
from model import GPT, ModelConfig

pytestmark = pytest.mark.quick

DEEP = 100_000
HUGE = 1 << 50


class Evil:
    """Unpickled, it makes a file."""

    def __init__(self, path, call=open):
        self.path, self.call = str(path), call

    def __reduce__(self):
        return self.call, (self.path, "w")


class Hungry:
    """Unpickled, it takes ten gigabytes."""

    def __reduce__(self):
        return bytearray, (10**10,)


@pytest.fixture
def refused(tmp_path):
    """refused(function, *words): it raises a UserError of one sentence with these words, soon, and takes no memory worth speaking of."""
    def check(function, *words):
        before, started = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.time()
        with pytest.raises(UserError) as caught:
            function()
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
        assert grown < 300, f"{grown:,.0f} MB"
        assert time.time() - started < 10
        assert len(caught.value.sentences) == 1 and "\n" not in str(caught.value) and len(str(caught.value)) < 1000, caught.value
        for word in words:
            assert word in str(caught.value), caught.value
        assert not (tmp_path / "pwned").exists()
    return check


@pytest.fixture
def folder(tmp_path):
    """A Hugging Face folder in good order."""
    config = ModelConfig(block_size=16, vocab_size=257, n_layer=2, n_head=2, n_embd=16, norm="rmsnorm", pos="rope", mlp="swiglu", bias=False,
                         mlp_hidden=32)
    model = GPT(config)
    model.init_weights(0)
    export(Weights("random", config, {n: (p.shape, lambda rows, p=p: p.detach()[rows]) for n, p in model.named_parameters()}, None), byte_tokenizer(),
           tmp_path / "model", lambda sentence: None)
    open_weights(str(tmp_path / "model"))
    return tmp_path / "model"


# --------------------------------------------------------------------------------------------------------- safetensors


def safetensors(header, data=b"", length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(shape, first, behind, dtype="F32"):
    return {"dtype": dtype, "shape": shape, "data_offsets": [first, behind]}


HEADERS = {
    "length_2_60": safetensors(b"{}", length=1 << 60), "length_100_mb": safetensors(b"{}", length=99_999_999), "empty": b"", "seven_bytes": b"1234567",
    "no_json": safetensors(b"hello"), "a_list": safetensors(b"[]"), "nested": safetensors(b"[" * DEEP), "not_text": safetensors(b"\xff\xfe\x00"),
    "truncated": safetensors({"a": entry([4], 0, 16)}, bytes(8)), "out_of_range": safetensors({"a": entry([4], 16, 32)}, bytes(16)),
    "overlapping": safetensors({"a": entry([4], 0, 16), "b": entry([4], 8, 24)}, bytes(24)), "backwards": safetensors({"a": entry([4], 16, 0)}, bytes(16)),
    "a_hole": safetensors({"a": entry([4], 8, 24)}, bytes(24)), "shape_2_50": safetensors({"a": entry([HUGE], 0, 16)}, bytes(16)),
    "shape_overflows": safetensors({"a": entry([1 << 33, 1 << 33], 0, 16)}, bytes(16)),
    "shape_is_text": safetensors({"a": entry(["4"], 0, 16)}, bytes(16)),
    "shape_negative": safetensors({"a": entry([-4], 0, 16)}, bytes(16)), "no_such_dtype": safetensors({"a": entry([4], 0, 16, "OBJ")}, bytes(16)),
    "offsets_2_60": safetensors({"a": entry([4], 1 << 60, (1 << 60) + 16)}, bytes(16)), "a_pickle": pickle.dumps({"a": 1})}


@pytest.mark.parametrize("name", HEADERS)
def test_a_safetensors_file_that_lies(folder, refused, name):
    (folder / "model.safetensors").write_bytes(HEADERS[name])
    refused(lambda: open_weights(str(folder)), "model.safetensors is not a whole safetensors file")


def test_a_tensor_that_agrees_with_nothing(folder, refused):
    header = {f"model.layers.{i}.x": entry([4], 0, 16) if i == 0 else entry([0], 16, 16) for i in range(3000)}
    (folder / "model.safetensors").write_bytes(safetensors(header, bytes(16)))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 2}))
    with pytest.raises(UserError) as caught:  # a sentence on what is missing, one on what is too much, neither without end
        open_weights(str(folder))
    assert len(caught.value.sentences) == 2 and all(len(s) < 2000 for s in caught.value.sentences) and "and 2980 more" in str(caught.value)


@pytest.mark.parametrize("text", [
    "[]", "3", "", "[" * DEEP, '{"a":' * DEEP, '{"model_type": ' + "[" * DEEP, '{"model_type": "llama"', "\ufeff{}", '{"model_type": ["llama"]}',
    '{"model_type": {}}',
    '{"model_type": "llama"}', "9" * 10_000, '"' + "x" * LARGEST + '"'])
def test_a_config_json_that_is_none(folder, refused, text):
    (folder / "config.json").write_text(text)
    with pytest.raises(UserError) as caught:
        open_weights(str(folder))
    assert all("config.json" in s and len(s) < 500 for s in caught.value.sentences)
    if text != '{"model_type": "llama"}':  # there each size that is missing is named
        refused(lambda: open_weights(str(folder)), "config.json")


@pytest.mark.parametrize("key, value", [
    ("hidden_size", HUGE), ("vocab_size", 1 << 20), ("max_position_embeddings", 1 << 40), ("head_dim", 1 << 20), ("num_hidden_layers", 10**6),
    ("num_attention_heads", 0),
    ("intermediate_size", 1e3), ("hidden_size", [16]), ("rms_norm_eps", float("nan")), ("rms_norm_eps", True), ("rope_theta", float("inf")),
    ("rope_theta", []),
    ("rope_scaling", "llama3"), ("rope_scaling", {"rope_type": ["llama3"]}), ("rope_scaling", {"rope_type": "llama3", "factor": "8"}),
    ("hidden_act", ["silu"]),
    ("tie_word_embeddings", None), ("attention_bias", [0]), ("layer_types", 3), ("new_feature", {"deep": [[[[[[[[[[1]]]]]]]]]]})])
def test_a_config_json_with_a_wrong_value(folder, refused, key, value):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, key: value}))
    refused(lambda: open_weights(str(folder)), "model")


def test_links_that_leave_the_folder_are_followed(folder, tmp_path):
    os.rename(folder / "model.safetensors", tmp_path / "blob")
    os.symlink(tmp_path / "blob", folder / "model.safetensors")  # as the hub's cache lays files out
    open_weights(str(folder))


# ----------------------------------------------------------------------------------------------------- torch's pickles


def torch_zip(path, data, compression=zipfile.ZIP_STORED, storage=bytes(64)):
    with zipfile.ZipFile(path, "w", compression) as archive:
        archive.writestr("archive/data.pkl", data)
        archive.writestr("archive/version", "3\n")
        archive.writestr("archive/byteorder", "little")
        archive.writestr("archive/data/0", storage)


def tensor(numel, size, stride):
    """A pickle that says: a float32 tensor of this size and stride on storage 0 of so many values."""
    import io

    class T:
        def __reduce__(self):
            return torch._utils._rebuild_tensor_v2, (Storage(), 0, size, stride, False, None)

    class Storage:
        pass

    class Pickler(pickle.Pickler):
        def persistent_id(self, value):
            return ("storage", torch.FloatStorage, "0", "cpu", numel) if isinstance(value, Storage) else None

    def dumps(value):
        buffer = io.BytesIO()
        Pickler(buffer, 2).dump(value)
        return buffer.getvalue()

    return dumps, T()


ARGS = dict(n_layer=1, n_head=1, n_embd=4, block_size=4, vocab_size=4, bias=False, dropout=0.0)


@pytest.mark.parametrize("hostile", ["open", "system", "bytearray", "hidden", "list"])
def test_a_ckpt_pt_that_would_run_code(tmp_path, refused, hostile):
    value = {"open": Evil(tmp_path / "pwned"), "system": Evil(f"touch {tmp_path / 'pwned'}", os.popen), "bytearray": Hungry(),
             "hidden": torch.nn.Linear(2, 2), "list": [1]}[hostile]
    torch.save({"model": {"a": value}, "model_args": ARGS} if hostile != "list" else value, tmp_path / "ckpt.pt")
    refused(lambda: open_weights(str(tmp_path)), "ckpt.pt is not a nanoGPT checkpoint")


def test_a_ckpt_pt_of_the_old_format_is_not_unpickled(tmp_path, refused):
    (tmp_path / "ckpt.pt").write_bytes(pickle.dumps(Evil(tmp_path / "pwned")))
    refused(lambda: open_weights(str(tmp_path / "ckpt.pt")), "not a nanoGPT checkpoint")
    torch.save({"a": Evil(tmp_path / "pwned")}, tmp_path / "ckpt.pt", _use_new_zipfile_serialization=False)
    refused(lambda: open_weights(str(tmp_path / "ckpt.pt")), "not a nanoGPT checkpoint")


BOMBS = {
    "memo": b"\x80\x02]r\xff\xff\xff\x07.", "bytearray": b"\x80\x05\x96" + struct.pack("<Q", 1 << 31) + b".",
    "bytes": b"\x80\x04\x8e" + struct.pack("<Q", 1 << 40) + b".",
    "text": b"\x80\x04\x8d" + struct.pack("<Q", 1 << 40) + b".", "frame": b"\x80\x04\x95" + struct.pack("<Q", 1 << 60) + b"}.",
    "deep": b"\x80\x02" + b"(" * DEEP + b"l" * DEEP + b".",
    "cut": b"\x80\x02}q\x00", "empty": b"", "digits": b"L" + b"9" * 10_000 + b"L\n.", "large": b"\x80\x02" + b"}" * LARGEST + b".",
    "laughs": b"\x80\x02]q\x00" + b"".join(b"](" + b"h" + bytes([i]) + b"h" + bytes([i]) + b"eq" + bytes([i + 1]) for i in range(60)) + b"."}


@pytest.mark.parametrize("name", BOMBS)
def test_a_pickle_that_asks_for_memory(tmp_path, refused, name):
    (tmp_path / "meta.pkl").write_bytes(BOMBS[name])
    refused(lambda: char_tokenizer_from_nanogpt(tmp_path / "meta.pkl"), "meta.pkl is not a nanoGPT meta.pkl")
    torch_zip(tmp_path / "ckpt.pt", BOMBS[name])
    refused(lambda: open_weights(str(tmp_path)), "not a nanoGPT checkpoint")


def test_files_of_gigabytes_are_not_read_to_the_end(folder, tmp_path, refused):
    for path, function in ((folder / "config.json", lambda: open_weights(str(folder))),
                           (tmp_path / "meta.pkl", lambda: char_tokenizer_from_nanogpt(tmp_path / "meta.pkl")),
                           (tmp_path / "meta.json", lambda: TokenDataset(str(tmp_path), "train"))):
        path.touch()
        os.truncate(path, 3 * 10**9)  # takes no room on the disk
        refused(function, path.name, f"more than {LARGEST:,} bytes")


def test_a_compressed_ckpt_pt(tmp_path, refused):
    torch_zip(tmp_path / "ckpt.pt", bytes(10**9), zipfile.ZIP_DEFLATED)
    assert os.path.getsize(tmp_path / "ckpt.pt") < 2_000_000
    refused(lambda: open_weights(str(tmp_path)), "compressed")


@pytest.mark.parametrize("numel, size, stride", [
    (16, (HUGE,), (1,)), (HUGE, (HUGE,), (1,)), (1 << 33, (1 << 33,), (1,)), (16, (1 << 33,), (1,)), (16, (4, HUGE), (0, 0)),
    (16, (1 << 20, 1 << 20), (1, 0)),
    (16, (-4,), (1,)), (16, (4,), (-1,))])
def test_a_tensor_larger_than_its_file(tmp_path, refused, numel, size, stride):
    dumps, t = tensor(numel, size, stride)
    torch_zip(tmp_path / "ckpt.pt", dumps({"model": {"transformer.wte.weight": t}, "model_args": {**ARGS, "vocab_size": 1 << 20, "n_embd": 1 << 20}}))
    refused(lambda: open_weights(str(tmp_path)), "ckpt.pt")


@pytest.mark.parametrize("saved", [
    {}, {"model": {}, "model_args": [1]}, {"model": [], "model_args": ARGS}, {"model": {"a": 1}, "model_args": ARGS},
    {"model": {3: torch.ones(1)}, "model_args": ARGS},
    {"model": {"a": torch.ones(3).long()}, "model_args": ARGS},
    *({"model": {}, "model_args": {**ARGS, **wrong}} for wrong in ({"n_layer": "1"}, {"n_layer": True}, {"n_layer": HUGE}, {"n_layer": 10**6},
                                                                   {"vocab_size": 1 << 60}, {"n_embd": 0},
                                                                   {"n_head": 3}, {"bias": 1}, {"dropout": "no"}, {"dropout": 2.0},
                                                                   {"block_size": -1}, {"block_size": 1.5}))])
def test_a_ckpt_pt_with_wrong_model_args(tmp_path, refused, saved):
    torch.save(saved, tmp_path / "ckpt.pt")
    refused(lambda: open_weights(str(tmp_path)), "ckpt.pt")


def test_a_nested_dataset_name_is_no_text(tmp_path, refused):
    laughs = []
    for _ in range(60):
        laughs = [laughs, laughs]
    torch.save({"model": {}, "model_args": ARGS, "config": {"dataset": laughs}}, tmp_path / "ckpt.pt")
    refused(lambda: open_weights(str(tmp_path)), "lacks transformer.wte.weight")


def test_folders_that_would_have_to_be_unpickled(tmp_path, refused):
    for name, word in ((".metadata", "torch.distributed.checkpoint"), ("__0_0.distcp", "torch.distributed.checkpoint"),
                       ("pytorch_model.bin", "safetensors"),
                       ("consolidated.00.pth", "safetensors")):
        where = tmp_path / name.strip("._")
        where.mkdir()
        (where / "config.json").write_text("{}")
        (where / name).write_bytes(pickle.dumps(Evil(tmp_path / "pwned")))
        refused(lambda: open_weights(str(where)), word, "pickle")
        refused(lambda: open_weights(str(where / name)), "pickle" if name != ".metadata" else "no weights")


# ---------------------------------------------------------------------------------------------------- data, tokenizers


@pytest.mark.parametrize("stoi", [[], "abc", {"a": "0"}, {"a": 0.5}, {"ab": 0}, {0: 0}, {"a": HUGE}, {"a": None, "b": 1}, {}, {"a": 0, "b": 0}])
def test_a_meta_pkl_of_wrong_types(tmp_path, refused, stoi):
    (tmp_path / "meta.pkl").write_bytes(pickle.dumps({"stoi": stoi}))
    refused(lambda: char_tokenizer_from_nanogpt(tmp_path / "meta.pkl"), "meta.pkl")


def meta(**changes):
    tokenizer = byte_tokenizer().identity()
    shard = {"file": "train_000000.bin", "tokens": 4, "max_id": 3, "sha256": "0"}
    return {"format_version": 1, "vocab_size": 257, "tokenizer": tokenizer, "splits": {"train": {"shards": [shard]}}, **changes}


@pytest.mark.parametrize("value", [
    [], None, {"format_version": 1}, meta(vocab_size=HUGE), meta(vocab_size=True), meta(vocab_size=-1), meta(tokenizer=[]), meta(tokenizer=None),
    meta(tokenizer={**byte_tokenizer().identity(), "vocab_size": HUGE}), meta(tokenizer={**byte_tokenizer().identity(), "eot_id": "256"}),
    meta(tokenizer={**byte_tokenizer().identity(), "kind": ["byte"]}), meta(tokenizer={**byte_tokenizer().identity(), "kind": "char"}),
    meta(splits=[]), meta(splits={"train": 3}), meta(splits={"train": {"shards": 3}}), meta(splits={"train": {"shards": [{"file": 1}]}}),
    meta(splits={"train": {"shards": "abc"}}),
    meta(splits={"train": {"shards": [{"file": "../../etc/passwd", "tokens": 1 << 60, "max_id": 0, "sha256": ""}]}})])
def test_a_meta_json_of_wrong_types(tmp_path, refused, value):
    (tmp_path / "meta.json").write_text(json.dumps(value))
    refused(lambda: TokenDataset(str(tmp_path), "train"))


@pytest.mark.parametrize("text", ["[" * DEEP, '{"a":' * DEEP, "", '{"vocab_size": ' + "9" * 10_000 + "}", '{"x": "' + "x" * LARGEST + '"}'])
def test_a_meta_json_that_is_none(tmp_path, refused, text):
    (tmp_path / "meta.json").write_text(text)
    refused(lambda: TokenDataset(str(tmp_path), "train"), "meta.json is not what prepare.py writes")


def test_an_identity_that_belongs_to_no_tokenizer(tmp_path, refused):
    identity = byte_tokenizer().identity()
    for wrong in ({}, [], None, {**identity, "vocab_size": 300}, {**identity, "eot_id": -1}, {**identity, "eot_id": 257}, {**identity, "kind": "magic"},
                  {**identity, "kind": "char", "chars": ""}, {**identity, "kind": "tiktoken", "name": "../../x"}, {**identity, "fingerprint": 3}):
        refused(lambda: tokenizer_from_identity(wrong, str(tmp_path)))


def test_a_tokenizer_json_that_lies(folder, refused):
    good = json.loads((folder / "tokenizer.json").read_text())

    def variant(**model):
        return json.dumps({**good, "model": {**good["model"], **model}})

    for text in ("", "[]", "[" * DEEP, variant(vocab={"a": 4_000_000_000}), variant(vocab={"a": HUGE}), variant(vocab={"a": -1}),
                 variant(merges=[["x", "y"]]), variant(type="Evil")):
        (folder / "tokenizer.json").write_text(text)
        refused(lambda: load_tokenizer(str(folder / "tokenizer.json")), "tokenizer.json")
    (folder / "tokenizer.json").write_text(json.dumps(good))
    for text in ("[]", "[" * DEEP, "x"):
        (folder / "tokenizer_config.json").write_text(text)
        refused(lambda: load_tokenizer(str(folder / "tokenizer.json")), "tokenizer_config.json")
    for eos in ([1], {"content": [1]}, 3, {}):
        (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos}))
        assert load_tokenizer(str(folder / "tokenizer.json")).eot_id == 256


@pytest.mark.parametrize("changes", [
    {"step": "1"}, {"samples": None}, {"model": []}, {"model": {"n_layer": "2"}}, {"model": {"n_layer": HUGE, "no_such": 1}},
    {"files": {"model.safetensors": 3}},
    {"tensors": {"model": {"wte.weight": {"shape": [HUGE, HUGE], "pieces": []}}}},
    {"tensors": {"model": {"wte.weight": {"shape": [4, 4], "pieces": [{"file": "/etc/passwd"}]}}}},
    {"tensors": []}, {"tensors": {"model": 3}}])
def test_a_manifest_that_lies(tmp_path, refused, changes):
    """With its checksum in order: anyone can make one."""
    written = write_safetensors(tmp_path / "model.safetensors", {"wte.weight": torch.ones(64, 4)})
    manifest = {"format": "boringgpt-checkpoint", "version": 2, "step": 1, "samples": 1, "model": vars(ModelConfig()), "tokenizer": None,
                "files": {"model.safetensors": written},
                "tensors": {"model": {"wte.weight": {"shape": [64, 4],
                                                     "pieces": [{"file": "model.safetensors", "offset": [0, 0], "shape": [64, 4]}]}}}, **changes}
    (tmp_path / "manifest.json").write_text(json.dumps({**manifest, "sha256": json_checksum(manifest)}))
    refused(lambda: open_weights(str(tmp_path)), "manifest.json")


# ------------------------------------------------------------------------------------------------------- as a user meets it


def test_the_scripts_end_with_exit_code_2_and_one_sentence(folder, tmp_path):
    torch.save({"model": {"a": Evil(tmp_path / "pwned")}, "model_args": ARGS}, tmp_path / "ckpt.pt")
    (folder / "model.safetensors").write_bytes(HEADERS["length_2_60"])
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.bin").write_bytes(bytes(1000))
    (tmp_path / "data" / "meta.pkl").write_bytes(BOMBS["memo"])
    for command in (["sample.py", f"--init_from={tmp_path / 'ckpt.pt'}"], ["sample.py", f"--init_from={folder}", f"--export={tmp_path / 'out'}"],
                    ["train.py", f"--init_from={folder}", f"--out_dir={tmp_path / 'run'}"],
                    ["train.py", f"--dataset={tmp_path / 'data'}", f"--out_dir={tmp_path / 'run'}"]):
        result = run_script(*command)
        assert result.code == 2 and len(result.errors) == 1 and "Traceback" not in result.err, result.err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["ckpt.pt", "data", "model"]
