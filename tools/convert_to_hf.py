# PYTHON_ARGCOMPLETE_OK
"""Export a checkpoint as a Hugging Face directory.

tools/convert_to_hf.py --input_dir CKPT/global_step1000 --config_file configs/my.yml --output_dir my-model
"""

from __future__ import annotations

import argparse
from pathlib import Path

import _checkout  # noqa: F401

from neox.arguments import ScriptParser, add_overrides
from neox.checkpoint import CONFIG, checkpoint_at, with_steps
from neox.checkpoint.remote.fetching import add_checkpoint_cache
from neox.config import NeoXConfig
from neox.convert import choose_family, to_hf, upload, write_peft_adapter
from neox.errors import ConfigError, refusals, run_script
from neox.families import FAMILIES
from neox.log import setup_logging
from neox.plan import config_from_files, model_directory

_OF_WHOLE_MODELS = (
    *("precision", "weights", "trim_vocab", "verify", "verify_text", "tokenizer", "max_shard_size"),
    "upload",
)


def build_parser() -> argparse.ArgumentParser:
    parser = ScriptParser(description=__doc__)
    add = parser.add_argument
    add(
        "--input_dir",
        help="a global_stepN directory, or one that holds some, or its address (default: what --config_file trains)",
    )
    add("--config_file", nargs="+", help="the run's YAML (default: the one in the checkpoint)")
    add("--output_dir", required=True, help="a directory that does not exist yet, or an empty one")
    add_overrides(parser)
    add(
        "--hf-architecture",
        choices=[*FAMILIES],
        help="model_type of the export (default: as imported, else the first that fits)",
    )
    add("--adapter", metavar="BASE", help="write only the LoRA adapters, which peft loads onto this base model")
    add(
        "--precision",
        choices=["auto", "fp32", "fp16", "bf16"],
        default="auto",
        help="precision of the weights (auto: as saved; of the average: as that of the trained weights)",
    )
    add(
        "--weights",
        choices=["trained", "ema"],
        default="trained",
        help="the trained weights, or their average (ema_decay)",
    )
    add("--trim-vocab", action="store_true", help="drop the rows that pad the vocabulary")
    add(
        "--verify",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="compare the logits of both models and report the largest difference (default: up to 300 M parameters)",
    )
    add("--verify-text", help="text to compare on, instead of a built-in one")
    add("--tokenizer", help="tokenizer file, instead of the config's vocab_file")
    add("--max-shard-size", type=float, default=5.0, metavar="GB", help="largest size of one safetensors file")
    add("--average-replicas", action="store_true", help=argparse.SUPPRESS)  # older commands: it is always done now
    add(
        "--overwrite",
        action="store_true",
        help="replace an earlier export; a directory of other files gets the name OUTPUT_DIR.old",
    )
    add("--upload", metavar="USER/NAME", help="upload the result to this repository of the Hugging Face hub")
    add("--revision", metavar="BRANCH", help="with --upload: branch of the repository, which is created")
    add_checkpoint_cache(parser)
    return parser


def saved_config(checkpoint: Path) -> Path:
    """Return the config inside a checkpoint, or the one that `convert_from_hf.py` wrote next to it."""
    saved = checkpoint / CONFIG
    imported = checkpoint.parent / "config.yml"
    for path in (saved, imported):
        if path.is_file():
            return path
    raise ConfigError(f"{saved} does not exist (gpt-neox writes none): give the run's YAML with --config_file")


def choose_input(args: argparse.Namespace) -> tuple[NeoXConfig, Path]:
    """Return the configuration and the checkpoint. Raises ConfigError; for the configuration first."""
    if args.input_dir is None and not args.config_file:
        raise ConfigError("give --input_dir, a directory of checkpoints, or --config_file, the YAML of a run")
    if not args.config_file:
        checkpoint = checkpoint_at(args.input_dir, args.cache_dir)
        return config_from_files([saved_config(checkpoint)], overrides=args.set), checkpoint
    config = config_from_files(args.config_file, overrides=args.set)
    choose_family(config, args.hf_architecture)
    if args.input_dir is not None:
        return config, checkpoint_at(args.input_dir, args.cache_dir)
    directory = model_directory(config)
    if directory is None:
        raise ConfigError("the configuration has neither `load` nor `save`: give --input_dir, the directory to export")
    return config, checkpoint_at(directory, args.cache_dir or config.checkpoint.checkpoint_cache_dir)


def refuse_idle_flags(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Raise ConfigError for flags of whole models next to --adapter, which would change nothing."""
    idle = []
    for name in _OF_WHOLE_MODELS:
        if getattr(args, name) != parser.get_default(name):
            idle.append(f"--{name.replace('_', '-')}")
    if idle:
        raise ConfigError(f"--adapter writes only adapters: leave out {', '.join(idle)}")


def main() -> None:
    parser = build_parser()
    args = parser.parse_args()
    setup_logging()
    if args.revision is not None and not args.upload:
        parser.error("--revision names a branch of the repository of --upload, which is missing")
    if args.adapter:
        refuse_idle_flags(parser, args)
    with refusals():
        config, checkpoint = choose_input(args)
    print(with_steps(checkpoint), flush=True)
    if args.adapter:
        written = write_peft_adapter(
            checkpoint,
            config,
            args.output_dir,
            base=args.adapter,
            overwrite=args.overwrite,
            hf_architecture=args.hf_architecture,
        )
        print(written)
        return
    result = to_hf(
        checkpoint,
        config,
        args.output_dir,
        precision=None if args.precision == "auto" else args.precision,
        trim_vocab=args.trim_vocab,
        verify=args.verify,
        verify_text=args.verify_text,
        tokenizer_file=args.tokenizer,
        max_shard_bytes=int(args.max_shard_size * 1e9),
        overwrite=args.overwrite,
        hf_architecture=args.hf_architecture,
        weights=args.weights,
    )
    export = result.export
    print(f"{result.output}: {export.tensors} tensors, {export.total_bytes:,} bytes in {export.files} file(s)")
    if result.check is None:
        print("not verified (--verify compares the logits of both models)")
    elif result.check.weakness is not None:
        print(f"not verified: {result.check.weakness} ({result.check})")
    else:
        print(f"verified: {result.check}")
    if args.upload:
        print(f"uploaded to {upload(result.output, args.upload, args.revision)}")


if __name__ == "__main__":
    run_script(main)
