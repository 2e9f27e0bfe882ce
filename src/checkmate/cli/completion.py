"""``checkmate completion``: scripts with which shells complete verbs and options."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from cyclopts import App

from checkmate.cli import terminal


def completion_for(application: Callable[[], App]) -> Callable[..., int]:
    """The verb ``completion`` of an application, which is passed because the application itself imports all verbs.

    Args:
        application: Makes the application whose verbs and options the script completes.
    """

    def completion(shell: Literal["bash", "zsh", "fish"], /, *, json: terminal.Json = False) -> int:
        """Print the completion script for a shell.

        Args:
            shell: The shell.
            json: Print one JSON object on stdout.

        Returns:
            The exit code.
        """
        script = application().generate_completion(prog_name="checkmate", shell=shell)
        if json:
            terminal.emit({"shell": shell, "script": script})
            return 0
        terminal.write(script)
        places = {
            "bash": "~/.local/share/bash-completion/completions/checkmate",
            "zsh": "a file _checkmate in a folder of $fpath",
            "fish": "~/.config/fish/completions/checkmate.fish",
        }
        terminal.closing([], f"write the script to {places[shell]}")
        return 0

    return completion
