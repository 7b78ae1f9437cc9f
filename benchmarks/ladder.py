"""A ladder on the CPU: five sizes of the quickstart's text, and the sixth, which is predicted and then trained.

python benchmarks/ladder.py /tmp/ladder        # 20 to 60 minutes on one core; resumes where it was ended

It makes the text, a tokenizer of 1,024 ids and the token files in the directory, writes the ladder there, and runs
`tools/ladder.py ladder.yml --train_target`, whose last line states the error of the prediction.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TARGET = """num_layers: 4
hidden_size: 96
num_attention_heads: 6
seq_length: 128
max_position_embeddings: 128
pos_emb: rotary
rotary_pct: 0.25
no_weight_tying: true
gpt_j_residual: true
init_method: small_init
output_layer_init_method: wang_init
hidden_dropout: 0
attention_dropout: 0
num_gpus: 1
train_micro_batch_size_per_gpu: 8
precision: fp32
optimizer: {type: Adam, params: {lr: 5.0e-3, betas: [0.9, 0.95], eps: 1.0e-8}}
weight_decay: 0.1
gradient_clipping: 1.0
min_lr: 5.0e-4
lr_decay_style: cosine
warmup: 0.1
train_iters: 2100
lr_decay_iters: 2100
eval_interval: 2100
eval_iters: 60
checkpoint_factor: 500
data_path: data/small_text_document
split: 969,30,1
tokenizer_type: HFTokenizer
vocab_file: data/tokenizer.json
log_interval: 100
steps_per_print: 1000
"""
LADDER = """configs: [target.yml]
sizes: [4.0e+4, 7.0e+4, 1.15e+5, 1.9e+5, 3.1e+5]
tokens_per_parameter: 4
batch_size: 8
learning_rate: {factors: [0.5, 1, 2, 4, 8]}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    directory = parser.parse_args().directory
    directory.mkdir(parents=True, exist_ok=True)

    def tool(name: str, *words: str) -> None:
        subprocess.run([sys.executable, str(ROOT / "tools" / name), *words], cwd=directory, check=True)

    if not (directory / "data" / "small_text_document.idx").exists():
        tool("quickstart_corpus.py", "--out", "data/text")
        shards = ",".join(str(path) for path in sorted((directory / "data" / "text").glob("*.zst")))
        tool("train_tokenizer.py", "--input", shards, "--vocab-size", "1024", "--output", "data/tokenizer.json")
        words = ("--append-eod", "--tokenizer-type", "HFTokenizer", "--vocab-file", "data/tokenizer.json")
        tool("preprocess_data.py", "--input", shards, "--output-prefix", "data/small", *words)
    (directory / "target.yml").write_text(TARGET)
    (directory / "ladder.yml").write_text(LADDER)
    tool("ladder.py", "ladder.yml", "--train_target")


if __name__ == "__main__":
    main()
