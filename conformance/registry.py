"""Cases, and where they are kept."""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from conformance.worlds import FRAMEWORKS, WORLDS

if TYPE_CHECKING:
    from conformance.adapters.base import Adapter

#: What is tried in more worlds than these is about ranks and groups, and takes milliseconds.
_FEW_WORLDS = 4
#: What cases that run jobs of estimators need besides: smp-launch.
JOBS = ("smdistributed.modelparallel.launch",)

Body = Callable[["Adapter"], Any]


@dataclass(frozen=True)
class Case:
    """One documented behaviour.

    Attributes:
        name: of its function; unique.
        rows: of the specification that it comes from, the first one being its identity.
        worlds: names of the jobs that it runs in, in each of them.
        frameworks: whose packages it runs against.
        body: raises if the behaviour is not as documented; called on every rank.
        quick_with: frameworks whose quick runs try it.
        is_built: False for a row whose feature no package has; the body then asks for it, and must
            be refused.
        needs: modules besides those of the framework's package, which the body imports itself.
        starts_jobs: whether the body starts a job of copies.
    """

    name: str
    rows: tuple[str, ...]
    worlds: tuple[str, ...]
    frameworks: tuple[str, ...]
    body: Body
    is_built: bool = True
    quick_with: tuple[str, ...] = FRAMEWORKS
    needs: tuple[str, ...] = ()
    starts_jobs: bool = False

    def lacks(self) -> list[str]:
        """Returns what it needs that is not installed here."""
        return [name for name in self.needs if importlib.util.find_spec(name) is None]

    def some_worlds(self, framework: str) -> tuple[str, ...]:
        """Returns worlds that show the behaviour: all for one of ranks and groups, else one.

        None where other tests show it: quick runs of another framework, with which it is the same
        code, or tests of the package.
        """
        if framework not in self.quick_with:
            return ()
        if len(self.worlds) > _FEW_WORLDS:
            return self.worlds
        return ("pipeline",) if "pipeline" in self.worlds else self.worlds[:1]

    @property
    def title(self) -> str:
        """The first line of the body's documentation, or its name in words."""
        return (self.body.__doc__ or self.name.replace("_", " ")).strip().splitlines()[0]


CASES: dict[str, Case] = {}


def add(case: Case) -> None:
    """Keeps a case."""
    if case.name in CASES:
        raise ValueError(f"cases need names of their own; {case.name} is there twice.")
    if unknown := set(case.worlds) - set(WORLDS):
        raise ValueError(f"case {case.name}: no world is called {', '.join(sorted(unknown))}.")
    CASES[case.name] = case


def case(
    *rows: str,
    worlds: tuple[str, ...] = ("pipeline",),
    frameworks: tuple[str, ...] = FRAMEWORKS,
    quick_with: tuple[str, ...] = FRAMEWORKS,
    needs: tuple[str, ...] = (),
    starts_jobs: bool = False,
) -> Callable[[Body], Body]:
    """Makes a case of a function that takes an adapter.

    Args:
        rows: of the specification that it comes from.
        worlds: where it runs.
        frameworks: whose packages it runs against.
        quick_with: frameworks whose quick runs try it.
        needs: modules that it imports besides those of the framework's package.
        starts_jobs: whether it starts a job of copies.
    """

    def register(body: Body) -> Body:
        kept = Case(
            body.__name__,
            rows,
            worlds,
            frameworks,
            body,
            quick_with=quick_with,
            needs=needs,
            starts_jobs=starts_jobs,
        )
        add(kept)
        return body

    return register


def job_case(
    *rows: str, quick_with: tuple[str, ...] = ("torch",), needs: tuple[str, ...] = JOBS
) -> Callable[[Body], Body]:
    """Makes a case that runs jobs of estimators, which know little of frameworks.

    Args:
        rows: of the specification that it comes from.
        quick_with: frameworks whose quick runs try it.
        needs: modules that it imports besides those of the framework's package.
    """
    return case(*rows, worlds=("new",), quick_with=quick_with, needs=needs)


def torch_case(
    *rows: str,
    worlds: tuple[str, ...] = ("pipeline",),
    starts_jobs: bool = False,
    is_quick: bool = True,
) -> Callable[[Body], Body]:
    """Makes a case that only PyTorch has.

    Args:
        rows: of the specification that it comes from.
        worlds: where it runs.
        starts_jobs: whether it starts a job of copies.
        is_quick: False where tests of the package that run beside show the same.
    """
    only = ("torch",)
    return case(
        *rows,
        worlds=worlds,
        frameworks=only,
        quick_with=only if is_quick else (),
        starts_jobs=starts_jobs,
    )


def tensorflow_case(
    *rows: str,
    worlds: tuple[str, ...] = ("pipeline",),
    needs: tuple[str, ...] = (),
    starts_jobs: bool = False,
    is_quick: bool = True,
) -> Callable[[Body], Body]:
    """Makes a case that only TensorFlow has.

    Args:
        rows: of the specification that it comes from.
        worlds: where it runs.
        needs: modules that it imports besides those of the framework's package.
        starts_jobs: whether it starts a job of copies.
        is_quick: False where tests of the package that run beside show the same.
    """
    only = ("tensorflow",)
    return case(
        *rows,
        worlds=worlds,
        frameworks=only,
        quick_with=only if is_quick else (),
        needs=needs,
        starts_jobs=starts_jobs,
    )


def later(
    *rows: str,
    worlds: tuple[str, ...] = ("new",),
    frameworks: tuple[str, ...] = ("torch",),
    needs: tuple[str, ...] = (),
) -> Callable[[Body], Body]:
    """Keeps the place of a case whose feature is not there yet.

    The function asks for the feature. As soon as that is no longer refused the case fails, until a
    real one takes its place.
    """

    def register(body: Body) -> Body:
        add(Case(body.__name__, rows, worlds, frameworks, body, is_built=False, needs=needs))
        return body

    return register


def modules() -> list[str]:
    """Returns the names of the modules that have cases."""
    package = importlib.import_module("conformance.cases")
    return [each.name for each in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")]


def load(framework: str) -> dict[str, Case]:
    """Imports all cases; returns those of a framework by name."""
    for name in modules():
        importlib.import_module(name)
    return {name: each for name, each in CASES.items() if framework in each.frameworks}
