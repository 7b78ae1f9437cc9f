"""Lines of the plan about the training data."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from neox.errors import ConfigError
from neox.plan.batches.dataset_shares import StageShares, shares_of_stages
from neox.plan.run_plan import RunPlan

MANY_PASSES = 4
"""Passes over a dataset after which further ones help little (arXiv:2305.16264)."""


def data_lines(plan: RunPlan) -> Iterator[str]:
    """Yield what is read of each training dataset, a line for each stage; nothing if their sizes are not known."""
    if not plan.amounts.dataset_tokens:
        return
    pass_tokens = plan.amounts.pass_tokens or plan.amounts.dataset_tokens
    try:
        found = _shares(plan)
    except ConfigError:  # a problem of the start
        return
    for of_stage in found:
        shares = []
        for path, share, size in zip(dataset_names(plan), of_stage.shares, pass_tokens, strict=True):
            if share and not size:
                shares.append(f"{path} {100 * share:.3g} % (no usable document)")
            elif share:
                shares.append(f"{path} {100 * share:.3g} % ({share * of_stage.tokens / size:.3g} passes)")
        stage = ""
        if len(found) > 1:
            stage = f"{of_stage.mixture.name} from step {of_stage.mixture.step:,}: "
        length = ""
        if of_stage.mixture.seq_length != plan.batch_schedule.full_length:
            length = f" in samples of {of_stage.mixture.seq_length:,}"
        padding = ", padding included" if plan.amounts.pass_tokens else ""
        yield f"{stage}{of_stage.tokens:,} tokens{length}{padding}: {', '.join(shares)}"


def validation_lines(plan: RunPlan) -> Iterator[str]:
    """Yield how many tokens an evaluation reads of each validation set; nothing if there are none."""
    if plan.config.training.eval_iters == 0:
        return
    known = dict(plan.amounts.validation_tokens)
    sets = [item for item in plan.config.data.evaluated_sets if known.get(item.name) != 0]
    total = sum(item.weight for item in sets)
    for item in sets:
        tokens = _tokens_of_evaluation(plan, item.name)
        share = f"{100 * item.weight / total:.3g} % of the mean"
        if item.name is not None:
            yield f"{item.name} ({Path(item.paths[0]).name}): {tokens}, {share}"
        elif len(sets) > 1:
            yield f"a part of data_path: {tokens}, {share}"
        elif None in known:
            yield tokens


def _tokens_of_evaluation(plan: RunPlan, name: str | None) -> str:
    """Return how many tokens of a validation set an evaluation reads."""
    samples = plan.config.training.evaluation_samples(plan.batch.train_batch_size)
    in_set = dict(plan.amounts.validation_tokens).get(name)
    if samples is None:
        return "the whole set" if in_set is None else f"the whole set, {in_set:,} tokens, an evaluation"
    tokens = f"{samples * plan.batch_schedule.full_length:,} tokens an evaluation"
    return tokens if in_set is None else f"{tokens}, of {in_set:,} in the set"


def _shares(plan: RunPlan) -> list[StageShares]:
    """Return what each data stage reads of each training dataset. Raises ConfigError if the data does not suffice."""
    amounts = plan.amounts
    pass_tokens = amounts.pass_tokens or amounts.dataset_tokens
    return shares_of_stages(plan.config, plan.batch_schedule, amounts.dataset_tokens, pass_tokens=pass_tokens)


def notes_on_data(plan: RunPlan) -> list[str]:
    """Return notes on data that is read many times. Raises ConfigError if the training data does not suffice."""
    return [*notes_on_pairs(plan), *notes_on_evaluations(plan), *notes_on_passes(plan)]


def notes_on_evaluations(plan: RunPlan) -> list[str]:
    """Return notes on validation sets that one evaluation reads more than once."""
    samples = plan.config.training.evaluation_samples(plan.batch.train_batch_size)
    if samples is None:
        return []
    notes = []
    for name, in_set in plan.amounts.validation_tokens:
        if not in_set:
            continue
        times = samples * plan.batch_schedule.full_length / in_set
        if times > 1:
            which = "the validation set" if name is None else f"validation set {name}"
            notes.append(
                f"an evaluation reads {which}, of {in_set:,} tokens, {times:.3g} times; `eval_iters: all` reads each "
                "sample once"
            )
    return notes


def notes_on_passes(plan: RunPlan) -> list[str]:
    """Return notes on datasets that are read many times; none if their sizes are not known."""
    if not plan.amounts.dataset_tokens:
        return []
    pass_tokens = plan.amounts.pass_tokens or plan.amounts.dataset_tokens
    read = [0.0] * len(pass_tokens)
    for of_stage in _shares(plan):
        read = [before + share * of_stage.tokens for before, share in zip(read, of_stage.shares, strict=True)]
    notes = []
    for name, tokens, size in zip(dataset_names(plan), read, pass_tokens, strict=True):
        if size and tokens > MANY_PASSES * size:
            notes.append(
                f"{name} is read {tokens / size:.1f} times: more than {MANY_PASSES} passes help little; use more data, "
                "fewer steps, or train_data_max_passes"
            )
    return notes


def notes_on_pairs(plan: RunPlan) -> list[str]:
    """Return a note on pairs of answers that are read many times; none if their number is not known."""
    passes = _passes_over_pairs(plan)
    if passes <= MANY_PASSES:
        return []
    words = f"pairs of answers are read {passes:.3g} times, where 1 to 3 are usual"
    return [f"{words}; use fewer steps, or num_train_epochs"]


def _passes_over_pairs(plan: RunPlan) -> float:
    """Return how often a run reads its pairs of answers; 0 if it is not known."""
    if not plan.amounts.pair_rows:
        return 0.0
    return plan.batch_schedule.samples(plan.config.training.train_iters or 0) / plan.amounts.pair_rows


def dataset_names(plan: RunPlan) -> list[str]:
    """Return the names of the training datasets in messages."""
    data = plan.config.data
    paths = data.train_data_paths or (data.data_path or "",)
    return [Path(path).name for path in paths]


def preference_lines(plan: RunPlan) -> Iterator[str]:
    """Yield what is learned from preferences, how often, and where the reference is; nothing for texts."""
    keys = plan.config.preferences
    if not keys.on_preferences:
        return
    loss: str = keys.train_impl
    if keys.train_impl == "dpo":
        loss += f" ({keys.dpo_loss})"
    if plan.amounts.pair_rows:
        rows = plan.batch_schedule.samples(plan.config.training.train_iters or 0)
        loss += (
            f", {rows:,} rows of pairs, {plan.amounts.pair_rows:,} in a pass ({_passes_over_pairs(plan):.3g} passes)"
        )
    if not keys.needs_reference:
        yield f"{loss}, without a reference"
        return
    if keys.copies_reference:
        yield f"{loss}; the reference model is a second copy of the weights, computed in each step"
        return
    if not keys.stores_reference:
        yield f"{loss}; the reference model is the model without its adapters, computed at each start"
        return
    prefix = keys.answers(plan.config.data)[0].paths
    name = keys.precompute_model_name or "start-HASH"
    stored = f"{prefix[0]}.{name}.reference.npz" if prefix else "with the data"
    of_weights = "" if keys.precompute_model_name else ", HASH being that of the weights it starts from"
    yield f"{loss}; the reference's log-probabilities are computed once and stored: no second model"
    yield f"{stored}{of_weights}"


def fim_lines(plan: RunPlan) -> Iterator[str]:
    """Yield how documents are rearranged for fill in the middle; nothing if they are not."""
    data = plan.config.data
    if not any(data.fim_rates):
        return
    rates = ", ".join(f"{100 * rate:g} %" for rate in data.fim_rates)
    units = "the documents in each sample"
    if data.fim_level == "document":
        units = "the documents that fit into a sample"
    yield f"{rates} of {units} (fim_rate), {100 * data.fim_spm_rate:g} % of them suffix first (fim_spm_rate)"
