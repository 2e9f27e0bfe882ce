"""Whether a step fits a device that is not there."""
