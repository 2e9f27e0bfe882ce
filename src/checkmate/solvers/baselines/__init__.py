"""Published methods for comparison: keeping everything, Chen et al. (2016), Griewank and Walther (2000)."""
