"""Every shipped YAML loads, resolves at 1, 8 and 96 GPUs where its degrees allow, and DeepSpeed accepts its JSON."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import deepspeed
import pytest
import torch.distributed
from deepspeed.runtime.config import DeepSpeedConfig

from neox.convert.to_hf import choose_family
from neox.plan import config_from_files, gpu_device, memory_problem, resolve
from neox.plan.rules import missing_for_training

CONFIGS = Path(__file__).parents[2] / "configs"
OVERLAYS = ("local_setup", "slurm", "finetune", "text_generation")
SELF_CONTAINED = (
    "quickstart",
    "quickstart_llama",
    "quickstart_moe",
    "quickstart_gpt2",
    "one_gpu",
    "one_gpu_offload",
    "one_gpu_offload_6-7B",
)
WITHOUT_GPU = ("bf16", "bert/tiny", "quickstart", "quickstart_gpt2", "quickstart_llama", "quickstart_moe")
MODELS = sorted(
    path.relative_to(CONFIGS).with_suffix("").as_posix()
    for path in CONFIGS.rglob("*.yml")
    if path.stem not in OVERLAYS and path.parent.name != "preferences"  # these go with an imported model
)
# DeepSpeed ignores unknown top-level keys without a message, so only these may be written.
TOP_LEVEL_KEYS = frozenset(
    {
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
        "gradient_clipping",
        "steps_per_print",
        "wall_clock_breakdown",
        "optimizer",
        "zero_optimization",
        "fp16",
        "bf16",
        "data_types",
        "communication_data_type",
        "prescale_gradients",
        "gradient_predivide_factor",
        "dump_state",
        "zero_allow_untested_optimizer",
        "zero_force_ds_cpu_optimizer",
        "flops_profiler",
        "comms_logger",
    }
)
PUBLISHED_PARAMETERS = {
    "20B": 20_554_567_680,
    "pythia/14M": 14_067_712,
    "pythia/31M": 30_494_720,
    "pythia/70M": 70_426_624,
    "pythia/160M": 162_322_944,
    "pythia/410M": 405_334_016,
    "pythia/1B": 1_011_781_632,
    "pythia/1-4B": 1_414_647_808,
    "pythia/2-8B": 2_775_208_960,
    "pythia/6-9B": 6_857_302_016,
    "pythia/12B": 11_846_072_320,
    "llama/2-7B": 6_738_415_616,
    "llama/3-8B": 8_030_261_248,
    "llama/3.2-1B": 1_235_814_400,
    "mistral/7B": 7_241_732_096,
    "qwen/2.5-0.5B": 494_032_768,
    "qwen/2.5-7B": 7_615_616_512,
    "qwen/3-0.6B": 596_049_920,
    "qwen/3-8B": 8_190_735_360,
    "phi/2": 2_779_683_840,
    "phi/3-mini-4k": 3_821_079_552,
    "starcoder2/3B": 3_030_371_328,
    "stablelm/3B-4e1t": 2_795_443_200,
    "falcon/7B": 6_921_720_704,
    "opt/1.3B": 1_315_758_080,
    "bloom/560M": 559_214_592,
    "gemma/2B": 2_506_172_416,
    "gemma/2-2B": 2_614_341_888,
    "gemma/3-1B": 999_885_952,
    "cohere/r7B": 8_028_033_024,
    "cohere/command-r-35B": 34_980_831_232,
    "granite/3.1-2B": 2_533_531_648,
    "smollm/3-3B": 3_075_098_624,
    "glm/4-9B": 9_399_951_360,
    "glm/4-9B-0414": 9_400_279_040,
    "olmo/1B": 1_176_764_416,
    "olmo/2-7B": 7_298_617_344,
    "olmo/3-7B": 7_298_011_136,
    "moe/mixtral-8x7B": 46_702_792_704,
    "moe/olmoe-1B-7B": 6_919_161_856,
    "moe/qwen3-30B-A3B": 30_532_122_624,
    "gpt_oss/20b": 20_914_757_184,
    "deepseek/v2-lite": 15_706_484_224,
    "deepseek/v3": 671_026_419_200,
    "glm/4.5-air": 106_852_251_264,
    "ernie/0.3B": 360_748_032,
    # Counted from the shapes of their blocks; 129,135,360 for Mamba's smallest model is also what its card says.
    "recurrent/mamba-130M": 129_135_360,
    "recurrent/mamba-370M": 371_516_416,
    "recurrent/mamba-790M": 793_204_224,
    "recurrent/mamba-1-4B": 1_372_178_432,
    "recurrent/mamba-2-8B": 2_768_345_600,
    "recurrent/mamba2-130M": 128_989_632,
    "recurrent/mamba2-370M": 368_346_624,
    "recurrent/mamba2-780M": 780_161_280,
    "recurrent/mamba2-1-3B": 1_343_757_312,
    "recurrent/mamba2-2-7B": 2_702_599_680,
    "recurrent/rwkv-170M": 173_556_480,
    # Counted by transformers, with both heads, at the published shapes and vocabularies.
    "bert/base": 110_106_428,
    "bert/large": 336_226_108,
    "bert/megatron_345M": 334_723_458,
    "bert/megatron_3-9B": 3_865_326_978,
}


@pytest.fixture(scope="module", autouse=True)
def _one_rank_group():
    """A one-rank gloo group: without one DeepSpeed assumes a world of 1 and ignores the mpu."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(vars(deepspeed.ops), "__compatible_ops__", {})  # else it compiles an extension
        deepspeed.init_distributed("gloo", auto_mpi_discovery=False, dist_init_required=False, verbose=False)
    yield
    torch.distributed.destroy_process_group()


def deepspeed_judges(plan) -> DeepSpeedConfig:
    mpu = SimpleNamespace(get_data_parallel_world_size=lambda: plan.grid.dp_size)
    return DeepSpeedConfig(dict(plan.deepspeed), mpu=mpu)


def token_ids(config) -> int:
    """Ids of the model's tokenizer; 20B's where the model has no rows of its own."""
    return config.tokenizer.padded_vocab_size or 50277


def files_of(name: str, *overlays: str) -> list[str]:
    return [name, *overlays] if name in SELF_CONTAINED else [name, "local_setup", *overlays]


def ranks_of_a_copy(config) -> int:
    """The fewest ranks that the degrees of a configuration allow."""
    degrees = config.parallelism
    return max(1, degrees.pipe_parallel_size) * degrees.model_parallel_size * degrees.context_parallel_size


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("world", [1, 8, 96])
def test_resolves_and_deepspeed_accepts(name, world):
    config = config_from_files(files_of(name), conf_dir=CONFIGS)
    copy = ranks_of_a_copy(config)
    if world % copy:
        pytest.skip(f"{name} needs multiples of {copy} GPUs")
    batch = config.value("train_batch_size")
    if batch is not None and world == 96 and batch % (world // copy):
        world = 64  # 96 ranks do not divide 512 samples
    plan = resolve(config, world, token_ids(config))
    if batch is not None:
        assert plan.batch.train_batch_size == batch
    assert TOP_LEVEL_KEYS.issuperset(plan.deepspeed)
    judged = deepspeed_judges(plan)
    # DeepSpeed counts the samples of context ranks several times.
    assert judged.train_batch_size == plan.batch.train_batch_size * plan.grid.cp_size
    assert judged.gradient_clipping == config.deepspeed.gradient_clipping
    assert judged.zero_optimization_stage == config.deepspeed.zero_optimization.stage
    assert (judged.float16_config.enabled, judged.bfloat16_config.enabled) == (
        plan.precision == "fp16",
        plan.precision == "bf16",
    )


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("overlay", ["slurm", "finetune", "text_generation"])
def test_overlays_compose_with_every_model(name, overlay):
    config = config_from_files(files_of(name, overlay), conf_dir=CONFIGS)
    copy = ranks_of_a_copy(config)
    resolve(config, copy, token_ids(config))


@pytest.mark.parametrize("name", MODELS)
def test_names_everything_training_needs_and_explicit_dropouts(name):
    config = config_from_files(files_of(name), conf_dir=CONFIGS)
    assert missing_for_training(config) == []
    assert config.data.data_path or config.data.train_data_paths
    assert config.tokenizer.vocab_file
    assert config.given("attention_dropout")
    assert config.given("hidden_dropout")


@pytest.mark.parametrize("name", [name for name in MODELS if name not in WITHOUT_GPU])
def test_names_a_gpu_that_holds_it(name):
    config = config_from_files([name], conf_dir=CONFIGS)
    assert config.given("gpu_type") != config.given("gpu_memory_gib")
    copy = ranks_of_a_copy(config)
    plan = resolve(config, config.runner.planned_num_gpus or 8 * copy, token_ids(config))
    assert memory_problem(plan, gpu_device(plan), training=True) is None


@pytest.mark.parametrize("name", PUBLISHED_PARAMETERS)
def test_parameter_counts_are_the_published_ones(name):
    config = config_from_files([name], conf_dir=CONFIGS)
    # Pythia's embeddings have 50,304 rows at every degree on the Hub; the files there were padded for two ranks at 6.9B
    # and four at 12B.
    copy = ranks_of_a_copy(config)
    assert resolve(config, copy, token_ids(config)).layers.numel == PUBLISHED_PARAMETERS[name]


@pytest.mark.parametrize(
    ("name", "billions"),
    [("moe/mixtral-8x7B", 12.9), ("moe/olmoe-1B-7B", 1.3), ("moe/qwen3-30B-A3B", 3.3), ("deepseek/v3", 37.6)],
)
def test_active_parameters_are_the_published_ones(name: str, billions: float) -> None:
    config = config_from_files([name], conf_dir=CONFIGS)
    plan = resolve(config, ranks_of_a_copy(config), token_ids(config))
    assert plan.layers.active_numel / 1e9 == pytest.approx(billions, abs=0.06)


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("quickstart_llama", "llama"),
        ("quickstart_gpt2", "gpt2"),
        ("llama/3.2-1B", "llama"),
        ("mistral/7B", "mistral"),
        ("qwen/2.5-0.5B", "qwen2"),
        ("qwen/3-0.6B", "qwen3"),
        ("phi/2", "phi"),
        ("phi/3-mini-4k", "phi3"),
        ("starcoder2/3B", "starcoder2"),
        ("stablelm/3B-4e1t", "stablelm"),
        ("falcon/7B", "falcon"),
        ("opt/1.3B", "opt"),
        ("bloom/560M", "bloom"),
        ("gemma/2B", "gemma"),
        ("gemma/2-2B", "gemma2"),
        ("gemma/3-1B", "gemma3_text"),
        ("cohere/command-r-35B", "cohere"),
        ("cohere/r7B", "cohere2"),
        ("granite/3.1-2B", "granite"),
        ("smollm/3-3B", "smollm3"),
        ("glm/4-9B", "glm"),
        ("glm/4-9B-0414", "glm4"),
        ("olmo/1B", "olmo"),
        ("olmo/2-7B", "olmo2"),
        ("olmo/3-7B", "olmo3"),
        ("quickstart_moe", "mixtral"),
        ("moe/mixtral-8x7B", "mixtral"),
        ("moe/olmoe-1B-7B", "olmoe"),
        ("moe/qwen3-30B-A3B", "qwen3_moe"),
        ("gpt_oss/20b", "gpt_oss"),
        ("deepseek/v2-lite", "deepseek_v2"),
        ("deepseek/v3", "deepseek_v3"),
        ("glm/4.5-air", "glm4_moe"),
        ("ernie/0.3B", "ernie4_5"),
        ("recurrent/mamba-130M", "mamba"),
        ("recurrent/mamba2-2-7B", "mamba2"),
        ("bert/base", "bert"),
        ("bert/megatron_345M", "megatron-bert"),
    ],
)
def test_a_model_of_a_family_has_its_form(name, family):
    assert choose_family(config_from_files([name], conf_dir=CONFIGS)).model_type == family


def test_20b_is_as_published():
    config = config_from_files(["20B.yml"], conf_dir=CONFIGS, overrides=["global_num_gpus=96"])
    plan = resolve(config, 96, 50277)
    assert (plan.grid.pp_size, plan.grid.tp_size, plan.grid.dp_size) == (4, 2, 12)
    assert plan.batch.train_batch_size == 1536
    assert plan.padded_vocab_size == 50432
    model = config.model
    assert (model.num_layers, model.hidden_size, model.num_attention_heads) == (44, 6144, 64)
    assert (model.rotary_pct, model.gpt_j_residual, model.no_weight_tying) == (0.25, True, True)
    assert (model.init_method, model.output_layer_init_method) == ("small_init", "wang_init")
    assert plan.deepspeed["zero_optimization"]["reduce_bucket_size"] == 1_260_000_000
    assert "overlap_comm" not in plan.deepspeed["zero_optimization"]
    assert plan.deepspeed["fp16"] == {
        "enabled": True,
        "loss_scale": 0.0,
        "loss_scale_window": 1000,
        "initial_scale_power": 12,
        "hysteresis": 2,
        "min_loss_scale": 1,
    }
    assert any("overlap_comm" in note for note in plan.notes)
    assert any("fp16.fp16" in note for note in plan.notes)


def test_quickstart_is_small_and_saves_on_the_way():
    config = config_from_files(["quickstart"], conf_dir=CONFIGS)
    plan = resolve(config, 2, 16384)
    assert plan.layers.numel <= 27_000_000
    assert len(plan.save_iterations) > 1
    assert config.training.eval_interval < config.training.train_iters
    one = config_from_files(["quickstart"], conf_dir=CONFIGS, overrides=["pipe_parallel_size=1", "num_gpus=1"])
    assert resolve(one, 1, 16384).grid.pp_size == 1
