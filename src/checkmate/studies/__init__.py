"""Questions about a graph that take more than one solve."""
