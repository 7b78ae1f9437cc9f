"""One result for every number of workers, accelerator, compression and interruption; and nothing hangs."""

import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest
import zstandard

from neox.corpus import LineBlock, read_filter
from neox.data import IndexedDataset
from neox.data.token_files.sidecar import bytes_per_token, read_sidecar
from neox.errors import DataError, NeoXError, TokenizerError
from neox.preprocess import PreprocessSettings, TokenizerSpec, preprocess
from neox.tokenizer import build_tokenizer
from tests.errors import raises_naming

ROOT = Path(__file__).parents[3]
TOOL_PATH = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tools")])}
VOCAB = str(ROOT / "tests" / "golden" / "data" / "tokenizer.json")
SPEC = TokenizerSpec("HFTokenizer", VOCAB)


def documents(count: int, seed: int = 0) -> list[str]:
    chance = random.Random(seed)
    words = ["the", "cat", "naïve", "<|endoftext|>", "def f(x):\n", "日本", "it's", "\n\n", "12.5", "   "]
    return [" ".join(chance.choices(words, k=chance.randint(1, 120))) for _ in range(count)]


def as_lines(texts: list[str], **more: str) -> bytes:
    return b"".join(json.dumps({"text": text, **more}).encode() + b"\n" for text in texts)


def settings(tmp_path: Path, *inputs: Path, **changes: object) -> PreprocessSettings:
    whole = PreprocessSettings(tuple(map(str, inputs)), str(tmp_path / "out"), SPEC, append_eod=True, workers=1)
    return replace(whole, **changes)


def result(prefix: Path, key: str = "text") -> tuple[bytes, bytes]:
    return Path(f"{prefix}_{key}_document.bin").read_bytes(), Path(f"{prefix}_{key}_document.idx").read_bytes()


def left_over(folder: Path) -> set[str]:
    return {p.name for p in folder.iterdir() if p.name.startswith("out") and p.suffix not in (".bin", ".idx")}


def test_ids_are_the_tokenizers_own_with_end_of_document(tmp_path: Path) -> None:
    texts = ["one", "", " ", "two <|endoftext|> three", "\n"]
    (tmp_path / "a.jsonl").write_bytes(as_lines(texts))
    report = preprocess(settings(tmp_path, tmp_path / "a.jsonl"))
    tokenizer = build_tokenizer("HFTokenizer", VOCAB)
    dataset = IndexedDataset(tmp_path / "out_text_document")
    assert bytes_per_token(dataset.prefix) == sum(len(text.encode()) for text in texts) / dataset.num_tokens
    kept = [text for text in texts if text]
    assert [dataset[i].tolist() for i in range(len(dataset))] == [[*tokenizer.encode(text), 0] for text in kept]
    assert dataset.dtype == np.uint16
    assert report.documents == {"text": 4}
    sidecar = read_sidecar(tmp_path / "out_text_document")
    assert sidecar is not None
    assert (sidecar.tokenizer_hash, sidecar.eod, sidecar.documents) == (tokenizer.content_hash, 0, 4)
    assert sidecar.settings["dtype"] == "uint16"
    assert left_over(tmp_path) == {"out_text_document.json"}


def test_one_result_for_all_ways(tmp_path: Path) -> None:
    first, second = documents(900), documents(300, seed=1)
    (tmp_path / "a.jsonl").write_bytes(as_lines(first))
    (tmp_path / "b.jsonl.zst").write_bytes(zstandard.compress(as_lines(second)))
    (tmp_path / "all.jsonl").write_bytes(as_lines(first + second))
    preprocess(settings(tmp_path, tmp_path / "a.jsonl", tmp_path / "b.jsonl.zst", workers=3, accelerator="words"))
    expected = result(tmp_path / "out")
    other = settings(tmp_path, tmp_path / "all.jsonl", output_prefix=str(tmp_path / "other"), accelerator="off")
    preprocess(other)
    assert result(tmp_path / "other") == expected


def test_keys_have_their_own_texts(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(as_lines(["one", "two", "three"], body="other") + b'{"text": "x", "body": ""}\n')
    report = preprocess(settings(tmp_path, tmp_path / "a.jsonl", keys=("text", "body"), append_eod=False))
    assert report.documents == {"text": 4, "body": 3}
    tokenizer = build_tokenizer("HFTokenizer", VOCAB)
    body = IndexedDataset(tmp_path / "out_body_document")
    assert tokenizer.decode(body[2].tolist()) == "other"


@pytest.mark.parametrize("impl", ["cached", "lazy"])
def test_the_other_layout_holds_the_same_ids(tmp_path: Path, impl: str) -> None:
    (tmp_path / "a.jsonl").write_bytes(as_lines(documents(20)))
    preprocess(settings(tmp_path, tmp_path / "a.jsonl"))
    preprocess(settings(tmp_path, tmp_path / "a.jsonl", impl=impl, output_prefix=str(tmp_path / "other")))
    mmap, cached = (
        IndexedDataset(tmp_path / "out_text_document"),
        IndexedDataset(tmp_path / "other_text_document", impl),
    )
    assert (tmp_path / "other_text_document.idx").read_bytes()[:6] == b"TNTIDX"
    assert cached.dtype == np.int32
    assert cached.tokens.tolist() == mmap.tokens.tolist()


def test_ftfy(tmp_path: Path) -> None:
    pytest.importorskip("ftfy", reason="the optional package ftfy is not installed")
    (tmp_path / "a.jsonl").write_bytes(as_lines(["caf\u00c3\u00a9"]))
    preprocess(settings(tmp_path, tmp_path / "a.jsonl", ftfy=True, append_eod=False))
    ids = IndexedDataset(tmp_path / "out_text_document")[0].tolist()
    assert build_tokenizer("HFTokenizer", VOCAB).decode(ids) == "café"


def test_what_filters_leave_out_is_counted_over_interruptions(tmp_path: Path) -> None:
    texts = documents(4000)
    english = as_lines(texts[:3000], lang="en")
    (tmp_path / "a.jsonl").write_bytes(english + b'{"text": 7, "lang": "en"}\n' + as_lines(texts[3000:], lang="de"))
    asked = settings(tmp_path, tmp_path / "a.jsonl", filters=(read_filter("lang=de"),))
    report = preprocess(replace(asked, output_prefix=str(tmp_path / "one")))
    assert (report.documents["text"], report.filtered, report.skipped) == (1000, 3001, 0)
    other = replace(asked, filters=(read_filter("lang=en"),))
    with raises_naming(DataError, "a.jsonl:3001 "):
        preprocess(other)
    resumed = replace(other, skip_bad=1)
    assert preprocess(resumed).filtered == 1000
    assert preprocess(resumed).filtered == 1000  # of the sidecar


def test_bad_input_stops_and_the_run_goes_on_from_there(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    texts = documents(4000)
    data = as_lines(texts[:3000]) + b'{"text": 7}\n' + as_lines(texts[3000:])
    (tmp_path / "a.jsonl").write_bytes(data)
    (tmp_path / "good.jsonl").write_bytes(as_lines(texts))
    asked = settings(tmp_path, tmp_path / "a.jsonl")
    with raises_naming(DataError, "a.jsonl:3001 ", "'text'"):
        preprocess(asked)
    assert "out.progress.json" in left_over(tmp_path)
    assert not (tmp_path / "out_text_document.bin").exists()
    with caplog.at_level("INFO"):
        report = preprocess(replace(asked, skip_bad=1))
    assert "resuming at" in caplog.text
    assert report.skipped == 1
    assert left_over(tmp_path) == {"out_text_document.json"}
    preprocess(settings(tmp_path, tmp_path / "good.jsonl", output_prefix=str(tmp_path / "other")))
    assert result(tmp_path / "out") == result(tmp_path / "other")


def test_finished_work_is_not_done_again_unless_something_changed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(as_lines(["one", "two"]))
    asked = settings(tmp_path, path)
    first = preprocess(asked)
    again = preprocess(asked)
    assert (first.fresh, again.fresh, again.tokens) == (True, False, first.tokens)
    assert preprocess(replace(asked, restart=True)).fresh
    assert preprocess(replace(asked, append_eod=False)).fresh
    caplog.clear()
    path.write_bytes(as_lines(["one", "two", "three"]))
    assert preprocess(asked).documents == {"text": 3}
    (warned,) = [record.getMessage() for record in caplog.records if str(tmp_path / "out_text") in record.getMessage()]
    assert "2 documents" in warned


def test_data_of_another_tokenizer_are_not_replaced_unless_asked(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(as_lines(["one", "two"]))
    asked = settings(tmp_path, path)
    preprocess(asked)
    before = result(tmp_path / "out")
    bytes_of_text = replace(asked, tokenizer=TokenizerSpec("CharLevelTokenizer", None, None))
    with raises_naming(DataError, "out_text_document", "--restart"):
        preprocess(bytes_of_text)
    assert result(tmp_path / "out") == before
    assert preprocess(replace(bytes_of_text, restart=True)).fresh


def test_data_of_other_inputs_are_not_replaced_unless_asked(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.jsonl").write_bytes(as_lines([name, "two"]))
    preprocess(settings(tmp_path, tmp_path / "a.jsonl"))
    before = result(tmp_path / "out")
    other = settings(tmp_path, tmp_path / "b.jsonl")
    with raises_naming(DataError, "out_text_document", "a.jsonl", "--restart"):
        preprocess(other)
    assert result(tmp_path / "out") == before
    assert preprocess(replace(other, restart=True)).fresh


DIES = """
import os, signal, sys
from neox.data import IndexedDatasetBuilder
import neox.preprocess.preprocess_run as run
from neox.preprocess import PreprocessSettings, TokenizerSpec
if __name__ == "__main__":
    run._SECONDS_BETWEEN_STATES = 0
    add, blocks = IndexedDatasetBuilder.add_documents, [0]
    def counted(self, ids, lengths, *rest):
        blocks[0] += 1
        if blocks[0] == int(sys.argv[3]):
            os.kill(os.getpid(), signal.SIGKILL)
        add(self, ids, lengths, *rest)
    IndexedDatasetBuilder.add_documents = counted
    spec = TokenizerSpec("HFTokenizer", sys.argv[4])
    run.preprocess(PreprocessSettings((sys.argv[1],), sys.argv[2], spec, append_eod=True, workers=1))
"""


def test_killed_runs_go_on_to_the_same_bytes(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.zst"
    path.write_bytes(zstandard.compress(as_lines(documents(9000))))
    (tmp_path / "dies.py").write_text(DIES)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    for at in ("2", "3"):
        command = [sys.executable, str(tmp_path / "dies.py"), str(path), str(tmp_path / "out"), at, VOCAB]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
        assert done.returncode == -signal.SIGKILL, done.stderr
    progress = json.loads((tmp_path / "out.progress.json").read_text())
    assert progress["position"]["line"] > 1
    preprocess(settings(tmp_path, path))
    preprocess(settings(tmp_path, path, output_prefix=str(tmp_path / "other")))
    assert result(tmp_path / "out") == result(tmp_path / "other")


def test_a_killed_worker_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(as_lines(documents(3000)))
    preprocess(settings(tmp_path, path, output_prefix=str(tmp_path / "other")))
    send, kills = Connection.send, [1]

    def send_and_kill(connection: Connection, value: object) -> None:
        send(connection, value)
        if isinstance(value, LineBlock) and kills and kills.pop():
            (worker,) = multiprocessing.active_children()
            os.kill(worker.pid, signal.SIGKILL)

    monkeypatch.setattr(Connection, "send", send_and_kill)
    preprocess(settings(tmp_path, path))
    assert "was killed by signal 9" in caplog.text
    assert result(tmp_path / "out") == result(tmp_path / "other")
    kills[:] = [1, 1, 1]
    with raises_naming(DataError, "a.jsonl:", "signal 9"):
        preprocess(settings(tmp_path, path, restart=True))


def test_a_full_disk_is_one_clear_line_and_the_run_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(as_lines(documents(9000)))
    limited = (
        "import resource, runpy, signal, sys\n"
        "if __name__ == '__main__':\n"
        "    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "    resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, resource.RLIM_INFINITY))\n"
        "    runpy.run_path(sys.argv.pop(0), run_name='__main__')\n"
    )
    tool = str(ROOT / "tools" / "preprocess_data.py")
    arguments = ["--input", str(path), "--output-prefix", str(tmp_path / "out"), "--workers", "1", "--append-eod"]
    arguments += ["--tokenizer-type", "HFTokenizer", "--vocab", VOCAB]
    command = [sys.executable, "-c", limited.replace("sys.argv.pop(0)", repr(tool)), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, env=TOOL_PATH)
    assert done.returncode == 1, done.stderr
    assert "cannot" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "out_text_document.bin").exists()
    preprocess(settings(tmp_path, path))
    preprocess(settings(tmp_path, path, output_prefix=str(tmp_path / "other")))
    assert result(tmp_path / "out") == result(tmp_path / "other")


def test_long_lines_are_refused_by_the_memory_flag(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.zst"
    path.write_bytes(zstandard.compress(as_lines(["one", "x " * 40_000_000, "two"])))
    asked = settings(tmp_path, path, memory_mb=400)
    with raises_naming(DataError, "a.jsonl.zst:2 ", "--memory-mb"):
        preprocess(asked)
    assert preprocess(replace(asked, skip_bad=1)).documents == {"text": 2}


def test_requests_that_cannot_be_met(tmp_path: Path) -> None:
    with raises_naming(DataError, "s3://bucket/out"):
        preprocess(settings(tmp_path, tmp_path, output_prefix="s3://bucket/out"))
    (tmp_path / "a.jsonl").write_bytes(as_lines(["one"]))
    (tmp_path / "blank.jsonl").write_bytes(as_lines(["", ""]))
    asked = settings(tmp_path, tmp_path / "a.jsonl")
    cases: list[tuple[dict[str, object], type[NeoXError], str]] = [
        ({"inputs": (str(tmp_path / "none.jsonl"),)}, DataError, "none.jsonl"),
        ({"inputs": ()}, DataError, "--input"),
        ({"inputs": (str(tmp_path / "blank.jsonl"),)}, DataError, "text"),
        ({"keys": ("text", "text")}, DataError, "--jsonl-keys text text"),
        ({"output_prefix": str(tmp_path / "a.jsonl" / "x")}, DataError, str(tmp_path / "a.jsonl" / "x")),
        ({"keys": ("body",)}, DataError, "a.jsonl:1 "),
        ({"memory_mb": 100}, DataError, "--memory-mb"),
        ({"workers": -1}, DataError, "-1"),
        ({"accelerator": "warp"}, TokenizerError, "'warp'"),
        ({"tokenizer": TokenizerSpec("HFTokenizer", "none.json")}, TokenizerError, "none.json"),
    ]
    for changes, kind, name in cases:
        with raises_naming(kind, name):
            preprocess(replace(asked, **changes))
    assert not list(tmp_path.glob("*.bin"))
    assert not list(tmp_path.glob("*.lock"))


SIGNALLED = """
import os, runpy, sys
from neox.data import IndexedDatasetBuilder
if __name__ == "__main__":
    number, add, blocks = int(sys.argv[1]), IndexedDatasetBuilder.add_documents, []
    def counted(self, ids, lengths, *rest):
        add(self, ids, lengths, *rest)
        blocks.append(1)
        if len(blocks) == 2:
            os.kill(os.getpid(), number)
    IndexedDatasetBuilder.add_documents = counted
    sys.argv = sys.argv[2:]
    runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.parametrize(
    ("number", "code"), [pytest.param(signal.SIGTERM, 143, marks=pytest.mark.slow), (signal.SIGINT, 130)]
)
def test_signals_end_a_run_in_order(tmp_path: Path, number: int, code: int) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(as_lines(documents(24000)))
    tool = [str(ROOT / "tools" / "preprocess_data.py"), "--input", str(path), "--output-prefix", str(tmp_path / "out")]
    tool += ["--tokenizer-type", "HFTokenizer", "--vocab", VOCAB, "--append-eod", "--workers", "1"]
    command = [sys.executable, "-c", SIGNALLED, str(int(number)), *tool]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, env=TOOL_PATH)
    assert done.returncode == code, done.stderr
    assert "the same command resumes there" in done.stderr
    assert "Traceback" not in done.stderr
    assert "out.progress.json" in left_over(tmp_path)
    preprocess(settings(tmp_path, path))
    preprocess(settings(tmp_path, path, output_prefix=str(tmp_path / "other")))
    assert result(tmp_path / "out") == result(tmp_path / "other")


MEASURED = """
import sys
from neox import workers
from neox.preprocess import PreprocessSettings, TokenizerSpec, preprocess
def peak(process):
    return next(int(line.split()[1]) for line in open(f"/proc/{process}/status") if line.startswith("VmHWM"))
if __name__ == "__main__":
    stop, peaks = workers._Worker.stop, []
    def stop_measured(worker):
        peaks.append(peak(worker._process.pid))
        stop(worker)
    workers._Worker.stop = stop_measured
    spec = TokenizerSpec("HFTokenizer", sys.argv[3])
    accelerator, memory = sys.argv[4], int(sys.argv[5])
    wanted = PreprocessSettings((sys.argv[1],), sys.argv[2], spec, workers=1, memory_mb=memory, accelerator=accelerator)
    preprocess(wanted)
    print((peak("self") + peaks.pop()) // 1024)
"""


@pytest.mark.slow
@pytest.mark.parametrize("accelerator", ["off", "words", "auto"])
def test_memory_stays_within_the_flag_for_long_documents(tmp_path: Path, accelerator: str) -> None:
    sources = "".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "neox").rglob("*.py")))
    text = (sources * (9_000_000 // len(sources) + 1))[:9_000_000] + "é"
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": text}, ensure_ascii=False) + "\n", encoding="utf-8")
    arguments = [str(tmp_path / "a.jsonl"), str(tmp_path / "out"), VOCAB, accelerator, "520"]
    command = [sys.executable, "-c", MEASURED, *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 520


def test_the_first_ids_are_on_disk_before_a_worker_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.jsonl").write_bytes(as_lines(documents(2000)))
    preprocess(settings(tmp_path, tmp_path / "a.jsonl", output_prefix=str(tmp_path / "whole")))
    seen: list[bytes] = []

    class NoPool:
        def __init__(self, *_: object, **__: object) -> None:
            seen.append((tmp_path / "out_text_document.bin.partial").read_bytes())
            raise DataError("no workers")

    monkeypatch.setattr("neox.preprocess.preprocess_run.WorkerPool", NoPool)
    with raises_naming(DataError, "no workers"):
        preprocess(settings(tmp_path, tmp_path / "a.jsonl"))
    assert seen[0]
    assert result(tmp_path / "whole")[0].startswith(seen[0])
    monkeypatch.undo()
    preprocess(settings(tmp_path, tmp_path / "a.jsonl"))
    assert result(tmp_path / "out") == result(tmp_path / "whole")


@pytest.mark.parametrize("accelerator", ["off", "words"])
def test_text_without_a_place_to_cut_is_refused_by_the_memory_flag(tmp_path: Path, accelerator: str) -> None:
    chance = random.Random(0)
    solid = "".join(chr(chance.randrange(0x4E00, 0x9F00)) for _ in range(200_000))
    (tmp_path / "a.jsonl").write_bytes(as_lines(["one", "two"] * 4000 + [solid, solid[:20_000] + " " + solid[:20_000]]))
    asked = settings(tmp_path, tmp_path / "a.jsonl", memory_mb=350, accelerator=accelerator)
    with raises_naming(DataError, "a.jsonl:8001 ", "600,000", "--memory-mb"):
        preprocess(asked)
    assert preprocess(replace(asked, skip_bad=1)).documents == {"text": 8001}
    more = replace(asked, memory_mb=1500, restart=True)
    assert preprocess(more).documents == {"text": 8002}
