"""The graph of a function: traced as one list of equations, alone or with its derivative, with the bytes of its arrays."""
