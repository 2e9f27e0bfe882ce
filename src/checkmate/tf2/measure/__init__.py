"""Times and peaks: measured for ops and whole steps, and predicted by a model of TensorFlow's allocator."""
