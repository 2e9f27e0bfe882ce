"""Best-first search over sets of live values, exact if few states can be reached."""
