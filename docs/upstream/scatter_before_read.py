"""Inductor reads a tensor before it is added to in place: a reproduction.

For pytorch#185509, open in releases 2.11 to 2.13 and mended in 2.14: recomputing the
body of a loop, so that it can be fused, loses the renames of what was mutated, and the
loop runs before the `scatter_add` that it reads. In a ResNet-50 whose first ReLU is
computed again, the gradients of the first convolution are then zero. Checkmate renames
again (`_recompute_and_order` in `src/checkmate/torch/_compat/inductor.py`); the same
lines at the end of `SchedulerNode.recompute_size_and_body` mend the older releases.

Run: `python scatter_before_read.py`. Prints how many numbers are not zero.
"""

import torch
from torch._inductor.scheduler import SchedulerNode

ORIGINAL = SchedulerNode.recompute_size_and_body


def renamed(node, *args, **kwargs):
    ORIGINAL(node, *args, **kwargs)
    renames = getattr(node, "mutation_renames", {})
    node.set_read_writes(node.read_writes.rename(renames))


def main():
    torch.manual_seed(0)
    a, w = torch.randn(4, 8, 32, 32), torch.randn(8)
    index, source = torch.randint(0, 1024, (32, 256)), torch.randn(32, 256)

    def function(a, w):
        y = torch.relu(a * w[:, None, None])
        z = torch.zeros(32, 1024).scatter_add(1, index, source)
        return y, torch.where(y <= 0, 0.0, z.view(4, 8, 32, 32))

    print("torch", torch.__version__)
    print("eager", int(function(a, w)[1].count_nonzero()))
    for name, method in (("as it is", ORIGINAL), ("renamed", renamed)):
        torch._dynamo.reset()
        SchedulerNode.recompute_size_and_body = method
        with torch._inductor.config.patch(fx_graph_cache=False):
            print(name, int(torch.compile(function)(a, w)[1].count_nonzero()))


if __name__ == "__main__":
    main()
