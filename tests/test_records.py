"""Records to fine-tune on: what is learnt is the answers and nothing else, what is cut or dropped is counted, what is wrong has its number."""

import json
import os
import subprocess
import sys
import tracemalloc

import numpy as np
import pytest

from conftest import ROOT, run_script, wait_for
from data.chat import ChatTemplate, with_turns
from data.records import arithmetic, conversation, fit, open_records, parse_fields
from data.report import looks_cut_off, read_report, report_lines
from data.shards import BEGIN, LABEL, TokenDataset, read_meta
from data.sources import Counts, hub_rows, json_records
from data.tokenizers import load_tokenizer, tokenizer_from_identity
from engine.errors import UserError
from prepare import prepare
from test_chat import TYPED, assistant, system, user
from test_tokenizers import gpt2, qwen3, small_json

QUICK = pytest.mark.quick
END = "<|im_end|>"


def write(path, records, kind=".jsonl"):
    """A file of records beside nothing else; its path as a str."""
    path = f"{path}{kind}"
    if kind == ".parquet":
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), path)
        return path
    with open(path, "w", encoding="utf-8") as file:
        json.dump(records, file) if kind == ".json" else file.writelines(json.dumps(r) + "\n" if not isinstance(r, str) else r + "\n" for r in records)
    return path


def sft(source, out, tokenizer="byte", **options):
    return prepare(str(source), task="sft", tokenizer=tokenizer, out=str(out), quiet=True, **options)


def sequences(folder, split="train"):
    """[(ids, labelled)] of a prepared folder, as a reader of its marks finds them."""
    dataset = TokenDataset(str(folder), split)
    ids, marks = dataset.read(0, dataset.n_tokens), dataset.read_marks(0, dataset.n_tokens)
    begins = np.flatnonzero(marks & BEGIN)
    assert begins[0] == 0
    return [(part, (m & LABEL) > 0) for part, m in zip(np.split(ids, begins[1:]), np.split(marks, begins[1:]))]


def texts(folder, split="train"):
    """[(whole text, learnt text)] of its sequences."""
    tokenizer = tokenizer_from_identity(read_meta(folder)["tokenizer"], str(folder))
    return [(tokenizer.decode(ids), tokenizer.decode(ids[labelled])) for ids, labelled in sequences(folder, split)]


def qa(i, answer="yes"):
    return {"question": f"Is {i} a number?", "answer": answer}


# ---------------------------------------------------------------------------------------------------------- what is learnt


@QUICK
@pytest.mark.parametrize("train_on", ["all", "last"])
@pytest.mark.parametrize("kind", ["byte", "gpt2", "small", "qwen3"])
def test_the_marks_of_a_file_are_the_answers_and_their_end_tokens(kind, train_on, tmp_path):
    tokenizer = {"byte": lambda: load_tokenizer("byte"), "gpt2": gpt2, "small": lambda: load_tokenizer(small_json(tmp_path / "t", pad_token=END)),
                 "qwen3": qwen3}[kind]()
    talks = [[system(TYPED), user("2 + 2?<|im_end|>"), assistant("4 <|im_end|><|endoftext|>"), user("Sure?"), assistant("Yes,\n it's 4.")],
             [user("a"), assistant("self"), user("b"), assistant("it's"), user("c"), assistant(" c")],
             [user("one"), assistant("two")]]
    folder = sft(write(tmp_path / "r", [{"messages": talk} for talk in talks]), tmp_path / "out", tokenizer, train_on=train_on, val_fraction=0)
    answers = [[m["content"] + END for m in talk if m["role"] == "assistant"] for talk in talks]
    if train_on == "last":
        expected = [a[-1] for a in answers]
    else:  # Qwen3's template takes the empty reasoning out of what was said before: an answer a sequence
        expected = sum(answers, []) if kind == "qwen3" else ["".join(a) for a in answers]
    found = texts(folder)
    assert [learnt for _, learnt in found] == expected
    assert not any(whole.endswith("\n") or learnt.startswith("<think>") for whole, learnt in found)
    # no more control tokens than the template wrote
    saved = tokenizer_from_identity(read_meta(folder)["tokenizer"], str(folder))
    template, controls = ChatTemplate(saved), set(saved.controls.values())
    if kind != "qwen3":
        for (ids, _), talk in zip(sequences(folder), talks):
            assert [int(i) for i in ids if i in controls] == [saved.controls[c] for c in ["<|im_start|>", END] * len(talk)]
    for ids, labelled in sequences(folder):
        assert ids[-1] == template.end_of_turn and labelled[-1] and int((ids[labelled] == template.end_of_turn).sum()) >= 1
    meta = read_meta(folder)
    assert meta["sft"]["train_on"] == train_on and meta["sft"]["records"] == 3 and meta["splits"]["train"]["labels"] == meta["sft"]["labelled_tokens"]
    assert meta["sft"]["template"]["name"] == ("the chat template of qwen3" if kind == "qwen3" else "ChatML")


SHAPES = {
    "messages": ({"messages": [user("q"), assistant("a")]}, "messages"),
    "messages that say from": ({"messages": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]}, "messages"),
    "conversations": ({"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}], "id": 7}, "conversations"),
    "text in parts": ({"messages": [user([{"type": "text", "text": "q"}]), assistant("a")]}, "messages"),
    "prompt": ({"prompt": "q", "completion": "a"}, "prompt/completion"),
    "prompt of messages": ({"prompt": [user("q")], "completion": [assistant("a")]}, "prompt/completion"),
    "instruction": ({"instruction": "q", "input": "", "output": "a"}, "instruction/output"),
    "instruction and answer": ({"instruction": "q", "answer": "a"}, "instruction/answer"),
    "instruction and response": ({"instruction": "q", "context": None, "response": "a"}, "instruction/response"),
    "question": ({"question": "q", "answer": "a", "source": "book"}, "question/answer"),
}


@QUICK
@pytest.mark.parametrize("name", SHAPES)
def test_shapes_are_found_by_themselves(name):
    record, shape = SHAPES[name]
    talk = conversation(record, {})
    assert talk.messages == [user("q"), assistant("a")] and talk.shape == shape and talk.dropped == 0


@QUICK
def test_shapes_with_more_than_a_question_and_an_answer():
    talk = conversation({"instruction": "add", "input": "2 and 2", "output": "4", "system": "be brief"}, {})
    assert talk.messages == [system("be brief"), user("add\n\n2 and 2"), assistant("4")] and talk.shape == "instruction/input/output"
    fields = parse_fields("question=ask, answer=reply,system=role,input=text")
    talk = conversation({"ask": "q", "reply": "a", "role": "s", "text": "t", "messages": [user("no")]}, fields)
    assert talk.messages == [system("s"), user("q\n\nt"), assistant("a")]
    assert conversation({"dialog": [user("q"), assistant("a")]}, parse_fields("messages=dialog")).shape == "dialog"
    talk = conversation({"conversations": [{"from": "system", "value": "s"}, {"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}], "system": "other"}, {})
    assert talk.messages == [system("s"), user("q"), assistant("a")]
    talk = conversation({"messages": [user("q"), assistant("a", reasoning_content="why", tool_calls=None), user("and?")], "tools": [{"name": "f"}]}, {})
    assert talk.messages == [user("q"), assistant("a", reasoning_content="why")] and talk.dropped == 1 and talk.tools == [{"name": "f"}]


@QUICK
@pytest.mark.parametrize("fields", ["question", "question=q", "answer=a", "question=q,answer=a,messages=m", "query=q,answer=a", "question=,answer=a", "messages=m,messages=n"])
def test_fields_that_name_nothing_to_learn_from_are_one_sentence(fields):
    with pytest.raises(UserError, match="expected messages=NAME, or question=NAME,answer=NAME"):
        parse_fields(fields)


@QUICK
def test_every_kind_of_file_gives_the_same_records(tmp_path):
    records = [{"messages": [user(f"q {i}"), assistant("a" * (i + 1))]} for i in range(20)]
    (tmp_path / "folder").mkdir()
    write(tmp_path / "folder" / "a", records[:5])
    write(tmp_path / "folder" / "b", records[5:], ".json")
    (tmp_path / "folder" / "readme.md").write_text("not records")
    sources = [write(tmp_path / "one", records), write(tmp_path / "two", records, ".json"), write(tmp_path / "three", records, ".parquet"), tmp_path / "folder"]
    found = [texts(sft(source, tmp_path / str(i), val_fraction=0)) for i, source in enumerate(sources)]
    assert len(found[0]) == 20 and all(f == found[0] for f in found)


@QUICK
def test_rows_of_the_hub_are_records(tmp_path):
    """By the datasets library, from a folder of parquet files, which it takes for a dataset of the hub."""
    write(tmp_path / "train", [qa(i) for i in range(5)], ".parquet")
    assert list(hub_rows(str(tmp_path), None, "train")) == [qa(i) for i in range(5)]
    source = open_records("owner/name:part")
    assert source.name == "name" and source.description == {"kind": "hub", "dataset": "owner/name", "config": "part", "split": "train"} and source.connect


# ----------------------------------------------------------------------------------------------------- too long for a row


def turns(n, length=20, head=()):
    return [*head, *(m for i in range(n) for m in (user(f"question {i} " + "?" * length), assistant(f"answer {i} " + "!" * length)))]


@QUICK
@pytest.mark.parametrize("kind, train_on", [("byte", "all"), ("byte", "last"), ("qwen3", "all"), ("qwen3", "last")])
def test_what_is_too_long_is_cut_between_turns_and_each_answer_is_learnt_once(kind, train_on):
    template = ChatTemplate(with_turns(load_tokenizer("byte")) if kind == "byte" else qwen3())
    messages = turns(7, head=[system("be brief")])
    talk = conversation({"messages": messages}, {})
    whole = fit(template, talk, train_on, None)
    longest = max(len(ids) for ids, _ in whole.examples)
    assert not whole.cut and not whole.dropped and fit(template, talk, train_on, longest - 1).examples[0][0] == whole.examples[0][0]
    for block_size in (longest - 2, longest // 2, longest // 3):
        fitted = fit(template, talk, train_on, block_size)
        assert fitted.cut and not fitted.dropped and max(len(ids) for ids, _ in fitted.examples) <= block_size + 1
        learnt = [template.tokenizer.decode([i for i, x in zip(ids, labelled) if x]) for ids, labelled in fitted.examples]
        answers = [m["content"] + END for m in messages if m["role"] == "assistant"]
        assert "".join(learnt) == "".join(answers if train_on == "all" else answers[-1:])
        begin = template.render([system("be brief"), user("question ")]).text.removesuffix(END + "\n")
        for ids, labelled in fitted.examples:
            assert template.tokenizer.decode(ids).startswith(begin) and labelled[-1]
    # as little is cut as will do
    (ids, _), *_ = fit(template, talk, "last", longest - 2).examples
    assert template.tokenizer.decode(ids).count("question") == 6


@QUICK
def test_answers_that_fit_no_row_are_dropped_counted_and_named(tmp_path):
    records = [{"messages": turns(2)}, {"messages": [*turns(1), user("more"), assistant("x" * 500), user("less"), assistant("y")]},
               {"messages": [user("x" * 500), assistant("y")]}, *({"messages": [user("z" * (500 + i)), assistant("y")]} for i in range(6))]
    folder = sft(write(tmp_path / "r", records), tmp_path / "out", block_size=250, val_fraction=0)
    assert [learnt for _, learnt in texts(folder)] == ["".join(f"answer {i} {'!' * 20}{END}" for i in range(2)), f"answer 0 {'!' * 20}{END}", f"y{END}"]
    report, meta = read_report(folder), read_meta(folder)["sft"]
    assert report["answers_too_long"] == 8 and report["records_too_long"] == meta["records_too_long"] == 7 and meta["records_with_history_cut"] == 1
    assert [d["record"] for d in report["too_long"]] == [f"{tmp_path}/r.jsonl line {n}" for n in range(3, 8)] and report["too_long"][0]["tokens"] > 500
    told = "\n".join(report_lines(report))
    assert "line 3 (" in told and "line 7 (" in told and "and 2 more" in told
    with pytest.raises(UserError, match=r"no answer is left to learn from: 9 too long for block_size=20 \(.*give a larger one"):
        sft(tmp_path / "r.jsonl", tmp_path / "none", block_size=20)
    assert sorted(os.listdir(tmp_path)) == ["out", "r.jsonl"]


# ------------------------------------------------------------------------------------------------------------- bad records

GOOD = [qa(1), qa(2)]
BAD = {
    "broken": ('{"question": "q" "answer": "a"}', "is not JSON: Expecting ',' delimiter at character 18", "unreadable"),
    "a list": ([1], "expected an object, found [1]", "no objects"),
    "a shape": ({"text": "t"}, "expected messages, conversations, prompt/completion.*found the fields 'text'", "no known shape"),
    "two shapes": ({"question": "q", "answer": "a", "prompt": "p", "completion": "c"}, "prompt/completion or question/answer both fit", "no known shape"),
    "a role": ({"messages": [user("q"), {"role": "narrator", "content": "a"}]}, 'message 2: unknown role "narrator": system, user', "unknown roles"),
    "no role": ({"messages": [{"content": "q"}]}, "message 1: unknown role null", "unknown roles"),
    "no answer": ({"messages": [user("q")]}, "no turn of the assistant to learn from, only user", "no assistant turn"),
    "only system": ({"messages": [system("s")]}, "no turn of the assistant to learn from, only system", "no assistant turn"),
    "no messages": ({"messages": []}, "no turn of the assistant to learn from, only nothing", "no assistant turn"),
    "an empty answer": ({"messages": [user("q"), assistant(" \n")]}, "message 2 is an empty answer", "empty answers"),
    "an empty text": ({"question": "q", "answer": ""}, "message 2 is an empty answer", "empty answers"),
    "a number": ({"question": "q", "answer": 4}, "message 2: expected its content to be text, found 4", "wrong types"),
    "an image": ({"messages": [user([{"type": "image"}]), assistant("a")]}, "message 1: expected its content to be text", "wrong types"),
    "messages as text": ({"messages": "hi"}, 'expected messages to be a list of messages, found "hi"', "wrong types"),
    "a message as text": ({"messages": ["hi"]}, "message 1: expected an object with role and content", "wrong types"),
    "an answer first": ({"messages": [assistant("a"), user("q"), assistant("b")]}, "the first turn is of role assistant, expected user", "not begun by the user"),
    "deep": ('{"question": "q", "answer": ' + "[" * 100_000 + "]" * 100_000 + "}", "cannot be read as JSON", "unreadable"),
}


@QUICK
@pytest.mark.parametrize("name", BAD)
def test_a_bad_record_is_one_sentence_with_its_number_or_counted(name, tmp_path):
    bad, told, kind = BAD[name]
    path = write(tmp_path / "r", [GOOD[0], bad, GOOD[1]])
    with pytest.raises(UserError, match=told.replace("[", r"\[")) as caught:
        sft(path, tmp_path / "out")
    assert len(caught.value.sentences) == 1 and "\n" not in str(caught.value) and f"{path} line 2" in str(caught.value) and "--skip_bad" in str(caught.value)
    assert sorted(os.listdir(tmp_path)) == ["r.jsonl"]
    folder = sft(path, tmp_path / "out", skip_bad=True, val_fraction=0)
    assert [learnt for _, learnt in texts(folder)] == [f"yes{END}"] * 2
    report = read_report(folder)
    assert report["bad_records"] == {kind: 1} and f"{kind} 1" in "\n".join(report_lines(report)) and "line 2" in report["last_bad_record"]


@QUICK
def test_what_a_template_refuses_has_its_record_number(tmp_path):
    strict = ("{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
              "{{ m.content }}<|im_end|>{% endfor %}")
    tokenizer = load_tokenizer(small_json(tmp_path / "t", ["<|endoftext|>", END], chat_template=strict))
    path = write(tmp_path / "r", [{"messages": [user("q"), assistant("a")]}, {"messages": [user("q"), user("r"), assistant("a")]}])
    with pytest.raises(UserError, match="line 2: the chat template of t refuses this conversation: roles must alternate"):
        sft(path, tmp_path / "out", tokenizer)
    assert read_report(sft(path, tmp_path / "out", tokenizer, skip_bad=True))["bad_records"] == {"refused by the template": 1}
    mute = load_tokenizer(small_json(tmp_path / "m", chat_template="{% for m in messages %}{{ m.content }}{% endfor %}"))
    with pytest.raises(UserError, match="puts no control token behind an answer") as caught:
        sft(path, tmp_path / "other", mute, skip_bad=True)
    assert "line" not in str(caught.value)  # it is no record's fault


@QUICK
@pytest.mark.parametrize("name, content, told", [
    ("r.json", '{"question": "q", "answer": "a"}', "expected a JSON list of objects, found one object; a file of one object a line should end in .jsonl"),
    ("r.json", '[{"question": "q",\n "answer": "a"},\n {"question" "q"}, ' + '{"a": 1}, ' * 50 + "]", r"r.json line 3: item 2 is broken .*Expecting ':' delimiter"),
    ("r.json", '[{"question": "q", "answer": "a"}\n', "r.json line 2: item 2 is broken or the list does not end"),
    ("r.json", "", "expected a JSON list of objects, found nothing"),
    ("r.jsonl", "", "no answer is left to learn from: it holds no records"),
    ("r.jsonl", '{"question": "q", "answer": "\xff"}', "not valid UTF-8"),
    ("r.txt", "hello", "r.txt holds no records: files that end in .jsonl, .json, .parquet do"),
    ("r.parquet", "hello", "r.parquet cannot be read as parquet"),
])
def test_a_file_that_holds_no_records_is_one_sentence(name, content, told, tmp_path):
    (tmp_path / name).write_bytes(content.encode("latin-1"))
    with pytest.raises(UserError, match=told) as caught:
        sft(tmp_path / name, tmp_path / "out")
    assert len(caught.value.sentences) == 1 and "\n" not in str(caught.value) and os.listdir(tmp_path) == [name]


@QUICK
def test_a_broken_item_of_a_long_list_is_told_without_reading_on(tmp_path):
    items = ['{"question": "q", "answer": "a"}'] * 200_000
    items[1] = '{"question": "q" "answer": "a"}'
    (tmp_path / "r.json").write_text("[" + ",\n".join(items) + "]")
    counts = Counts()
    with pytest.raises(UserError, match="r.json line 2: item 2 is broken"):
        list(json_records(str(tmp_path / "r.json"), None, counts, False))
    assert counts.read < 2_000_000 < os.path.getsize(tmp_path / "r.json")


@QUICK
def test_nothing_left_says_why(tmp_path):
    path = write(tmp_path / "r", [{"text": "t"}, {"question": "q", "answer": " "}, {"messages": [user("x" * 300), assistant("y")]}])
    with pytest.raises(UserError, match="no answer is left to learn from: 1 no known shape; 1 empty answers; the last: .*line 2.*; 1 too long for block_size=100"):
        sft(path, tmp_path / "out", skip_bad=True, block_size=100)


@QUICK
@pytest.mark.parametrize("options, told", [
    (dict(train_on="first"), "--train_on first: expected all or last"), (dict(block_size=0), "--block_size 0"), (dict(fields="a=b"), "fields=a=b: expected"),
    (dict(tokenizer=None), "no tokenizer given.*--tokenizer=PATH, gpt2 or byte"), (dict(tokenizer="bite"), "unknown tokenizer 'bite': did you mean byte"),
    (dict(val_fraction=1), "--val_fraction 1"), (dict(task="rl"), "--task rl: expected pretrain or sft"), (dict(task="pretrain", train_on="last"), "add --task=sft"),
    (dict(file="f"), "--file and --text_field are about text"),
    (dict(source="arithmetics"), "no source of records 'arithmetics': did you mean arithmetic"), (dict(source="arithmetic", task="pretrain"), "prepare it with --task=sft")])
def test_options_that_cannot_be_meant_are_one_sentence(options, told, tmp_path):
    path = write(tmp_path / "r", GOOD)
    with pytest.raises(UserError, match=told):
        prepare(**{"source": path, "task": "sft", "tokenizer": "byte", "out": str(tmp_path / "out"), "quiet": True, **options})
    assert os.listdir(tmp_path) == ["r.jsonl"]


def test_the_command_line_says_what_the_records_are_like_and_no_in_one_sentence(tmp_path):
    path = write(tmp_path / "r", [*GOOD, {"messages": [user("q"), assistant("a"), user("r")]}])
    done = run_script("prepare.py", path, "--task=sft", "--tokenizer=byte", f"--out={tmp_path / 'out'}", "--block_size=64")
    assert done.code == 0 and not done.err, done.err
    for told in ("records/s, by ChatML; the tokenizer has 2 control tokens more", "records: 3 (question/answer 2, messages 1), 3 answers", "to learn",
                 "messages behind the last answer, dropped: 1", "duplicates: 0 exact", "the longest: "):
        assert told in done.out, done.out
    again = run_script("prepare.py", path, "--task=sft", "--tokenizer=byte", f"--out={tmp_path / 'out'}", "--block_size=64")
    assert again.code == 0 and "is there already" in again.out
    other = run_script("prepare.py", path, "--task=sft", "--tokenizer=byte", f"--out={tmp_path / 'out'}", "--block_size=65")
    assert other.code == 2 and other.errors and "block_size was 64, is 65" in other.err and len(other.err.splitlines()) == 1
    write(tmp_path / "bad", [qa(1), {"messages": [user("q")]}])
    bad = run_script("prepare.py", tmp_path / "bad.jsonl", "--task=sft", "--tokenizer=byte", f"--out={tmp_path / 'no'}")
    assert bad.code == 2 and bad.err.startswith(f"error: {tmp_path}/bad.jsonl line 2: no turn of the assistant") and len(bad.err.splitlines()) == 1


# -------------------------------------------------------------------------------------------------------------- the splits


@QUICK
def test_records_that_are_equal_fall_on_one_side_and_both_sides_have_some(tmp_path):
    records = [qa(i % 100) for i in range(300)]
    folder = sft(write(tmp_path / "r", records), tmp_path / "out", val_fraction=0.2)
    train, val = texts(folder), texts(folder, "val")
    assert len(train) + len(val) == 300 and 20 < len(val) < 110 and not set(train) & set(val)
    for n, fraction in ((2, 0.05), (2, 0.99), (3, 1e-9), (20, 0.001)):
        folder = sft(write(tmp_path / f"few{n}{fraction}", [qa(i) for i in range(n)]), tmp_path / f"f{n}{fraction}", val_fraction=fraction)
        train, val = texts(folder), texts(folder, "val")
        assert len(train) + len(val) == n and min(len(train), len(val)) == 1 and read_report(folder)["records"] == n
    same = sft(write(tmp_path / "same", [qa(1)] * 5), tmp_path / "s")  # one record, five times
    assert len(texts(same)) == 5 and read_meta(same)["splits"]["val"]["shards"] == []
    none = sft(write(tmp_path / "none", GOOD), tmp_path / "n", val_fraction=0)
    with pytest.raises(UserError, match="no val split"):
        TokenDataset(none, "val")


@QUICK
def test_a_data_set_is_made_once_for_each_way_to_make_it(tmp_path, monkeypatch):
    monkeypatch.setattr("prepare.ROOT", str(tmp_path))
    path = write(tmp_path / "mine", [*GOOD, qa(3)])
    byte, chatty = load_tokenizer("byte"), load_tokenizer(small_json(tmp_path / "t"))
    ways = [dict(), dict(train_on="last"), dict(block_size=64), dict(block_size=65), dict(val_fraction=0.5), dict(tokenizer=chatty), dict(fields="question=question,answer=answer")]
    folders = [prepare(path, task="sft", quiet=True, **{"tokenizer": byte, **way}) for way in ways]
    assert len(set(folders)) == len(ways) and all(os.path.basename(f).startswith("mine-") and os.path.dirname(f) == str(tmp_path / "data") for f in folders)
    stamp = os.stat(os.path.join(folders[0], "meta.json")).st_mtime_ns
    assert prepare(path, task="sft", quiet=True, tokenizer="byte") == folders[0] and os.stat(os.path.join(folders[0], "meta.json")).st_mtime_ns == stamp
    write(tmp_path / "mine", [*GOOD, qa(4), qa(5)])
    assert prepare(path, task="sft", quiet=True, tokenizer="byte") not in folders
    named = prepare(path, task="sft", quiet=True, tokenizer="byte", name="mine")
    assert named == str(tmp_path / "data" / "mine")
    with pytest.raises(UserError, match="train_on was all, is last.*--overwrite"):
        prepare(path, task="sft", quiet=True, tokenizer="byte", name="mine", train_on="last")
    assert prepare(path, task="sft", quiet=True, tokenizer="byte", name="mine", train_on="last", overwrite=True) == named
    with pytest.raises(UserError, match="made otherwise"):  # text is something else
        prepare(path, tokenizer="byte", name="mine", text_field="question", quiet=True)


@QUICK
def test_records_cross_the_borders_of_shards(tmp_path):
    path = write(tmp_path / "r", [qa(i) for i in range(40)])
    one, many = (sft(path, tmp_path / name, shard_tokens=n, val_fraction=0) for name, n in (("one", 10**6), ("many", 100)))
    assert len(read_meta(many)["splits"]["train"]["shards"]) > 10 and texts(one) == texts(many) and len(texts(one)) == 40


# -------------------------------------------------------------------------------------------------------------- the report


@QUICK
def test_the_report_counts_what_is_there(tmp_path):
    long = "The quick brown fox jumps over the lazy dog and then it goes on to say that there is more to tell about foxes. " * 3
    records = [qa(1), qa(1), qa(1), {"question": "Tell me", "answer": long}, {"question": "Tell me", "answer": long + " Indeed!"}, {"question": "Tell me", "answer": long.upper()},
               {"question": "Code", "answer": "```\n" + "x = 1\n" * 30}, {"question": "Cut", "answer": "It goes on and on, " * 8 + "and then"}, {"messages": [user("a"), assistant("b"), user("c")]},
               *(qa(i, f"it is number {i}") for i in range(10, 30))]
    folder = sft(write(tmp_path / "r", records), tmp_path / "out")
    report, found = read_report(folder), texts(folder) + texts(folder, "val")
    lengths = [len(ids) for split in ("train", "val") for ids, _ in sequences(folder, split)]
    assert report["records"] == len(records) == report["answers"] and report["exact_duplicates"] == 2 and report["near_duplicates"] == 2
    assert report["answers_that_look_cut_off"] == 2 and report["trailing_messages_dropped"] == 1 and report["bad_records"] == {}
    assert report["tokens"] == sum(lengths) and report["lengths"]["100"] == max(lengths) == report["longest"][0]["tokens"]
    assert report["labelled_tokens"] == sum(len(learnt.encode()) - len(END) + 1 for _, learnt in found)
    assert len(report["longest"]) == 10 and report["longest"][0]["record"].endswith("line 5") and report["longest"][0]["begins"] == "Tell me"
    assert report["labelled_share"] == report["labelled_tokens"] / report["tokens"] and 6 <= len(report_lines(report)) <= 12


@QUICK
@pytest.mark.parametrize("answer, looks", [("short", False), ("x" * 100 + ".", False), ("x" * 100, True), ("x" * 100 + ",", True), ("日本" * 50 + "。", False),
                                           ("```\ncode\n" + "x = 1\n" * 20 + "```", False), ("```\ncode\n" + "y()\n" * 30, True), ("He said: " + "x" * 90 + '."', False)])
def test_an_answer_looks_cut_off_where_it_ends_within_a_sentence_or_code(answer, looks):
    assert looks_cut_off(answer) == looks


@QUICK
def test_a_report_that_is_none_is_one_sentence(tmp_path):
    for content in ("", "[]", "{}", '{"records": 1'):
        (tmp_path / "report.json").write_text(content)
        with pytest.raises(UserError, match="report.json is not a report of prepare.py"):
            read_report(tmp_path)


@QUICK
def test_bytes_that_are_no_text_are_replaced_and_counted_where_bad_records_are_skipped(tmp_path):
    (tmp_path / "r.jsonl").write_bytes(b'{"question": "q", "answer": "a\xff"}\n')
    folder = sft(tmp_path / "r.jsonl", tmp_path / "out", skip_bad=True)
    assert texts(folder)[0][1] == f"a\ufffd{END}" and read_report(folder)["characters_replaced"] == 1


@QUICK
def test_halves_of_surrogate_pairs_stop_nothing(tmp_path):
    folder = sft(write(tmp_path / "r", ['{"question": "\\ud800", "answer": "a\\udfff"}', qa(1)]), tmp_path / "out", val_fraction=0)
    assert texts(folder)[0][1] == f"a\ufffd{END}"
    print("\n".join(report_lines(read_report(folder))).encode())


# ----------------------------------------------------------------------------------------------- arithmetic; size; its end


def test_arithmetic_is_right_complete_and_always_the_same(tmp_path):
    found = list(arithmetic())
    asked = [record["question"] for record in found]
    assert len(set(asked)) == 10_000 and asked[:2] == ["What is 0 + 0?", "What is 63 + 37?"] and found[1]["answer"] == "100"
    assert all(eval(r["question"].removeprefix("What is ").removesuffix("?")) == int(r["answer"]) for r in found)
    folder = prepare("arithmetic", task="sft", out=str(tmp_path / "a"), quiet=True)
    assert read_meta(folder)["tokenizer"]["kind"] == "byte" and read_report(folder)["records"] == 10_000 and read_report(folder)["near_duplicates"] < 100
    assert len(texts(folder, "val")) > 300


def test_memory_does_not_follow_the_records(tmp_path):
    peaks = []
    for n in (150, 650):
        path = write(tmp_path / str(n), [qa(f"{i} " + "word " * 800, "no " * 20) for i in range(n)])
        tracemalloc.start()
        sft(path, tmp_path / f"out{n}")
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    # a record has 4,100 bytes of text, and five times that as ids and marks: what is kept of it is a small part
    assert (peaks[1] - peaks[0]) / 500 < 500, peaks


def test_a_killed_preparation_leaves_nothing_that_trains(tmp_path):
    path = write(tmp_path / "r", [qa(i) for i in range(30_000)])
    command = [sys.executable, "prepare.py", path, "--task=sft", "--tokenizer=byte", f"--out={tmp_path / 'out'}"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_for(lambda: os.path.exists(tmp_path / ".out.partial" / "train_000000.bin") or process.poll() is not None)
    process.kill()
    process.wait()
    assert not os.path.exists(tmp_path / "out")
    write(tmp_path / "r", GOOD)
    assert len(texts(sft(path, tmp_path / "out"))) == 1 and not os.path.exists(tmp_path / ".out.partial")


@QUICK
def test_a_model_taught_without_reasoning_is_asked_without_it(tmp_path):
    """The data set's tokenizer says so, as a checkpoint's then does; sample.py follows it unless told otherwise."""
    from sample import Settings, variables

    plain = {"question": "1 + 1?", "answer": "2"}
    thought = {"question": "2 + 2?", "answer": "<think>\nsmall\n</think>\n\n4"}
    for name, records, expected in (("without", [plain] * 4, {"enable_thinking": False}), ("mixed", [plain, thought] * 2, {}), ("with", [thought] * 4, {})):
        folder = sft(write(tmp_path / name, records), tmp_path / f"{name}.set", qwen3(), val_fraction=0)
        tokenizer = tokenizer_from_identity(read_meta(folder)["tokenizer"], folder)
        assert variables(Settings(), tokenizer) == expected and variables(Settings(thinking=True), tokenizer) == {"enable_thinking": True}
    with pytest.raises(UserError, match="without_thinking"):
        tokenizer_from_identity({**tokenizer.identity(), "without_thinking": "yes"}, folder)
