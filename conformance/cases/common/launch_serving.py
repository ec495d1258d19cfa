"""Models behind endpoints."""

from __future__ import annotations

from conformance.adapters.base import Adapter
from conformance.bench import bench
from conformance.registry import later
from conformance.worlds import FRAMEWORKS


@later(
    "launch.deploy.endpoint",
    "launch.deploy.two_kinds",
    "launch.deploy.predictor",
    "launch.deploy.accelerators",
    frameworks=FRAMEWORKS,
)
def a_model_is_served(adapter: Adapter) -> None:
    with bench(adapter) as place:
        place.make().deploy(initial_instance_count=1, instance_type="local")
