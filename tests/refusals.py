"""Every refusal that a rank can make before its first step, and what becomes of it before ranks start.

`REFUSALS` has a row for each function that raises an error in the packages that a rank runs, with an answer for each of
its `raise` statements in their order. A new one without an answer fails `tests/unit/preflight/test_refusals.py`, which
also drives the answers of class `Refused`: as a dry run, as a start, and on a rank without the launcher's checks.
Assertions are no refusals: they state what no configuration can break.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np

from neox.data import IndexedDatasetBuilder, Sidecar, write_sidecar
from tests.starts import PREFIX, write_data

PACKAGES = ("engine", "model", "train", "objectives", "data", "optim", "parallel", "ops")
"""Packages whose refusals are listed."""


class Listed(Enum):
    """Why a refusal is not made before a start, or not driven here."""

    DEVICE = "only a device or the environment of its host shows it"
    PACKAGE = "a package that is missing, or of another version"
    FILES = "files are damaged, or contain what only reading all of them shows"
    HOSTS = "files that differ between hosts, or that another run has written"
    CHECKPOINT = (
        "a checkpoint of another run or optimizer: tests of checkpoint_checks and resume_from_save drive both sides"
    )
    LATER = "not before the first step: updates, saves, further batches"
    OTHER_SCRIPT = "generation, conversion and tools"
    PROGRAM = "no configuration reaches it: methods for subclasses, and ranks that deepy.py did not start"
    PASSED_ON = "an error of another function, raised again"


@dataclass(frozen=True)
class Refused:
    """A configuration that the launcher refuses in the place of a rank.

    Attributes:
        change: Keys beside `tests.starts.KEYS`.
        prepare: Writes the files of a directory.
        is_missing: Whether something is only missing on this machine, which a dry run warns of.
        reaches_rank: Whether a rank refuses it without the launcher's checks. It does not if the value of a key has
            another type, or the plan itself cannot be made.
    """

    change: Mapping[str, Any]
    prepare: Callable[[Path], None] = write_data
    is_missing: bool = False
    reaches_rank: bool = True


Answers = tuple[Listed | Refused, ...]


# -- files


def write_others(directory: Path) -> None:
    """Write data, and files of fewer documents."""
    write_data(directory)
    with IndexedDatasetBuilder(directory / "other", np.uint16) as builder:
        for _ in range(7):
            builder.add_document(np.arange(9) + 40)


def write_stripping_tokenizer(directory: Path) -> None:
    """Write data, and a tokenizer that drops blanks at the ends of a text."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

    write_data(directory)
    names = ["<|endoftext|>", "<fim_prefix>", "<fim_middle>", "<fim_suffix>", *(f"word{n}" for n in range(300))]
    tokenizer = Tokenizer(models.WordLevel({name: n for n, name in enumerate(names)}, unk_token="word0"))
    tokenizer.normalizer = normalizers.Strip()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(names[:4])
    tokenizer.save(str(directory / "tokenizer.json"))


STRIPPING = {"tokenizer_type": "HFTokenizer", "vocab_file": "tokenizer.json"}


def teacher(vocab_size: int, top_k: int) -> Callable[[Path], None]:
    """Return a function that writes data, and what identifies the logits of a teacher."""

    def write(directory: Path) -> None:
        write_data(directory)
        (directory / "teacher").mkdir()
        identity = {"weights": "x", "vocab_size": vocab_size, "tokenizers": [], "top_k": top_k}
        (directory / "teacher" / "identity.json").write_text(json.dumps(identity))

    return write


def write_other_sidecar(directory: Path) -> None:
    """Write data with a sidecar of another tokenizer."""
    write_data(directory, documents=30, length=20)
    about = Sidecar("HFTokenizer", "0" * 64, 512, 0, append_eod=False, documents=30, tokens=600, max_id=231)
    write_sidecar(directory / PREFIX, about)


def write_no_tokens(directory: Path) -> None:
    """Write files of documents without tokens."""
    write_data(directory, documents=5, length=0)


PAIRS = {"train_impl": "dpo", "data_path": None, "seq_length": 64, "max_position_embeddings": 64}
MASKED = {"objective": "masked_lm", "pos_emb": "learned"}
BLEND = {"data_path": None, "train_data_paths": [PREFIX, PREFIX]}
STAGES = {"data_stages": [{"name": "first"}, {"start_step": 1, "seq_length": 4}], "max_position_embeddings": 700}
TEACHER = {"teacher_logits": "teacher"}

REFUSALS: Mapping[str, Answers] = {
    "engine/build_engine.py: build_model": (
        Refused({"attention_backend": "cudnn", "attention_config": [[["flash"], "all"]]}),
    ),
    "engine/build_engine.py: _check_capability": (Listed.DEVICE, Listed.DEVICE),
    "engine/checkpoints/background_saves.py: BackgroundSaves.wait": (Listed.PASSED_ON, Listed.LATER),
    "engine/checkpoints/loading.py: _prompt_ids": (
        Refused(
            {**STRIPPING, "soft_prompt_tuning": {"enabled": True, "num_tokens": 3, "init_string": " "}},
            write_stripping_tokenizer,
        ),
    ),
    "engine/checkpoints/run_start.py: agree_on_start": (Listed.HOSTS,),
    "engine/checkpoints/run_start.py: verified_choice": (Listed.CHECKPOINT,) * 4,
    "engine/checkpoints/run_start.py: begin_start": (Listed.CHECKPOINT,),
    "engine/checkpoints/run_start.py: start_before": (Listed.LATER,),
    "engine/checkpoints/run_start.py: damaged_copies.check": (Listed.HOSTS,),
    "engine/checkpoints/run_start.py: check_copies": (Listed.HOSTS,),
    "engine/checkpoints/saving.py: CheckpointFiles.raise_problems": (Listed.PASSED_ON, Listed.LATER),
    "engine/checkpoints/saving.py: _DeepSpeedFiles.load": (Listed.PROGRAM,),
    "engine/checkpoints/saving.py: _discarded_on_failure": (Listed.PASSED_ON,),
    "engine/deepspeed_patches/startup.py: check_deepspeed": (Listed.PACKAGE,),
    "engine/determinism.py: use_deterministic_algorithms": (Listed.DEVICE,),
    "engine/device.py: choose_device": (Listed.DEVICE, Listed.DEVICE, Listed.DEVICE, Listed.DEVICE),
    "engine/device.py: choose_backend": (Listed.DEVICE,),
    "engine/distributed.py: initialize_distributed": (Listed.PROGRAM,),
    "engine/distributed.py: _complete_environment": (Listed.PROGRAM,),
    "engine/distributed.py: all_succeeded": (Listed.PASSED_ON,),
    "engine/distributed.py: from_first_rank": (Listed.PASSED_ON,),
    "engine/engine.py: readable_errors": (Listed.LATER, Listed.DEVICE, Listed.PASSED_ON),
    "engine/optimizer_tensors.py: optimizer_tensors": (Listed.PROGRAM,),
    "engine/pipeline/instructions.py: PassOrder._holder": (Listed.PROGRAM,),
    "engine/weights.py: write_weights": (Listed.PASSED_ON,),
    "engine/weights.py: read_weights": (Listed.HOSTS, Listed.FILES),
    "model/attention.py: SelfAttention.__init__": (Refused({"num_kv_heads": 3}),),
    "model/cache.py: KVCache.__init__": (Listed.OTHER_SCRIPT,),
    "model/cache.py: KVCache.check_room": (Listed.OTHER_SCRIPT,),
    "model/gmlp.py: SpatialGatingUnit._over_positions": (Listed.OTHER_SCRIPT,),
    "model/initial_weights.py: draw": (Refused({"init_method": "zeros"}, reaches_rank=False),),
    "model/mixer.py: Mixer.between": (Listed.PROGRAM,),
    "model/positions.py: PositionEncoding.tables": (Listed.PROGRAM,),
    "model/positions.py: reset_buffers": (Listed.PROGRAM,),
    "train/failures.py: reported_failures": (Listed.PASSED_ON,),
    "train/stopping.py: NonFiniteRule.enforce": (Listed.LATER, Listed.LATER),
    "train/trainer.py: Trainer.fit": (Listed.PASSED_ON,),
    "data/answer_pairs/answers.py: PreferencePairs.__init__": (
        Refused({**PAIRS, "pos_train_data_paths": [PREFIX], "neg_train_data_paths": ["other"]}, write_others),
    ),
    "data/answer_pairs/answers.py: JudgedAnswers._with_other_prompts": (Listed.FILES,),
    "data/answer_pairs/answers.py: desirable_answers": (Listed.FILES, Listed.FILES),
    "data/answer_pairs/answers.py: open_pairs": (
        Refused(
            {
                **PAIRS,
                "train_impl": "kto",
                "train_data_paths": [PREFIX],
                "train_label_data_paths": [PREFIX],
                "train_reward_data_paths": ["other"],
            },
            write_others,
        ),
    ),
    "data/answer_pairs/pair_rows.py: usable_pairs": (
        Refused({**PAIRS, "pos_train_data_paths": [PREFIX], "neg_train_data_paths": [PREFIX]}),
        Refused({**PAIRS, "pos_train_data_paths": [PREFIX], "neg_train_data_paths": [PREFIX], "skip_bad_pairs": True}),
    ),
    "data/answer_pairs/pair_rows.py: PreferenceDataset.layout": (Listed.PROGRAM,),
    "data/answer_pairs/reference_file.py: read_reference": (Listed.FILES, Listed.HOSTS),
    "data/batches.py: BatchIterator.__init__": (Listed.PROGRAM, Listed.PROGRAM),
    "data/batches.py: BatchIterator.__next__": (Listed.PASSED_ON,),
    "data/batches.py: BatchIterator._check_ids": (Listed.FILES,),
    "data/masked/masking.py: _first_id": (Refused(MASKED),),
    "data/masked/sentence_pairs.py: SentencePairDataset.__init__": (Listed.PROGRAM, Listed.FILES, Listed.FILES),
    "data/masked/sentence_pairs.py: SentencePairDataset.read_labels": (Listed.PROGRAM,),
    "data/masked/sentence_pairs.py: SentencePairDataset.layout": (Listed.PROGRAM,),
    "data/mixtures/blend.py: BlendedDataset.__init__": (
        Refused({"data_path": None, "train_data_paths": [PREFIX] * 255}),
        Listed.PROGRAM,
    ),
    "data/mixtures/blend.py: normalized": (Refused({**BLEND, "train_data_weights": [0, 0]}, reaches_rank=False),),
    "data/mixtures/blend.py: weights_by_documents": (Listed.FILES,),
    "data/mixtures/stream.py: DatasetStream.samples_of_pass": (
        Refused({"data_path": None, "train_data_paths": [PREFIX], **STAGES, "seq_length": 700}),
    ),
    "data/run_data.py: build_data_iterators": (
        Refused({"train_iters": None}),
        Refused({"train_impl": "rm", "data_path": None}, is_missing=True, reaches_rank=False),
        Refused({"split": "0,1,1"}),
    ),
    "data/run_data.py: open_preferences": (Listed.PROGRAM,),
    "data/run_datasets.py: DatasetFactory.datasets": (Refused({"data_path": None}, is_missing=True),),
    "data/run_datasets.py: DatasetFactory.blended": (
        Refused({**BLEND, "valid_data_paths": [PREFIX, PREFIX], "eval_iters": "all"}),
    ),
    "data/run_datasets.py: DatasetFactory.shares": (
        Refused({**BLEND, "train_data_weights": [1, 1, 1]}, reaches_rank=False),
    ),
    "data/samples/fill_in_middle.py: FimTokens.of": (Refused({"fim_rate": 0.5}),),
    "data/samples/fill_in_middle.py: check_encodes_parts": (
        Refused({**STRIPPING, "fim_rate": 0.5}, write_stripping_tokenizer),
    ),
    "data/samples/gpt_dataset.py: GPTDataset.__init__": (
        Listed.PROGRAM,
        Refused({"eval_iters": "all", "seq_length": 64, "max_position_embeddings": 64}),
    ),
    "data/samples/index_maps.py: build_index_maps": (Refused({}, write_no_tokens),),
    "data/samples/map_cache.py: _save": (Listed.PASSED_ON,),
    "data/samples/packing.py: usable_documents": (Refused({"pack_impl": "unpacked", "allow_chopped": False}),),
    "data/teacher_file.py: TeacherWriter.__init__": (Listed.OTHER_SCRIPT,),
    "data/teacher_file.py: TeacherWriter.rows": (Listed.OTHER_SCRIPT,),
    "data/teacher_file.py: TeacherFile.__init__": (
        Refused(TEACHER, teacher(vocab_size=100, top_k=500)),
        Refused(TEACHER, teacher(vocab_size=512, top_k=1)),
    ),
    "data/teacher_file.py: TeacherFile._open": (Refused(TEACHER, teacher(vocab_size=512, top_k=500)), Listed.FILES),
    "data/teacher_file.py: TeacherFile.fields": (Listed.FILES,),
    "data/teacher_file.py: _read_identity": (Refused(TEACHER, is_missing=True), Listed.FILES),
    "data/token_files/builder.py: IndexedDatasetBuilder.add_documents": (Listed.OTHER_SCRIPT, Listed.OTHER_SCRIPT),
    "data/token_files/builder.py: IndexedDatasetBuilder._add_columns": (Listed.OTHER_SCRIPT,),
    "data/token_files/builder.py: IndexedDatasetBuilder._add_counts": (Listed.OTHER_SCRIPT,),
    "data/token_files/builder.py: IndexedDatasetBuilder.merge": (Listed.OTHER_SCRIPT,),
    "data/token_files/builder.py: IndexedDatasetBuilder._check_range": (Listed.OTHER_SCRIPT, Listed.OTHER_SCRIPT),
    "data/token_files/builder.py: _check_mergeable": (Listed.OTHER_SCRIPT,) * 3,
    "data/token_files/columns.py: column_lines": (Listed.OTHER_SCRIPT,) * 3,
    "data/token_files/columns.py: column_values": (Listed.OTHER_SCRIPT,),
    "data/token_files/indexed_dataset.py: dtype_code": (Listed.OTHER_SCRIPT,),
    "data/token_files/indexed_dataset.py: read_index": (
        Refused({"data_path": "nothing"}, is_missing=True),
        *(Listed.FILES,) * 3,
    ),
    "data/token_files/indexed_dataset.py: _unpack": (Listed.FILES, Listed.FILES),
    "data/token_files/indexed_dataset.py: _dtype": (Listed.FILES,),
    "data/token_files/indexed_dataset.py: _arrays": (Listed.FILES,),
    "data/token_files/indexed_dataset.py: _read_cached": (Listed.FILES,) * 3,
    "data/token_files/indexed_dataset.py: _check_pointers": (Listed.FILES, Listed.FILES),
    "data/token_files/indexed_dataset.py: _check_documents": (Listed.FILES, Listed.FILES),
    "data/token_files/indexed_dataset.py: IndexedDataset.__init__": (Refused({"data_impl": "cached"}),),
    "data/token_files/indexed_dataset.py: IndexedDataset.__getitem__": (Listed.PROGRAM,),
    "data/token_files/remote_blocks.py: BlockFile._fetch_block": (Listed.FILES,),
    "data/token_files/remote_blocks.py: BlockFile._download.read": (Listed.FILES,),
    "data/token_files/remote_blocks.py: BlockFile._check_whole": (Listed.FILES,),
    "data/token_files/remote_blocks.py: BlockFile._check_holes": (Listed.DEVICE,),
    "data/token_files/remote_blocks.py: _punch": (Listed.DEVICE,),
    "data/token_files/sidecar.py: read_sidecar": (Listed.FILES,) * 3,
    "data/token_files/sidecar.py: check_fits": (Listed.FILES,),
    "data/token_files/sidecar.py: check_labels": (
        Refused(
            {"data_path": None, "train_data_paths": [PREFIX], "train_label_data_paths": ["other"]},
            write_others,
        ),
    ),
    "data/token_files/sidecar.py: check_tokenizer": (Refused({}, write_other_sidecar), Listed.FILES),
    "data/token_files/sidecar.py: chat_template_of": (Listed.FILES,),
    "data/token_files/sidecar.py: joined_sidecar": (Listed.OTHER_SCRIPT,),
    "optim/clipping.py: ClippedOptimizer.update_group": (Listed.PROGRAM,),
    "optim/eight_bits.py: _EightBits._functions": (Listed.PACKAGE,),
    "parallel/grid.py: ParallelGrid.build": (Listed.PROGRAM,),
    "parallel/layers.py: shard_size": (Refused({"num_gpus": 2, "model_parallel_size": 2, "mlp_width": 31}),),
    "ops/recurrent_kernels.py: _function": (Listed.PACKAGE,),
    "ops/softmax.py: _triton_softmax": (Listed.PACKAGE,),
    # The third one is a rule about GPUs (`unsupported_by_device`).
    "ops/triton_softmax.py: _check": (Listed.PROGRAM, Listed.PROGRAM, Listed.DEVICE, Listed.DEVICE),
}
"""`FILE: FUNCTION` below `neox/` -> answers to its `raise` statements in their order."""
