"""From a local web server with three hundred pages to token files on which a model trains, by one recipe."""

from __future__ import annotations

import html
import json
import os
import pydoc_data.topics
import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from neox.corpus import read_documents
from neox.data import IndexedDataset

ROOT = Path(__file__).parents[2]
VOCAB = ROOT / "tests" / "golden" / "data" / "tokenizer.json"
ENGLISH, COPIES, EDITED, FOREIGN, BOILERPLATE = 190, 30, 20, 30, 30
GERMAN = (
    "Die Bibliothek enthält viele Bücher über die Geschichte der Stadt.",
    "Im Herbst ziehen die Vögel in großen Schwärmen nach Süden.",
    "Wer den Berg besteigen will, braucht gute Schuhe und etwas Geduld.",
    "Das alte Rathaus wurde nach dem Krieg mit großer Sorgfalt wieder aufgebaut.",
    "Niemand konnte sagen, wann der letzte Zug an diesem Abend gefahren war.",
)
MODEL = {
    "num_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "pipe_parallel_size": 1,
    "num_gpus": 1,
    "seq_length": 64,
    "max_position_embeddings": 64,
    "attention_config": "null",
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 1,
    "train_iters": 8,
    "lr_decay_iters": 8,
    "eval_interval": 8,
    "eval_iters": 1,
    "log_interval": 1,
    "checkpoint_factor": 8,
}


def texts() -> list[str]:
    """The texts of the pages: distinct, copied, edited, of another language, and without a main text."""
    words = " ".join(pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics)).split()
    size = len(words) // ENGLISH
    draw = random.Random(7)
    pages = [" ".join(words[i * size : (i + 1) * size]) for i in range(ENGLISH)]
    pages += [pages[i] for i in range(COPIES)]
    for i in range(EDITED):
        edited = pages[40 + i].split()
        edited[draw.randrange(len(edited))] = "edited"
        pages.append(" ".join(edited))
    pages += [" ".join(draw.choice(GERMAN) for _ in range(40)) for _ in range(FOREIGN)]
    return pages + [f"Please enable JavaScript to view page {i}." for i in range(BOILERPLATE)]


def page(number: int, text: str) -> bytes:
    """A page with the text between a menu and a footer."""
    words = text.split()
    paragraphs = "".join(f"<p>{html.escape(' '.join(words[i : i + 80]))}</p>" for i in range(0, len(words), 80))
    menu = "<nav><a href='/'>Home</a> <a href='/login'>Log in</a></nav><script>var x = 1;</script>"
    footer = "<footer><p>Copyright 2026. All rights reserved.</p></footer>"
    body = f"<body>{menu}<article><h1>Page</h1>{paragraphs}</article>{footer}</body>"
    return f"<!doctype html><html lang='en'><head><title>{number}</title></head>{body}</html>".encode()


@pytest.fixture
def address() -> Iterator[str]:
    pages = [page(number, text) for number, text in enumerate(texts())]

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            name = self.path[1:]
            found = name.isdigit() and int(name) < len(pages)
            self.send_response(200 if found else 404)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.end_headers()
            if found:
                self.wfile.write(pages[int(name)])

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def run(folder: Path, script: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, str(ROOT / script), *arguments],
        **{"cwd": folder, "env": {**os.environ, "OMP_NUM_THREADS": "1"}, "capture_output": True, "text": True},
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize("trains", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_recipe_from_urls_to_a_model(address: str, tmp_path: Path, trains: bool) -> None:
    count = ENGLISH + COPIES + EDITED + FOREIGN + BOILERPLATE
    urls = [f"{address}/{number}" for number in range(count)]
    (tmp_path / "urls.txt").write_text("\n".join([*urls, *urls[:5], f"{address}/photo.jpg", f"{address}/gone"]))
    steps: list[Any] = [
        {"filter-urls": {"input": "urls.txt", "keep_addresses": True}},
        {"download": {"allow_addresses": "127.0.0.1/32", "delay": 0, "per_host": 8}},
        "extract",
        "clean",
        "dedup",
        "shuffle",
        {"tokenize": {"tokenizer_type": "HFTokenizer", "vocab_file": str(VOCAB)}},
    ]
    (tmp_path / "recipe.yml").write_text(json.dumps({"directory": "out", "seed": 3, "steps": steps}))
    run(tmp_path, "tools/web_text.py", "run", "recipe.yml")
    reports = {}
    for path in (tmp_path / "out").glob("*.step.json"):
        report = json.loads(path.read_text())["report"]
        reports[report["step"]] = report
    assert {
        name: r["documents_out"] for name, r in reports.items() if name in ("filter-urls", "download", "extract")
    } == {
        "filter-urls": count + 1,
        "download": count,
        "extract": count,
    }
    assert reports["filter-urls"]["dropped"].keys() == {"duplicate", "extension"}
    assert reports["download"]["dropped"].keys() == {"status 404"}
    dropped = {reason: documents for reason, (documents, _) in reports["clean"]["dropped"].items()}
    assert dropped["language: de"] == FOREIGN
    assert dropped["too few tokens"] == BOILERPLATE
    clean = count - sum(dropped.values())
    assert clean >= 0.9 * (ENGLISH + COPIES + EDITED)  # some topics are tables of operators
    assert reports["dedup"]["documents_in"] == clean
    assert 0 < clean - reports["dedup"]["documents_out"] <= COPIES + EDITED
    kept = [document.text for document in read_documents(tmp_path / "out" / "06-shuffle.jsonl.zst")]
    assert len(set(kept)) == len(kept) == reports["tokenize"]["documents_out"]
    assert not [text for text in kept if "Log in" in text or "Copyright 2026" in text]
    again = run(tmp_path, "tools/web_text.py", "run", "recipe.yml")
    assert again.count("complete before") == len(steps)
    assert len(IndexedDataset(tmp_path / "out" / "07-tokenize_text_document")) == len(kept)
    if not trains:
        return
    settings = {**MODEL, "data_path": "out/07-tokenize_text_document", "vocab_file": str(VOCAB)}
    overrides = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    run(tmp_path, "deepy.py", "train.py", "-d", str(ROOT / "configs"), "quickstart.yml", *overrides)
    lines = (tmp_path / "runs/quickstart/logs/metrics.jsonl").read_text().splitlines()
    losses = [row["train/lm_loss"] for row in map(json.loads, lines) if "train/lm_loss" in row]
    assert len(losses) == 8
    assert losses[-1] < losses[0]
