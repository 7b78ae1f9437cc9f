"""Ladders: sizes of a family, fits of known functions, and what is refused."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.stats
import yaml
from matplotlib.figure import Figure

from neox.config import NeoXConfig
from neox.errors import ConfigError
from neox.plan import RunPlan, config_from_files, resolve
from neox.plan.report.run_totals import run_totals
from neox.plan.schedule import schedule_of
from tests.end_to_end.launched_runs import write_config
from tests.plans import small_plan
from tools.ladder import command
from tools.ladder.family import Family, LadderRun, RunSize, multiplied_parameters, network_values, shape_of, short
from tools.ladder.fits import fit_learning_rate, fit_loss
from tools.ladder.ladder_file import ADJUSTED_KEYS, OWN_KEYS, Ladder, read_ladder
from tools.ladder.report import Prediction, TrainedRun, _by_ratio, _draw_rates, format_prediction, write_prediction
from tools.ladder.schedule import unscaled_keys
from tools.ladder.target import check_training, places_of_small_runs, plan_target, target_sweep
from tools.sweep.command import _check_runs
from tools.sweep.places import Place
from tools.sweep.planned_run import plan_runs
from tools.sweep.results import TABLE, write_results
from tools.sweep.sweep_file import Sweep

ROOT = Path(__file__).parents[4]


def loss(parameters: Any, tokens: Any) -> Any:
    """The function of Hoffmann et al. with its published numbers."""
    return 1.69 + 406.4 / parameters**0.34 + 410.7 / tokens**0.28


def test_a_known_loss_is_found_again_and_extrapolated() -> None:
    parameters = np.repeat(np.geomspace(1e6, 1e8, 4), 2)
    tokens = parameters * np.tile([5.0, 40.0], 4)
    fit = fit_loss(parameters, tokens, loss(parameters, tokens))
    assert fit.irreducible == pytest.approx(1.69, abs=0.01)
    assert fit.of_parameters[1] == pytest.approx(0.34, abs=0.01)
    assert fit.of_tokens is not None
    assert fit.of_tokens[1] == pytest.approx(0.28, abs=0.01)
    found = fit.predict(2e10, 4e11)
    assert found.value == pytest.approx(loss(2e10, 4e11), rel=1e-3)
    assert found.low <= found.value <= found.high


def test_the_range_grows_with_the_noise_and_needs_a_degree_of_freedom() -> None:
    parameters = np.geomspace(1e6, 3e7, 5)
    truth = 2.0 + 300 / parameters**0.35
    widths = []
    for noise in (0.001, 0.01):
        noisy = truth * (1 + noise * np.random.default_rng(3).standard_normal(5))
        fit = fit_loss(parameters, 20 * parameters, noisy)
        assert fit.ratio == pytest.approx(20)
        assert fit.of_tokens is None
        found = fit.predict(3e8, 6e9)
        assert found.low < 2.0 + 300 / 3e8**0.35 < found.high
        widths.append(found.high - found.low)
    assert widths[1] > 3 * widths[0]
    with pytest.raises(ValueError, match="2 runs, but 3"):
        fit_loss([1e6, 2e6], [1e7, 2e7], [3.0, 2.9])


@pytest.mark.parametrize(("sizes", "ratios", "trials"), [(4, [20.0], 150), (6, [20.0], 150), (3, [10.0, 40.0], 60)])
def test_nine_of_ten_ranges_hold_the_loss_of_a_larger_run(sizes: int, ratios: list[float], trials: int) -> None:
    """Ranges of too few runs are too narrow if they do not know it (Besiroglu et al., arXiv:2404.10102)."""
    parameters = np.repeat(np.geomspace(2e7, 7e8, sizes), len(ratios))
    tokens = parameters * np.tile(ratios, sizes)
    generator = np.random.default_rng(11)
    held = 0
    reaches = []
    errors = []
    for _ in range(trials):
        noisy = loss(parameters, tokens) * (1 + 0.003 * generator.standard_normal(len(parameters)))
        found = fit_loss(parameters, tokens, noisy).predict(2e10, 4e11)
        trained = loss(2e10, 4e11) * (1 + 0.003 * generator.standard_normal())
        held += found.low <= trained <= found.high
        reaches.append(found.high - found.value)
        errors.append(abs(found.value - trained))
    # Three standard deviations of a share of 90 %.
    assert held / trials == pytest.approx(0.9, abs=3 * math.sqrt(0.09 / trials))
    # And they are no wider than that takes: Student's t by the standard deviation of the errors (68 % of them are
    # smaller), as the residuals' sum of squares estimates it.
    freedom = sizes * len(ratios) - (3 if len(ratios) == 1 else 5)
    estimated = np.quantile(errors, 0.6827) * math.sqrt(scipy.stats.chi2.median(freedom) / freedom)
    assert np.median(reaches) == pytest.approx(scipy.stats.t.ppf(0.95, freedom) * estimated, rel=0.25)


FACTORS = [float(factor) for factor in np.geomspace(1 / 30, 30, 61)]


def parabola(best: float, factors: Sequence[float] = (0.25, 0.5, 1.0, 2.0, 4.0)) -> dict[float, float]:
    """Losses of learning rates, the best of which is known."""
    return {factor: 3 + (math.log(factor) - math.log(best)) ** 2 for factor in factors}


def test_the_best_learning_rate_of_known_parabolas() -> None:
    same = fit_learning_rate({10**6: parabola(1.3), 10**7: parabola(1.3), 10**8: parabola(1.3)})
    assert same.factor(1e10).value == pytest.approx(1.3)
    falling = fit_learning_rate({10**6: parabola(2.0), 10**7: parabola(1.0), 10**8: parabola(0.5)})
    assert falling.factor(1e9).value == pytest.approx(0.25)
    noise = fit_learning_rate({10**6: parabola(1.0), 10**7: parabola(1.5), 10**8: parabola(1.1)})
    assert noise.slope == 0
    assert noise.factor(1e10).value == pytest.approx((1.0 * 1.5 * 1.1) ** (1 / 3))
    falling = fit_learning_rate({10**6: {0.5: 2.0, 1.0: 3.0, 2.0: float("inf")}})
    assert falling.at_edge == {10**6: (0.125, 0.25)}


@pytest.mark.parametrize(("bests", "is_trend"), [((1.0, 0.75, 0.4), False), ((1.0, 0.55, 0.31, 0.16), True)])
def test_a_trend_counts_if_it_is_significant_with_the_degrees_of_freedom_that_are_left(
    bests: tuple[float, ...], is_trend: bool
) -> None:
    places = [math.log(10 ** (6 + number)) for number in range(len(bests))]
    line = scipy.stats.linregress(places, np.log(bests))
    assert abs(line.slope) > 2 * line.stderr  # which three sizes of noise often are
    assert (line.pvalue < 0.05) == is_trend
    tried = {10 ** (6 + number): parabola(best, FACTORS) for number, best in enumerate(bests)}
    assert fit_learning_rate(tried).slope == pytest.approx(line.slope if is_trend else 0.0)


@pytest.mark.parametrize("trend", [0.0, -0.15])
@pytest.mark.parametrize("sizes", [4, 5])
def test_nine_of_ten_ranges_hold_the_best_learning_rate_of_a_larger_run(sizes: int, trend: float) -> None:
    generator = np.random.default_rng(5)
    parameters = [round(size) for size in np.geomspace(2e7, 3e8, sizes)]
    held = 0
    distances = []
    for _ in range(200):
        tried = {}
        for size in parameters:
            tried[size] = parabola(math.exp(trend * math.log(size / 1e8) + 0.2 * generator.standard_normal()), FACTORS)
        fit = fit_learning_rate(tried)
        found = fit.factor(2e10)
        best = math.exp(trend * math.log(200) + 0.2 * generator.standard_normal())
        held += found.low <= best <= found.high
        distances.append(math.log(found.high / found.low) / math.log(fit.factor(3e8).high / fit.factor(3e8).low))
    assert held / 200 >= 0.9 - 3 * math.sqrt(0.09 / 200)
    assert held / 200 < 0.99
    assert min(distances) > 1.5  # it grows with the distance from the sizes


def test_three_sizes_have_a_trend_but_no_range_of_the_learning_rate(tmp_path: Path) -> None:
    for bests in ((1.3, 0.8, 1.1), (2.0, 1.0, 0.5)):
        fit = fit_learning_rate({10 ** (6 + number): parabola(best) for number, best in enumerate(bests)})
        assert not fit.factor(1e10).is_known
        assert (fit.slope != 0) == (bests[0] == 2.0)
        words = format_prediction(dataclasses.replace(prediction((3.0, 2.6, 2.4, 2.3)), rates=fit), tmp_path)
        assert "3 searched size(s) tell no range of the rate" in words
        assert ("show no trend" in words) == (fit.slope == 0)


@pytest.mark.parametrize(("sizes", "can_search_more"), [(3, False), (4, True), (5, True)])
def test_more_sizes_are_searched_only_where_there_are_more(tmp_path: Path, sizes: int, can_search_more: bool) -> None:
    few = fit_learning_rate({10 ** (6 + number): parabola(best) for number, best in enumerate((1.3, 0.8, 1.1))})
    losses = (3.0, 2.6, 2.4, 2.3, 2.25)[:sizes]
    words = format_prediction(dataclasses.replace(prediction(losses), rates=few), tmp_path)
    assert ("raise learning_rate.searched to 4" in words) == can_search_more
    assert ("more `sizes`" in words.replace("give more sizes", "")) != can_search_more
    four = fit_learning_rate({10 ** (6 + number): parabola(best) for number, best in enumerate((1.3, 0.8, 1.1, 1.0))})
    words = format_prediction(dataclasses.replace(prediction((3.0, 2.6, 2.4, 2.3)), rates=four), tmp_path)
    assert "4 searched sizes are few" in words
    assert "give more `sizes`" in words


@pytest.mark.parametrize(("low", "high"), [(5e-4, 3e-3), (1e-12, 1e6)])
def test_the_picture_shows_the_rates_however_wide_their_range(low: float, high: float) -> None:
    axes = Figure().subplots()
    found = dataclasses.replace(prediction((3.0, 2.6, 2.4)), rate_low=low, rate_high=high)
    _draw_rates(axes, found)
    left, right = axes.get_xlim()
    assert left <= max(low, 1e-4)
    assert right >= min(high, 1e-2)
    assert right / left < 1e3


def test_the_picture_has_one_curve_for_each_ratio_that_was_asked_for() -> None:
    runs = []
    for number, ratio in enumerate((0.0499, 0.0506, 0.0512, 0.2, 0.21)):
        size = RunSize(10 ** (6 + number), ratio * 10 ** (6 + number), 1e-3, 1.0)
        runs.append(TrainedRun(f"run{number}", size, 3.0 - 0.1 * number, is_best=True))
    groups = _by_ratio(runs)
    assert [len(group) for _, group in groups] == [3, 2]
    assert [ratio for ratio, _ in groups] == pytest.approx([0.05057, 0.205], rel=1e-3)


def test_a_line_through_two_sizes_has_no_range() -> None:
    two = fit_learning_rate({10**6: parabola(1.0), 10**7: parabola(0.5)})
    assert two.slope == 0
    assert not two.factor(1e8).is_known
    assert two.factor(1e8).value == pytest.approx(math.sqrt(0.5))


@pytest.mark.parametrize("wanted", [3e7, 1e8, 7e8, 3e9])
def test_small_networks_have_the_shape_of_the_20b_model(wanted: float) -> None:
    config = config_from_files([ROOT / "configs" / "20B.yml"])
    target = resolve(config, 8, 50_257)
    shape = shape_of(target, wanted)
    small = resolve(config.updated({**shape, "pipe_parallel_size": 1, "model_parallel_size": 1}), 1, 50_257)
    assert multiplied_parameters(small.layers) == pytest.approx(wanted, rel=0.25)
    aspect = shape["hidden_size"] / shape["num_layers"]
    assert 6144 / 44 / 1.6 < aspect < 6144 / 44 * 1.6
    assert shape["hidden_size"] % shape["num_attention_heads"] == 0
    # The matrices of 44 blocks and of the head: the number that 6 N D counts.
    assert multiplied_parameters(target.layers) == pytest.approx(44 * 12 * 6144**2 + 50_432 * 6144, rel=1e-3)


OPTIMIZER = {"type": "Adam", "params": {"lr": 1e-3}}
SHAPES = ({"num_layers": 1, "hidden_size": 16}, {"num_layers": 2, "hidden_size": 16}, {"num_layers": 1})


def family_of(ladder: Ladder, target: RunPlan, ranks: int = 1) -> Family:
    """A family whose networks are planned with the target's settings."""
    networks: list[tuple[Mapping[str, Any], RunPlan]] = []
    for shape in ladder.shapes:
        config = target.config.updated({**network_values(shape, target), **ladder.settings})
        networks.append((shape, resolve(config, ranks, 256)))
    return Family(ladder, target, networks)


def small_run(target: RunPlan, ladder: Ladder | None = None) -> tuple[LadderRun, RunPlan]:
    """The first run of a ladder, and its plan."""
    ladder = ladder or Ladder("l", Path("runs/l"), ("a.yml",), shapes=SHAPES, tokens_per_parameter=(20.0,))
    family = family_of(ladder, target)
    run = family.run(family.sizes[0], 20.0, 1.0)
    values = dict(run.run.values)
    optimizer = {**OPTIMIZER, "params": {"lr": values.pop("optimizer.params.lr")}}
    return run, resolve(target.config.updated({**values, "optimizer": optimizer}), 1, 256)


def test_batch_and_learning_rate_follow_the_rules() -> None:
    plan = small_plan(hidden_size=64, train_micro_batch_size_per_gpu=64, optimizer=OPTIMIZER, min_lr=1e-4)
    length = plan.config.model.seq_length
    ladder = Ladder("l", Path("runs/l"), ("a.yml",), shapes=SHAPES, tokens_per_parameter=(20.0,))
    family = family_of(ladder, plan, ranks=2)
    assert [size.parameters for size in family.sizes] == sorted(size.parameters for size in family.sizes)
    size = family.sizes[0]
    run = family.run(size, 20.0, 2.0)
    share = size.parameters / family.parameters
    assert run.rate == pytest.approx(2 * 1e-3 * share ** (-1 / 3), rel=1e-3)
    assert run.run.values["min_lr"] == pytest.approx(run.rate / 10, rel=1e-3)
    batch = run.run.values["train_batch_size"]
    assert batch == 2 * round(64 * share ** (2 / 3) / 2)
    tokens = run.run.values["train_iters"] * batch * length
    assert 20 * size.parameters <= tokens < 20 * size.parameters + batch * length
    # Losses of different validation samples could not be compared.
    assert run.run.values["eval_iters"] * batch == pytest.approx(100 * 64, abs=batch)
    same = family_of(dataclasses.replace(ladder, rate_exponent=0.0), plan, ranks=2)
    assert same.rule_rate(1) == 1e-3


@pytest.mark.parametrize(
    "schedule",
    [
        {"lr_decay_style": "cosine", "warmup": 0.1},
        {"lr_decay_style": "cosine", "lr_decay_iters": None, "lr_warmup_iters": 300},
        {"lr_decay_style": "linear", "lr_decay_iters": 2000, "lr_warmup_iters": 50},
        {"lr_decay_style": "linear", "lr_decay_iters": None, "lr_decay_fraction": 0.5},
        {"lr_decay_style": "WSD", "lr_decay_iters": None, "lr_wsd_decay_iters": 200, "lr_warmup_iters": 100},
        {"lr_decay_style": "WSD", "lr_decay_iters": 800, "lr_wsd_decay_iters": 400, "lr_wsd_decay_style": "linear"},
    ],
)
def test_small_runs_have_the_learning_rate_of_the_target_at_each_share_of_the_run(schedule: dict[str, Any]) -> None:
    keys = {"lr_decay_iters": 1000, "min_lr": 1e-4, **schedule}
    target = small_plan(hidden_size=64, train_iters=1000, train_micro_batch_size_per_gpu=4, optimizer=OPTIMIZER, **keys)
    run, small = small_run(target)
    steps = small.config.training.train_iters
    assert steps is not None
    assert steps not in (1, 1000)
    whole = schedule_of(target.config)
    part = schedule_of(small.config)
    # The shares stand in the middle of steps: warm-up, before and after its end, and through the decay.
    for share in (0.02, 0.06, 0.2, 0.45, 0.6, 0.75, 0.85, 0.95, 1.0):
        expected = whole.lr(round(share * 1000)) / 1e-3
        assert part.lr(round(share * steps)) / run.rate == pytest.approx(expected, abs=0.02)


@pytest.mark.parametrize("start", [{"start_step": 600}, {"start_tokens": 600 * 4 * 16}, {"start_fraction": 0.6}])
def test_stages_of_the_data_start_at_the_same_share_and_their_lengths_count(start: dict[str, Any]) -> None:
    stages = [{"weights": [1, 0], "seq_length": 4}, {**start, "weights": [1, 1]}]
    if "start_tokens" in start:
        stages[0].pop("seq_length")
    target = small_plan(
        hidden_size=64,
        train_iters=1000,
        train_micro_batch_size_per_gpu=4,
        optimizer=OPTIMIZER,
        train_data_paths=["a", "b"],
        data_stages=stages,
    )
    run, small = small_run(target)
    steps = small.config.training.train_iters
    assert steps is not None
    assert small.batch_schedule.mixtures[1].step == pytest.approx(0.6 * steps, abs=1)
    asked = 20 * run.parameters
    assert run_totals(small).tokens == pytest.approx(asked, rel=0.01)


@pytest.mark.parametrize("start", [{"start_step": 450}, {"start_tokens": 1500 * 16}, {"start_fraction": 0.45}])
@pytest.mark.parametrize("rampup", [[1, 1, 1200], [2, 2, 500]])
def test_stages_start_at_the_same_share_of_the_tokens_below_a_ramp_up(start: dict[str, Any], rampup: list[int]) -> None:
    target = small_plan(
        hidden_size=64,
        train_iters=1000,
        train_micro_batch_size_per_gpu=1,
        gradient_accumulation_steps=4,
        optimizer=OPTIMIZER,
        lr_decay_style="cosine",
        lr_decay_iters=1000,
        lr_warmup_iters=100,
        rampup_batch_size=rampup,
        train_data_paths=["a", "b"],
        data_stages=[{"weights": [1, 0]}, {**start, "weights": [1, 1]}],
    )
    ladder = Ladder(
        "l", Path("l"), ("a.yml",), settings={"rampup_batch_size": None}, shapes=SHAPES, tokens_per_parameter=(20.0,)
    )
    run, small = small_run(target, ladder)
    steps = small.config.training.train_iters
    assert steps is not None
    # Samples of each batch size, one after another: [1, 1, 1200] has 1, 2 and 3 samples a step until 1,200 are read.
    taken = 0
    first = target.batch_schedule.mixtures[1].step
    before = 0
    for step in range(1000):
        before = taken if step == first else before
        size = rampup[0] + rampup[1] * (taken * ((4 - rampup[0]) // rampup[1]) // rampup[2])
        taken += min(4, size)
    assert taken < 4000  # the ramp-up counts
    assert small.batch_schedule.mixtures[1].step / steps == pytest.approx(before / taken, abs=0.005)
    # A learning rate belongs to an update: its curve is the target's over the share of steps.
    assert run.run.values["lr_decay_iters"] == steps
    assert run.run.values["lr_warmup_iters"] == pytest.approx(0.1 * steps)


@pytest.mark.parametrize(
    ("keys", "word"),
    [
        ({"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5}}}, "`scheduler"),
        ({"rampup_batch_size": [2, 2, 8]}, "`rampup_batch_size"),
        ({"curriculum_learning": {"enabled": True, "min_difficulty": 8, "max_difficulty": 16}}, "`curriculum_learning"),
        ({"train_data_max_passes": 2, "train_data_paths": ["a"]}, "`train_data_max_passes"),
        ({"curriculum_learning": {"enabled": False}, "lr_warmup_iters": 2, "lr_wsd_decay_iters": 3}, None),
    ],
)
def test_schedules_that_cannot_be_scaled_are_refused_by_name(keys: dict[str, Any], word: str | None) -> None:
    found = list(unscaled_keys(NeoXConfig.from_flat({"num_layers": 2, "train_iters": 10, **keys})))
    assert [line.startswith(word or "") for line in found] == [True] * (word is not None)


def test_switches_are_switched_off_however_it_is_written(tmp_path: Path) -> None:
    file = tmp_path / "ladder.yml"
    file.write_text(
        "configs: [a.yml]\nsizes: [1.0e+6, 2.0e+6, 3.0e+6]\n"
        "set: {rampup-batch-size: false, curriculum_learning: {enabled: false}}\n"
    )
    assert read_ladder(file).settings == {"rampup_batch_size": None, "curriculum_learning": None}


@pytest.fixture
def target_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ladder:
    """A ladder below a target of two tensor ranks, whose vocabulary of 1,000 ids is padded to multiples of 2 x 300."""
    monkeypatch.chdir(tmp_path)
    write_config(tmp_path / "tiny.yml", tmp_path / "unused", 2)
    more = {
        "hidden_size": 64,
        "num_layers": 4,
        "model_parallel_size": 2,
        "make_vocab_size_divisible_by": 300,
        "train_iters": 400,
        "lr_decay_iters": 400,
        "rampup_batch_size": [2, 2, 400],
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 4,
        "data_path": str(ROOT / "tests" / "golden" / "data" / "small_text_document"),
        "launcher": "local",
    }
    (tmp_path / "more.yml").write_text(yaml.safe_dump({"overrides": more}))
    (tmp_path / "ladder.yml").write_text(
        "configs: [tiny.yml, more.yml]\nset: {rampup_batch_size: null}\n"
        "shapes: [{num_layers: 1}, {num_layers: 2}, {num_layers: 3}]\nlearning_rate: {factors: [1, 2]}\n"
    )
    return read_ladder(tmp_path / "ladder.yml")


def test_parameters_and_tokens_are_those_of_each_run_s_own_plan(target_files: Ladder) -> None:
    target = plan_target(target_files).planned
    family = Family(target_files, target.plan, command._plan_networks(target_files, target.plan, Place()))
    block = 12 * 64**2 + 13 * 64
    norm = 2 * 64
    assert family.parameters == 4 * block + norm + 1200 * 64  # 2 x 600
    assert [size.parameters for size in family.sizes] == [n * block + norm + 1200 * 64 for n in (1, 2, 3)]
    # 2, 4 and 6 samples a step until 400 have been taken (67, 34 and 23 steps), then 8.
    assert family.tokens == 32 * (67 * 2 + 34 * 4 + 22 * 6 + (400 - 67 - 34 - 22) * 8)
    runs = list(command._first_stage(target_files, family))
    for run in command._trained_runs(target_files, runs, Place()):
        assert run.size.parameters in [size.parameters for size in family.sizes]
        assert run.size.tokens == pytest.approx(20 * run.size.parameters, rel=0.01)
    without = dataclasses.replace(target_files, settings={})
    with pytest.raises(ConfigError, match="rampup_batch_size"):
        command._plan_networks(without, target.plan, Place())


def give_target(**keys: Any) -> None:
    """Give the target of `target_files` more keys."""
    more = yaml.safe_load(Path("more.yml").read_text())["overrides"] | {
        "num_gpus": None,
        "rampup_batch_size": None,
        **keys,
    }
    Path("more.yml").write_text(yaml.safe_dump({"overrides": more}))


def write_hosts(name: str, count: int, slots: int) -> str:
    Path(name).write_text("".join(f"host{number} slots={slots}\n" for number in range(count)))
    return name


def test_the_target_has_the_batch_of_the_gpus_that_its_files_name(target_files: Ladder) -> None:
    give_target(planned_num_gpus=16, gpu_type="h200", precision="bf16", tensorboard_dir="tensorboard")
    target = plan_target(target_files, write_hosts("hosts", 4, 6))
    plan = target.planned.plan
    assert plan.grid.world_size == 16
    assert plan.batch.train_batch_size == 2 * 4 * 16 // 2
    assert target.batch == {"train_batch_size": 64, "gradient_accumulation_steps": None}
    family = Family(target_files, plan, command._plan_networks(target_files, plan, Place()))
    notes = list(target.notes(family))
    for words in ("on 16 ranks", "planned_num_gpus: 16", "gpu_type h200", "trains it on 24 ranks"):
        assert any(words in note for note in notes), notes
    assert not any("does not fit" in note for note in notes)
    assert target.planned.config.logging.tensorboard_dir == str(Path("runs/ladder/target/tensorboard").absolute())

    # Of -H, 24 ranks are 12 copies: 64 samples are no multiple of 2 x 12.
    with pytest.raises(ConfigError, match=r"train_batch_size: 64.*2.*x 12 .*planned_num_gpus: 16"):
        check_training(target_files, target)

    give_target(planned_num_gpus=16, gpu_memory_gib=1.5)
    notes = list(plan_target(target_files, "hosts").notes(family))
    assert any("the target does not fit" in note for note in notes), notes


def test_the_target_is_trained_on_the_hosts_of_h_with_the_batch_of_its_files(target_files: Ladder) -> None:
    give_target(planned_num_gpus=16)
    target = plan_target(target_files, write_hosts("hosts", 2, 4))
    check_training(target_files, target)
    (run,) = plan_runs(target_sweep(target_files, target.batch), target.trained_on)
    assert run.plan.grid.world_size == 8
    assert run.plan.batch.train_batch_size == 64


def test_a_target_whose_files_name_no_gpus_is_planned_on_the_hosts_of_h(target_files: Ladder) -> None:
    give_target()
    target = plan_target(target_files, write_hosts("hosts", 2, 4))
    assert target.planned.plan.grid.world_size == 8
    assert target.planned.plan.batch.train_batch_size == 2 * 4 * 4
    assert target.batch == {}
    assert "planned_num_gpus" in target.batch_origin


def test_small_runs_take_one_host_of_the_target_s_hostfile(target_files: Ladder) -> None:
    give_target(hostfile=write_hosts("hosts", 3, 4), exclude="host1")
    target = plan_target(target_files)
    assert target.planned.plan.grid.world_size == 8
    assert target.planned.plan.batch.train_batch_size == 2 * 4 * 8 // 2
    places = places_of_small_runs(target_files, None)
    assert [place.name for place in places] == ["host0", "host2"]
    halves = places_of_small_runs(dataclasses.replace(target_files, slots_per_run=2), None)
    assert [place.name for place in halves] == ["host0", "host0", "host2", "host2"]
    ((_, network), *_) = command._plan_networks(target_files, target.planned.plan, places[1])
    assert network.grid.world_size == 4
    fewer = dataclasses.replace(target_files, settings={**target_files.settings, "num_gpus": 2})
    with pytest.raises(ConfigError, match="num_gpus: a place"):
        command._plan_networks(fewer, target.planned.plan, places[1])


@pytest.mark.parametrize(("ranks", "batch_size"), [(8, None), (8, 4), (1, None)])
def test_batches_that_ranks_make_larger_than_the_rule_s_are_named(ranks: int, batch_size: int | None) -> None:
    plan = small_plan(hidden_size=64, train_micro_batch_size_per_gpu=16, optimizer=OPTIMIZER)
    family = family_of(Ladder("l", Path("l"), ("a.yml",), shapes=SHAPES, batch_size=batch_size), plan, ranks=ranks)
    named = "".join(family.batch_notes())
    for size in family.sizes:
        asked = batch_size or 16 * (size.parameters / family.parameters) ** (2 / 3)
        is_forced = abs(family.batch(size.parameters) / asked - 1) > 0.1
        assert (
            f"{family.batch(size.parameters)} instead of {asked:.3g} ({short(size.parameters)})" in named
        ) == is_forced
    assert ("8 instead of" in named) == (ranks == 8)
    assert ("slots_per_run" in named) == (ranks == 8)


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"sizes": (2e5, 2.02e5, 2.5e5)}, ("`sizes`", "200k", "202k", "smallest")),
        ({"sizes": (1e3, 2e5, 2.5e5)}, ("`sizes`", "1k", "smallest one has about 22")),
        ({"shapes": ({"num_layers": 1}, {"num_layers": 2}, {"num_layers": 1})}, ("`shapes`", "1", "3")),
    ],
)
def test_sizes_that_become_one_network_are_refused_in_the_words_of_the_file(
    target_files: Ladder, sizes: dict[str, Any], words: tuple[str, ...]
) -> None:
    ladder = dataclasses.replace(target_files, **{"shapes": (), "sizes": (), **sizes})
    target = plan_target(ladder).planned
    with pytest.raises(ConfigError) as refused:
        command._plan_networks(ladder, target.plan, Place())
    (line,) = str(refused.value).splitlines()
    assert all(word in line for word in words)


def test_sizes_that_no_network_has_are_named_with_what_they_become(target_files: Ladder) -> None:
    ladder = dataclasses.replace(target_files, shapes=(), sizes=(3e4, 1e5, 1.8e5))
    found = plan_target(ladder)
    target = found.planned
    family = Family(ladder, target.plan, command._plan_networks(ladder, target.plan, Place()))
    named = [f"{short(size.wanted or 0)} of" for size in family.sizes if abs(size.parameters / size.wanted - 1) > 0.05]
    assert named
    assert [note.partition(" `")[0] for note in family.size_notes()] == named
    first = list(command._first_stage(ladder, family))
    text = command._format_ladder(ladder, family, found, first, [Place()])
    assert "no runs" in text  # three sizes are all searched
    assert "0 runs" not in text
    assert all(note in text for note in family.size_notes())


@pytest.mark.parametrize("sizes", [{"sizes": (1e5, 1.6e5, 2.2e5)}, {}])
def test_a_small_run_has_only_keys_that_set_may_not_change_or_may(target_files: Ladder, sizes: dict[str, Any]) -> None:
    ladder = dataclasses.replace(target_files, settings={}, **{"shapes": (), **sizes} if sizes else {})
    more = yaml.safe_load(Path("more.yml").read_text())["overrides"] | {"attention_config": [[["global"], 4]]}
    more.pop("rampup_batch_size")
    Path("more.yml").write_text(yaml.safe_dump({"overrides": more}))
    target = plan_target(ladder).planned
    family = Family(ladder, target.plan, command._plan_networks(ladder, target.plan, Place()))
    found = {*family.run(family.sizes[0], 20.0, 1.0).run.values}
    assert found <= {*OWN_KEYS, *ADJUSTED_KEYS}
    assert not {*OWN_KEYS} & {*ADJUSTED_KEYS}
    of_shapes = {"attention_config"}  # which `shapes` leave as they are
    assert {*ADJUSTED_KEYS} - found == ({*()} if sizes else of_shapes)


def test_small_runs_of_a_target_that_keeps_and_exports_its_best_checkpoint_keep_and_export_none(
    target_files: Ladder,
) -> None:
    more = yaml.safe_load(Path("more.yml").read_text())["overrides"]
    more |= {"save": "saved", "save_best": "validation/lm_loss", "save_best_goal": "max", "hf_export": "best"}
    more |= {"hf_export_dir": "exported", "hf_export_hub": "a/b", "eval_interval": 10, "checkpoint_factor": 10}
    Path("more.yml").write_text(yaml.safe_dump({"overrides": more}))
    target = plan_target(target_files).planned
    assert target.config.checkpoint.hf_export == "best"
    family = Family(target_files, target.plan, command._plan_networks(target_files, target.plan, Place()))
    runs = [run.run for run in command._first_stage(target_files, family)]
    for planned in plan_runs(target_files.sweep(runs), Place()):
        keys = planned.config.checkpoint
        assert (keys.save_best, keys.hf_export) == (None, None)
        assert planned.problems == ()


def test_a_run_of_an_earlier_version_is_refused_with_ways_out_that_a_ladder_has(target_files: Ladder) -> None:
    target = plan_target(target_files).planned
    family = Family(target_files, target.plan, command._plan_networks(target_files, target.plan, Place()))
    sweep = target_files.sweep([run.run for run in command._first_stage(target_files, family)])
    runs = plan_runs(sweep, Place())
    earlier = dataclasses.replace(runs[0], config=runs[0].config.updated({"eval_iters": 100}))
    earlier.directory.mkdir(parents=True)
    earlier.record_settings()
    with pytest.raises(ConfigError) as refused:
        _check_runs(sweep, runs, [])
    (line,) = str(refused.value).splitlines()
    assert "eval_iters" in line
    assert "`directory`" in line
    assert f"--redo {runs[0].name}" in line
    assert "set them back" not in line  # the ladder has chosen them
    _check_runs(sweep, runs, [runs[0].name])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("sizes: [1e6, 2e6]\n", "at least 3 sizes"),
        ("sizes: [1e6, 2e6, 3e6]\nshapes: [{}, {}, {}]\n", "one of `sizes`"),
        ("sizes: [1e6, 2e6, -3e6]\n", "ladder.yml:2: `sizes`"),
        ("sizes: [1e6, 2e6, 3e6]\nlearning_rate: {rate: 1}\n", "ladder.yml:3: `learning_rate`"),
        ("sizes: [1e6, 2e6, 3e6]\nset: {save: x}\n", "ladder.yml:3: `save`"),
        ("sizes: [1e6, 2e6, 3e6]\nsteps: 3\n", "ladder.yml:3: `steps` is no key"),
        *[
            (f"sizes: [1e6, 2e6, 3e6]\nlearning_rate: {{exponent: {value}}}\n", "ladder.yml:3: `exponent`")
            for value in ("'0'", "-1/3", "null", "true", ".nan")
        ],
        *[
            (f"sizes: [1e6, 2e6, 3e6]\nbatch_exponent: {value}\n", "ladder.yml:3: `batch_exponent`")
            for value in ("null", "2/3", "'1'", "[1]", ".inf")
        ],
        ("sizes: [1e6, 2e6, 3e6]\nset: {optimizer.params.lr: 1.0e-3}\n", "`exponent` and `factors`"),
        *[
            (f"sizes: [1e6, 2e6, 3e6]\nset: {{{setting}}}\n", f"ladder.yml:3: `{setting.split(':')[0].split('.')[-1]}`")
            for setting in (
                "train_iters: 10",
                "train-iters: 10",
                "train_epochs: 2",
                "train_batch_size: 4",
                "batch_size: 4",
                "gas: 2",
                "seq_length: 8",
                "lr: 1.0e-3",
                "optimizer: {type: Adam}",
                "optimizer.params.lr: 1.0e-3",
                "optimizer.params: {lr: 1.0e-3}",
                "min_lr: 0",
                "warmup: 0.1",
                "lr_decay_iters: 4",
                "lr_decay_style: cosine",
                "scheduler: null",
                "data_stages: null",
                "rampup_batch_size: [2, 2, 8]",
                "curriculum_learning: {enabled: true}",
                "hidden_size: 64",
                "eval_iters: 3",
                "exit_interval: 3",
            )
        ],
        (
            "shapes: [{num_layers: 1}, {num_layers: 2}, {num_layers: 3, train_iters: 4}]\n",
            "ladder.yml:2: `train_iters`",
        ),
        (
            "shapes: [{num_layers: 1}, {num_layers: 2}, {rampup_batch_size: null}]\n",
            "ladder.yml:2: `rampup_batch_size`",
        ),
    ],
)
def test_malformed_files_are_refused_by_place(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "ladder.yml"
    file.write_text("configs: [a.yml]\n" + text)
    with pytest.raises(ConfigError) as refused:
        read_ladder(file)
    assert words in str(refused.value)


def test_exponents_may_be_any_numbers(tmp_path: Path) -> None:
    file = tmp_path / "ladder.yml"
    text = "configs: [a.yml]\nsizes: [1.0e+6, 2.0e+6, 3.0e+6]\n"
    file.write_text(text + "learning_rate: {exponent: 0}\nbatch_exponent: -1.0e-1\n")
    found = read_ladder(file)
    assert found.exponent(use_mup=False) == 0.0
    assert found.batch_exponent == -0.1
    file.write_text(text)
    assert read_ladder(file).exponent(use_mup=False) == pytest.approx(-1 / 3)


def prediction(losses: tuple[float, ...]) -> Prediction:
    """A prediction from runs of 1e6, 1e7 and so on parameters, with the losses of their best learning rates."""
    runs = []
    for number, found in enumerate(losses):
        size = RunSize(10 ** (6 + number), 20.0 * 10 ** (6 + number), 1e-3, 1.0)
        runs.append(TrainedRun(f"run{number}", size, found, is_best=math.isfinite(found)))
    best = [run for run in runs if run.is_best]
    fit = fit_loss([run.size.parameters for run in best], [run.size.tokens for run in best], [run.loss for run in best])
    found = fit.predict(1e10, 2e11)
    curve = tuple((run.size.parameters, 1e-3) for run in runs)
    rates = fit_learning_rate({10**6: {0.5: 3.0, 1.0: 2.9, 2.0: 3.0}})
    return Prediction(
        10**10,
        2e11,
        2e11,
        found,
        1.23456e-3,
        1e-3,
        2e-3,
        1e-3,
        1e-4,
        fit,
        rates,
        tuple(runs),
        best[-1],
        None,
        "2 runs, but 3 numbers to fit",
        curve,
    )


def test_three_runs_with_three_numbers_to_fit_have_no_range(tmp_path: Path) -> None:
    few = prediction((3.0, 2.6, 2.4))
    assert math.isnan(few.loss.low)
    assert not few.loss.is_known
    assert "no range is known" in format_prediction(few, tmp_path)
    write_prediction(tmp_path, few, config_from_files([ROOT / "configs" / "quickstart.yml"]))
    assert json.loads((tmp_path / "ladder.json").read_text())["loss"]["low"] is None
    several = prediction((3.0, 2.6, 2.41, 2.3))
    assert several.loss.low < several.loss.value < several.loss.high
    words = format_prediction(several, tmp_path)
    assert "1 degree of freedom" in words
    assert "check     none: run3 " in words
    assert "2 runs, but 3 numbers" in words
    checked = dataclasses.replace(several, largest_predicted=several.loss)
    assert "check     none" not in format_prediction(checked, tmp_path)
    assert "1 searched size(s) tell neither a trend nor a range" in words


def test_a_best_factor_beside_a_diverged_one_is_not_at_the_edge() -> None:
    fit = fit_learning_rate({10**6: {0.5: 3.0, 1.0: 2.0, 2.0: math.inf}})
    assert fit.at_edge == {}
    assert fit.factors == {10**6: 1.0}
    assert fit_learning_rate({10**6: {0.5: math.inf, 1.0: 3.0, 2.0: 2.0}}).at_edge == {10**6: (4.0, 8.0)}


@pytest.mark.parametrize(("steepness", "beyond"), [(-1.0, "8 and 16"), (1.0, "0.25 and 0.5")])
def test_best_rates_at_the_edge_show_no_range_and_say_which_factors_to_add(
    tmp_path: Path, steepness: float, beyond: str
) -> None:
    losses = {factor: 3 + steepness * math.log(factor) for factor in (1.0, 2.0, 4.0)}
    rates = fit_learning_rate({10 ** (6 + number): losses for number in range(4)})
    assert not rates.factor(1e10).is_known
    few = dataclasses.replace(prediction((3.0, 2.6, 2.4, 2.3)), rates=rates)
    words = format_prediction(few, tmp_path)
    assert f"add {beyond} to learning_rate.factors" in words
    assert "4 of 4" in words
    assert "no trend" not in words
    write_prediction(tmp_path, few, config_from_files([ROOT / "configs" / "quickstart.yml"]))
    first, second = json.loads((tmp_path / "ladder.json").read_text())["rates"]["at_edge"][str(10**6)]
    assert f"{first:g} and {second:g}" == beyond


def test_numbers_of_a_fit_at_their_bounds_are_named(tmp_path: Path) -> None:
    parameters = np.repeat(np.geomspace(1e6, 1e8, 4), 2)
    tokens = parameters * np.tile([5.0, 40.0], 4)
    assert list(fit_loss(parameters, tokens, loss(parameters, tokens)).at_bounds()) == []
    falling = loss(parameters, tokens) - 2.0  # below E
    (line,) = fit_loss(parameters, tokens, falling).at_bounds()
    assert line.startswith("E is 0")
    assert fit_loss(parameters, tokens, falling).irreducible == 0
    worse = fit_loss(parameters, tokens, 2 + 300 / parameters**0.35 + 0.01 * np.log(tokens))
    assert any("B is 0" in line for line in worse.at_bounds())
    # ln N is no power: the smallest exponent fits best.
    slow = fit_loss(parameters[::2], tokens[::2], 5 - 0.1 * np.log(parameters[::2]))
    assert any(line.startswith("a is") for line in slow.at_bounds())
    found = dataclasses.replace(prediction((3.0, 2.6, 2.4, 2.3)), fit=fit_loss(parameters, tokens, falling))
    assert "note      E is 0" in format_prediction(found, tmp_path)
    write_prediction(tmp_path, found, config_from_files([ROOT / "configs" / "quickstart.yml"]))
    assert json.loads((tmp_path / "ladder.json").read_text())["fit"]["at_bounds"] == [line]


def test_two_sizes_tell_no_term_of_sizes_whatever_their_tokens() -> None:
    """Three numbers (E, A and a) cannot follow from two sizes, so they are no check of a third one."""
    parameters = np.repeat([1e6, 1e7], 3)
    tokens = parameters * np.tile([5.0, 20.0, 80.0], 2)
    with pytest.raises(ValueError, match="2 sizes, but 3"):
        fit_loss(parameters, tokens, loss(parameters, tokens))


def test_the_written_learning_rate_is_the_one_that_is_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained: list[tuple[Sweep, Any]] = []

    def sweep_over(sweep: Sweep, places: Any, *, redo: Any) -> int:
        trained.append((sweep, redo))
        return 1

    monkeypatch.setattr(command, "sweep_over", sweep_over)
    batch = {"train_batch_size": 64, "gradient_accumulation_steps": None}
    found = dataclasses.replace(prediction((3.0, 2.6, math.inf, 2.3, 2.2)), batch=batch)
    target = config_from_files([ROOT / "configs" / "quickstart.yml"])
    write_prediction(tmp_path, found, target)
    ladder = Ladder("l", tmp_path, ("a.yml",))
    assert command._train_target(ladder, found, Place(), ["target"]) == 1
    ((sweep, redo),) = trained
    written = yaml.safe_load((tmp_path / "target.yml").read_text())["overrides"]
    values = {"optimizer.params.lr": written["optimizer"]["params"]["lr"], "min_lr": written["min_lr"]}
    values |= {key: written[key] for key in batch}
    assert sweep.runs[0].values == values == {**batch, "optimizer.params.lr": 1.235e-3, "min_lr": 1.235e-4}
    assert redo == ["target"]
    # Python's parser reads Infinity, which no other one does.
    text = (tmp_path / "ladder.json").read_text()
    read = json.loads(text, parse_constant=pytest.fail)
    assert [run["loss"] for run in read["runs"]] == [3.0, 2.6, None, 2.3, 2.2]


def test_training_the_target_leaves_the_table_of_the_small_runs(tmp_path: Path) -> None:
    (tmp_path / TABLE).write_text("small runs\n")
    write_results(target_sweep(Ladder("l", tmp_path, ("a.yml",)), {}), [], [])
    assert (tmp_path / TABLE).read_text() == "small runs\n"
