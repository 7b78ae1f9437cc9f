# PYTHON_ARGCOMPLETE_OK
"""Import a Hugging Face directory (such as Pythia, GPT-NeoX-20B or our own exports) as a checkpoint.

    tools/convert_from_hf.py --input_dir pythia-160m --output_dir checkpoints/pythia-160m

It writes checkpoints/pythia-160m/global_step0, `latest`, `config.yml` and the tokenizer. To train on from there, add
the keys of data, batch and optimizer to that `config.yml`.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import _checkout  # noqa: F401

from neox.arguments import ScriptParser
from neox.checkpoint_files.finding import names_of_checkpoints
from neox.convert import find_source, from_hf
from neox.errors import ConfigError, run_script
from neox.log import setup_logging


def build_parser() -> argparse.ArgumentParser:
    parser = ScriptParser(description=__doc__)
    add = parser.add_argument
    add(
        "--input_dir",
        required=True,
        metavar="DIR|ORG/NAME",
        help="a directory with config.json and safetensors or bin files, or a model on the Hugging Face hub",
    )
    add("--revision", help="branch, tag or commit of the model on the hub (default: main)")
    add("--output_dir", required=True, help="a checkpoint directory; global_step0 is written into it")
    add(
        "--overwrite",
        action="store_true",
        help="move the checkpoints and the tokenizer of the output directory to superseded/",
    )
    add("--adapter", metavar="DIR", help="a LoRA adapter of this model that peft has written")
    add(
        "--mtp-num-layers",
        type=int,
        default=0,
        metavar="N",
        help="modules of multi-token prediction (DeepSeek-V3, GLM-4.5) to keep; others are left out (default: 0)",
    )
    add("--model-parallel-size", type=int, default=1, help="tensor ranks of the files; any degree can load them")
    add(
        "--precision",
        "--dtype",
        choices=["auto", "fp32", "fp16", "bf16"],
        default="auto",
        help="precision of the weights (auto: as in the directory)",
    )
    return parser


def refuse_checkpoints(output: Path) -> None:
    """Raise ConfigError for a directory with checkpoints, before which an import would come."""
    if output.is_dir() and (names := names_of_checkpoints(output)):
        raise ConfigError(
            f"{output} holds {names}; choose another directory, or pass --overwrite, which moves them to superseded/"
        )


def main() -> None:
    args = build_parser().parse_args()
    setup_logging()
    output = Path(args.output_dir)
    if not args.overwrite:
        refuse_checkpoints(output)
    source = find_source(args.input_dir, args.revision)
    result = from_hf(
        source.directory,
        args.output_dir,
        name=source.name,
        model_parallel_size=args.model_parallel_size,
        precision=None if args.precision == "auto" else args.precision,
        adapter_dir=args.adapter,
        mtp_num_layers=args.mtp_num_layers,
        overwrite=args.overwrite,
    )
    print(f"{result.checkpoint}: {result.parameters:,} parameters; model config in {result.config_file}")


if __name__ == "__main__":
    run_script(main)
