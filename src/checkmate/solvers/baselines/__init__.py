"""Methods of others to compare with: keeping everything, Chen et al. (2016), Griewank and Walther (2000)."""
