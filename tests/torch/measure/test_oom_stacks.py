"""The kinds of `checkmate.oom` against the stacks that the installed PyTorch has when it allocates."""

from __future__ import annotations

import traceback

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import checkmate.torch
from checkmate.oom import stacks
from checkmate.oom.snapshot import Frame


class Stacks(TorchDispatchMode):
    """Records the kind and place of the stack of every op."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        frames = [Frame(f.name, f.filename, f.lineno or 0) for f in reversed(traceback.extract_stack()[:-1])]
        self.seen.append((str(func), *stacks.origin_of(frames)))
        return func(*args, **(kwargs or {}))

    def kinds(self):
        return {kind for _, _, kind in self.seen}


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(4, 8), torch.nn.Linear(8, 4)

    def forward(self, x):
        return self.down(checkpoint(lambda h: torch.relu(self.up(h)), x, use_reentrant=False))


def recorded(call):
    with Stacks() as mode:
        result = call()
    return result, mode


def test_each_part_of_a_step_has_its_kind():
    """PyTorch's file and function names are private: a release that renames one shows here."""
    model, made = recorded(Net)
    assert made.kinds() == {stacks.PARAMETERS}
    _, moved = recorded(lambda: model.to(torch.float64).to(torch.float32))
    assert moved.kinds() == {stacks.PARAMETERS}
    optimizer = torch.optim.Adam(model.parameters())
    loss, forward = recorded(lambda: model(torch.ones(2, 4)).sum())
    assert stacks.FORWARD in forward.kinds()
    assert {kind for op, _, kind in forward.seen if "addmm" in op} == {stacks.FORWARD}
    assert any("test_oom_stacks.py" in place for _, place, _ in forward.seen)
    _, backward = recorded(loss.backward)
    assert {kind for op, _, kind in backward.seen if "addmm" in op} == {stacks.RECOMPUTED}
    assert {kind for op, _, kind in backward.seen if "aten.mm" in op} == {stacks.BACKWARD}
    _, stepped = recorded(optimizer.step)
    assert stepped.kinds() == {stacks.OPTIMIZER}


def test_a_caught_error_is_read():
    """`except torch.OutOfMemoryError as error: print(checkmate.torch.read_oom(error))`."""
    text = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 8.00 GiB of which 1.00 GiB is free. "
    try:
        raise torch.OutOfMemoryError(
            text
            + "Of the allocated memory 6.00 GiB is allocated by PyTorch, and 512.00 MiB is reserved by PyTorch but unallocated."
        )
    except torch.OutOfMemoryError as error:
        found = checkmate.torch.read_oom(error)
    assert isinstance(found, checkmate.torch.OutOfMemory)
    assert (found.cause, found.budget) == ("too little memory", "7.28GiB")
