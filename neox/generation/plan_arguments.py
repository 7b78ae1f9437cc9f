"""The arguments by which a script that runs a model learns its plan: from the launcher, or from YAML files itself."""

from __future__ import annotations

import argparse

from neox.config import NeoXConfig, RunPlan, decode_payload, for_inference, load_config, resolve
from neox.errors import ConfigError
from neox.tokenizer import Tokenizer, build_tokenizer

# What a run of one process leaves out of a training configuration: how many ranks there are.
_OF_MANY_RANKS = (
    "pipe_parallel_size",
    "model_parallel_size",
    "global_num_gpus",
    "num_gpus",
    "num_nodes",
    "hostfile",
    "include",
    "exclude",
)


def add_plan_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the launcher's `--payload`, and the files and settings of a run in this process alone."""
    parser.add_argument("files", nargs="*", help="YAML files: the model's, and text_generation.yml or the like")
    parser.add_argument("-d", "--conf_dir", help="directory of the files")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides")
    parser.add_argument("--iteration", type=int, help="checkpoint to load; the newest where left out")
    parser.add_argument("--payload", help="a resolved configuration, from deepy.py")


def plan_from_arguments(args: argparse.Namespace) -> RunPlan:
    """Return the launcher's plan, or that of one process which holds the whole model. Raises ConfigError."""
    if args.payload:
        return decode_payload(args.payload)
    if not args.files:
        raise ConfigError("no configuration: name the model's YAML files, or start this script through deepy.py")
    chosen = [] if args.iteration is None else [f"iteration={args.iteration}"]
    config = one_process(load_config(args.files, conf_dir=args.conf_dir, overrides=[*args.overrides, *chosen]))
    return resolve(config, 1, tokenizer_of(config).vocab_size)


def one_process(config: NeoXConfig) -> NeoXConfig:
    """Return the configuration for one process, whatever number of ranks it trains on."""
    config = for_inference(config)
    flat = {key: value for key, value in config.to_flat().items() if key not in _OF_MANY_RANKS}
    return NeoXConfig.from_flat(flat, config.sources())


def tokenizer_of(config: NeoXConfig) -> Tokenizer:
    """Build the configuration's tokenizer. Raises TokenizerError."""
    keys = config.tokenizer
    return build_tokenizer(keys.tokenizer_type, keys.vocab_file, keys.merge_file)
