"""A generated population of small training scripts, each with Python state in some place.

A probe is a *place* where Python can keep a number, a way of *access* to it, a *moment* at which it
changes, and a *reader*: code between modules, or a module that is never split. Each is a small
script; see ``small_scripts``.
"""

from __future__ import annotations

import itertools
import textwrap
from dataclasses import dataclass
from typing import Any

from small_scripts import WIDTH, outcome_of
from torch import nn


@dataclass(frozen=True)
class Place:
    """Where a number is kept.

    Attributes:
        setup: code at the top of the script.
        read: an expression; ``self`` is the module that reads.
        put: a statement that stores ``value``; ``net`` is the model.
    """

    setup: str
    read: str
    put: str


PLACES = {
    "attribute": Place("", "self.factor", "target.factor = value"),
    "attribute of the class": Place("", "type(self).factor", "type(target).factor = value"),
    "computed name": Place("", "getattr(self, 'fac' + 'tor')", "setattr(target, 'factor', value)"),
    "vars": Place("", "vars(self)['factor']", "vars(target)['factor'] = value"),
    "nested object": Place(
        "class Box: pass\nBOX = Box(); BOX.inner = Box(); BOX.inner.factor = 1.0",
        "BOX.inner.factor",
        "BOX.inner.factor = value",
    ),
    "own list": Place("", "self.table[0]", "target.table[0] = value"),
    "slot": Place(
        "class Slots:\n    __slots__ = ('factor',)\nSLOTS = Slots(); SLOTS.factor = 1.0",
        "SLOTS.factor",
        "SLOTS.factor = value",
    ),
    "private slot": Place(
        "class Hidden:\n    __slots__ = ('__factor',)\nHIDDEN = Hidden(); "
        "HIDDEN._Hidden__factor = 1.0",
        "HIDDEN._Hidden__factor",
        "HIDDEN._Hidden__factor = value",
    ),
    "hidden slot": Place(
        "class Base:\n    __slots__ = ('factor',)\n"
        "class Slots(Base):\n    __slots__ = ('factor',)\n"
        "SLOTS = Slots(); Base.factor.__set__(SLOTS, 1.0)",
        "Base.factor.__get__(SLOTS)",
        "Base.factor.__set__(SLOTS, value)",
    ),
    "queue": Place(
        "import queue\nQUEUE = queue.SimpleQueue(); QUEUE.put(1.0)\n"
        "def first():\n    found = QUEUE.get(); QUEUE.put(found); return found",
        "first()",
        "QUEUE.get(), QUEUE.put(value)",
    ),
    "mapped memory": Place(
        "import mmap, struct\nMEMORY = mmap.mmap(-1, 8); MEMORY[:8] = struct.pack('d', 1.0)",
        "struct.unpack('d', MEMORY[:8])[0]",
        "MEMORY[:8] = struct.pack('d', value)",
    ),
    "pointer of C": Place(
        "import ctypes\nPOINTER = ctypes.pointer(ctypes.c_double(1.0))",
        "POINTER.contents.value",
        "POINTER.contents.value = value",
    ),
    "read-only view of an array": Place(
        "import numpy\nTABLE = numpy.ones(2); VIEW = TABLE[1:].view()\n"
        "VIEW.flags.writeable = False",
        "float(VIEW[0])",
        "TABLE[1] = value",
    ),
    "array of a class of one's own": Place(
        "import numpy\nclass Array(numpy.ndarray): pass\nARRAY = numpy.ones(1).view(Array)",
        "float(ARRAY[0])",
        "ARRAY[0] = value",
    ),
    "attribute of a parameter": Place(
        "def tensor(net): return (net if hasattr(net, 'weight') else net.third).weight",
        "getattr(tensor(self), 'factor', 1.0)",
        "tensor(target).factor = value",
    ),
    "name of a class": Place(
        "class Kind: pass",
        "0.1 * len(Kind.__name__)",
        "Kind.__name__ = 'K' * (int(abs(value) * 4) + 1)",
    ),
    "module of others": Place(
        "import textwrap; textwrap.factor = 1.0", "textwrap.factor", "textwrap.factor = value"
    ),
    "settings in a cache": Place(
        "import functools\n@functools.lru_cache\ndef settings(): return {'factor': 1.0}",
        "settings()['factor']",
        "settings()['factor'] = value",
    ),
    "class": Place("class Config:\n    factor = 1.0", "Config.factor", "Config.factor = value"),
    "metaclass": Place(
        "class Meta(type):\n    factor = 1.0\nclass Config(metaclass=Meta): pass",
        "Config.factor",
        "Meta.factor = value",
    ),
    "container of a class": Place(
        "class Config:\n    table = {'factor': [1.0]}",
        "Config.table['factor'][0]",
        "Config.table['factor'][0] = value",
    ),
    "closure": Place(
        "def make():\n    factor = 1.0\n    def get(): return factor\n"
        "    def set(value):\n        nonlocal factor\n        factor = value\n"
        "    return get, set\nget, set_ = make()",
        "get()",
        "set_(value)",
    ),
    "global": Place("FACTOR = 1.0", "FACTOR", "globals()['FACTOR'] = value"),
    "globals()": Place("FACTOR = 1.0", "globals()['FACTOR']", "globals()['FACTOR'] = value"),
    "default": Place(
        "def default(factor=1.0): return factor",
        "default()",
        "default.__defaults__ = (value,)",
    ),
    "keyword default": Place(
        "def default(*, factor=1.0): return factor",
        "default()",
        "default.__kwdefaults__['factor'] = value",
    ),
    "function attribute": Place(
        "def function(): return function.factor\nfunction.factor = 1.0",
        "function()",
        "function.factor = value",
    ),
    "code of a function": Place(
        "def function(): return 1.0",
        "function()",
        "function.__code__ = eval(f'lambda: {value!r}').__code__",
    ),
    "method of a class": Place(
        "class Maker:\n    def get(self): return 1.0\nMAKER = Maker()",
        "MAKER.get()",
        "Maker.get = lambda self: value",
    ),
    "shadowed method": Place(
        "class Maker:\n    def get(self): return 1.0\nMAKER = Maker()",
        "MAKER.get()",
        "MAKER.get = lambda: value",
    ),
    "module": Place(
        "import sys, types\nsettings = sys.modules['probe_settings'] = "
        "types.ModuleType('probe_settings')\nsettings.factor = 1.0",
        "settings.factor",
        "settings.factor = value",
    ),
    "import in a function": Place(
        "import sys, types\nsys.modules['probe_settings'] = types.ModuleType('probe_settings')\n"
        "sys.modules['probe_settings'].factor = 1.0\n"
        "def imported():\n    import probe_settings\n    return probe_settings.factor",
        "imported()",
        "sys.modules['probe_settings'].factor = value",
    ),
    "descriptor": Place(
        "class Descriptor:\n    value = 1.0\n    def __get__(self, obj, kind): return self.value\n"
        "DESCRIPTOR = Descriptor()\nclass Holder:\n    factor = DESCRIPTOR\nHOLDER = Holder()",
        "HOLDER.factor",
        "DESCRIPTOR.value = value",
    ),
    "property with a setter": Place(
        "class Holder:\n    _factor = 1.0\n    @property\n"
        "    def factor(self): return self._factor\n"
        "    @factor.setter\n    def factor(self, value): self._factor = value\nHOLDER = Holder()",
        "HOLDER.factor",
        "HOLDER.factor = value",
    ),
    "computed attribute": Place(
        "class Holder:\n    def __init__(self): self.data = {'factor': 1.0}\n"
        "    def __getattr__(self, name): return vars(self)['data'][name]\nHOLDER = Holder()",
        "HOLDER.factor",
        "HOLDER.data['factor'] = value",
    ),
    "dict": Place("TABLE = {'a': {'b': 1.0}}", "TABLE['a']['b']", "TABLE['a']['b'] = value"),
    "order of a dict": Place(
        "ORDER = {1.0: 0, 0.5: 0}",
        "next(iter(ORDER))",
        "first = next(iter(ORDER)); ORDER.pop(first); ORDER[first] = 0",
    ),
    "order of an OrderedDict": Place(
        "import collections\nORDER = collections.OrderedDict({1.0: 0, 0.5: 0})",
        "next(iter(ORDER))",
        "ORDER.move_to_end(next(iter(ORDER)))",
    ),
    "factory of a dict": Place(
        "import collections\nTABLE = collections.defaultdict(lambda: 1.0)",
        "TABLE.default_factory()",
        "TABLE.default_factory = lambda: value",
    ),
    "object in a set": Place(
        "class Box: pass\nBOX = Box(); BOX.factor = 1.0\nBOXES = {BOX}",
        "sum(each.factor for each in BOXES)",
        "BOX.factor = value",
    ),
    "module in an object": Place(
        "import sys, types\nsys.modules['probe_settings'] = types.ModuleType('probe_settings')\n"
        "sys.modules['probe_settings'].factor = 1.0\nclass Holder: pass\n"
        "HOLDER = Holder(); HOLDER.settings = sys.modules['probe_settings']",
        "HOLDER.settings.factor",
        "sys.modules['probe_settings'].factor = value",
    ),
    "list": Place("ITEMS = [0.0, 1.0]", "ITEMS[-1]", "ITEMS[-1] = value"),
    "deque": Place(
        "import collections\nITEMS = collections.deque([1.0], maxlen=1)",
        "ITEMS[0]",
        "ITEMS.append(value)",
    ),
    "UserDict": Place(
        "import collections\nTABLE = collections.UserDict(factor=1.0)",
        "TABLE['factor']",
        "TABLE['factor'] = value",
    ),
    "array": Place("import numpy\nARRAY = numpy.ones(2)", "float(ARRAY[1])", "ARRAY[1] = value"),
    "environment": Place(
        "import os\nos.environ['PROBE_FACTOR'] = '1.0'",
        "float(os.environ['PROBE_FACTOR'])",
        "os.environ['PROBE_FACTOR'] = repr(value)",
    ),
    "registry": Place(
        "REGISTRY = {}\ndef register(function): REGISTRY['scale'] = function\n"
        "register(lambda: 1.0)",
        "REGISTRY['scale']()",
        "register(lambda: value)",
    ),
    "singleton": Place(
        "class Args:\n    factor = 1.0\n_args = Args()\ndef get_args(): return _args",
        "get_args().factor",
        "get_args().factor = value",
    ),
    "iterator": Place(
        "import itertools\nclass Stream:\n    def __init__(self): self.rest = iter(())\n"
        "STREAM = Stream(); STREAM.rest = itertools.repeat(1.0)",
        "next(STREAM.rest)",
        "STREAM.rest = itertools.repeat(value)",
    ),
    "generator": Place(
        "SOURCE = [1.0]\ndef forever():\n    while True: yield SOURCE[0]\nGENERATOR = forever()",
        "next(GENERATOR)",
        "SOURCE[0] = value",
    ),
    "weak reference": Place(
        "import weakref\nclass Box: pass\nBOX = Box(); BOX.factor = 1.0\nREF = weakref.ref(BOX)",
        "REF().factor",
        "BOX.factor = value",
    ),
    "context variable": Place(
        "import contextvars\nVARIABLE = contextvars.ContextVar('factor', default=1.0)",
        "VARIABLE.get()",
        "VARIABLE.set(value)",
    ),
    "thread local": Place(
        "import threading\nLOCAL = threading.local(); LOCAL.factor = 1.0",
        "LOCAL.factor",
        "LOCAL.factor = value",
    ),
    "enum member": Place(
        "import enum\nclass Mode(enum.Enum):\n    TRAIN = 1\nMode.TRAIN.factor = 1.0",
        "Mode.TRAIN.factor",
        "Mode.TRAIN.factor = value",
    ),
    "logger": Place(
        "import logging\nLOGGER = logging.getLogger('probe.population')\nLOGGER.setLevel(10)",
        "LOGGER.level / 10",
        "LOGGER.setLevel(int(10 * value))",
    ),
    "tensor": Place("CONSTANT = torch.tensor(1.0)", "CONSTANT", "CONSTANT.fill_(value)"),
    "tensor replaced": Place(
        "BOX = {'factor': torch.tensor(1.0)}",
        "BOX['factor']",
        "BOX['factor'] = torch.tensor(value)",
    ),
    "number of a tensor": Place(
        "CONSTANT = torch.tensor([1.0])", "CONSTANT.item()", "CONSTANT[0] = value"
    ),
    "random generator": Place(
        "import random\nRANDOM = random.Random(0)", "(0.5 + RANDOM.random())", "RANDOM.seed(value)"
    ),
    "counter": Place(
        "class Counter:\n    count = 0\n    def __call__(self):\n        self.count += 1\n"
        "        return 1.0 + self.count % 3\nCOUNTER = Counter()",
        "COUNTER()",
        "COUNTER.count += 1",
    ),
    "partial": Place(
        "import functools\nBOX = [functools.partial(float, 1.0)]",
        "BOX[0]()",
        "BOX[0] = functools.partial(float, value)",
    ),
    "attribute of a partial": Place(
        "import functools\nPART = functools.partial(float); PART.factor = 1.0",
        "PART.factor",
        "PART.factor = value",
    ),
    "attribute of a list": Place(
        "class Items(list): pass\nITEMS = Items([1]); ITEMS.factor = 1.0",
        "ITEMS.factor",
        "ITEMS.factor = value",
    ),
    "attribute of a text": Place(
        "class Text(str): pass\nTEXT = Text('a'); TEXT.factor = 1.0",
        "TEXT.factor",
        "TEXT.factor = value",
    ),
    "attribute of a tensor": Place(
        "MARKED = torch.ones(1); MARKED.factor = 1.0", "MARKED.factor", "MARKED.factor = value"
    ),
    "tensor in a closure": Place(
        "def make():\n    factor = torch.ones(4)\n    def get(): return factor\n"
        "    def set(value):\n        nonlocal factor\n        factor = torch.full((4,), value)\n"
        "    return get, set\nget, set_ = make()",
        "get()[0].item()",
        "set_(value)",
    ),
    "bytearray": Place(
        "BYTES = bytearray([10])", "(BYTES[0] / 10)", "BYTES[0] = int(10 * value) % 256"
    ),
    "array of C": Place(
        "import array\nNUMBERS = array.array('d', [1.0])", "NUMBERS[0]", "NUMBERS[0] = value"
    ),
    "number of C": Place(
        "import ctypes\nNUMBER = ctypes.c_double(1.0)", "NUMBER.value", "NUMBER.value = value"
    ),
    "array of objects": Place(
        "import numpy\nOBJECTS = numpy.array([1.0], dtype=object)",
        "OBJECTS[0]",
        "OBJECTS[0] = value",
    ),
    "list in an array": Place(
        "import numpy\nOBJECTS = numpy.empty(1, dtype=object); OBJECTS[0] = [1.0]",
        "OBJECTS[0][0]",
        "OBJECTS[0][0] = value",
    ),
    "exception": Place("ERROR = ValueError(1.0)", "ERROR.args[0]", "ERROR.args = (value,)"),
    "text written": Place(
        "import io\nTEXT = io.StringIO()",
        "float(TEXT.getvalue()[-8:] or 1.0)",
        "TEXT.write(f'{value:8.4f}')",
    ),
    "place in a file": Place(
        "import tempfile\nFILE = tempfile.TemporaryFile(); FILE.write(bytes(9999)); FILE.seek(0)",
        "(1.0 + FILE.tell() % 3)",
        "FILE.read(1)",
    ),
    "view of a dict": Place(
        "import types\nTABLE = {'factor': 1.0}\nVIEW = types.MappingProxyType(TABLE)\ndel types\n"
        "def store(value, table=TABLE): table['factor'] = value\ndel TABLE",
        "VIEW['factor']",
        "store(value)",
    ),
    "values of a dict": Place(
        "def make():\n    table = {'factor': 1.0}\n    return table.values(), table.__setitem__\n"
        "VALUES_OF, store = make()",
        "next(iter(VALUES_OF))",
        "store('factor', value)",
    ),
    "method of a dict": Place(
        "def make():\n    table = {'factor': 1.0}\n    return table.get, table.__setitem__\n"
        "get, store = make()",
        "get('factor')",
        "store('factor', value)",
    ),
    "map": Place("MAP = map(float, [1, 2, 3] * 999)", "next(MAP)", "next(MAP)"),
    "enumeration": Place(
        "NUMBERED = enumerate([0] * 9999)", "(1.0 + next(NUMBERED)[0] % 3)", "next(NUMBERED)"
    ),
    "iterator of a class": Place(
        "class Count:\n    count = 0\n    def __next__(self):\n        self.count += 1\n"
        "        return 1.0 + self.count % 3\nCOUNT = Count()",
        "next(COUNT)",
        "next(COUNT)",
    ),
}

#: Where a tensor may be kept: code at the top, how it is read, how another is put in its place.
_HOLDERS = {
    "a dict": ("BOX = {'factor': torch.tensor(1.0)}", "BOX['factor']", "BOX['factor'] = {new}"),
    "a list": ("BOX = [torch.tensor(1.0)]", "BOX[0]", "BOX[0] = {new}"),
    "a nested list": ("BOX = {'a': [torch.tensor(1.0)]}", "BOX['a'][0]", "BOX['a'][:] = [{new}]"),
    "a tuple": ("BOX = [(torch.tensor(1.0), 0)]", "BOX[0][0]", "BOX[0] = ({new}, 0)"),
    "a deque": (
        "import collections\nBOX = collections.deque([torch.tensor(1.0)], maxlen=1)",
        "BOX[0]",
        "BOX.append({new})",
    ),
    "a global": ("FACTOR = torch.tensor(1.0)", "FACTOR", "globals().update(FACTOR={new})"),
    "an object": (
        "class Box: pass\nBOX = Box(); BOX.factor = torch.tensor(1.0)",
        "BOX.factor",
        "BOX.factor = {new}",
    ),
    "a class": ("class Box:\n    factor = torch.tensor(1.0)", "Box.factor", "Box.factor = {new}"),
    "a slot": (
        "class Box:\n    __slots__ = ('factor',)\nBOX = Box(); BOX.factor = torch.tensor(1.0)",
        "BOX.factor",
        "BOX.factor = {new}",
    ),
    "a closure": (
        "def make():\n    factor = torch.tensor(1.0)\n    def get(): return factor\n"
        "    def set(new):\n        nonlocal factor\n        factor = new\n    return get, set\n"
        "get, set_ = make()",
        "get()",
        "set_({new})",
    ),
    "a context variable": (
        "import contextvars\nBOX = contextvars.ContextVar('box'); BOX.set(torch.tensor(1.0))",
        "BOX.get()",
        "BOX.set({new})",
    ),
    "a thread's own": (
        "import threading\nBOX = threading.local(); BOX.factor = torch.tensor(1.0)",
        "BOX.factor",
        "BOX.factor = {new}",
    ),
    "a default": (
        "def get(factor=torch.tensor(1.0)): return factor",
        "get()",
        "get.__defaults__ = ({new},)",
    ),
    "a partial": (
        "import functools\nBOX = [functools.partial(torch.mul, torch.tensor(1.0))]",
        "BOX[0](1.0)",
        "BOX[0] = functools.partial(torch.mul, {new})",
    ),
    "an attribute": ("", "(0.0 + self.factor)", "target.factor = {new}"),
    "a list of the module": ("", "(0.0 + self.table[0])", "target.table[0] = {new}"),
}
#: How it changes: what is put, or what is done to it in place.
_NEW = {
    "made anew": "torch.tensor(1.0) * value",
    "made from data": "torch.tensor([value]).sum()",
    "computed": "torch.as_tensor({read}) * 0.5 + value",
    "copied": "torch.as_tensor({read}).clone().add_(value)",
}


def _tensors() -> dict[str, Place]:
    """Returns the places of tensors: each holder, each way to change."""
    places = {}
    for (holder, (setup, read, put)), (way, new) in itertools.product(
        _HOLDERS.items(), _NEW.items()
    ):
        # The code that reads belongs to a module, the code that puts to a model.
        new = new.format(read=read.replace("self.", "target."))
        places[f"tensor in {holder}, {way}"] = Place(setup, read, put.format(new=new))
    return places


TENSORS = _tensors()

#: How the reader comes by the number: code at the top of the script, code in its class, expression.
ACCESSES = {
    "direct": ("", "", "{read}"),
    "function": ("def fetch(self):\n    return {read}", "", "fetch(self)"),
    "property": ("", "@property\ndef value(self):\n    return {read}", "self.value"),
    "method": ("", "def value(self):\n    return {read}", "self.value()"),
    "comprehension": ("", "", "[{read} for _ in range(1)][0]"),
    "getattr": ("", "def value(self):\n    return {read}", "getattr(self, 'val' + 'ue')()"),
    "decorator": (
        "import functools\ndef same(function):\n    @functools.wraps(function)\n"
        "    def wrapper(*args): return function(*args)\n    return wrapper\n"
        "@same\ndef fetch(self):\n    return {read}",
        "",
        "fetch(self)",
    ),
    "lambda": ("LAMBDAS = dict(fetch=lambda self: {read})", "", "LAMBDAS['fetch'](self)"),
}
MOMENTS = ("between steps", "between microbatches", "inside a step", "inside the reader")
READERS = ("glue", "leaf")
#: What a module that stays whole does to the number that it reads.
_MOVE = "target, value = self, 0.5 * ({read}) + 0.7; {put}"

_SCRIPT = """
import torch
from torch import nn

{setup}
{access}

class Leaf(nn.Linear):
    factor = 1.0

    def __init__(self):
        super().__init__({width}, {width})
        self.factor = 1.0
        self.table = [1.0]
{leaf_members}
    def forward(self, x):
        {leaf_move}
        return super().forward(x){leaf_use}

class Net(nn.Module):
    factor = 1.0

    def __init__(self):
        super().__init__()
        self.first, self.second = Leaf(), Leaf()
        self.third, self.fourth = nn.Linear({width}, {width}), nn.Linear({width}, {width})
        self.factor = 1.0
        self.table = [1.0]
{net_members}
    def forward(self, x):
        x = torch.tanh(self.first(x)){use}
        {inside}
        x = torch.tanh(self.second(x)){use}
        return self.fourth(torch.tanh(self.third(x)))

def put(net, value):
    for target in {targets}:
        {put}

VALUES = iter([1.5, 0.5, -0.0, 2.0, 0.25] * 20)

def body(model, x, y):
    {each}
    loss = ((model(x) - y) ** 2).mean()
    model.backward(loss)
    return loss
"""


@dataclass(frozen=True)
class Probe:
    """One script."""

    place: str
    access: str
    moment: str
    reader: str

    def __str__(self) -> str:
        return f"{self.place}, {self.access}, {self.moment}, read by {self.reader}"

    def script(self) -> str:
        """Returns its code."""
        place = {**PLACES, **TENSORS}[self.place]
        access, members, expression = (
            each.format(read=place.read) for each in ACCESSES[self.access]
        )
        members = textwrap.indent(members, "    ")
        use = f" * ({expression})"
        in_leaf = self.reader == "leaf"
        moves = self.moment == "inside the reader"
        change = "put(NET, next(VALUES))"
        return _SCRIPT.format(
            setup=place.setup,
            access=access,
            width=WIDTH,
            leaf_members=members if in_leaf else "",
            leaf_move=_MOVE.format(read=expression, put=place.put) if moves else "pass",
            leaf_use=use if in_leaf else "",
            net_members="" if in_leaf else members,
            use="" if in_leaf else use,
            inside=change if self.moment == "inside a step" else "pass",
            each=change if self.moment == "between microbatches" else "pass",
            put=place.put,
            targets="(net.first, net.second)" if in_leaf else "(net,)",
        )


def probes() -> list[Probe]:
    """Returns the population: each place at each moment for each reader, accesses in turn."""
    accesses = itertools.cycle(ACCESSES)
    found = []
    for place, moment, reader in itertools.product(PLACES, MOMENTS, READERS):
        if (moment, reader) == ("inside the reader", "glue"):
            continue  # the same as inside a step
        number = 3 if reader == "glue" else 1
        found += [Probe(place, next(accesses), moment, reader) for _ in range(number)]
    for place, moment, reader in itertools.product(TENSORS, MOMENTS, READERS):
        if (moment, reader) != ("inside the reader", "glue"):
            found.append(Probe(place, next(accesses), moment, reader))
    return found


def outcome(probe: Probe) -> str:
    """Runs a probe in this job; returns what became of it; see ``outcome_of``."""

    def between(names: dict[str, Any], net: nn.Module, model: Any, number: int) -> None:
        if probe.moment == "between steps":
            names["put"](net, next(names["VALUES"]))

    return outcome_of(probe.script(), between)
