"""What the tests of all packages share."""

pytest_plugins = ["smdistributed.modelparallel.common.testing.plugin"]
