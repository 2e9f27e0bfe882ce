"""Gradients with dropout under PyTorch's `activation_memory_budget`: a reproduction.

For pytorch#190758 and #190717, which report it; pull request #190759 would mend it.
Prints the largest relative error of a gradient against eager mode. Dropout is drawn
again in the backward at every budget below 1, with other random numbers.

Run: `python activation_memory_budget.py`.
"""

import torch
import torch._functorch.config as functorch
import torch._inductor.config as inductor
from torch import nn

LAYERS = [m for _ in range(6) for m in (nn.Linear(64, 64), nn.GELU(), nn.Dropout())]


def gradients(model, run, x):
    torch.manual_seed(1)
    model.zero_grad()
    run(x).backward()
    return [p.grad.clone() for p in model.parameters()]


def main():
    torch.manual_seed(0)
    model, x = nn.Sequential(*LAYERS), torch.randn(32, 64)

    def forward(x):
        return model(x).square().mean()

    expected = gradients(model, forward, x)
    budgets = (1.0, 0.9, 0.7, 0.5, 0.3, 0.1, 0.0)
    print(f"torch {torch.__version__}", *budgets, sep="\t")
    for backend in ("aot_eager", "inductor"):
        errors = []
        for budget in budgets:
            torch._dynamo.reset()
            settings = {"activation_memory_budget": budget}
            settings["enable_autograd_cache"] = False
            with functorch.patch(settings), inductor.patch(fallback_random=True):
                run = torch.compile(forward, backend=backend)
                pairs = zip(gradients(model, run, x), expected, strict=True)
                errors.append(max(float((g - e).norm() / e.norm()) for g, e in pairs))
        print(backend, *(f"{error:.1e}" for error in errors), sep="\t")


if __name__ == "__main__":
    main()
