"""Identity of the tokenizer in checkpoints: which others the launcher, text, evaluations and exports refuse."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from neox.checkpoint import (
    CheckpointReader,
    checkpoint_at,
    find_checkpoint,
    mean_of_all,
    open_checkpoint,
    resize_vocabulary,
)
from neox.checkpoint.derived.resizing import VocabularySize
from neox.config import NeoXConfig
from neox.convert import to_hf
from neox.convert.verification import single_rank_plan
from neox.errors import CheckpointError, ConfigError, ConversionError
from neox.generation.startup import choose_checkpoint, one_process
from neox.plan import resolve
from neox.preflight.tokenizer_checks import other_tokenizer_problems
from neox.tokenizer import (
    HFTokenizer,
    build_tokenizer,
    identify,
    identify_configured,
    is_larger,
    saved_tokenizer_identity,
    tokenizer_of,
    train_tokenizer,
    write_tokenizer_identity,
)
from tests.errors import raises_naming
from tests.plans import SMALL
from tests.unit.checkpoint.synthetic import seeded_weights, write_checkpoint

SIZE = 280
TEXTS = ["how much wood would a woodchuck chuck " * 3, "peter piper picked a peck of pickled peppers " * 3]
OTHER_TEXTS = ["the rain in spain stays mainly in the plain " * 3, "she sells sea shells by the sea shore " * 3]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Two tokenizers of the same size."""
    directory = tmp_path_factory.mktemp("tokenizers")
    own = train_tokenizer(TEXTS, SIZE, directory / "own.json")
    other = train_tokenizer(OTHER_TEXTS, SIZE, directory / "other.json")
    return str(own[0]), str(other[0])


def config_of(file: str, **keys: Any) -> NeoXConfig:
    batch = {"train_micro_batch_size_per_gpu": 1, "train_iters": 1, "precision": "fp32"}
    return NeoXConfig.from_flat({**SMALL, **batch, "tokenizer_type": "HFTokenizer", "vocab_file": file, **keys})


@pytest.fixture
def trained(tmp_path: Path, files: tuple[str, str]) -> Path:
    """A directory of checkpoints that were trained with the first tokenizer."""
    config = config_of(files[0])
    tokenizer = tokenizer_of(config)
    layers = single_rank_plan(config, 384).layers
    state = {"model_identity": {"vocab_size": tokenizer.vocab_size}, "args": {"padded_vocab_size": 384}}
    directory = write_checkpoint(tmp_path / "ck" / "global_step3", layers, seeded_weights(layers), client_state=state)
    write_tokenizer_identity(directory, identify_configured(config, tokenizer))
    (directory.parent / "latest").write_text(directory.name)
    return directory.parent


@pytest.mark.parametrize("way", [{}, {"finetune": True}])
def test_launcher_refuses_another_tokenizer_of_the_same_size(
    trained: Path, files: tuple[str, str], way: dict[str, Any]
) -> None:
    for file, count in ((files[0], 0), (files[1], 1)):
        config = config_of(file, load=str(trained), **way)
        tokenizer = tokenizer_of(config)
        assert tokenizer.vocab_size == SIZE
        problems = other_tokenizer_problems(config, tokenizer, training=True)
        assert len(problems) == count
    assert problems[0].keys == ("load", "vocab_file")
    assert files[0] in problems[0].message
    assert files[1] in problems[0].message
    meant = config_of(files[1], load=str(trained), allow_other_tokenizer=True, **way)
    assert other_tokenizer_problems(meant, tokenizer, training=True) == []


def test_copy_of_the_file_and_added_tokens_are_no_other_tokenizer(
    trained: Path, files: tuple[str, str], tmp_path: Path
) -> None:
    copy = tmp_path / "copy.json"
    copy.write_bytes(Path(files[0]).read_bytes())
    for keys in ({}, {"added_tokens": ["<a>"]}, {"added_tokens": ["<a>", "<b>"]}):
        config = config_of(str(copy), load=str(trained), **keys)
        assert other_tokenizer_problems(config, tokenizer_of(config), training=True) == []


def test_lists_of_added_tokens_must_begin_alike(files: tuple[str, str]) -> None:
    identities = []
    for tokens in (("<a>",), ("<a>", "<b>"), ("<b>",)):
        tokenizer = build_tokenizer("HFTokenizer", files[0], added_tokens=tokens)
        identities.append(identify(tokenizer, files[0], tokens))
    one, two, different = identities
    assert one.same_ids(two)
    assert two.same_ids(one)
    assert not one.same_ids(different)
    assert not two.same_ids(different)


def test_larger_tokenizer_keeps_the_ids_of_the_smaller_one(files: tuple[str, str], tmp_path: Path) -> None:
    own = build_tokenizer("HFTokenizer", files[0])
    saved = identify(own, files[0])
    grown = build_tokenizer("HFTokenizer", files[0], added_tokens=["<a>"])
    assert isinstance(grown, HFTokenizer)
    written = tmp_path / "grown.json"
    written.write_text(grown.to_json())
    retrained = json.loads(Path(files[0]).read_text())  # a further token of its own vocabulary
    retrained["model"]["vocab"]["zq"] = SIZE
    (tmp_path / "retrained.json").write_text(json.dumps(retrained))
    larger = train_tokenizer(OTHER_TEXTS, SIZE + 5, tmp_path / "other.json")[0]
    same = {}
    for file in (files[0], written, tmp_path / "retrained.json", files[1], larger):
        same[Path(file).name] = is_larger(build_tokenizer("HFTokenizer", file), saved)
    assert same == {"own.json": True, "grown.json": True, "retrained.json": True, "other.json": False}
    assert not is_larger(own, identify(grown, None, ["<a>"]))


def test_checkpoint_without_an_identity_loads(trained: Path, files: tuple[str, str]) -> None:
    (find_checkpoint(trained, verify=False) / "tokenizer_identity.json").unlink()
    config = config_of(files[1], load=str(trained))
    assert other_tokenizer_problems(config, tokenizer_of(config), training=True) == []


def test_text_and_evaluations_refuse_it(trained: Path, files: tuple[str, str]) -> None:
    for file, keys in ((files[0], {}), (files[1], {"allow_other_tokenizer": True}), (files[1], {})):
        config = one_process(config_of(file, load=str(trained), checkpoint_verify=False, **keys))
        tokenizer = tokenizer_of(config)
        plan = resolve(config, 1, tokenizer.vocab_size)
        if file == files[0] or keys:
            assert choose_checkpoint(plan, tokenizer).name == "global_step3"
    with raises_naming(CheckpointError, *files):
        choose_checkpoint(plan, tokenizer)


def test_exports_refuse_it(trained: Path, files: tuple[str, str], tmp_path: Path) -> None:
    with raises_naming(ConversionError, *files):
        to_hf(trained, config_of(files[1]), tmp_path / "hf", verify=False)
    assert not (tmp_path / "hf").exists()
    to_hf(trained, config_of(files[0]), tmp_path / "hf", verify=False)
    assert (tmp_path / "hf" / "tokenizer.json").is_file()


def test_larger_vocabulary_brings_its_own_identity(trained: Path, files: tuple[str, str], tmp_path: Path) -> None:
    config = config_of(files[0], added_tokens=["<a>"])
    tokenizer = tokenizer_of(config)
    reader = open_checkpoint(find_checkpoint(trained, verify=False), config=config_of(files[0]))
    identity = identify_configured(config, tokenizer)
    size = VocabularySize(SIZE, SIZE + 1, 384)
    result = resize_vocabulary(reader, tmp_path / "new", size, mean_of_all(1), tokenizer=identity)
    assert saved_tokenizer_identity(CheckpointReader(result).path) == identity


def test_directory_of_a_run_leads_to_its_checkpoints(trained: Path) -> None:
    run = trained.parent
    (run / "logs").mkdir()
    assert checkpoint_at(run) == trained / "global_step3"
    (run / "more" / "global_step1").mkdir(parents=True)
    with raises_naming(ConfigError, trained, run / "more"):
        checkpoint_at(run)
