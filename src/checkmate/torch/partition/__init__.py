"""A plan imposed on a joint graph, split into forward and backward, and its peak counted once more."""
