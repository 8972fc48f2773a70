"""Trains a GPT. One script for every rung; what differs between rungs is a config file and the command that starts it.

    python train.py                                               the quickstart rung, one process
    python train.py configs/shakespeare_char.py --max_iters=2000
    torchrun --standalone --nproc_per_node=8 train.py configs/gpt2_124m_ddp.py
    python train.py --help                                        every setting

The same command goes on where the run stopped. The order of things: settings, data, the run's folder, model, loop.
"""

import sys

from engine import recovery

recovery.leave_if_ended()

import math
import os
import time

started = time.time()

import torch

from data.order import derive_seed
from engine import checkpoint as ckpt
from engine import config as settings
from engine import hellaswag, processes, recompute
from engine.communication import CommReport
from engine.console import Console
from engine.errors import EXIT_FAILED, EXIT_SIGNAL, UserError, run_as_script
from engine.evaluate import evaluate
from engine.families import open_weights
from engine.feed import open_feed, tell_report
from engine.float8 import use_float8
from engine.lora import add_adapters
from engine.metrics import Metrics, describe, short_number, short_time
from engine.optim import LossScale, learning_rate, make_optimizer
from engine.profiling import Profiler
from engine.resume import check_resumable, find_resumable, load_values, other_machine, outlook, set_beyond_aside, share, tell_architecture, tell_other_run
from engine.saving import Saver
from engine.sync import Sync, shard
from engine.transfer import to_device
from engine.watch import Watch
from model import GPT, rope_table


def main(argv):
    """One process of a run from its command line; returns an exit code."""
    if {"--help", "-h"} & set(argv):
        print(__doc__, settings.reference(), sep="\n")
        return 0
    place = processes.join()  # alone, or one of the processes that torchrun started
    watch = Watch(place)  # signals, hangs
    with recovery.told_once(place, watch), watch:
        return run_rank(argv, place, watch)


def run_rank(argv, place, watch):
    """The run, as rank `place` of it sees it; returns an exit code."""
    say = place.say
    with place.agreement():  # what one rank finds wrong ends all, and is said once
        config = settings.load_config(argv, default_file="configs/quickstart.py")
        if config.plan:
            from engine.plan import print_plan
            return print_plan(config, say)
        if config.rehearse:
            from engine.rehearse import rehearse
            return rehearse(argv, config, place, say, main)
        precision, backend = processes.start(place, config)
    device = place.device
    if config.check:
        from engine.check import check
        processes.connect(place, backend)
        check(place, say)
        return processes.disconnect()

    # ------------------------------------------------------------------ where the weights come from decides the architecture
    run, lock, resumed, weights = config.out_dir, None, None, None
    with place.agreement():
        if place.speaks:
            with recovery.usable(run):
                lock = recovery.RunLock(run) if os.path.isdir(run) else None  # nothing is made before all is checked
                resumed = find_resumable(run, config, place)
    resumed = share(place, resumed)
    with place.agreement():
        if resumed:
            tell_other_run(config, resumed, say)
        if config.init_from != "scratch":
            if resumed:
                tell_architecture(config, resumed.model_config(), resumed.path, say)
            elif config.init_from == "resume":
                raise UserError(f"init_from=resume, but {run} has no checkpoint to go on from: leave it out to start a new run")
            else:
                weights = open_weights(config.init_from, say)
                tell_architecture(config, weights.model_config, weights.path, say)
        settings.resolve_batch(config)
        processes.check_batch(place, config)

    # ------------------------------------------------------------------ data
    feed = open_feed(place, config, weights, resumed)  # readers of samples and their tokenizer; what follows from them is filled in
    batches, tokenizer = feed.train, feed.tokenizer
    with place.agreement():
        model_config = settings.make_model_config(config)
        items = hellaswag.read_items(config.hellaswag, config.hellaswag_items, tokenizer, config.block_size, config.vocab_size) if config.hellaswag else None
        kinds = recompute.choose(config, precision.element)  # of activation checkpointing, one a block
        changed = check_resumable(resumed, config, feed, say) if resumed else []
        profiler, communication = Profiler(config, place, resumed.step if resumed else 0), CommReport(config, place, resumed.step if resumed else 0)
    with place.agreement():
        processes.compare_ranks(place, config, [feed.everything(), items and items.fingerprint])

    # ------------------------------------------------------------------ the run's folder, rank 0's alone but for FSDP's shards
    with place.agreement():
        if place.speaks:
            with recovery.usable(run):
                os.makedirs(os.path.join(run, "checkpoints"), exist_ok=True)
                if not lock:
                    lock = recovery.RunLock(run)
                    if ckpt.list_steps(run):
                        raise UserError(f"another job has just trained in {run}: start again to go on from it, or give another --out_dir")
                if not config.eval_only:
                    ckpt.clear_leftovers(run)
                    set_beyond_aside(run, resumed, config, say)
    with place.agreement():
        processes.check_shared_folder(place, run)
    processes.connect(place, backend)  # from here on collectives work

    # ------------------------------------------------------------------ one model for every rung; the layout is how it is held
    if place.layout == "fsdp":
        with torch.device("meta"):  # no rank ever holds it whole
            model = GPT(model_config)
    else:
        with torch.device(device):  # memory without values: those come next, once
            model = GPT(model_config)
    add_adapters(model, config)  # with lora_rank they alone are trained
    use_float8(model, config)
    for block, kind in zip(model.blocks, kinds):
        block.recompute = kind
    if config.compile:
        processes.compile_blocks(model, device, say)
    if place.layout == "fsdp":
        shard(model, place, config, precision)
        model.to_empty(device="cpu" if config.cpu_offload else device)
        model.rope = rope_table(model_config, device) if model_config.pos == "rope" else None
    optimizer = make_optimizer(model.named_parameters(), config)
    scale = LossScale(precision.loss_scaling)
    # skips: [step, first sample, samples] of every update passed over
    step, samples, skips = load_values(place, model, optimizer, scale, config, resumed, weights)
    with place.agreement():
        if place.speaks:
            ckpt.check_room(run, dict(model.named_parameters()))
    sync = Sync(model, place, config)

    # ------------------------------------------------------------------ what the log starts with
    with recovery.usable(run):
        metrics = Metrics(run, step, active=place.speaks and not config.eval_only)
    gone_back = resumed and config.resume_step not in (None, resumed.manifest["config"].get("resume_step"))  # another curve, another wandb run
    wandb_id = resumed.manifest["wandb_run_id"] if resumed and not gone_back else None
    versions, resolved = settings.versions(device), settings.as_dict(config)
    if place.speaks:
        if not config.eval_only:
            ckpt.write_json(os.path.join(run, "config.json"), {
                "config": resolved, "model": vars(model_config), "versions": versions, "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
                "layout": place.layout, "world_size": place.ranks, "mesh": place.shape})
            wandb_id = metrics.start_trackers(config, resolved, step, wandb_id)
        say(settings.table(config))
        tell_report(feed.train, run, config, say)
        say(describe(model, config, feed, place))
        if config.activation_budget is not None:
            say(recompute.describe(config, precision.element, kinds))
    if resumed:
        say(f"going on from {resumed.path}: update {step:,}, sample {samples:,}{outlook(config, step)}")
        metrics.event(step, "resumed", changed=[[k, old, new] for k, old, new in changed])
        if sentence := other_machine(resumed.manifest, {"device": device.type, "versions": versions, "threads": torch.get_num_threads()}):
            say(f"note: {sentence}")

    saver = Saver(run, place, sync, model, optimizer, config, tokenizer, metrics, lock, watch, resumed.step if resumed else None)
    bad, slow = recovery.BadSteps(config.max_bad_steps), recovery.SlowRanks()

    def save(last=False):
        """False where the weights or the optimizer's state are not finite: such a checkpoint is never written."""
        return saver.save({
            "step": step, "samples": samples, "skips": list(skips), "optimizer_updates": optimizer.updates, "loss_scale": scale.state(), "config": resolved,
            "model": vars(model_config), "tokenizer": tokenizer.identity() if tokenizer else None, "dataset": feed.fingerprint,
            "device": device.type, "threads": torch.get_num_threads(), "layout": place.layout, "world_size": place.ranks, "versions": versions,
            "wandb_run_id": wandb_id}, last)

    def go_back(why):
        """Back to the last checkpoint, whose state is good; False where that has been tried."""
        nonlocal step, samples, skips
        with place.agreement():
            saver.wait()
        with place.agreement():
            good = ckpt.newest_complete(run, say) if place.speaks else None
        good, gone = share(place, good), step
        step, samples, skips = load_values(place, model, optimizer, scale, config, good, weights)
        if not bad.go_back(step, samples):
            say(f"error: {why}, again after going back to update {step:,}: something else is wrong; the checkpoints until there are intact")
            recovery.mark_ended(EXIT_FAILED)  # a restart would come here again
            return False
        say(f"{why}: going back to update {step:,} and passing over those samples")
        watch.step = step
        metrics.go_back(step)
        metrics.event(step, "went_back", why=why, left_at=gone, passing_over=list(bad.ahead.items()))
        return True

    def validate():
        found = evaluate(model, feed.val, config.eval_tokens, config.batch_size, place, precision, watch, answers=config.task == "sft")
        general = evaluate(model, feed.general, config.eval_tokens, config.batch_size, place, precision, watch) if feed.general and found else None
        scores = hellaswag.score(model, items, config.batch_size, place, precision, watch) if items and not watch.stopped else None
        model.train()
        if watch.stopped:
            return
        loss, (_, best) = found["loss"], metrics.best()
        rank = "" if not step else " (best so far)" if loss < best else f", best {best:.4f}"
        say(f"step {step:,}: validation loss {loss:.4f}{rank}" + (f"; {found['accuracy']:.1%} of {found['answers']:,} answers right" if "accuracy" in found else "")
            + (f"; on general text {general['loss']:.4f}" if general else ""))
        if scores:
            say(f"step {step:,}: HellaSwag {scores['acc_norm']:.2%} of {scores['items']:,} right by the mean loss of the ending, {scores['acc']:.2%} by its sum")
            metrics.write("hellaswag", step, **scores)
        if config.eval_only or not place.speaks:
            return
        metrics.write("val", step, **found, **({"general_loss": general["loss"]} if general else {}))
        metrics.flush()
        if loss < best and saver.step == step:
            saver.mark_best(step)
        metrics.draw()

    def show_sample():
        """Prints a text of the model's so far, an answer where it learns to answer. All ranks make it, in step: a sharded model has its layers
        gathered by all."""
        if tokenizer is None:
            return
        from sample import stream

        def write(text):
            watch.moves()
            if place.speaks:
                sys.stdout.write(text)

        text, more = "", dict(temperature=0.8, top_k=200)
        if config.task == "sft":
            ids, end = (feed.val or feed.train).question()
            text, more = tokenizer.decode(ids), dict(ids=ids, stop_token=end, temperature=0.0)
        say("--- sample")
        with precision.context(device.type):
            stream(model, tokenizer, text, device, write=write, max_new_tokens=config.sample_tokens, seed=config.seed, **more)
        say("---")

    def leave(code):
        saver.close()
        metrics.close()
        if place.speaks:
            lock.release()
        processes.disconnect()
        return code

    watch.start(config, step)
    if config.eval_only:
        validate()
        return leave(0)
    saver.mend_best()

    # ------------------------------------------------------------------ the loop
    model.train()
    look = step or feed.general or config.task == "sft"  # what a trained model starts from is worth knowing
    due = config.eval_interval and look and (step % config.eval_interval == 0 or step == config.max_iters)
    if place.from_first(bool(due and step not in metrics.val_losses)):
        validate()  # the run was stopped in it
    console = Console(place, config, metrics, model.flops_per_token(), precision.dtype)
    while step < config.max_iters and not watch.here():
        step_started = time.perf_counter()
        communication.update_begins()
        if count := bad.ahead.pop(samples, 0):
            skips.append([step + 1, samples, count])
            metrics.event(step, "passed_over", samples=[samples, count])
            samples += count
            continue
        losses, labels = [], max(1, batches.labels(samples, config.micro_batches * config.batch_size))  # of the whole update
        for i, j in enumerate(sync.mine):  # this rank's micro-batches of the update's
            if watch.here():  # every rank before the same micro-batch
                break
            x, y, documents = batches.batch(samples + j * config.batch_size, config.batch_size)  # (B, T) each
            if config.dropout:  # a function of what the numbers are for, never of the rank or of what was drawn before
                torch.manual_seed(derive_seed("dropout", config.seed, step + 1, j))
            with sync.micro_step(i):
                with precision.context(device.type):
                    # the sum over the micro-batch's labels, over the labels of the whole update: gradients need no average
                    part = sync.model(to_device(x, device), to_device(y, device), divisor=labels, documents=documents)
                (part * scale.value if scale.enabled else part).backward()
            losses.append(part.detach())
            sync.after_backward(i)  # here gradients meet, where it is not DDP's or FSDP's own doing
        if watch.stopped:
            break  # the unfinished update is dropped
        sync.finish_gradients()
        loss, own_seconds = sync.sum_losses(losses)
        norm = sync.gradient_norm() / scale.value
        clip = (norm / config.grad_clip).clamp(min=1.0) if config.grad_clip else torch.ones_like(norm)
        grad_norm = norm.item()

        first, samples = samples, samples + config.micro_batches * config.batch_size
        finite = math.isfinite(loss) and math.isfinite(grad_norm)  # the same numbers on every rank, so the same decision
        scale.update(finite)
        if not finite:
            optimizer.zero_grad()
            searching = scale.enabled and scale.value >= 1  # float16 finds its scale this way: nothing to worry about
            skips.append([step + 1, first, samples - first])
            metrics.event(step, "bad_step", loss=repr(loss), grad_norm=repr(grad_norm), samples=[first, samples - first],
                          windows=batches.which(first, samples - first))
            say(f"step {step + 1:,}: loss {loss}, gradient norm {grad_norm}: update skipped"
                + (f", loss scale now {scale.value:g}" if scale.enabled else ""))
            if bad.skip(first, samples - first, counts=not searching) and not go_back(f"{bad.in_row} updates in a row were not finite"):
                return leave(EXIT_FAILED)
            continue
        lr = learning_rate(config, step + 1)
        saver.before_update()
        optimizer.step(lr, clip * scale.value)
        optimizer.zero_grad()
        step, bad.in_row = step + 1, 0
        watch.step = step

        seconds = time.perf_counter() - step_started
        metrics.write("train", step, loss=loss, grad_norm=grad_norm, lr=lr, tokens=samples * config.block_size, **console.speed(seconds))
        console.update(step, seconds)
        communication.update_done(step, seconds, metrics)
        profiler.update_done()
        last = step == config.max_iters
        for rank, times in slow.note(own_seconds):
            metrics.event(step, "slow_rank", rank=rank, host=place.hosts[rank], times_median=round(times, 2))
            say(f"warning: rank {rank} on {place.hosts[rank]} takes {times:.1f} times as long as the median rank for its own work, "
                f"{slow.STEPS} updates in a row: the others wait for it")
        if config.check_replicas_interval and step % config.check_replicas_interval == 0:
            sync.check_replicas()
        with watch.unhurried():
            if (step % config.save_interval == 0 or last) and not save(last):
                if not go_back("the weights are not finite"):
                    return leave(EXIT_FAILED)
                continue
            if config.eval_interval and (step % config.eval_interval == 0 or last):
                validate()
            if config.sample_tokens and not watch.stopped and (config.sample_interval and step % config.sample_interval == 0 or last):
                show_sample()

    # ------------------------------------------------------------------ the end
    processes.set_timeout(place, processes.WORK_SECONDS)
    if watch.stopped:
        say(f"{watch.reason}: saving update {step:,} and leaving")
        metrics.event(step, "signal", signal=watch.reason)
        if watch.reason in recovery.FOR_GOOD:
            recovery.mark_ended(EXIT_SIGNAL)
    with place.agreement():
        saver.wait()  # also for what a save in the background ran into
    if not save(last=True):
        say(f"the weights are not finite and are not saved; the last checkpoint is that of update {saver.step or 0:,}")
    leave(0)
    if watch.stopped:
        return EXIT_SIGNAL
    for sentence in metrics.what_it_brought():
        say(sentence)
    say(f"done: {step:,} updates, {short_number(samples * config.block_size)} tokens, {short_time(time.time() - started)} since the "
        f"start; {run}/ has the curve (loss.png, metrics.jsonl) and the checkpoints")
    return 0


if __name__ == "__main__":
    run_as_script(lambda: main(sys.argv[1:]))
