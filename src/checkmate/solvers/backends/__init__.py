"""Solvers of linear and integer programs, one file for each engine."""
