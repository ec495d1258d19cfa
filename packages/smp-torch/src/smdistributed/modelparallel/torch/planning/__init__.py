"""From a recording to what each rank does, and when."""
