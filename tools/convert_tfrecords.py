# PYTHON_ARGCOMPLETE_OK
"""Convert BERT's pretraining data in TFRecords (Google's, Megatron's) to a token dataset, without TensorFlow.

python tools/convert_tfrecords.py --input data/*.tfrecord --output-prefix data/bert_text_sentence --vocab-file vocab.txt
"""

from __future__ import annotations

import argparse

import _checkout  # noqa: F401

from neox.arguments import ScriptParser
from neox.errors import run_script
from neox.log import setup_logging
from neox.preprocess.settings import TokenizerSpec
from neox.preprocess.tfrecords import convert_tfrecords
from neox.tokenizer import TOKENIZER_TYPES


def parser() -> argparse.ArgumentParser:
    """Return the parser."""
    p = ScriptParser(description=__doc__)
    p.add_argument("--input", required=True, nargs="+", help="TFRecord files")
    p.add_argument("--output-prefix", required=True, help="path of the dataset without .bin")
    p.add_argument("--tokenizer-type", default="BertWordPieceLowerCase", choices=TOKENIZER_TYPES)
    p.add_argument("--vocab-file", required=True, help="vocabulary whose ids the records hold")
    p.add_argument("--skip-bad", type=int, default=0, metavar="N", help="skip up to N bad records")
    return p


def main() -> int:
    """Run the tool."""
    args = parser().parse_args()
    setup_logging()
    spec = TokenizerSpec(args.tokenizer_type, args.vocab_file)
    documents, tokens = convert_tfrecords(args.input, args.output_prefix, spec, skip_bad=args.skip_bad)
    print(f"{args.output_prefix}: {documents:,} documents, {tokens:,} tokens")
    return 0


if __name__ == "__main__":
    run_script(main)
