"""The commands: gpt-neox's flags, one clear line and an exit code for what is wrong."""

import json
import random
import runpy
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from neox.corpus import read_documents
from neox.data import IndexedDataset
from neox.tokenizer import build_tokenizer

ROOT = Path(__file__).parents[3]
VOCAB = ROOT / "tests" / "golden" / "data" / "tokenizer.json"


def tool(name: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, f"tools/{name}.py", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)


def corpus(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def test_the_command_line_of_gpt_neox_is_understood() -> None:
    parse = runpy.run_path(str(ROOT / "tools" / "preprocess_data.py"))["parser"]().parse_args
    line = (
        "--input a.jsonl,b.jsonl.zst --jsonl-keys text body --output-prefix out/x --vocab v.json --merge-file m.txt "
        "--dataset-impl mmap --tokenizer-type GPT2BPETokenizer --append-eod --ftfy --workers 4 --num-docs 10 "
        "--log-interval 5"
    )
    args = parse(line.split())
    assert (args.input, args.jsonl_keys, args.vocab_file) == (["a.jsonl,b.jsonl.zst"], ["text", "body"], "v.json")
    assert (args.append_eod, args.ftfy, args.workers, args.num_docs) == (True, True, 4, 10)
    assert (args.special_in_text, args.accelerator, args.skip_bad) == (None, "auto", 0)


@pytest.mark.parametrize("quoted", [True, False])
def test_a_list_of_shards_over_several_shell_lines(tmp_path: Path, quoted: bool) -> None:
    for name in ("a.jsonl", "b.jsonl", "c d.jsonl"):
        corpus(tmp_path / name, [name])
    if quoted:
        shards = '--input " a.jsonl,b.jsonl, \\ c d.jsonl"'
    else:
        shards = "--input a.jsonl,b.jsonl, \\\n 'c d.jsonl' "
    command = f"{sys.executable} {ROOT}/tools/preprocess_data.py {shards} --json-key text --output-prefix out"
    command += f" --tokenizer-type HFTokenizer --vocab-file {VOCAB} --append-eod --workers 150"
    done = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "--workers 150" in done.stderr
    tokenizer, made = build_tokenizer("HFTokenizer", VOCAB), IndexedDataset(tmp_path / "out_text_document")
    texts = [tokenizer.decode(made[i].tolist()[:-1]) for i in range(len(made))]
    assert texts == ["a.jsonl", "b.jsonl", "c d.jsonl"]


def test_lines_that_only_gpt_neox_parser_reads_are_read_and_counted(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "one", "n": NaN}\n{"text": "two\ttabs", "n": 01}\n{"text": "three"}\n')
    options = ("--output-prefix", tmp_path / "out", "--tokenizer-type", "HFTokenizer", "--vocab", VOCAB)
    done = tool("preprocess_data", "--input", path, *options)
    assert done.returncode == 0, done.stderr
    assert "2 lines" in done.stdout
    tokenizer, made = build_tokenizer("HFTokenizer", VOCAB), IndexedDataset(tmp_path / "out_text_document")
    assert [tokenizer.decode(made[i].tolist()) for i in range(len(made))] == ["one", "two\ttabs", "three"]


def test_the_tokenizer_flags_of_gpt_neox_are_understood() -> None:
    parse = runpy.run_path(str(ROOT / "tools" / "train_tokenizer.py"))["parser"]().parse_args
    args = parse(
        ["--json_input_dir", "data", "--tokenizer_output_path", "t.json", "--tokenizer_type", "BPE", "-v", "5000"]
    )
    assert (args.input, args.output, args.vocab_size, args.kind) == (["data"], "t.json", 5000, "byte-level-bpe")


def test_errors_are_one_line_with_an_exit_code(tmp_path: Path) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"text": "good"}\n{"text": 1}\n')
    base = ["--output-prefix", tmp_path / "out", "--tokenizer-type", "HFTokenizer", "--vocab", VOCAB, "--workers", "1"]
    done = tool("preprocess_data", "--input", bad, *base)
    assert (done.returncode, done.stdout) == (1, "")
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"error: {bad}:2 (byte 17): 'text' is a number, not text.")
    assert "Traceback" not in done.stderr
    done = tool("preprocess_data", "--input", bad, *base, "--skip-bad", "1", "--log-interval", "1")
    assert done.returncode == 0, done.stderr
    assert "1 bad inputs skipped" in done.stdout
    assert f"skipped {bad}:2" in done.stderr
    assert "already complete" in tool("preprocess_data", "--input", bad, *base, "--skip-bad", "1").stdout


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--jsonl-key", "prompt"], "--jsonl-keys prompt"),
        (["--jsonl-key", "data.text", "--filter", "lang=en"], "--text-key data.text --filter lang=en"),
        (["--split", "train", "--config", "sample"], "--split train --config sample"),
    ],
)
def test_the_next_step_after_a_tokenizer_reads_the_same_texts(flags: list[str], words: str) -> None:
    namespace = runpy.run_path(str(ROOT / "tools" / "train_tokenizer.py"))
    args = namespace["parser"]().parse_args(["--input", "a.jsonl", "-v", "300", "--output", str(VOCAB), *flags])
    line = namespace["next_step"](args, [VOCAB])
    assert line.endswith(words)
    parse = runpy.run_path(str(ROOT / "tools" / "preprocess_data.py"))["parser"]().parse_args
    assert parse(line.partition("preprocess_data.py ")[2].split()).input == ["a.jsonl"]


@pytest.mark.parametrize("kind", ["byte-level-bpe", "gpt2"])
def test_from_documents_to_a_tokenizer_to_ids(tmp_path: Path, kind: str) -> None:
    texts = [f"the cat number {i} sat on the mat, didn't it? naïve 😀" for i in range(200)]
    path = corpus(tmp_path / "a.jsonl", texts)
    out = tmp_path / ("tokenizer.json" if kind == "byte-level-bpe" else "gpt2")
    done = tool("train_tokenizer", "--input", path, "--vocab-size", "300", "--output", out, "--kind", kind)
    assert done.returncode == 0, done.stderr
    files = [Path(line) for line in done.stdout.splitlines()]
    before = [file.read_bytes() for file in files]
    assert f"--vocab-file {files[0]}" in done.stderr.splitlines()[-1]
    again = tool("train_tokenizer", "--input", path, "--vocab-size", "301", "--output", out, "--kind", kind)
    assert again.returncode == 2
    assert "--overwrite" in again.stderr
    assert [file.read_bytes() for file in files] == before
    name = "HFTokenizer" if kind == "byte-level-bpe" else "GPT2BPETokenizer"
    vocab = ["--vocab-file", files[0], *(["--merge-file", files[1]] if len(files) > 1 else [])]
    out = tmp_path / "ids"
    done = tool(
        "preprocess_data", "--input", path, "--output-prefix", out, "--tokenizer-type", name, *vocab, "--append-eod"
    )
    assert done.returncode == 0, done.stderr
    tokenizer = build_tokenizer(name, *files)
    dataset = IndexedDataset(tmp_path / "ids_text_document")
    assert dataset[7].tolist() == [*tokenizer.encode(texts[7]), tokenizer.eod]
    assert len(dataset) == 200


def test_ctrl_c_ends_the_training_of_a_tokenizer(tmp_path: Path) -> None:
    letters = random.Random(1).choices("abcdefghij", k=1_000_000)  # one long word: each merge visits all of it
    path = corpus(tmp_path / "a.jsonl", ["".join(letters)])
    command = [sys.executable, "tools/train_tokenizer.py", "--input", path, "--vocab-size", "50000"]
    with subprocess.Popen(
        [*map(str, command), "--output", str(tmp_path / "t.json")], cwd=ROOT, stderr=subprocess.PIPE, text=True
    ) as running:
        assert running.stderr is not None
        assert any("is being trained" in line for line in running.stderr)
        running.send_signal(signal.SIGINT)
        try:
            said = running.communicate(timeout=60)[1]
        finally:
            running.kill()
    assert (running.returncode, "Traceback" in said) == (130, False)
    assert not (tmp_path / "t.json").exists()


def test_a_sample_of_documents_is_seeded(tmp_path: Path) -> None:
    choose = runpy.run_path(str(ROOT / "tools" / "train_tokenizer.py"))["chosen_texts"]
    path = corpus(tmp_path / "a.jsonl", [f"document {i}" for i in range(100)])
    documents = list(read_documents(path))
    chosen = [list(choose(documents, 0.3, None, seed)) for seed in (1, 1, 2)]
    assert chosen[0] == chosen[1] != chosen[2]
    assert 10 < len(chosen[0]) < 60
    assert len(list(choose(documents, 1.0, 0.0001, 1))) < 12


OLD_NAMES = {
    "prepare_data.py": "tools/prepare_data.py",
    "tools/corpora.py": "tools/prepare_data.py",
    "tools/merge_datasets.py": "tools/dataset.py",
    "tools/datasets/corpora.py": "tools/prepare_data.py",
    "tools/datasets/dataset_token_count.py": "tools/dataset.py",
    "tools/datasets/merge_datasets.py": "tools/dataset.py",
    "tools/datasets/preprocess_data.py": "tools/preprocess_data.py",
    "tools/datasets/preprocess_data_with_mask.py": "tools/preprocess_data.py",
    "tools/datasets/preprocess_data_with_chat_template.py": "tools/preprocess_chat.py",
}


@pytest.mark.parametrize("old", OLD_NAMES)
def test_old_names_run_the_new_ones(old: str) -> None:
    done = subprocess.run([sys.executable, old, "--no-such-flag"], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr.startswith(f"usage: {Path(OLD_NAMES[old]).name} ")
    assert (ROOT / OLD_NAMES[old]).is_file()


def test_missing_input_is_refused_and_a_bad_line_is_a_failure(tmp_path: Path) -> None:
    missing = tmp_path / "none.jsonl"
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"text": "good"}\nno JSON\n')
    tokenizer = ("--tokenizer-type", "CharLevelTokenizer")
    for path, status in ((missing, 2), (bad, 1)):
        data = tool("preprocess_data", "--input", path, "--output-prefix", tmp_path / "out", *tokenizer)
        vocabulary = tool("train_tokenizer", "--input", path, "--vocab-size", "300", "--output", tmp_path / "t.json")
        for done in (data, vocabulary):
            assert done.returncode == status, done.stderr
            assert path.name in done.stderr
    none = tool(
        "preprocess_data", "--input", bad, "--output-prefix", tmp_path / "out", "--tokenizer-type", "HFTokenizer"
    )
    assert none.returncode == 2
