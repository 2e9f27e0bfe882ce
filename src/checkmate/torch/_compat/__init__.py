"""Private names of torch, one module per subsystem of torch; nothing else in this package imports ``torch._*``.

A release of torch that moves or changes one of them breaks here, and only here. Read and tested in torch 2.13.0; the
declared minimum is in pyproject.toml.
"""
