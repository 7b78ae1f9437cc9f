# PYTHON_ARGCOMPLETE_OK
"""Give a checkpoint rows for new tokens of its tokenizer.

    tools/resize_vocabulary.py --input_dir CKPT --output_dir OUT --config_file run.yml
    tools/resize_vocabulary.py --input_dir CKPT --output_dir OUT --added-tokens "<|user|>" "<|assistant|>"

New tokens are those that the tokenizer has and the checkpoint has no rows for, such as `added_tokens` in the YAML. The
embedding gets a row for each, and so does a head of its own. Rows of old tokens stay as they are. The original stays as
it is, too. The result has only weights: states of the optimizer, also those of old parameters, are dropped. Train on
with `finetune: true`, or with `no_load_optim: true` to keep the iteration.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import _checkout  # noqa: F401

from neox.arguments import ScriptParser, add_overrides
from neox.checkpoint import (
    CONFIG,
    CheckpointReader,
    VocabularySize,
    checkpoint_at,
    mean_of_all,
    mean_of_pieces,
    open_checkpoint,
    resize_vocabulary,
    rows_of_file,
)
from neox.checkpoint.derived.resizing import NewRows
from neox.checkpoint.remote.fetching import add_checkpoint_cache
from neox.config import NeoXConfig
from neox.convert.hf_tokenizer import write_grown_tokenizer
from neox.errors import ConfigError, run_script
from neox.log import setup_logging
from neox.plan import config_from_files, padded_vocabulary
from neox.tokenizer import (
    HFTokenizer,
    Tokenizer,
    identify_configured,
    is_larger,
    other_tokenizer,
    positions,
    saved_tokenizer_identity,
    tokenizer_of,
)


def build_parser() -> argparse.ArgumentParser:
    parser = ScriptParser(description=__doc__)
    add = parser.add_argument
    add("--input_dir", required=True, help="a global_stepN directory, or one that holds some, or its address")
    add(
        "--output_dir",
        required=True,
        type=Path,
        help="global_stepN, `latest` and the files of the tokenizer are written into it",
    )
    add("--config_file", nargs="+", help="the run's YAML (default: that in the checkpoint)")
    add("--added-tokens", nargs="+", default=[], metavar="TOKEN", help="tokens after those of the YAML's added_tokens")
    add_overrides(parser)
    add(
        "--rows",
        default="mean",
        metavar="{mean,pieces,FILE}",
        help="what new rows are: the mean of all old rows (default); the mean of the rows of the pieces into which the "
        "old tokenizer cuts the token; or tensors of a file of torch.save, by the names of parameters",
    )
    add("--old-vocab-size", type=int, metavar="N", help="ids in use, for a checkpoint that does not say it")
    add_checkpoint_cache(parser)
    return parser


def main() -> None:
    args = build_parser().parse_args()
    setup_logging()
    path = checkpoint_at(args.input_dir, args.cache_dir)
    config = config_of(path, args.config_file, args.added_tokens, args.set)
    tokenizer = tokenizer_of(config)
    reader = open_checkpoint(path, config=config if args.config_file else None)
    identity = identify_configured(config, tokenizer)
    refuse_other_tokenizer(path, config, tokenizer)
    before = old_size(reader, args.old_vocab_size)
    padded = padded_vocabulary(config, tokenizer.vocab_size, reader.tp_size)
    size = VocabularySize(before, tokenizer.vocab_size, padded)
    rows = new_rows(args.rows, size, tokenizer)
    stored = config.updated({}, without=["allow_other_tokenizer"])  # the result has this tokenizer's identity
    result = resize_vocabulary(reader, args.output_dir, size, rows, config=stored.to_flat(), tokenizer=identity)
    if isinstance(tokenizer, HFTokenizer):
        assert config.tokenizer.vocab_file is not None, "such tokenizers have a file"
        write_grown_tokenizer(tokenizer, Path(config.tokenizer.vocab_file), args.output_dir)
    print(f"{result}: {size.after - size.before} new tokens, {size.after} in all, padded to {size.padded}")
    if config.tokenizer.added_tokens:
        print(f"added_tokens: {list(config.tokenizer.added_tokens)}")


def config_of(
    path: Path, files: list[str] | None, added_tokens: list[str], overrides: Sequence[str] = ()
) -> NeoXConfig:
    """Return the configuration of the result: with all added tokens, and without a size of the embedding.

    Args:
        path: The checkpoint.
        files: Configuration files; None for the one in the checkpoint.
        added_tokens: Further added tokens.
        overrides: Values of `--set`.

    Raises:
        ConfigError: If there is no configuration, or it is wrong.
    """
    if files is None:
        stored = path / CONFIG
        if not stored.is_file():
            raise ConfigError(f"{path} holds no configuration; name the run's with --config_file")
        files = [str(stored)]
    config = config_from_files(files, overrides=overrides)
    tokens = [*config.tokenizer.added_tokens, *added_tokens]
    return config.updated({"added_tokens": tokens}, without=["padded_vocab_size"])


def refuse_other_tokenizer(path: Path, config: NeoXConfig, tokenizer: Tokenizer) -> None:
    """Raise ConfigError if the ids that a checkpoint has rows for mean other tokens in a tokenizer."""
    saved = saved_tokenizer_identity(path)
    if saved is not None and is_larger(tokenizer, saved):
        return
    difference = other_tokenizer(config, tokenizer, path)
    if difference is not None:
        raise ConfigError(difference)


def old_size(reader: CheckpointReader, given: int | None) -> int:
    """Return the number of ids that a checkpoint has rows for. Raises ConfigError if it is not known."""
    stored = reader.args.get("vocab_size")
    if stored is not None:
        stored = min(stored, reader.vocabulary_rows)  # imports may name more ids than there are rows
    if given is not None and stored not in (None, given):
        raise ConfigError(f"--old-vocab-size {given}: {reader.path} has rows for {stored} ids; leave the flag out")
    size = stored if given is None else given
    if size is None:
        raise ConfigError(f"{reader.path} does not say how many of its rows are in use: give --old-vocab-size")
    return int(size)


def new_rows(kind: str, size: VocabularySize, tokenizer: Tokenizer) -> NewRows:
    """Return the rows of new tokens.

    Args:
        kind: Value of `--rows`.
        size: Size of the vocabulary.
        tokenizer: The tokenizer with new tokens.

    Raises:
        ConfigError: If there is no such file, or the tokenizer has no pieces.
    """
    number = size.after - size.before
    if kind == "mean":
        return mean_of_all(number)
    if kind == "pieces":
        if not isinstance(tokenizer, HFTokenizer):
            raise ConfigError(f"--rows pieces needs a tokenizer of Hugging Face's form; {tokenizer.name} has none")
        old = tokenizer.with_vocabulary(size.before)
        pieces = []
        for new in range(size.before, size.after):
            token = tokenizer.backend.id_to_token(new)
            pieces.append(positions.continuation(old, token))
            if not pieces[-1]:
                raise ConfigError(f"--rows pieces: the old tokenizer has no pieces for {token!r}; use mean or a file")
        return mean_of_pieces(pieces)
    if not Path(kind).is_file():
        raise ConfigError(f"--rows {kind}: is neither mean nor pieces nor a file")
    return rows_of_file(Path(kind), number)


if __name__ == "__main__":
    run_script(main)
