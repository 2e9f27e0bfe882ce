"""Plans whose ops are fused by Inductor, calibrated by measuring."""
