"""A loss spike on two data ranks: back to a checkpoint, other samples from there on, and a resume that knows them."""

from dataclasses import replace

import numpy as np
import pytest

from neox.data import IndexedDatasetBuilder
from tests.distributed.spawn import run_ranks
from tests.distributed.training_runs import VOCAB, tiny_plan
from tests.features import feature_of

STEPS, SPIKE, FACTOR = 12, 10, 4


def write_data(directory):
    """Write documents of random tokens, so that every sample is another one."""
    random = np.random.default_rng(1)
    sizes = random.integers(6, 30, 90)
    with IndexedDatasetBuilder(str(directory / "data"), np.uint16) as builder:
        builder.add_documents(random.integers(0, VOCAB, sizes.sum()), sizes)
    return str(directory / "data")


def train(plans, spikes):
    """Train each plan with the loss of some steps raised once.

    Returns (steps in order, samples of each step, losses by step, skipped ranges, last losses) for each plan.
    """
    from neox.data.run_data import build_data_iterators
    from neox.engine import initialize_distributed, open_engine
    from neox.features.ledger.run import Ledger
    from neox.features.loss_spikes.run import LossSpikes
    from neox.features.table import build_features
    from neox.tokenizer import build_tokenizer
    from neox.train import Trainer

    tokenizer = build_tokenizer("CharLevelTokenizer", None)

    def run(plan, raised):
        grid, device = initialize_distributed(plan)
        engine = open_engine(plan, grid, device, build_features)
        steps, samples, losses, left = [], [], {}, list(raised)
        train_batch = engine.train_batch

        def observed(batches):
            read = []
            result = train_batch(item for item in noted(batches, read))
            steps.append(engine.iteration)
            samples.append(read)
            losses[engine.iteration] = result.loss
            if engine.iteration in left:
                left.remove(engine.iteration)
                return replace(result, scores={"lm_loss": 50.0})
            return result

        def open_data():
            return build_data_iterators(
                plan, grid.dp_rank, engine.iteration, tokenizer=tokenizer, ledger=feature_of(engine, Ledger).record
            )

        engine.train_batch = observed
        Trainer(plan, engine, open_data(), open_data).fit()
        spikes = feature_of(engine, LossSpikes)
        last_losses = spikes.state(engine).get("last_losses", ())
        return steps, samples, losses, spikes.skipped_batches, tuple(last_losses)

    return [run(plan, raised) for plan, raised in zip(plans, spikes, strict=True)]


def noted(batches, read):
    """Yield batches, and note their samples."""
    for batch in batches:
        read.extend(tuple(row) for row in batch["tokens"].tolist())
        yield batch


def keys_of_run(tmp_path):
    return {
        "train_iters": STEPS,
        "eval_iters": 0,
        "num_workers": 0,
        "data_path": write_data(tmp_path),
        "split": "1,0,0",
        "save": str(tmp_path / "save"),
        "checkpoint_factor": FACTOR,
        "loss_spike_action": "rollback",
        "loss_spike_factor": 200.0,  # only the losses that are raised
        "loss_spike_window": 8,
        "loss_spike_max_rollbacks": 1,
    }


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_rollback_skips_batches_once_and_a_resume_knows_it(tmp_path, ranks):
    keys = keys_of_run(tmp_path)
    first = tiny_plan(ranks, **keys)
    resumed = tiny_plan(ranks, **{**keys, "load": keys["save"], "iteration": 8})
    everything = []
    for whole, again in run_ranks(ranks, train, [first, resumed], [[SPIKE, SPIKE + 1], []], timeout=300):
        steps, samples, losses, skipped, last_losses = whole
        assert steps == [*range(1, SPIKE + 1), *range(9, STEPS + 1)]  # back to 8; the second spike is only reported
        assert skipped == ((9, SPIKE),)
        seen = {**losses, SPIKE + 1: 50.0}  # the first spike is no loss of this run any more
        assert last_losses == tuple(seen[step] for step in range(STEPS - 7, STEPS + 1))
        everything += [sample for read in samples for sample in read]
        steps, samples_again, losses_again, skipped, last_losses = again
        assert steps == [9, 10, 11, 12]
        assert skipped == ((9, SPIKE),)
        assert samples_again == samples[-4:]
        assert losses_again == {step: losses[step] for step in steps}
        assert last_losses == tuple(losses[step] for step in range(STEPS - 7, STEPS + 1))
    assert len(everything) == len(set(everything)) == (STEPS + SPIKE - 8) * first.batch.train_batch_size


@pytest.mark.slow
def test_each_sample_is_trained_once_or_skipped_while_ranks_change(tmp_path):
    """Two ranks until step 4, one from there on, a spike at step 14, and two ranks again from step 12 on."""
    keys = {**keys_of_run(tmp_path), "train_iters": 16}

    def train_from(ranks, iteration, spikes):
        start = {"load": keys["save"], "iteration": iteration} if iteration else {}
        found = [
            each for (each,) in run_ranks(ranks, train, [tiny_plan(ranks, **keys, **start)], [spikes], timeout=300)
        ]
        by_step = []
        for parts in zip(*(samples for _, samples, *_ in found), strict=True):
            by_step.append(sorted(sample for part in parts for sample in part))
        steps, _, _, skipped, _ = found[0]
        return steps, by_step, skipped

    _, before, _ = train_from(2, 0, [])
    steps, shrunk, skipped = train_from(1, 4, [14])
    assert steps == [*range(5, 15), 13, 14, 15, 16]
    assert skipped == ((13, 14),)
    assert shrunk[:10] == before[4:14]
    steps, grown, skipped = train_from(2, 12, [])
    assert steps == [13, 14, 15, 16]
    assert skipped == ((13, 14),)
    assert grown == shrunk[10:]
    everything = [sample for step in (*before[:4], *shrunk[:10], *grown) for sample in step]
    assert len(everything) == len(set(everything)) == (16 + 2) * 4
