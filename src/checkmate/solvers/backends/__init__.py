"""Solvers of linear and integer programs, one file an engine."""
