"""Tensors of which ranks have parts: between two steps each stands for the whole one."""
