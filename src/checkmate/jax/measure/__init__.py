"""Times of ops, and bytes of compiled programs."""
