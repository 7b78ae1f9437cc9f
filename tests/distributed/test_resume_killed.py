"""A run that is killed while training and while saving, and asked to end between, gives the undisturbed run's curve."""

import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from neox.config import NeoXConfig
from neox.metrics import curves
from neox.plan import encode_payload, resolve
from neox.preprocess import PreprocessSettings, TokenizerSpec, preprocess
from neox.tokenizer import build_tokenizer, train_tokenizer
from tests.distributed.spawn import free_port, start_script

ROOT = Path(__file__).parents[2]
ITERATIONS = 28
CURVES = [f"{kind}/{name}" for kind in ("train", "validation", "test") for name in ("lm_loss", "sentence_loss")]


def gpt(data: Path) -> dict[str, Any]:
    """Two stages and tied weights; prepare its data."""
    shutil.copytree(ROOT / "tests/golden/data", data)
    return {
        "pipe_parallel_size": 2,
        "pos_emb": "rotary",
        "data_path": "data/small_text_document",
        "tokenizer_type": "HFTokenizer",
        "vocab_file": str(ROOT / "tests/golden/data/tokenizer.json"),
    }


def bert(data: Path) -> dict[str, Any]:
    """Two data ranks; prepare sections of a few pages as documents, which the run passes over several times."""
    pytest.importorskip("sentencex", reason="sentencex (requirements/requirements-corpus.txt) is not installed")
    data.mkdir()
    texts = [
        text
        for page in ("README", "CONTRIBUTING", "neox/README")
        for text in (ROOT / f"{page}.md").read_text().split("\n## ")
    ]
    (data / "pages.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    train_tokenizer(texts, 400, data / "vocab.txt", kind="wordpiece")
    spec = TokenizerSpec("BertWordPieceLowerCase", str(data / "vocab.txt"))
    preprocess(PreprocessSettings((str(data / "pages.jsonl"),), str(data / "pages"), spec, sentences="en"))
    return {
        "objective": "masked_lm",
        "norm_placement": "post",
        "embed_layernorm": True,
        "no_weight_tying": False,
        "pos_emb": "learned",
        "max_position_embeddings": 64,
        "data_path": "data/pages_text_sentence",
        "split": "80,10,10",
        "gradient_accumulation_steps": 2,
        "tokenizer_type": spec.tokenizer_type,
        "vocab_file": spec.vocab_file,
    }


def short_gpt(data: Path) -> dict[str, Any]:
    """The same with fewer steps of fewer micro batches."""
    return {**gpt(data), "gradient_accumulation_steps": 2, "train_iters": 20}


def payload(directory: Path, **changes: object) -> str:
    """Two ranks, dropout, a checkpoint every fourth iteration."""
    flat = {
        "num_layers": 2,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "seq_length": 64,
        "attention_dropout": 0.1,
        "hidden_dropout": 0.1,
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 4,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 1},
        "lr_decay_style": "cosine",
        "train_iters": ITERATIONS,
        "eval_interval": 10,
        "eval_iters": 1,
        "save": f"{directory.name}/checkpoints",
        "load": f"{directory.name}/checkpoints",
        "checkpoint_factor": 4,
        "log_dir": f"{directory.name}/logs",
        "log_interval": 1,
        **changes,
    }
    config = NeoXConfig.from_flat(flat)
    return encode_payload(resolve(config, 2, build_tokenizer(flat["tokenizer_type"], flat["vocab_file"]).vocab_size))


def start(directory: Path, **changes: object) -> list[BaseProcess]:
    """Start both ranks."""
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
    directory.mkdir(exist_ok=True)
    arguments = (ROOT / "train.py", "--payload", payload(directory, **changes))
    return [
        start_script(
            *arguments,
            directory=directory.parent,
            output=directory / f"output_{rank}",
            **{**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(2)
    ]


def wait(processes: list[BaseProcess]) -> list[int | None]:
    """Exit codes of the ranks; None where one still runs after 400 seconds."""
    for process in processes:
        process.join(400)
    return [process.exitcode for process in processes]


def signal_when(processes: list[BaseProcess], condition, signum: int) -> list[int | None]:
    """Send a signal to all ranks as soon as `condition()` holds, and return their exit codes."""
    deadline = time.monotonic() + 400
    while not condition():
        assert time.monotonic() < deadline, "the condition never came"
        assert all(process.is_alive() for process in processes), "ended before the condition came"
        time.sleep(0.001)
    for process in processes:
        os.kill(process.pid, signum)
    return wait(processes)


def reached(directory: Path, iteration: int) -> bool:
    """Whether the metrics file holds an iteration."""
    metrics = directory / "logs" / "metrics.jsonl"
    return metrics.exists() and f'"iteration": {iteration},' in metrics.read_text()


@pytest.mark.parametrize(
    "network", [short_gpt, *(pytest.param(whole, marks=pytest.mark.slow) for whole in (gpt, bert))]
)
def test_killed_and_resumed_equals_undisturbed(tmp_path: Path, network: Callable[[Path], dict[str, Any]]) -> None:
    settings = network(tmp_path / "data")
    begin = partial(start, **settings)
    iterations = settings.get("train_iters", ITERATIONS)
    calm, rough = tmp_path / "calm", tmp_path / "rough"
    assert wait(begin(calm)) == [0, 0], (calm / "output_0").read_text()

    killed = signal_when(begin(rough), lambda: reached(rough, 6), signal.SIGKILL)
    assert killed == [-signal.SIGKILL] * 2
    assert (rough / "checkpoints" / "latest").read_text().strip() == "global_step4"

    def saving_beside_training() -> bool:
        return reached(rough, 8) and any((rough / "checkpoints").glob(".staging-*"))

    ended = signal_when(begin(rough, async_save=True), saving_beside_training, signal.SIGTERM)
    assert ended == [0, 0], (rough / "output_0").read_text()
    saved = int((rough / "checkpoints" / "latest").read_text().strip().removeprefix("global_step"))
    assert saved >= 8
    assert not any((rough / "checkpoints").glob(".staging-*"))
    assert "SIGTERM" in (rough / "output_0").read_text()

    later = iterations - 4  # the last checkpoint but one
    staging = rough / "checkpoints" / f".staging-global_step{later}"
    assert saved < later
    killed = signal_when(begin(rough), staging.exists, signal.SIGKILL)
    assert killed == [-signal.SIGKILL] * 2

    assert wait(begin(rough)) == [0, 0], (rough / "output_0").read_text()
    assert not staging.exists()
    assert curves(rough / "logs" / "metrics.jsonl", CURVES) == curves(calm / "logs" / "metrics.jsonl", CURVES)
    lines = [json.loads(line) for line in (calm / "logs" / "metrics.jsonl").read_text().splitlines()]
    assert [line["iteration"] for line in lines if "train/lm_loss" in line] == list(range(1, iterations + 1))
