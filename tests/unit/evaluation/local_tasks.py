"""Tasks for lm-evaluation-harness on local data: one for each kind of request that it makes of a model."""

from __future__ import annotations

import json
from pathlib import Path

CHOICE = """
task: local_choice
dataset_path: json
dataset_kwargs: {data_files: {test: DIR/data.jsonl}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: ["yes", "no", "perhaps so"]
doc_to_target: label
metric_list: [{metric: acc}, {metric: acc_norm}]
metadata: {version: 2.5}
"""
ROLLING = """
task: local_rolling
dataset_path: json
dataset_kwargs: {data_files: {test: DIR/data.jsonl}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{long}}"
metric_list: [{metric: word_perplexity}, {metric: byte_perplexity}]
"""
UNTIL = """
task: local_until
dataset_path: json
dataset_kwargs: {data_files: {test: DIR/data.jsonl}}
test_split: test
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["zz"], max_gen_toks: 5}
metric_list: [{metric: exact_match}]
"""


def write_tasks(directory: Path) -> list[str]:
    """Write the tasks and the one file they read into a directory; return the tasks' files."""
    rows = [
        {"question": q, "label": n % 3, "long": f"{q} It goes on. " * (5 + 20 * n), "answer": "\n" * 5}
        for n, q in enumerate(["Is water wet?", "Do stones fly, as far as you know?", "Will it rain? " * 40])
    ]
    (directory / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    paths = []
    for name, text in (("choice", CHOICE), ("rolling", ROLLING), ("until", UNTIL)):
        paths.append(directory / f"{name}.yaml")
        paths[-1].write_text(text.replace("DIR", str(directory)))
    return [str(path) for path in paths]
