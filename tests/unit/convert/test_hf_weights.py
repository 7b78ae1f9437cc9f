"""Layouts of Hugging Face tensors: separate, transposed and fused ones, as Llama and GPT-2 store them."""

import sys
from dataclasses import replace
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from neox.checkpoint import CheckpointReader
from neox.config import NeoXConfig
from neox.convert import from_hf, to_hf
from neox.convert.layouts import ROWS, from_hf_layout, to_hf_layout
from neox.convert.verification import single_rank_plan
from neox.errors import ConversionError
from neox.families import FAMILIES, TensorSource
from neox.families.family import Layout
from tests.errors import raises_naming
from tests.unit.convert.test_to_hf import SIZES, checkpoint, tensors

ARCHITECTURE = single_rank_plan(NeoXConfig.from_flat(SIZES), 96).architecture
SEPARATE = TensorSource(("q", "k", "v"), layout="heads")
FUSED = TensorSource(("c_attn",), transpose=True, layout="heads")
NEIGHBOURS = replace(SEPARATE, interleaved=True)
HALVES = TensorSource(("gate", "up"))
TRANSPOSED = TensorSource(("c_fc",), transpose=True)


def test_every_layout_has_functions():
    assert set(ROWS) == set(get_args(Layout))


@pytest.mark.parametrize("source", [SEPARATE, FUSED, HALVES, TRANSPOSED], ids=lambda source: "-".join(source.modules))
@pytest.mark.parametrize("shape", [(96, 32), (96,)])
def test_layouts_are_inverted(source, shape):
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    parts = to_hf_layout(tensor, source, ARCHITECTURE)
    assert len(parts) == len(source.modules)
    assert torch.equal(from_hf_layout(parts, source, ARCHITECTURE), tensor)


def test_queries_keys_and_values_of_all_heads_come_one_after_another():
    ours = torch.arange(96.0)[:, None].expand(96, 32)  # rows [4 heads, 3, 8]
    rows = torch.arange(96.0).view(4, 3, 8)
    for part, tensor in enumerate(to_hf_layout(ours, SEPARATE, ARCHITECTURE)):
        assert torch.equal(tensor[:, 0], rows[:, part].flatten())
    (fused,) = to_hf_layout(ours, FUSED, ARCHITECTURE)
    assert fused.shape == (32, 96)
    assert torch.equal(fused[0], torch.cat([rows[:, part].flatten() for part in range(3)]))


def test_fewer_key_heads_are_stored_one_after_another_on_both_sides():
    architecture = replace(ARCHITECTURE, num_kv_heads=2)
    ours = torch.arange(64.0)
    parts = to_hf_layout(ours, SEPARATE, architecture)
    assert [part.tolist() for part in parts] == [ours[:32].tolist(), ours[32:48].tolist(), ours[48:].tolist()]
    assert torch.equal(from_hf_layout(parts, SEPARATE, architecture), ours)


def test_neighbouring_rotary_dimensions_become_halves():
    """GPT-J turns dimensions (0, 1), (2, 3), ... of a head; ours (0, n/2), (1, n/2 + 1), ... of its n rotated ones."""
    architecture = replace(ARCHITECTURE, rotary_ndims=6)  # of 8
    theirs = [torch.arange(32.0).view(4, 8).flatten() + 100 * part for part in range(3)]
    ours = from_hf_layout(theirs, NEIGHBOURS, architecture).view(4, 3, 8)
    assert ours[1, 0].tolist() == [8, 10, 12, 9, 11, 13, 14, 15]
    assert ours[1, 1].tolist() == [108, 110, 112, 109, 111, 113, 114, 115]
    assert ours[1, 2].tolist() == list(range(208, 216))


@given(
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 3),
    pairs=st.integers(0, 4),
    source=st.sampled_from([SEPARATE, FUSED, NEIGHBOURS]),
    weight=st.booleans(),
)
@settings(max_examples=60)
def test_layouts_of_heads_are_inverted_for_any_sizes(kv_heads, group, pairs, source, weight):
    heads, head_dim = kv_heads * group, 8
    changes = {"num_attention_heads": heads, "num_kv_heads": kv_heads, "head_dim": head_dim, "rotary_ndims": 2 * pairs}
    architecture = replace(ARCHITECTURE, **changes)
    ours = torch.randperm((heads + 2 * kv_heads) * head_dim).float()
    ours = ours[:, None].expand(-1, 5) if weight else ours
    parts = to_hf_layout(ours, source, architecture)
    sizes = [heads * head_dim, kv_heads * head_dim, kv_heads * head_dim]
    rows = [part.shape[-1 if source.transpose else 0] for part in parts]
    assert rows == (sizes if len(source.modules) == 3 else [sum(sizes)])
    assert torch.equal(from_hf_layout(parts, source, architecture), ours)


@pytest.fixture
def other_family(monkeypatch):
    """A family like GPT-NeoX that stores the tensors of a block otherwise."""
    known = FAMILIES["gpt_neox"]
    prefix = "gpt_neox.layers.{i}."
    block = {
        **known.tensors["block"],
        "attention.query_key_value": TensorSource(tuple(f"{prefix}{name}_proj" for name in "qkv"), layout="heads"),
        "mlp.dense_h_to_4h": TensorSource((prefix + "gate", prefix + "up")),
        "mlp.dense_4h_to_h": TensorSource((prefix + "down",), transpose=True),
    }
    family = replace(known, model_type="other", tensors={**known.tensors, "block": block})
    for module in ("neox.convert.to_hf", "neox.convert.from_hf"):
        monkeypatch.setattr(sys.modules[module], "FAMILIES", {"other": family})


@pytest.mark.usefixtures("other_family")
def test_a_family_with_other_layouts_comes_back_bit_for_bit(tmp_path):
    directory, config, weights = checkpoint(tmp_path, tp_size=2)
    to_hf(directory, config, tmp_path / "hf", verify=False, max_shard_bytes=20_000)
    found = tensors(tmp_path / "hf")
    ours = weights[3, "attention.query_key_value.weight"].view(4, 3, 8, 32)
    assert torch.equal(found["gpt_neox.layers.1.k_proj.weight"], ours[:, 1].reshape(32, 32))
    assert torch.equal(found["gpt_neox.layers.1.down.weight"], weights[3, "mlp.dense_4h_to_h.weight"].T)
    assert found["gpt_neox.layers.0.up.bias"].shape == (64,)
    back = from_hf(tmp_path / "hf", tmp_path / "back", model_parallel_size=2)
    reader = CheckpointReader(back.checkpoint, single_rank_plan(config, 96).layers)
    assert all(torch.equal(reader.full(*key), value) for key, value in weights.items())


@pytest.mark.usefixtures("other_family")
def test_a_tensor_of_another_shape_is_named(tmp_path):
    directory, config, _ = checkpoint(tmp_path)
    to_hf(directory, config, tmp_path / "hf", verify=False)
    config_file = tmp_path / "hf" / "config.json"
    config_file.write_text(config_file.read_text().replace('"hidden_size": 32', '"hidden_size": 64'))
    config_file.write_text(config_file.read_text().replace('"intermediate_size": 128', '"intermediate_size": 256'))
    with raises_naming(ConversionError, "embed_in.weight", [96, 32], [96, 64]):
        from_hf(tmp_path / "hf", tmp_path / "back")
