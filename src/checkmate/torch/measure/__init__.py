"""Time and memory of an op, an optimizer or a whole step, measured on the device or estimated."""
