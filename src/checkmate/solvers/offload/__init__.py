"""Plans that both copy values to the host and compute values again: the places of the copies, and the search over both."""
