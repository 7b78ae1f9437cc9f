"""`Family`: everything about one Hugging Face architecture, as data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any, Literal

from neox.architecture import BLOCK_OFFSET, WITHOUT_LOGITS, Architecture, LayerKind, LayerPlan
from neox.errors import ConversionError
from neox.families.entries import SETTINGS, ConfigEntries, Fields, ModelSettings

_PLAIN_SETTINGS = ModelSettings(
    dtype="fp32",
    initializer_range=0.02,
    attention_dropout=0.0,
    hidden_dropout=0.0,
    vocab_size=1,
    eod=None,
    bos=None,
)
"""Settings with which `Family.problems` writes a `config.json`: any that every family can express."""


_ENDINGS: Mapping[str, str] = MappingProxyType(
    {
        "scale": "weight",  # gpt-neox's name in RMSNorm
        "selection_bias": "e_score_correction_bias",  # DeepSeek's name
    }
)
"""Last part of our parameter names -> that of transformers' keys, if they differ."""

Layout = Literal[
    "same",
    "heads",
    "grouped_heads",
    "swapped_halves",
    "experts",
    "stacked_experts",
    "alternating_experts",
    "latent_queries",
    "latent_keys",
]
"""Order of rows; its functions are the entry of the same name in `neox.convert.layouts.ROWS`."""


@dataclass(frozen=True)
class TensorSource:
    """Hugging Face modules that hold one module of ours, and how our tensors are made from theirs.

    Our tensor is the concatenation of theirs along dimension 0, optionally rearranged. The same holds for weights and
    biases.

    Attributes:
        modules: Names without `.weight`; `{i}` is the number of the block from 0, `{e}` that of an expert.
        transpose: Whether weights are stored [in, out] (GPT-2's Conv1D) instead of [out, in].
        layout: Order of the rows. "same": the order of the concatenation. "heads": theirs are queries, keys and values
            one after another (in one module or in three); ours are queries, keys and values of each head, or one after
            another if there are fewer key heads. "grouped_heads": theirs are, for each key head, its queries, its keys
            and its values (Falcon). "swapped_halves": theirs are ours with the second half first (gate, then values).
            "experts": each expert has all of the modules, and ours are stacked [experts, rows, columns].
            "stacked_experts": theirs are stacked too, as [experts, columns, rows]. "alternating_experts": in addition,
            their rows of gate and up projection alternate. "latent_queries": the rotary rows are the last ones of each
            head there, and are interleaved. "latent_keys": the same for the rows after those of the latent vector.
        interleaved: With "heads", whether rotary embeddings rotate neighbouring dimensions of a head (GPT-J) instead of
            dimensions of the first and second half.
        endings: `weight` or `bias` -> suffix of the key after the module's name, if it is not `.weight` or `.bias`.
    """

    modules: tuple[str, ...]
    transpose: bool = False
    layout: Layout = "same"
    interleaved: bool = False
    endings: Mapping[str, str] = field(default_factory=dict, hash=False)


def same_tensors(prefix: str, modules: Mapping[str, str]) -> dict[str, TensorSource]:
    """Return the sources of modules that hold the same tensors on both sides.

    Args:
        prefix: Beginning of their names.
        modules: Name of our module -> name of theirs after the prefix.
    """
    return {ours: TensorSource((prefix + theirs,)) for ours, theirs in modules.items()}


def separate_projections(attention: str, *, interleaved: bool = False) -> TensorSource:
    """Return the source of `attention.query_key_value` for modules `q_proj`, `k_proj` and `v_proj`.

    Args:
        attention: Beginning of their names.
        interleaved: Whether rotary positions turn neighbouring dimensions.
    """
    modules = (f"{attention}q_proj", f"{attention}k_proj", f"{attention}v_proj")
    return TensorSource(modules, layout="heads", interleaved=interleaved)


SCORE_TENSORS: Mapping[str, TensorSource] = MappingProxyType({"rm_linear": TensorSource(("score",))})
"""Our modules of a score head -> their sources, the same in every family."""
_ONE_LABEL: Mapping[str, Any] = MappingProxyType({"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}})
"""Entries in the `config.json` of a model with one score."""


@dataclass(frozen=True)
class TensorMapping:
    """One parameter of ours and the Hugging Face tensors that it is made from.

    Attributes:
        layer: Index of its layer in the layer plan.
        name: Its name inside the layer.
        keys: Keys in Hugging Face's files, in the order of `TensorSource.modules`; of experts one expert after another.
        source: How it is made from them.
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
        score_class: Class of its sequence classification models; None if transformers has none.
        title: Name for messages and model cards.
        network: Fields of `Architecture` that are the same in all of its models. Fields that neither this nor
            `config` gives have the defaults of `Architecture`.
        config: Entries of `config.json`, in its order. Entries that hold a field of `network` overwrite it.
        tensors: Kind of layer -> our module's name -> its source.
        block_tensors: Residual -> our modules of a block that have other sources in networks with that residual.
        base_prefix: Prefix of keys that is missing in files of the model without its head.
        key_aliases: Other end of a key -> its end, for keys that some versions of transformers write.
        buffers: Ends of keys that hold no weights (masks and tables that are computed).
        other_names: Further name of an entry of `config.json` that transformers reads -> its name.
        further_layers_key: Key in `config.json` of the number of layers behind the last block that are left out, with
            a warning (DeepSeek-V3's, which predict further tokens). Empty if there are none.
        transformers: Lowest version of transformers that reads exports.
        tokenizer_pattern: Pattern by which `AutoTokenizer` of transformers 5 splits texts for this `model_type`,
            whatever the exported tokenizer does; None if it follows the export.
    """

    model_type: str
    class_name: str
    title: str
    network: Fields
    config: tuple[ConfigEntries, ...]
    tensors: Mapping[LayerKind, Mapping[str, TensorSource]]
    base_prefix: str
    block_tensors: Mapping[str, Mapping[str, TensorSource]] = field(default_factory=dict)
    key_aliases: Mapping[str, str] = field(default_factory=dict)
    buffers: tuple[str, ...] = ()
    other_names: Mapping[str, str] = field(default_factory=dict)
    score_class: str | None = None
    further_layers_key: str = ""
    transformers: str = "4.57"
    tokenizer_pattern: str | None = None

    @property
    def is_encoder(self) -> bool:
        """Whether its models predict masked tokens instead of next ones."""
        return "masked_lm_head" in self.tensors

    def auto_class(self, hf: Mapping[str, Any]) -> str:
        """Return the name of transformers' auto class that loads the model of a `config.json` with its head."""
        if _gives_scores(hf):
            return "AutoModelForSequenceClassification"
        return "AutoModelForPreTraining" if self.is_encoder else "AutoModelForCausalLM"

    def config_json(self, architecture: Architecture, settings: ModelSettings) -> dict[str, Any]:
        """Return the contents of `config.json`. A field that cannot be expressed is written as one that can."""
        gives_scores = architecture.score_head and self.score_class is not None
        class_name = self.score_class if gives_scores else self.class_name
        entries: dict[str, Any] = {"architectures": [class_name], "model_type": self.model_type}
        for part in self.config:
            entries.update(part.write(architecture, settings))
        if gives_scores:
            entries.update(_ONE_LABEL)
        return entries

    def read_config(self, hf: Mapping[str, Any]) -> tuple[Architecture, ModelSettings]:
        """Return the architecture and the settings of a `config.json`.

        Raises:
            ConversionError: For entries that are missing, wrong or not supported, with every reason.
        """
        reasons = [*_problems_of_all(hf), *self._problems_of_scores(hf)]
        for name, key in self.other_names.items():
            if key in hf and name in hf and hf[key] != hf[name]:
                reasons.append(f"{name}: {hf[name]!r}: contradicts {key}: {hf[key]!r}")
        hf = {self.other_names.get(key, key): value for key, value in hf.items()}
        for part in self.config:
            reasons.extend(part.problems(hf))
        if not reasons:
            architecture, settings = self._read(hf)
            if architecture.head_dim >= 1:
                return architecture, settings
            reasons = [
                f"the hidden size, {architecture.hidden_size}, is less than the number of attention heads, "
                f"{architecture.num_attention_heads}"
            ]
        raise ConversionError("this Hugging Face model cannot be imported:\n  " + "\n  ".join(reasons))

    def _problems_of_scores(self, hf: Mapping[str, Any]) -> Iterator[str]:
        """Yield the reasons why the `config.json` of a model with a score head cannot be read."""
        if not _gives_scores(hf):
            return
        if self.score_class is None:
            yield f"architectures: {hf['architectures']}: only causal language models of this family are supported"
            return
        labels = hf.get("num_labels", len(hf.get("id2label") or {}) or 2)
        if labels != 1:
            yield (
                f"num_labels: {labels!r}: only models with one label (reward models) are supported for architectures: "
                f"{hf['architectures']}"
            )

    def _read(self, hf: Mapping[str, Any]) -> tuple[Architecture, ModelSettings]:
        """Read a `config.json` without problems."""
        found: dict[str, Any] = {"attention_dropout": 0.0, "hidden_dropout": 0.0, **self.network}
        for part in self.config:
            found.update(part.read(hf, found))
        if found.get("window"):  # Phi-3 with 128k tokens has a window of twice its context
            found["window"] = min(found["window"], found["max_positions"])
        settings = {name: found.pop(name) for name in SETTINGS}
        if _gives_scores(hf):
            found.update(WITHOUT_LOGITS, score_head=True)
        return Architecture(**found), ModelSettings(**settings)

    def problems(self, architecture: Architecture) -> dict[str, str]:
        """Return {field: why this family cannot express its value}: the fields that its `config.json` loses."""
        expressed, _ = self._read(self.config_json(architecture, _PLAIN_SETTINGS))
        found: dict[str, str] = {}
        for entry in fields(Architecture):
            if not entry.metadata.get("compared", True) or entry.name in architecture.unused_fields:
                continue
            value = getattr(expressed, entry.name)
            if entry.name == "score_head" and value != architecture.score_head:
                found[entry.name] = f"transformers has no sequence classification class for {self.title}"
                continue
            if value != getattr(architecture, entry.name):
                found[entry.name] = f"its {entry.name} is {_shown(value)}"
        return found

    def mappings(self, layers: LayerPlan) -> Iterator[TensorMapping]:
        """Yield the mapping of every parameter, in the order of the layers."""
        in_blocks = self.block_tensors.get(layers.architecture.residual, {})
        for layer in layers.weight_layers:
            block = layer.index - BLOCK_OFFSET
            sources = SCORE_TENSORS if layer.kind == "score_head" else self.tensors[layer.kind]
            if layer.kind == "block":
                sources = {**sources, **in_blocks}
            for parameter in layer.parameters:
                module, _, kind = parameter.name.rpartition(".")
                source = sources[module]
                ending = _ENDINGS.get(kind, kind)
                keys = []
                ending = source.endings.get(ending, f".{ending}")
                number = parameter.experts if source.layout == "experts" else 1
                for expert in range(number):
                    for name in source.modules:
                        keys.append(f"{name.format(i=block, e=expert)}{ending}")
                yield TensorMapping(layer.index, parameter.name, tuple(keys), source)

    def head_keys(self) -> set[str]:
        """Return the keys of the head, which files of a tied model may hold as a copy of the embedding."""
        endings = ["weight", "bias"] if self.is_encoder else ["weight"]
        keys: set[str] = set()
        for source in self.tensors["head"].values():
            for name in source.modules:
                keys.update(f"{name}.{ending}" for ending in endings)
        aliases = {alias for alias, key in self.key_aliases.items() if key in keys}
        return keys | aliases


def _problems_of_all(hf: Mapping[str, Any]) -> Iterator[str]:
    """Yield why a model of any family cannot be read: it is quantized (MXFP4, fp8, int8), or has an encoder, too."""
    given = hf.get("quantization_config")
    if given is not None and given is not False:
        yield f"quantization_config: {given!r}: is not supported; save the model with 16-bit or 32-bit weights first"
    if hf.get("is_encoder_decoder"):
        yield f"is_encoder_decoder: {hf['is_encoder_decoder']!r}: models of an encoder and a decoder are not supported"


def _gives_scores(hf: Mapping[str, Any]) -> bool:
    """Return whether a `config.json` belongs to a sequence classification model, whose head computes scores."""
    names = hf.get("architectures")
    if not isinstance(names, list):
        return False
    return any(str(name).endswith("ForSequenceClassification") for name in names)


def _shown(value: Any) -> str:
    """Return a field's value for a message: of a tuple each different element once."""
    if not isinstance(value, tuple):
        return str(value)
    return ", ".join(dict.fromkeys(map(str, value))) or "none"
