"""Supervised fine-tuning beside TRL's `SFTTrainer`: the same losses on the same weights and conversations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from neox.convert import to_hf
from neox.data import IndexedDataset, IndexedDatasetBuilder
from neox.plan import RunPlan
from tests.distributed.spawn import run_ranks
from tests.distributed.training_runs import SEQ, VOCAB, tiny_plan

STEPS = 20
BATCH = 8
RATE = 2e-3


def write_conversations(directory: Path) -> dict[str, Any]:
    """Write conversations of 4 to 17 tokens, of which some at the end are answers, and return the keys that read them.

    The numbers of labels of micro batches differ much, so that a mean over micro batches would be another loss.
    """
    random = np.random.default_rng(1)
    paths = {"train_data_paths": directory / "text", "train_label_data_paths": directory / "label"}
    with (
        IndexedDatasetBuilder(paths["train_data_paths"], np.uint16) as texts,
        IndexedDatasetBuilder(paths["train_label_data_paths"], np.int32) as labels,
    ):
        for number, size in enumerate(random.integers(4, SEQ + 2, 2 * VOCAB).tolist()):
            step, first = divmod(number, VOCAB)  # no conversation begins as another one
            ids = (first + (step + 1) * np.arange(size)) % VOCAB
            prompt = random.integers(1, size)
            texts.add_document(ids)
            labels.add_document(np.where(np.arange(size) < prompt, -100, ids))
    keys: dict[str, Any] = {key: [str(path)] for key, path in paths.items()}
    return {**keys, "pack_impl": "unpacked", "eval_iters": 0}


def train(plan: RunPlan, save: str | None) -> tuple[list[float], list[list[list[int]]]]:
    """Train from initial weights; return the loss of each step, and the rows of tokens of each that this rank read.

    save: directory for a checkpoint of the initial weights.
    """
    from neox.data.run_data import build_data_iterators
    from neox.engine import initialize_distributed, open_engine, save_checkpoint
    from neox.features.table import build_features
    from neox.tokenizer import build_tokenizer

    grid, device = initialize_distributed(plan)
    engine = open_engine(plan, grid, device, build_features)
    if save is not None:
        save_checkpoint(engine, save)
    tokenizer = build_tokenizer("CharLevelTokenizer", None)
    data = build_data_iterators(plan, grid.dp_rank, tokenizer=tokenizer).train
    losses = []
    read = []
    for _ in range(STEPS):
        micro_batches = [next(data) for _ in range(plan.batch.gradient_accumulation_steps)]
        read.append([row for batch in micro_batches for row in batch["tokens"].tolist()])
        losses.append(engine.train_batch(iter(micro_batches)).loss)
    return losses, read


def conversations(directory: Path) -> list[dict[str, list[int]]]:
    texts = IndexedDataset(str(directory / "text"))
    labels = IndexedDataset(str(directory / "label"))
    return [{"input_ids": texts[i].tolist(), "labels": labels[i].tolist()} for i in range(len(texts))]


def in_order_of(rows: list[list[int]], samples: list[dict[str, list[int]]]) -> list[dict[str, list[int]]]:
    """Return the conversation of each row of tokens, which is padded after it. The first two tokens tell."""
    by_start = {tuple(sample["input_ids"][:2]): sample for sample in samples}
    return [by_start[tuple(row[:2])] for row in rows]


def a_tokenizer() -> Any:
    """A tokenizer, which TRL wants for the id of padding only."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = {f"w{number}": number for number in range(VOCAB)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="w0"))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="w0", eos_token="w1")


def losses_of_trl(model: Path, samples: list[dict[str, list[int]]], output: Path, accumulation: int) -> list[float]:
    """Train with TRL on conversations in this order, and return the loss of each step."""
    from datasets import Dataset
    from torch.utils.data import SequentialSampler
    from transformers import AutoModelForCausalLM
    from trl import SFTConfig, SFTTrainer

    class Recorder(SFTTrainer):
        """Trainer that keeps the losses of micro batches unrounded, and the order of the data."""

        micro_losses: list[float]

        def _get_train_sampler(self, dataset: Any = None) -> SequentialSampler:
            return SequentialSampler(dataset if dataset is not None else self.train_dataset)

        def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            loss = super().training_step(*args, **kwargs)
            self.micro_losses.append(float(loss))
            return loss

    settings = SFTConfig(
        output_dir=str(output),
        max_steps=STEPS,
        per_device_train_batch_size=BATCH // accumulation,
        gradient_accumulation_steps=accumulation,
        learning_rate=RATE,
        lr_scheduler_type="constant",
        adam_beta2=0.95,
        weight_decay=0.1,
        max_grad_norm=1.0,
        max_length=SEQ + 1,
        use_cpu=True,
        bf16=False,
        logging_strategy="no",
        disable_tqdm=True,
        save_strategy="no",
        report_to="none",
        seed=7,
    )
    trainer = Recorder(
        model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
        args=settings,
        train_dataset=Dataset.from_list(samples),
        processing_class=a_tokenizer(),
    )
    trainer.micro_losses = []
    trainer.train()
    return np.asarray(trainer.micro_losses).reshape(STEPS, accumulation).sum(1).tolist()


@pytest.mark.slow
def test_losses_are_those_of_sft_trainer(tmp_path: Path) -> None:
    keys = {
        **write_conversations(tmp_path),
        "num_layers": 2,
        "train_batch_size": BATCH,
        "optimizer": {"type": "Adam", "params": {"lr": RATE, "betas": [0.9, 0.95], "eps": 1e-8}},
        "weight_decay": 0.1,
        "gradient_clipping": 1.0,
        "lr_decay_style": "constant",
        "warmup": 0.0,
        "train_iters": STEPS,
        "max_position_embeddings": 2 * SEQ,
        "no_weight_tying": True,
        "num_workers": 0,
    }
    save = tmp_path / "save"
    one_by_one = tiny_plan(1, **keys, train_micro_batch_size_per_gpu=1)
    divided = tiny_plan(2, **keys, train_micro_batch_size_per_gpu=2)
    assert one_by_one.loss_normalization == "tokens"
    ((losses, read),) = run_ranks(1, train, one_by_one, str(save))
    of_two_ranks = run_ranks(2, train, divided, None)[0][0]
    np.testing.assert_allclose(of_two_ranks, losses, atol=1e-5)

    to_hf(save, one_by_one.config, tmp_path / "hf", verify=False)
    rows = [row for step in read for row in step]
    samples = in_order_of(rows, conversations(tmp_path))
    for accumulation in (1, 8):
        theirs = losses_of_trl(tmp_path / "hf", samples, tmp_path / "trl", accumulation)
        np.testing.assert_allclose(losses, theirs, atol=1e-5)
    assert losses[-1] < losses[0] - 0.5, "nothing is learned"
