"""Half precision and where an optimizer's state lies: masters, their update, the loss scale."""
