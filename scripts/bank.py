"""Make tests/bank.json anew: the final losses of 60 seeds of the arms of tests/bank.yaml (300 runs, some minutes).

nexus-ablate study tests/bank.yaml tracker=files runs_dir=DIR; python scripts/bank.py DIR/bank
"""

import json
import sys
from pathlib import Path

from nexus_ablate.comparison.within_stratum import compare_stratum as compare

study = Path(sys.argv[1])
losses = {row.arm: row.values for row in compare(study, allow=["tokens", "schedule"]).rows}
target = Path(__file__).resolve().parent.parent / "tests/bank.json"
target.write_text(json.dumps(losses, indent=1).replace("\n  ", " ") + "\n", encoding="utf-8")
