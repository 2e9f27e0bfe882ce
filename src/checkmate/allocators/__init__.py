"""Models of the allocators of frameworks: how many bytes a device holds for a sequence of requests."""
