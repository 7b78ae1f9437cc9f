"""Predicted step times next to published ones: `python benchmarks/step_time.py [--markdown]`.

`published_runs.tsv` has one run a line: network, GPUs, layout, batch, and the figure that was published. If a line
leaves out the size of the micro batch, the number of virtual stages or how context ranks share the work, a range over
sensible values is printed. Each GPU has one set of constants (`neox/plan/time/gpus.py`), and no network has any of its
own; those of the A100 and the H100 were adjusted once against these rows, within what published measurements of kernels
allow.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import median

from neox.errors import ConfigError
from neox.plan.time import GPUS, NetworkShape, StepSetting, StepTime, estimate_step

ROWS = Path(__file__).with_name("published_runs.tsv")
GPU_TYPES = {"A100-80": "a100-80", "A100-40": "a100-40", "H100": "h100", "H100-96 at 500 W": "h100-96"}
MICRO_BATCHES = (1, 2, 4, 8)
VIRTUAL_STAGES = (2, 3, 4, 8)

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


def shape_of(row: Row) -> NetworkShape:
    """Return the network of a run."""
    hidden = int(row["hidden"])
    heads = int(row["heads"])
    return NetworkShape(
        layers=int(row["layers"]),
        hidden=hidden,
        heads=heads,
        kv_heads=int(row["kv_heads"]),
        head_dim=hidden // heads,
        mlp_width=int(row["mlp_width"]),
        gated="Llama" in row["network"],
        vocabulary=int(row["vocab"]),
        tied="tied head" in row["network"],
    )


def settings_of(row: Row) -> Iterator[StepSetting]:
    """Yield how a run was trained, once for each combination of what its row leaves out."""
    llama = "Llama" in row["network"]
    torchtitan = row["id"].startswith("titan")
    pp = int(row["pp"])
    cp = int(row["cp"])
    dp = int(row["dp"])
    schedule = "interleaved" if "interleaved" in row["schedule"] and pp > 1 else "1f1b"
    micro_batches = (int(row["micro_batch"]),) if row["micro_batch"] else MICRO_BATCHES
    chunks = (1,)
    if schedule == "interleaved":
        chunks = (int(row["virtual_stages"]),) if row["virtual_stages"] else VIRTUAL_STAGES
    balances = (True, False) if cp > 1 and torchtitan else (True,)
    recompute = row["recompute"].split(",")[0]
    if recompute == "selective":
        recompute = "half_of_products" if torchtitan else "core_attn"
    gpt_neox = row["network"].startswith("GPT-NeoX")
    for micro_batch, chunk, balanced in product(micro_batches, chunks, balances):
        samples = int(row["global_batch"] or dp * micro_batch) // dp
        is_sensible = bool(row["micro_batch"]) or samples // micro_batch >= pp  # else stages wait most of the time
        if samples % micro_batch or not is_sensible:
            continue
        yield StepSetting(
            sequence=int(row["seq_length"]),
            micro_batch=micro_batch,
            micro_batches=samples // micro_batch,
            tp=int(row["tp"]),
            pp=pp,
            cp=cp,
            dp=dp,
            schedule=schedule,
            chunks=chunk,
            zero_stage=int(row["zero"]),
            keeps_gathered=pp > 1,
            recompute=recompute,  # type: ignore[arg-type]  # checked by the table's own values
            fp8="fp8" in row["precision"],
            gradient_bytes=4 if llama else 2,
            fused="compiled" in row["precision"] or not (torchtitan or gpt_neox),
            flash=llama,
            sequence_parallel="sequence_parallel" in row["recompute"] or (llama and row["tp"] != "1"),
            overlaps_tensor="async TP" in row["precision"],
            overlaps_gradients=llama,
            balanced_context=balanced,
            blocking_handoff=gpt_neox,
            divided_handoff=not gpt_neox,
            network=12.5 if gpt_neox else 0.0,  # four cards a host, as its remark says
        )


def published_seconds(row: Row, shape: NetworkShape, time: StepTime, setting: StepSetting) -> float:
    """Return the published time of a step, from whichever figure the row has."""
    if row["step_seconds"]:
        return float(row["step_seconds"])
    if row["tokens_per_s_per_gpu"]:
        return time.tokens / time.ranks / float(row["tokens_per_s_per_gpu"])
    operations = time.model_flops
    if "count recomputation" in row["remark"]:
        hidden = shape.hidden
        per_token = 96 * shape.layers * hidden**2
        share = 1 + setting.sequence / (6 * hidden) + shape.vocabulary / (16 * shape.layers * hidden)
        operations = per_token * share * time.tokens
    return operations / time.ranks / float(row["tflops_per_gpu"]) / 1e12


def predict(row: Row) -> Prediction:
    """Compare one published run with its prediction."""
    shape = shape_of(row)
    ratios = []
    for setting in settings_of(row):
        try:
            time = estimate_step(shape, setting, GPUS[GPU_TYPES[row["gpu"]]])
        except ConfigError:  # a schedule that does not take this number of micro batches was not the one
            continue
        ratios.append(time.seconds / published_seconds(row, shape, time, setting))
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
