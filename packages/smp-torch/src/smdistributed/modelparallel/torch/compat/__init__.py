"""What other software leans on: names that are not built yet, private ways of PyTorch."""
