"""Times and peaks: those of ops, of whole steps, and those that a model of TensorFlow's allocator predicts."""
