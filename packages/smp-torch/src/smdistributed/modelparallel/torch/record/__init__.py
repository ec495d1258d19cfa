"""Recording the user's code on fakes: what it computes, and what it depends on."""
