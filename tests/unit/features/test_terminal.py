"""Lines of training in the forms of gpt-neox, FleetX and OneFlow."""

import re
from dataclasses import replace

import pytest

from neox.engine import StepReport, StepResult, TrainState
from neox.features.terminal.run import TerminalLine
from neox.plan import DataAmounts
from tests.plans import small_plan


def report(loss, seconds=0.5):
    result = StepResult({"lm_loss": loss}, grad_norm=1.25, loss_scale=1.0, lr=1e-3, update_skipped=False)
    return StepReport(result, seconds, samples=8, seq_length=128, flops=1e12, reading=0.01, peak_memory=2**30)


def lines_of(capsys, epoch_samples=0, **keys):
    plan = small_plan(**{"log_interval": 2, **keys})
    terminal = TerminalLine(replace(plan, amounts=DataAmounts(epoch_samples=epoch_samples)))
    for iteration in range(1, 11):
        terminal.on_step(TrainState(iteration=iteration, skipped_updates=1), report(float(iteration)))
    return capsys.readouterr().out.splitlines()


def test_the_first_then_one_every_interval_with_mean_losses(capsys):
    lines = lines_of(capsys, log_interval=4)
    assert [line.split("|")[1].split()[1].split("/")[0] for line in lines] == ["1", "4", "8", "10"]
    assert "lm_loss: 3.000000E+00" in lines[1]  # of iterations 2, 3, 4
    assert "lm_loss: 9.500000E+00" in lines[3]  # of iterations 9, 10


def test_every_score_of_an_objective_has_its_mean(capsys):
    terminal = TerminalLine(small_plan(log_interval=2))
    for iteration, accuracy in enumerate((0.0, 0.5, 0.75), start=1):
        step = report(3.0)
        scores = {"loss": 3.0, "lm_loss": 2.5, "sentence_accuracy": accuracy}
        terminal.on_step(TrainState(iteration=iteration), replace(step, result=replace(step.result, scores=scores)))
    assert "| loss: 3.000000E+00 | lm_loss: 2.500000E+00 | sentence_accuracy: 5.0" in capsys.readouterr().out


def test_what_a_line_says(capsys):
    line = lines_of(capsys, log_grad_norm=True)[0]
    for part in (
        "samples/sec: 16.000",
        "elapsed time per iteration (ms): 500.0",
        "learning rate: 1.000E-03",
        "approx flops per GPU: 2.000TFLOPS",
        "grad norm: 1.250",
        "loss scale: 1.0",
        "number of skipped iterations:   1",
        "number of nan iterations:   0",
        "tokens/sec: 2,048",
        "peak memory: 1.00 GiB",
        "ETA: 00:00:04",
    ):
        assert part in line, part


def test_rates_are_of_the_mean_step(capsys):
    terminal = TerminalLine(small_plan(train_iters=4, log_interval=4))
    terminal.on_step(TrainState(iteration=1), report(1.0))
    for iteration, seconds in ((2, 1.0), (3, 1.0), (4, 0.1)):
        terminal.on_step(TrainState(iteration=iteration), report(1.0, seconds))
    line = capsys.readouterr().out.splitlines()[-1]
    assert "elapsed time per iteration (ms): 700.0" in line
    assert f"samples/sec: {8 / 0.7:.3f}" in line


@pytest.mark.parametrize(
    ("train_iters", "given", "interval"), [(60, {}, 3), (7, {}, 1), (5000, {}, 100), (60, {"log_interval": 50}, 50)]
)
def test_a_short_run_has_about_twenty_lines(train_iters, given, interval):
    assert TerminalLine(small_plan(train_iters=train_iters, **given)).log_interval == interval


FLEETX = re.compile(
    r"global step (\d+), epoch: (\d+), batch: (\d+), loss: (\d+\.\d{9}), avg_reader_cost: 0\.01000 sec, "
    r"avg_batch_cost: 0\.50000 sec, speed: 2\.00 step/s, ips_total: 2048 tokens/s, ips: 1024 tokens/s, "
    r"learning rate: 1\.00000e-03"
)


def test_fleetx_line_counts_epochs_and_their_batches(capsys):
    lines = lines_of(capsys, 12, log_style="fleetx", log_interval=3, world_size=2)  # 4 samples a step
    found = [FLEETX.fullmatch(line) for line in lines]
    assert [match.groups() for match in found] == [
        ("1", "0", "0", "1.000000000"),
        ("3", "0", "2", "2.500000000"),
        ("6", "1", "2", "5.000000000"),
        ("9", "2", "2", "8.000000000"),
        ("10", "3", "0", "10.000000000"),
    ]


def test_oneflow_table_has_throughput_and_latency(capsys):
    terminal = TerminalLine(small_plan(log_style="oneflow", log_interval=1, gradient_accumulation_steps=3))
    terminal.on_start(TrainState())
    terminal.on_step(TrainState(iteration=7), report(2.5))
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in capsys.readouterr().out.splitlines()[1:]]
    assert cells[0] == ["step", "micro_batches", "samples", "throughput", "latency", "loss"]
    assert cells[2] == ["7", "21", "42", "16.00000", "0.50000", "2.50000"]


@pytest.mark.parametrize("style", ["neox", "fleetx", "oneflow"])
def test_timers_are_means_in_milliseconds(capsys, style):
    terminal = TerminalLine(small_plan(log_style=style, log_interval=2, train_iters=9))
    for iteration, seconds in ((1, 0.5), (2, 0.1), (3, 0.1), (4, 0.3)):
        result = replace(report(1.0).result, timers={"forward": seconds, "backward": 2 * seconds})
        terminal.on_step(TrainState(iteration=iteration), replace(report(1.0), result=result))
    assert capsys.readouterr().out.splitlines()[-1] == " time (ms) | forward: 200.00 | backward: 400.00"


@pytest.mark.parametrize(
    ("style", "word"), [("neox", "lm_loss: none"), ("fleetx", "loss: none"), ("oneflow", "| none ")]
)
def test_steps_without_labels_have_no_loss(capsys, style, word):
    terminal = TerminalLine(small_plan(log_style=style, log_interval=2))
    for iteration, loss in enumerate((None, None, 3.0, None), start=1):
        terminal.on_step(TrainState(iteration=iteration), report(loss))
    first, second, third = capsys.readouterr().out.splitlines()
    assert word in first
    assert word in second
    assert re.search(r"loss: 3\.0|\| 3\.00000", third), "the mean of the steps that have a loss"
