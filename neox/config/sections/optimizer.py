"""Section of the optimizer: which one, its numbers, weight decay and muP."""

from __future__ import annotations

import difflib
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, ValidationInfo, ValidatorFunctionWrapHandler, field_validator
from pydantic_core import PydanticCustomError

from neox.config.sections.base import Section
from neox.config.sections.conditions import Excludes, OnlyWith, Requires
from neox.config.sections.numbers import NonNegativeFloat, PositiveFloat, PositiveInt
from neox.config.sections.optimizer_kind import DecayingParams, OptimizerKind, OptimizerParams, State
from neox.config.sections.optimizer_table import (
    OPTIMIZERS,
    REFUSED,
    AdamParams,
    find_optimizer,
    optimizer_names,
    plain_name,
)
from neox.features.ema.keys import AverageKeys

_MUP = OnlyWith("use_mup")
ParamsClass = type[OptimizerParams]  # the field `type` hides the builtin in the class
# Names that editors suggest.
_NAMES = [*optimizer_names(), *(name.lower() for name in optimizer_names()), "cpu_adam", "cpu_lion"]

if TYPE_CHECKING:
    AnyParams = OptimizerParams
else:  # the union of all sections of numbers, for the schema and the reference page
    AnyParams = reduce(or_, (kind.params for kind in OPTIMIZERS.values()))


class OptimizerSettings(Section):
    """DeepSpeed's `optimizer` block."""

    type: str = Field("Adam", json_schema_extra={"enum": list(dict.fromkeys(_NAMES))})
    """Which optimizer, in any case, with or without underscores; the table below lists the names. `Adam` and `AdamW`
    are the same, with decoupled weight decay, as in gpt-neox. Muon is refused with `lora` and `soft_prompt_tuning`,
    which freeze its matrices."""

    params: AnyParams = Field(default_factory=AdamParams, validate_default=True)
    """Numbers of the optimizer; its type decides which there are."""

    @field_validator("type")
    @classmethod
    def _known(cls, value: str) -> str:
        """Refuse an unknown optimizer."""
        if find_optimizer(value) is not None:
            return value
        if (reason := REFUSED.get(plain_name(value))) is not None:
            raise PydanticCustomError("optimizer_type", "is not supported: {reason}", {"reason": reason})
        spellings = {plain_name(name): name for name in optimizer_names()}
        near = difflib.get_close_matches(plain_name(value), spellings, n=1)
        if near:
            advice = f"did you mean {spellings[near[0]]}?"
        else:
            names = ", ".join(kind.names[0] for kind in OPTIMIZERS.values())
            advice = f"use one of {names}"
        raise PydanticCustomError("optimizer_type", "is not implemented; {advice}", {"advice": advice})

    @field_validator("params", mode="wrap")
    @classmethod
    def _of_its_type(cls, value: Any, handler: ValidatorFunctionWrapHandler, info: ValidationInfo) -> OptimizerParams:
        """Read the numbers of the optimizer; those of an unknown one are left out."""
        kind = cls.params_class(info.data.get("type"))
        if kind is None:
            return AdamParams()
        if isinstance(value, OptimizerParams):
            value = value.model_dump(exclude_unset=True)
        return kind.model_validate(value)

    @classmethod
    def params_class(cls, type_name: Any) -> ParamsClass | None:
        """Return the section of an optimizer's numbers; None for an unknown optimizer."""
        if not isinstance(type_name, str):
            return None
        found = find_optimizer(type_name)
        return None if found is None else OPTIMIZERS[found].params

    @property
    def name(self) -> str:
        """Key of the optimizer in `OPTIMIZERS`."""
        found = find_optimizer(self.type)
        assert found is not None, self.type
        return found

    @property
    def kind(self) -> OptimizerKind:
        """The optimizer on paper."""
        return OPTIMIZERS[self.name]

    @property
    def states(self) -> tuple[State, ...]:
        """Tensors that it keeps for each parameter."""
        return self.kind.states_with(self.params)


class ParameterGroup(Section):
    """A group of `parameter_groups`."""

    match: str
    """Names of parameters, with `*` for any text, `?` for any character and `[3-5]` for one of some. A parameter's name
    is that in its layer, such as attention.dense.bias, also with the layer's number in front (5.attention.dense.bias)
    as in a checkpoint's files: 0 is the embedding, 2 the first block. `inspect_checkpoint.py` lists all."""

    lr_factor: PositiveFloat = 1.0
    """Factor of the learning rate."""

    weight_decay: NonNegativeFloat | None = None
    """Weight decay, for biases and norms too. By default that of the key `weight_decay`, which spares these."""

    frozen: bool = False
    """Do not train the parameters: no gradients, and no states of the optimizer."""


class OptimizerConfig(AverageKeys):
    """Optimizer and weight decay."""

    optimizer: OptimizerSettings = Field(default_factory=OptimizerSettings)
    """`{type: Adam, params: {lr, betas, eps}}`. By default Adam with lr 0.001, betas (0.9, 0.999) and eps 1e-8."""

    use_bnb_optimizer: bool = False
    """gpt-neox's key for `optimizer.type: Adam8bit`: bitsandbytes' Adam, which keeps its states in 8 bits."""

    weight_decay: NonNegativeFloat = 0.01
    """Decoupled weight decay. Biases and norms do not decay."""

    parameter_groups: tuple[ParameterGroup, ...] = ()
    """Parameters by name whose updates differ: `[{match: "attention.*bias", lr_factor: 0.1}, {match: "0.*", frozen:
    true}]`. A parameter belongs to the first group that matches, and one that none matches is trained as without. A
    resumed run may change them, but parameters that were frozen have no states of the optimizer, so that training them
    needs no_load_optim."""

    use_mup: Annotated[
        bool,
        Requires("mup_base_hidden_size", advice="give the hidden_size at which lr was tuned"),
        Excludes("objective", ("masked_lm",), reason="muP's factors of a masked language model are not known here"),
    ] = False
    """Maximal update parametrisation (arXiv:2203.03466): a learning rate that was tuned at mup_base_hidden_size fits
    any hidden_size. With m = hidden_size / mup_base_hidden_size, matrices between hidden states start at 1 / sqrt(m) of
    the deviation that init_method gives at the base, and have 1 / m of the learning rate (and m times the weight
    decay), with Muon 1 / sqrt(m) of it; logits are divided by m, and attention scores by the head size instead of its
    root."""

    mup_base_hidden_size: Annotated[PositiveInt | None, _MUP] = None
    """hidden_size at which lr and initial weights were tuned."""

    base_shapes_file: Annotated[str | None, _MUP] = None
    """File of the package mup with the shapes of the base network, from which mup_base_hidden_size is read at a start.
    gpt-neox writes `FILE.0`; either name is found."""

    mup_init_scale: Annotated[PositiveFloat, _MUP] = 1.0
    """Factor of all initial weights that are drawn."""

    mup_attn_temp: Annotated[PositiveFloat, _MUP] = 1.0
    """Divisor of attention's scores."""

    mup_output_temp: Annotated[PositiveFloat, _MUP] = 1.0
    """Divisor of the logits."""

    mup_embedding_mult: Annotated[PositiveFloat, _MUP] = 1.0
    """Factor of the tokens' vectors."""

    mup_rp_embedding_mult: Annotated[PositiveFloat, _MUP] = 1.0
    """Factor of the positions' vectors."""

    def width_multiplier(self, hidden_size: int) -> float:
        """Return muP's m of a hidden size; 1 without muP."""
        if not self.use_mup or self.mup_base_hidden_size is None:
            return 1.0
        return hidden_size / self.mup_base_hidden_size

    @property
    def applied_weight_decay(self) -> float:
        """Weight decay of matrices, from whichever key gave it; 0 for an optimizer without weight decay."""
        params = self.optimizer.params
        if not isinstance(params, DecayingParams):
            return 0.0
        if params.weight_decay is None:
            return self.weight_decay
        return params.weight_decay
