"""Generation and every score on several ranks equal those of one process; no rank waits for another that has left.

The harness's scores of the same checkpoint and tasks are compared with its own class for Hugging Face models in
tests/unit/evaluation/test_harness.py.
"""

import json
import os
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from neox.evaluation.evaluate import evaluate_tasks
from neox.evaluation.results import flat_metrics
from neox.generation.completion import generate_all
from neox.generation.load import load_model
from neox.generation.request import SamplingParams
from neox.parallel import ParallelGrid, Topology
from neox.plan import config_from_files, resolve
from neox.tokenizer import build_tokenizer
from tests.distributed.spawn import run_ranks
from tests.unit.evaluation.local_tasks import write_tasks
from tests.unit.generation.interrupted_run import PROMPTS as LETTERS
from tests.unit.generation.interrupted_run import Interrupting, Run, interrupt

GOLDEN = Path(__file__).parents[1] / "golden"
NAME = "v2_pp2_mp2_dp1_fp32"
PROMPTS = ["def main(", "The quick brown fox jumps over", "a", "one two three", ""]
SETTINGS = ({}, {"temperature": 0.8, "top_k": 50, "seed": 3}, {"num_beams": 3})


def write_texts(directory: Path, *, harness: bool) -> list[str]:
    """Write texts in wikitext's, LAMBADA's and a corpus's form, and tasks of the harness if asked; return them as
    evaluation tasks."""
    (directory / "wiki.raw").write_text("The old man , it 's well @-@ known , walked 3 @,@ 000 miles .\n" * 16)
    passages = ["He said hello to the old man", "Nothing is as it was before", "a b c d", "def main(self): return self"]
    (directory / "l.jsonl").write_text("".join(json.dumps({"text": passage}) + "\n" for passage in passages))
    return [
        f"wikitext={directory / 'wiki.raw'}",
        f"lambada={directory / 'l.jsonl'}",
        f"perplexity={directory / 'l.jsonl'}",
        *(write_tasks(directory) if harness else ()),
    ]


def outputs(tasks: list[str], pp: int, dp: int, tp: int, schedule: str = "1f1b") -> list:
    """Generate and score with these degrees; called by every rank."""
    os.environ["HF_DATASETS_CACHE"] = str(Path(tasks[0].partition("=")[2]).parent / f"cache{os.environ.get('RANK')}")
    tokenizer = build_tokenizer("HFTokenizer", GOLDEN / "data" / "tokenizer.json")
    degrees = {
        "eval_stride": 24,
        "pipe_parallel_size": pp,
        "pipeline_schedule": schedule,
        "model_parallel_size": tp,
        "gradient_accumulation_steps": 2 * pp,
        "global_num_gpus": pp * dp * tp,
    }
    overrides = [f"{key}={value}" for key, value in degrees.items()]
    plan = resolve(
        config_from_files([GOLDEN / NAME / f"{NAME}.yml"], overrides=overrides), pp * dp * tp, tokenizer.vocab_size
    )
    grid = ParallelGrid.build(Topology(pp, dp, tp)) if dist.is_initialized() else ParallelGrid.single()
    model = load_model(plan, GOLDEN / NAME / "global_step30", grid, torch.device("cpu"))
    results = []
    for settings in SETTINGS:
        params = SamplingParams(max_new_tokens=7, stop=() if "num_beams" in settings else ("the",), **settings)
        results.append([c.tokens for c in generate_all(model, PROMPTS, params, tokenizer, grid, batch_size=3)])
    tokens = torch.tensor([[5, 9, 400, 27, 3], [1, 1, 2, 800, 999]])
    scores, top = model.score(tokens[:, :-1], tokens[:, 1:])
    metrics = flat_metrics(evaluate_tasks(tasks, model, tokenizer, grid, plan.config))
    return [results, scores.tolist(), top.tolist(), metrics]


def several_layouts(tasks: list[str], layouts: list) -> list:
    return [outputs(tasks, *layout) for layout in layouts]


@pytest.mark.parametrize(
    ("layouts", "harness"),  # which every process takes ten seconds to import
    [
        ([(2, 1, 1), (2, 1, 1, "interleaved"), (1, 1, 2), (1, 2, 1)], False),
        pytest.param([(1, 1, 2), (1, 2, 1)], True, marks=pytest.mark.slow),
        pytest.param([(2, 1, 2), (2, 1, 2, "dualpipev"), (1, 2, 2)], True, marks=pytest.mark.slow),
    ],
)
def test_every_layout_gives_the_text_and_scores_of_one_process(layouts, harness, tmp_path):
    harness = harness and find_spec("lm_eval") is not None
    tasks = write_texts(tmp_path, harness=harness)
    texts, scores, top, metrics = outputs(tasks, 1, 1, 1)
    local = {name.split("_")[1] for name in metrics if name.startswith("eval/local_")}
    assert local == ({"choice", "rolling", "until"} if harness else set())
    assert len(metrics) >= (11 if harness else 5)
    world = layouts[0][0] * layouts[0][1] * layouts[0][2]
    for answers in run_ranks(world, several_layouts, tasks, layouts):
        for layout, (their_texts, their_scores, their_top, their_metrics) in zip(layouts, answers, strict=True):
            assert their_texts == texts, layout
            assert torch.allclose(torch.tensor(their_scores), torch.tensor(scores), atol=1e-5), layout
            assert their_top == top, layout
            assert their_metrics == pytest.approx(metrics, rel=1e-5), layout


def interrupted_and_started_again(run: Run) -> list:
    """Be interrupted at the second batch and go on; called by both replicas."""
    grid = ParallelGrid.build(Topology(1, 2, 1))
    interrupt(run, last=1, grid=grid, generation_batch_size=1)
    rest = Interrupting()
    texts = [completion.text for completion in run(rest, grid=grid, generation_batch_size=1)]
    return [rest.began, texts]


def test_replicas_go_on_together(tmp_path):
    run = Run(tmp_path)
    expected = [completion.text for completion in run(Interrupting())]
    (first, texts), (second, other) = run_ranks(2, interrupted_and_started_again, run)
    assert texts == other == expected
    assert (first, second) == ([[2], [1]], [[1]]), "of 5 prompts the longest 2 were done"
    assert [record["context"] for record in run.written()] == LETTERS
    assert not run.partial.exists()
