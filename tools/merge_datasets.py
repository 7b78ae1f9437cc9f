"""gpt-neox's name of `tools/dataset.py merge`."""

import sys

if __name__ == "__main__":
    print(
        "tools/merge_datasets.py is `python tools/dataset.py merge` here (PREFIX ... --output-prefix OUT)",
        file=sys.stderr,
    )
    sys.exit(2)
