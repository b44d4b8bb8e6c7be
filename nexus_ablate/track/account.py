"""This machine's W&B account, without network: whether to use W&B, its key, and which secrets to mask."""

from __future__ import annotations

import configparser
import netrc
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, TypeVar
from urllib.parse import urlsplit

from nexus_ablate.config.options import Option
from nexus_ablate.errors import ConfigError, UserError, printable
from nexus_ablate.masking import mask

Mode = Literal["files", "wandb", "wandb_offline"]

NO_KEY = "W&B has no key on this machine"
LOG_IN = "set WANDB_API_KEY or run `wandb login`"
REFUSAL = re.compile(r"Could not find project|(?<!:)\b40[13]\b|permission denied")
"""What W&B's errors say where a project does not exist or a key may not use it; digits of a port are none."""

_HOSTS = ("api.forge.coreweave.com", "api.wandb.ai")  # W&B's default hosts: since 0.31, and before
_SERVICE = "WANDB_SERVICE"  # "3-PID-unix-PATH", with the pid of the process that started the service
_Any = TypeVar("_Any")


def resolve_mode(option: Option) -> Mode:
    """The mode that a `tracker` option means on this machine, without network.

    What switches W&B off or offline here (WANDB_MODE, WANDB_DISABLED, `wandb offline`) holds for every option. `auto`
    then sends where there are credentials: WANDB_API_KEY, WANDB_IDENTITY_TOKEN_FILE, or the server's entry in the
    netrc file.
    """
    if option.name == "files" or is_off():
        return "files"
    if option.name == "wandb_offline" or _wandb_setting("mode") in ("offline", "dryrun"):
        return "wandb_offline"
    return "wandb" if option.name == "wandb" or credentials() else "files"


def is_off() -> bool:
    """Whether W&B is switched off on this machine."""
    return _wandb_setting("mode") == "disabled" or os.environ.get("WANDB_DISABLED", "").lower() in ("true", "1")


def require_key() -> None:
    """Check that there is a key: without one, W&B would ask at the terminal and wait.

    Raises:
        ConfigError: There is no key.
    """
    if not credentials():
        raise ConfigError(NO_KEY, "no WANDB_API_KEY, no netrc", LOG_IN)


def credentials() -> str:
    """The key that W&B would use, or the path of its identity token; '' if there is neither."""
    environment_key = os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE")
    if environment_key:
        return environment_key
    url = _wandb_setting("base_url")
    path = Path(os.environ.get("NETRC") or "~/.netrc").expanduser()
    try:
        logins = netrc.netrc(path).hosts
    except (netrc.NetrcParseError, OSError, UnicodeDecodeError):  # like W&B, treat an unreadable file as empty
        return ""
    hosts = [urlsplit(url).netloc] if url else _HOSTS
    keys = (logins[host][2] for host in hosts if host in logins)
    return next(filter(None, keys), "")


def quiet_client() -> None:
    """Let W&B's client print nothing, and give up on a server after two more tries."""
    set_up(x_graphql_retry_max=2, x_graphql_retry_wait_max_seconds=2)


def set_up(**settings: Any) -> None:
    """Set up W&B's client, silent and with a service process of its own.

    W&B leaves the address of its service process in the environment (WANDB_SERVICE) for child processes. The service
    ends with the process that started it, or earlier; a process that then inherits the address can't use W&B.
    """
    import wandb

    if str(os.getpid()) not in os.environ.get(_SERVICE, "").split("-"):
        os.environ.pop(_SERVICE, None)
    wandb.setup(wandb.Settings(silent=True, **settings))


def redact(value: _Any) -> _Any:
    """`mask`, also of a W&B key that is not in the environment."""
    return mask(value, more=[credentials()])


class WandbFailed(UserError):
    """W&B refused something, or did not answer."""


@contextmanager
def asked(problem: str, fix: str) -> Iterator[None]:
    """Ask W&B something, with a key. What it raises, which may be anything, becomes an error without secrets.

    Raises:
        ConfigError: There is no key.
        WandbFailed: W&B failed.
    """
    require_key()
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        got = failure(error)
        raise WandbFailed(problem, got, LOG_IN if REFUSAL.search(got) else fix) from error


def failure(error: BaseException) -> str:
    """An error from W&B on one line, without secrets."""
    return printable(redact(" ".join(f"{type(error).__name__}: {error}".split())), limit=300)


def _wandb_setting(name: str) -> str:
    """A W&B setting: from its environment variable, else from the file that `wandb login` and `wandb offline` write."""
    variable = os.environ.get(f"WANDB_{name.upper()}")
    if variable:
        return variable
    directory = Path(os.environ.get("WANDB_CONFIG_DIR") or "~/.config/wandb").expanduser()
    parser = configparser.ConfigParser(interpolation=None)
    try:
        parser.read(directory / "settings", encoding="utf-8")
    except (configparser.Error, UnicodeDecodeError):  # like W&B, treat an unreadable file as empty
        return ""
    return parser.get("default", name, fallback="")
