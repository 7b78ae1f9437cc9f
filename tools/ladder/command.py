"""Command of ladders: plan the family of a target, train it in two stages, and predict the target."""

from __future__ import annotations

import argparse
import itertools
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from neox.arguments import ScriptParser
from neox.errors import ConfigError, DataError, os_errors
from neox.log import setup_logging
from neox.plan import RunPlan, config_from_files
from neox.resume import lock_output
from tools.ladder.family import Family, LadderRun, RunSize, multiplied_parameters, network_values, shapes_of
from tools.ladder.fits import LossFit, RateFit, fit_learning_rate, fit_loss
from tools.ladder.ladder_file import Ladder, read_ladder
from tools.ladder.report import Prediction, TrainedRun, format_prediction, write_prediction
from tools.ladder.schedule import unscaled_keys
from tools.ladder.target import TARGET, Target, check_training, places_of_small_runs, plan_target, target_sweep
from tools.sweep.command import format_plans, sweep_over
from tools.sweep.places import Place
from tools.sweep.planned_run import plan_runs
from tools.sweep.record import ladder_lock_prefix
from tools.sweep.results import read_results
from tools.sweep.run_files import State
from tools.sweep.sweep_file import SweepRun, override, with_sources

RULE = RateFit({}, 0.0, 0.0, 0.0, 0.0, 0.0, math.nan, {})
"""Learning rates of the rule alone, before any is searched."""
_DESCRIPTION = """Predict the loss and the best learning rate of a large run from a family of small ones.

python tools/ladder.py ladder.yml --dry-run          # the small runs, their planned time, and the target's
python tools/ladder.py ladder.yml [-H hostfile]      # trains them (resumable, as tools/sweep.py), fits and predicts
python tools/ladder.py ladder.yml [-H hostfile] --train_target   # then trains the target on all these hosts
python tools/status.py runs/ladder                   # how far it is

ladder.yml, whose runs go to runs/ladder:

    configs: [configs/20B.yml, my_data.yml]            # the target
    sizes: [2.0e+7, 5.0e+7, 1.2e+8, 3.0e+8, 7.0e+8]    # parameters of the small runs
    tokens_per_parameter: [10, 20, 40]                 # one number, or several to tell parameters from tokens

docs/ladder.md has every key."""


def main() -> int:
    """Run the command with this process's command line; return the exit status."""
    setup_logging()
    parser = ScriptParser(description=_DESCRIPTION)
    parser.add_argument("ladder", type=Path, help="ladder file (YAML)")
    parser.add_argument(
        "-H",
        "--hostfile",
        help="hosts that each train one small run at a time, and with --train_target together the target",
    )
    parser.add_argument("--dry-run", action="store_true", help="show the runs and their plans, and start nothing")
    parser.add_argument(
        "--train_target", action="store_true", help="after the prediction: train the target, and state the error"
    )
    parser.add_argument("--redo", action="append", default=[], metavar="NAME", help="train this run again (repeatable)")
    args = parser.parse_args()
    if TARGET in args.redo and not args.train_target:
        raise ConfigError(f"--redo {TARGET} needs --train_target")
    ladder = read_ladder(args.ladder)
    places = places_of_small_runs(ladder, args.hostfile)
    target = plan_target(ladder, args.hostfile)
    target_plan = target.planned.plan
    family = Family(ladder, target_plan, _plan_networks(ladder, target_plan, places[0]))
    if args.train_target:  # before weeks of small runs
        for problem in check_training(ladder, target):
            print(f"note: {TARGET}: {problem}", file=sys.stderr)
    if args.dry_run:
        print(_format_ladder(ladder, family, target, list(_first_stage(ladder, family)), places))
        return 0

    for note in (*family.size_notes(), *family.batch_notes(), *target.notes(family)):
        print(f"note: {note}", file=sys.stderr)
    with lock_output(ladder_lock_prefix(ladder.directory)):
        return _train_and_predict(ladder, family, target, places, args)


def _train_and_predict(
    ladder: Ladder, family: Family, target: Target, places: Sequence[Place], args: argparse.Namespace
) -> int:
    """Train the small runs, predict the target, and train it if that is asked for; return the exit status."""
    first = list(_first_stage(ladder, family))
    # The smallest sizes, with every learning rate.
    following = len(list(_second_stage(ladder, family, RULE)))
    status = _train(ladder, first, places, _redone(first, args.redo), following=following)
    if status:
        return status
    rates = fit_learning_rate(_losses_by_factor(ladder, first, places[0]))

    # The other sizes and amounts of tokens, with the rate that the first ones predict.
    second = list(_second_stage(ladder, family, rates))
    names = [*(run.run.name for run in (*first, *second)), TARGET]
    unknown = {*args.redo} - {*names}
    if unknown:
        raise ConfigError(f"--redo {', '.join(sorted(unknown))}: no run has this name; they are {', '.join(names)}")
    if second:
        status = _train(ladder, [*first, *second], places, _redone(second, args.redo))
        if status:
            return status
    trained = _trained_runs(ladder, [*first, *second], places[0])
    config = target.planned.config
    prediction = _predict(family, rates, trained, config.schedule.min_lr or 0.0, target.batch)
    with os_errors(DataError, f"{ladder.directory} cannot be written"):
        write_prediction(ladder.directory, prediction, config)
    print(format_prediction(prediction, ladder.directory))
    if args.train_target:
        return _train_target(ladder, prediction, target.trained_on, [TARGET] if TARGET in args.redo else [])
    return 0


def _plan_networks(ladder: Ladder, target: RunPlan, place: Place) -> list[tuple[Mapping[str, Any], RunPlan]]:
    """Return the keys of each small network, and its plan: its own parameters and ranks follow from no other.

    Raises:
        ConfigError: The target has a schedule that cannot be scaled, or a small network cannot be planned.
    """
    overrides = []
    for key, value in ladder.settings.items():
        overrides.append(override(key, value))
    try:
        config = config_from_files(ladder.configs, conf_dir=ladder.conf_dir, overrides=overrides)
    except ConfigError as error:
        raise ConfigError(with_sources(error.problems, ladder.sources)) from None
    unscaled = list(unscaled_keys(config))
    if unscaled:
        raise ConfigError(unscaled)
    shapes = shapes_of(ladder, target)
    runs = []
    for number, shape in enumerate(shapes, start=1):
        runs.append(SweepRun(f"network {number}", {**network_values(shape, target), **ladder.settings}))
    networks: list[tuple[Mapping[str, Any], RunPlan]] = []
    for shape, run in zip(shapes, plan_runs(ladder.sweep(runs), place), strict=True):
        networks.append((shape, run.plan))
    return networks


# -- the runs


def _first_stage(ladder: Ladder, family: Family) -> Iterator[LadderRun]:
    """Yield the runs that search the learning rate: the smallest sizes, with each factor."""
    ratio = ladder.tokens_per_parameter[0]
    for size, factor in itertools.product(family.sizes[: ladder.searched], ladder.factors):
        yield family.run(size, ratio, factor)


def _second_stage(ladder: Ladder, family: Family, rates: RateFit) -> Iterator[LadderRun]:
    """Yield the other runs: each size and ratio that the first stage has not trained, with its predicted factor."""
    for number, size in enumerate(family.sizes):
        for ratio in ladder.tokens_per_parameter:
            if number >= ladder.searched or ratio != ladder.tokens_per_parameter[0]:
                yield family.run(size, ratio, rates.factor(size.parameters).value)


def _redone(runs: Sequence[LadderRun], redo: Sequence[str]) -> list[str]:
    """Return the names of a stage's runs that are trained again."""
    found = []
    for run in runs:
        if run.run.name in redo:
            found.append(run.run.name)
    return found


def _train(
    ladder: Ladder, runs: Sequence[LadderRun], places: Sequence[Place], redo: Sequence[str], *, following: int = 0
) -> int:
    """Train runs, and return 0 if each of them is done or has diverged. If others follow, theirs shows the table."""
    sweep = ladder.sweep([run.run for run in runs], following=following)
    return sweep_over(sweep, places, redo=redo, shows_table=not following)


def _losses_by_factor(ladder: Ladder, runs: Sequence[LadderRun], place: Place) -> dict[int, dict[float, float]]:
    """Return the losses of the first stage by parameters and factor."""
    found: dict[int, dict[float, float]] = {}
    for trained in _trained_runs(ladder, runs, place):
        found.setdefault(trained.size.parameters, {})[trained.size.factor] = trained.loss
    return found


def _trained_runs(ladder: Ladder, runs: Sequence[LadderRun], place: Place) -> list[TrainedRun]:
    """Return all runs with their losses, and which of each size and ratio has the best learning rate.

    Parameters and tokens are those of each run's own plan. The loss of a run that has diverged is infinite.
    """
    sweep = ladder.sweep([run.run for run in runs])
    plans = plan_runs(sweep, place)
    losses: dict[str, float] = {}
    for result in read_results(sweep, plans, {}, {}):
        has_diverged = result.state is State.DIVERGED or result.score is None
        losses[result.name] = math.inf if has_diverged else float(result.score or 0)
    best: dict[tuple[int, float], float] = {}
    for run in runs:
        key = (run.parameters, run.ratio)
        best[key] = min(best.get(key, math.inf), losses[run.run.name])
    trained = []
    for run, planned in zip(runs, plans, strict=True):
        loss = losses[planned.name]
        is_best = math.isfinite(loss) and loss == best[run.parameters, run.ratio]
        tokens = planned.totals.tokens
        assert tokens is not None, "it has train_iters"
        size = RunSize(multiplied_parameters(planned.plan.layers), float(tokens), run.rate, run.factor)
        trained.append(TrainedRun(planned.name, size, loss, is_best))
    return trained


# -- the prediction


def _predict(
    family: Family, rates: RateFit, trained: Sequence[TrainedRun], min_lr: float, batch: Mapping[str, int | None]
) -> Prediction:
    """Fit the best runs, and predict the target. The largest size is also predicted from the others, as a check."""
    best = [run for run in trained if run.is_best]
    try:
        fit = _fit(best)
    except ValueError as error:
        raise ConfigError(f"the loss cannot be fitted: {error}; give more `sizes` or `tokens_per_parameter`") from error
    tokens = family.tokens
    if fit.ratio is not None:
        tokens = fit.ratio * family.parameters
    largest = max(run.size.parameters for run in best)
    smaller = [run for run in best if run.size.parameters < largest]
    checked = next(run for run in best if run.size.parameters == largest)
    held_out = None
    unchecked = ""
    try:
        held_out = _fit(smaller).predict(checked.size.parameters, checked.size.tokens)
    except ValueError as error:
        unchecked = str(error)
    factor = rates.factor(family.parameters)
    return Prediction(
        parameters=family.parameters,
        tokens=tokens,
        configured_tokens=family.tokens,
        loss=fit.predict(family.parameters, tokens),
        rate=family.rule_rate(family.parameters) * factor.value,
        rate_low=family.rule_rate(family.parameters) * factor.low,
        rate_high=family.rule_rate(family.parameters) * factor.high,
        configured_rate=family.rate,
        configured_min_lr=min_lr,
        fit=fit,
        rates=rates,
        runs=tuple(trained),
        largest=checked,
        largest_predicted=held_out,
        unchecked=unchecked,
        rate_curve=tuple((size.parameters, family.rule_rate(size.parameters)) for size in family.sizes),
        batch=batch,
    )


def _fit(runs: Sequence[TrainedRun]) -> LossFit:
    parameters = []
    tokens = []
    losses = []
    for run in runs:
        parameters.append(run.size.parameters)
        tokens.append(run.size.tokens)
        losses.append(run.loss)
    return fit_loss(parameters, tokens, losses)


# -- the target


def _train_target(ladder: Ladder, prediction: Prediction, place: Place, redo: Sequence[str]) -> int:
    """Train the target with the predicted learning rate, and print the error of the prediction."""
    sweep = target_sweep(ladder, prediction.target_values())
    status = sweep_over(sweep, (place,), redo=redo)
    if status:
        return status
    (result,) = read_results(sweep, plan_runs(sweep, place), {}, {})
    if result.score is None:
        raise DataError(f"{ladder.directory / TARGET} has no loss")
    loss = prediction.loss
    error = loss.value / result.score - 1
    line = f"target: predicted {loss.value:.4f}, trained {result.score:.4f}: {100 * error:+.2f} %"
    if loss.is_known:
        within = "within" if loss.low <= result.score <= loss.high else "outside"
        line += f", {within} the range of {loss.low:.4f} to {loss.high:.4f}"
    print(line)
    return 0


def _format_ladder(
    ladder: Ladder, family: Family, target: Target, first: Sequence[LadderRun], places: Sequence[Place]
) -> str:
    """Return the plans of all runs. Those of the second stage are planned with the rule's learning rates."""
    lines = ["# sizes and names count parameters without the embedding (all that each token is multiplied by)"]
    lines += family.size_notes()
    lines += family.batch_notes()
    second = list(_second_stage(ladder, family, RULE))
    for title, runs in (("first stage", first), ("second stage (learning rates follow the first)", second)):
        lines.append(f"# {title}")
        if runs:
            lines.append(format_plans(plan_runs(ladder.sweep([run.run for run in runs]), places[0]), places))
        else:
            lines.append("no runs: the first one trains every size, with one value of tokens_per_parameter")
    lines.append("# target")
    lines += target.notes(family)
    return "\n".join(lines)
