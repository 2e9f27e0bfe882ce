"""PyTorch: capture a training step, plan it, and run the plan."""
