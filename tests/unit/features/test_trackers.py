"""TensorBoard and wandb, with the packages themselves: what they hold after a run, a failure and a resume."""

import json
import math
import struct
from types import SimpleNamespace

import pytest

from neox.engine import StepReport, StepResult, TrainState
from neox.errors import ConfigError, TrainingError
from neox.features.table import build_features
from neox.features.trackers.scores import report_scores
from neox.features.trackers.tensorboard import TensorBoard
from neox.features.trackers.wandb import WANDB_RUN_ID_FILE, WandB
from tests.plans import small_plan

NAMES = {
    "train/lm_loss",
    "train/learning_rate",
    "train/loss_scale",
    "runtime/samples_per_sec",
    "runtime/iteration_time",
    "runtime/flops_per_sec_per_gpu",
    "timers/batch_generator",
}
EVALUATION = {"validation/lm_loss": 3.0, "validation/lm_loss_ppl": math.exp(3.0)}


def report(loss):
    result = StepResult({"lm_loss": loss}, grad_norm=1.25, loss_scale=1.0, lr=1e-3, update_skipped=False)
    return StepReport(result, seconds=0.5, samples=8, seq_length=256, flops=5e11, reading=0.01)


def run(callback, losses, *, resumed_from=0, failed=False):
    """What the loop does: steps with these losses, an evaluation, the end."""
    state = TrainState(iteration=resumed_from)
    callback.on_start(state)
    for loss in losses:
        state.iteration += 1
        callback.on_step(state, report(loss))
    callback.on_evaluation(state, "validation", EVALUATION)
    if failed:
        callback.on_failure(state)
    else:
        callback.on_end(state)


def test_tensorboard_holds_every_name_and_the_later_point_after_a_resume(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run(TensorBoard(str(tmp_path)), [4.0, 3.0, 2.0], failed=True)
    run(TensorBoard(str(tmp_path)), [2.5, 1.5], resumed_from=2)
    events = EventAccumulator(str(tmp_path)).Reload()
    assert NAMES | set(EVALUATION) <= set(events.Tags()["scalars"])
    assert [(e.step, e.value) for e in events.Scalars("train/lm_loss")] == [(1, 4.0), (2, 3.0), (3, 2.5), (4, 1.5)]


def test_tensorboard_shows_the_settings(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    callback = TensorBoard(str(tmp_path), small_plan(tensorboard_dir=str(tmp_path)))
    run(callback, [4.0])
    events = EventAccumulator(str(tmp_path)).Reload()
    texts = {name: events.Tensors(f"{name}/text_summary")[0].tensor_proto.string_val[0] for name in ("config", "plan")}
    assert b'"hidden_size": 32' in texts["config"]
    assert b'"padded_vocab_size"' in texts["plan"]
    data = HParamsPluginData.FromString(events.SummaryMetadata("_hparams_/session_start_info").plugin_data.content)
    assert data.session_start_info.hparams["num_layers"].number_value == 2


def test_a_fresh_start_replaces_the_points_of_an_earlier_run_in_tensorboard(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run(TensorBoard(str(tmp_path)), [4.0, 3.0, 2.0])
    run(TensorBoard(str(tmp_path)), [3.9])
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [(e.step, e.value) for e in events.Scalars("train/lm_loss")] == [(1, pytest.approx(3.9))]


def test_scores_of_a_checkpoint_leave_the_points_of_its_training(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run(TensorBoard(str(tmp_path)), [4.0, 3.0, 2.0])
    report_scores(small_plan(tensorboard_dir=str(tmp_path)), {"eval/lambada_acc": 0.5}, 2)
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [(e.step, e.value) for e in events.Scalars("train/lm_loss")] == [(1, 4.0), (2, 3.0), (3, 2.0)]
    assert [(e.step, e.value) for e in events.Scalars("eval/lambada_acc")] == [(2, 0.5)]


def wandb_records(directory):
    """The records of one offline run's file: blocks of a LevelDB log that hold protobuf messages."""
    from wandb.proto import wandb_internal_pb2

    (file,) = directory.glob("*.wandb")
    data, position, message, records = file.read_bytes(), 7, b"", []
    while position + 7 <= len(data):
        if 32768 - position % 32768 < 7:
            position += 32768 - position % 32768
            continue
        _, length, kind = struct.unpack("<IHB", data[position : position + 7])
        message += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # a whole message, or its last part
            record = wandb_internal_pb2.Record()
            record.ParseFromString(message)
            records.append(record)
            message = b""
    return records


@pytest.fixture
def offline(monkeypatch, tmp_path):
    monkeypatch.setenv("WANDB_MODE", "offline")
    for name in ("WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_DISABLE_GIT", "true")
    yield
    __import__("wandb").teardown()  # it keeps what it read from the environment


def test_wandb_offline_holds_every_name_in_a_run_for_each_start(offline, tmp_path):
    logs = tmp_path / "logs"
    asked = small_plan(use_wandb=True, log_dir=str(logs), wandb_project="p", wandb_group="g", wandb_run_name="n")
    run(WandB(asked), [4.0, 3.0, 2.0], failed=True)
    first_id = (logs / WANDB_RUN_ID_FILE).read_text().split()[0]
    __import__("wandb").teardown()  # a resume is another process
    (logs / "wandb").rename(logs / "wandb-first")  # whose directories are named by id and a second that may be the same
    run(WandB(asked), [2.5], resumed_from=2)
    __import__("wandb").teardown()  # waits for what wandb's own process still has to write
    second_id = (logs / WANDB_RUN_ID_FILE).read_text().split()[0]
    assert second_id != first_id  # else a sync of the second would erase the first
    directories = [*(logs / "wandb-first").glob("offline-run-*"), *(logs / "wandb").glob("offline-run-*")]
    rows, runs, configs = [], [], []
    for directory in directories:
        for record in wandb_records(directory):
            if record.HasField("run"):
                runs.append(record.run)
                configs.append({item.key: json.loads(item.value_json) for item in record.run.config.update})
            if record.HasField("history"):
                items = record.history.item
                rows.append({i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in items})
    assert {r.run_id for r in runs} == {first_id, second_id}
    assert all(config["plan"]["grid"]["world"] == 1 and config["num_layers"] == 2 for config in configs)
    assert {(r.project, r.run_group, r.display_name) for r in runs} == {("p", "g", "n")}
    losses = [(row["iteration"], row["train/lm_loss"]) for row in rows if "train/lm_loss" in row]
    assert losses == [(1, 4.0), (2, 3.0), (3, 2.0), (3, 2.5)]
    assert all(set(row) >= NAMES for row in rows if "train/lm_loss" in row)
    assert [row["iteration"] for row in rows if set(EVALUATION) <= set(row)] == [3, 3]


def test_a_fresh_start_is_a_new_run_of_wandb(offline, tmp_path):
    asked = small_plan(use_wandb=True, save=str(tmp_path / "save"))
    ids = []
    for _ in range(2):
        board = WandB(asked)
        board.on_start(TrainState())
        board.on_end(TrainState())
        ids.append((tmp_path / "save" / WANDB_RUN_ID_FILE).read_text())
    assert ids[0] != ids[1]


def test_wandb_without_a_login_says_what_to_do(offline, monkeypatch, tmp_path):
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    with pytest.raises(TrainingError) as refused:
        WandB(small_plan(use_wandb=True, log_dir=str(tmp_path))).on_start(TrainState())
    assert "WANDB_MODE=offline" in str(refused.value)


def kinds_on_first_rank(**keys):
    """Names of the classes of features that rank 0 builds."""
    plan = small_plan(straggler_steps=0, **keys)
    model = SimpleNamespace(plan=plan, grid=SimpleNamespace(rank=0), objective=SimpleNamespace(per_token=()))
    return {type(feature).__name__ for feature in build_features(model, SimpleNamespace(saved={}))}


def test_absent_keys_mean_off(tmp_path):
    assert kinds_on_first_rank(log_dir=str(tmp_path)) == {"Ledger", "TerminalLine", "MetricsFile"}
    keys = {"use_wandb": True, "tensorboard_dir": str(tmp_path / "tb")}
    assert kinds_on_first_rank(**keys) == {"Ledger", "TerminalLine", "TensorBoard", "WandB"}


def test_trackers_that_are_not_installed_are_an_error_that_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setitem(__import__("sys").modules, "wandb", None)
    monkeypatch.setitem(__import__("sys").modules, "torch.utils.tensorboard", None)
    with pytest.raises(ConfigError) as without_wandb:
        WandB(small_plan(use_wandb=True))
    assert "requirements-wandb.txt" in str(without_wandb.value)
    with pytest.raises(ConfigError) as without_tensorboard:
        TensorBoard(str(tmp_path))
    assert "requirements-tensorboard.txt" in str(without_tensorboard.value)


def test_a_directory_that_cannot_be_written_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(TrainingError) as refused:
        TensorBoard(str(tmp_path / "file" / "tb")).on_start(TrainState())
    assert "tensorboard_dir" in str(refused.value)
    with pytest.raises(TrainingError):
        WandB(small_plan(use_wandb=True, log_dir=str(tmp_path / "file" / "logs"))).on_start(TrainState())


@pytest.mark.parametrize("failed", [False, True])
def test_a_tracker_that_cannot_end_its_run_ends_no_training(caplog, failed):
    """wandb's `finish` waits for its server and may raise; an error of the training must not be replaced by it."""
    ended = []

    class Away:
        def finish(self, exit_code):
            ended.append(exit_code)
            raise ConnectionError("the server is away")

    board = WandB(small_plan(use_wandb=True))
    board._run = Away()
    board._wandb = SimpleNamespace(teardown=lambda: ended.append("teardown"))
    with caplog.at_level("WARNING"):
        (board.on_failure if failed else board.on_end)(TrainState())
    assert ended == [int(failed), "teardown"]
    assert "the server is away" in caplog.text


@pytest.mark.parametrize(
    ("written", "offline", "expected"),
    [
        (None, False, (None, None)),  # a new id, which no group joins with others
        (None, True, (None, "new")),
        ("first", False, ("first", None)),
        ("first", True, (None, "first")),
        ("second offline first", True, (None, "first")),
        ("second offline first", False, (None, "first")),
    ],
)
def test_starts_of_wandb_that_cannot_be_one_run_are_one_group(tmp_path, written, offline, expected):
    file = tmp_path / WANDB_RUN_ID_FILE
    if written is not None:
        file.write_text(written + "\n")
    run_id, group = WandB(small_plan(use_wandb=True))._id_and_group(file, resumed=written is not None, offline=offline)
    wanted_id, wanted_group = expected
    assert (run_id if wanted_group == "new" else wanted_group) == group
    assert (run_id == wanted_id) == (wanted_id is not None)
    assert file.read_text().split() == ([run_id, "offline", group] if offline else [run_id])


def test_a_score_that_nothing_was_counted_for_is_left_out(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run(TensorBoard(str(tmp_path)), [4.0, None, 2.0])
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [(e.step, e.value) for e in events.Scalars("train/lm_loss")] == [(1, 4.0), (3, 2.0)]
