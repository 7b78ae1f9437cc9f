"""LoRA adapters in the files of the package `peft`: import and export.

Both sides compute y = W x + scale B A x. One linear layer of ours may be several modules there: queries, keys and
values, or the two products of a gated MLP. An export gives all of them our A, and each its rows of our B. An import
joins adapters that may differ: its A consists of all different ones, and its B has zeros outside of theirs.

    ours                        export ->                              import <-
    A [r, inputs]               A of each module [r, inputs]           [A1]      [B1  0   0 ]
    B [outputs, r]              B1 [outputs of module 1, r], B2, B3    [A2]      [0   B2  0 ]    rank r1 + r2 + r3
                                                                       [A3]      [0   0   B3]

Modules with the same A, as our exports have them, share its rows: their rank stays r. The rows of B are in the order of
the weight's (`neox.convert.layouts`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from neox.architecture import ADAPTED_LAYERS, ADAPTER, LayerPlan, Lora, Uniform, add_adapters
from neox.checkpoint import CheckpointReader, check_same_model, checkpoint_at
from neox.config import NeoXConfig
from neox.convert.hf_directory import ADAPTER_CONFIG, check_new_directory, new_directory, read_json, write_json
from neox.convert.layouts import from_hf_layout, to_hf_layout
from neox.convert.peft_experts import (
    expert_b_from_peft,
    expert_b_to_peft,
    expert_module,
    expert_parameter,
    expert_stacks,
)
from neox.convert.to_hf import choose_family
from neox.convert.verification import single_rank_plan
from neox.errors import ConversionError, TokenizerError, refusals
from neox.families import Family, TensorMapping, TensorSource
from neox.log import get_logger
from neox.tokenizer import other_tokenizer, tokenizer_of

_log = get_logger(__name__)
_WEIGHTS = "adapter_model.safetensors"
_PREFIX = "base_model.model."
"""Beginning of the names of all modules."""
_KEY = re.compile(rf"^{re.escape(_PREFIX)}(.+)\.lora_[AB]\.weight$")
_USED = frozenset(
    {
        "alpha_pattern",
        "bias",
        "init_lora_weights",
        "lora_alpha",
        "lora_dropout",
        "peft_type",
        "r",
        "rank_pattern",
        "target_modules",
        "target_parameters",
        "use_rslora",
    }
)
"""Keys that are read."""
WITHOUT_EFFECT: Mapping[str, str] = MappingProxyType(
    {
        "auto_mapping": "names the class of the base model",
        "base_model_name_or_path": "names the base model",
        "corda_config": "how A and B were initialised; `init_lora_weights` says whether the base model was changed",
        "ensure_weight_tying": "what becomes of tied modules that are trained, which `modules_to_save` names",
        "eva_config": "how A was initialised",
        "exclude_modules": "which modules have no adapter: the tensors say it",
        "fan_in_fan_out": "how peft stores the base model's weights; A and B have the same form",
        "inference_mode": "whether peft trains the adapter",
        "layers_pattern": "names the blocks of `layers_to_transform`",
        "loftq_config": "how A and B were initialised; `init_lora_weights` says whether the base model was changed",
        "lora_ga_config": "how A and B were initialised; `init_lora_weights` says whether the base model was changed",
        "megatron_core": "name of a package, for `megatron_config`",
        "peft_version": "who wrote the adapter",
        "qalora_group_size": "a size, for `use_qalora`",
        "revision": "names the base model",
        "runtime_config": "how peft runs the adapter",
        "task_type": "names the class of the model; further tensors would be in the file",
    }
)
"""Keys that cannot change the function of an adapter, and why. Every other key that is set is refused by name."""
_KEEPS_BASE = (None, True, False, "true", "false", "gaussian", "eva", "orthogonal", "mica")
"""Values of `init_lora_weights` (in small letters) with which the adapter belongs to the base model as it is.

PiSSA, OLoRA, CorDA, LoftQ and LoRA-GA take a part out of the base model's weights, and so might values to come."""


class _AdapterProduct(NamedTuple):
    """One adapter: scale * B A. Of a stack of experts it is one of each, along a first dimension.

    Attributes:
        a: A [rank, inputs].
        b: B [outputs, rank].
        scale: The scale.
    """

    a: Tensor
    b: Tensor
    scale: float


@dataclass(frozen=True)
class PeftAdapter:
    """An adapter that peft has written, in our form.

    Attributes:
        lora: Rank, alpha and targets.
        dropout: Dropout probability of its inputs.
        tensors: Layer index -> our name -> A or B.
    """

    lora: Lora
    dropout: float
    tensors: Mapping[int, Mapping[str, Tensor]]

    @property
    def keys(self) -> dict[str, Any]:
        """The YAML's `lora`."""
        return {
            "r": self.lora.rank,
            "alpha": self.lora.alpha,
            "dropout": self.dropout,
            "target": list(self.lora.targets),
        }


def further_layers_left_out(layers: LayerPlan, stored: int) -> range:
    """Return the numbers of the layers of multi-token prediction that files hold and a model lacks.

    Args:
        layers: Layers of the model.
        stored: Number of such modules in the files of the base model.
    """
    network = layers.architecture
    return range(network.num_layers + network.mtp_num_layers, network.num_layers + stored)


def prefixes_of_layers(numbers: range) -> tuple[str, ...]:
    """Return the beginnings of the names of all tensors of some layers in files of the base model."""
    return tuple(f"model.layers.{number}." for number in numbers)


def read_peft_adapter(directory: Path, layers: LayerPlan, family: Family, further_layers: int = 0) -> PeftAdapter:
    """Read an adapter that `peft` has written, for a model with these layers.

    All adapters of ours have one rank and one scale. It is the largest one that a layer needs, and smaller adapters get
    rows of A that start as those of a new adapter, with columns of zeros in B. Modules of multi-token prediction, which
    peft's models lack, get the adapters that the file has under the names of their layers, and otherwise new ones.

    Args:
        directory: Directory of the adapter.
        layers: Layers of the model, without adapters.
        family: Family of the model.
        further_layers: Number of modules of multi-token prediction in the base model's files. Adapters of those that
            the model lacks are left out.

    Raises:
        ConversionError: For settings that are not supported, each by name, and for missing or unknown tensors.
    """
    settings = read_json(directory / ADAPTER_CONFIG)
    _check_settings(directory / ADAPTER_CONFIG, settings)
    weights = list(_adaptable_weights(layers, family))
    stored = _read_tensors(directory / _WEIGHTS)
    lacking = further_layers_left_out(layers, further_layers)
    prefixes = tuple(_PREFIX + name for name in prefixes_of_layers(lacking))
    left_out = 0
    for key in list(stored):
        if key.startswith(prefixes):
            del stored[key]
            left_out += 1
    if left_out:
        _log.warning("left out %d adapters of multi-token prediction, which the model lacks", left_out // 2)
    joined = _products_of_experts(directory / _WEIGHTS, settings, stored, layers, family)
    products = _read_products(directory / _WEIGHTS, settings, stored, weights)
    for mapping in weights:
        theirs = [products.get(module) for module in _modules_of(mapping)]
        if any(theirs):
            joined[mapping] = _join(theirs, mapping, layers, directory / _WEIGHTS)
    if not joined:
        raise ConversionError(f"{directory / _WEIGHTS}: holds no adapters")
    _refuse_missing(directory / _WEIGHTS, settings, products, weights, layers)
    targets = tuple(sorted(set(map(_target_of, joined))))
    rank = max(product.a.shape[-2] for product in joined.values())
    scale = max(product.scale for product in joined.values())
    tensors: dict[int, dict[str, Tensor]] = {}
    for mapping, product in joined.items():
        padded = _pad(product, rank, scale, seed=mapping.layer)
        adapter = mapping.name.removesuffix(".weight") + ADAPTER
        state = tensors.setdefault(mapping.layer, {})
        state[f"{adapter}lora_A"] = padded.a
        state[f"{adapter}lora_B"] = padded.b
    ranks = {len(product.a) for product in products.values()}
    if ranks and ranks != {rank}:
        _log.info("adapters of rank %s became products of rank %d", ", ".join(map(str, sorted(ranks))), rank)
    lora = Lora(rank, scale * rank, targets)
    _add_new_adapters(tensors, layers, lora)
    return PeftAdapter(lora, float(settings.get("lora_dropout") or 0.0), tensors)


def _add_new_adapters(tensors: dict[int, dict[str, Tensor]], layers: LayerPlan, lora: Lora) -> None:
    """Add adapters that change nothing to linear layers that have our name of a target, and none in the file.

    A network may have that name more than once: in a dense MLP, in experts and in a shared expert.
    """
    new: list[str] = []
    for layer in add_adapters(layers, lora):
        for spec in layer.parameters:
            if ADAPTER not in spec.name or spec.name in tensors.get(layer.index, {}):
                continue
            values = torch.zeros(spec.shape)
            if isinstance(spec.init, Uniform):
                generator = torch.Generator().manual_seed(layer.index)
                values = values.uniform_(spec.init.low, spec.init.high, generator=generator)
            tensors.setdefault(layer.index, {})[spec.name] = values
            new.append(spec.name.partition(ADAPTER)[0])
    if new:
        _log.info("layers of the same names start with new adapters: %s", ", ".join(dict.fromkeys(new)))


def _check_settings(file: Path, settings: Mapping[str, Any]) -> None:
    """Raise ConversionError for settings with which the adapter is another function, each by name."""
    problems = []
    if settings.get("peft_type", "LORA") != "LORA":
        problems.append(f"peft_type: {settings['peft_type']}")
    if settings.get("bias") not in (None, "none"):
        problems.append(f"bias: {settings['bias']}")
    for key, value in settings.items():
        if value and key not in _USED and key not in WITHOUT_EFFECT:
            problems.append(f"{key}: {value}")
    how = settings.get("init_lora_weights")
    if (how.lower() if isinstance(how, str) else how) not in _KEEPS_BASE:
        problems.append(f"init_lora_weights: {how}")
    for key in ("r", "lora_alpha"):
        value = settings.get(key)
        if not isinstance(value, int | float) or value <= 0:
            problems.append(f"{key}: {value}")
    if problems:
        raise ConversionError(f"{file}: {'; '.join(problems)} is not supported")


def _read_tensors(file: Path) -> dict[str, Tensor]:
    """Return the tensors of an adapter's file. Raises ConversionError if there is none."""
    from safetensors.torch import load_file

    if not file.is_file():
        raise ConversionError(f"{file} does not exist; save the adapter with safe_serialization=True")
    return load_file(file)


def _products_of_experts(
    file: Path, settings: Mapping[str, Any], stored: dict[str, Tensor], layers: LayerPlan, family: Family
) -> dict[TensorMapping, _AdapterProduct]:
    """Return the adapters of the experts of each block, A [experts, r, inputs] and B [experts, outputs, r].

    Args:
        file: File of the adapters, for messages.
        settings: peft's settings.
        stored: Its tensors, from which those of experts are taken.
        layers: Layers of the model.
        family: Family of the model.

    Raises:
        ConversionError: For missing tensors, other shapes, and settings that may differ between parameters.
    """
    targets = settings.get("target_parameters") or []
    if not isinstance(targets, list) or not all(isinstance(target, str) for target in targets):
        raise ConversionError(f"{file}: target_parameters should be a list of names, not {targets!r}")
    found: dict[TensorMapping, str] = {}
    matched: set[str] = set()
    for mapping in expert_stacks(layers, family):
        parameter = expert_parameter(mapping, layers)
        is_stored = _tensor_key(parameter.rpartition(".")[0], "A") in stored
        if layers[mapping.layer].kind == "multi_token" and not is_stored:
            continue  # peft's models lack the module
        for target in targets:
            if f".{parameter}".endswith(f".{target}"):
                found[mapping] = parameter
                matched.add(target)
    for target in targets:
        if target not in matched:
            raise ConversionError(f"{file}: target_parameters: {target} is no parameter of experts of this model")
    if found and (settings.get("alpha_pattern") or settings.get("rank_pattern")):
        raise ConversionError(f"{file}: rank_pattern and alpha_pattern next to target_parameters are not supported")

    products = {}
    rank = int(settings["r"])
    scale = float(settings["lora_alpha"]) / rank
    if settings.get("use_rslora"):
        scale *= math.sqrt(rank)
    for mapping, parameter in found.items():
        spec = next(spec for spec in layers[mapping.layer].parameters if spec.name == mapping.name)
        experts, outputs, inputs = spec.shape
        module = expert_module(parameter, tuple(found.values()))
        tensors = []
        for part, shape in (("A", (experts * rank, inputs)), ("B", (outputs, rank * experts))):
            key = _tensor_key(module, part)
            if key not in stored:
                raise ConversionError(f"{file}: {key} is missing")
            tensors.append(stored.pop(key))
            if tuple(tensors[-1].shape) != shape:
                raise ConversionError(
                    f"{file}: {key} has shape {list(tensors[-1].shape)}, and {experts} experts of this model with rank "
                    f"{rank} need {list(shape)}"
                )
        a, b = tensors
        b = expert_b_from_peft(b, experts, mapping.source, layers.architecture)
        products[mapping] = _AdapterProduct(a.unflatten(0, (experts, rank)), b, scale)
    return products


def _read_products(
    file: Path, settings: Mapping[str, Any], stored: Mapping[str, Tensor], weights: Sequence[TensorMapping]
) -> dict[str, _AdapterProduct]:
    """Return the adapter of each Hugging Face module. Raises ConversionError for missing and unknown tensors."""
    known: set[str] = set()
    for mapping in weights:
        known.update(_modules_of(mapping))
    products: dict[str, _AdapterProduct] = {}
    unknown = []
    for key in stored:
        match = _KEY.match(key)
        if match is None or match[1] not in known:
            unknown.append(key)
        elif match[1] not in products:
            products[match[1]] = _product_of(file, settings, match[1], stored)
    if unknown:
        raise ConversionError(
            f"{file}: unknown tensors {', '.join(sorted(unknown)[:5])}; adapters of "
            f"{', '.join(sorted({module.rpartition('.')[2] for module in known}))} are supported"
        )
    return products


def _read_setting(settings: Mapping[str, Any], key: str, patterns: str, module: str) -> Any:
    """Return a setting of peft's that may differ by module: the value of the first pattern that fits its name."""
    for pattern, value in (settings.get(patterns) or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return value
    return settings[key]


def _product_of(file: Path, settings: Mapping[str, Any], module: str, stored: Mapping[str, Tensor]) -> _AdapterProduct:
    """Return the adapter of one Hugging Face module. Raises ConversionError for missing tensors and other ranks."""
    for part in ("A", "B"):
        if _tensor_key(module, part) not in stored:
            raise ConversionError(f"{file}: {_tensor_key(module, part)} is missing")
    a = stored[_tensor_key(module, "A")]
    b = stored[_tensor_key(module, "B")]
    rank = int(_read_setting(settings, "r", "rank_pattern", module))
    if a.shape[0] != rank or b.shape[1] != rank:
        raise ConversionError(
            f"{file}: the adapter of {module} has shapes {list(a.shape)} and {list(b.shape)}, but its rank in "
            f"{ADAPTER_CONFIG} is {rank}"
        )
    divisor = math.sqrt(rank) if settings.get("use_rslora") else rank
    alpha = float(_read_setting(settings, "lora_alpha", "alpha_pattern", module))
    return _AdapterProduct(a, b, alpha / divisor)


def _refuse_missing(
    file: Path,
    settings: Mapping[str, Any],
    products: Mapping[str, _AdapterProduct],
    weights: Sequence[TensorMapping],
    layers: LayerPlan,
) -> None:
    """Raise ConversionError if a kind of module that has adapters misses some, or all."""
    targets = settings.get("target_modules")
    if isinstance(targets, list):
        excluded: list[str] = []
        for mapping in weights:
            excluded += filter(lambda module: _is_excluded(module, settings), _modules_of(mapping))
        for target in targets:
            if not any(f".{module}".endswith(f".{target}") for module in (*products, *excluded)):
                raise ConversionError(f"{file}: target_modules: {target} has no tensors")
    in_some_block: set[str] = set()
    lacking: list[tuple[str, str]] = []  # kind of module, module
    for mapping in weights:
        if layers[mapping.layer].kind != "block":
            continue  # peft's models lack modules of multi-token prediction
        for kind, module in zip(mapping.source.modules, _modules_of(mapping), strict=True):
            if module in products:
                in_some_block.add(kind)
            elif not _is_excluded(module, settings):
                lacking.append((kind, module))
    for kind, module in lacking:
        if kind in in_some_block:
            raise ConversionError(f"{file}: {_tensor_key(module, 'A')} is missing, which other blocks have")


def _is_excluded(module: str, settings: Mapping[str, Any]) -> bool:
    """Return whether `exclude_modules` names a module, as in peft (`tuners_utils.check_target_module_exists`)."""
    excluded = settings.get("exclude_modules") or ()
    if isinstance(excluded, str):
        return re.fullmatch(excluded, module) is not None
    return any(f".{module}".endswith(f".{name}") for name in excluded)


def _join(
    products: Sequence[_AdapterProduct | None], mapping: TensorMapping, layers: LayerPlan, file: Path
) -> _AdapterProduct:
    """Return the adapter of one linear layer of ours.

    Args:
        products: Adapters of the Hugging Face modules that it consists of; None for a module without one.
        mapping: Weight of the layer.
        layers: Layers of the model.
        file: File of the adapters, for messages.

    Raises:
        ConversionError: If a tensor has another shape than the model's.
    """
    shape = next(spec.shape for spec in layers[mapping.layer].parameters if spec.name == mapping.name)
    source = _layout_of_b(mapping.source)
    shapes = [part.shape for part in to_hf_layout(torch.empty(shape, device="meta"), source, layers.architecture)]

    # A: all different ones below each other. Each module knows the columns of B that meet its own rows.
    different: list[Tensor] = []
    columns: list[slice] = []
    for product, wanted, module in zip(products, shapes, _modules_of(mapping), strict=True):
        if product is None:
            columns.append(slice(0, 0))
            continue
        found = (product.b.shape[0], product.a.shape[1])
        if found != wanted:
            raise ConversionError(
                f"{file}: the adapter of {module} is for a weight of shape {list(found)}, but this model's has "
                f"{list(wanted)}"
            )
        columns.append(_place(product.a, different))
    a = torch.cat(different)

    # B: the modules' rows, zero outside of their columns. The largest scale stays, so that no number grows.
    scale = max(product.scale for product in products if product)
    rows = []
    for product, wanted, here in zip(products, shapes, columns, strict=True):
        b = torch.zeros(wanted[0], len(a), dtype=a.dtype)
        if product is not None:
            b[:, here] = product.b * (product.scale / scale)
        rows.append(b)
    return _AdapterProduct(a, from_hf_layout(rows, source, layers.architecture), scale)


def _place(a: Tensor, different: list[Tensor]) -> slice:
    """Return the rows of a matrix A among matrices that stand below each other. If it is not there, append it."""
    first = 0
    for other in different:
        if torch.equal(other, a):
            return slice(first, first + len(a))
        first += len(other)
    different.append(a)
    return slice(first, first + len(a))


def _pad(product: _AdapterProduct, rank: int, scale: float, seed: int) -> _AdapterProduct:
    """Return the same product with another rank and scale.

    Args:
        product: The product, of at most that rank.
        rank: Rank of the result. New rows of A start as those of a new adapter, new columns of B are zeros.
        scale: Scale of the result.
        seed: Seed of the new rows.
    """
    b = product.b * (product.scale / scale)
    *stack, present, inputs = product.a.shape
    missing = rank - present
    if missing == 0:
        return _AdapterProduct(product.a, b, scale)
    generator = torch.Generator().manual_seed(seed)
    new_rows = (2 * torch.rand(*stack, missing, inputs, generator=generator) - 1) / math.sqrt(inputs)
    a = torch.cat([product.a, new_rows.to(product.a.dtype)], dim=-2)
    return _AdapterProduct(a, torch.cat([b, b.new_zeros(*b.shape[:-1], missing)], dim=-1), scale)


def write_peft_adapter(
    input_dir: str | Path,
    config: NeoXConfig,
    output_dir: str | Path,
    *,
    base: str,
    overwrite: bool = False,
    hf_architecture: str | None = None,
) -> Path:
    """Write a checkpoint's adapters without its weights, as `peft` loads them onto the exported base model.

    Args:
        input_dir: `global_stepN` directory of a run with `lora`, or one that holds some.
        config: The run's configuration.
        output_dir: Directory to create.
        base: Name or path of the base model, which peft finds in the adapter.
        overwrite: Whether `output_dir` is replaced.
        hf_architecture: Key of `FAMILIES`, that of the base model; None takes the first that can express the model.

    Returns:
        The directory.

    Raises:
        ConfigError: If no family can express the model.
        ConversionError: If the checkpoint has no adapters, or was trained with another tokenizer.
        CheckpointError: If the checkpoint cannot be read or belongs to another model.
    """
    from safetensors.torch import save_file

    path = checkpoint_at(Path(input_dir))
    output = Path(output_dir)
    check_new_directory(output, overwrite=overwrite)
    stored = CheckpointReader(path)
    _refuse_other_tokenizer(config, path)
    settings = stored.args.get("lora")
    if settings is None:
        raise ConversionError(f"{path} holds no adapters: it was not trained with `lora`")
    lora = Lora(settings["rank"], settings["alpha"], tuple(settings["targets"]))
    family = choose_family(config, hf_architecture)
    plan = single_rank_plan(config, stored.vocabulary_rows)
    check_same_model(path, stored.args, plan)
    if plan.architecture.score_head:
        raise ConversionError(
            f"{path} is a reward model, whose whole head was trained in addition to the adapters: export it without "
            "--adapter, which merges the adapters into the weights"
        )
    _refuse_unadapted(path, lora, plan.layers, family)
    reader = CheckpointReader(path, add_adapters(plan.layers, lora))
    tensors: dict[str, Tensor] = {}
    adapted: list[str] = []
    of_experts: dict[str, list[str]] = {}
    transposed = False
    for mapping in _adaptable_weights(plan.layers, family):
        if _target_of(mapping) not in lora.targets:
            continue
        adapted += _modules_of(mapping)
        transposed = mapping.source.transpose
        adapter = mapping.name.removesuffix(".weight") + ADAPTER
        a = reader.full(mapping.layer, f"{adapter}lora_A")
        b = reader.full(mapping.layer, f"{adapter}lora_B")
        rows = to_hf_layout(b, _layout_of_b(mapping.source), plan.architecture)
        for module, part in zip(_modules_of(mapping), rows, strict=True):
            tensors[_tensor_key(module, "A")] = a.clone()
            tensors[_tensor_key(module, "B")] = part.contiguous()
    parameters: dict[str, TensorMapping] = {}
    for mapping in expert_stacks(plan.layers, family):
        if _target_of(mapping) in lora.targets:
            parameters[expert_parameter(mapping, plan.layers)] = mapping
    for parameter, mapping in parameters.items():
        adapter = mapping.name.removesuffix(".weight") + ADAPTER
        a = reader.full(mapping.layer, f"{adapter}lora_A")
        b = reader.full(mapping.layer, f"{adapter}lora_B")
        module = expert_module(parameter, parameters)
        tensors[_tensor_key(module, "A")] = a.flatten(0, 1).clone()
        tensors[_tensor_key(module, "B")] = expert_b_to_peft(b, mapping.source, plan.architecture)
    if parameters:
        ends = set()
        for parameter in parameters:
            ends.add(".".join(parameter.split(".")[-3:]))  # mlp.experts.NAME
        of_experts = {"target_parameters": sorted(ends)}
    peft_settings = {
        "peft_type": "LORA",
        "bias": "none",
        "use_rslora": False,
        "use_dora": False,
        "task_type": None if family.is_encoder else "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": config.training.lora.dropout if config.training.lora else 0.0,
        "target_modules": _target_modules(adapted, family.mappings(plan.layers)) or None,
        "fan_in_fan_out": transposed,
        "inference_mode": True,
        **of_experts,
    }
    with new_directory(output, overwrite=overwrite) as partial:
        write_json(partial / ADAPTER_CONFIG, peft_settings)
        save_file(tensors, partial / _WEIGHTS, metadata={"format": "pt"})
    return output


def _refuse_unadapted(checkpoint: Path, lora: Lora, layers: LayerPlan, family: Family) -> None:
    """Raise ConversionError if adapters are of linear layers that are without them in `peft`, whose logits differ."""
    reasons: dict[str, str] = {}
    for mapping in _adaptable_weights(layers, family):
        if _target_of(mapping) not in lora.targets:
            continue
        for module in _modules_of(mapping):
            name = module.rpartition(".")[2]
            if name in family.without_adapters:
                reasons[name] = f"{name} ({family.without_adapters[name]})"
    if reasons:
        raise ConversionError(
            f"{checkpoint} has adapters that peft does not run in {family.title}: {', '.join(reasons.values())}; "
            "export it without --adapter, which merges the adapters into the weights"
        )


def _refuse_other_tokenizer(config: NeoXConfig, checkpoint: Path) -> None:
    """Raise ConversionError if the configuration's tokenizer can be built and is not that of the training."""
    try:
        tokenizer = tokenizer_of(config)
    except TokenizerError:
        return
    difference = other_tokenizer(config, tokenizer, checkpoint)
    if difference is not None:
        with refusals():
            raise ConversionError(difference)


def _target_modules(adapted: Sequence[str], mappings: Iterable[TensorMapping]) -> list[str]:
    """Return names for `target_modules`, which peft compares with the ends of all modules' names.

    Args:
        adapted: Modules that have adapters.
        mappings: All parameters of the network.

    Returns:
        The shortest ends that no other module has; a whole name if another module has each of its ends.
    """
    others: set[str] = set()
    for mapping in mappings:
        others.update(_modules_of(mapping))
    others.difference_update(adapted)
    found = set()
    for module in adapted:
        words = module.split(".")
        end = words.pop()
        while words and any(f".{other}".endswith(f".{end}") for other in others):
            end = f"{words.pop()}.{end}"
        found.add(end)
    return sorted(found)


def _adaptable_weights(layers: LayerPlan, family: Family) -> Iterator[TensorMapping]:
    """Yield the weights of blocks, and of modules of multi-token prediction, that can have adapters."""
    for mapping in family.mappings(layers):
        layer = layers[mapping.layer]
        if layer.kind not in ADAPTED_LAYERS:
            continue
        spec = next(spec for spec in layer.parameters if spec.name == mapping.name)
        if spec.is_matrix and not spec.experts:
            yield mapping


def _target_of(mapping: TensorMapping) -> str:
    """Return the name of a linear layer among the targets of `lora`."""
    return mapping.name.removesuffix(".weight").rpartition(".")[2]


def _modules_of(mapping: TensorMapping) -> list[str]:
    """Return the Hugging Face modules of a parameter."""
    return [key.rpartition(".")[0] for key in mapping.keys]


def _layout_of_b(source: TensorSource) -> TensorSource:
    """Return the layout of B, whose rows are those of the weight. Like A, it is never stored transposed."""
    return replace(source, transpose=False)


def _tensor_key(module: str, part: str) -> str:
    """Return peft's key of A or B of a module."""
    return f"{_PREFIX}{module}.lora_{part}.weight"
