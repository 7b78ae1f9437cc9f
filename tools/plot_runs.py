# PYTHON_ARGCOMPLETE_OK
"""Draw the curves of several runs in one picture.

python tools/plot_runs.py runs/a runs/b=wider --output compare.png
python tools/plot_runs.py runs/a runs/b --against tokens --output compare.png
python tools/plot_runs.py runs/a/logs/metrics.jsonl runs/a/logs/metrics-1.jsonl --metric train/grad_norm --output x.png
"""

from __future__ import annotations

from pathlib import Path

import _checkout  # noqa: F401

from neox.arguments import ScriptParser
from neox.errors import ConfigError, DataError, run_script
from neox.launch.status.run_paths import find_run_directory
from neox.metrics import AGAINST, METRICS_FILE, draw, read_metrics


def metrics_file(run: str) -> Path:
    """Return the metrics file of a run: the path itself, or that of the run which it names.

    Raises:
        DataError: There is none, or more than one.
    """
    path = Path(run)
    if path.is_file():
        return path
    file = find_run_directory(path) / METRICS_FILE
    if not file.is_file():
        raise DataError(f"{file} is missing: the run has not written any metrics")
    return file


def main() -> int:
    """Run the tool."""
    parser = ScriptParser(description=__doc__)
    runs_help = f"log_dir of a run, its {METRICS_FILE}, or its checkpoints"
    parser.add_argument("runs", nargs="+", metavar="RUN[=LABEL]", help=runs_help)
    parser.add_argument("--output", type=Path, required=True, help="PNG file to write")
    parser.add_argument(
        "--metric", action="append", default=[], metavar="NAME", help="metric to draw (default: all losses)"
    )
    parser.add_argument(
        "--against",
        choices=AGAINST,
        default="iteration",
        help="horizontal axis: iteration (default), tokens or seconds",
    )
    args = parser.parse_args()
    runs: dict[str, Path] = {}
    for argument in args.runs:
        run = argument
        label = ""
        if not Path(argument).exists():
            run, _, label = argument.partition("=")
        runs[label or run] = metrics_file(run)
    try:
        names = {name for path in runs.values() for row in read_metrics(path) for name in row}
        if unknown := [name for name in args.metric if name not in names]:
            raise DataError(f"no run has the metric {', '.join(unknown)}; they have {', '.join(sorted(names))}")
        drawn = draw(runs, args.output, args.metric, args.against)
    except OSError as error:
        raise ConfigError(f"--output {args.output}: cannot be written ({error.strerror})") from error
    except (ValueError, KeyError) as error:
        raise DataError(f"one of {', '.join(map(str, runs.values()))} is not a metrics file ({error})") from error
    if not drawn:
        raise DataError(f"no run has values of {', '.join(args.metric) or 'a loss'} against {args.against}")
    print(args.output)
    return 0


if __name__ == "__main__":
    run_script(main)
