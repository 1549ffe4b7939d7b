"""What only a GPU can show: eight scripts for one GPU, `multi` for several. docs/development/gpu-campaign.md says in which order.

    python -m campaigns.gpu.smoke --out figures                       # on the GPU, within the script's own budget
    python -m campaigns.gpu.smoke --out figures --device cpu          # a rehearsal on tiny sizes

`measuring` has what the scripts share (the device, the clock, the waits counter, the report), `gpt` the model and its loops.
A clone is enough: plugins need not be installed, their sources are put on the path here, for processes started from here too.
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
