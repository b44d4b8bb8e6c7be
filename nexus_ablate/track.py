"""Where a run's rows go besides its own directory: nowhere, or to W&B as a mirror that can fail without consequence."""

from __future__ import annotations

import configparser
import json
import logging
import math
import netrc
import os
import queue
import re
import secrets
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, final
from urllib.parse import urlsplit

from nexus_ablate.errors import printable
from nexus_ablate.registry import Option

Mode = Literal["files", "wandb", "wandb_offline"]

WANDB_ID_FILE = "wandb_id.txt"
PATIENCE = 20.0  # seconds that finish() waits for W&B
PREEMPTED_PATIENCE = 5.0  # the same where a scheduler is about to kill the process
INIT_TIMEOUT = 15.0  # seconds that W&B has to accept the run; a process that ends earlier waits for the rest of them
QUEUE_ROWS = 2000  # rows that wait for a slow W&B

_HOSTS = ("api.forge.coreweave.com", "api.wandb.ai")  # where W&B is unless told otherwise: since 0.31, and before
_SECRETS = ("WANDB_API_KEY", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")
_URL_LOGIN = re.compile(r"(?<=://)[^/@\s]+(?=@)")
_MAX_TAG, _MAX_NAME = 64, 128  # characters; W&B refuses a run with longer ones


class Tracker(ABC):
    """What gets a copy of a run's rows; leaving its `with` block finishes it."""

    @abstractmethod
    def log(self, row: Mapping[str, float | None], step: int) -> None:
        """Copy one row of `metrics.jsonl`; returns at once, whatever happens to the copy.

        Args:
            row: Numbers by name, `tokens` among them; None and non-finite numbers are left out of the copy.
            step: The training step of the row, never lower than the one before.
        """

    @abstractmethod
    def finish(self, status: str, summary: Mapping[str, Any]) -> None:
        """End the copy with the state and the summary of the run; calls after the first do nothing."""

    def __enter__(self) -> Tracker:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.finish("failed" if kind else "finished", {})


@final
class FilesTracker(Tracker):
    """No copy: the run directory has everything."""

    def log(self, row: Mapping[str, float | None], step: int) -> None:
        pass

    def finish(self, status: str, summary: Mapping[str, Any]) -> None:
        pass


@final
class WandbTracker(Tracker):
    """A W&B run that is fed by a thread of its own.

    Only that thread touches W&B. It catches `Exception`, the whole of what W&B may raise at any point, and ends there;
    the caller's thread then says so once, at its next call, and nothing more is sent.

    Args:
        settings: Arguments of `wandb.Settings`, without the run's id.
        config: What W&B shows as the run's config.
        run_dir: The run directory: W&B's files go under it, and messages name it.
        say: Takes one line for the user; called on the caller's thread only.
        redact: Takes the secrets out of a text.
        patience: Seconds that `finish` waits.
    """

    def __init__(
        self,
        settings: Mapping[str, Any],
        *,
        config: Mapping[str, Any],
        run_dir: Path,
        say: Callable[[str], None],
        redact: Callable[[str], str],
        patience: float = PATIENCE,
    ) -> None:
        self._settings, self._config, self._run_dir = settings, config, run_dir
        self._say, self._redact, self._patience = say, redact, patience
        self._rows: queue.Queue[tuple[dict[str, Any], int] | None] = queue.Queue(QUEUE_ROWS)
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._end: tuple[str, dict[str, Any]] | None = None
        self._dropped = 0
        self._failed = False
        self._thread = threading.Thread(target=self._mirror, name="wandb-mirror", daemon=True)
        self._thread.start()

    def log(self, row: Mapping[str, float | None], step: int) -> None:
        if not self._failed:
            self._put(({"step": step, **_known(row)}, step))
        self._speak()

    def finish(self, status: str, summary: Mapping[str, Any]) -> None:
        if self._end is not None:
            return
        self._end = (status, _known(summary))
        self._put(None)
        patience = min(self._patience, PREEMPTED_PATIENCE) if status == "preempted" else self._patience
        self._thread.join(patience)
        if self._thread.is_alive():
            self._lines.put(f"W&B has not answered within {patience:g} s and is left behind; {self._where()}")
        elif self._dropped and not self._failed:
            self._lines.put(f"W&B was too slow for {self._dropped} rows and lacks them; {self._where()}")
        self._speak()

    def _put(self, item: tuple[dict[str, Any], int] | None) -> None:
        while True:
            try:
                return self._rows.put_nowait(item)
            except queue.Full:
                with suppress(queue.Empty):  # the mirror may have caught up since
                    self._rows.get_nowait()
                    self._dropped += 1

    def _speak(self) -> None:
        while not self._lines.empty():
            self._say(self._lines.get())

    def _where(self) -> str:
        return f"every row is in {self._run_dir / 'metrics.jsonl'}"

    def _mirror(self) -> None:
        try:
            run = self._open()
            while (item := self._rows.get()) is not None:
                row, step = item
                # With our step as W&B's, rows that a resumed run repeats are the ones W&B ignores: none comes twice.
                run.log(row, step=step)
            self._close(run)
        except Exception as error:
            self._failed = True
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            self._lines.put(printable(self._redact(f"W&B failed ({reason})"), limit=300) + f"; {self._where()}")

    def _open(self) -> Any:
        import wandb

        # W&B's own telemetry complains through this logger, out of reach of `silent`.
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
        settings = {**self._settings, "run_id": _wandb_id(self._run_dir)}
        # Without the mode here, even an offline run sends telemetry.
        wandb.setup(wandb.Settings(silent=True, mode=settings["mode"]))
        known = {key: value for key, value in settings.items() if key in wandb.Settings.model_fields}
        run = wandb.init(config=dict(self._config), settings=wandb.Settings(**known))
        run.define_metric("*", step_metric="tokens")
        online = settings["mode"] == "online"
        place = run.url if online else f"offline, push later with `wandb sync {Path(run.dir).parent}`"
        self._lines.put(f"W&B: {place}")
        metrics = self._run_dir / "metrics.jsonl"
        if run.resumed and metrics.exists():
            self._catch_up(run, metrics)
        return run

    def _catch_up(self, run: Any, metrics: Path) -> None:
        """Send the rows before a resume that W&B has not: it holds up to 15 s of them back, and a kill loses those."""
        with metrics.open(encoding="utf-8") as lines:
            for line in lines:
                if not line.endswith("\n"):  # the run is writing it; it comes through the queue
                    return
                row = json.loads(line)
                if row["step"] >= run.step:
                    run.log(_known(row), step=row["step"])

    def _close(self, run: Any) -> None:
        assert self._end is not None
        status, summary = self._end
        run.summary.update({**summary, "status": status})
        if status == "preempted":
            run.mark_preempting()
        run.finish(exit_code=0 if status == "finished" else 1)


def resolve_mode(option: Option, environ: Mapping[str, str]) -> Mode:
    """What a `tracker` option comes to on this machine, without network.

    `auto` follows WANDB_MODE, then credentials: WANDB_API_KEY, WANDB_IDENTITY_TOKEN_FILE, or the server's entry in
    the netrc file. A chosen mode stands whatever the environment says.
    """
    if option.name != "auto":
        return option.name  # type: ignore[return-value]
    mode = _wandb_setting("mode", environ)
    if mode == "disabled":
        return "files"
    if mode in ("offline", "dryrun"):
        return "wandb_offline"
    return "wandb" if _credentials(environ) else "files"


def start_tracker(
    option: Option,
    *,
    run_dir: Path,
    config: Mapping[str, Any],
    axes: Mapping[str, str],
    study: str,
    arm: str,
    seed: int,
    tags: Sequence[str],
    say: Callable[[str], None],
    environ: Mapping[str, str] = os.environ,
    patience: float = PATIENCE,
) -> Tracker:
    """Begin the copy of a run; returns at once.

    Args:
        option: The chosen `tracker` option.
        run_dir: The run directory. It keeps the W&B id, so that a resumed run goes on where it was.
        config: The run's configuration as typed, nested.
        axes: Option by axis, `{"norm": "rms"}`; shown flat as `axis/norm` and as tags `norm=rms`.
        study: The W&B group.
        arm: With the seed, the W&B name.
        seed: The run's seed.
        tags: Further tags.
        say: Takes one line for the user.
        environ: Where credentials are looked up.
        patience: Seconds that `finish` may wait for W&B.
    """
    mode = resolve_mode(option, environ)
    if mode == "files":
        return FilesTracker()
    redact = _redactor(environ)
    if mode == "wandb" and not _credentials(environ):  # W&B would ask for a key, and the run would wait for the answer
        say("W&B has no key on this machine: set WANDB_API_KEY or run `wandb login`; the run directory has every row")
        return FilesTracker()
    entity = option.keys["entity"]
    chosen = [f"{axis}={name}" for axis, name in axes.items()]
    settings = {
        "mode": "online" if mode == "wandb" else "offline",
        "project": option.keys["project"],
        "entity": None if entity == "none" else entity,
        "run_group": study[:_MAX_NAME],
        "run_job_type": "train",
        "run_name": f"{arm}/s{seed}"[:_MAX_NAME],
        "run_tags": tuple(dict.fromkeys(tag[:_MAX_TAG] for tag in [*chosen, *tags])),
        "resume": "allow",
        "root_dir": str(run_dir),
        # A run of ours must neither end nor become the one of the program around it.
        "reinit": "create_new",
        # By default the Stop button in the browser interrupts this process.
        "stop_fn": lambda: None,
        "silent": True,
        "quiet": True,
        "console": "off",
        "disable_code": True,
        "disable_git": True,
        "disable_job_creation": True,
        "x_disable_meta": True,
        "x_disable_stats": True,
        "x_save_requirements": False,
        # The default of 15 s is what a killed run would lose.
        "x_transaction_log_flush_interval": 1.0,
        "init_timeout": INIT_TIMEOUT,
        # W&B gives up before finish() does, which also bounds what it does when the process exits.
        "finish_timeout": patience / 2,
        "finish_timeout_raises": True,
    }
    flat = {f"axis/{axis}": name for axis, name in axes.items()}
    shown = redact({"study": study, "arm": arm, "seed": seed, **config, **flat})
    return WandbTracker(settings, config=shown, run_dir=run_dir, say=say, redact=redact, patience=patience)


def _known(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values without None and non-finite numbers, at any depth: W&B would draw them as NaN or 0."""
    kept = {key: _known(value) if isinstance(value, dict) else value for key, value in values.items()}
    return {k: v for k, v in kept.items() if v is not None and not (isinstance(v, float) and not math.isfinite(v))}


def _wandb_id(run_dir: Path) -> str:
    """The W&B id of a run directory, made once. Random, because equal runs of two people are two runs."""
    path = run_dir / WANDB_ID_FILE
    if not path.exists():
        aside = path.with_name(f".{path.name}.tmp")
        aside.write_text(secrets.token_hex(8) + "\n", encoding="utf-8")
        aside.replace(path)
    return path.read_text(encoding="utf-8").strip()


def _wandb_setting(name: str, environ: Mapping[str, str]) -> str:
    """A setting of W&B's from its variable or else from the file that `wandb login` and `wandb offline` write."""
    variable = environ.get(f"WANDB_{name.upper()}")
    if variable:
        return variable
    directory = Path(environ.get("WANDB_CONFIG_DIR") or "~/.config/wandb").expanduser()
    parser = configparser.ConfigParser(interpolation=None)
    try:
        parser.read(directory / "settings", encoding="utf-8")
    except (configparser.Error, UnicodeDecodeError):  # W&B, too, takes an unreadable file for an empty one
        return ""
    return parser.get("default", name, fallback="")


def _credentials(environ: Mapping[str, str]) -> str:
    """The key that W&B would use, or the path of its identity token; '' when there is none."""
    given = environ.get("WANDB_API_KEY") or environ.get("WANDB_IDENTITY_TOKEN_FILE")
    if given:
        return given
    url = _wandb_setting("base_url", environ)
    path = Path(environ.get("NETRC") or "~/.netrc").expanduser()
    try:
        logins = netrc.netrc(path).hosts
    except (netrc.NetrcParseError, OSError, UnicodeDecodeError):  # as W&B: an unreadable file holds no key
        return ""
    found = [logins[host][2] for host in ([urlsplit(url).netloc] if url else _HOSTS) if host in logins]
    return next((key for key in found if key), "")


def _redactor(environ: Mapping[str, str]) -> Callable[[Any], Any]:
    """A function that puts `***` for this machine's secrets and logins in URLs, in texts at any depth of a value."""
    hidden = [word for word in (_credentials(environ), *map(environ.get, _SECRETS)) if word]

    def redact(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: redact(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [redact(item) for item in value]
        if not isinstance(value, str):
            return value
        for word in hidden:
            value = value.replace(word, "***")
        return _URL_LOGIN.sub("***", value)

    return redact
