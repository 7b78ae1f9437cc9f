"""Keys of where inputs of recomputed layers are kept, and DeepSpeed's block of them."""

from neox.config import load_config
from neox.plan import config_from_files, resolve
from neox.problems import Source


def test_deepspeeds_block_sets_the_flat_keys(tiny, tmp_path):
    path = tmp_path / "a.yml"
    path.write_text(
        "activation_checkpointing:\n  cpu_checkpointing: true\n  contiguous_memory_optimization: true\n"
        "checkpoint_activations: true\n" + "".join(f"{key}: {value}\n" for key, value in tiny.items())
    )
    config = config_from_files([path])
    assert config.training.checkpoint_in_cpu
    assert not config.training.partition_activations
    assert config.source("checkpoint_in_cpu") == Source.in_file(str(path), 2)
    (note,) = (n for n in resolve(config, 1, 100).notes if "contiguous" in n)
    assert "expandable_segments" in note
    path.write_text(
        "partition_activations: false\nactivation_checkpointing: {partition_activations: true, number: 1}\n"
    )
    contradiction, unknown = load_config([path]).problems
    assert contradiction.keys == ("activation_checkpointing.partition_activations", "partition_activations")
    assert unknown.keys == ("activation_checkpointing.number",)
