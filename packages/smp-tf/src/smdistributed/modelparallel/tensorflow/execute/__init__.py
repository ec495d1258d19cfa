"""What this process adds to the graph of a step: programs, links, and their order."""
