"""``python -m smdistributed.modelparallel.common.launcher`` is ``smprun``."""

from __future__ import annotations

import sys

from smdistributed.modelparallel.common.launcher.cli import main

if __name__ == "__main__":
    sys.exit(main())
