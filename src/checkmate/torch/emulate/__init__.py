"""Emulation of a CUDA device for a traced step: kernels, autocast rules, allocator, workspace and time."""
