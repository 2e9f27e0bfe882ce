"""Plans coded as eviction intervals: decode, measure, repair, ruin. Flat arrays, compiled by numba."""
