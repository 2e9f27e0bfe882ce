"""Plans that copy values to the host as well as compute them again: where to place the copies, and the search over both."""
