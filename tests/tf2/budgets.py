"""Budgets that networks are tested and measured at; imports nothing, so that a benchmark's parent starts no framework."""

BUDGETS = {
    "vgg19": ("97%", "92%", "90%"),
    "resnet50": ("90%", "80%", "70%"),
    "mobilenet": ("90%", "80%", "70%"),
    "unet": ("95%", "90%", "85%"),
    "transformer": ("80%", "60%", "45%"),
}
"""Of each network: a share of what keeping everything takes above what is resident."""
