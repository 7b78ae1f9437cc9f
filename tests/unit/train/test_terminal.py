"""NeoX's line."""

from neox.engine import StepResult
from neox.train.callbacks import StepReport, TerminalLine, TrainState


def report(loss, seconds=0.5):
    result = StepResult(loss=loss, grad_norm=1.25, loss_scale=1.0, lr=1e-3, skipped=False)
    return StepReport(result, seconds, 8.0 / seconds, 1024.0 / seconds, 1e12 / seconds, 2**30)


def lines_of(capsys, **options):
    terminal = TerminalLine(10, options.pop("log_interval", 2), log_grad_norm=options.pop("log_grad_norm", False))
    for iteration in range(1, 11):
        terminal.on_step(TrainState(iteration=iteration, skipped=1), report(float(iteration)))
    return capsys.readouterr().out.splitlines()


def test_the_first_then_one_every_interval_with_mean_losses(capsys):
    lines = lines_of(capsys, log_interval=4)
    assert [line.split("|")[1].split()[1].split("/")[0] for line in lines] == ["1", "4", "8", "10"]
    assert "lm_loss: 3.000000E+00" in lines[1]  # of iterations 2, 3, 4
    assert "lm_loss: 9.500000E+00" in lines[3]  # of iterations 9, 10


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
    terminal = TerminalLine(4, 4, log_grad_norm=False)
    terminal.on_step(TrainState(iteration=1), report(1.0))
    for iteration, seconds in ((2, 1.0), (3, 1.0), (4, 0.1)):
        terminal.on_step(TrainState(iteration=iteration), report(1.0, seconds))
    line = capsys.readouterr().out.splitlines()[-1]
    assert "elapsed time per iteration (ms): 700.0" in line
    assert f"samples/sec: {8 / 0.7:.3f}" in line
