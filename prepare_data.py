"""gpt-neox's name of `tools/prepare_data.py`."""

import sys

if __name__ == "__main__":
    print("prepare_data.py is `python tools/prepare_data.py` here (the same flags)", file=sys.stderr)
    sys.exit(2)
