"""Options of Open MPI 4's mpirun, as existing launch lines have them, turned into Open MPI 5's.

Open MPI 5 replaced the runtime below mpirun. Of the options in common use it refuses some
(``-bind-to``: long options now need two dashes), ignores others without a word (parameters of the
former runtime), and stops on some combinations (a parameter given twice with two values).

Source: smd_model_parallel_general.rst, Parameters for mpi; model-parallel-sm-sdk.md, Configuration
parameters; the training toolkit's own ``--NCCL_DEBUG``.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from smdistributed.modelparallel.common.errors import ConfigError

Option = tuple[str, ...]

_MCA = ("--mca", "--gmca", "--prtemca", "--gprtemca", "--pmixmca", "--gpmixmca", "--omca")
_NUM_VALUES = {
    **dict.fromkeys(_MCA, 2),
    **dict.fromkeys(("-x", "-n", "--host", "--bind-to", "--map-by", "--rank-by"), 1),
    **dict.fromkeys(("--allow-run-as-root", "--display-map", "--tag-output", "--oversubscribe"), 0),
}
_SYNONYMS = {
    **dict.fromkeys(("-np", "--np", "-c", "--n"), "-n"),
    **dict.fromkeys(("-H",), "--host"),
}
#: smprun does these by itself.
_OWN = ("--allow-run-as-root", "--tag-output", "--oversubscribe")
#: Frameworks of the runtime, whose parameters mpirun no longer finds under ``--mca``.
_RUNTIME = ("plm_", "oob_", "ras_", "rmaps_", "odls_", "ess_", "errmgr_", "prte_", "orte_")
#: What no option of mpirun is called, and a variable is: the training toolkit takes ``--NCCL_DEBUG
#: INFO`` for itself, and exports it.
_VARIABLE = re.compile(r"--([A-Z][A-Z0-9_]+)")
_COPY_MECHANISMS = ("cma", "xpmem", "knem")


@dataclass(frozen=True)
class MpiOptions:
    """What a string of mpirun options asks for.

    Attributes:
        options: options of Open MPI 5 with their values, without those below.
        exports: variables of ``-x``: the value, or None to pass on the caller's.
        num_ranks: value of ``-n``, or None.
        hosts: value of ``--host``, or None.
    """

    options: tuple[Option, ...] = ()
    exports: Mapping[str, str | None] = field(default_factory=dict)
    num_ranks: int | None = None
    hosts: str | None = None

    def has(self, name: str) -> bool:
        """Returns whether the option ``name`` (with its dashes) is among ``options``."""
        return any(option[0] == name for option in self.options)

    def arguments(self) -> list[str]:
        """Returns ``options`` as command-line arguments."""
        return [word for option in self.options for word in option]


def translate(text: str) -> MpiOptions:
    """Reads a string of options of Open MPI 4 or 5.

    Exact duplicates are dropped. Options that are not known pass unchanged, each with the words up
    to the next option.

    Raises:
        ConfigError: unbalanced quotes, a missing value, a word that belongs to no option, or one
            parameter with two values.
    """
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ConfigError(
            f"the MPI options must be quoted as in a shell; {error} in {text!r}: close the quote."
        ) from None
    exports: dict[str, str | None] = {}
    single: dict[str, str] = {}
    translated: dict[Option, None] = {}
    for name, *values in _options(words, text):
        if name == "-x":
            variable, equals, value = values[0].partition("=")
            exports[variable] = value if equals else None
        elif variable_name := _VARIABLE.fullmatch(name):
            exports[variable_name[1]] = values[0]
        elif name in ("-n", "--host"):
            if single.setdefault(name, values[0]) != values[0]:
                raise _conflict(name, single[name], values[0])
        elif name in _MCA:
            option = _parameter(name, values[0], values[1])
            if option:
                translated[option] = None
        elif name == "--display-map":
            translated["--display", "map"] = None
        elif name not in _OWN:
            translated[(name, *values)] = None
    _check_parameters(list(translated))
    return MpiOptions(tuple(translated), exports, _count(single.get("-n")), single.get("--host"))


def _options(words: Sequence[str], text: str) -> Iterator[Option]:
    index = 0
    while index < len(words):
        name, values = _name(words[index])
        index += 1
        if not name.startswith("-"):
            raise ConfigError(
                f"MPI options start with '-'; {name!r} in {text!r} belongs to no option, and "
                "mpirun would run it as the program: remove it."
            )
        wanted = 1 if _VARIABLE.fullmatch(name) else _NUM_VALUES.get(name)
        while index < len(words) and (
            not words[index].startswith("-") if wanted is None else len(values) < wanted
        ):
            values.append(words[index])
            index += 1
        if wanted is not None and len(values) != wanted:
            raise ConfigError(
                f"MPI option {name} takes {wanted} value(s); received {values} in {text!r}."
            )
        yield (name, *values)


def _name(word: str) -> tuple[str, list[str]]:
    """Returns the option's name in the form of Open MPI 5, and the value joined to it by ``=``."""
    values = []
    if word.startswith("--") and "=" in word:
        word, _, value = word.partition("=")
        values = [value]
    word = _SYNONYMS.get(word, word)
    if len(word) > 2 and word[0] == "-" and word[1] != "-":
        word = "-" + word
    return word, values


def _parameter(name: str, key: str, value: str) -> Option | None:
    """Returns an MCA parameter under its present name, or None where nothing is to be said."""
    if key.startswith("btl_vader_single_copy_mechanism"):
        if value in _COPY_MECHANISMS:
            return ("--mca", "smsc", value)
        # There is no component 'none': excluding each of them means the same.
        return ("--mca", "smsc", "^" + ",".join(_COPY_MECHANISMS))
    if key.startswith("btl_vader_"):
        return (name, key.replace("btl_vader_", "btl_sm_"), value)
    if key == "btl":
        return _transports(name, value)
    if key == "orte_abort_on_non_zero_status":
        on = value.lower() not in ("0", "false", "no")
        return None if on else ("--runtime-options", "error-nonzero-status=0")
    if key == "oob_tcp_if_include" and value == "lo":
        # The runtime refuses the loopback alone, and a job on one host needs no network.
        return None
    if name in ("--mca", "--gmca") and key.startswith(_RUNTIME):
        key = key.replace("plm_rsh_", "plm_ssh_")
        if key.startswith("orte_"):
            key = "prte_" + key.removeprefix("orte_")
        return ("--prtemca", key, value)
    return (name, key, value)


def _transports(name: str, value: str) -> Option | None:
    """Names the shared-memory transport anew and leaves out openib, which is gone."""
    sign = "^" if value.startswith("^") else ""
    names = ["sm" if word == "vader" else word for word in value.removeprefix("^").split(",")]
    names = [word for word in names if word != "openib"]
    return (name, "btl", sign + ",".join(names)) if names else None


def _check_parameters(options: Sequence[Option]) -> None:
    values: dict[str, str] = {}
    for option in options:
        if option[0] in _MCA:
            _, key, value = option
            if values.setdefault(key, value) != value:
                raise _conflict(key, values[key], value)


def _conflict(name: str, one: str, other: str) -> ConfigError:
    return ConfigError(
        f"an MPI option may have one value; {name} has {one!r} and {other!r}: keep one of them."
    )


def _count(text: str | None) -> int | None:
    if text is None:
        return None
    if not text.isdecimal():
        raise ConfigError(f"MPI option -n must be an integer; received {text!r}.")
    return int(text)
