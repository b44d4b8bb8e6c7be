"""What somebody might plant in a run directory, a checkpoint, or a command that is copied from a web page.

Each payload would leave a file called `canary` where it is opened by code that trusts it, or exhaust the machine.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable
from pathlib import Path

CODE = "__import__('os').system('touch canary')"
PICKLE = b"cposix\nsystem\n(S'touch canary'\ntR."
"""Protocol 0: `posix.system('touch canary')`."""


CHECKPOINT_FILES: dict[str, bytes] = {
    "a pickle": PICKLE,
    "a pickle of protocol 4": b"\x80\x04\x8c\x05posix\x8c\x06system\x93\x8c\x0ctouch canary\x85R.",
    "a zip as torch.save writes it": b"PK\x03\x04" + b"\0" * 26 + b"archive/data.pkl" + PICKLE,
    "a header longer than memory": struct.pack("<Q", 2**62) + b"{}",
    "nothing": b"",
}

STATE_FILES: dict[str, bytes] = {
    "a pickle": PICKLE,
    "not a number": b'{"progress": NaN}',
    "objects": b'{"py/object/apply": ["os.system", "touch canary"]}',
}

MANIFESTS: dict[str, Callable[[dict], object]] = {
    "a file above": lambda m: m["files"].update({"../../canary.safetensors": {"bytes": 0, "sha256": "0"}}),
    "a pickle": lambda m: m["files"].update({"model.pkl": {"bytes": len(PICKLE), "sha256": "0"}}),
}

YAML: dict[str, str] = {
    "os.system": "!!python/object/apply:os.system ['touch canary']",
    "subprocess": "!!python/object/apply:subprocess.check_output [[touch, canary]]",
    "eval": f'!!python/object/apply:eval ["{CODE}"]',
    "new object": "!!python/object/new:os.system ['touch canary']",
    "a module": "!!python/module:os",
    "a name": "a: !!python/name:os.system",
    "a list with state": "!!python/object/new:list {listitems: !!python/object/apply:os.system ['touch canary']}",
    "a constructor of type": '!!python/object/new:type {args: [x, !!python/tuple [], {"extend": !!python/name:exec }]}',
    "itself": "a: &a [*a]",
    "a _target_": f'norm: {{_target_: builtins.eval, _args_: ["{CODE}"]}}',
}

COMMANDS: dict[str, list[str]] = {
    "os.system": ["norm._target_=os.system"],
    "an alias of it": ["+norm._target_=logging.os.system"],
    "in a mapping": ["norm={_target_:os.system,command:'touch canary'}"],
    "in a list": ["data.files=[{_target_:os.system}]"],
    "in Hydra's callbacks": ["+hydra.callbacks.x._target_=os.system", "+hydra.callbacks.x.command='touch canary'"],
    "in Hydra's launcher": ["-m", "hydra.launcher._target_=os.system", "seed=0,1"],
    "a study above": ["experiment=../../canary"],
    "an absolute study": ["experiment=/tmp/canary"],
    "a hidden study": ["experiment=.canary"],
    "an option above": ["norm=../../../canary"],
    "a preset above": ["preset=../study/canary"],
    "a model above": ["model=../data/files"],
    "an escape": ["norm=\x1b]0;owned\x07\x1b[2J"],
    "a line break": ["norm=rms\nerror: all is well"],
    "a text that runs backwards": ["norm=\u202esmr"],
    "markup": ["norm=[bold red]owned[/]"],
    "an interpreter": [f"train.steps=${{eval:{CODE}}}"],
    "a plugin that is none": ["--plugin", "nowhere", "norm=rms"],
    "a launcher from elsewhere": ["-m", "hydra/launcher=../../canary", "seed=0,1"],
    "a log handler": ["hydra.job_logging.handlers.x={'()':os.system}"],
}

TEXTS: dict[str, str] = {
    "an escape": "\x1b[2J\x1b]0;owned\x07",
    "a script": "<script>alert(1)</script><img src=x onerror=alert(1)>",
    "markup": "[bold red]owned[/bold red][link=file:///etc/passwd]x[/link]",
    "a text that runs backwards": "\u202egnihton",
}


def replant(checkpoint: Path, name: str, data: bytes) -> None:
    """Put a file into a checkpoint with a manifest that vouches for it."""
    manifest = json.loads((checkpoint / "MANIFEST.json").read_text())
    (checkpoint / name).write_bytes(data)
    manifest["files"][name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (checkpoint / "MANIFEST.json").write_text(json.dumps(manifest))
