"""HellaSwag in the loop chooses what transformers chooses on the same items, whatever the layout and the batch."""

import json
import random

import pytest
import torch

from conftest import TINY, as_args, forked, records, train
from data.tokenizers import byte_tokenizer
from engine.config import Config
from engine.errors import UserError
from engine.families import open_weights
from engine.hellaswag import choose, find_file, read_items
from engine.processes import Place, Precision
from engine.watch import Watch
from sample import load_model

WORDS = "a man is seen standing on the roof with his shovel and then he starts to throw snow down while she walks by".split()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """weights: a random GPT-2 in Hugging Face's layout, 64 positions; items.jsonl: 43 items, some longer than that."""
    from transformers import GPT2Config, GPT2LMHeadModel

    folder = tmp_path_factory.mktemp("hellaswag")
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=257, n_positions=64, n_embd=48, n_layer=2, n_head=4, initializer_range=0.2, bos_token_id=256, eos_token_id=256)
    GPT2LMHeadModel(config).save_pretrained(folder / "weights")
    rng = random.Random(0)

    def text(least, most):
        return " ".join(rng.choice(WORDS) for _ in range(rng.randint(least, most)))

    items = [{"ind": i, "ctx": text(1, 14), "endings": [text(1, 4) for _ in range(4)], "label": rng.randrange(4)} for i in range(42)]
    items.append({"ind": 42, "ctx": text(3, 3), "endings": [text(1, 2), text(30, 30), text(2, 2), text(2, 2)], "label": 1})  # an ending longer than the model
    (folder / "items.jsonl").write_text("".join(json.dumps(item) + "\n" for item in items))
    return folder


@pytest.fixture(scope="module")
def expected(folder):
    """[(ending of least mean loss, of least summed loss)] by transformers, an ending at a time, without padding."""
    from transformers import GPT2LMHeadModel

    model = GPT2LMHeadModel.from_pretrained(folder / "weights").eval()
    chosen = []
    for item in map(json.loads, (folder / "items.jsonl").read_text().splitlines()):
        sums, means = [], []
        for ending in item["endings"]:
            start, end = item["ctx"].encode(), b" " + ending.encode()
            ids = torch.tensor([list(start + end)])[:, -65:]
            with torch.no_grad():
                at_each = model(ids[:, :-1]).logits.log_softmax(-1).gather(2, ids[:, 1:, None])[0, :, 0]
            sums.append(-at_each[-len(end):].sum().item())
            means.append(sums[-1] / min(len(end), 64))
        chosen.append([means.index(min(means)), sums.index(min(sums))])
    return chosen


def test_the_choices_are_those_of_transformers_on_any_layout(folder, expected):
    place = Place(device=torch.device("cpu"))
    model = load_model(open_weights(str(folder / "weights"), print), place.device)
    items = read_items(str(folder / "items.jsonl"), 0, byte_tokenizer(), 64, 257)
    watch = Watch(place)
    watch.start(Config(watchdog_seconds=0), 0)
    assert choose(model, items, 8, place, Precision("float32", None, False), watch).tolist() == expected
    watch.__exit__()
    assert forked(2, "tests/ranks.py", "choices", folder).code == 0
    for rank in range(2):
        for found in json.loads((folder / f"choices-{rank}.json").read_text()):
            assert found == expected, rank
    assert len({tuple(pair) for pair in expected}) > 8 and any(a != b for a, b in expected), "they are no constant"


def test_a_run_scores_at_each_evaluation_and_says_so(folder, expected, data, tmp_path):
    labels = [json.loads(line)["label"] for line in (folder / "items.jsonl").read_text().splitlines()]
    right = [sum(e[i] == label for e, label in zip(expected, labels)) for i in range(2)]
    sizes = {k: v for k, v in TINY.items() if not k.startswith("n_") and k not in ("block_size", "total_batch_size")}
    words = [f"--dataset={data}", f"--init_from={folder / 'weights'}", f"--hellaswag={folder / 'items.jsonl'}",
             *as_args({**sizes, "block_size": 64, "total_batch_size": 128})]
    only = forked(1, "train.py", "tests/empty_config.py", f"--out_dir={tmp_path / 'only'}", "--eval_only", *words)
    assert only.code == 0 and f"HellaSwag {right[0] / 43:.2%} of 43 right by the mean loss of the ending, {right[1] / 43:.2%} by its sum" in only.out, only.out
    run = tmp_path / "run"
    result = forked(2, "train.py", "tests/empty_config.py", f"--out_dir={run}", *words, "--batch_size=1", "--max_iters=4", "--eval_interval=2",
                      "--learning_rate=1e-30", "--hellaswag_items=41")
    assert result.code == 0 and result.out.count("HellaSwag") == 2, result.err
    right = [sum(e[i] == label for e, label in zip(expected[:41], labels)) for i in range(2)]
    assert [(r["step"], r["acc_norm"], r["acc"], r["items"]) for r in records(run, "hellaswag")] == [(s, right[0] / 41, right[1] / 41, 41) for s in (2, 4)]


@pytest.mark.quick
def test_what_is_no_item_is_one_sentence(tmp_path):
    good = {"ctx": "a man is seen", "endings": ["standing", "on a roof", "with snow", "throwing"], "label": 2}
    for bad in ("no json", json.dumps([1]), *(json.dumps({**good, **change}) for change in (
            {"label": ""}, {"label": 4}, {"label": -1}, {"endings": []}, {"endings": ["a"]}, {"endings": [1, 2, 3, 4]}, {"ctx": ""}, {"ctx": None}))):
        (tmp_path / "bad.jsonl").write_text(json.dumps(good) + "\n" + bad + "\n")
        with pytest.raises(UserError, match="line 2 is no item of HellaSwag: expected JSON with ctx"):
            read_items(str(tmp_path / "bad.jsonl"), 0, byte_tokenizer(), 64, 257)
    assert len(read_items(str(tmp_path / "bad.jsonl"), 1, byte_tokenizer(), 64, 257)) == 1
    (tmp_path / "good.jsonl").write_text(json.dumps(good) + "\n")
    (tmp_path / "bad.jsonl").write_text("")
    with pytest.raises(UserError, match="is empty"):
        read_items(str(tmp_path / "bad.jsonl"), 0, byte_tokenizer(), 64, 257)
    with pytest.raises(UserError, match="vocabulary ends at 99"):
        read_items(str(tmp_path / "good.jsonl"), 0, byte_tokenizer(), 64, 100)
    with pytest.raises(UserError, match="by which tokenizer"):
        read_items(str(tmp_path / "good.jsonl"), 0, None, 64, 257)
    with pytest.raises(UserError, match="there is no such file.*hellaswag_val.jsonl"):
        find_file("data/hellaswag_val.jsonl")


def test_a_file_of_the_hub_is_had_from_its_cache_or_refused_in_one_sentence(folder, data, tmp_path):
    env = {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    refused = train(tmp_path / "run", data, expect=2, eval_interval=1, hellaswag="some-lab/hellaswag/data/val.jsonl", env=env)
    assert len(refused.errors) == 1 and "data/val.jsonl of the data set some-lab/hellaswag" in refused.errors[0] and not (tmp_path / "run").exists()
    cache = tmp_path / "hub" / "datasets--some-lab--hellaswag"
    path = cache / "snapshots" / ("0" * 40) / "data" / "val.jsonl"
    for file, text in ((path, (folder / "items.jsonl").read_text()), (cache / "refs" / "main", "0" * 40)):
        file.parent.mkdir(parents=True)
        file.write_text(text)
    train(tmp_path / "run", data, eval_interval=2, max_iters=2, hellaswag="some-lab/hellaswag/data/val.jsonl", env=env)
    assert records(tmp_path / "run", "hellaswag")[0]["items"] == 43
    refused = train(tmp_path / "other", data, expect=2, hellaswag="x")
    assert len(refused.errors) == 1 and "eval_interval=0 has none" in refused.errors[0]
