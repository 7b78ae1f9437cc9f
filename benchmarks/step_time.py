"""Predicted step times next to published ones: `python benchmarks/step_time.py [--markdown]`.

`published_runs.tsv` has one run a line: network, GPUs, layout, batch, and the figure that was published. If a line
leaves out the size of the micro batch, the number of virtual stages or how context ranks share the work, a range over
sensible values is printed. Each GPU has one file of figures (`neox/devices/gpus`), and no network has any of its own;
those of the A100 and of the H100 at 500 W were adjusted once against these rows, within what published measurements of
kernels allow. `PublishedStep` replaces the parts of a step that other systems do otherwise.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

from neox.config import NeoXConfig
from neox.devices import GPUS, Gpu
from neox.errors import ConfigError
from neox.plan.layout import Layout, Workload
from neox.plan.network.architecture import layer_plan
from neox.plan.time import StepModel, StepTime
from neox.plan.time.roofline import memory_seconds
from neox.plan.time.step import PassTime, StagePasses

ROWS = Path(__file__).with_name("published_runs.tsv")
GPU_TYPES = {
    "A100-80": "a100-80",
    "A100-40": "a100-40",
    "H100": "h100",
    "H100-96 at 500 W": "h100-96",
    "910B": "ascend910b",
}
MICRO_BATCHES = (1, 2, 4, 8)
VIRTUAL_STAGES = (2, 3, 4, 8)
EXPOSED_BY_ASYNC_TP = 0.35
"""Share of the tensor ranks' collectives that async TP cannot hide behind matmuls."""
MERGE_BYTES = 48
"""Bytes that move for each element of attention's output when a ring merges one more part into it."""
HANDOFF_LATENCY = 2e-5
"""Seconds of a hand-off between stages, whatever its size."""

Row = dict[str, str]


@dataclass(frozen=True)
class Prediction:
    """Predicted over published time of one run: the range over what the row leaves out."""

    name: str
    lowest: float
    highest: float
    complete: bool

    @property
    def error(self) -> float:
        """Distance of the range from the published time, as a fraction of that."""
        if self.lowest <= 1 <= self.highest:
            return 0.0
        return min(abs(self.lowest - 1), abs(self.highest - 1))


def read_rows() -> list[Row]:
    """Return the published runs."""
    with ROWS.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file, delimiter="\t"))


def network_keys(row: Row) -> dict[str, Any]:
    """Return the keys of a run's network."""
    return {
        "num_layers": int(row["layers"]),
        "hidden_size": int(row["hidden"]),
        "num_attention_heads": int(row["heads"]),
        "num_kv_heads": int(row["kv_heads"]),
        "mlp_width": int(row["mlp_width"]),
        "activation": "swiglu" if "Llama" in row["network"] else "gelu",
        "no_weight_tying": "tied head" not in row["network"],
        "pos_emb": "rotary",
        "gpt_j_residual": row["network"].startswith("GPT-NeoX"),
        "seq_length": int(row["seq_length"]),
        "max_position_embeddings": int(row["seq_length"]),
        "make_vocab_size_divisible_by": 1,
    }


class PublishedStep(StepModel):
    """Time of a step of the system that trained a published run: its parts that this library does otherwise.

    Args:
        run: The run in its layout.
        gpu: The GPUs.
        row: The published run.
        balanced: Whether each context rank holds an early and a late part of a sample, so that all attend to as many
            tokens. Otherwise the last rank attends to the most, and the others wait for it.
    """

    def __init__(self, run: Workload, gpu: Gpu, row: Row, *, balanced: bool) -> None:
        super().__init__(run, gpu)
        self.row = row
        self.balanced = balanced
        self.is_torchtitan = row["id"].startswith("titan")
        self.is_gpt_neox = row["network"].startswith("GPT-NeoX")
        self.is_llama = "Llama" in row["network"]

    @property
    def fuses_blocks(self) -> bool:
        return "compiled" in self.row["precision"] or not (self.is_torchtitan or self.is_gpt_neox)

    @property
    def fuses_loss(self) -> bool:
        return self.fuses_blocks

    @property
    def overlaps_gradients(self) -> bool:
        return self.is_llama

    def recomputed(self) -> PassTime:
        """torchtitan's `selective` repeats every second matmul and all elementwise work."""
        if not (self.is_torchtitan and self.row["recompute"].startswith("selective")):
            return super().recomputed()
        forward = self.forward
        return PassTime(products=forward.products / 2, elementwise=forward.elementwise, tensor=forward.tensor / 2)

    def attention(self) -> float:
        ranks = self.run.layout.cp_size
        return super().attention() * (1 if self.balanced else (2 * ranks - 1) / ranks)

    def tensor_collectives(self, all_reduces: int) -> float:
        exposed = EXPOSED_BY_ASYNC_TP if "async TP" in self.row["precision"] else 1.0
        return exposed * super().tensor_collectives(all_reduces)

    def context_collectives(self) -> float:
        """A ring hides the exchange of keys and values behind attention.

        Each of its steps computes a partial output, which is merged into the accumulated output in fp32.
        """
        ranks = self.run.layout.cp_size
        if ranks == 1:
            return 0.0
        outputs = self.run.tokens * self.heads * self.run.network.head_dim
        merging = memory_seconds(self.gpu, MERGE_BYTES * outputs * (ranks - 1))
        exposed = max(0.0, self.gathered_keys_seconds() - self.attention())
        return exposed + merging + ranks * self.gpu.collective_seconds

    def context_collectives_backward(self) -> float:
        return 2 * self.forward.context

    def handoff(self) -> float:
        """In gpt-neox each tensor rank sends all hidden states to the next stage."""
        if self.run.layout.pp_size == 1 or not self.is_gpt_neox:
            return super().handoff()
        return (super().handoff() - HANDOFF_LATENCY) * self.run.layout.tp_size + HANDOFF_LATENCY

    def stage_passes(self) -> StagePasses:
        """In gpt-neox a rank waits while it sends."""
        passes = super().stage_passes()
        if not self.is_gpt_neox:
            return passes
        forward, backward = (
            [[seconds + passes.handoff for seconds in stage] for stage in stages]
            for stages in (passes.forward, passes.backward)
        )
        return StagePasses(forward, backward, passes.handoff)

    def zero3_collectives(
        self, gather: float, again: float, reduce: float, hides_forward: float, hides_backward: float
    ) -> float:
        """With stages, weights are gathered once a step and kept."""
        if self.run.layout.pp_size == 1:
            return super().zero3_collectives(gather, again, reduce, hides_forward, hides_backward)
        return max(0.0, gather - hides_forward) + max(0.0, reduce - hides_backward)


def models_of(row: Row) -> Iterator[PublishedStep]:
    """Yield the model of a run's step, once for each combination of what its row leaves out."""
    llama = "Llama" in row["network"]
    pp = int(row["pp"])
    cp = int(row["cp"])
    dp = int(row["dp"])
    schedule = "interleaved" if "interleaved" in row["schedule"] and pp > 1 else "1f1b"
    micro_batches = (int(row["micro_batch"]),) if row["micro_batch"] else MICRO_BATCHES
    virtual_stages: tuple[int | None, ...] = (None,)
    if schedule == "interleaved":
        virtual_stages = (int(row["virtual_stages"]),) if row["virtual_stages"] else VIRTUAL_STAGES
    balances = (True, False) if cp > 1 and row["id"].startswith("titan") else (True,)
    recompute = row["recompute"].split(",")[0]
    keys = network_keys(row)
    if llama:
        keys["fp32_allreduce"] = True
    if "fp8" in row["precision"]:
        keys["fp8"] = "tensorwise"
    config = NeoXConfig.from_flat(keys)
    layers = layer_plan(config, int(row["vocab"]), 1)
    gpu = GPUS[GPU_TYPES[row["gpu"]]]
    if row["id"] == "neox-20b":  # four cards a host, as its remark says
        gpu = replace(gpu, network_gbs=gpu.network_gbs / 2)
    for micro_batch, ranges, balanced in product(micro_batches, virtual_stages, balances):
        samples = int(row["global_batch"] or dp * micro_batch) // dp
        is_sensible = bool(row["micro_batch"]) or samples // micro_batch >= pp  # else stages wait most of the time
        if samples % micro_batch or not is_sensible:
            continue
        layout = Layout(
            pp_size=pp,
            tp_size=int(row["tp"]),
            cp_size=cp,
            ep_size=1,
            dp_size=dp * cp,
            pipeline_schedule=schedule,
            virtual_stages=ranges,
            zero_stage=int(row["zero"]),
            micro_batch_size=micro_batch,
            accumulation_steps=samples // micro_batch,
            sequence_parallel="sequence_parallel" in row["recompute"] or (llama and row["tp"] != "1"),
            tile_tokens=0,
            kept_inputs_on_cpu=False,
            recomputes=recompute != "none",
            recomputed_part="full" if recompute == "full" else "core_attn",
            no_recompute_blocks=(),
            hpz_size=1,
            attention="flash" if llama or "triangle attention" in row["remark"] else "eager",
            offloads_states=False,
            offloads_weights=False,
            seq_length=int(row["seq_length"]),
        )
        run = Workload(config=config, layers=layers, precision="bf16", layout=layout)
        yield PublishedStep(run, gpu, row, balanced=balanced)


def published_seconds(row: Row, run: Workload, time: StepTime) -> float:
    """Return the published time of a step, from whichever figure the row has."""
    if row["step_seconds"]:
        return float(row["step_seconds"])
    if row["tokens_per_s_per_gpu"]:
        return time.tokens / time.ranks / float(row["tokens_per_s_per_gpu"])
    operations = time.model_flops
    if "count recomputation" in row["remark"]:
        layers = run.network.num_layers
        hidden = run.network.hidden_size
        per_token = 96 * layers * hidden**2
        share = 1 + run.sequence_length / (6 * hidden) + run.layers.padded_vocab_size / (16 * layers * hidden)
        operations = per_token * share * time.tokens
    return operations / time.ranks / float(row["tflops_per_gpu"]) / 1e12


def predict(row: Row) -> Prediction:
    """Compare one published run with its prediction."""
    ratios = []
    for model in models_of(row):
        try:
            time = model.estimate()
        except ConfigError:  # a schedule that does not take this number of micro batches was not the one
            continue
        ratios.append(time.seconds / published_seconds(row, model.run, time))
    return Prediction(row["id"], min(ratios), max(ratios), len(ratios) == 1)


def main() -> None:
    """Print the table, and how far off the predictions are."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--markdown", action="store_true", help="print the rows of the table in docs/performance.md")
    arguments = parser.parse_args()
    predictions = [predict(row) for row in read_rows()]
    for found in predictions:
        ratio = f"{found.lowest:.2f}"
        if not found.complete:
            ratio += f" to {found.highest:.2f}"
        if arguments.markdown:
            print(f"| {found.name} | {ratio} |")
        else:
            print(f"{found.name:28} predicted / published {ratio}")
    complete = [found.error for found in predictions if found.complete]
    others = [found for found in predictions if not found.complete]
    inside = sum(found.error == 0 for found in others)
    print(
        f"rows that state everything: {len(complete)}, median error {median(complete):.1%}, largest {max(complete):.1%}"
    )
    print(f"rows that leave something out: {len(others)}, of which {inside} ranges contain the published figure")


if __name__ == "__main__":
    main()
