"""Solvers: each a frozen dataclass of its options, in one file."""

from checkmate.solvers.a_star import AStar
from checkmate.solvers.auto import Auto
from checkmate.solvers.baselines.chen import ChenGreedy, ChenSqrtN
from checkmate.solvers.baselines.griewank import Griewank
from checkmate.solvers.baselines.keep_all import KeepAll
from checkmate.solvers.brute_force import BruteForce
from checkmate.solvers.local_search import LocalSearch
from checkmate.solvers.lp_rounding import LpRounding
from checkmate.solvers.milp import Milp
from checkmate.solvers.registry import available
from checkmate.solvers.session import Session, Solver

__all__ = [
    "AStar",
    "Auto",
    "BruteForce",
    "ChenGreedy",
    "ChenSqrtN",
    "Griewank",
    "KeepAll",
    "LocalSearch",
    "LpRounding",
    "Milp",
    "Session",
    "Solver",
    "available",
]
