"""A plugin that shows this machine's secrets in every way that a run can, and fails with them where it is asked to."""

from __future__ import annotations

from pathlib import Path

SOURCE = '''
import builtins, logging, os, subprocess, sys, warnings
from nexus_ablate.axes.norm import NORM, RMSNorm
from nexus_ablate.track import mirror

# A loaded machine may start W&B later than a run waits for it, and then there is no copy to look at.
mirror.INIT_TIMEOUT, mirror.start_tracker.__defaults__ = 100.0, (120.0,)

def secrets():
    return " and ".join(text for name, text in os.environ.items() if name.endswith("_CANARY_KEY"))

@NORM.register("leak")
class Leak(RMSNorm):
    """RMSNorm that prints, logs, warns of and, with `fails`, raises the secrets of the environment."""

    def __init__(self, width, bias, site, *, fails):
        super().__init__(width, bias, site, eps=1e-6, gain_init=1.0, fp32=True)
        self.fails, self.calls = fails, 0

    def forward(self, x):
        if self.training and x.device.type != "meta":
            self.calls += 1
            if self.calls == 2:
                print("printed", secrets())
                print("printed", secrets(), file=sys.stderr)
                logging.getLogger("leak").error("logged %s", secrets())
                warnings.warn("warned of " + secrets())
                if "LEAK_BELOW_PYTHON" in os.environ:
                    half = len(secrets()) // 2
                    for descriptor in (1, 2):
                        os.write(descriptor, b"began " + secrets()[:half].encode())
                        os.write(descriptor, secrets()[half:].encode() + b"\\n")
                    subprocess.run([sys.executable, "-c", "import os; print('child', os.environ['ONE_CANARY_KEY'])"])
                if self.fails:
                    error = getattr(builtins, os.environ.get("LEAK_ENDS_BY", "RuntimeError"))
                    raise error("login refused: " + secrets())
        return super().forward(x)
'''

UNMASKED = """
from nexus_ablate import masking
masking._masked = lambda value, words: value
"""


def write_control(directory: Path) -> Path:
    """The folder to begin PYTHONPATH with, for a control: no process that Python starts then masks anything."""
    directory.mkdir()
    (directory / "sitecustomize.py").write_text(UNMASKED)
    return directory


def write_plugin(directory: Path) -> Path:
    """The folder for `--plugin`."""
    (directory / "norm").mkdir(parents=True)
    (directory / "leak.py").write_text(SOURCE)
    option = "# Shows secrets.\nname: leak\nfails: off  # on | off; end the run with them\n"
    (directory / "norm" / "leak.yaml").write_text(option)
    return directory
