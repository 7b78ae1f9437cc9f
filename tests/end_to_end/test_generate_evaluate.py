"""deepy.py generate.py and evaluate.py on several ranks, compared with one process."""

import json
import time
from pathlib import Path

import pytest

from tests.distributed.spawn import run_script

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden"
NAME = "v2_pp2_mp1_dp1_fp32"


def run(tmp_path, *command):
    """Run a command of the project on the golden checkpoint; return the finished process."""
    settings = ("--set", f"load={NAME}", "--set", "save=null", "--set", f"log_dir={tmp_path / 'log'}")
    settings += ("--set", "master_port=null")  # the file's one belongs to whichever run is first
    script, *arguments = command
    return run_script(ROOT / script, *arguments, f"{NAME}/{NAME}.yml", *settings, directory=GOLDEN, OMP_NUM_THREADS="1")


@pytest.mark.slow
def test_two_stages_write_what_one_process_writes(tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"context": "def main("}\n{"context": "The quick\\nbrown"}\n')
    written = []
    for number, script in enumerate((("deepy.py", "generate.py"), ("tools/generate.py",))):
        out = tmp_path / f"out{number}.jsonl"
        flags = ("-i", str(prompts), "-o", str(out), "--set", "maximum_tokens=12", "--set", "top_p=0.9")
        done = run(tmp_path, *script, *flags)
        assert done.returncode == 0, done.stderr
        written.append([json.loads(line) for line in out.read_text().splitlines()])
    for several, one in zip(*written, strict=True):
        assert set(one) == {"context", "text", "length", "finished", "duration"}
        assert [several[key] for key in ("context", "text", "length", "finished")] == [
            one[key] for key in ("context", "text", "length", "finished")
        ]
    assert [record["context"] for record in written[0]] == ["def main(", "The quick\nbrown"]


def test_scores_of_two_stages(tmp_path):
    (tmp_path / "wiki.raw").write_text("The old man , it 's well @-@ known , walked home .\n" * 20)
    tables = []
    for script in (("deepy.py", "evaluate.py"), ("tools/evaluate.py",)):
        prefix = str(tmp_path / script[0].replace("/", "_"))
        board = tmp_path / "board" / Path(prefix).name
        tasks = ("--set", f'eval_tasks=["wikitext={tmp_path}/wiki.raw"]', "--set", f"tensorboard_dir={board}")
        done = run(tmp_path, *script, "--eval_results_prefix", prefix, *tasks)
        assert done.returncode == 0, done.stderr
        assert "word_ppl" in done.stdout
        assert any(board.iterdir())
        (path,) = tmp_path.glob(f"{Path(prefix).name}_eval_results_*.json")
        tables.append(json.loads(path.read_text()))
    several, one = tables
    assert several["counts"] == one["counts"]
    assert several["iteration"] == 30
    for metric, value in one["results"]["wikitext"].items():
        assert abs(several["results"]["wikitext"][metric] - value) <= 1e-4 * abs(value)


def test_what_ranks_would_refuse_is_said_on_the_head_node_before_any_starts(tmp_path):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("short\n" + "word " * 400 + "\n")
    out = tmp_path / "out.jsonl"
    out.write_text("something good\n")
    started = time.monotonic()
    done = run(tmp_path, "deepy.py", "generate.py", "-i", str(prompts), "-o", str(out))
    assert done.returncode == 2
    assert "prompt 2: the prompt has" in done.stderr
    assert out.read_text() == "something good\n"
    tasks = [f"wikitext={tmp_path}/none.raw", f"perplexity={prompts}"]
    done = run(tmp_path, "deepy.py", "evaluate.py", "--set", f"eval_tasks={json.dumps(tasks)}")
    assert done.returncode == 2
    assert f"eval_tasks: wikitext={tmp_path}/none.raw: no such file" in done.stderr
    assert not (tmp_path / "log").exists(), "ranks were started"
    assert time.monotonic() - started < 60
