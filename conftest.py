"""What the tests of all packages share."""

import signal

pytest_plugins = ["smdistributed.modelparallel.common.testing.plugin"]

# A shell that starts pytest in the background has it ignore Ctrl-C, and all that it starts.
signal.signal(signal.SIGINT, signal.default_int_handler)
