"""What a ``tf.train.Checkpoint`` holds, by names that do not depend on how a model is cut."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import tensorflow as tf

from smdistributed.modelparallel.common.errors import NotPartitionedError, UnsupportedError
from smdistributed.modelparallel.tensorflow.checkpoint.numbered import renumbered
from smdistributed.modelparallel.tensorflow.compat import keras
from smdistributed.modelparallel.tensorflow.compat.isolation import apart
from smdistributed.modelparallel.tensorflow.model.distributed import DistributedModel
from smdistributed.modelparallel.tensorflow.parameters.variables import is_here


class CheckpointNames:
    """Names the variables of a checkpoint that live in this process.

    A variable of a model is named by its path of layers, numbered where two have the same; state
    that an optimizer has of it by that name; other variables by where they are in the checkpoint.

    Args:
        checkpoint: to be named.
    """

    def __init__(self, checkpoint: Any) -> None:
        self._children = _children(checkpoint)
        self._models = {
            name: child
            for name, child in self._children.items()
            if isinstance(child, DistributedModel)
        }

    @functools.cached_property
    def _names(self) -> dict[int, str]:
        """Names by ``id`` of TensorFlow's variable, of the models."""
        names: dict[int, str] = {}
        for name, model in self._models.items():
            names |= _names_of(name, model)
        return names

    def leftover(self, saved: Collection[str], taken: Collection[str]) -> list[str]:
        """Returns the names of saved values that have a place in this checkpoint but no taker.

        Those of whole parts that it does not have (the optimizer, say, where only the model is
        restored) are left alone, and so is what an optimizer keeps of a variable that it does not
        train any more.

        Args:
            saved: all names.
            taken: those that some process takes.
        """
        slots = {tuple(name.split("/", 2)[:2]) for name in taken}
        models = set(self._names.values())
        found = []
        for name in sorted(set(saved) - set(taken)):
            part = name.split("/", 2)
            is_frozen = tuple(part[:2]) in slots and part[-1] in models
            if part[0] in self._children and not is_frozen:
                found.append(name)
        return found

    def renumbered(self, saved: Collection[str]) -> dict[str, str]:
        """Returns the names of saved values by those that they have here, where these differ.

        Args:
            saved: all names.
        """
        of_models = [name for name in saved if name.split("/", 1)[0] in self._models]
        automatic = {
            name for model in self._models.values() for name in keras.automatic_names(model)
        }
        found = renumbered(list(self._names.values()), of_models, automatic)
        by_saved = {there: here for here, there in found.items()}
        for name in saved:
            *slot, variable = name.split("/", 2)
            if variable in by_saved:
                found["/".join([*slot, by_saved[variable]])] = name
        return found

    @property
    def are_partitioned(self) -> bool:
        """Whether all models in it are."""
        return all(model._smp_engine.is_partitioned for model in self._models.values())

    def variables(self) -> Iterator[tuple[str, Any]]:
        """Yields name and TensorFlow's variable, for those of this process.

        Shape: whole variables: a variable lives on one partition.

        Raises:
            NotPartitionedError: a model is not partitioned.
            UnsupportedError: something in the checkpoint cannot be saved.
        """
        names = self._names
        for name, child in self._children.items():
            if isinstance(child, DistributedModel):
                for variable in filter(is_here, map(keras.variable_of, child.variables)):
                    yield names[id(variable)], variable
            elif is_optimizer(child):
                yield from self._optimizer(name, child)
            else:
                for path, variable in self._others(name, child):
                    yield path, keras.variable_of(variable)

    def without_models(self) -> Iterator[tuple[str, Any]]:
        """Yields what of ``variables`` is of no model, nor about a variable of one."""
        for name, child in self._children.items():
            if name in self._models:
                continue
            if is_optimizer(child):
                yield from self._counts(name, child)
            else:
                for path, variable in self._others(name, child):
                    yield path, keras.variable_of(variable)

    def local(self) -> dict[str, Any]:
        """Returns those of ``trained`` that live in this process."""
        found = self.trained()
        return {name: found[name] for name in found if is_here(found[name])}

    def trained(self) -> dict[str, Any]:
        """Returns what optimizers can train, as Keras has it.

        These are variables of the models, wherever they live, and those that are no model's.
        """
        found = {
            self._names[id(keras.variable_of(variable))]: variable
            for model in self._models.values()
            for variable in model.trainable_variables
            if id(keras.variable_of(variable)) in self._names
        }
        for name, child in self._children.items():
            if name not in self._models and not is_optimizer(child):
                found |= {path: each for path, each in self._others(name, child) if each.trainable}
        return found

    def _optimizer(self, name: str, optimizer: Any) -> Iterator[tuple[str, Any]]:
        slots = keras.optimizer_slots(optimizer)
        kept: dict[int, Any] = {}
        for key, variable in self.local().items():
            place = keras.slot_key(optimizer, variable)
            for slot, own in slots.items():
                if place in own:
                    kept[id(own[place])] = own[place]
                    yield f"{name}/{slot}/{key}", keras.variable_of(own[place])
        of_slots = {id(each): each for own in slots.values() for each in own.values()}
        self._refuse_strangers(name, [of_slots[key] for key in of_slots.keys() - kept.keys()])
        yield from self._counts(name, optimizer)

    def _counts(self, name: str, optimizer: Any) -> Iterator[tuple[str, Any]]:
        """Yields what an optimizer keeps of all variables together."""
        slots = keras.optimizer_slots(optimizer)
        of_slots = {id(each) for own in slots.values() for each in own.values()}
        for variable in keras.optimizer_variables(optimizer):
            if id(variable) not in of_slots:
                yield (
                    f"{name}/{keras.path_of(variable).rsplit('/', maxsplit=1)[-1]}",
                    keras.variable_of(variable),
                )

    def _refuse_strangers(self, name: str, slots: Iterable[Any]) -> None:
        """Raises if a slot is about a variable that the checkpoint has nowhere.

        One about a frozen variable of a model is left out; see ``leftover``.
        """
        for slot in slots:
            trained = getattr(keras.variable_of(slot), "_smp_slot_of", None)
            if trained is None or id(trained) in self._names:
                continue
            raise UnsupportedError(
                f"the checkpoint has an optimizer ({name}) but not {trained.name}, which it "
                "trains, and of which it keeps state: put the model, or the variable, into the "
                "same tf.train.Checkpoint."
            )

    def _others(self, name: str, child: Any) -> Iterator[tuple[str, Any]]:
        if isinstance(child, tf.data.Iterator):
            raise UnsupportedError(
                f"the checkpoint has an iterator of a dataset ({name}), which cannot be saved: "
                "count the steps in a variable, and skip as many batches after a restart."
            )
        seen: set[int] = set()
        stack = [(name, child)]
        while stack:
            path, one = stack.pop()
            if id(one) in seen:
                continue
            seen.add(id(one))
            if isinstance(one, tf.Variable) or (
                keras.IS_KERAS_3 and isinstance(one, tf.keras.Variable)
            ):
                yield path, one
                continue
            stack += [(f"{path}/{key}", each) for key, each in sorted(_children(one).items())]


def is_optimizer(value: Any) -> bool:
    """Tells whether a value is an optimizer of Keras, new or legacy."""
    kinds: tuple[Any, ...] = (tf.keras.optimizers.Optimizer,)
    legacy = getattr(getattr(tf.keras.optimizers, "legacy", None), "Optimizer", None)
    if isinstance(legacy, type):
        kinds += (legacy,)
    return isinstance(value, kinds)


def build_optimizers(checkpoint: Any, names: Collection[str]) -> None:
    """Makes optimizers of a checkpoint have the state that a saved one has values for.

    They have it from their first update on; before that it is made here.
    """
    trained = CheckpointNames(checkpoint).trained()
    for name, child in _children(checkpoint).items():
        if not is_optimizer(child):
            continue
        parts = [each.split("/", 2) for each in names if each.startswith(f"{name}/")]
        if not parts:
            continue
        # An optimizer may keep nothing of each variable, and yet a scale of losses.
        known = {part[2] for part in parts if len(part) == 3} or trained.keys()
        own = [trained[key] for key in trained if key in known]
        # A tf.function that saw it would be made once more, in the processes that have some.
        apart(functools.partial(keras.build_optimizer, child, own))


def _names_of(name: str, model: Any) -> dict[int, str]:
    engine = model._smp_engine
    if not engine.is_partitioned:
        raise NotPartitionedError(
            f"the model {model.name} has no variables to be saved or restored before it is "
            "partitioned, which the first call of a step function does: save after that."
        )
    _, every = engine.everywhere()
    counts: Counter[str] = Counter()
    names: dict[int, str] = {}
    for variable in every:
        path = keras.path_of(variable)
        number = counts[path]
        counts[path] += 1
        names[id(keras.variable_of(variable))] = f"{name}/{path}" + (f"#{number}" if number else "")
    return names


def _children(value: Any) -> Mapping[str, Any]:
    children: Mapping[str, Any] = tf.train.TrackableView.children(value)
    return children
