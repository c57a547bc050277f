"""The folder of a run, opened for training: a new run, or the one that it holds, from the checkpoint it has.

    what is there, checked against what is asked for -> the state takes the checkpoint's values -> the folder is written

Nothing is written before every check has passed. Of several processes all read, and then the first one writes. Trains
nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from sparring.data import cannot_seek
from sparring.training import run_folder
from sparring.training.checkpoint import Checkpoint, checksum
from sparring.training.distributed import World
from sparring.training.held_folder import claimed
from sparring.training.initial import Initial
from sparring.training.resume import continued
from sparring.training.run_folder import RunFolder
from sparring.training.state import State, restore


@dataclass(frozen=True)
class Found:
    """What a folder holds of a run that is to be continued."""

    run: bool = False  # its configuration
    checkpoint: bool = False


def look(folder: Path, *, resume: bool) -> Found:
    """What there is to continue; nothing where a run begins anew."""
    return Found(*((folder / name).exists() for name in (run_folder.CONFIG, run_folder.LAST))) if resume else Found()


@contextmanager
def opened(
    given: RunFolder,
    found: Found,
    state: State,
    *,
    overwrite: bool,
    seekable: bool,
    initial: Callable[[str], Initial] | None,
    renewed: Collection[str],
    say: Callable[[str], None],
    device: torch.device,
    record: Mapping[str, Any],
    world: World,
) -> Iterator[tuple[RunFolder, Checkpoint | None]]:
    """The run of a folder, and the checkpoint whose values `state` now has. The folder is locked inside the block.

    Args:
        given: the run as it is asked for.
        overwrite: replace a run that is already there.
        seekable: whether an epoch can be entered in the middle.
        initial: reads the weights that the configuration names.
        renewed: schedules that are given anew for a longer run.
        say: told in one line what is not as it was.
        record: of this start, beside versions and hardware.
    """
    folder, notes, saved = given.folder, list[str](), None
    with ExitStack() as held_open:
        with world.together():
            if world.first:
                given = replace(given, still=held_open.enter_context(claimed(folder)).check)
            run = given
            if found.run:
                run = replace(continued(given, initial, renewed, notes.append), still=given.still)
                if note := run.begins_anew():
                    notes.append(note)
                saved = run.last(device)
            if saved is not None:
                restore(state, saved)
                if state.step and not seekable:
                    raise cannot_seek()
                # Written just before the other: after a crash between the two it is newer, and then the one to beat.
                state.best = run.best() or state.best
        if world.grouped:
            place = [state.epoch, state.step, run.config.epochs]
            world.agree({"weights": checksum(state.model.state_dict()), "place in training": place})
        with world.together():  # nothing is written before every process has read
            if world.first:
                if found.run:
                    run.checked_metrics(state.epoch - 1, state.history)
                    run_folder.read_environment(folder)
                    for note in notes:
                        say(note)
                    run = run_folder.keep_config(run)
                else:
                    how: dict[str, Any] = {"images": given.images, "init": given.init, "overwrite": overwrite}
                    run = run_folder.create(folder, given.config, given.recipe, **how, still=given.still)
                world.begins(folder)
                run.keep_metrics(state.epoch - 1, state.history)
                run_folder.note_environment(folder, device, **record)
        yield run, saved
