"""Section of training after pretraining: preferences between answers, and judgements of answers."""

from __future__ import annotations

from typing import Annotated, Literal, NamedTuple

from pydantic import Field

from neox.config.sections.base import Section
from neox.config.sections.conditions import Excludes, OnlyWith, Refused, Requires
from neox.config.sections.data import SPLITS, DataConfig
from neox.config.sections.numbers import NonNegativeFloat, PositiveFloat

TrainImpl = Literal["normal", "dpo", "kto", "orpo", "simpo", "rm", "reinforce"]
Paths = tuple[str, ...] | None
PAIRED = ("dpo", "orpo", "simpo", "rm")
"""Values of `train_impl` that compare two answers to a prompt."""
OF_PREFERENCES = (*PAIRED, "kto")
"""Values of `train_impl` that learn from preferences."""
_PAIRS = OnlyWith("train_impl", PAIRED)
_DPO = OnlyWith("train_impl", ("dpo",))
_KTO = OnlyWith("train_impl", ("kto",))
_RM = OnlyWith("train_impl", ("rm",))
_ELSEWHERE = "train online with TRL, verl or OpenRLHF from an export (tools/convert_to_hf.py)"


class SplitAnswers(NamedTuple):
    """Token files of the answers of a split.

    Attributes:
        split: `train`, `valid` or `test`.
        paths: Prefixes of preferred answers, or of all answers that are judged one by one.
        labels: Prefixes of their labels; None if every token is of the answer.
        others: Prefixes of the answers that are not preferred; None for answers that are judged one by one.
        other_labels: Prefixes of their labels.
        rewards: Prefixes of judgements; None for pairs.
        scored: Whether a reward model scores the answers.
    """

    split: str
    paths: Paths
    labels: Paths
    others: Paths
    other_labels: Paths
    rewards: Paths
    scored: bool = False


PATH_KEYS = tuple(
    f"{side}_{split}_{kind}"
    for split in SPLITS
    for side in ("pos", "neg")
    for kind in ("data_paths", "label_data_paths")
)
"""Keys of the files of pairs."""
REWARD_KEYS = tuple(f"{split}_reward_data_paths" for split in SPLITS)
"""Keys of the files of judgements."""


class PreferenceConfig(Section):
    """Training on preferences after pretraining (docs/preferences.md)."""

    train_impl: Annotated[
        TrainImpl,
        Refused(f"needs answers that the model writes while it trains; {_ELSEWHERE}", ("reinforce",)),
        Excludes("objective", ("masked_lm",), reason="answers continue their prompts"),
        Excludes("soft_prompt_tuning.enabled", reason="each answer would need the prompt"),
        Excludes("data_path", reason="it holds texts", advice="use pos_train_data_paths, or train_data_paths with kto"),
        Excludes("data_stages", reason="they mix texts"),
        Excludes("eval_tasks", when=("rm",), reason="a reward model predicts no tokens"),
        Excludes("use_mup", when=("rm",), reason="muP has no rule for a head with one output"),
        Excludes("fim_rate", reason="answers stay in their order"),
        Excludes("curriculum_learning.enabled", reason="answers are not cut"),
        Excludes("char_level_ppl", reason="its losses are of answers, not of characters"),
        Excludes("eod_mask_loss", reason="labels say which tokens are of the answer"),
    ] = "normal"
    """What is learned. `normal`: the tokens of texts (`objective`). From pairs of answers: `dpo` (arXiv:2305.18290),
    `orpo` (arXiv:2403.07691), `simpo` (arXiv:2405.14734), `rm` (a reward model: a head with one score instead of
    logits; Bradley-Terry). From judged answers: `kto` (arXiv:2402.01306)."""

    dataset_impl: Literal["gpt2", "pairwise"] | None = None
    """gpt-neox's name of the data: `pairwise` with train_impl dpo, orpo, simpo or rm, else `gpt2`. It follows from
    train_impl."""

    pos_train_data_paths: Annotated[Paths, _PAIRS] = None
    """Prefixes of the preferred answers for training, each after its prompt (`preprocess_preferences.py`)."""

    pos_train_label_data_paths: Annotated[Paths, OnlyWith("pos_train_data_paths")] = None
    """Prefixes of their labels, -100 for the tokens of prompts. By default all tokens are of the answer."""

    neg_train_data_paths: Annotated[Paths, _PAIRS] = None
    """Prefixes of the other answers for training, in the same order."""

    neg_train_label_data_paths: Annotated[Paths, OnlyWith("neg_train_data_paths")] = None
    """Prefixes of the labels of neg_train_data_paths."""

    pos_valid_data_paths: Annotated[Paths, _PAIRS] = None
    """Prefixes of the preferred answers for validation."""

    pos_valid_label_data_paths: Annotated[Paths, OnlyWith("pos_valid_data_paths")] = None
    """Prefixes of the labels of pos_valid_data_paths."""

    neg_valid_data_paths: Annotated[Paths, _PAIRS] = None
    """Prefixes of the other answers for validation, in the same order."""

    neg_valid_label_data_paths: Annotated[Paths, OnlyWith("neg_valid_data_paths")] = None
    """Prefixes of the labels of neg_valid_data_paths."""

    pos_test_data_paths: Annotated[Paths, _PAIRS] = None
    """Prefixes of the preferred answers for the test at the end."""

    pos_test_label_data_paths: Annotated[Paths, OnlyWith("pos_test_data_paths")] = None
    """Prefixes of the labels of pos_test_data_paths."""

    neg_test_data_paths: Annotated[Paths, _PAIRS] = None
    """Prefixes of the other answers for the test at the end, in the same order."""

    neg_test_label_data_paths: Annotated[Paths, OnlyWith("neg_test_data_paths")] = None
    """Prefixes of the labels of neg_test_data_paths."""

    train_reward_data_paths: Annotated[Paths, _KTO] = None
    """Prefixes of the judgements of train_data_paths: integers or floats, above 0 for good answers; one number per
    answer, or one per token of each answer."""

    valid_reward_data_paths: Annotated[Paths, _KTO] = None
    """Prefixes of the judgements of valid_data_paths."""

    test_reward_data_paths: Annotated[Paths, _KTO] = None
    """Prefixes of the judgements of test_data_paths."""

    skip_bad_pairs: Annotated[bool, OnlyWith("train_impl", OF_PREFERENCES)] = False
    """Leave out what cannot be trained on, with a warning: equal answers, answers without a labelled token, and pairs
    that a row of seq_length tokens cannot hold. Otherwise they are refused."""

    reference_model: Annotated[
        Literal["start", "without_adapters", "copy"],
        OnlyWith("train_impl", ("dpo", "kto")),
        Requires("lora", when=("without_adapters",), advice="or use start"),
        Excludes("precompute_model_name", when=("without_adapters", "copy"), reason="nothing is stored"),
        Excludes("lora", when=("copy",), reason="its base weights are the reference", advice="use without_adapters"),
        Excludes(
            "zero_optimization.offload_param.device",
            ("cpu", "nvme"),
            when=("copy",),
            reason="the copy is swapped with weights on the device",
            advice="use start, which needs no second copy",
        ),
        Excludes(
            "zero_optimization.zero_hpz_partition_size",
            when=("copy",),
            reason="it keeps another copy of the trained weights",
            advice="use start, which needs no second copy",
        ),
    ] = "start"
    """Reference model of the loss. `start`: the model that the run starts from; its log-probabilities are computed once
    and stored next to the data. `without_adapters`: with `lora`, the model with its adapters disabled; its
    log-probabilities are computed at each start of the run, and kept in memory. `copy`: the model that the run starts
    from, as a second copy of its weights, which ZeRO 3 shards; its log-probabilities are computed in each step, and
    nothing is stored."""

    precompute_model_name: Annotated[str | None, OnlyWith("train_impl", ("dpo", "kto"))] = None
    """Name of the reference model in the files of its log-probabilities, `PREFIX.NAME.reference.npz` next to the data.
    They are computed once, by the model that the run starts from, and refused for other weights or other data. By
    default the name is `start-` and a hash of the weights, so that each model has a file of its own."""

    dpo_loss: Annotated[Literal["sigmoid", "hinge", "ipo"], _DPO] = "sigmoid"
    """Loss of a pair's margin: `sigmoid` (DPO), `hinge` (SLiC, arXiv:2305.10425) or `ipo` (arXiv:2310.12036)."""

    dpo_beta: Annotated[PositiveFloat, _DPO] = 0.1
    """How strongly the model is held to the reference; the tau of IPO."""

    dpo_label_smoothing: Annotated[float, _DPO] = Field(0.0, ge=0, lt=0.5)
    """Probability that a pair is the wrong way round (conservative DPO), with `dpo_loss: sigmoid`."""

    dpo_reference_free: Annotated[bool, _DPO] = False
    """Take a reference that gives all answers the same probability, so that none is computed."""

    dpo_fp32: Literal[True] = True
    """Sum log-probabilities in fp32. It is always so."""

    kto_beta: Annotated[PositiveFloat, _KTO] = 0.1
    """How strongly the model is held to the reference."""

    kto_desirable_weight: Annotated[NonNegativeFloat, _KTO] = 1.0
    """Weight of the losses of good answers."""

    kto_undesirable_weight: Annotated[NonNegativeFloat, _KTO] = 1.0
    """Weight of the losses of bad answers."""

    kto_fp32: Literal[True] = True
    """Sum log-probabilities in fp32. It is always so."""

    orpo_beta: Annotated[PositiveFloat, OnlyWith("train_impl", ("orpo",))] = 0.1
    """Weight of the odds ratio next to the loss of the preferred answer (the paper's lambda)."""

    simpo_beta: Annotated[PositiveFloat, OnlyWith("train_impl", ("simpo",))] = 2.0
    """Factor of the mean log-probabilities of answers."""

    simpo_gamma: Annotated[NonNegativeFloat, OnlyWith("train_impl", ("simpo",))] = 1.0
    """Margin by which the preferred answer is to be better."""

    rm_center_coefficient: Annotated[NonNegativeFloat, _RM] = 0.0
    """Coefficient of the squared sum of both scores of a pair, which keeps the mean score near 0 (TRL's
    `center_rewards_coefficient`, arXiv:2312.09244). 0.01 is a common value."""

    z_loss: Annotated[NonNegativeFloat, _RM] = 0.0
    """Coefficient of the sum of the squares of both scores of a pair (gpt-neox)."""

    def answers(self, data: DataConfig) -> tuple[SplitAnswers, ...]:
        """Return the token files of training, validation and test. Judged answers are under the keys of texts."""
        if self.train_impl == "kto":
            rewards = (self.train_reward_data_paths, self.valid_reward_data_paths, self.test_reward_data_paths)
            found = []
            for blend, own_rewards in zip(data.blends, rewards, strict=True):
                found.append(SplitAnswers(blend.split, blend.paths, blend.labels, None, None, own_rewards))
            return tuple(found)
        scored = self.train_impl == "rm"
        return (
            SplitAnswers(
                "train",
                self.pos_train_data_paths,
                self.pos_train_label_data_paths,
                self.neg_train_data_paths,
                self.neg_train_label_data_paths,
                None,
                scored,
            ),
            SplitAnswers(
                "valid",
                self.pos_valid_data_paths,
                self.pos_valid_label_data_paths,
                self.neg_valid_data_paths,
                self.neg_valid_label_data_paths,
                None,
                scored,
            ),
            SplitAnswers(
                "test",
                self.pos_test_data_paths,
                self.pos_test_label_data_paths,
                self.neg_test_data_paths,
                self.neg_test_label_data_paths,
                None,
                scored,
            ),
        )

    @property
    def on_preferences(self) -> bool:
        """Whether the run learns from preferences."""
        return self.train_impl in OF_PREFERENCES

    @property
    def is_paired(self) -> bool:
        """Whether the run compares two answers to a prompt."""
        return self.train_impl in PAIRED

    @property
    def stores_reference(self) -> bool:
        """Whether the reference model's log-probabilities are stored next to the data."""
        return self.needs_reference and self.reference_model == "start"

    @property
    def copies_reference(self) -> bool:
        """Whether the reference is a second copy of the weights."""
        return self.needs_reference and self.reference_model == "copy"

    @property
    def compares_with_start(self) -> bool:
        """Whether the reference is the model that the run starts from."""
        return self.stores_reference or self.copies_reference

    @property
    def needs_reference(self) -> bool:
        """Whether the loss compares the model with a reference."""
        if self.train_impl == "dpo":
            return not self.dpo_reference_free
        return self.train_impl == "kto"
