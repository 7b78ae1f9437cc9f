"""gpt-neox's name of `tools/dataset.py info`."""

import sys

if __name__ == "__main__":
    print("tools/datasets/dataset_token_count.py is `python tools/dataset.py info` here (PREFIX ...)", file=sys.stderr)
    sys.exit(2)
