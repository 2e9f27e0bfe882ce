"""Annealing of plans as sequences of computations, the order and the recomputations together."""
