"""The default solver."""

from checkmate.solvers.auto.solver import Auto

__all__ = ["Auto"]
