"""Whole steps under Inductor: forward, backward and updates as one compiled graph."""
