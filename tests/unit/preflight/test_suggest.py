"""Suggested layouts: numbers of GPUs that the configured degrees do not divide, and the file of the best one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from neox.config import NeoXConfig, load_config
from neox.errors import ConfigError
from neox.plan import gpu_device, resolve
from neox.plan.search.divisible import divisible_config
from neox.plan.search.fit import nested_keys
from neox.preflight.command_line import parse_arguments
from neox.preflight.planning import read_config
from neox.preflight.suggest import SuggestLayouts, find_layouts, layouts_to_measure, write_keys

CONFIGS = Path(__file__).resolve().parents[3] / "configs"


def test_the_search_says_that_flash_attention_which_it_keeps_from_the_file_would_be_faster() -> None:
    def notes(attention: str) -> list[str]:
        overrides = [f'attention_config=[[["{attention}"], "all"]]']
        config = load_config([CONFIGS / "20B.yml"], overrides=overrides).config
        plan = resolve(config, 8, 50_277)
        _, about = find_layouts(plan, gpu_device(plan), "h200", {}, 1)
        return [line for line in about.splitlines() if line.startswith("note: attention_config")]

    assert len(notes("global")) == 1
    assert notes("flash") == []


def test_layouts_offload_no_more_than_the_main_memory_that_the_hosts_have() -> None:
    """What a key or a host says wins over the usual host of a kind; a host does not over a kind that a flag names."""

    def offloaded(name: str, *, available: int | None = None, ranks_of_host: int | None = None, **keys: Any) -> float:
        config = load_config([CONFIGS / "20B.yml"], overrides=['attention_config=[[["flash"], "all"]]']).config
        start, _ = divisible_config(config.updated({"gpu_type": "h100", **keys}), 2)
        plan = resolve(start, 2, 50_277)
        device = gpu_device(plan, ranks_of_host=ranks_of_host, available=available)
        found, about = find_layouts(plan, device, name, {}, 3)
        assert ("are left out that offload" in about) == (found.least_offloaded is not None)
        return max(layout.memory.main_memory for layout in found.best) / 2**30

    assert 150 < offloaded("") < 256
    assert offloaded("h100") == offloaded("h100", available=2**30), "other hosts than those that were asked"
    with pytest.raises(ConfigError, match="what is available now"):
        offloaded("", available=2**30)
    with pytest.raises(ConfigError, match="host_memory_gib"):
        offloaded("h100", host_memory_gib=300)
    assert offloaded("h100", host_memory_gib=300, ranks_of_host=1) > 150


@pytest.mark.parametrize("gpus", [7, 12, 100])
def test_file_of_the_best_layout_runs_on_gpus_that_the_degrees_do_not_divide(gpus: int, tmp_path: Path) -> None:
    files = [CONFIGS / "20B.yml", CONFIGS / "local_setup.yml"]
    config = load_config(files).config
    searchable, changed = divisible_config(config, gpus)
    assert changed
    plan = resolve(searchable, gpus, 50_277)
    output = tmp_path / "best.yml"
    found, _ = find_layouts(plan, gpu_device(plan), "a100-80", changed, 10)
    assert str(output.resolve()) in write_keys(found.best[0], plan.config, output)
    assert load_config([*files, output]).config.runner.gpu_type == config.runner.gpu_type
    write_keys(found.best[0], plan.config, output, "h200")
    assert load_config([*files, output]).config.runner.gpu_type == "h200"
    again = resolve(load_config([*files, output]).config, gpus, 50_277)
    assert again.grid.world_size == gpus
    # 128 samples a copy on 8 GPUs: 7 GPUs, which are no whole copy, share those of one as far as they divide.
    assert again.batch.train_batch_size == plan.batch.train_batch_size == {7: 126}.get(gpus, 16 * gpus)
    blocks = (again.config.deepspeed.zero_optimization, config.deepspeed.zero_optimization)
    assert blocks[0].reduce_bucket_size == blocks[1].reduce_bucket_size is not None


def test_half_of_the_measured_layouts_have_other_degrees() -> None:
    config = load_config([CONFIGS / "20B.yml", CONFIGS / "local_setup.yml"]).config
    plan = resolve(config, 96, 50_277)
    found, _ = find_layouts(plan, gpu_device(plan), "a100-40", {}, 60)
    chosen = layouts_to_measure(found, 6, is_changed=True)
    assert chosen[:3] == list(found.best[:3])
    degrees = [(layout.run.layout.pp_size, layout.run.layout.tp_size) for layout in chosen]
    assert len(chosen) == 6
    assert len(set(degrees[3:]) - set(degrees[:3])) == 3


def test_the_search_names_the_batch_of_the_gpus_that_the_file_was_made_for(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["train.py", str(CONFIGS / "pythia" / "14M.yml"), "--hosts", "1", "--gpus", "2", "--suggest", "h200"]
    arguments = parse_arguments(words)
    assert SuggestLayouts(arguments, read_config(arguments)).suggest() == 0
    shown = capsys.readouterr()
    assert " layouts of 2 H200 SXM 141 GB (h200), 64 samples a step" in shown.out
    # micro batches of 32 on 32 GPUs
    assert "1,024 samples there, and 64 here; --set train_batch_size=1024" in shown.err


def test_total_batch_that_is_given_stays(tmp_path: Path) -> None:
    overrides = ["train_batch_size=64", "gradient_accumulation_steps=None"]
    config = load_config([CONFIGS / "20B.yml", CONFIGS / "local_setup.yml"], overrides=overrides).config
    searchable, changed = divisible_config(config, 24)
    assert "train_batch_size" not in changed
    assert resolve(searchable, 24, 50_277).batch.train_batch_size == 64


@pytest.mark.parametrize("stage", [2, 3])
def test_batch_that_needs_stages_is_searched_with_a_zero_stage_that_they_can_have(stage: int) -> None:
    overrides = ["train_batch_size=8", "train_micro_batch_size_per_gpu=1", "gradient_accumulation_steps=null"]
    files = [CONFIGS / "125M.yml", CONFIGS / "local_setup.yml"]
    config = load_config(files, overrides=[*overrides, f"zero_optimization.stage={stage}"]).config
    searchable, changed = divisible_config(config, 6)
    assert (changed["pipe_parallel_size"], changed["zero_optimization.stage"]) == (3, 1)
    plan = resolve(searchable, 6, 50_304)
    found, _ = find_layouts(plan, gpu_device(plan), "a100-40", changed, 10)
    for layout in found.best:
        resolve(config.updated(nested_keys(config, layout.changes)), 6, 50_304)


def test_configuration_that_divides_its_gpus_stays() -> None:
    config = load_config([CONFIGS / "20B.yml", CONFIGS / "local_setup.yml"]).config
    assert divisible_config(config, 96) == (config, {})


def test_part_of_a_name_of_a_gpu_is_answered_with_all_that_begin_with_it() -> None:
    with pytest.raises(ConfigError) as caught:
        NeoXConfig.from_flat({"gpu_type": "A100"})
    (problem,) = caught.value.problems
    assert problem.keys == ("gpu_type",)
    assert str(problem).endswith("did you mean `a100-40` or `a100-80`?")
