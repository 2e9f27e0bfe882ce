"""What the paper and its program on an open engine report."""

from __future__ import annotations

# Overheads of the original's own program on an open engine, 600 s and one thread a point; "open" where it did not finish.
KNOWN: dict[tuple[str, int], tuple[float, str]] = {
    ("VGG16", 14_300_000_000): (1.0019, "optimal, 2 s"),
    ("vgg_unet", 16_000_000_000): (1.0001, "optimal, 39 s"),
    ("vgg_unet", 12_000_000_000): (1.0345, "optimal, 988 s"),
    ("vgg_unet", 10_000_000_000): (1.0690, "open, 600 s"),
    ("MobileNet", 16_000_000_000): (1.0084, "optimal, 397 s"),
    ("MobileNet", 12_000_000_000): (1.0127, "optimal, 373 s"),
    ("MobileNet", 8_000_000_000): (float("inf"), "none in 600 s"),
}

# Unit chains: layers, budget, cost of the original's program on an open engine, and how it ended.
CHAINS = (
    (8, 4, 26, "optimal"),
    (8, 6, 21, "optimal"),
    (8, 8, 19, "optimal"),
    (16, 4, 70, "open, 120 s"),
    (16, 6, 47, "open, 120 s"),
    (16, 8, 43, "optimal"),
    (32, 6, 120, "open, 120 s"),
)
