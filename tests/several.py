"""Several runs of train.py in one group of processes: `several.py '[["--out_dir=a", ...], ...]'`."""

import json
import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import train

for argv in json.loads(sys.argv[1]):
    code = train.main(argv)
    if code:
        sys.exit(code)
