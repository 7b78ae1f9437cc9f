# PYTHON_ARGCOMPLETE_OK
"""Fine-tune an exported BERT to classify texts or pairs of texts, and score it.

    python tools/finetune_classifier.py --model bert-hf --train train.tsv --dev dev.tsv --output classifier

A file is `.jsonl` or a `.tsv` with a header. --text-keys names one or two columns of text, and --label-key the column
of the class.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import _checkout  # noqa: F401

from neox.arguments import ScriptParser
from neox.errors import ConfigError, DataError, install_command, run_script
from neox.files import check_writable, write_text
from neox.log import setup_logging

Row = dict[str, Any]
# Weights of 16 bits are trained as numbers of 32 bits, because rounding would swallow small steps.
LOADING: Mapping[str, Any] = MappingProxyType({"local_files_only": True, "dtype": "float32"})


def parser() -> argparse.ArgumentParser:
    """Return the parser."""
    p = ScriptParser(description=__doc__)
    add_training(p)
    p.add_argument(
        "--text-keys", nargs="+", default=["sentence1", "sentence2"], metavar="KEY", help="one or two columns"
    )
    p.add_argument("--label-key", default="label", metavar="KEY", help="column of the class")
    return p


def add_training(p: argparse.ArgumentParser) -> None:
    """Add the options of every fine-tuning."""
    p.add_argument("--model", type=Path, required=True, help="directory that tools/convert_to_hf.py wrote")
    p.add_argument("--train", type=Path, required=True, help="file to train on")
    p.add_argument("--dev", type=Path, required=True, help="file to score")
    p.add_argument("--output", type=Path, required=True, help="directory for the fine-tuned model; must not exist")
    p.add_argument("--epochs", type=float, default=3.0, help="passes over the training file (default: 3)")
    p.add_argument("--lr", type=float, default=3e-5, help="highest learning rate (default: 3e-5)")
    p.add_argument("--batch-size", type=int, default=32, help="rows of a step (default: 32)")
    p.add_argument(
        "--warmup", type=float, default=0.1, help="share of the steps in which the learning rate rises (default: 0.1)"
    )
    p.add_argument("--weight-decay", type=float, default=0.01, help="weight decay of AdamW (default: 0.01)")
    p.add_argument("--seq-length", type=int, help="most tokens of an input (default: the model's limit)")
    p.add_argument("--seed", type=int, default=1234, help="seed of batches and new weights (default: 1234)")


def check_training(args: argparse.Namespace) -> None:
    """Check the options of `add_training` before anything is loaded.

    Raises:
        ConfigError: If a value is out of range, the model is no directory, the output exists, or a package is missing.
    """
    if not (args.model / "config.json").is_file():
        raise ConfigError(f"--model {args.model}: no Hugging Face directory; tools/convert_to_hf.py makes one")
    if args.output.exists():
        raise ConfigError(f"--output {args.output} exists: choose another name, or remove it")
    if min(args.epochs, args.lr) <= 0 or args.batch_size < 1 or not 0 <= args.warmup < 1:
        raise ConfigError("--epochs, --lr and --batch-size must be above 0, --warmup from 0 to below 1")
    check_writable(args.output)
    try:
        import accelerate  # noqa: F401
    except ImportError:
        command = install_command("requirements-eval.txt")
        raise ConfigError(f"fine-tuning needs the package accelerate: {command}") from None


def load_tokenizer(args: argparse.Namespace) -> Any:
    """Return the model's tokenizer, limited to --seq-length."""
    from transformers import AutoConfig, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(args.model, local_files_only=True)
    longest = AutoConfig.from_pretrained(args.model, local_files_only=True).max_position_embeddings
    if args.seq_length is not None and not 8 <= args.seq_length <= longest:
        raise ConfigError(f"--seq-length {args.seq_length}: the model takes 8 to {longest} tokens")
    tokenizer.model_max_length = args.seq_length or longest
    if tokenizer.cls_token is None or tokenizer.pad_token is None:
        raise ConfigError(f"{args.model}: its tokenizer has no [CLS] or no [PAD]: is it a BERT?")
    return tokenizer


def fine_tune(args: argparse.Namespace, model: Any, train: list[Row], dev: list[Row], collate: Any) -> Any:
    """Train a model, and return its predictions on `dev` (logits as numpy arrays)."""
    from transformers import Trainer, TrainingArguments

    work = args.output.with_name(f"{args.output.name}.work")
    settings = TrainingArguments(
        output_dir=str(work),
        num_train_epochs=args.epochs,
        learning_rate=args.lr,
        per_device_train_batch_size=args.batch_size,
        per_device_eval_batch_size=args.batch_size,
        warmup_steps=int(args.warmup * args.epochs * -(-len(train) // args.batch_size)),
        weight_decay=args.weight_decay,
        seed=args.seed,
        save_strategy="no",
        logging_steps=max(1, len(train) // args.batch_size // 5),
        report_to=[],
        remove_unused_columns=False,
        disable_tqdm=not sys.stderr.isatty(),
    )
    trainer = Trainer(model=model, args=settings, train_dataset=train, data_collator=collate)  # lists are datasets
    trainer.train()
    return trainer.predict(dev).predictions


def save(args: argparse.Namespace, model: Any, tokenizer: Any, scores: dict[str, float]) -> None:
    """Write model, tokenizer and `scores.json` into --output, which appears when it is complete."""
    partial = args.output.with_name(f"{args.output.name}.work")
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    write_text(partial / "scores.json", json.dumps(scores, indent=1) + "\n")
    partial.rename(args.output)
    shown = [f"{name} {value:.2f}" for name, value in scores.items()]
    print(f"{args.output}: {', '.join(shown)}")


def read_rows(path: Path, keys: list[str]) -> list[Row]:
    """Return the rows of a `.jsonl` or `.tsv` file. Raises DataError, with the line, if a row lacks one of `keys`."""
    is_tsv = path.suffix == ".tsv"
    try:
        with open(path, encoding="utf-8", newline="") as file:
            if is_tsv:
                rows: list[Row] = list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
            else:
                rows = list(map(json.loads, filter(str.strip, file)))
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise DataError(f"{path} is neither JSON lines nor .tsv: {error}") from error
    for number, row in enumerate(rows, start=2 if is_tsv else 1):
        for key in keys:
            if not isinstance(row, dict) or row.get(key) in (None, ""):
                raise DataError(f"{path}:{number}: no {key}; --text-keys and --label-key name the columns")
    if not rows:
        raise DataError(f"{path} holds no row")
    return rows


def main() -> int:
    """Run the tool."""
    args = parser().parse_args()
    setup_logging()
    check_training(args)
    if len(args.text_keys) > 2:
        raise ConfigError("--text-keys: give one column of text, or two")
    keys = [*args.text_keys, args.label_key]
    train = read_rows(args.train, keys)
    dev = read_rows(args.dev, keys)
    labels = sorted(set(column(train, args.label_key)))
    if unknown := {*column(dev, args.label_key)} - {*labels}:
        raise DataError(f"{args.dev} has classes that {args.train} lacks: {', '.join(sorted(unknown))}")
    from transformers import AutoModelForSequenceClassification, DataCollatorWithPadding, set_seed

    tokenizer = load_tokenizer(args)
    set_seed(args.seed)
    model = AutoModelForSequenceClassification.from_pretrained(
        args.model,
        **LOADING,
        num_labels=len(labels),
        id2label=dict(enumerate(labels)),
        label2id=dict(zip(labels, range(len(labels)), strict=True)),
        problem_type="single_label_classification",
    )

    def encoded(rows: list[Row]) -> list[Row]:
        texts = [column(rows, key) for key in args.text_keys]
        inputs = rows_of(tokenizer(*texts, truncation=True))
        for row, label in zip(inputs, column(rows, args.label_key), strict=True):
            row["labels"] = labels.index(label)
        return inputs

    inputs = encoded(dev)
    logits = fine_tune(args, model, encoded(train), inputs, DataCollatorWithPadding(tokenizer))
    right = 0
    for guess, row in zip(logits.argmax(-1), inputs, strict=True):
        right += int(guess) == row["labels"]
    save(args, model, tokenizer, {"accuracy": 100 * right / len(inputs)})
    return 0


def column(rows: list[Row], key: str) -> list[str]:
    """Return a column as words."""
    return [str(row[key]) for row in rows]


def rows_of(fields: Mapping[str, list[Any]]) -> list[Row]:
    """Return the rows of a table that is given as columns."""
    names = list(fields)
    return [dict(zip(names, values, strict=True)) for values in zip(*fields.values(), strict=True)]


if __name__ == "__main__":
    run_script(main)
