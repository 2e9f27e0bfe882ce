"""Private names of torch, one module per subsystem of torch; nothing else in this package imports ``torch._*``.

A release of torch that moves or changes one of them breaks here, and only here. Tested with torch 2.13.0; 2.11 is the
declared minimum.
"""
