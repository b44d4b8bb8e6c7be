"""Make tests/bank.json anew: the final losses of 60 seeds of the arms of tests/bank.yaml (300 runs, some minutes).

nexus-ablate study tests/bank.yaml tracker=files runs_dir=DIR; python scripts/bank.py DIR/bank
"""

import json
import math
import sys
from pathlib import Path

from nexus_ablate import compare

(table,) = compare(sys.argv[1], allow=["tokens"]).tables
losses = {}
for arm in table.arms:
    values = arm.values("val_loss", [*range(60)]).tolist()
    losses[arm.name] = [value if math.isfinite(value) else None for value in values]
target = Path(__file__).resolve().parent.parent / "tests/bank.json"
target.write_text(json.dumps(losses, indent=1).replace("\n  ", " ") + "\n", encoding="utf-8")
