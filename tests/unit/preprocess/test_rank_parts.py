"""Many ranks make what one makes."""

import json
import random
import threading
from dataclasses import replace
from pathlib import Path

from neox.corpus import read_filter
from neox.data.token_files.sidecar import read_sidecar
from neox.errors import DataError
from neox.preprocess import PreprocessSettings, RankInfo, TokenizerSpec, preprocess, preprocess_on_rank
from neox.preprocess.rank_parts import split_files
from tests.errors import raises_naming

VOCAB = str(Path(__file__).parents[2] / "golden" / "data" / "tokenizer.json")


def write(path: Path, count: int) -> Path:
    chance = random.Random(count)
    texts = (" ".join(chance.choices(["word", "naïve", "\n", "12"], k=20)) for _ in range(count))
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def test_files_are_split_into_neighbours_of_equal_size(tmp_path: Path) -> None:
    files = [str(write(tmp_path / f"{i}.jsonl", count)) for i, count in enumerate((10, 10, 40, 5, 5, 10))]
    groups = split_files(files, 3)
    assert [file for group in groups for file in group] == files
    assert [len(group) for group in groups] == [2, 1, 3]
    assert [len(group) for group in split_files(files[:1], 3)] == [0, 1, 0]


def run_ranks(settings: PreprocessSettings, ranks: int) -> None:
    threads = [
        threading.Thread(target=preprocess_on_rank, args=(settings, RankInfo(rank, ranks))) for rank in range(ranks)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()


def test_three_ranks_make_the_bytes_of_one(tmp_path: Path) -> None:
    files = tuple(str(write(tmp_path / f"{i}.jsonl", count)) for i, count in enumerate((50, 20, 30, 25)))
    filters = (read_filter("text!=none"),)
    spec = TokenizerSpec("HFTokenizer", VOCAB)
    one = PreprocessSettings(files, str(tmp_path / "one"), spec, append_eod=True, workers=1, filters=filters)
    preprocess(one)
    three = replace(one, output_prefix=str(tmp_path / "three"))
    preprocess_on_rank(three, RankInfo(2, 3))  # a rank alone, before a run that was lost
    run_ranks(three, 3)
    for suffix in ("bin", "idx"):
        names = [tmp_path / f"{name}_text_document.{suffix}" for name in ("one", "three")]
        assert names[0].read_bytes() == names[1].read_bytes()
    assert read_sidecar(tmp_path / "one_text_document") == read_sidecar(tmp_path / "three_text_document")
    assert {p.name for p in tmp_path.glob("three*")} == {f"three_text_document.{s}" for s in ("bin", "idx", "json")}
    again = preprocess_on_rank(three, RankInfo(0, 3))
    assert again is not None
    assert not again.fresh


def test_the_budget_of_bad_input_is_for_all_parts(tmp_path: Path) -> None:
    files = []
    for i in range(2):
        path = write(tmp_path / f"{i}.jsonl", 10)
        path.write_text(path.read_text() + "bad\n")
        files.append(str(path))
    spec = TokenizerSpec("HFTokenizer", VOCAB)
    settings = PreprocessSettings(tuple(files), str(tmp_path / "out"), spec, workers=1, skip_bad=1)
    preprocess_on_rank(settings, RankInfo(1, 2))
    with raises_naming(DataError, 2, "--skip-bad 1"):
        preprocess_on_rank(settings, RankInfo(0, 2))
    report = preprocess_on_rank(replace(settings, skip_bad=2), RankInfo(0, 2))
    assert report is not None
    assert report.skipped == 2
    with raises_naming(DataError, "--restart"):
        preprocess_on_rank(replace(settings, restart=True), RankInfo(0, 2))
