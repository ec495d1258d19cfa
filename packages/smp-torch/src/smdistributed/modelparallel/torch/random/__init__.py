"""Random numbers that do not depend on how the model is partitioned."""
