"""Whether a step fits a device that need not be present."""
