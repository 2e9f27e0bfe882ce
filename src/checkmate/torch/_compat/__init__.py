"""Private names of torch, one file a subsystem; nothing else in this package imports them."""
