"""A plugin whose runs are slow, raise, or take their process down: what sweeps must survive."""

from __future__ import annotations

from pathlib import Path

SLOW = {7: 0.08, 8: 0.4, 9: 0.03}
RAISES, EXITS, KILLED = (10, 13, 14), (11,), (12, 15)
BAD = (*RAISES, *EXITS, *KILLED)
WORDS = {part: "made to fail" for part in RAISES} | {part: "exit status 7" for part in EXITS}
WORDS |= {part: "SIGKILL" for part in KILLED}
"""What is said of each bad part on this machine."""

SOURCE = f'''
import os, signal, time
from nexus_ablate.axes.norm import NORM, RMSNorm

@NORM.register("trial")
class Trial(RMSNorm):
    """RMSNorm; its run may be slow, or end badly after some steps, as `part` says."""

    def __init__(self, width, bias, site, *, part):
        super().__init__(width, bias, site, eps=1e-6, gain_init=1.0, fp32=True)
        self.part, self.left = part, 2

    def forward(self, x):
        if self.training and x.device.type != "meta":
            self.left -= 1
            if self.left < 0 and self.part in {RAISES}:
                raise RuntimeError("made to fail")
            if self.left < 0 and self.part in {EXITS}:
                os._exit(7)
            if self.left < 0 and self.part in {KILLED}:
                os.kill(os.getpid(), signal.SIGKILL)
            if not os.environ.get("TRIAL_IN_A_HURRY"):
                time.sleep({SLOW}.get(self.part, 0.0))
            if self.part in {SLOW} and self.left < -5:
                wait()
        return super().forward(x)

def wait():
    """Wait while the file in TRIAL_HELD_BY is there, and no signal has asked the run to stop."""
    while os.path.exists(os.environ.get("TRIAL_HELD_BY", "")):
        request = getattr(signal.getsignal(signal.SIGTERM), "__self__", None)
        if getattr(request, "signal_name", ""):
            return
        time.sleep(0.05)
'''


def write_plugin(directory: Path) -> Path:
    """The folder for `--plugin`."""
    (directory / "norm").mkdir(parents=True)
    (directory / "trial.py").write_text(SOURCE)
    option = "# A trial for sweeps.\nname: trial\npart: 0  # int [0, 99]; which trouble its run is to meet\n"
    (directory / "norm" / "trial.yaml").write_text(option)
    return directory
