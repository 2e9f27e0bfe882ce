"""Planning for front ends: options, planners, calibration and costs that every framework shares. Imports no framework."""
