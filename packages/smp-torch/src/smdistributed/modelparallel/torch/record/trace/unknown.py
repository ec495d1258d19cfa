"""What stands in the place of something that is not computed yet: any use of it is an error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from smdistributed.modelparallel.common.errors import UnsupportedError


class Unknown:
    """Stands for something that has no value yet.

    Args:
        refusal: makes the error of who uses it.
    """

    def __init__(self, refusal: Callable[[], UnsupportedError]) -> None:
        object.__setattr__(self, "_refusal", refusal)

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise object.__getattribute__(self, "_refusal")()

    __getattr__ = __setattr__ = __call__ = __bool__ = __int__ = __float__ = __index__ = _refuse
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __hash__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = _refuse
    __rtruediv__ = __pow__ = __mod__ = __floordiv__ = __neg__ = __abs__ = __contains__ = _refuse
    __len__ = __iter__ = __getitem__ = __setitem__ = __str__ = __repr__ = __format__ = _refuse

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = next(each for each in args if isinstance(each, cls))
        found._refuse()
