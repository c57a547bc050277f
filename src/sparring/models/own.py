"""Networks that are not built in: registered by name, named by import path, or handed in as a module.

    my-net                 register_model("my-net", make)
    package.module:make    a function or class in an importable module
    own:Net                a module that was handed in: a run keeps the name of its class

An import path runs the code of a module, so only `follow` imports one, and it is called with the caller's own words: a
command line, an argument. A path that was read from a file is looked up among those followed in this process, never
imported. Must not know training or files.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import re
from collections.abc import Callable
from typing import Any

from torch import nn

from sparring.errors import UserError, did_you_mean

Make = Callable[..., nn.Module]
OWN = "own:"  # the name of a module that was handed in begins with it
PARAMETERS = ("num_classes", "channels", "size")  # what a function that makes a network may ask for, by these names
_PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
_RESERVED = ("own:", "timm:")
MADE: dict[str, Make] = {}  # what was registered or followed in this process, by name


class Recorded(str):
    """A name that was read from a file: an import path in it is never followed."""


def is_import_path(name: str) -> bool:
    """Whether a name has the form package.module:make."""
    return bool(_PATH.fullmatch(name)) and not name.startswith(_RESERVED) and ".py:" not in name


def own_name(model: object) -> str:
    """The name under which a run keeps a module, or a function that makes one, that was handed in: own:ClassName."""
    return f"{OWN}{getattr(model, '__name__', None) or type(model).__name__}"


def follow(path: str) -> None:
    """Import what `package.module:make` names, for this process. For the caller's own words alone.

    Raises:
        UserError: the module cannot be imported, or has no such function.
    """
    module, _, attribute = path.partition(":")
    try:
        found: Any = importlib.import_module(module)
    except Exception as error:
        lost = isinstance(error, ModuleNotFoundError) and error.name is not None and f"{module}.".startswith(error.name)
        fix = "Run it where Python finds that module (the current folder counts)." if lost else "Mend that module."
        raise UserError(f"cannot import {module!r} of the model {path!r} ({_reason(error)}). {fix}") from error
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise UserError(f"{module} has no {attribute!r}, of the model {path!r}.{did_you_mean(part, dir(found))}")
        found = getattr(found, part)
    if not callable(found) or isinstance(found, nn.Module):
        raise UserError(
            f"{path!r} is {_a(found)}. Name a function or class that makes the network: def make(num_classes): ..."
        )
    MADE[path] = found


def unnamed(name: str) -> UserError | None:
    """The error for a network that only the caller can bring: a module, a path not followed yet. None for others."""
    if name.startswith(OWN):
        return UserError(
            f"this network was handed in from Python ({name.removeprefix(OWN)}), and a file holds numbers only. Hand "
            "it in again, model=net, or name what makes it: --model package.module:make."
        )
    if is_import_path(name) and name not in MADE:
        return UserError(
            f"this network was named by import path ({name}), and no path from a file is followed by itself. Name it "
            f"again: --model {name} on the command line, model={name!r} in Python."
        )
    return None


def call(make: Make, name: str, **facts: Any) -> nn.Module:
    """The network that a function makes, given those of num_classes, channels and size that it has as parameters."""
    try:
        declared = inspect.signature(make).parameters
    except (TypeError, ValueError):  # a builtin without a signature
        declared = inspect.signature(lambda **every: None).parameters
    rest = any(parameter.kind is parameter.VAR_KEYWORD for parameter in declared.values())
    for parameter in declared.values():
        needed = parameter.default is parameter.empty and parameter.kind not in (
            parameter.VAR_KEYWORD,
            parameter.VAR_POSITIONAL,
        )
        if needed and (parameter.name not in PARAMETERS or parameter.kind is parameter.POSITIONAL_ONLY):
            raise UserError(
                f"what makes the model {name!r} needs a parameter {parameter.name!r}. It is given what it asks for of "
                f"{', '.join(PARAMETERS)}; give {parameter.name!r} a default."
            )
    asked = {key: value for key, value in facts.items() if rest or key in declared}
    for key, value in asked.items():
        if value is None:
            raise UserError(
                f"what makes the model {name!r} asks for {key}, which the file does not record. Give its data set "
                f"(--data digits), in Python {key}=."
            )
    try:
        model = make(**asked)
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"making the model {name!r} fails ({_reason(error)}).") from error
    if not isinstance(model, nn.Module):
        raise UserError(f"what makes the model {name!r} must return an nn.Module, it returned {_a(model)}.")
    return model


def copied(model: nn.Module) -> nn.Module:
    """A copy of the caller's module, without gradients."""
    try:
        copy_of = copy.deepcopy(model)
    except Exception as error:  # tensors that are computed from others, open files
        kind = type(model).__name__
        raise UserError(f"the model ({kind}) cannot be copied ({_reason(error)}). Give what makes it.") from error
    copy_of.zero_grad(set_to_none=True)
    return copy_of


def _reason(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0].rstrip('.')}" if lines else type(error).__name__


def _a(value: object) -> str:
    """A value in words: None, a Tensor, an int."""
    if value is None:
        return "None"
    kind = type(value).__name__
    return f"{'an' if kind[0] in 'aeiouAEIOU' else 'a'} {kind}"
