"""gpt-neox's checkpoints of several years, against networks that are computed from the same files in plain torch."""

from __future__ import annotations

import datetime
import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from neox.checkpoint import (
    CheckpointReader,
    VocabularySize,
    average_checkpoints,
    checkpoint_at,
    find_checkpoint,
    mean_of_all,
    open_checkpoint,
    reshard,
    resize_vocabulary,
)
from neox.checkpoint.inspection import tensor_stats
from neox.config import NeoXConfig
from neox.errors import CheckpointError
from neox.generation.load import load_model
from neox.parallel import ParallelGrid
from neox.plan import RunPlan, resolve
from neox.preflight.checkpoint_checks import checkpoint_problems, layer_problems
from tests.distributed.spawn import run_ranks
from tests.errors import raises_naming
from tests.field.gpt_neox_files import (
    Layers,
    Network,
    logits,
    mean_files,
    random_files,
    rows_by_head,
    write,
    write_tokenizer,
)

IDS = torch.randint(0, 100, (2, 12), generator=torch.Generator().manual_seed(5))
SUMMED = ("attention.dense.bias", "mlp.dense_4h_to_h.bias")


def plan_of(network: Network, directory: Path, **changes: object) -> RunPlan:
    """Return the plan of a network on one rank."""
    config = NeoXConfig.from_flat(network.config(directory / "tokenizer.json", **changes))
    return resolve(config, 1, 100)


def shards(network: Network, reader: CheckpointReader, ranks: int) -> list[Layers]:
    """Return what tensor ranks read, as gpt-neox's files would hold it: a sum is on rank 0 and nowhere else."""
    found: list[Layers] = []
    for rank in range(ranks):
        layers: Layers = {}
        for layer in reader.layers.weight_layers:
            layers[layer.index] = reader.layer_shard(layer.index, rank, ranks)
            for name in SUMMED:
                if network.parallel and rank and name in layers[layer.index]:
                    layers[layer.index][name] = torch.zeros_like(layers[layer.index][name])
        found.append(layers)
    return found


def assert_same(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("parallel", [True, False])
def test_ranks_that_drifted_apart_load_at_every_degree(tmp_path, caplog, parallel):
    """GPT-NeoX-20B's norms differ between its tensor ranks (gpt-neox#615, #983, PR 466; transformers#15642).

    gpt-neox's ranks each load their own copy. Its tools for other degrees take the mean.
    """
    network = Network(parallel=parallel)
    files = random_files(network, 2, drift=0.02)
    path = write(network, files, tmp_path)
    mean = logits(network, mean_files(network, files), IDS)
    expected = {1: mean, 2: logits(network, files, IDS), 4: mean}
    assert (expected[1] - expected[2]).abs().max() > 1e-4
    plan = plan_of(network, tmp_path)
    for ranks, right in expected.items():
        caplog.clear()
        reader = CheckpointReader(path, plan.layers)
        assert_same(logits(network, shards(network, reader, ranks), IDS), right)
        reader.note_averages()
        if ranks == 2:
            assert not caplog.records
        else:
            (note,) = caplog.records
            assert note.levelno == logging.WARNING
            for name in ("input_layernorm.weight", "norm.bias", "0.02", *([] if parallel else SUMMED)):
                assert name in note.getMessage()


@pytest.mark.parametrize("parallel", [True, False])
def test_ranks_that_drifted_apart_generate(tmp_path, caplog, parallel):
    network = Network(parallel=parallel)
    files = random_files(network, 2, drift=0.02)
    path = write(network, files, tmp_path)
    model = load_model(plan_of(network, tmp_path), path, ParallelGrid.single(), torch.device("cpu"))
    with torch.inference_mode():
        found = model.network.head.logits(model.hidden(IDS))
    assert_same(found, logits(network, mean_files(network, files), IDS))
    assert any("input_layernorm.weight" in record.getMessage() for record in caplog.records)


def test_tools_read_the_mean_of_ranks_that_drifted_apart(tmp_path, caplog):
    """Resharding, averaging and inspection follow the same rule as export."""
    network = Network(parallel=False)
    files = random_files(network, 2, drift=0.02)
    path = write(network, files, tmp_path / "a")
    config = NeoXConfig.from_flat(network.config(tmp_path / "tokenizer.json"))
    mean = logits(network, mean_files(network, files), IDS)
    plan = plan_of(network, tmp_path)
    written = reshard(open_checkpoint(path, config=config), tmp_path / "b", tp_size=4, pp_size=1)
    assert_same(logits(network, shards(network, CheckpointReader(written, plan.layers), 1), IDS), mean)
    again = write(network, files, tmp_path / "c", step=20)
    readers = [open_checkpoint(one, config=config) for one in (path, again)]
    averaged = average_checkpoints(readers, [0.5, 0.5], tmp_path / "d", tp_size=2, pp_size=1)
    assert_same(logits(network, shards(network, CheckpointReader(averaged, plan.layers), 1), IDS), mean)
    assert len(list(tensor_stats(open_checkpoint(path, config=config)))) == 28
    assert sum("input_layernorm.weight" in record.getMessage() for record in caplog.records) == 4


@pytest.mark.parametrize("parallel", [True, False])
def test_a_vocabulary_grows_from_ranks_that_drifted_apart(tmp_path, parallel):
    """Logits of old tokens are those of the mean of the ranks, and the result's ranks agree."""
    network = Network(parallel=parallel)
    files = random_files(network, 2, drift=0.02)
    path = write(network, files, tmp_path / "a")
    config = NeoXConfig.from_flat(network.config(tmp_path / "tokenizer.json"))
    reader = open_checkpoint(path, config=config)
    rows = reader.vocabulary_rows
    size = VocabularySize(rows, rows + 3, 2 * rows)
    grown = open_checkpoint(resize_vocabulary(reader, tmp_path / "b", size, mean_of_all(3)), config=config)
    assert (grown.tp_size, grown.vocabulary_rows) == (2, 2 * rows)
    assert_same(
        logits(network, shards(network, grown, 1), IDS)[..., :rows], logits(network, mean_files(network, files), IDS)
    )
    first, second = grown.parts(2, "input_layernorm.weight")
    assert torch.equal(first, second)


@pytest.mark.slow
@pytest.mark.parametrize("parallel", [True, False])
def test_ranks_that_drifted_apart_are_exported(tmp_path, caplog, parallel):
    from transformers import AutoModelForCausalLM

    from neox.convert import to_hf

    network = Network(parallel=parallel)
    files = random_files(network, 2, drift=0.02)
    path = write(network, files, tmp_path)
    config = NeoXConfig.from_flat(network.config(write_tokenizer(tmp_path / "tokenizer.json")))
    to_hf(path, config, tmp_path / "hf")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()
    with torch.no_grad():
        assert_same(model(IDS).logits, logits(network, mean_files(network, files), IDS))
    assert any("input_layernorm.weight" in record.getMessage() for record in caplog.records)


def trained_logits(plan: RunPlan, ids: Tensor) -> Tensor:
    """Return the logits of a training that has just loaded its weights, on one rank."""
    from neox.engine import initialize_distributed, open_engine
    from neox.parallel import gather_last_dim

    grid, device = initialize_distributed(plan)
    engine = open_engine(plan, grid, device)
    return gather_last_dim(engine.logits(ids), grid)


@pytest.mark.slow
@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_ranks_that_drifted_apart_are_trained(tmp_path, parallel, ranks):
    """The README's `load: 20B_checkpoints` with `finetune: true`, at every tensor degree."""
    network = Network(parallel=parallel)
    files = random_files(network, 2, drift=0.02)
    write(network, files, tmp_path / "20B_checkpoints")
    load = {"load": str(tmp_path / "20B_checkpoints"), "finetune": True, "model_parallel_size": ranks}
    config = NeoXConfig.from_flat(network.config(write_tokenizer(tmp_path / "tokenizer.json"), **load))
    used = files if ranks == 2 else mean_files(network, files)
    found = run_ranks(ranks, trained_logits, resolve(config, ranks, 100), IDS)
    assert_same(found[0], logits(network, used, IDS))


def test_files_of_two_models_are_refused(tmp_path):
    network = Network()
    files = random_files(network, 2)
    files[1][2]["input_layernorm.weight"] = torch.ones(16)
    path = write(network, files, tmp_path)
    with raises_naming(CheckpointError, "input_layernorm.weight", "layer_02-model_00"):
        CheckpointReader(path, plan_of(network, tmp_path).layers).full(2, "input_layernorm.weight")


GROUPED = Network(hidden=64, heads=8, kv_heads=2, width=96, llama=True, parallel=False)
LATER_NAMES = {"mlp.dense_h_to_4h.": "mlp.linear1.", "mlp.dense_4h_to_h.": "mlp.linear2."}


def by_head(files: list[Layers]) -> list[Layers]:
    """Return files with grouped rows in the order before gpt-neox's pull request 1315."""
    old = []
    for rank in files:
        layers = {}
        for index, tensors in rank.items():
            layers[index] = dict(tensors)
            for name, value in tensors.items():
                if name.startswith("attention.query_key_value"):
                    layers[index][name] = rows_by_head(GROUPED, value, len(files))
        old.append(layers)
    return old


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("version", ["2024-11-13", "2024-11-14", None])
def test_grouped_rows_of_both_orders(tmp_path, version, ranks):
    """Rows of grouped heads changed their order in November 2024 (gpt-neox#1314, #1337, PR 1315, 1345)."""
    files = random_files(GROUPED, ranks)
    stored = by_head(files) if version == "2024-11-13" else files
    path = write(GROUPED, stored, tmp_path, rename=LATER_NAMES)
    plan = plan_of(GROUPED, tmp_path, gpt_neox_version=version)
    reader = CheckpointReader(path, plan.layers, gpt_neox_date=plan.config.checkpoint.gpt_neox_date)
    if version is None:
        with raises_naming(CheckpointError, "gpt_neox_version: 2024-11-13", "gpt_neox_version: 2024-11-14", path):
            reader.full(2, "attention.query_key_value.weight")
        return
    expected = logits(GROUPED, files, IDS)
    for degree in (1, 2):
        assert_same(logits(GROUPED, shards(GROUPED, reader, degree), IDS), expected)
    blocks = list(reader.row_blocks(2, "attention.query_key_value.weight"))
    assert torch.equal(torch.cat(blocks), reader.full(2, "attention.query_key_value.weight"))
    written = reshard(reader, tmp_path / "ours", tp_size=2, pp_size=1)
    ours = CheckpointReader(written, plan.layers)
    assert_same(logits(GROUPED, shards(GROUPED, ours, 1), IDS), expected)
    (written / "manifest.json").unlink()  # copied without it: the client state tells, too
    assert CheckpointReader(written, plan.layers).row_order == "blocks"


def llama_of_2023(files: list[Layers]) -> list[Layers]:
    """Return files with the names of `mlp_type: llama`: the gate is `w1`, the value `w3`, the output `w2`."""
    old = []
    for rank in files:
        layers = {}
        for index, tensors in rank.items():
            layers[index] = dict(tensors)
            if "mlp.dense_h_to_4h.weight" in tensors:
                value, gate = layers[index].pop("mlp.dense_h_to_4h.weight").chunk(2)
                layers[index]["mlp.w1.weight"] = gate.clone()
                layers[index]["mlp.w3.weight"] = value.clone()
                layers[index]["mlp.w2.weight"] = layers[index].pop("mlp.dense_4h_to_h.weight")
        old.append(layers)
    return old


@pytest.mark.parametrize("sign", ["llama names", "old names", "old key", "new key", "new DeepSpeed", "a date"])
def test_files_that_tell_the_order_of_grouped_rows(tmp_path, sign):
    """Names, keys of the stored configuration, and DeepSpeed's version date a file without a question."""
    files = random_files(GROUPED, 2)
    is_new = sign.startswith("new")
    stored = files if is_new else by_head(files)
    if sign == "llama names":
        stored = llama_of_2023(stored)
    client = {"ds_version": "0.16.2+91d1c55" if sign == "new DeepSpeed" else "0.14.4"}
    path = write(GROUPED, stored, tmp_path, rename=None if "names" in sign else LATER_NAMES, client=client)
    if sign.endswith("key"):
        (path / "configs").mkdir()
        key = '"mlp-type": "llama"' if sign == "old key" else '"te_mha": False'
        (path / "configs" / "7B.yml").write_text(f'{{\n  # sizes\n  "num-layers": 2,\n  {key},\n}}\n')
    date = datetime.date(2024, 6, 1) if sign == "a date" else None
    reader = CheckpointReader(path, plan_of(GROUPED, tmp_path).layers, gpt_neox_date=date)
    assert reader.row_order == ("blocks" if is_new else "heads")
    for degree in (1, 2):
        assert_same(logits(GROUPED, shards(GROUPED, reader, degree), IDS), logits(GROUPED, files, IDS))


@pytest.mark.parametrize(
    ("version", "order"), [("2024-10-01", "heads"), ("2024-12-01", "heads"), ("2025-05-09", "blocks")]
)
def test_converted_llama_changed_half_a_year_later(tmp_path, version, order):
    """gpt-neox's converter of Llama wrote the older order until its pull request 1345."""
    path = write(GROUPED, random_files(GROUPED), tmp_path, rename=LATER_NAMES)
    converted = {"module": None, "optimizer": {}, "global_steps": 1, "skipped_steps": 1, "iteration": 1}
    torch.save(converted, path / "mp_rank_00_model_states.pt")
    date = datetime.date.fromisoformat(version)
    assert CheckpointReader(path, plan_of(GROUPED, tmp_path).layers, gpt_neox_date=date).row_order == order


@pytest.mark.slow
@pytest.mark.parametrize("version", ["2024-11-13", "2024-11-14"])
def test_grouped_rows_of_both_orders_are_exported_and_trained(tmp_path, version):
    from transformers import AutoModelForCausalLM

    from neox.convert import to_hf

    files = random_files(GROUPED, 2)
    stored = by_head(files) if version == "2024-11-13" else files
    path = write(GROUPED, stored, tmp_path / "ckpt", rename=LATER_NAMES)
    expected = logits(GROUPED, files, IDS)
    keys = GROUPED.config(write_tokenizer(tmp_path / "tokenizer.json"), gpt_neox_version=version)
    to_hf(path, NeoXConfig.from_flat(keys), tmp_path / "hf")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()
    with torch.no_grad():
        assert_same(model(IDS).logits, expected)
    # The date also says that the norms' epsilon was outside of the root then; no Hugging Face norm has it there.
    expected = logits(replace(GROUPED, outer_epsilon=True), files, IDS)
    for ranks in (1, 2):
        load = {"load": str(tmp_path / "ckpt"), "finetune": True, "model_parallel_size": ranks}
        config = NeoXConfig.from_flat({**keys, **load})
        assert_same(run_ranks(ranks, trained_logits, resolve(config, ranks, 100), IDS)[0], expected)


def unfit(network: Network, path: Path, **changes: object) -> str:
    """Return what the plan says of a checkpoint; nothing if it fits."""
    plan = plan_of(network, path, **{"load": str(path), "finetune": True, **changes})
    return "; ".join(problem.message for problem in layer_problems(plan, training=True))


def test_the_plan_opens_the_layer_files(tmp_path):
    """What does not fit is said before ranks start: shapes, names, missing layers, the order of grouped rows."""
    network = Network()
    whole = write(network, random_files(network, 2, drift=0.02), tmp_path / "fits").parent
    assert unfit(network, whole) == ""
    assert unfit(network, whole, model_parallel_size=1, make_vocab_size_divisible_by=64) == ""
    assert "attention.query_key_value.weight" in unfit(replace(network, hidden=64), whole)
    assert "layer_04-model_00-model_states.pt" in unfit(replace(network, blocks=3), whole)
    assert "post_attention_layernorm" not in unfit(network, whole, gpt_j_tied=True)
    assert "attention.dense.bias" in unfit(network, whole, use_bias_in_attn_linear=False)
    # The settings that gpt-neox stores beside the weights, of which no shape depends on the number of heads.
    assert "num_attention_heads" in unfit(replace(network, heads=network.heads // 2), whole)
    other = random_files(network)
    del other[0][3]["mlp.dense_4h_to_h.bias"]
    assert "layer_03-model_00-model_states.pt has no mlp.dense_4h_to_h.bias" in unfit(
        network, write(network, other, tmp_path / "lacks").parent
    )
    gone = write(network, random_files(network, 2), tmp_path / "gone")
    (gone / "layer_03-model_01-model_states.pt").unlink()
    assert "layer_03-model_01-model_states.pt" in unfit(network, gone.parent)
    grouped = write(GROUPED, random_files(GROUPED), tmp_path / "grouped", rename=LATER_NAMES).parent
    assert "gpt_neox_version: 2024-11-14" in unfit(GROUPED, grouped)
    assert unfit(GROUPED, grouped, gpt_neox_version="2025-01-01") == ""


def write_sequential(files: list[Layers], directory: Path, latest: str) -> Path:
    """Write `mp_rank` files that hold all weights, as gpt-neox's converters do. Return the directory of checkpoints."""
    directory.mkdir(parents=True)
    (directory.parent / "latest").write_text(latest)
    for rank, layers in enumerate(files):
        module = {}
        for index, tensors in layers.items():
            module |= {f"sequential.{index}.{name}": value for name, value in tensors.items()}
        counters = {"global_steps": 1, "skipped_steps": 1, "iteration": 1}
        torch.save({"module": module, "optimizer": {}, **counters}, directory / f"mp_rank_{rank:02d}_model_states.pt")
    return directory.parent


def test_converted_llama_in_a_directory_of_another_name(tmp_path):
    """gpt-neox's converter of Llama writes `0/` and a `latest` that names it (gpt-neox#1317, PR 1247)."""
    network = Network()
    files = random_files(network, 2)
    load = write_sequential(files, tmp_path / "llama" / "0", "0")
    assert find_checkpoint(load) == checkpoint_at(load) == load / "0"
    plan = plan_of(network, tmp_path, load=str(load), finetune=True)
    assert checkpoint_problems(plan.config, training=True) == layer_problems(plan, training=True) == []
    reader = CheckpointReader(load / "0", plan.layers)
    assert_same(logits(network, shards(network, reader, 1), IDS), logits(network, files, IDS))


def test_llemma_of_one_stage(tmp_path):
    """Older Llama names in one-stage files (math-lm#87)."""
    network = replace(GROUPED, kv_heads=8)
    files = random_files(network, 2)
    load = write_sequential(llama_of_2023(files), tmp_path / "global_step5", "global_step5")
    reader = CheckpointReader(load / "global_step5", plan_of(network, tmp_path).layers)
    for degree in (1, 4):
        assert_same(logits(network, shards(network, reader, degree), IDS), logits(network, files, IDS))


def test_buffers_tied_heads_and_numbers_of_missing_layers(tmp_path):
    """Buffers (gpt-neox#1013, #1161), gaps in layers' numbers (#545), tied heads (PR 1218), wrong numbers (#971)."""
    network = Network()
    files = random_files(network, 2)
    head = 4 + network.blocks
    masks = {"attention.bias": torch.ones(1, 1, 8, 8), "attention.masked_bias": torch.tensor(-1e9)}
    tied, copied, misnumbered = [], [], []
    for rank in files:
        with_buffers = {index: {**tensors, **(masks if 2 <= index < 4 else {})} for index, tensors in rank.items()}
        tied.append({index: tensors for index, tensors in with_buffers.items() if index != head})
        copied.append({**with_buffers, head: rank[0]})
        misnumbered.append({index + 2 * (2 <= index < 4): tensors for index, tensors in rank.items()})
    for name, stored in (("tied", tied), ("copied", copied)):
        load = write(network, stored, tmp_path / name).parent
        assert unfit(network, load, no_weight_tying=False) == ""
        plan = plan_of(network, tmp_path, no_weight_tying=False)
        own_head = shards(network, CheckpointReader(load / "global_step10", plan.layers), 1)
        own_head[0][head] = {"final_linear.weight": own_head[0][0]["word_embeddings.weight"]}
        with_head = [{**rank, head: {"final_linear.weight": rank[0]["word_embeddings.weight"]}} for rank in files]
        assert_same(logits(network, own_head, IDS), logits(network, with_head, IDS))
    wrong = write(network, misnumbered, tmp_path / "wrong").parent
    assert "layer_02-model_00-model_states.pt, layer_03-model_00-model_states.pt" in unfit(network, wrong)


def test_padding_of_other_degrees(tmp_path):
    """Pythia's embeddings have 50304, 50432 or 50688 rows, by the number of tensor ranks (pythia#65, #68)."""
    network = Network(vocab=128)
    files = random_files(network)
    path = write(network, files, tmp_path)
    plan = plan_of(network, tmp_path, padded_vocab_size=192)
    reader = CheckpointReader(path, plan.layers)
    found = logits(replace(network, vocab=192), shards(network, reader, 2), IDS)
    assert_same(found[..., :128], logits(network, files, IDS))


@pytest.mark.parametrize(
    ("file", "named"),
    [
        ("config.json", "tools/convert_from_hf.py"),
        ("pytorch_model.bin", "zero_to_fp32.py"),
        ("iter_0300000/mp_rank_00/model_optim_rng.pt", "Megatron-LM"),
        ("global_step10_universal/zero/fp32.pt", "universal"),
    ],
)
def test_other_directories_are_named_for_what_they_are(tmp_path, file, named):
    """gpt-neox#777 (Hugging Face), #1254 (zero_to_fp32), PR 836 (universal); Megatron-LM#250."""
    path = tmp_path / "load" / file
    path.parent.mkdir(parents=True)
    path.write_text("{}")
    config = NeoXConfig.from_flat(Network().config("none.json", load=str(tmp_path / "load"), finetune=True))
    (problem,) = checkpoint_problems(config, training=True)
    assert "load" in problem.keys
    assert named in problem.message
