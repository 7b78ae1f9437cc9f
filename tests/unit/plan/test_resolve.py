"""What follows from a configuration: plan, saves, payload, DeepSpeed's JSON, and v2.0 files used as they are."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
import zlib
from pathlib import Path

import pytest
import yaml
from deepspeed.comm.config import CommsLoggerConfig
from deepspeed.profiling.config import DeepSpeedFlopsProfilerConfig
from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

from neox.config import NeoXConfig
from neox.config.sections.deepspeed import (
    Bf16Settings,
    CommsLoggerSettings,
    FlopsProfilerSettings,
    Fp16Settings,
    ZeroSettings,
)
from neox.decisions.checkpoint import choose_checkpoint
from neox.errors import ConfigError, LaunchError
from neox.plan import (
    Capabilities,
    DataAmounts,
    config_from_files,
    decode_payload,
    encode_payload,
    resolve,
    saved_precision,
)

ROOT = Path(__file__).parents[3]
GOLDEN = sorted((ROOT / "tests" / "golden").glob("*/*.yml"))


def plan_of(flat, world=1, vocab=100):
    return resolve(NeoXConfig.from_flat(flat), world, vocab)


class TestV2Files:
    @pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
    def test_golden_files_resolve_as_they_are(self, path):
        config = config_from_files([path])
        plan = resolve(config, config.runner.global_num_gpus, 1000)
        assert plan.batch.train_micro_batch_size_per_gpu in (4, 32)
        assert plan.batch.gradient_accumulation_steps == 2
        assert plan.grid.dp_size == 1
        assert plan.precision == "fp32"
        assert plan.padded_vocab_size % (128 * plan.grid.tp_size) == 0
        assert plan.save_iterations == (0, 30)
        assert plan.attention == ("eager",) * (config.model.num_layers or 0)
        assert plan.deepspeed["gradient_clipping"] == config.deepspeed.gradient_clipping

    def test_v2_fp16_blocks(self, tiny):
        fp16 = {"fp16": True, "enabled": True, "loss_scale": 0, "initial_scale_power": 12}
        plan = plan_of({**tiny, "fp16": fp16})
        assert plan.precision == "fp16"
        assert plan.deepspeed["fp16"] == {"enabled": True, "loss_scale": 0, "initial_scale_power": 12}
        plan = plan_of({**tiny, "fp16": {"enabled": True, "type": "bfloat16", "loss_scale": 0}})
        assert plan.precision == "bf16"
        assert "fp16" not in plan.deepspeed
        assert plan.deepspeed["bf16"] == {"enabled": True, "immediate_grad_update": True}
        assert any("fp16.type" in note for note in plan.notes)

    def test_defaults_follow_v2(self, tiny):
        config = NeoXConfig.from_flat(tiny)
        assert config.deepspeed.gradient_clipping == 0.0
        assert config.training.attention_dropout == 0.1
        assert config.training.hidden_dropout == 0.1
        assert config.optimizer.weight_decay == 0.01
        assert config.model.output_layer_parallelism == "row"
        assert config.data.weighted_sampler_alpha == 0.3
        assert config.schedule.lr_decay_style == "linear"
        assert plan_of(tiny).deepspeed["gradient_clipping"] == 0.0


class TestPrecision:
    @pytest.mark.parametrize(
        ("keys", "expected"),
        [
            ({}, "fp32"),
            ({"precision": "fp32"}, "fp32"),
            ({"precision": "fp16"}, "fp16"),
            ({"precision": "bfloat16"}, "bf16"),
            ({"bf16": {"enabled": True}}, "bf16"),
            ({"fp16": {"enabled": True}}, "fp16"),
            ({"fp16": {"fp16": True}}, "fp16"),
            ({"fp16": {"enabled": False}, "bf16": {"enabled": True}}, "bf16"),
            ({"precision": "fp16", "fp16": {"loss_scale": 128}}, "fp16"),
            ({"precision": "bfloat16", "fp16": {"enabled": True, "type": "bfloat16"}}, "bf16"),
            ({"precision": "bfloat16", "hysteresis": 2}, "bf16"),
        ],
    )
    def test_three_places_one_precision(self, tiny, keys, expected):
        plan = plan_of({**tiny, **keys})
        assert plan.precision == expected
        assert plan.deepspeed.get("fp16", {}).get("enabled", False) == (expected == "fp16")
        assert plan.deepspeed.get("bf16", {}).get("enabled", False) == (expected == "bf16")

    @pytest.mark.parametrize(
        ("capabilities", "expected"),
        [
            (Capabilities(), "bf16"),
            (Capabilities(bf16=True, fp16=False), "bf16"),
            (Capabilities(bf16=False, fp16=True), "fp32"),
            (Capabilities(bf16=True, bf16_is_slow=True), "fp32"),
            (Capabilities(bf16=True, bf16_is_slow=True, saved="bf16"), "bf16"),
            (Capabilities(bf16=True, saved="fp32"), "fp32"),
            (Capabilities(bf16=False, saved="bf16"), "bf16"),
            (Capabilities(bf16=True, saved="fp16"), "fp16"),
        ],
    )
    def test_auto_is_decided_once_and_travels_decided(self, tiny, capabilities, expected):
        plan = resolve(NeoXConfig.from_flat({**tiny, "precision": "auto"}), 1, 100, capabilities)
        assert plan.precision == plan.config.model.precision == expected
        (note,) = [note for note in plan.notes if "precision: auto" in note]
        assert expected in note
        assert plan.deepspeed.get("bf16", {}).get("enabled", False) == (expected == "bf16")
        travelled = decode_payload(encode_payload(plan))
        assert (travelled.precision, travelled.deepspeed) == (plan.precision, plan.deepspeed)

    def test_kind_of_gpu_answers_if_no_host_was_asked(self, tiny):
        asked = {**tiny, "precision": "auto"}
        assert resolve(NeoXConfig.from_flat({**asked, "gpu_type": "v100"}), 1, 100).precision == "fp32"
        assert resolve(NeoXConfig.from_flat({**asked, "gpu_type": "h100"}), 1, 100).precision == "bf16"
        hosts = Capabilities(bf16=True)
        assert resolve(NeoXConfig.from_flat({**asked, "gpu_type": "v100"}), 1, 100, hosts).precision == "bf16"

    def test_auto_beside_another_precision_is_a_contradiction(self, tiny):
        with pytest.raises(ConfigError, match="two precisions"):
            plan_of({**tiny, "precision": "auto", "bf16": {"enabled": True}})

    @pytest.mark.parametrize(
        ("keys", "capabilities", "noted"),
        [
            ({"precision": "bf16"}, Capabilities(bf16=False, fp16=True), True),
            ({"bf16": {"enabled": True}}, Capabilities(bf16=True, fp16=False), False),
            ({"fp16": {"enabled": True}}, Capabilities(bf16=True, fp16=False), True),
            ({"fp16": {"enabled": True}}, Capabilities(), False),
            ({}, Capabilities(bf16=False, fp16=False), False),
        ],
    )
    def test_emulated_precisions_are_noted(self, tiny, keys, capabilities, noted):
        plan = resolve(NeoXConfig.from_flat({**tiny, **keys}), 1, 100, capabilities)
        assert any("in software" in note for note in plan.notes) == noted

    @pytest.mark.parametrize("saved", [{"precision": "bf16"}, {"fp16": {"enabled": True}}, {}], ids=str)
    def test_the_precision_of_the_checkpoint_to_resume_is_read(self, tiny, tmp_path, saved):
        (tmp_path / "latest").write_text("global_step4")
        for step, keys in ((2, {"precision": "fp32"}), (4, saved)):
            directory = tmp_path / f"global_step{step}" / "configs"
            directory.mkdir(parents=True)
            (directory / "config.yml").write_text(yaml.safe_dump({**tiny, **keys}))
            (directory.parent / "mp_rank_00_model_states.pt").touch()

        def precision(*, training=True, **keys):
            config = NeoXConfig.from_flat({**tiny, **keys})
            return choose_checkpoint(config).precision if training else saved_precision(config)

        expected = plan_of({**tiny, **saved}).precision
        assert precision(load=str(tmp_path)) == expected
        assert precision(load=str(tmp_path / "global_step4")) == expected
        assert precision(load=str(tmp_path), iteration=2) == "fp32"
        assert precision(load=str(tmp_path), finetune=True) is None
        assert precision(save=str(tmp_path)) is None
        assert precision(save=str(tmp_path), training=False) == expected
        assert precision(load=str(tmp_path / "none")) is None

    @pytest.mark.parametrize(
        ("keys", "dtype"),
        [
            ({"precision": "bfloat16", "zero_optimization": {"stage": 1}}, "fp32"),
            ({"precision": "bfloat16", "zero_optimization": {"stage": 3}}, "fp32"),
            ({"precision": "bfloat16"}, None),
            ({"precision": "fp16", "zero_optimization": {"stage": 1}}, None),
            ({"precision": "fp32", "zero_optimization": {"stage": 1}}, None),
            (
                {
                    "precision": "bf16",
                    "zero_optimization": {"stage": 1},
                    "data_types": {"grad_accum_dtype": "bf16"},
                },
                "bf16",
            ),
        ],
    )
    def test_accumulation(self, tiny, keys, dtype):
        assert plan_of({**tiny, **keys}).deepspeed.get("data_types", {}).get("grad_accum_dtype") == dtype


class TestSaves:
    @pytest.mark.parametrize(
        ("keys", "expected"),
        [
            ({}, ()),
            ({"save": "x"}, (10,)),
            ({"save": "x", "checkpoint_factor": 4}, (4, 8, 10)),
            ({"save": "x", "checkpoint_factor": 5}, (5, 10)),
            ({"save": "x", "checkpoint_factor": 2, "checkpoint_scale": "log"}, (2, 4, 8, 10)),
            ({"save": "x", "extra_save_iters": [0, 1, 99]}, (0, 1, 10)),
        ],
    )
    def test_iterations(self, tiny, keys, expected):
        assert plan_of({**tiny, **keys}).save_iterations == expected

    def test_notes(self, tiny):
        assert any("`save` is not set" in note for note in plan_of({**tiny, "checkpoint_factor": 5}).notes)
        assert any("come after" in note for note in plan_of({**tiny, "save": "x", "extra_save_iters": [99]}).notes)


class TestJson:
    def test_overlap_comm_is_dropped_under_stages_with_a_note(self, tiny):
        keys = {**tiny, "zero_optimization": {"stage": 1, "overlap_comm": True}}
        assert plan_of(keys).deepspeed["zero_optimization"]["overlap_comm"] is True
        staged = plan_of({**keys, "pipe_parallel_size": 2}, world=2)
        assert "overlap_comm" not in staged.deepspeed["zero_optimization"]
        assert any("overlap_comm" in note for note in staged.notes)

    def test_optimizer_block_is_the_users(self, tiny):
        block = {"type": "Adam", "params": {"lr": 1e-3, "betas": [0.9, 0.95]}}
        assert plan_of({**tiny, "optimizer": block}).deepspeed["optimizer"] == block
        assert "optimizer" not in plan_of(tiny).deepspeed

    def test_fp32_allreduce_is_translated(self, tiny):
        plan = plan_of({**tiny, "fp32_allreduce": True})
        assert plan.deepspeed["communication_data_type"] == "fp32"
        assert any("fp32_allreduce" in note for note in plan.notes)

    @pytest.mark.parametrize(
        ("ours", "theirs", "translated"),
        [
            # MiCS is refused by name, because DeepSpeed has removed it
            (ZeroSettings, DeepSpeedZeroConfig, {"mics_shard_size", "mics_hierarchical_params_gather"}),
            (Fp16Settings, DeepSpeedFP16Config, {"fp16", "type"}),
            (Bf16Settings, DeepSpeedBF16Config, set()),
            (CommsLoggerSettings, CommsLoggerConfig, set()),
        ],
    )
    def test_our_fields_are_deepspeeds(self, ours, theirs, translated):
        names = set(theirs.model_fields) | {field.alias for field in theirs.model_fields.values()}
        assert set(ours.model_fields) - translated <= names

    def test_flops_profiler_fields_are_deepspeeds(self):
        theirs = vars(DeepSpeedFlopsProfilerConfig({"flops_profiler": {"enabled": True}}))
        assert set(FlopsProfilerSettings.model_fields) <= set(theirs)


class TestPayload:
    def test_round_trip(self, tiny, tmp_path):
        path = tmp_path / "a.yml"
        path.write_text("".join(f"{key}: {value}\n" for key, value in tiny.items()))
        plan = resolve(
            config_from_files([path], overrides=["data_path=a b;$(c)"]), 4, 321, amounts=DataAmounts(epoch_samples=7)
        )
        text = encode_payload(plan)
        assert text.isascii()
        assert " " not in text
        assert decode_payload(text) == plan
        assert decode_payload(text).config.source("num_layers") == plan.config.source("num_layers")

    def test_175b_on_384_ranks_is_small(self, tiny):
        sizes = {"num_layers": 96, "hidden_size": 12288, "num_attention_heads": 96, "seq_length": 2048}
        degrees = {"pipe_parallel_size": 8, "model_parallel_size": 8, "train_micro_batch_size_per_gpu": 1}
        plan = plan_of({**tiny, **sizes, **degrees, "train_iters": 300_000}, world=384, vocab=50257)
        text = encode_payload(plan)
        assert len(text) < 64 * 1024
        assert decode_payload(text) == plan

    def test_another_plan_is_refused(self, tiny):
        data = json.loads(zlib.decompress(base64.urlsafe_b64decode(encode_payload(plan_of(tiny)))))
        data["architecture"]["hidden_size"] *= 2  # as where the code of a host makes other layers
        with pytest.raises(LaunchError, match="doctor"):
            decode_payload(base64.urlsafe_b64encode(zlib.compress(json.dumps(data).encode())).decode())

    @pytest.mark.parametrize("text", ["", "!!", *(base64.b64encode(zlib.compress(b)).decode() for b in (b"[]", b"{}"))])
    def test_garbage(self, text):
        with pytest.raises(ConfigError, match="payload"):
            decode_payload(text)


def test_attention_by_layer(tiny):
    plan = plan_of({**tiny, "attention_config": [[["flash", "global"], 2]]})
    assert plan.attention == ("flash", "eager", "flash", "eager")
    fused = {**tiny, "scaled_upper_triang_masked_softmax_fusion": True}
    assert plan_of(fused).attention == ("fused",) * 4


def test_decay_iterations(tiny):
    def iterations(keys):
        return NeoXConfig.from_flat({**tiny, **keys}).schedule.decay_iterations(10)

    assert iterations({}) == 10
    assert iterations({"lr_decay_iters": 7}) == 7
    assert iterations({"lr_decay_fraction": 0.5}) == 5


def test_frozen(tiny):
    config = NeoXConfig.from_flat(tiny)
    with pytest.raises(ValueError, match="frozen"):
        config.model.num_layers = 3


def test_importing_config_needs_no_torch():
    code = "import sys, neox.config; print([m for m in ('torch', 'deepspeed', 'numpy', 'tqdm') if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"


def test_the_optimizer_is_named_where_only_a_number_was_given(tiny):
    plan = resolve(NeoXConfig.from_flat({**tiny, "lr": 0.01}), 1, 100)
    assert plan.deepspeed["optimizer"] == {"type": "Adam", "params": {"lr": 0.01}}
