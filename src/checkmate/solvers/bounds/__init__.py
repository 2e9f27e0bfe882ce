"""Proven lower bounds on the cost of every plan, for any order of execution."""
