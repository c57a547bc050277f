"""Whether a folder holds the run that is asked for, so that it can go on: the same, under other names, or longer.

Compares configuration, images and initial weights with what the folder records, and writes nothing: the weights of the
checkpoint have yet to fit.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path

from sparring import models
from sparring.errors import UserError
from sparring.training import lengthen, run_folder
from sparring.training.checkpoint import read_facts
from sparring.training.config import Config, differences, same
from sparring.training.initial import Initial


def finished(folder: Path, wanted: Config) -> bool:
    """Whether the folder holds this run, finished."""
    done = read_facts(folder / run_folder.LAST).get("epoch", 0)
    return done >= wanted.epochs and same(run_folder.open_run(folder).config, wanted)


def continued(
    given: run_folder.RunFolder,
    initial: Callable[[str], Initial] | None,
    renewed: Collection[str],
    say: Callable[[str], None],
) -> run_folder.RunFolder:
    """The run in the folder, if it has the given configuration, images and initial weights, or is made longer."""
    folder, config = given.folder, given.config
    run = run_folder.open_run(folder)
    if run.images and run.images != given.images and run.config.data == config.data:
        raise UserError(
            f"the training images of {config.data} differ from those that {folder} was started with. Restore them, "
            "or start another run."
        )
    known, line = _as_named(run, given, initial), ""
    if lengthen.same_but_for_length(known.config, config):
        place = read_facts(folder / run_folder.LAST)
        begun = int(place.get("epoch", 0)) + (1 if place.get("step") else 0)
        earlier = lengthen.lengthen(folder, known.config, config, begun=begun, renewed=renewed)
        known = replace(known, config=config, earlier=(*run.earlier, earlier))
        line = lengthen.in_words(folder, earlier, config)
    if changed := differences(known.config, config):
        raise UserError(
            f"{folder} was started with another configuration ({'; '.join(changed)}). "
            f"Resume it with the settings it had; from a shell: "
            f"{shlex.join(['sparring', 'train', '--out', str(folder), '--resume'])}."
        )
    if line:
        say(line)
    run_folder.sweep(folder)
    return known


def _as_named(
    run: run_folder.RunFolder, given: run_folder.RunFolder, initial: Callable[[str], Initial] | None
) -> run_folder.RunFolder:
    """The run with the names that the caller gives the same things: images or weights that have moved, a network."""
    config, wanted = run.config, given.config
    if run.images == given.images:
        config = replace(config, data=wanted.data)
    if not models.built_in(config.model) and not models.built_in(wanted.model):
        config = replace(config, model=wanted.model)  # its weights tell whether it is the same network
    digest = given.init
    if wanted.init and wanted.init != config.init:
        digest = digest or read_initial(initial, wanted.init).digest
        config = replace(config, init=wanted.init) if digest == run.init else config
    if digest and digest != run.init:
        raise UserError(
            f"the weights of {wanted.init} are not those that {run.folder} began from. Restore them: --init."
        )
    return replace(run, config=config)


def read_initial(initial: Callable[[str], Initial] | None, source: str) -> Initial:
    """The weights that `init` names."""
    if initial is None:
        raise UserError(f"init={source!r} is read by sparring.train and the command, not here.")
    return initial(source)
