"""Runs a notebook as it is, by nbclient: what it prints is shown while it runs.

The kernel is this Python, whichever one the notebook names, and loads this package's extension
before the first cell.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

from smdistributed.modelparallel.common.errors import ConfigError, UnsupportedError
from smdistributed.modelparallel.launch.exceptions import LaunchError

#: This Python's, whose packages the notebook shall find.
_KERNEL = "python3"
_EXTENSION = "smdistributed.modelparallel.launch"
_STREAMS = {"stdout": sys.stdout, "stderr": sys.stderr}


def run(path: Path, kept: Path | None = None, *, with_names: bool = True) -> None:
    """Runs all cells of a notebook, in its folder.

    Args:
        path: of the notebook.
        kept: where the notebook goes with what its cells gave; None to keep nothing.
        with_names: whether ``import sagemaker`` means this package.

    Raises:
        ConfigError: it is no notebook.
        UnsupportedError: what runs notebooks is not installed.
        LaunchError: a cell failed; its traceback is shown.
    """
    try:
        import nbclient
        import nbformat
        from nbclient.exceptions import CellExecutionError, DeadKernelError
    except ImportError as error:
        raise UnsupportedError(
            f"a notebook needs {error.name}, which is not installed: pip install "
            "'smp-launch[notebooks]'."
        ) from None

    class Client(nbclient.NotebookClient):  # type: ignore[misc]
        """Shows what comes from the kernel."""

        def process_message(self, msg: Any, cell: Any, cell_index: int) -> Any:
            _show(msg["msg_type"], msg["content"])
            return super().process_message(msg, cell, cell_index)

    try:
        notebook = nbformat.read(path, as_version=4)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} must be a notebook; {error}: correct it.") from None
    arguments = [f"--InteractiveShellApp.extra_extensions={_EXTENSION}"] if with_names else []
    client = Client(
        notebook,
        timeout=None,
        kernel_name=_KERNEL,
        extra_arguments=arguments,
        resources={"metadata": {"path": str(path.absolute().parent)}},
    )
    try:
        with tempfile.TemporaryDirectory(prefix="smp-") as place:
            kernel = client.create_kernel_manager()
            # Sockets of a private folder: a kernel runs what it is sent.
            kernel.transport = "ipc"
            kernel.connection_file = str(Path(place, "kernel.json"))
            client.execute()
    except CellExecutionError as error:
        # The traceback has been shown as it came.
        raise LaunchError(f"{path.name}: a cell failed: {error.ename}: {error.evalue}") from None
    except DeadKernelError as error:
        raise LaunchError(f"{path.name}: the process of the notebook ended: {error}") from None
    finally:
        if kept is not None:
            nbformat.write(notebook, kept)


def _show(kind: str, content: Any) -> None:
    """Prints what a cell gives, as a terminal can show it."""
    if kind == "stream":
        stream = _STREAMS[content["name"]]
        stream.write(content["text"])
        stream.flush()
    elif kind in ("execute_result", "display_data"):
        print(content["data"].get("text/plain", ""), flush=True)
    elif kind == "error":
        print(*content["traceback"], sep="\n", file=sys.stderr, flush=True)
