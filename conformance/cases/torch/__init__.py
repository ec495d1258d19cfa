"""What PyTorch alone promises."""
