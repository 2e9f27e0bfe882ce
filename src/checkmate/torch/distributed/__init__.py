"""Memory that DistributedDataParallel and FSDP2 hold, and one plan for all ranks."""
