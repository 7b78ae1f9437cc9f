"""Whether a checkpoint fits a run: by the names and shapes of its tensors, and by what it stores of its model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from neox.architecture import ADAPTER, VOCABULARY, LayerEntry
from neox.checkpoint.identity import check_trained_model
from neox.checkpoint.weights.reader import CheckpointReader
from neox.checkpoint_files.contents import damaged_weights, why_incomplete
from neox.checkpoint_files.finding import checkpoint_directories
from neox.checkpoint_files.manifest import is_unfetched
from neox.checkpoint_files.names import layer_file
from neox.errors import CheckpointError
from neox.plan import RunPlan

_SHOWN = 4  # misfits that are described; blocks of one network mostly have the same


def why_unfit(path: Path, plan: RunPlan, *, training: bool, finetune: bool, knows_vocabulary: bool = True) -> list[str]:
    """Return why the network of a run cannot be filled from a checkpoint. No weight is read.

    A checkpoint that is not complete, or has damaged files, counts as fitting next to others, since an older one is
    loaded instead. So does one whose files are still in object storage.

    Args:
        path: The checkpoint.
        plan: The run.
        training: Whether the model is trained, not only run.
        finetune: As of `CheckpointReader`.
        knows_vocabulary: Whether the vocabulary of the plan is that of a tokenizer, and not an assumed one.
    """
    layers = plan.layers
    date = plan.config.checkpoint.gpt_neox_date
    if any(map(is_unfetched, path.iterdir())):
        return []
    has_others = len(checkpoint_directories(path.parent)) > 1
    incomplete = why_incomplete(path, hashes=False)
    if incomplete:
        if has_others:
            return []
        return [f"{path} is not complete: {'; '.join(incomplete)}"]
    try:
        reader = CheckpointReader(path, layers, finetune=finetune, gpt_neox_date=date)
        misfits: list[str] = []
        for layer in layers.weight_layers:
            if layer.index not in reader.new_layers and not reader.starts_as_embedding(layer.index):
                misfits += _misfits(reader, layer, finetune=finetune)
        reader.release()
        if not misfits:
            _ = reader.row_order  # asks if nothing tells it
            if training:
                check_trained_model(path, reader.args, plan, finetune=finetune, knows_vocabulary=knows_vocabulary)
    except CheckpointError as error:
        if has_others and damaged_weights(path):
            return []
        return [str(error)]
    if not misfits:
        return []
    more = f"; and {len(misfits) - _SHOWN} more" if len(misfits) > _SHOWN else ""
    return [f"{path} does not fit this model: {'; '.join(misfits[:_SHOWN])}{more}"]


def _misfits(reader: CheckpointReader, layer: LayerEntry, *, finetune: bool) -> Iterator[str]:
    """Yield what a layer lacks, has besides, or has in another shape."""
    stored = set(reader.names(layer.index))
    where = layer_file(layer.index, 0)
    if layer.kind == "block":
        extra = reader.unknown_names(layer)
        if extra:
            yield f"{where} holds {', '.join(extra)}, which this model does not have"
    for spec in layer.parameters:
        if spec.name not in stored:
            if not (finetune and ADAPTER in spec.name):
                yield f"{where} has no {spec.name}"
            continue
        found = reader.shape(layer.index, spec.name)
        dim = 1 if spec.name in VOCABULARY else 0  # rows that pad the vocabulary may differ
        if found[dim:] != spec.shape[dim:]:
            yield f"{spec.name} has shape {list(found)} in {where} and its like, here it has {list(spec.shape)}"
