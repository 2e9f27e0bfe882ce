"""Local search over plans coded as intervals of absence: decode, measure, evict, ruin and repair, cross, reorder."""
