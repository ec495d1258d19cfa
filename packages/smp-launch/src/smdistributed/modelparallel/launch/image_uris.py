"""The names of images, for what asks for them; here an image stands for this Python environment."""

from __future__ import annotations

from smdistributed.modelparallel.common.errors import UnsupportedError
from smdistributed.modelparallel.launch.request import machines
from smdistributed.modelparallel.launch.request.naming import framework_image, parse_image

__all__ = ["retrieve"]


def retrieve(
    framework: str,
    region: str | None = None,
    version: str | None = None,
    py_version: str | None = None,
    instance_type: str | None = None,
    image_scope: str | None = None,
    **_: object,
) -> str:
    """Returns the name of a framework's image.

    Args:
        framework: such as ``pytorch``.
        region: without effect; there is one.
        version: of the framework.
        py_version: such as ``py310``.
        instance_type: whose GPUs say for what it is.
        image_scope: ``training`` (default) or ``inference``.

    Raises:
        UnsupportedError: there is no such framework here.
    """
    repository = f"{framework}-{image_scope or 'training'}"
    image = parse_image(repository)
    if image.served_framework is None:
        raise UnsupportedError(
            "image_uris.retrieve has images of pytorch and tensorflow, for training and inference; "
            f"got {framework!r} for {image_scope or 'training'}: use one of these."
        )
    gpus = machines.num_gpus(instance_type) if instance_type else 0
    return framework_image(repository, version, py_version, is_gpu=bool(gpus))
