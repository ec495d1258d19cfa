"""What the memory of a rank's device holds, as data and as a table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from smdistributed.modelparallel.torch.device_memory.kinds import ACTIVATIONS

_UNITS = ("B", "KiB", "MiB", "GiB")


@dataclass(frozen=True)
class MemoryReport:
    """The memory of the device that a rank computes on; sizes are bytes.

    Attributes:
        rank: global rank of the process.
        device: that it computes on.
        capacity: of the device; of the whole host, if that is the device.
        kinds: what is in use now, by kind: ``parameters`` (weights and buffers, of shards the own
            ones), ``gathered`` (from shards, to compute with), ``gradients`` (with their sums and
            buckets), ``optimizer`` (masters included), ``other tensors`` (activations, and what a
            script keeps), ``captured passes`` (what CUDA graphs keep), ``windows`` (what other
            GPUs read and write), ``unused`` (what PyTorch's allocator holds besides), and
            ``outside PyTorch`` (NCCL, kernels, other processes). On a host ``other tensors`` are
            all else that the process keeps in memory.
        expected: what training will need of a kind, where it is known and more than now. When a
            step has been recorded, ``activations`` is what its passes will hold at their fullest:
            activations that wait for their backward passes, what a pass makes on its way, and
            what goes between ranks. (In use, that is among ``other tensors``.) ``gathered`` has
            gradients of shards on their way, too.
        most: that tensors have taken on a GPU since ``torch.cuda.reset_peak_memory_stats``, or the
            process on a host.
    """

    rank: int
    device: str
    capacity: int
    kinds: Mapping[str, int]
    most: int
    expected: Mapping[str, int] = field(default_factory=dict)

    @property
    def total(self) -> int:
        """All that is in use now."""
        return sum(self.kinds.values())

    @property
    def expected_total(self) -> int:
        """All that is known to be in use in training; without activations while they are not."""
        return self.total + sum(
            max(0, size - self.kinds.get(kind, 0)) for kind, size in self.expected.items()
        )

    def __str__(self) -> str:
        """A table: kinds with what is in use now, and where it differs, in training."""
        rows = [(kind, text_of(size), self._coming(kind)) for kind, size in self.kinds.items()]
        rows += [(kind, "", self._coming(kind)) for kind in self.expected if kind not in self.kinds]
        rows.append(("in all", text_of(self.total), self._of_all()))
        rows.append(("at most so far", text_of(self.most), ""))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            f"  {kind:<{widths[0]}}  {now:>{widths[1]}}  {coming}".rstrip()
            for kind, now, coming in rows
        ]
        return "\n".join(
            [f"memory of rank {self.rank} on {self.device}, {text_of(self.capacity)}", *lines]
        )

    def _coming(self, kind: str) -> str:
        return f"{text_of(self.expected[kind])} in training" if kind in self.expected else ""

    def _of_all(self) -> str:
        if not self.expected:
            return ""
        total = f"{text_of(self.expected_total)} in training"
        return total if ACTIVATIONS in self.expected else f"{total}, and activations"


def text_of(num_bytes: float) -> str:
    """Returns a size as text, such as ``3.1 GiB``."""
    for unit in _UNITS:
        if abs(num_bytes) < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"
