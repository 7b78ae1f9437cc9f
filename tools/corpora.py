"""gpt-neox's name of `tools/prepare_data.py`."""

import sys

if __name__ == "__main__":
    print(
        "tools/corpora.py is `python tools/prepare_data.py` here (corpora by name; `--help` lists them)",
        file=sys.stderr,
    )
    sys.exit(2)
