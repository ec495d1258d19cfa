"""What a checkpoint's own objects may be, and that nothing of the file's choice runs."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import datetime
import enum
import os
import pickle
import subprocess
import sys
import types
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from smdistributed.modelparallel.torch.checkpoint.plain_classes import (
    globals_in,
    plain_classes,
    refused_in,
)

RAN: list[str] = []


@dataclasses.dataclass
class Settings:
    width: int = 4
    inner: Any = None

    def __post_init__(self) -> None:
        RAN.append("__post_init__")


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    width: int = 4


class Kind(enum.Enum):
    SMALL = 1
    LARGE = 2


class Strict(str, enum.Enum):  # noqa: UP042 - as scripts have them
    SMALL = "small"

    @classmethod
    def _missing_(cls, value: object) -> Any:
        RAN.append("_missing_")


class Switches(enum.Flag):
    ONE = 1
    TWO = 2


class Point(NamedTuple):
    x: int
    y: int


class Described:
    """A configuration like those of Transformers."""

    def __init__(self, **values: Any) -> None:
        RAN.append("__init__")
        vars(self).update(values)

    def to_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Described:
        return cls(**values)


#: Python before 3.11.4 pickles members by functions, of which a file may choose any.
enumerations = pytest.mark.skipif(
    sys.version_info < (3, 11, 4), reason="members of enumerations are pickled by getattr"
)
CONTENT = {
    "settings": Settings(8, Settings(2)),
    "frozen": Frozen(3),
    "kinds": [Kind.LARGE, Strict.SMALL, Switches.ONE | Switches.TWO],
    "point": Point(1, 2),
    "arguments": argparse.Namespace(lr=0.1, out=Path("/tmp/x"), layers=[1, 2]),
    "space": types.SimpleNamespace(a=1),
    "when": datetime.datetime(2020, 1, 2, 3),
    "part": slice(1, 2),
    "names": frozenset({"a"}),
    "dtype": torch.float16,
    "ordered": collections.OrderedDict(a=torch.ones(2)),
}


def saved(folder: Path, content: Any) -> Path:
    path = folder / "content.pt"
    torch.save(content, path)
    return path


def loaded(path: Path) -> Any:
    with plain_classes(path):
        return torch.load(path, weights_only=True)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=enumerations if name == "kinds" else ()) for name in CONTENT],
)
def test_plain_objects_come_back(tmp_path: Path, name: str) -> None:
    path = saved(tmp_path, {name: CONTENT[name]})
    RAN.clear()
    assert refused_in(path) == []
    found = loaded(path)[name]
    assert repr(found) == repr(CONTENT[name])
    assert type(found) is type(CONTENT[name])
    assert RAN == []


@enumerations
def test_configurations_come_back(tmp_path: Path) -> None:
    given = Described(width=4, dtype=torch.bfloat16, kind=Kind.SMALL)
    path = saved(tmp_path, given)
    RAN.clear()
    found = loaded(path)
    assert type(found) is Described
    assert vars(found) == vars(given)
    assert RAN == []


def test_configurations_of_transformers_come_back(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    for given in (transformers.GPT2Config(n_layer=3), transformers.GenerationConfig(top_k=7)):
        found = loaded(saved(tmp_path, given))
        assert type(found) is type(given)
        assert found.to_dict() == given.to_dict()


class Guarded(Settings):
    def __setstate__(self, state: Any) -> None:
        RAN.append("__setstate__")


class Reduced(Settings):
    def __reduce__(self) -> Any:
        return Reduced, (1,)


class Finished(Settings):
    def __del__(self) -> None:
        RAN.append("__del__")


class Made(Settings):
    def __new__(cls, *args: Any) -> Any:
        RAN.append("__new__")
        return super().__new__(cls)


class Plainest:
    pass


class Runs:
    """What a hostile file holds."""

    def __reduce__(self) -> Any:
        return os.system, ("echo hostile",)


class Called:
    """A call of a class that the script has imported, with arguments that the file chooses."""

    def __init__(self, *call: Any) -> None:
        self.call = call

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize("kind", [Guarded, Reduced, Finished, Made, Plainest])
def test_other_classes_are_refused_and_named(tmp_path: Path, kind: type) -> None:
    path = saved(tmp_path, [kind()])
    RAN.clear()
    assert any(kind.__name__ in name for name in refused_in(path))
    with pytest.raises(pickle.UnpicklingError):
        loaded(path)
    assert RAN == []


@pytest.mark.parametrize(
    "hostile",
    [
        Runs(),
        Called(subprocess.Popen, (["true"],)),
        Called(getattr, (Settings, "__init__")),
        Called(Settings, (1,)),
        Called(Frozen, (1,)),
        Called(Described.from_dict, ({},)),
        Called(Strict, ("other",)),
        Called(exec, ("RAN.append('exec')",)),
    ],
    ids=lambda hostile: str(getattr(hostile, "call", hostile)),
)
def test_nothing_that_the_file_chooses_runs(tmp_path: Path, hostile: Any) -> None:
    path = saved(tmp_path, [hostile])
    RAN.clear()
    with pytest.raises(pickle.UnpicklingError):
        loaded(path)
    assert RAN == []


def test_nothing_is_imported_for_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "stranger.py").write_text(
        "import dataclasses\n\n@dataclasses.dataclass\nclass Settings:\n    width: int = 4\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    import stranger

    path = saved(tmp_path, stranger.Settings(5))
    assert loaded(path).width == 5
    del sys.modules["stranger"]
    assert globals_in(path) == refused_in(path) == ["stranger.Settings"]
    with pytest.raises(pickle.UnpicklingError):
        loaded(path)
    assert "stranger" not in sys.modules


def test_a_file_of_another_form_is_torchs_to_refuse(tmp_path: Path) -> None:
    path = tmp_path / "old.pt"
    torch.save(Settings(), path, _use_new_zipfile_serialization=False)
    assert globals_in(path) == []
    with pytest.raises(pickle.UnpicklingError):
        loaded(path)
