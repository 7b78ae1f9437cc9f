"""gpt-neox's name of `tools/preprocess_data.py`."""

import sys

if __name__ == "__main__":
    print(
        "tools/datasets/preprocess_data.py is `python tools/preprocess_data.py` here (the same flags)", file=sys.stderr
    )
    sys.exit(2)
