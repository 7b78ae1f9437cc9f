"""Types that describe a Hugging Face architecture as data."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from neox.architecture import BLOCK_OFFSET, Architecture, LayerKind, LayerPlan

DTYPES: tuple[tuple[str, str], ...] = (("float32", "fp32"), ("float16", "fp16"), ("bfloat16", "bf16"))
"""(`torch_dtype` of `config.json`, `precision` of the YAML)."""


@dataclass(frozen=True)
class ModelSettings:
    """Contents of `config.json` that are no part of the architecture.

    Attributes:
        dtype: Precision of the weights as in the YAML (`fp32`, `fp16`, `bf16`).
        initializer_range: Standard deviation of initial weights.
        attention_dropout: Dropout probability of attention weights.
        hidden_dropout: Dropout probability of hidden states; families without it write none and read 0.
        vocab_size: Rows of the embedding.
        eod: End-of-document id, which is Hugging Face's eos.
        bos: Id that begins a text, if the tokenizer has one.
    """

    dtype: str
    initializer_range: float
    attention_dropout: float
    hidden_dropout: float
    vocab_size: int
    eod: int | None
    bos: int | None

    @property
    def common_keys(self) -> dict[str, Any]:
        """Entries of `config.json` that every family has."""
        return {
            "vocab_size": self.vocab_size,
            "initializer_range": self.initializer_range,
            "bos_token_id": self.bos,
            "eos_token_id": self.eod,
            "use_cache": True,
            "torch_dtype": next(name for name, precision in DTYPES if precision == self.dtype),
        }

    @classmethod
    def read(
        cls, hf: Mapping[str, Any], *, attention_dropout: str = "attention_dropout", hidden_dropout: str | None = None
    ) -> ModelSettings:
        """Return the settings of a `config.json`.

        Args:
            hf: Its contents.
            attention_dropout: Key of the dropout of attention weights.
            hidden_dropout: Key of the dropout of hidden states; None for a family without it.
        """
        eos = hf.get("eos_token_id")
        return cls(
            dtype=dict(DTYPES).get(str(hf.get("torch_dtype") or hf.get("dtype")), "fp32"),
            initializer_range=hf.get("initializer_range", 0.02),
            attention_dropout=float(hf.get(attention_dropout) or 0.0),
            hidden_dropout=float(hf.get(hidden_dropout) or 0.0) if hidden_dropout else 0.0,
            vocab_size=hf["vocab_size"],
            eod=next(iter(eos), None) if isinstance(eos, (list, tuple)) else eos,
            bos=hf.get("bos_token_id"),
        )


_SETTINGS = ModelSettings("fp32", 0.02, 0.0, 0.0, 1, None, None)


@dataclass(frozen=True)
class TensorSource:
    """Hugging Face modules that hold one module of ours, and how its tensors are made of theirs.

    Ours is the concatenation of theirs along dimension 0, optionally rearranged. The same holds for weight and bias.

    Attributes:
        modules: Names without `.weight`; `{i}` is the number of the block from 0.
        transpose: Whether weights are stored [in, out] (GPT-2's Conv1D) instead of [out, in].
        layout: Rows of ours: `same` order as the concatenation of equal parts; or `heads`: theirs are queries, keys and
            values one after another (in one module or three), ours are queries, keys and values of each head, or one
            after another where there are fewer key heads.
        interleaved: With `heads`, whether rotary positions turn neighbouring dimensions of a head (GPT-J) instead of
            the two halves of the rotated ones.
    """

    modules: tuple[str, ...]
    transpose: bool = False
    layout: Literal["same", "heads"] = "same"
    interleaved: bool = False


@dataclass(frozen=True)
class TensorMapping:
    """One parameter of ours and the Hugging Face tensors that it is made of.

    Attributes:
        layer: Index of its layer in the layer plan.
        name: Its name inside the layer.
        keys: Keys in Hugging Face's files, in the order of `TensorSource.modules`.
        source: How it is made of them.
    """

    layer: int
    name: str
    keys: tuple[str, ...]
    source: TensorSource

    @property
    def is_copy(self) -> bool:
        """Whether both sides hold the same tensor."""
        return len(self.keys) == 1 and not self.source.transpose and self.source.layout == "same"


@dataclass(frozen=True)
class Family:
    """A Hugging Face architecture.

    Attributes:
        model_type: As in `config.json`.
        class_name: Model class, as in `architectures` of `config.json`.
        title: Name for messages and model cards.
        write_config: (architecture, settings) -> contents of `config.json`, without `architectures` and `model_type`.
            A field that the family cannot express is written as one that it can.
        read_config: Contents of `config.json` -> (architecture, settings). Raises ConversionError.
        tensors: Kind of layer -> our module's name -> its source.
        base_prefix: Prefix of keys that is missing in files of the model without its head.
        key_aliases: Other end of a key -> its end, for keys that some versions of transformers write.
        buffers: Ends of keys that hold no weights (masks and tables that are computed).
        transformers: Lowest version of transformers that reads exports.
        tokenizer_pattern: Pattern by which `AutoTokenizer` of transformers 5 splits texts for this `model_type`,
            whatever the exported tokenizer does; None where it follows the export.
    """

    model_type: str
    class_name: str
    title: str
    write_config: Callable[[Architecture, ModelSettings], dict[str, Any]]
    read_config: Callable[[Mapping[str, Any]], tuple[Architecture, ModelSettings]]
    tensors: Mapping[LayerKind, Mapping[str, TensorSource]]
    base_prefix: str
    key_aliases: Mapping[str, str] = field(default_factory=dict)
    buffers: tuple[str, ...] = ()
    transformers: str = "4.57"
    tokenizer_pattern: str | None = None

    @property
    def is_encoder(self) -> bool:
        """Whether its models predict masked tokens instead of next ones."""
        return "masked_lm_head" in self.tensors

    @property
    def auto_class(self) -> str:
        """Name of transformers' class that loads its models with all heads."""
        return "AutoModelForPreTraining" if self.is_encoder else "AutoModelForCausalLM"

    def config_json(self, architecture: Architecture, settings: ModelSettings) -> dict[str, Any]:
        """Return the contents of `config.json`."""
        names = {"architectures": [self.class_name], "model_type": self.model_type}
        return {**names, **self.write_config(architecture, settings), **settings.common_keys}

    def problems(self, architecture: Architecture) -> dict[str, str]:
        """Return {field: why this family cannot express its value}: the fields that its configuration loses."""
        read, _ = self.read_config(self.config_json(architecture, _SETTINGS))
        return {
            field.name: f"its {field.name} is {_shown(getattr(read, field.name))}"
            for field in fields(Architecture)
            if getattr(read, field.name) != getattr(architecture, field.name)
        }

    def mappings(self, layers: LayerPlan) -> Iterator[TensorMapping]:
        """Yield the mapping of every parameter, in the order of the layers."""
        for layer in layers.weight_layers:
            for parameter in layer.parameters:
                module, _, kind = parameter.name.rpartition(".")
                source = self.tensors[layer.kind][module]
                ending = "weight" if kind == "scale" else kind  # gpt-neox's name in RMSNorm
                keys = tuple(f"{name.format(i=layer.index - BLOCK_OFFSET)}.{ending}" for name in source.modules)
                yield TensorMapping(layer.index, parameter.name, keys, source)

    def head_keys(self) -> set[str]:
        """Return the keys of the head, which files of a tied model may hold as a copy of the embedding."""
        kinds = ("weight", "bias") if self.is_encoder else ("weight",)
        names = [name for source in self.tensors["head"].values() for name in source.modules]
        keys = {f"{name}.{kind}" for name in names for kind in kinds}
        return keys | {alias for alias, key in self.key_aliases.items() if key in keys}


def _shown(value: Any) -> str:
    return ", ".join(dict.fromkeys(map(str, value))) or "none" if isinstance(value, tuple) else str(value)
