"""Who runs a job: hands its folder over, tells whether it still runs, and ends it."""
