#!/usr/bin/env python3
# PYTHON_ARGCOMPLETE_OK
"""Command that turns YAML files into a checked plan, and starts a script on every rank.

python deepy.py train.py -d configs 20B.yml local_setup.yml
python deepy.py train.py -d configs 20B.yml --set global_num_gpus=96 --dry-run
python deepy.py preprocess_data.py -H hostfile --input ... (the tool's own flags; its work is divided over the slots)
"""

from neox.errors import run_script
from neox.preflight import main

if __name__ == "__main__":
    run_script(main, unload=False)
