"""`tools/which_gpu.py`: the smallest number of GPUs of each kind on which a run fits."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from neox.config import load_config
from neox.devices import GPUS
from neox.errors import ConfigError
from neox.plan import gpu_device, resolve
from neox.plan.devices.device import memory_on
from neox.plan.search.divisible import divisible_config
from neox.plan.search.fastest import suggest_layouts
from neox.plan.search.fit import FLASH_IS_FASTER, nested_keys
from neox.preflight.gpu_choice import GpuChoice, batch_to_plan, choose_gpus, describe_batch, format_choices
from neox.preflight.suggest import find_layouts

CONFIGS = Path(__file__).resolve().parents[3] / "configs"


LARGE = ["num_layers=128", 'attention_config=[[["flash"], "all"]]', "host_memory_gib=1024"]
"""Keys that make 28 billion parameters of 8, whose states two GPUs of a host may have in main memory."""


@pytest.mark.parametrize(
    ("kind", "overrides"),
    [
        pytest.param("a100-40", LARGE, id="larger than one"),
        pytest.param("a100-80", [], id="states in main memory"),
        pytest.param("h100", ["lora={r: 16, alpha: 16}"], id="adapters"),
    ],
)
def test_its_layout_fits_on_that_number_and_none_on_fewer(kind: str, overrides: list[str]) -> None:
    config = load_config([CONFIGS / "llama" / "3-8B.yml"], overrides=[*overrides, f"gpu_type={kind}"]).config
    choice, *cheaper = choose_gpus(config, 128_256, 1e9, [kind], hourly_price=2.0)
    assert choice.gpus is not None
    assert all(other.gpus > choice.gpus and other.price < choice.price for other in cheaper)
    # as `--set KEY=VALUE ... --dry-run` plans it
    plan = resolve(config.updated(nested_keys(config, choice.changes)), choice.gpus, 128_256)
    device = gpu_device(plan)
    needed = memory_on(plan, device).needed(on_cpu=False)
    assert needed <= device.usable
    assert choice.memory_gib == pytest.approx(needed / 2**30)
    assert choice.gpu_hours == pytest.approx(1e9 / choice.tokens_per_second * choice.gpus / 3600)
    assert choice.price == 2 * choice.gpu_hours
    assert choice.days == pytest.approx(choice.gpu_hours / choice.gpus / 24)
    assert (choice.gpus > 1) == (overrides is LARGE)
    if choice.gpus > 1:
        fewer, changed = divisible_config(config, choice.gpus // 2)
        smaller = resolve(fewer, choice.gpus // 2, 128_256)
        assert not suggest_layouts(smaller, gpu_device(smaller), GPUS[kind], 1, changed).best
    else:  # states of adapters fit beside the weights, those of the whole model do not
        assert (choice.main_memory_gib == 0) == bool(overrides)


def test_the_batch_is_that_of_the_gpus_that_the_file_was_made_for() -> None:
    """20B.yml asks for 4 samples x 32 steps on 96 GPUs of 8 a copy; one GPU in itself would have 16 samples a step."""
    config = load_config([CONFIGS / "20B.yml"], overrides=["host_memory_gib=2048"]).config
    choices = list(choose_gpus(config, 50_257, 1e9, ["h200"], [1, 8, 96], every=True))
    assert [choice.batch for choice in choices] == [1536, 1536, 1536]
    assert "planned_num_gpus: 96" in describe_batch(config)
    one = choices[0]
    plan = resolve(config.updated(nested_keys(config, one.changes) | {"gpu_type": "h200"}), 1, 50_257)
    assert plan.batch.train_batch_size == 1536
    # The update of states in main memory takes its share of a step of 1,536 samples, and not of 16.
    assert one.tokens_per_second > 0.9 * choices[1].tokens_per_second / 8


@pytest.mark.parametrize(
    ("overrides", "samples"),
    [
        (["train_batch_size=64", "gradient_accumulation_steps=null"], 64),
        (["global_num_gpus=12"], 48),
        (["num_gpus=3"], 12),
        (["planned_num_gpus=6", "global_num_gpus=12"], 24),
    ],
)
def test_keys_that_name_a_batch(overrides: list[str], samples: int) -> None:
    intended = batch_to_plan(load_config([CONFIGS / "125M.yml"], overrides=overrides).config)
    assert intended is not None
    assert intended.samples == samples


def test_hosts_of_a_hostfile_name_a_batch(tmp_path: Path) -> None:
    hostfile = tmp_path / "hosts"
    hostfile.write_text("one slots=8\ntwo slots=8\n", encoding="utf-8")
    intended = batch_to_plan(load_config([CONFIGS / "125M.yml"], overrides=[f"hostfile={hostfile}"]).config)
    assert intended is not None
    assert intended.samples == 4 * 16
    missing = load_config([CONFIGS / "125M.yml"], overrides=[f"hostfile={tmp_path}/none"]).config
    assert batch_to_plan(missing) is None


def test_a_file_without_a_number_of_gpus_says_so() -> None:
    config = load_config([CONFIGS / "125M.yml"], overrides=[]).config
    assert batch_to_plan(config) is None
    assert "train_batch_size=N" in describe_batch(config)
    choices = choose_gpus(config, 50_257, 1e9, ["h100"], [1, 8], every=True)
    assert [choice.batch for choice in choices] == [4, 32]


def test_gpus_too_few_for_a_copy_keep_the_batch_of_one() -> None:
    divided, _ = divisible_config(load_config([CONFIGS / "6-7B.yml"], overrides=["model_parallel_size=8"]).config, 1)
    config = divided.deepspeed
    assert config.train_batch_size == 4


def test_a_newer_gpu_updates_offloaded_states_no_slower() -> None:
    config = load_config([CONFIGS / "20B.yml"], overrides=["host_memory_gib=2048"]).config
    h200, b200 = choose_gpus(config, 50_257, 1e9, ["h200", "b200"], [1], every=True)
    assert h200.main_memory_gib > 0
    assert b200.tokens_per_second > h200.tokens_per_second
    assert GPUS["b200"].host_memory_gbs >= GPUS["h200"].host_memory_gbs
    assert GPUS["b200"].host_link_gbs >= GPUS["h200"].host_link_gbs


def test_gpus_whose_share_of_main_memory_does_not_hold_what_they_offload_are_named() -> None:
    """20 billion parameters have 300 GiB of states, and one of eight GPUs of a DGX H100 has 256 GiB of main memory."""
    config = load_config([CONFIGS / "20B.yml"], overrides=[]).config
    one, two, *_ = choose_gpus(config, 50_257, 1e9, ["h100"], [1, 2])
    assert (one.gpus, two.gpus) == (None, 2)
    assert "256 GiB" in one.reason
    assert one.main_memory_gib > 256
    assert one.as_json()["reason"].startswith("1 GPU: ")
    assert 0 < two.main_memory_gib <= 2 * 256
    (row,) = choose_gpus(config, 50_257, 1e9, ["h100"], [1], every=True)
    assert row.reason == one.reason
    larger = config.updated({"host_memory_gib": 512})  # of each host, however many of its GPUs are used
    assert [choice.gpus for choice in choose_gpus(larger, 50_257, 1e9, ["h100"], [1])] == [1]
    plan = resolve(divisible_config(config.updated({"gpu_type": "h100"}), 1)[0], 1, 50_257)
    with pytest.raises(ConfigError, match="host_memory_gib"):
        find_layouts(plan, gpu_device(plan), "h100", {}, 1)


def test_days_decide_about_the_tokens() -> None:
    config = load_config([CONFIGS / "llama" / "3.2-1B.yml"], overrides=[]).config
    (choice,) = choose_gpus(config, 128_256, 1e9, ["h100"], [8], days=7, every=True)
    assert choice.parameters == 1_235_814_400  # as its publisher counts
    assert choice.tokens == pytest.approx(choice.tokens_per_second * 7 * 24 * 3600)
    assert (choice.days, choice.gpu_hours) == (pytest.approx(7), pytest.approx(7 * 24 * 8))
    (row,) = format_choices([choice], "", with_tokens=True).splitlines()[2:]
    *_, ratio, largest, billion = row.split()
    assert (ratio, billion) == (f"{choice.tokens / 1_235_814_400:.0f}", "B")
    size = float(largest) * 1e9  # with the same FLOPs, 6 for each parameter and token, it gets 20 tokens for each
    assert size * 20 * size == pytest.approx(1_235_814_400 * choice.tokens, rel=0.05)
    (same,) = choose_gpus(config, 128_256, choice.tokens, ["h100"], [8], every=True)
    assert same.days == pytest.approx(7)


def test_an_expected_mfu_takes_the_place_of_estimates() -> None:
    """57.91 GFLOPs a token of Llama 3 8B at 8,192 tokens (causal attention counted whole), by hand."""
    config = load_config([CONFIGS / "llama" / "3-8B.yml"], overrides=["expected_mfu=0.4"]).config
    (choice,) = choose_gpus(config, 128_256, 1e9, ["h100"], [8], every=True)
    layer = 2 * (4096 * 4096 * 2 + 4096 * 1024 * 2 + 3 * 4096 * 14336) + 4 * 8192 * 4096
    operations = 3 * (32 * layer + 2 * 4096 * 128_256)
    assert choice.mfu == 0.4
    assert choice.tokens_per_second == pytest.approx(8 * 0.4 * 989e12 / operations, rel=1e-3)


def test_bf16_needs_a_gpu_that_has_it() -> None:
    config = load_config([CONFIGS / "llama" / "3-8B.yml"], overrides=[]).config
    (choice,) = choose_gpus(config, 128_256, 1e9, ["v100"])
    assert choice.gpus is None
    assert "precision=fp16" in choice.reason
    in_fp16, *_ = choose_gpus(config.updated({"precision": "fp16"}, without=["bf16"]), 128_256, 1e9, ["v100"], [8])
    assert in_fp16.gpus is not None


def test_unknown_gpu_is_refused() -> None:
    config = load_config([CONFIGS / "llama" / "3-8B.yml"], overrides=[]).config
    with pytest.raises(ConfigError, match="rtx-9090"):
        list(choose_gpus(config, 128_256, 1e9, ["rtx-9090"]))


def test_a_run_that_fits_on_no_number_says_which_were_tried() -> None:
    config = load_config([CONFIGS / "175B.yml"], overrides=[]).config
    (choice,) = choose_gpus(config, 50_257, 1e9, ["a100-40"], counts=[1, 2])
    assert choice.gpus is None
    assert "1, 2" in choice.reason


def test_given_numbers_are_a_row_each() -> None:
    config = load_config([CONFIGS / "llama" / "3-8B.yml"], overrides=LARGE).config
    choices = list(choose_gpus(config, 128_256, 1e9, ["a100-40"], [1, 2, 4], every=True))
    assert [choice.gpus for choice in choices] == [None, 2, 4]
    assert choices[0].reason.startswith("1 GPU")


def test_numbers_that_cannot_train_it_are_passed_over_or_named() -> None:
    config = load_config([CONFIGS / "llama" / "3.2-1B.yml"], overrides=["context_parallel_size=2"]).config
    (choice, *_) = choose_gpus(config, 128_256, 1e9, ["h100"], [1, 2])
    assert choice.gpus == 2
    one, two = choose_gpus(config, 128_256, 1e9, ["h100"], [1, 2], every=True)
    assert one.reason.startswith("1 GPU: ")
    assert "context_parallel_size" in one.reason
    assert two.gpus == 2
    with pytest.raises(ConfigError, match="context_parallel_size"):
        list(choose_gpus(config, 128_256, 1e9, ["h100"], [1]))


def test_figures_of_small_runs_keep_digits() -> None:
    config = load_config([CONFIGS / "pythia" / "14M.yml"], overrides=[]).config
    (choice,) = choose_gpus(config, 50_304, 1e6, ["h100"], [2], every=True)
    assert 0 < choice.gpu_hours < 0.01
    assert f"{choice.gpu_hours:.2g}" in format_choices([choice], "title"), "what takes seconds does not take 0 hours"


def test_one_line_says_that_flash_attention_which_the_file_does_not_ask_for_would_be_faster() -> None:
    def choose(attention: str) -> list[GpuChoice]:
        overrides = [f'attention_config=[[["{attention}"], "all"]]', "precision=fp16", "host_memory_gib=512"]
        config = load_config([CONFIGS / "20B.yml"], overrides=overrides).config
        return list(choose_gpus(config, 50_257, 1e9, ["v100", "h100"], [1, 2], every=True))

    choices = choose("global")
    assert [choice.gpus for choice in choices] == [None, 2, 1, 2]
    assert [choice.as_json()["notes"] for choice in choices] == [(FLASH_IS_FASTER,)] * 4, "also where nothing fits"
    table = format_choices(choices, "title").splitlines()
    assert [line for line in table if "flash" in line] == [f"note: {FLASH_IS_FASTER}"]
    faster = choose("flash")
    assert not any(choice.notes for choice in faster)
    assert faster[-1].days < choices[-1].days


@pytest.mark.slow
def test_the_page_of_shipped_models_is_that_of_the_planner() -> None:
    root = CONFIGS.parent
    checked = subprocess.run([sys.executable, "benchmarks/which_gpu.py", "--check"], cwd=root, timeout=600)
    assert checked.returncode == 0, "make reference writes it again"
