"""Sections of data and tokenizer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import inf
from types import MappingProxyType
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Discriminator, Field, Tag

from neox.config.sections.base import Section
from neox.config.sections.conditions import Excludes, OnlyWith, OnlyWithAny, Requires
from neox.config.sections.numbers import Fraction, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from neox.errors import ConfigError

PackImpl = Literal["packed", "best_fit", "pack_until_overflow", "unpacked"]
SentencePairs = Literal["nsp", "sop"]
DocumentBoundaries = Literal["index", "eod"]
FimLevel = Literal["document", "sample"]
Weights = tuple[NonNegativeFloat, ...] | None
SPLITS = ("train", "valid", "test")
MOST_DATASETS = 254
"""Datasets of a blend: the index of each sample's dataset is a byte, as in gpt-neox."""
_MASKED = OnlyWith("objective", ("masked_lm",))
_NO_LABELS = Excludes("objective", ("masked_lm",), reason="only masked tokens are in its loss")
_PAIRS = Excludes("objective", ("masked_lm",), reason="its samples are pairs of sentences")
_FIM = OnlyWith("fim_rate")
_ONE_WEIGHTING = Excludes("weight_by_num_documents", reason="both set weights")


class Blend(NamedTuple):
    """Token files of a split: `SPLIT_data_paths`, `SPLIT_data_weights` and `SPLIT_label_data_paths`."""

    split: str
    paths: tuple[str, ...] | None
    weights: tuple[float, ...] | None
    labels: tuple[str, ...] | None


class EvaluatedSet(NamedTuple):
    """A set of validation data that evaluations read and have scores of.

    Attributes:
        name: Its name in metrics; None for the set without one.
        paths: Prefixes of its token files, which are blended.
        labels: Prefixes of the labels of each path, if they have any.
        shares: Share of each path in the blend.
        weight: Share of its scores in the mean over all sets.
        part: Number of the part of `split` whose documents it holds; None if it holds those of whole files.
    """

    name: str | None
    paths: tuple[str, ...]
    labels: tuple[str | None, ...]
    shares: tuple[float, ...]
    weight: float
    part: int | None = None

    @property
    def files(self) -> Iterator[tuple[str, str | None]]:
        """Each prefix with that of its labels."""
        yield from zip(self.paths, self.labels, strict=True)


class DataStage(Section):
    """A stage of `data_stages`. The first one starts the run; each other one has one of the four `start` keys."""

    name: str | None = None
    """Name in the plan, by default its number."""

    start_step: PositiveInt | None = None
    """Number of steps before the stage."""

    start_tokens: PositiveFloat | None = None
    """Number of tokens before the stage; it starts with the first step after them."""

    start_fraction: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Fraction of train_iters before the stage."""

    start_at_lr_decay: bool = False
    """Start the stage where the decay of `lr_decay_style: WSD` starts."""

    weights: Weights = None
    """Weight of each of train_data_paths, by default train_data_weights. 0 leaves a dataset out."""

    temperature: PositiveFloat | None = None
    """Weight train_data_paths by size as train_data_temperature does, instead of weights."""

    seq_length: PositiveInt | None = None
    """Number of tokens of a sample, by default the key seq_length, which is the largest."""


class ValidationSet(Section):
    """A validation set that has a name. Its path by itself is short for a block with nothing else."""

    path: str
    """Prefix of the token files."""

    weight: PositiveFloat = 1.0
    """Weight of the set's scores in the mean over all sets."""

    labels: str | None = None
    """Prefix of the labels: files of the same shape, with -100 for tokens without loss."""


def _form_of_paths(value: Any) -> str:
    return "<names>" if isinstance(value, Mapping) else "<list>"


def _form_of_set(value: Any) -> str:
    return "<path>" if isinstance(value, str) else "<block>"


SetName = Annotated[str, Field(pattern="^[A-Za-z0-9_-]+$")]
PathOrSet = Annotated[
    Annotated[str, Tag("<path>")] | Annotated[ValidationSet, Tag("<block>")], Discriminator(_form_of_set)
]
ValidationPaths = Annotated[
    Annotated[tuple[str, ...], Tag("<list>")] | Annotated[dict[SetName, PathOrSet], Tag("<names>")],
    Discriminator(_form_of_paths),
]
"""Paths that are blended into one validation set, or validation sets by name."""


class DataConfig(Section):
    """Token files, splits and blends."""

    data_path: Annotated[str | None, Excludes("train_data_paths", reason="both name training data")] = None
    """Prefix of one pair of `.bin` and `.idx` files, divided by `split`."""

    data_cache_dir: str = "data/fetched"
    """Directory to which token files with addresses (`s3://bucket/mine_text_document`) are copied before the start. All
    hosts must see it."""

    data_cache_gb: PositiveFloat | None = None
    """Size in gigabytes of a cache of remote token files on the disk of each host. Blocks of ids are read when they are
    needed, and those read last are kept. Only indices are copied before the start. Without this key whole files are
    copied before the start."""

    data_block_dir: Annotated[str | None, OnlyWith("data_cache_gb")] = None
    """Directory of this cache, in which each host has its own subdirectory; by default `blocks` in data_cache_dir. A
    local disk is best."""

    train_data_paths: tuple[str, ...] | None = None
    """Prefixes that are blended for training, instead of data_path."""

    valid_data_paths: Annotated[ValidationPaths | None, OnlyWithAny(("train_data_paths", "data_path"))] = None
    """Prefixes that are blended for validation; or validation sets by name, each evaluated by itself on eval_iters
    batches: `{wiki: data/wiki, code: {path: data/code, weight: 2}}` reports `validation/wiki/lm_loss` and
    `validation/code/lm_loss`, and their weighted mean as `validation/lm_loss`. With data_path only sets with names are
    evaluated, next to its part for validation (`split`, whose weight is 1)."""

    test_data_paths: Annotated[tuple[str, ...] | None, OnlyWith("train_data_paths")] = None
    """Prefixes that are blended for the test at the end."""

    train_label_data_paths: Annotated[tuple[str, ...] | None, OnlyWith("train_data_paths"), _NO_LABELS] = None
    """Prefixes of the labels of train_data_paths: files of the same shape, with -100 for tokens without loss."""

    train_data_weights: Annotated[Weights, OnlyWith("train_data_paths"), _ONE_WEIGHTING] = None
    """Weight of each training prefix; by default all are equal."""

    train_data_temperature: Annotated[
        PositiveFloat | None,
        OnlyWith("train_data_paths"),
        _ONE_WEIGHTING,
        Excludes("train_data_weights", reason="both set weights"),
        Excludes("objective", ("masked_lm",), reason="it counts tokens of documents"),
    ] = None
    """Weight training prefixes by their number of tokens, to the power of 1 / temperature. 1 is by size; larger values
    give small sets more weight."""

    train_data_max_passes: Annotated[
        PositiveFloat | tuple[PositiveFloat, ...] | None,
        OnlyWith("train_data_paths"),
        Excludes("objective", ("masked_lm",), reason="it counts tokens of documents"),
    ] = None
    """How often a training prefix is read at most: one number, or one for each. The weight of one that would be read
    more often is lowered, and the others get what is left."""

    data_stages: Annotated[
        tuple[DataStage, ...] | None,
        Requires("train_data_paths", advice="name the datasets there, even a single one"),
        Excludes("weight_by_num_documents", reason="both set weights"),
        Excludes("pack_impl", ("best_fit", "pack_until_overflow", "unpacked"), reason="they are for joined documents"),
        Excludes("objective", ("masked_lm",), reason="they are for joined documents"),
        Excludes("curriculum_learning.enabled", reason="both set the length of samples"),
        Excludes("num_train_epochs", reason="the passes over the datasets follow from them", advice="give train_iters"),
    ] = None
    """Stages of the training data, each with weights and a length of samples, one after the other. Each dataset is read
    on where the stage before has stopped: `[{weights: [7, 3, 0]}, {start_fraction: 0.9, weights: [4, 3, 3]}]`."""

    valid_label_data_paths: Annotated[tuple[str, ...] | None, OnlyWith("valid_data_paths"), _NO_LABELS] = None
    """Prefixes of the labels of valid_data_paths: files of the same shape, with -100 for tokens without loss."""

    valid_data_weights: Annotated[Weights, OnlyWith("train_data_paths"), _ONE_WEIGHTING] = None
    """Weight of each validation prefix."""

    test_label_data_paths: Annotated[tuple[str, ...] | None, OnlyWith("test_data_paths"), _NO_LABELS] = None
    """Prefixes of the labels of test_data_paths: files of the same shape, with -100 for tokens without loss."""

    test_data_weights: Annotated[Weights, OnlyWith("train_data_paths"), _ONE_WEIGHTING] = None
    """Weight of each test prefix."""

    weight_by_num_documents: Annotated[bool, OnlyWith("train_data_paths")] = False
    """Weight each prefix by p ** alpha * (1 - p), where p is its share of the documents, instead of by
    *_data_weights."""

    weighted_sampler_alpha: Annotated[NonNegativeFloat, OnlyWith("weight_by_num_documents")] = 0.3
    """The alpha of weight_by_num_documents; smaller values give small sets more weight."""

    pack_impl: Annotated[
        PackImpl,
        _PAIRS,
        Excludes(
            "train_impl",
            ("dpo", "kto", "orpo", "simpo"),
            when=("best_fit",),
            reason="answers are never cut",
            advice="use packed, which fills several samples at a time",
        ),
    ] = "packed"
    """How documents make samples of seq_length + 1 tokens. `packed` joins and cuts them. The others pad, and padding
    has no loss: `best_fit` cuts only documents that are longer than a sample, and puts documents and pieces where they
    fill a sample best (arXiv:2404.10830); `pack_until_overflow` puts as many whole documents into a sample as fit,
    `unpacked` one. Pairs of answers
    (`train_impl`) are always whole: `packed` fills several samples at a time with them, `pack_until_overflow` one after
    the other."""

    allow_chopped: Annotated[bool, OnlyWith("pack_impl", ("pack_until_overflow", "unpacked"))] = True
    """Cut a document that is longer than a sample at its end; otherwise it is left out."""

    max_lost_labels: Annotated[Fraction, OnlyWith("pack_impl", ("pack_until_overflow", "unpacked"))] = 0.1
    """Share of the labels of a training dataset (train_label_data_paths) that documents longer than a sample may lose.
    A run that would lose more does not start; 1 starts any."""

    fim_rate: Annotated[
        Fraction | tuple[Fraction, ...],
        _PAIRS,
        Excludes("pack_impl", ("best_fit", "pack_until_overflow", "unpacked"), reason="whole documents leave no room"),
        Excludes("train_label_data_paths", reason="labels belong to tokens in their order"),
    ] = 0.0
    """Fraction of the training documents that are rearranged for fill in the middle: one number, or one for each of
    train_data_paths. A document keeps its number of tokens; the end of its suffix makes room for special tokens. The
    files are not changed, and evaluation reads documents in their order."""

    fim_spm_rate: Annotated[Fraction, _FIM] = 0.5
    """Fraction of the rearranged documents in the order suffix, prefix, middle (SPM). The others are in the order
    prefix, suffix, middle (PSM)."""

    fim_level: Annotated[FimLevel, _FIM] = "sample"
    """What is rearranged. `sample`: the part of each document in a sample. `document`: whole documents that fit into a
    sample, before documents are joined and cut."""

    fim_split: Annotated[Literal["characters", "tokens"], _FIM] = "characters"
    """Where documents are divided. `characters` divides between two characters and encodes the three parts, so that a
    model can fill in parts of words. `tokens` divides between two tokens, and needs no time."""

    fim_tokens: Annotated[tuple[str, str, str] | None, _FIM] = None
    """Tokens of the vocabulary before the prefix, the middle and the suffix, in this order. By default those of
    StarCoder, SantaCoder, Qwen, CodeGemma, DeepSeek, Code Llama or GLM, whichever the vocabulary has."""

    mask_prob: Annotated[float, _MASKED] = Field(0.15, gt=0, lt=1)
    """Fraction of the tokens of a sample that are masked, up to max_preds_per_seq. The name is Megatron-LM's."""

    short_seq_prob: Annotated[Fraction, _MASKED] = 0.1
    """Fraction of the samples that are filled to a random length. The name is Megatron-LM's."""

    whole_word_mask: Annotated[bool, _MASKED] = False
    """Mask all pieces of a word together."""

    sentence_pairs: Annotated[SentencePairs, _MASKED] = "nsp"
    """The second sentence of half of the samples, with bert_binary_head. `nsp`: a sentence of another document (BERT).
    `sop`: the sentence before the first one (Megatron-LM, ALBERT)."""

    data_impl: Literal["infer", "mmap", "cached", "lazy"] = "infer"
    """Format of the token files; `infer` reads it from the `.idx` file."""

    mmap_warmup: bool = False
    """Read token files once before training, so that they are in the page cache."""

    split: Annotated[str, OnlyWith("train_data_paths", (None,))] = "969, 30, 1"
    """Parts of data_path for training, validation and test."""

    num_workers: NonNegativeInt = 2
    """Number of threads that read ahead, up to two batches each (gpt-neox: processes). With 0 a batch is read when it
    is needed."""

    loss_normalization: Literal["auto", "tokens", "micro_batch", "samples"] = "auto"
    """What the losses of a step's labels are divided by. `tokens`: the number of labels of the whole step, over all
    micro batches and data ranks, so that the loss does not depend on how the batch is cut. `micro_batch`: the labels of
    each micro batch, and then the number of micro batches (gpt-neox). `samples`: the labels of each sample, and then
    the number of samples. All are equal if every token is a label. `auto` is `tokens` for conversations
    (`preprocess_chat.py`) and for samples with padding (pack_impl), else `micro_batch`."""

    eod_mask_loss: Annotated[bool, _NO_LABELS] = False
    """Leave what the last token of a document predicts out of the loss: the first token of the next document."""

    reset_attention_mask: Annotated[
        bool,
        _PAIRS,
        Excludes("soft_prompt_tuning.enabled", reason="each document would need the prompt"),
    ] = False
    """Restart attention and positions after each end of a document, so that no token attends to another document. A
    document that does not end with the end-of-document token does not predict the next one's first token either."""

    document_boundaries: Annotated[
        DocumentBoundaries, OnlyWithAny(("reset_attention_mask", "eod_mask_loss", "fim_rate"))
    ] = "index"
    """Where documents end, for reset_attention_mask, eod_mask_loss and `fim_level: sample`. `index`: where they were
    joined, whatever their tokens are. `eod`: after each end-of-document token (gpt-neox, Megatron-LM), for files whose
    sequences hold several documents. Both are the same if documents end with that token and hold no other."""

    @property
    def max_passes(self) -> tuple[float, ...] | None:
        """The value of `train_data_max_passes` for each training dataset; None if there is no limit."""
        passes = self.train_data_max_passes
        if passes is None or isinstance(passes, tuple):
            return passes
        return (passes,) * len(self.train_data_paths or ())

    @property
    def fim_rates(self) -> tuple[float, ...]:
        """The value of `fim_rate` for each training dataset."""
        if isinstance(self.fim_rate, tuple):
            return self.fim_rate
        return (self.fim_rate,) * len(self.train_data_paths or (self.data_path,))

    @property
    def evaluated_sets(self) -> tuple[EvaluatedSet, ...]:
        """What evaluations read as validation data, the set without a name first. That of answers is elsewhere.

        A part of `data_path` is among them if `split` gives it a share; a small file may have no document for it.
        """
        found: list[EvaluatedSet] = []
        names = self.validation_sets
        paths = self.blends[1].paths
        if self.train_data_paths is None and self.data_path is not None:
            if split_shares(self.split)[1] > 0:
                found.append(EvaluatedSet(None, (self.data_path,), (None,), (1.0,), 1.0, part=1))
        elif paths is not None:
            weights = self.valid_data_weights or (1.0,) * len(paths)
            labels = self.valid_label_data_paths or (None,) * len(paths)
            found.append(EvaluatedSet(None, paths, labels, _shares(weights), 1.0))
        for name, item in names.items():
            found.append(EvaluatedSet(name, (item.path,), (item.labels,), (1.0,), item.weight))
        shares = _shares([each.weight for each in found])
        return tuple(each._replace(weight=share) for each, share in zip(found, shares, strict=True))

    @property
    def validation_sets(self) -> Mapping[str, ValidationSet]:
        """Validation sets by name; none if `valid_data_paths` has no names."""
        sets = {}
        if isinstance(self.valid_data_paths, dict):
            for name, item in self.valid_data_paths.items():
                sets[name] = ValidationSet(path=item) if isinstance(item, str) else item
        return MappingProxyType(sets)

    @property
    def blends(self) -> tuple[Blend, ...]:
        """Token files of training, validation and test that are read; without validation sets that have names."""
        train = Blend("train", self.train_data_paths, self.train_data_weights, self.train_label_data_paths)
        if self.data_path is not None and self.train_data_paths is None:  # `split` says what is for evaluations
            return train, Blend("valid", None, None, None), Blend("test", None, None, None)
        valid_paths = None
        if isinstance(self.valid_data_paths, tuple):
            valid_paths = self.valid_data_paths
        return (
            train,
            Blend("valid", valid_paths, self.valid_data_weights, self.valid_label_data_paths),
            Blend("test", self.test_data_paths, self.test_data_weights, self.test_label_data_paths),
        )


class TokenizerConfig(Section):
    """The tokenizer."""

    tokenizer_type: Literal[
        "GPT2BPETokenizer",
        "HFTokenizer",
        "HFGPT2Tokenizer",
        "SPMTokenizer",
        "CharLevelTokenizer",
        "TiktokenTokenizer",
        "BertWordPieceLowerCase",
        "BertWordPieceCase",
    ] = "GPT2BPETokenizer"
    """Kind of tokenizer; `HFTokenizer` reads a `tokenizer.json`."""

    vocab_file: str | None = None
    """The tokenizer's vocabulary file."""

    merge_file: str | None = None
    """Merge rules of GPT2BPETokenizer."""

    chat_template: str | None = None
    """File of a chat template in Jinja, instead of the one that the training data, the checkpoint or the directory of
    vocab_file has. Checkpoints of the run carry it."""

    added_tokens: Annotated[
        tuple[str, ...],
        Excludes(
            "tokenizer_type",
            ("SPMTokenizer", "CharLevelTokenizer", "TiktokenTokenizer"),
            reason="its vocabulary cannot grow",
            advice="use a tokenizer.json",
        ),
    ] = ()
    """Tokens after the vocabulary of vocab_file, such as `["<|user|>", "<|assistant|>"]`. They are recognised in every
    text. Preprocessing takes the same list (--added-tokens), and exports contain them. A model that was trained without
    them gets rows for them from tools/resize_vocabulary.py."""

    train_only_added_tokens: Annotated[
        bool,
        Requires("added_tokens", advice="list the tokens there"),
        Excludes("lora", reason="each trains nothing else"),
        Excludes("soft_prompt_tuning.enabled", reason="each trains nothing else"),
        Excludes("parameter_groups", reason="everything else is frozen"),
        Excludes("objective", ("masked_lm",), reason="it is for causal networks"),
    ] = False
    """Train only the rows of added_tokens: in the embedding and, if it is not tied, in the head. Everything else stays
    as it is, bit for bit. These rows have no weight decay, which would act on the other rows too."""

    padded_vocab_size: PositiveInt | None = None
    """Rows of the embedding. By default it follows from the vocabulary; otherwise it is at least the size of the
    vocabulary and a multiple of model_parallel_size. An imported model (hf_architecture) may have fewer rows than its
    tokenizer has ids; text and data that hold an id without a row are refused."""


def _shares(weights: Sequence[float]) -> tuple[float, ...]:
    """Return weights as shares of their sum."""
    total = sum(weights) or 1.0
    return tuple(weight / total for weight in weights)


def split_shares(split: str) -> tuple[float, float, float]:
    """Return the fractions for training, validation and test of NeoX's `split`: `969, 30, 1`, `90/5/5` or `1`.

    Further parts are ignored, as in gpt-neox; a rule refuses a configuration with more than three.

    Raises:
        ConfigError: A part is negative or no number, or all are 0.
    """
    try:
        parts = [float(part) for part in split.replace("/", ",").split(",") if part.strip()]
    except ValueError:
        parts = []
    train, valid, test = (*parts, 0.0, 0.0, 0.0)[:3]
    total = train + valid + test
    if min(train, valid, test) < 0 or not 0 < total < inf:
        raise ConfigError(f"`split: {split}` should be one to three numbers that are not negative, such as 969,30,1")
    return train / total, valid / total, test / total
