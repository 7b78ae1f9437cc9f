"""Write what `benchmarks/ceilings.py` measured of a GPU into its file of figures, from which times are estimated.

    python benchmarks/ceilings.py --json ceilings.json --gpu h100
    python -m benchmarks.gpu_figures h100 ceilings.json      the same from a file that is there

A matmul's rate is that of long sums: what all measured ones take, without what shorter sums cost in the planner's
roofline. Attention is torch's default choice, as in training.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from neox.devices.gpu import GPU_FILES
from neox.files import write_text
from neox.plan.time.roofline import SHORT_SUM

_SUM_OF_PASS = {"forward": 2, "input gradient": 1, "weight gradient": 0}
"""Pass -> which of a matmul's [rows, outputs, inputs] it sums over."""


def measured_figures(ceilings: dict[str, Any]) -> dict[str, float]:
    """Return the figures of a GPU that follow from the results of `benchmarks/ceilings.py`."""
    matmul_flops = matmul_seconds = 0.0
    attention_flops = forward_seconds = backward_seconds = 0.0
    for shape in ceilings["shapes"].values():
        for row in shape["products"]:
            flops = row["flops_per_second"] * row["seconds"]
            matmul_flops += flops * (1 + SHORT_SUM / row["size"][_SUM_OF_PASS[row["pass"]]])
            matmul_seconds += row["seconds"]
        (attention,) = (row for row in shape["attention"] if row["backend"] == "default")
        both = attention["forward_backward_seconds"]
        attention_flops += attention["model_flops_per_second"] * both / 3 / 2  # the half that a causal mask leaves
        forward_seconds += attention["forward_seconds"]
        backward_seconds += both - attention["forward_seconds"]
    return {
        "matmul_tflops": round(matmul_flops / matmul_seconds / 1e12, 1),
        "attention_tflops": round(attention_flops / forward_seconds / 1e12, 1),
        "attention_backward_tflops": round(2.5 * attention_flops / backward_seconds / 1e12, 1),
        "memory_tbs": round(ceilings["copy_bytes_per_second"] / 1e12, 3),
    }


def write_figures(gpu: str, ceilings: dict[str, Any]) -> Path:
    """Write the measured figures of a GPU into its file, and where they come from in place of the first source."""
    file = GPU_FILES / f"{gpu}.json"
    figures = json.loads(file.read_text())
    figures |= measured_figures(ceilings)
    shapes = " and ".join(ceilings["shapes"])
    figures["sources"][0] = (
        f"Matmuls, attention and memory measured on {ceilings['date']} ({ceilings['device']}, torch "
        f"{ceilings['torch']}, shape {shapes}) by benchmarks/ceilings.py. fp8, links and network: shares of the data "
        "sheet."
    )
    write_text(file, json.dumps(figures, indent=1) + "\n")
    return file


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("gpu", help="key of GPUS")
    parser.add_argument("results", type=Path, help="what ceilings.py --json wrote, or results of gpu.sh with it")
    args = parser.parse_args()
    results = json.loads(args.results.read_text())
    ceilings = results["steps"]["ceilings"]["figures"] if "steps" in results else results
    print(f"wrote {write_figures(args.gpu, ceilings)}")


if __name__ == "__main__":
    main()
