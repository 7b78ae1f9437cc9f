"""Laws of the run: optimizer, schedule, checkpoints, data, hosts."""

from __future__ import annotations

from collections.abc import Iterator

from neox.config.sections import NeoXConfig
from neox.config.splits import split_problem
from neox.config.wording import place, said

# More checkpoints than this are a mistake, and listing them would take longer than refusing them.
_MOST_CHECKPOINTS = 100_000


def run_problems(config: NeoXConfig) -> Iterator[str]:
    """Yield violations of laws about how a run goes."""
    yield from _optimizer(config)
    yield from _schedule(config)
    yield from _checkpoint(config)
    yield from _data(config)
    yield from _documents_apart(config)
    yield from _hosts(config)


def _optimizer(config: NeoXConfig) -> Iterator[str]:
    block = config.optimizer.optimizer
    if block.type.lower() not in ("adam", "adamw"):
        yield f"{place(config, 'optimizer.type')}`optimizer.type: {block.type}` is not implemented; use Adam"
    for i, beta in enumerate(block.params.betas):
        if not 0 <= beta < 1:
            yield f"{place(config, 'optimizer.params.betas')}`optimizer.params.betas[{i}]: {beta}` must be in [0, 1)"
    inner, flat = block.params.weight_decay, config.optimizer.weight_decay
    if inner is not None and config.given("weight_decay") and inner != flat:
        yield (
            f"{place(config, 'optimizer.params.weight_decay')}`optimizer.params.weight_decay: {inner}` contradicts "
            f"{said(config, 'weight_decay', flat)}; keep one"
        )
    if block.params.adam_w_mode is False:
        yield (
            f"{place(config, 'optimizer.params.adam_w_mode')}`optimizer.params.adam_w_mode: false`: weight decay is "
            "decoupled here, as in gpt-neox; remove it"
        )


def _schedule(config: NeoXConfig) -> Iterator[str]:
    schedule, lr = config.schedule, config.optimizer.optimizer.params.lr
    if schedule.min_lr > lr:
        yield (
            f"{place(config, 'min_lr')}`min_lr: {schedule.min_lr}` is larger than the peak "
            f"{said(config, 'optimizer.params.lr', lr)}; the schedule decays from the peak down to it"
        )
    if schedule.lr_decay_iters is not None and schedule.lr_decay_fraction is not None:
        yield (
            f"{place(config, 'lr_decay_fraction')}`lr_decay_fraction: {schedule.lr_decay_fraction}` and "
            f"{said(config, 'lr_decay_iters', schedule.lr_decay_iters)} say the same thing; keep one"
        )
    if schedule.lr_decay_style != "constant":
        longest = 0.5 if schedule.lr_schedule_version == "v2.0" else 1.0
        if schedule.warmup > longest or schedule.warmup == 1.0:
            yield (
                f"{place(config, 'warmup')}`warmup: {schedule.warmup}` leaves no iterations to decay; it is a part of "
                f"lr_decay_iters and must be {'at most 0.5 with the v2.0 form' if longest == 0.5 else 'below 1'}"
            )


def _checkpoint(config: NeoXConfig) -> Iterator[str]:
    keys = config.checkpoint
    factor = keys.checkpoint_factor
    if factor is not None and keys.checkpoint_scale == "log" and factor <= 1:
        yield (
            f"{place(config, 'checkpoint_factor')}`checkpoint_factor: {factor}` must be above 1 with checkpoint_scale "
            "log, which saves at its powers"
        )
    total = config.training.train_iters or 0
    if factor is not None and keys.checkpoint_scale == "linear" and total // factor > _MOST_CHECKPOINTS:
        yield (
            f"{place(config, 'checkpoint_factor')}`checkpoint_factor: {factor}` over "
            f"{said(config, 'train_iters', total)} saves {total // factor:,} checkpoints; give a larger one, such as "
            f"{-(-total // 100)}"
        )
    if keys.checkpoint_scale == "log" and factor is None:
        yield f"{place(config, 'checkpoint_scale')}`checkpoint_scale: log` needs checkpoint_factor, such as 2"
    negative = [i for i in keys.extra_save_iters or () if i < 0]
    if negative:
        yield f"{place(config, 'extra_save_iters')}`extra_save_iters` has {negative[0]}; iterations start at 0"
    if keys.finetune and keys.load is None:
        yield f"{place(config, 'finetune')}`finetune: true` needs `load`, the checkpoint to start from"


def _data(config: NeoXConfig) -> Iterator[str]:
    data = config.data
    if data.data_path is not None and data.train_data_paths is not None:
        yield (
            f"{place(config, 'data_path')}`data_path` and {said(config, 'train_data_paths', data.train_data_paths)} "
            "both name training data; keep one"
        )
    for split in ("train", "valid", "test"):
        paths, weights = getattr(data, f"{split}_data_paths"), getattr(data, f"{split}_data_weights")
        key = f"{split}_data_weights"
        if weights is None:
            continue
        if paths is None or len(paths) != len(weights):
            yield (
                f"{place(config, key)}`{key}` has {len(weights)} weights for {len(paths or ())} {split}_data_paths; "
                "give one weight for each path"
            )
        if any(weight < 0 for weight in weights) or sum(weights) <= 0:
            yield f"{place(config, key)}`{key}: {list(weights)}` must not be negative and must not all be 0"
        if data.weight_by_num_documents:
            yield f"{place(config, key)}`{key}` and weight_by_num_documents both set weights; keep one"
    problem = split_problem(data.split)
    if problem is not None and data.train_data_paths is None:
        yield f"{place(config, 'split')}`split: {data.split}` {problem}"


def _documents_apart(config: NeoXConfig) -> Iterator[str]:
    if not config.data.reset_attention_mask:
        return
    where, pp = place(config, "reset_attention_mask"), config.parallelism.pipe_parallel_size
    if pp > 1:
        yield (
            f"{where}`reset_attention_mask: true` does not work with {said(config, 'pipe_parallel_size', pp)}: only "
            "hidden states travel between stages; use pipe_parallel_size 1, with ZeRO or model_parallel_size for memory"
        )
    if config.model.scaled_upper_triang_masked_softmax_fusion:
        yield (
            f"{where}`reset_attention_mask: true` does not work with "
            f"{said(config, 'scaled_upper_triang_masked_softmax_fusion', True)}: its kernel masks later tokens only; "
            'remove that, or use attention_config: [[["flash"], "all"]]'
        )


def _hosts(config: NeoXConfig) -> Iterator[str]:
    runner = config.runner
    if runner.num_nodes != -1 and runner.num_nodes < 1:
        yield f"{place(config, 'num_nodes')}`num_nodes: {runner.num_nodes}` must be at least 1, or -1 for all hosts"
    if runner.include is not None and runner.exclude is not None:
        yield (
            f"{place(config, 'include')}`include: {runner.include}` and {said(config, 'exclude', runner.exclude)} "
            "exclude each other; keep one"
        )
