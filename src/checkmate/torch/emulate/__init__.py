"""A traced step as it would run on a device that is not there."""
