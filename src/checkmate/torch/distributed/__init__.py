"""Memory held by DistributedDataParallel and FSDP2, and one plan for all ranks."""
