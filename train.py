"""Trains a GPT. One script for every rung; what differs between rungs is a config file and the command that starts it.

    python train.py                                        the quickstart rung: a small model of Python's source text
    python train.py configs/shakespeare_char.py --max_iters=2000
    python train.py --help                                 every setting

The same command goes on where the run stopped. The order of things: settings, device, data, the run's folder, model, loop.
"""

import inspect
import json
import math
import os
import subprocess
import sys
import time

started = time.time()

import torch

from data.order import WindowReader, derive_seed
from data.shards import TokenDataset, find_dataset
from data.tokenizers import load_tokenizer, tokenizer_from_identity
from engine import checkpoint as ckpt
from engine import config as settings
from engine import processes
from engine.errors import EXIT_SIGNAL, UserError, full_disk, is_full_disk, run_as_script
from engine.evaluate import check_split, evaluate
from engine.families import open_weights
from engine.metrics import Metrics, peak_flops, short_number, short_time
from engine.optim import LossScale, gradient_norm, learning_rate, make_optimizer
from engine.recovery import RunLock, StopSignal
from model import GPT, ModelConfig


def say(sentence):
    print(sentence, flush=True)


def main(argv):
    if "--help" in argv:
        print(__doc__, inspect.getsource(settings.Config), sep="\n")
        return 0
    config = settings.load_config(argv, default_file="configs/quickstart.py")
    device, precision = processes.start(config)
    stop = StopSignal()

    # ------------------------------------------------------------------ where the weights come from decides the architecture
    run = config.out_dir
    lock = RunLock(run) if os.path.isdir(run) else None  # nothing is made before all is checked
    resumed = find_resumable(run, config)
    weights = None
    if resumed and config.init_from != "scratch":
        tell_architecture(config, resumed.model_config(), resumed.path)
    elif not resumed and config.init_from != "scratch":
        if config.init_from == "resume":
            raise UserError(f"init_from=resume, but {run} has no checkpoint to go on from: leave it out to start a new run")
        weights = open_weights(config.init_from, say)
        tell_architecture(config, weights.model_config, weights.path)
    settings.resolve(config)

    # ------------------------------------------------------------------ data
    folder = find_data(config.dataset)
    train_data = TokenDataset(folder, "train")
    val_data = TokenDataset(folder, "val") if config.eval_interval or config.eval_only else None
    config.vocab_size = config.vocab_size or train_data.vocab_size or 50304  # bare token files: GPT-2's, as in nanoGPT
    model_config = make_model_config(config)
    for dataset, split in ((train_data, "train"), (val_data, "val")):
        if dataset:
            check_split(dataset, split, config.block_size)
            dataset.check_ids(config.vocab_size)
    tokenizer = find_tokenizer(train_data, folder, weights, config.vocab_size)
    batches = WindowReader(train_data, config.block_size, config.seed)
    val_batches = WindowReader(val_data, config.block_size) if val_data else None

    # ------------------------------------------------------------------ the run's folder
    changed = check_resumable(resumed, config, train_data) if resumed else []
    os.makedirs(os.path.join(run, "checkpoints"), exist_ok=True)
    lock = lock or RunLock(run)
    ckpt.clear_leftovers(run)
    if config.resume == "never" or resumed:  # what is beyond the step we go on from belongs to another curve
        beyond = [f"checkpoints/step_{s:08d}" for s in ckpt.list_steps(run) if not resumed or s > resumed.step]
        if not resumed:
            beyond += ["checkpoints/best", "metrics.jsonl", "loss.png", "config.json"]
        if moved := ckpt.set_aside(run, beyond):
            say(f"what {run} held of an earlier curve is now in {moved}")

    # ------------------------------------------------------------------ model and optimizer
    with torch.device(device):  # memory without values: those come next, once
        model = GPT(model_config)
    optimizer = make_optimizer(model.named_parameters(), config)
    parameters = list(model.parameters())
    scale = LossScale(precision.loss_scaling)
    step = samples = bad_steps = 0
    skips = []  # [step, first sample, samples] of every update passed over
    source = resumed or (weights.checkpoint if weights and config.init_optimizer else None)
    if resumed:
        resumed.load_into("model", dict(model.named_parameters()))
        step, samples, skips = resumed.step, resumed.samples, resumed.manifest["skips"]
        scale.load(resumed.manifest["loss_scale"])
    elif weights:
        ckpt.fill(dict(model.named_parameters()), weights.tensors, weights.path)
    else:
        model.init_weights(config.seed)
    if source:
        source.load_into("optimizer", optimizer.state())
        optimizer.updates = source.manifest["optimizer_updates"]
    check_room(run, model)
    if config.compile:
        processes.compile_blocks(model, device)

    # ------------------------------------------------------------------ what the log starts with
    metrics = Metrics(run, step)
    wandb_id = resumed.manifest["wandb_run_id"] if resumed else None
    versions = {"python": sys.version.split()[0], "torch": torch.__version__, "git": git_revision()}
    resolved = settings.as_dict(config)
    ckpt.write_json(os.path.join(run, "config.json"), {"config": resolved, "model": vars(model_config), "versions": versions,
                                                       "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())})
    if config.wandb_log:
        wandb_id = metrics.start_wandb(config, resolved, wandb_id)
    say(settings.table(config))
    describe(model, config, train_data, val_data, batches, device)
    if resumed:
        say(f"going on from {resumed.path}: update {step:,}, sample {samples:,}")
        metrics.event(step, "resumed", changed=[[k, old, new] for k, old, new in changed])
        if resumed.manifest["device"] != device.type or resumed.manifest["versions"]["torch"] != versions["torch"]:
            say(f"note: it was written on {resumed.manifest['device']} by torch {resumed.manifest['versions']['torch']}, this is "
                f"{device.type} and torch {versions['torch']}: the curve goes on, its last bits may differ")

    def save():
        state = {"step": step, "samples": samples, "skips": skips, "optimizer_updates": optimizer.updates, "loss_scale": scale.state(),
                 "config": resolved, "model": vars(model_config), "tokenizer": tokenizer.identity() if tokenizer else None,
                 "dataset": train_data.fingerprint, "device": device.type, "threads": torch.get_num_threads(),
                 "versions": versions, "wandb_run_id": wandb_id}
        metrics.flush()
        if not os.path.isdir(ckpt.step_folder(run, step)):
            path = ckpt.save(run, model, optimizer, state, tokenizer)
            metrics.event(step, "saved", path=path)
            say(f"saved {path}")
        ckpt.delete_old(run, config.keep_last, config.keep_every)
        lock.touch()

    def validate():
        loss = evaluate(model, val_batches, config.eval_tokens, config.batch_size, device, precision, stop)
        model.train()
        if loss is None:
            return
        best = min([value for _, value in metrics.val], default=math.inf)
        say(f"step {step:,}: validation loss {loss:.4f}" + (" (best so far)" if loss < best else f", best {best:.4f}"))
        if config.eval_only:
            return
        metrics.write("val", step, loss=loss)
        metrics.flush()
        if loss < best and os.path.isdir(ckpt.step_folder(run, step)):
            ckpt.mark_best(run, step)
        metrics.draw()

    if config.eval_only:
        validate()
        metrics.close()
        lock.release()
        return 0

    # ------------------------------------------------------------------ the loop
    model.train()
    tokens_per_update = config.total_batch_size
    flops, peak = model.flops_per_token(), None
    line_time = line_step = 0  # what the next line on the console is about
    while step < config.max_iters and not stop:
        step_started = time.perf_counter()
        loss = torch.zeros((), device=device)
        for j in range(config.micro_batches):
            x, y = batches.batch(samples + j * config.batch_size, config.batch_size)  # (B, T) each
            if config.dropout:  # a function of what the numbers are for, never of what was drawn before
                torch.manual_seed(derive_seed("dropout", config.seed, step + 1, j))
            with precision.context(device.type):
                # the sum over the micro-batch's tokens, over the tokens of the whole update
                part = model(x.to(device, non_blocking=True), y.to(device, non_blocking=True), divisor=tokens_per_update)
            (part * scale.value if scale.enabled else part).backward()
            loss += part.detach()
            if stop:
                break
        if stop:
            break  # the unfinished update is dropped

        norm = gradient_norm(parameters) / scale.value
        clip = (norm / config.grad_clip).clamp(min=1.0) if config.grad_clip else torch.ones_like(norm)
        loss_value, norm_value = loss.item(), norm.item()
        samples += config.micro_batches * config.batch_size
        finite = math.isfinite(loss_value) and math.isfinite(norm_value)
        scale.update(finite)
        if not finite:
            optimizer.zero_grad()
            bad_steps += 1
            overflow = scale.enabled and scale.value >= 1  # float16 finds its scale this way: nothing to worry about
            skips.append([step + 1, samples - config.micro_batches * config.batch_size, config.micro_batches * config.batch_size])
            metrics.event(step, "bad_step", loss=repr(loss_value), grad_norm=repr(norm_value), samples=skips[-1][1:])
            say(f"step {step + 1:,}: loss {loss_value}, gradient norm {norm_value}: update skipped"
                + (f", loss scale now {scale.value:g}" if overflow else ""))
            if bad_steps > config.max_bad_steps and not overflow:
                say(f"error: {bad_steps} updates in a row were not finite; the last checkpoint before them is intact")
                metrics.close()
                lock.release()
                return 1
            continue
        lr = learning_rate(config, step + 1)
        optimizer.step(lr, clip * scale.value)
        optimizer.zero_grad()
        step, bad_steps = step + 1, 0

        seconds = time.perf_counter() - step_started
        rate = tokens_per_update / seconds
        metrics.write("train", step, loss=loss_value, grad_norm=norm_value, lr=lr, tokens=samples * config.block_size,
                      tokens_per_s=round(rate, 1), mfu=round(flops * rate / peak, 4) if peak else None, step_ms=round(seconds * 1e3, 3))
        line_time, line_step = line_time + seconds, line_step + 1
        if step == 1 or step % config.log_interval == 0 or step == config.max_iters:
            each = line_time / line_step
            say(f"step {step:,}/{config.max_iters:,} | loss {loss_value:.4f} | lr {lr:.2e} | norm {norm_value:.2f} | "
                f"{each * 1e3:,.1f} ms | {short_number(tokens_per_update / each)} tokens/s | "
                + (f"mfu {flops * tokens_per_update / each / peak:.0%} | " if peak else "")
                + f"{short_time(each * (config.max_iters - step))} left")
            line_time = line_step = 0
            metrics.flush()
        if peak is None:  # not before the first update: a CPU's is measured
            peak = peak_flops(device, precision.dtype)

        last = step == config.max_iters
        if step % config.save_interval == 0 or last:
            save()
        if config.eval_interval and (step % config.eval_interval == 0 or last):
            validate()
        if config.sample_tokens and not stop and (config.sample_interval and step % config.sample_interval == 0 or last):
            show_sample(model, tokenizer, config, device, precision)

    # ------------------------------------------------------------------ the end
    if stop:
        say(f"{stop.name}: saving update {step:,} and leaving")
        metrics.event(step, "signal", signal=stop.name)
    save()
    metrics.close()
    lock.release()
    if stop:
        return EXIT_SIGNAL
    say(f"done: {step:,} updates, {short_number(samples * config.block_size)} tokens, {short_time(time.time() - started)} since the "
        f"start; {run}/ has the curve (loss.png, metrics.jsonl) and the checkpoints")
    return 0


# ---------------------------------------------------------------------------------------- what happens before the first update


def find_resumable(run, config):
    """The checkpoint that this start goes on from, or None for a new run."""
    if config.resume == "never" and int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) == 0:
        return None
    newest = ckpt.newest_complete(run, say)
    if config.resume_step is None:
        return newest
    if newest and newest.step >= config.resume_step and newest.manifest["config"].get("resume_step") == config.resume_step:
        return newest  # the same command again: it has gone back already
    return ckpt.newest_complete(run, say, config.resume_step)


def tell_architecture(config, found, where):
    for sentence in settings.take_architecture(config, found, where):
        say(f"note: {sentence}; the weights' architecture counts")


def check_resumable(resumed, config, dataset):
    """Stops a resume that would change the architecture, the tokenizer or, unasked, the curve; returns allowed changes."""
    saved = resumed.manifest
    if sentence := settings.keep_saved(config, saved["config"]):
        say(f"note: {sentence}")
    changed = settings.compare_with_saved(config, saved["config"], resumed.path)
    old, new = saved["tokenizer"], dataset.tokenizer_identity
    if old and new and old["fingerprint"] != new["fingerprint"]:
        raise UserError(f"{resumed.path} was trained with tokenizer {old['name']} ({old['fingerprint'][:12]}), dataset {config.dataset} is "
                        f"made with {new['name']} ({new['fingerprint'][:12]}): prepare the data with the checkpoint's tokenizer")
    if saved["dataset"] != dataset.fingerprint:
        if not config.allow_change:
            raise UserError(f"dataset {config.dataset} holds other tokens than {resumed.path} was trained on, which changes the curve: give "
                            "the data set it was trained on, or --allow_change to go on with this one")
        changed.append(("dataset", saved["dataset"], dataset.fingerprint))
    for key, before, now in changed:
        say(f"note: {key} was {before}, is {now} from here on")
    return changed


def find_data(name):
    """The folder of a data set; `stdlib`, which needs no network, is prepared on the way."""
    try:
        return find_dataset(name, settings.ROOT)
    except UserError:
        if name != "stdlib":
            raise
    from prepare import prepare

    say("preparing the data set stdlib: this Python's own standard library, as bytes")
    return prepare("stdlib")


def find_tokenizer(dataset, folder, weights, vocab_size):
    """The data set's tokenizer (GPT-2's for bare files of its vocabulary), or None; UserError where the weights have another."""
    tokenizer = None
    if dataset.tokenizer_identity:
        tokenizer = tokenizer_from_identity(dataset.tokenizer_identity, folder)
    elif vocab_size in (50257, 50304):
        try:
            tokenizer = load_tokenizer("gpt2")
        except UserError as error:
            say(f"note: no sample texts: {error}")
    if weights and weights.tokenizer and tokenizer and weights.tokenizer.fingerprint != tokenizer.fingerprint:
        raise UserError(f"{weights.path} was trained with tokenizer {weights.tokenizer.name}, this data set is made with {tokenizer.name}: "
                        "prepare the data with the weights' tokenizer")
    return tokenizer


def make_model_config(config):
    """The ModelConfig of a run, its derived sizes written back to the config; UserError where it cannot be built."""
    keys = ModelConfig.__dataclass_fields__
    model_config = ModelConfig(**{k: getattr(config, k) for k in keys})
    if problems := model_config.problems():
        raise UserError(*problems)
    for key in keys:
        setattr(config, key, getattr(model_config, key))
    return model_config


def check_room(run, model):
    """UserError unless a checkpoint fits on the disk now, rather than after an hour of training."""
    import shutil

    needed, free = ckpt.bytes_needed(model), shutil.disk_usage(run).free
    if free < needed:
        raise UserError(f"a checkpoint takes {needed:,} bytes and {os.path.abspath(run)} has {free:,} free: free some space, or give another "
                        "--out_dir")


def git_revision():
    """The commit this code is at, with + where files were changed; None outside a git checkout."""
    try:
        out = subprocess.run(["git", "describe", "--always", "--abbrev=40", "--dirty=+", "--exclude=*"], cwd=settings.ROOT,
                             capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return out.stdout.strip() or None


def describe(model, config, train_data, val_data, batches, device):
    """The few lines at the start of a log that say what is trained on what."""
    total = sum(p.numel() for p in model.parameters())
    decayed = sum(p.numel() for p in model.parameters() if p.dim() >= 2)
    parts = {"embeddings and head": [n for n, _ in model.named_parameters() if n.startswith(("wte", "wpe", "head"))],
             "attention": [n for n, _ in model.named_parameters() if ".attn." in n],
             "mlp": [n for n, _ in model.named_parameters() if ".mlp." in n]}
    sizes = {n: p.numel() for n, p in model.named_parameters()}
    say(f"\nparameters: {total:,} (" + ", ".join(f"{sum(sizes[n] for n in names):,} {part}" for part, names in parts.items())
        + f"); weight decay on {decayed:,}")
    say(f"data: {train_data.description}" + (f"; validation {min(val_data.n_tokens, config.eval_tokens):,} of {val_data.n_tokens:,} tokens"
                                            if val_data else ""))
    per_epoch = batches.n_windows * config.block_size / config.total_batch_size
    say(f"update: {config.total_batch_size:,} tokens = {config.micro_batches} micro-batches of {config.batch_size} x {config.block_size} "
        f"(GPT-2 124M's reference: 491,520); an epoch is {per_epoch:,.1f} updates, this run {config.max_iters / per_epoch:.2f} epochs")
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{torch.get_num_threads()} threads"
    say(f"device: {device} ({where}), {config.dtype}{', compiled' if config.compile else ''}\n")


def show_sample(model, tokenizer, config, device, precision):
    """Prints a text of the model's so far, from end-of-text on."""
    if tokenizer is None:
        return
    from sample import stream

    say("--- sample")
    with precision.context(device.type):
        stream(model, tokenizer, "", device, max_new_tokens=config.sample_tokens, temperature=0.8, top_k=200, seed=config.seed)
    say("---")


if __name__ == "__main__":
    run_as_script(lambda: main(sys.argv[1:]))
