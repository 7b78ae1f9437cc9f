"""`Family`: everything about one Hugging Face architecture, as data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any, Literal

from neox.architecture import (
    BLOCK_OFFSET,
    MULTI_TOKEN_BLOCK,
    WITHOUT_LOGITS,
    Architecture,
    LayerKind,
    LayerPlan,
    ParameterSpec,
)
from neox.errors import ConversionError
from neox.families.config_entries import SETTINGS, ConfigEntries, Fields, ModelSettings

_PLACEHOLDERS = ModelSettings(
    dtype="fp32",
    initializer_range=0.02,
    attention_dropout=0.0,
    hidden_dropout=0.0,
    vocab_size=1,
    eod=None,
    bos=None,
)
"""Settings for the round trip in `Family.inexpressible_fields`. Every family can express them."""

Layout = Literal[
    "same",
    "heads",
    "grouped_heads",
    "gated_heads",
    "delta_heads",
    "grouped_delta_heads",
    "swapped_halves",
    "experts",
    "stacked_experts",
    "alternating_experts",
    "latent_queries",
    "latent_keys",
]
"""Order of the rows of a tensor on both sides. `neox.convert.layouts.ROWS` has the functions of each name.

    name                 theirs                                      ours
    same                 the modules, one after another              the same
    heads                all queries, all keys, all values, in one   q k v of head 0, q k v of head 1, ...; the same as
                         module or three                             theirs if there are fewer key heads
    grouped_heads        of each key head: its queries, key, value   as for heads (Falcon)
    gated_heads          as for heads, but in the first module    as for heads, then all gates
                         the rows of each query head are followed
                         by those of its gate (Qwen3-Next)
    delta_heads          all queries, all keys, all values, all   the same
                         gates, all strengths, all decays: the
                         first module has several of them
    grouped_delta_heads  of each key head: queries, keys, values  all of one kind, all of the next
                         and gates in one module, strengths and
                         decays in the other (Qwen3-Next)
    swapped_halves       gate, value                                 value, gate
    experts              modules of each expert                      one stack [experts, rows, columns]
    stacked_experts      one stack [experts, columns, rows]          one stack [experts, rows, columns]
    alternating_experts  such a stack, with gate and up rows         one stack [experts, rows, columns]: up rows, then
                         in turn: gate, up, gate, up                 gate rows
    latent_queries       of each head: plain rows, rotary rows       of each head: rotary rows by halves, plain rows
                         by neighbours                               (DeepSeek)
    latent_keys          latent vector, rotary rows by neighbours    latent vector, rotary rows by halves

Rotary positions turn two rows of a head together: neighbours (0 1)(2 3), or one row of each half (0 2)(1 3).
"""


@dataclass(frozen=True)
class TensorSource:
    """Hugging Face modules that hold one module of ours, and how our tensors are made from theirs.

    Our tensor is the concatenation of theirs along dimension 0, in another order of rows if `layout` says so. The same
    holds for weights and biases. Llama, for example, has this source:

        "attention.query_key_value": TensorSource(
            tuple(f"model.layers.{{i}}.self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj")), layout="heads"
        )

    Layer 5 of the plan is block 3 of Llama, so that `Family.mappings` yields for it

        attention.query_key_value.weight  <-  model.layers.3.self_attn.q_proj.weight    q0 q0 q1 q1
        q0 q0 k0 k0 v0 v0 q1 q1 k1 k1 ...     model.layers.3.self_attn.k_proj.weight    k0 k0 k1 k1
                                              model.layers.3.self_attn.v_proj.weight    v0 v0 v1 v1

    with the rows of two heads of two dimensions each. `neox.convert.layouts` reorders them, both ways.

    Attributes:
        modules: Names without `.weight`; `{i}` is the number of the block from 0, `{e}` that of an expert.
        transpose: Whether weights are stored [in, out] (GPT-2's Conv1D) instead of [out, in].
        layout: Order of the rows.
        interleaved: With "heads", whether rotary positions turn neighbours in their files (GPT-J).
        cut_anywhere: Whether files may have other numbers of rows in each module, and the same in all together.
        endings: Theirs for `weight` or `bias`, if not `.weight` or `.bias`: what follows the module's name in a key.
    """

    modules: tuple[str, ...]
    transpose: bool = False
    layout: Layout = "same"
    interleaved: bool = False
    cut_anywhere: bool = False
    endings: Mapping[str, str] = field(default_factory=dict, hash=False)

    def keys(self, parameter: ParameterSpec, block: int) -> tuple[str, ...]:
        """Return the keys of the tensors that one of our parameters is made from.

        Args:
            parameter: The parameter; the last part of its name is `weight` or `bias`, mostly.
            block: Number of its block.
        """
        own_ending = parameter.name.rpartition(".")[2]
        ending = _THEIR_ENDINGS.get(own_ending, own_ending)
        ending = self.endings.get(ending, f".{ending}")
        experts = parameter.experts if self.layout == "experts" else 1
        keys = []
        for expert in range(experts):
            for module in self.modules:
                keys.append(module.format(i=block, e=expert) + ending)
        return tuple(keys)


_THEIR_ENDINGS: Mapping[str, str] = MappingProxyType(
    {
        "scale": "weight",  # gpt-neox's name in RMSNorm
        "selection_bias": "e_score_correction_bias",  # DeepSeek's name
    }
)
"""Last part of our parameter's name -> theirs, if they differ."""


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
        interleaved: As of `TensorSource`.
    """
    modules = (f"{attention}q_proj", f"{attention}k_proj", f"{attention}v_proj")
    return TensorSource(modules, layout="heads", interleaved=interleaved)


SCORE_TENSORS: Mapping[str, TensorSource] = MappingProxyType({"rm_linear": TensorSource(("score",))})
"""Our modules of a score head -> their sources, the same in every family."""
READABLE_QUANTIZATION = ("fp8", "mxfp4")
"""Methods of quantization whose weights an import reads as bf16: DeepSeek-V3's, of blocks, and that of gpt-oss."""
_FURTHER_LAYER = "model.layers.{i}."
MULTI_TOKEN_TENSORS: Mapping[str, TensorSource] = MappingProxyType(
    same_tensors(_FURTHER_LAYER, {name: name for name in ("enorm", "hnorm", "eh_proj", "shared_head.norm")})
)
"""Our modules in one of multi-token prediction -> their sources, next to those of its block."""
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
        fixed_fields: Fields of `Architecture` that are the same in all of its models. Fields that neither this nor
            `config` gives have the defaults of `Architecture`.
        config: Entries of `config.json`, in its order. They overwrite `fixed_fields`.
        unstored_fields: Fields that `config.json` has no entry for because its models do not depend on them. An import
            gives them the values of `fixed_fields`.
        tensors: Kind of layer -> our module's name -> its source.
        block_tensors: Residual -> our modules of a block that have other sources in networks with that residual.
        base_prefix: Prefix of keys that is missing in files of the model without its head.
        key_aliases: End of a key in files of some versions of transformers -> its end as `tensors` gives it.
        buffers: Ends of keys that hold no weights (masks and tables that are computed).
        ignored: Beginnings of keys that transformers leaves out (`_keys_to_ignore_on_load_unexpected` of `class_name`).
        other_names: Further name of an entry of `config.json` that transformers reads -> its name.
        further_layers_key: Key in `config.json` of the number of layers behind the last block, which are modules of
            multi-token prediction (DeepSeek-V3's). Empty if the family has no place for them; its exports leave them
            out.
        without_adapters: Last name of a linear layer -> why an adapter of it has no effect in `peft`.
        tokenizer_pattern: Pattern by which `AutoTokenizer` of transformers 5 splits texts for this `model_type`,
            whatever the exported tokenizer does; None if it follows the export.
    """

    model_type: str
    class_name: str
    title: str
    fixed_fields: Fields
    config: tuple[ConfigEntries, ...]
    tensors: Mapping[LayerKind, Mapping[str, TensorSource]]
    base_prefix: str
    unstored_fields: tuple[str, ...] = ()
    block_tensors: Mapping[str, Mapping[str, TensorSource]] = field(default_factory=dict)
    key_aliases: Mapping[str, str] = field(default_factory=dict)
    buffers: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    other_names: Mapping[str, str] = field(default_factory=dict)
    score_class: str | None = None
    further_layers_key: str = ""
    without_adapters: Mapping[str, str] = field(default_factory=dict)
    tokenizer_pattern: str | None = None

    @property
    def keeps_multi_token(self) -> bool:
        """Whether its files have a place for modules of multi-token prediction."""
        return bool(self.further_layers_key)

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
        """Return the contents of `config.json`, with other values for the `inexpressible_fields`."""
        gives_scores = architecture.score_head and self.score_class is not None
        class_name = self.score_class if gives_scores else self.class_name
        entries: dict[str, Any] = {"architectures": [class_name], "model_type": self.model_type}
        for config_entries in self.config:
            entries.update(config_entries.write(architecture, settings))
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
        for entries in self.config:
            reasons.extend(entries.problems(hf))
        if reasons:
            raise _not_importable(reasons)
        architecture, settings = self._read(hf)
        if architecture.head_dim < 1:
            raise _not_importable(
                [
                    f"the hidden size, {architecture.hidden_size}, is less than the number of attention heads, "
                    f"{architecture.num_attention_heads}"
                ]
            )
        return architecture, settings

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
        found: dict[str, Any] = {"attention_dropout": 0.0, "hidden_dropout": 0.0, **self.fixed_fields}
        for entries in self.config:
            found.update(entries.read(hf, found))
        if found.get("window"):  # one wider than the context (Phi-3 with 128k tokens) hides nothing
            found["window"] = min(found["window"], found["max_positions"])
        settings = {name: found.pop(name) for name in SETTINGS}
        if _gives_scores(hf):
            found.update(WITHOUT_LOGITS, score_head=True)
        return Architecture(**found), ModelSettings(**settings)

    def inexpressible_fields(self, architecture: Architecture) -> dict[str, str]:
        """Return the fields that would not survive an export and an import again, with the reason for each."""
        expressed, _ = self._read(self.config_json(architecture, _PLACEHOLDERS))
        found: dict[str, str] = {}
        for entry in fields(Architecture):
            if not entry.metadata.get("compared", True) or entry.name in architecture.unused_fields:
                continue
            if entry.name == "mtp_num_layers" and not self.keeps_multi_token:
                continue  # without its modules the network computes the same
            if entry.name in self.unstored_fields:
                continue
            value = getattr(expressed, entry.name)
            if value == getattr(architecture, entry.name):
                continue
            if entry.name == "score_head":
                found[entry.name] = f"transformers has no sequence classification class for {self.title}"
            else:
                found[entry.name] = f"its {entry.name} is {_shown(value)}"
        return found

    def mappings(self, layers: LayerPlan) -> Iterator[TensorMapping]:
        """Yield the mapping of every parameter, in the order of the layers.

        Those of multi-token prediction are left out if the family has no place for them.
        """
        of_block = {**self.tensors["block"], **self.block_tensors.get(layers.architecture.residual, {})}
        number = 0  # of the layer in their files
        for layer in layers.weight_layers:
            if layer.kind == "score_head":
                sources = SCORE_TENSORS
            elif layer.kind == "block":
                sources = of_block
                number = layer.index - BLOCK_OFFSET
            elif layer.kind != "multi_token":
                sources = self.tensors[layer.kind]
            elif self.keeps_multi_token:
                sources = {f"{MULTI_TOKEN_BLOCK}.{ours}": source for ours, source in of_block.items()}
                sources |= MULTI_TOKEN_TENSORS
                number += 1
            else:
                continue
            for parameter in layer.parameters:
                source = sources[parameter.name.rpartition(".")[0]]
                yield TensorMapping(layer.index, parameter.name, source.keys(parameter, number), source)

    def copies(self, layers: LayerPlan) -> Iterator[TensorMapping]:
        """Yield the mappings of the copies of embedding and head that each module of multi-token prediction has."""
        if not self.keeps_multi_token:
            return
        words = layers[0]
        head = layers.head if layers.head.parameters else words
        for number, _ in enumerate(layers.multi_token, start=layers.architecture.num_layers):
            for owner, module in ((words, "embed_tokens"), (head, "shared_head.head")):
                source = TensorSource((_FURTHER_LAYER + module,))
                copied = owner.parameters[0]
                yield TensorMapping(owner.index, copied.name, source.keys(copied, number), source)

    def head_keys(self) -> set[str]:
        """Return the keys of the head, which files of a tied model may hold as a copy of the embedding."""
        endings = ["weight", "bias"] if self.is_encoder else ["weight"]
        keys: set[str] = set()
        for source in self.tensors["head"].values():
            for name in source.modules:
                keys.update(f"{name}.{ending}" for ending in endings)
        aliases = {alias for alias, key in self.key_aliases.items() if key in keys}
        return keys | aliases


def _not_importable(reasons: Sequence[str]) -> ConversionError:
    return ConversionError("this Hugging Face model cannot be imported:\n  " + "\n  ".join(reasons))


def _problems_of_all(hf: Mapping[str, Any]) -> Iterator[str]:
    """Yield why a model of any family cannot be read: it is quantized (int8, int4), or has an encoder, too."""
    given = hf.get("quantization_config")
    if given and (not isinstance(given, Mapping) or given.get("quant_method") not in READABLE_QUANTIZATION):
        method = given.get("quant_method") if isinstance(given, Mapping) else given
        yield (
            f"quantization_config: quant_method {method!r}: is not supported ({', '.join(READABLE_QUANTIZATION)} are); "
            "save the model with 16-bit or 32-bit weights first (transformers: `model.dequantize()`)"
        )
    if hf.get("is_encoder_decoder"):
        yield f"is_encoder_decoder: {hf['is_encoder_decoder']!r}: models of an encoder and a decoder are not supported"


def _gives_scores(hf: Mapping[str, Any]) -> bool:
    """Return whether a `config.json` belongs to a sequence classification model, whose head computes scores."""
    names = hf.get("architectures")
    if not isinstance(names, list):
        return False
    return any(str(name).endswith("ForSequenceClassification") for name in names)


def _shown(value: Any) -> str:
    """Return a field's value for a message; a tuple as its distinct elements."""
    if not isinstance(value, tuple):
        return str(value)
    return ", ".join(dict.fromkeys(map(str, value))) or "none"
