"""Tokenizers: what goes in comes out, text never turns into control tokens, and a mix-up is told."""

import codecs
import functools
import json
import os
import pickle
import random

import numpy as np
import pytest

from data.sources import PIECE, cut_text
from data.tokenizers import char_tokenizer, char_tokenizer_from_nanogpt, load_tokenizer, tokenizer_from_identity
from engine.errors import UserError

ASSETS = os.path.join(os.path.dirname(__file__), "..", "..", "shared", "assets")
CONTROL = "typed: <|endoftext|> <|im_start|> <|im_end|> </s> <|fim_suffix|>!"
TEXTS = ["", "a", "Hello, world's end\n\n  it's 12345 -- ...\r\n",
         "日本語とñandú \U0001f600\U0001f469‍\U0001f680 ẛ̣\t",
         "x" * 500 + " " * 500 + "\n" * 50, "\x00\x1c\ufeff\ufffd", CONTROL]


@functools.cache
def gpt2():
    if os.path.exists(os.path.join(ASSETS, "tiktoken")):
        os.environ.setdefault("TIKTOKEN_CACHE_DIR", os.path.join(ASSETS, "tiktoken"))
    try:
        return load_tokenizer("gpt2")
    except UserError as error:
        pytest.skip(str(error))


@functools.cache
def qwen3():
    path = os.path.join(ASSETS, "qwen3")
    if not os.path.exists(path):
        pytest.skip("no Qwen3 tokenizer in ../shared/assets")
    return load_tokenizer(path)


def small_json(folder, special=("<|endoftext|>",), text="a few words, a few more words\n" * 9, **config):
    """A byte-level tokenizer.json made here, its special tokens after its other ids."""
    import tokenizers

    engine = tokenizers.Tokenizer(tokenizers.models.BPE())
    engine.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    engine.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    engine.train_from_iterator([text], tokenizers.trainers.BpeTrainer(vocab_size=270, initial_alphabet=alphabet,
                                                                      show_progress=False))
    engine.add_special_tokens(list(special))
    os.makedirs(folder, exist_ok=True)
    engine.save(os.path.join(folder, "tokenizer.json"))
    if config:
        with open(os.path.join(folder, "tokenizer_config.json"), "w") as file:
            json.dump(config, file)
    return str(folder)


def make(kind, tmp_path):
    return {"byte": lambda: load_tokenizer("byte"), "gpt2": gpt2, "qwen3": qwen3,
            "json": lambda: load_tokenizer(small_json(tmp_path / "small")),
            "char": lambda: char_tokenizer(TEXTS, with_eot=True)}[kind]()


KINDS = ["byte", "char", "json", "gpt2", "qwen3"]


@pytest.mark.quick
@pytest.mark.parametrize("kind", KINDS)
def test_text_comes_back_and_never_becomes_a_control_token(kind, tmp_path):
    tokenizer = make(kind, tmp_path)
    control = {i for i in tokenizer.special_tokens.values()}
    assert tokenizer.eot_id in control
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert isinstance(ids, list) and all(0 <= i < tokenizer.vocab_size for i in ids)
        assert not control & set(ids)
        if kind != "qwen3" or text is not TEXTS[3]:  # Qwen3's tokenizer normalises to NFC
            assert tokenizer.decode(ids) == text
    assert tokenizer.decode([tokenizer.eot_id]) == "<|endoftext|>"


@pytest.mark.quick
@pytest.mark.parametrize("kind", KINDS)
def test_documents_encoded_together_are_those_encoded_alone(kind, tmp_path):
    tokenizer = make(kind, tmp_path)
    end = tokenizer.token_bytes[tokenizer.eot_id].decode()
    for texts in (["a word", "\n", "", " a word", "word"], ["a", f"a{end}b", "c"], ["half \ud800 a pair", "1234"], ["\udc00", "\ud800"], [""]):
        if kind == "char":
            texts = [text for text in texts if set(text) <= set(tokenizer.chars)]
        alone = [i for text in texts for i in (*tokenizer.encode(text), tokenizer.eot_id)]
        assert not texts or tokenizer.encode_documents(texts).tolist() == alone


@pytest.mark.quick
@pytest.mark.parametrize("kind", KINDS)
def test_bytes_of_single_ids_joined_are_the_text(kind, tmp_path):
    tokenizer = make(kind, tmp_path)
    text = "mañana 日本 \U0001f600 ok" if kind != "char" else TEXTS[3]
    ids = tokenizer.encode(text)
    assert b"".join(tokenizer.decode_bytes([i]) for i in ids) == tokenizer.decode_bytes(ids)
    stream = codecs.getincrementaldecoder("utf-8")()  # what a streaming sampler does
    assert "".join(stream.decode(tokenizer.decode_bytes([i])) for i in ids) == tokenizer.decode(ids)


@pytest.mark.quick
@pytest.mark.parametrize("kind", KINDS)
def test_an_id_outside_the_vocabulary_is_refused(kind, tmp_path):
    tokenizer = make(kind, tmp_path)
    tokenizer.decode_bytes(np.array([tokenizer.vocab_size - 1]))
    for bad in (tokenizer.vocab_size, -1):
        with pytest.raises(UserError, match=f"id {bad} "):
            tokenizer.decode_bytes([0, bad])


@pytest.mark.quick
@pytest.mark.parametrize("kind", KINDS)
def test_an_identity_that_went_through_json_gives_the_same_tokenizer(kind, tmp_path):
    tokenizer = make(kind, tmp_path)
    saved = tmp_path / "saved"
    saved.mkdir()
    tokenizer.save(saved)
    names = {"qwen3": ["tokenizer.json", "tokenizer_config.json"], "json": ["tokenizer.json"]}
    assert sorted(os.listdir(saved)) == names.get(kind, [])
    identity = json.loads(json.dumps(tokenizer.identity()))
    again = tokenizer_from_identity(identity, str(saved))
    assert again.identity() == tokenizer.identity()
    assert again.encode(TEXTS[2]) == tokenizer.encode(TEXTS[2])
    assert again.chat_template == tokenizer.chat_template and again.controls == tokenizer.controls
    with pytest.raises(UserError, match="not the one that was saved"):
        tokenizer_from_identity({**identity, "fingerprint": "0" * 64}, str(saved))


@pytest.mark.quick
def test_the_fingerprint_follows_the_meaning_of_ids_and_nothing_else(tmp_path):
    one = load_tokenizer(small_json(tmp_path / "one"))
    moved = load_tokenizer(small_json(tmp_path / "moved", eos_token="<|endoftext|>"))
    other = load_tokenizer(small_json(tmp_path / "other", text="other words make other merges " * 9))
    assert one.fingerprint == moved.fingerprint != other.fingerprint
    assert char_tokenizer("abc", False).fingerprint == char_tokenizer("cab", False).fingerprint
    assert len({char_tokenizer(chars, eot).fingerprint for chars in ("abc", "abd") for eot in (False, True)}) == 4
    assert load_tokenizer("byte").fingerprint == "17c3218b3d258ae694da16d9f93f82e03752756149a28c5f3fd7cc83c8ec55b3"


@pytest.mark.quick
@pytest.mark.parametrize("kind", KINDS)
def test_control_tokens_can_be_added_behind_the_ids(kind, tmp_path):
    base, wanted = make(kind, tmp_path), ("<|im_start|>", "<|im_end|>")
    tokenizer = base.with_controls(wanted)
    if kind == "qwen3":  # which has them
        assert tokenizer is base
        tokenizer = base.with_controls(wanted := ("<|im_start|>", "<|wait|>"))
    new = [token for token in wanted if token not in base.controls]
    assert tokenizer.vocab_size == base.vocab_size + len(new) and [tokenizer.controls[t] for t in new] == list(range(base.vocab_size, tokenizer.vocab_size))
    assert tokenizer.extends(base) and not base.extends(tokenizer) and tokenizer.fingerprint != base.fingerprint and tokenizer.eot_id == base.eot_id
    for text in TEXTS:
        assert tokenizer.encode(text) == base.encode(text)  # typed, the tokens are ordinary text
    text = "a" + new[0] + "b" + new[-1] if kind != "char" else new[0] + "a" + new[-1]
    ids = tokenizer.encode_controls(text, tokenizer.find_controls(text))
    assert [i for i in ids if i >= base.vocab_size] == [tokenizer.controls[new[0]], tokenizer.controls[new[-1]]] and tokenizer.decode(ids) == text
    assert max(tokenizer.encode(TEXTS[1])) < base.vocab_size
    folder = tmp_path / "saved"
    folder.mkdir()
    tokenizer.save(folder)
    again = tokenizer_from_identity(json.loads(json.dumps(tokenizer.identity())), str(folder))
    assert again.fingerprint == tokenizer.fingerprint and again.identity() == tokenizer.identity()
    assert again.encode_controls(text, again.find_controls(text)) == ids
    assert base.identity().keys() == make(kind, tmp_path).identity().keys() and "added" not in base.identity()


@pytest.mark.quick
@pytest.mark.parametrize("added", ["<|im_end|>", [5], [""], ["\ud800"], [["a"]], ["a"] * 2000])
def test_an_identity_with_added_tokens_that_are_none_is_one_sentence(added):
    with pytest.raises(UserError, match="without a valid added"):
        tokenizer_from_identity({**load_tokenizer("byte").identity(), "added": added}, "here")


@pytest.mark.quick
def test_gpt2_ids_are_tiktokens_own():
    tokenizer = gpt2()
    import tiktoken

    encoding = tiktoken.get_encoding("gpt2")
    assert (tokenizer.vocab_size, tokenizer.eot_id) == (50257, encoding.eot_token)
    for text in TEXTS:
        assert tokenizer.encode(text) == encoding.encode_ordinary(text)


@pytest.mark.quick
def test_qwen3_ids_are_the_tokenizers_librarys_own():
    tokenizer = qwen3()
    import tokenizers

    engine = tokenizers.Tokenizer.from_file(os.path.join(ASSETS, "qwen3", "tokenizer.json"))
    engine.encode_special_tokens = True
    for text in TEXTS:
        assert tokenizer.encode(text) == engine.encode(text, add_special_tokens=False).ids
    assert tokenizer.vocab_size == 151669
    assert tokenizer.name == "qwen3"
    assert tokenizer.eot_id == 151643  # <|endoftext|>, though its configuration names <|im_end|>
    sample = random.Random(0).sample(range(151669), 3000)
    assert all(tokenizer.decode([i]) == engine.decode([i], skip_special_tokens=False) for i in sample)


@pytest.mark.quick
def test_the_end_of_text_token_of_a_tokenizer_json(tmp_path):
    def eot(name, special, eot=None, **config):
        tokenizer = load_tokenizer(small_json(tmp_path / name, special, **config), eot)
        return None if tokenizer.eot_id is None else tokenizer.decode([tokenizer.eot_id])

    assert eot("a", ["<s>", "</s>"]) == "</s>"
    assert eot("b", ["<|eot_id|>", "<|end_of_text|>"], eos_token="<|eot_id|>") == "<|end_of_text|>"
    assert eot("c", ["<stop>", "<pad>"], eos_token={"content": "<stop>"}) == "<stop>"
    assert eot("d", ["<s>"]) is None
    assert eot("e", ["<s>", "</s>"], eot="<s>") == "<s>"
    with pytest.raises(UserError, match=r"--eot <end>.*it has </s>, <s>"):
        eot("f", ["<s>", "</s>"], eot="<end>")


@pytest.mark.quick
def test_truncation_and_padding_saved_in_a_tokenizer_json_do_not_cut_or_fill_text(tmp_path):
    import tokenizers

    path = os.path.join(small_json(tmp_path / "t"), "tokenizer.json")
    plain = load_tokenizer(path).encode("a few words " * 50)
    engine = tokenizers.Tokenizer.from_file(path)
    engine.enable_truncation(5)
    engine.enable_padding(length=4000)
    engine.save(path)
    assert load_tokenizer(path).encode("a few words " * 50) == plain


@pytest.mark.quick
def test_a_sentencepiece_like_tokenizer_json_decodes_to_the_same_bytes(tmp_path):
    import tokenizers
    from tokenizers import decoders, normalizers

    lone_bytes = {f"<0x{b:02X}>": 2 + b for b in range(256)}
    vocab = {"<unk>": 0, "</s>": 1, **lone_bytes, "▁": 258, "a": 259, "b": 260, "▁a": 261}
    engine = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, [("▁", "a")], unk_token="<unk>", byte_fallback=True))
    engine.normalizer = normalizers.Replace(" ", "▁")
    engine.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    engine.add_special_tokens(["<unk>", "</s>"])
    engine.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(str(tmp_path))
    text = "b a\n\u00e9 ab"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.eot_id == 1


@pytest.mark.quick
def test_half_a_surrogate_pair_is_replaced_not_fatal(tmp_path):
    for tokenizer in (load_tokenizer("byte"), load_tokenizer(small_json(tmp_path / "s")), gpt2()):
        assert tokenizer.decode(tokenizer.encode("a\ud800b")) == "a\ufffdb"


@pytest.mark.quick
def test_byte_and_char_vocabularies():
    byte = load_tokenizer("byte")
    assert (byte.vocab_size, byte.eot_id) == (257, 256)
    assert byte.encode("é") == [0xC3, 0xA9]
    char = char_tokenizer(["ba", "cb"], with_eot=True)
    assert (char.chars, char.vocab_size, char.eot_id) == ("abc", 4, 3)
    char = char_tokenizer("hello", with_eot=False)
    assert (char.chars, char.vocab_size, char.eot_id) == ("ehlo", 4, None)


@pytest.mark.quick
def test_a_character_outside_the_corpus_is_named():
    tokenizer = char_tokenizer("abc", with_eot=True)
    with pytest.raises(UserError, match=r"'\\n', 'Z', .*'abc'.*--tokenizer byte") as caught:
        tokenizer.encode("aZ\nb\U0001f600")
    assert len(caught.value.sentences) == 1
    with pytest.raises(UserError, match="and 95 more"):
        tokenizer.encode("".join(map(chr, range(0x4E00, 0x4E00 + 100))))


@pytest.mark.quick
@pytest.mark.parametrize("spec, told", [
    ("gpt-2", "did you mean gpt2"), ("cl100k", "did you mean cl100k_base"), ("char", "from a corpus"),
    ("./nowhere", "no tokenizer at ./nowhere"), ("nowhere.json", "no tokenizer at nowhere.json")])
def test_a_tokenizer_that_does_not_exist_is_one_sentence(spec, told):
    with pytest.raises(UserError, match=told) as caught:
        load_tokenizer(spec)
    assert len(caught.value.sentences) == 1


@pytest.mark.quick
def test_a_file_that_is_no_tokenizer_is_one_sentence(tmp_path):
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0"')
    with pytest.raises(UserError, match="is not a tokenizer.json"):
        load_tokenizer(str(tmp_path))
    import tokenizers

    engine = tokenizers.Tokenizer(tokenizers.models.WordPiece({"[UNK]": 0, "a": 1, "##b": 2}, unk_token="[UNK]"))
    engine.decoder = tokenizers.decoders.WordPiece()
    engine.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(UserError, match="WordPiece.*ByteLevel"):
        load_tokenizer(str(tmp_path))


@pytest.mark.quick
def test_tiktoken_without_network_and_cache_names_the_cache(tmp_path, monkeypatch):
    import tiktoken.registry

    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")  # the discard port: refused at once, network or not
    monkeypatch.setattr(tiktoken.registry, "ENCODINGS", {})
    with pytest.raises(UserError, match="TIKTOKEN_CACHE_DIR") as caught:
        load_tokenizer("cl100k_base")
    assert len(caught.value.sentences) == 1


# ---- nanoGPT's meta.pkl


@pytest.mark.quick
def test_nanogpts_characters_are_read_in_its_order(tmp_path):
    chars = "zya"  # not sorted: ids are what stoi says
    meta = {"vocab_size": 3, "stoi": {c: i for i, c in enumerate(chars)}, "itos": dict(enumerate(chars))}
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        (tmp_path / "meta.pkl").write_bytes(pickle.dumps(meta, protocol))
        tokenizer = char_tokenizer_from_nanogpt(tmp_path / "meta.pkl")
        assert tokenizer.encode("azy") == [2, 0, 1] and tokenizer.decode([0, 1, 2]) == "zya"
        assert tokenizer.eot_id is None


class Evil:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (self.path, "w")


@pytest.mark.quick
def test_a_hostile_meta_pkl_runs_nothing(tmp_path):
    for hostile in ({"stoi": {"a": 0}, "x": Evil(str(tmp_path / "pwned"))}, Evil(str(tmp_path / "pwned"))):
        (tmp_path / "meta.pkl").write_bytes(pickle.dumps(hostile))
        with pytest.raises(UserError, match="it asks for .*open"):
            char_tokenizer_from_nanogpt(tmp_path / "meta.pkl")
    assert not (tmp_path / "pwned").exists()


@pytest.mark.quick
@pytest.mark.parametrize("content", [
    b"", b"\x80", b"not a pickle", pickle.dumps([1]), pickle.dumps({}), pickle.dumps({"stoi": {}}),
    pickle.dumps({"stoi": {"a": 0, "b": 2}}), pickle.dumps({"stoi": {"ab": 0}}), pickle.dumps({"stoi": {"a": "0"}}),
    pickle.dumps({"stoi": {1: 0}})])
def test_a_damaged_meta_pkl_is_one_sentence(content, tmp_path):
    (tmp_path / "meta.pkl").write_bytes(content)
    with pytest.raises(UserError, match="meta.pkl") as caught:
        char_tokenizer_from_nanogpt(tmp_path / "meta.pkl")
    assert len(caught.value.sentences) == 1


# ---- pieces of long texts


def long_texts():
    """Texts of several pieces: code, prose without newlines, and a mix meant to be nasty at the seams."""
    dice = random.Random(7)
    words = ["the", "Don't", "we'll", "I'M", "x1y", "2024", "ünïcode", "日本", "...", "--", "\U0001f600", "_a_",
             "é", "A", "'s"]
    seams = [" ", "\n", "\n\n", "  ", " \n ", "\r\n", "\t", ".\n", "'", "", "\u00a0"]
    mixed = "".join(dice.choice(words) + dice.choice(seams) for _ in range(400_000))
    with open(os.__file__, encoding="utf-8") as file:
        code = file.read()
    return {"mixed": mixed, "code": code * 30, "one line": (code * 30).replace("\n", " ")}


@pytest.mark.parametrize("kind", ["gpt2", "qwen3"])
def test_ids_of_pieces_are_the_ids_of_the_whole_text(kind, tmp_path):
    tokenizer = make(kind, tmp_path)
    for name, text in long_texts().items():
        pieces = list(cut_text([text]))
        assert len(pieces) > 2 and "".join(pieces) == text
        assert [i for piece in pieces for i in tokenizer.encode(piece)] == tokenizer.encode(text), name


@pytest.mark.quick
def test_pieces_follow_the_text_not_the_way_it_came():
    for text in [*long_texts().values(), "日" * (3 * PIECE), "1\n" * (3 * PIECE), "", "short"]:
        whole = list(cut_text([text]))
        dice, at, chunks = random.Random(1), 0, []
        while at < len(text):
            step = dice.choice([1, 1000, 99_999, 700_000])
            chunks.append(text[at:at + step])
            at += step
        assert list(cut_text(chunks)) == whole
        assert all(len(piece) <= PIECE + (1 << 16) for piece in whole) and "".join(whole) == text
