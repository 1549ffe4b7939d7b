"""Campaigns that need a GPU: eight scripts for one GPU, and `multi` for several, in the order of docs/development/gpu-campaign.md.

    python -m campaigns.gpu.smoke --out figures                       # on the GPU, within the script's own budget
    python -m campaigns.gpu.smoke --out figures --device cpu          # a rehearsal on tiny sizes

`measuring` has the parts that the scripts share (device, clock, counter of waits, report), `gpt` the model and its loops. Plugins need not
be installed: this module adds their sources to the path, also for processes started from here.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

for _source in map(str, (ROOT, *sorted(ROOT.glob("plugins/*/src")))):
    if _source not in sys.path:
        sys.path.append(_source)
    _paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if _source not in _paths:
        os.environ["PYTHONPATH"] = os.pathsep.join([*filter(None, _paths), _source])
