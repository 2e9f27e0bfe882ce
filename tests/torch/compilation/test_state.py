"""An account of a step that an exception left half done is not trusted."""

from __future__ import annotations

import pytest

from checkmate.torch.steps.state import StepState


@pytest.mark.parametrize("inside", [False, True], ids=["alone", "inside of another one"])
def test_an_update_that_does_not_reach_its_end_leaves_nothing_to_trust(inside: bool) -> None:
    """Whatever comes after, until the account is thrown away: then the next step is a new one."""
    state = StepState()
    state.under_way = True
    with state.update():
        assert state.interrupted and state.under_way
        with state.update():
            pass
    assert not state.interrupted

    def interrupted() -> None:
        with state.update():
            raise KeyboardInterrupt

    def nested() -> None:
        with state.update():
            interrupted()

    with pytest.raises(KeyboardInterrupt):
        nested() if inside else interrupted()
    with state.update():
        state.under_way = False
    assert state.interrupted
    state.throw_away()
    assert not state.interrupted and not state.under_way


def test_an_exception_that_is_caught_inside_of_an_update_is_forgotten_with_the_account_alone() -> None:
    """An inner update that failed is one that was not finished, although the outer one was."""
    state = StepState()
    with state.update(), pytest.raises(MemoryError), state.update():
        raise MemoryError
    assert state.interrupted
