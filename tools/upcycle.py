# PYTHON_ARGCOMPLETE_OK
"""Convert a dense checkpoint to a mixture of experts (sparse upcycling, arXiv:2212.05055).

    tools/upcycle.py --input_dir CKPT --output_dir OUT --config_file moe.yml

Each expert is a copy of its block's MLP, and routers are initialized randomly. If the weights of a token's experts add
up to 1 (`moe_norm_topk_prob: true`), the mixture computes the same outputs as the dense network, so its first loss is
the same. The original is not changed. The result has only weights. Continue training with `load: OUT` and
`finetune: true`, or with `no_load_optim: true` to keep the iteration.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import _checkout  # noqa: F401
from torch import Tensor

from neox.architecture import ParameterSpec, build_layer_plan
from neox.arguments import ScriptParser
from neox.checkpoint import checkpoint_at, open_checkpoint, upcycle
from neox.checkpoint.remote.fetching import add_checkpoint_cache
from neox.config import NeoXConfig
from neox.errors import run_script
from neox.log import setup_logging
from neox.model import initial_weights
from neox.plan import architecture_of, config_from_files


def build_parser() -> argparse.ArgumentParser:
    parser = ScriptParser(description=__doc__)
    add = parser.add_argument
    add("--input_dir", required=True, help="a global_stepN directory, or one that holds some, or its address")
    add("--output_dir", required=True, type=Path, help="directory for global_stepN and `latest`")
    add("--config_file", required=True, nargs="+", help="YAML files of the mixture of experts")
    add("--seed", type=int, help="seed of the routers (default: that of the YAML)")
    add(
        "--changes-outputs",
        action="store_true",
        help="accept a router whose weights do not add up to 1: the first loss differs from the dense network's",
    )
    add_checkpoint_cache(parser)
    return parser


def main() -> None:
    args = build_parser().parse_args()
    setup_logging()
    config = config_from_files(args.config_file)
    if args.seed is not None:
        config = config.updated({"seed": args.seed})
    reader = open_checkpoint(checkpoint_at(args.input_dir, args.cache_dir))
    router = InitialRouters(config, reader.vocabulary_rows)
    result = upcycle(reader, args.output_dir, config, router, changes_outputs=args.changes_outputs)
    layers = router.layers
    print(f"{result}: {layers.numel:,} parameters, {layers.active_numel:,} of them active")


class InitialRouters:
    """Initial values of the routers, as in a training from scratch.

    Args:
        config: Configuration of the mixture of experts.
        vocabulary_rows: Number of rows of the embedding.
    """

    def __init__(self, config: NeoXConfig, vocabulary_rows: int) -> None:
        architecture = architecture_of(config)
        self.layers = build_layer_plan(architecture, vocabulary_rows)
        self.weights = initial_weights(config, architecture)

    def __call__(self, index: int, spec: ParameterSpec) -> Tensor:
        """Return the weight of the router in a layer."""
        return self.weights.full(spec, self.layers[index])


if __name__ == "__main__":
    run_script(main)
