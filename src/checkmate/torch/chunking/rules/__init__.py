"""Rules: the slices of its inputs that give a slice of an op's output."""
