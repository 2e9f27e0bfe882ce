"""Best-first search over what is live, exact where few states are within reach."""
