"""The configuration: every parameter, declared once, read, checked and resolved."""

from smdistributed.modelparallel.common.config.loading import (
    Config,
    ConfigWarning,
    Explained,
    Framework,
    load,
)

__all__ = ["Config", "ConfigWarning", "Explained", "Framework", "load"]
