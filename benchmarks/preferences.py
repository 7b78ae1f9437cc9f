"""Speed of DPO beside TRL's on pairs of mixed lengths: one step of each in turn, in one process.

    python benchmarks/preferences.py --steps 12 --output benchmarks/results/preferences.json

Both train the same small Llama in fp32 with AdamW and stored log-probabilities of the reference. TRL pads the answers
of a batch to the longest one; rows here hold whole pairs. A step's figures are its time for each pair,
and the processor's time, which other work on the machine changes less.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from neox.config import NeoXConfig
from neox.convert import from_hf
from neox.data import IndexedDatasetBuilder
from neox.data.run_data import build_data_iterators
from neox.data.token_files.indexed_dataset import IGNORED
from neox.engine import initialize_distributed, open_engine
from neox.features.table import build_features
from neox.plan import config_from_files, resolve
from neox.tokenizer import build_tokenizer

VOCAB = 4096
EOS = 0
LONGEST = 448
ROW = 1024
ROWS = 2


def pairs_of_mixed_lengths(count: int) -> list[dict[str, list[int]]]:
    """Return prompts and answers of random tokens, whose lengths are spread as those of chats are (log-normal)."""
    random = np.random.default_rng(6)
    found = []
    for _ in range(count):
        prompt, chosen, rejected = np.clip(random.lognormal((3.6, 4.2, 4.2), 0.8), 4, LONGEST // 2).astype(int)
        lengths = {"prompt_ids": prompt, "chosen_ids": chosen, "rejected_ids": rejected}
        pair = {name: random.integers(3, VOCAB, length).tolist() for name, length in lengths.items()}
        pair["chosen_ids"].append(EOS)
        pair["rejected_ids"].append(EOS)
        found.append(pair)
    return found


def our_engine(model: Path, directory: Path, pairs: list[dict[str, list[int]]], steps: int) -> tuple[Any, Any]:
    """Return our engine and its batches."""
    keys: dict[str, Any] = {}
    for side, name in (("pos", "chosen_ids"), ("neg", "rejected_ids")):
        tokens = [pair["prompt_ids"] + pair[name] for pair in pairs]
        labels = [[IGNORED] * len(pair["prompt_ids"]) + pair[name] for pair in pairs]
        for key, documents in ((f"{side}_train_data_paths", tokens), (f"{side}_train_label_data_paths", labels)):
            keys[key] = [str(directory / key)]
            with IndexedDatasetBuilder(directory / key, np.int32) as builder:
                builder.add_documents(np.concatenate(documents), list(map(len, documents)))
    imported = from_hf(model, directory / "start")
    flat = {
        **config_from_files([imported.config_file]).to_flat(),
        **keys,
        "train_impl": "dpo",
        "seq_length": ROW,
        "train_micro_batch_size_per_gpu": ROWS,
        "train_iters": steps,
        "eval_iters": 0,
        "precision": "fp32",
        "compile_layers": False,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-5, "betas": [0.9, 0.999], "eps": 1e-8}},
        "weight_decay": 0.0,
        "gradient_clipping": 1.0,
    }
    plan = resolve(NeoXConfig.from_flat(flat), 1, VOCAB)
    grid, device = initialize_distributed(plan)
    engine = open_engine(plan, grid, device, build_features)
    tokenizer = build_tokenizer("CharLevelTokenizer", None)
    return engine, build_data_iterators(plan, 0, 0, tokenizer=tokenizer, **engine.data_arguments()).train


def save_llama(directory: Path) -> None:
    """Write the model that both sides train."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=6,
        num_attention_heads=4,
        max_position_embeddings=ROW,
        bos_token_id=None,
        eos_token_id=EOS,
        pad_token_id=1,
    )
    LlamaForCausalLM(config).save_pretrained(directory)


def trl_trainer(model: Path, directory: Path, pairs: list[dict[str, list[int]]], batch: int, callback: Any) -> Any:
    """Return TRL's trainer of the pairs in their order."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM
    from trl import DPOConfig, DPOTrainer

    class InOrder(DPOTrainer):
        def _get_train_sampler(self, *_: Any) -> Any:
            return torch.utils.data.SequentialSampler(self.train_dataset)

        def _prepare_dataset(self, dataset: Any, *_: Any) -> Any:
            return dataset

    config = DPOConfig(
        output_dir=str(directory),
        per_device_train_batch_size=batch,
        max_steps=len(pairs) // batch,
        learning_rate=1e-5,
        max_grad_norm=1.0,
        precompute_ref_log_probs=True,
        max_length=None,
        optim="adamw_torch",
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        ddp_find_unused_parameters=False,
        disable_tqdm=True,
    )
    return InOrder(
        model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
        args=config,
        train_dataset=Dataset.from_list(pairs),
        processing_class=_tokenizer(),
        callbacks=[callback],
    )


def compare(steps: int, batch: int, directory: Path) -> dict[str, Any]:
    """Return the median times for a pair of both sides in milliseconds, and the share of padding."""
    from transformers import TrainerCallback

    save_llama(directory / "hf")
    pairs = pairs_of_mixed_lengths(steps * batch)
    engine, batches = our_engine(directory / "hf", directory, pairs, steps)
    times: dict[str, list[np.ndarray]] = {"neox": [], "trl": []}
    padding: dict[str, list[float]] = {"neox": [], "trl": []}

    class InTurn(TrainerCallback):
        began = now()

        def on_step_begin(self, *_: Any, **kwargs: Any) -> None:
            self.began = now()

        def on_step_end(self, args: Any, state: Any, *_: Any, **kwargs: Any) -> None:
            times["trl"].append((now() - self.began) / batch)
            step = state.global_step - 1
            padding["trl"].append(padding_of(pairs[step * batch : (step + 1) * batch]))
            rows = range(step * ROWS, (step + 1) * ROWS)
            numbers = np.concatenate([batches.dataset.numbers(row) for row in rows])
            began = now()
            engine.train_batch(batches)
            times["neox"].append((now() - began) / len(numbers))
            padding["neox"].append(1 - batches.dataset.pairs.sizes[numbers].sum() / (ROW * ROWS))

    trl_trainer(directory / "hf", directory / "trl", pairs, batch, InTurn()).train()
    result: dict[str, Any] = {"steps": steps, "pairs of a step of TRL": batch, "threads": torch.get_num_threads()}
    for side in times:
        wall, processor = np.median(times[side][2:], axis=0) * 1000
        result[side] = {
            "ms for a pair": round(wall, 2),
            "processor's ms for a pair": round(processor, 2),
            "padding": round(statistics.mean(padding[side]), 3),
        }
    for measure in ("ms for a pair", "processor's ms for a pair"):
        result[f"faster by, in {measure}"] = round(result["trl"][measure] / result["neox"][measure], 2)
    return result


def now() -> np.ndarray:
    """Return the time and this process's processor time in seconds [2]."""
    return np.array([time.perf_counter(), time.process_time()])


def padding_of(pairs: list[dict[str, list[int]]]) -> float:
    """Return the share of padding if all answers of some pairs are as long as the longest one."""
    lengths = []
    for pair in pairs:
        for name in ("chosen_ids", "rejected_ids"):
            lengths.append(len(pair["prompt_ids"]) + len(pair[name]))
    return 1 - sum(lengths) / (max(lengths) * len(lengths))


def _tokenizer() -> Any:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(WordLevel({"</s>": EOS, "<pad>": 1, "<unk>": 2}, unk_token="<unk>"))
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", pad_token="<pad>", unk_token="<unk>")


def main() -> None:
    """Run the comparison and print its result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12, help="steps of each side; the first two are not counted")
    parser.add_argument("--batch", type=int, default=8, help="pairs of a step of TRL")
    parser.add_argument("--output", type=Path, help="file for the result")
    args = parser.parse_args()
    for name, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "127.0.0.1")):
        os.environ.setdefault(name, value)
    os.environ.setdefault("MASTER_PORT", "29653")
    with tempfile.TemporaryDirectory() as directory:
        result = compare(args.steps, args.batch, Path(directory))
    text = json.dumps(result, indent=1)
    print(text)
    if args.output is not None:
        args.output.write_text(text + "\n")


if __name__ == "__main__":
    main()
