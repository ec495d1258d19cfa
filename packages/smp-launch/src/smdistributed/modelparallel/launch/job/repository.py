"""A clone of the repository that a script is in.

Source: estimator interface, section 1 (script); the public description of ``git_config``.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit, urlunsplit

from smdistributed.modelparallel.common.config.schema import describe, unknown_key
from smdistributed.modelparallel.common.errors import ConfigError
from smdistributed.modelparallel.launch.exceptions import StorageError

_TEXTS = ("repo", "branch", "commit", "username", "password", "token")
_KEYS = (*_TEXTS, "2FA_enabled")
_LIMIT_SECONDS = 600.0
#: Nobody is there who could answer.
_ASKS_NOTHING = {"GIT_TERMINAL_PROMPT": "0", "GIT_SSH_COMMAND": "ssh -oBatchMode=yes"}


def check(config: Any) -> None:
    """Checks what an estimator is given.

    Raises:
        ConfigError: it breaks rules; lists every problem.
    """
    if not isinstance(config, Mapping):
        raise ConfigError(f"git_config must be a dictionary; got {describe(config)}.")
    problems = [unknown_key(key, _KEYS, "git_config.") for key in config if key not in _KEYS]
    for key in _TEXTS:
        value = config.get(key)
        # What git would take for an option of its own.
        if value is not None and (not isinstance(value, str) or not value or value[0] == "-"):
            problems.append(f"git_config.{key} must be a text that says it; got {describe(value)}.")
    if config.get("repo") is None:
        problems.append("git_config needs repo, the address or folder of the repository.")
    if ("username" in config) != ("password" in config):
        problems.append("git_config has username and password together, or token alone.")
    if problems:
        raise ConfigError("\n".join(problems))


@contextlib.contextmanager
def cloned(config: Mapping[str, Any]) -> Iterator[Path]:
    """Yields a folder with the repository as it was in a commit, which goes afterwards.

    Raises:
        StorageError: it cannot be cloned.
    """
    address = _address(config)
    with tempfile.TemporaryDirectory(prefix="smp-launch-") as place:
        folder = Path(place, "repository")
        branch = config.get("branch")
        chosen = ("--branch", branch) if branch else ()
        _git(config, "clone", "--quiet", *chosen, "--", address, str(folder))
        if commit := config.get("commit"):
            _git(config, "-C", str(folder), "checkout", "--quiet", "--detach", commit)
        yield folder


def _address(config: Mapping[str, Any]) -> str:
    """Returns the address, with what the host asks for where it is of the web."""
    parts = urlsplit(str(config["repo"]))
    given = ("token",) if "token" in config else ("username", "password")
    if parts.scheme not in ("http", "https") or not config.keys() >= set(given):
        return str(config["repo"])
    who = ":".join(quote(config[key], safe="") for key in given)
    return urlunsplit(parts._replace(netloc=f"{who}@{parts.netloc.rpartition('@')[2]}"))


def _git(config: Mapping[str, Any], *words: str) -> None:
    environ = {**os.environ, **_ASKS_NOTHING}
    try:
        done = subprocess.run(
            ["git", *words],
            env=environ,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_LIMIT_SECONDS,
            check=False,
        )
        problem = done.stderr.strip().rpartition("\n")[2] if done.returncode else ""
    except (OSError, subprocess.TimeoutExpired) as error:
        problem = str(error)
    if problem:
        for secret in (config.get("token"), config.get("password")):
            for form in (secret, quote(secret, safe="")) if secret else ():
                problem = problem.replace(form, "***")
        raise StorageError(
            f"the repository of git_config must be one that git can clone; {config['repo']}: "
            f"{problem}: correct repo, branch or commit, or clone it and name its folder as "
            "source_dir."
        )
