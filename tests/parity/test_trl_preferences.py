"""Preferences beside TRL: the same tiny Llama, pairs and order in fp32 give the same losses and gradients."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from neox.checkpoint import CheckpointReader
from neox.config import NeoXConfig
from neox.convert import from_hf
from neox.data import IndexedDatasetBuilder
from neox.data.token_files.indexed_dataset import IGNORED
from neox.plan import RunPlan, config_from_files, resolve
from tests.distributed.spawn import run_ranks
from tests.distributed.test_preferences import opened

# trl is imported by the test alone: it takes seconds, and every process of `make test` collects this file
pytestmark = pytest.mark.skipif(
    find_spec("trl") is None, reason="trl (requirements/requirements-dev.txt) is not installed"
)

WORDS = 60
EOS = 0
STEPS = 20
BATCH = 4
BETA = 0.3
CENTER = 0.05
RATE = 2e-3
LENGTH = 64
MICRO_BATCH = {"orpo": 1}
"""Samples of a micro batch of TRL: ORPO's loss of texts is a mean over the tokens of a micro batch."""
KINDS: dict[str, dict[str, Any]] = {
    "sigmoid": {"train_impl": "dpo", "dpo_beta": BETA},
    "hinge": {"train_impl": "dpo", "dpo_beta": BETA, "dpo_loss": "hinge"},
    "ipo": {"train_impl": "dpo", "dpo_beta": BETA, "dpo_loss": "ipo"},
    "orpo": {"train_impl": "orpo", "orpo_beta": BETA},
    "simpo": {"train_impl": "simpo", "simpo_beta": 2.0, "simpo_gamma": 0.5},
    "kto": {"train_impl": "kto", "kto_beta": BETA, "kto_desirable_weight": 1.25},
    "rm": {"train_impl": "rm"},
    "rm-centered": {"train_impl": "rm", "rm_center_coefficient": CENTER},
}


REWARD_MODELS = ("rm", "rm-centered")


def documents() -> list[dict[str, list[int]]]:
    """Prompts with two answers each, which end with EOS."""
    random = np.random.default_rng(4)
    found = []
    for _ in range(STEPS * BATCH):
        lengths = {"prompt": random.integers(1, 9), "pos": random.integers(1, 12), "neg": random.integers(1, 12)}
        found.append({name: random.integers(3, WORDS, length).tolist() for name, length in lengths.items()})
    return found


def write_files(directory: Path, rows: list[dict[str, list[int]]]) -> dict[str, Any]:
    """Write token files, and return the keys that name them."""
    columns: dict[str, list[list[int]]] = {name: [] for name in ("pos", "pos_label", "neg", "neg_label", "reward")}
    for number, row in enumerate(rows):
        for side in ("pos", "neg"):
            answer = [*row[side], EOS]
            columns[side].append(row["prompt"] + answer)
            columns[f"{side}_label"].append([IGNORED] * len(row["prompt"]) + answer)
        columns["reward"].append([-1 if number % 3 else 1] * len(columns["pos"][-1]))
    paths = {}
    for name, own in columns.items():
        paths[name] = [str(directory / name)]
        with IndexedDatasetBuilder(directory / name, np.int32) as builder:
            builder.add_documents(np.concatenate(own), list(map(len, own)))
    pairs = {f"{side}_train_data_paths": paths[side] for side in ("pos", "neg")}
    pairs |= {f"{side}_train_label_data_paths": paths[f"{side}_label"] for side in ("pos", "neg")}
    judged = {"train_data_paths": paths["pos"], "train_label_data_paths": paths["pos_label"]}
    return {"pairs": pairs, "judged": {**judged, "train_reward_data_paths": paths["reward"]}}


def our_steps(plan: RunPlan):
    """On one rank: scores of each step, gradients of the first one, and the order of the pairs."""
    engine, data = opened(plan)
    gradients: dict[str, torch.Tensor] = {}
    step = engine.optimizer.step

    def recording_step(*args: Any, **kwargs: Any) -> Any:
        if not gradients:
            for name, parameter in engine.deepspeed_engine.module.named_parameters():
                gradients[name] = parameter.grad.clone()
        return step(*args, **kwargs)

    engine.optimizer.step = recording_step
    scores = [dict(engine.train_batch(data.train).scores) for _ in range(STEPS)]
    return scores, gradients, data.train.dataset.row_pairs.pairs.tolist()


def llama(kind: str) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

    torch.manual_seed(3)
    model = LlamaForSequenceClassification if kind in REWARD_MODELS else LlamaForCausalLM
    return model(
        LlamaConfig(
            num_labels=1,
            vocab_size=WORDS,
            hidden_size=32,
            intermediate_size=72,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=LENGTH,
            initializer_range=0.15,
            bos_token_id=None,
            eos_token_id=EOS,
            pad_token_id=1,
        )
    )


def tokenizer() -> Any:
    """Tokenizer whose words are the numbers of their ids."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    words = {str(number): number for number in range(3, WORDS)} | {"</s>": EOS, "<pad>": 1, "<unk>": 2}
    backend = Tokenizer(WordLevel(words, unk_token="<unk>"))
    backend.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", pad_token="<pad>", unk_token="<unk>")


def texts_of(kind: str, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of a dataset of TRL. A blank after an answer lets the appended </s> be a word of its own."""
    end = "" if kind in ("orpo", "simpo") else " "  # these two append its id
    texts: list[dict[str, Any]] = []
    for row in rows:
        prompt = " ".join(map(str, row["prompt"]))
        chosen, rejected = (" " + " ".join(map(str, row[side])) + end for side in ("pos", "neg"))
        if kind == "kto":
            texts.append({"prompt": prompt, "completion": chosen, "label": row["good"]})
        else:
            texts.append({"prompt": prompt, "chosen": chosen, "rejected": rejected})
    return texts


def trainer_of(kind: str, directory: Path) -> tuple[Any, Any]:
    """The class of TRL's trainer, and its settings."""
    from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer, RewardConfig, RewardTrainer
    from trl.experimental.cpo import CPOConfig, CPOTrainer
    from trl.experimental.orpo import ORPOConfig, ORPOTrainer

    size = MICRO_BATCH.get(kind, BATCH)
    shared: dict[str, Any] = {
        "output_dir": str(directory),
        "per_device_train_batch_size": size,
        "gradient_accumulation_steps": BATCH // size,
        "max_steps": STEPS,
        "learning_rate": RATE,
        "lr_scheduler_type": "constant",
        "optim": "adamw_torch",
        "weight_decay": 0.0,
        "max_grad_norm": 0.0,
        "logging_steps": 1,
        "report_to": [],
        "save_strategy": "no",
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "disable_tqdm": True,
        "max_length": LENGTH,
    }
    if kind == "kto":
        return KTOTrainer, KTOConfig(beta=BETA, desirable_weight=1.25, **shared)
    if kind in REWARD_MODELS:
        center = CENTER if kind == "rm-centered" else None
        return RewardTrainer, RewardConfig(center_rewards_coefficient=center, **shared)
    if kind == "orpo":
        return ORPOTrainer, ORPOConfig(beta=BETA, **shared)
    if kind == "simpo":
        return CPOTrainer, CPOConfig(loss_type="simpo", beta=2.0, simpo_gamma=0.5, cpo_alpha=0.0, **shared)
    return DPOTrainer, DPOConfig(loss_type=[kind], beta=BETA, **shared)


def trl_steps(kind: str, rows: list[dict[str, Any]], model: Path, directory: Path):
    """Losses of each step of TRL's trainer, gradients of the first one, and TRL's logs."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, TrainerCallback

    losses: list[float] = []
    gradients: dict[str, torch.Tensor] = {}
    base, config = trainer_of(kind, directory)

    class InOrder(base):  # type: ignore[misc, valid-type]
        def _get_train_sampler(self, *_: Any) -> Any:
            return torch.utils.data.SequentialSampler(self.train_dataset)

        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().compute_loss(*args, **kwargs)
            losses.append(loss.item())
            return loss

    class FirstGradients(TrainerCallback):
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if not gradients:
                for name, parameter in kwargs["model"].named_parameters():
                    gradients[name] = parameter.grad.clone()

    auto = AutoModelForSequenceClassification if kind in REWARD_MODELS else AutoModelForCausalLM
    trainer = InOrder(
        model=auto.from_pretrained(model, dtype=torch.float32),
        args=config,
        train_dataset=Dataset.from_list(texts_of(kind, rows)),
        processing_class=tokenizer(),
        callbacks=[FirstGradients()],
    )
    if kind == "kto":
        mismatched = [row["mismatched"] for row in rows]
        trainer.train_dataset = trainer.train_dataset.map(
            lambda _, number: {"KL_completion_ids": mismatched[number]}, with_indices=True
        )
    trainer.train()
    size = BATCH // MICRO_BATCH.get(kind, BATCH)
    steps = [sum(losses[first : first + size]) / size for first in range(0, len(losses), size)]
    logs = [entry for entry in trainer.state.log_history if {"kl", "rewards/accuracies", "accuracy"} & set(entry)]
    return steps, gradients, logs


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_losses_and_gradients_are_those_of_trl(tmp_path: Path, kind: str) -> None:
    model = llama(kind)
    model.save_pretrained(tmp_path / "hf")
    imported = from_hf(tmp_path / "hf", tmp_path / "start")
    rows = documents()
    files = write_files(tmp_path, rows)
    keys = {
        **config_from_files([imported.config_file]).to_flat(),
        **files["judged" if kind == "kto" else "pairs"],
        **KINDS[kind],
        "seq_length": LENGTH,
        "pack_impl": "unpacked",
        "train_micro_batch_size_per_gpu": BATCH,
        "train_iters": STEPS,
        "eval_iters": 0,
        "num_workers": 0,
        "precision": "fp32",
        "optimizer": {"type": "Adam", "params": {"lr": RATE, "betas": [0.9, 0.999], "eps": 1e-8}},
        "weight_decay": 0.0,
        "gradient_clipping": 0.0,
        "lr_decay_style": "constant",
        "warmup": 0.0,
    }
    plan = resolve(NeoXConfig.from_flat(keys), 1, WORDS)
    scores, gradients, order = run_ranks(1, our_steps, plan)[0]

    in_order: list[dict[str, Any]] = []
    for number in order[: STEPS * BATCH]:
        before = rows[(number - 1) % len(rows)]["pos"]
        in_order.append({**rows[number], "good": number % 3 == 0, "mismatched": [*before, EOS]})
    losses, their_gradients, logs = trl_steps(kind, in_order, tmp_path / "hf", tmp_path / "trl")
    assert [step["loss"] for step in scores] == pytest.approx(losses, rel=1e-5, abs=1e-5)
    assert abs(losses[-1] - losses[0]) > 1e-3

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(their_gradients[name])
    model.save_pretrained(tmp_path / "gradients")
    reader = CheckpointReader(from_hf(tmp_path / "gradients", tmp_path / "imported").checkpoint, plan.layers)
    for name, gradient in gradients.items():
        _, index, parameter = name.split(".", 2)
        theirs = reader.full(int(index), parameter)
        assert (gradient[: len(theirs)] - theirs).abs().max().item() <= 1e-5, name
    if kind in REWARD_MODELS:
        for ours, theirs in zip(scores, logs, strict=True):
            assert ours["accuracy"] == pytest.approx(theirs["accuracy"], abs=1e-4)
            for name in ("margin", "min_reward", "mean_reward", "max_reward"):
                assert ours[name] == pytest.approx(theirs[name], abs=1e-5), name
    elif kind not in ("orpo", "kto"):
        for ours, theirs in zip(scores, logs, strict=True):
            assert ours["rewards/accuracies"] == pytest.approx(theirs["rewards/accuracies"], abs=1e-4)
            assert ours["rewards/margins"] == pytest.approx(theirs["rewards/margins"], rel=1e-3, abs=1e-3)
    if kind == "kto":
        names = ("kl", "rewards/chosen", "rewards/rejected", "rewards/margins", "logps/chosen", "logps/rejected")
        seen = set()
        for ours, theirs in zip(scores, logs, strict=True):
            for name in names:
                if name in theirs:
                    seen.add(name)
                    assert ours[name] == pytest.approx(theirs[name], rel=1e-3, abs=1e-3), name
                else:  # the step has no answer of that kind
                    assert ours[name] is None, name
        assert seen == {*names}
