"""A network as huggingface_hub's PyTorchModelHubMixin expects it: `HubModel.from_pretrained(folder_or_repository)`.

Importing this module needs the package huggingface_hub; writing such a folder (`sparring export --format hub`) and
reading it with `sparring.load_model` do not. The weights are read as numbers and the network is built by its name, so
no code comes from a repository.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from sparring import models
from sparring.errors import UserError
from sparring.files.schema import anything, fields, items, nothing_or, number, table, text, whole

try:
    from huggingface_hub import PyTorchModelHubMixin
except ImportError:
    raise UserError("HubModel needs the package huggingface_hub. Run: pip install huggingface_hub") from None

_NUMBERS = items(number(-1e6, 1e6), least=1, most=10_000)  # one per channel
_MODEL = fields(
    name=text(1000),
    num_classes=whole(1, 10**6),
    channels=nothing_or(whole(1, 10_000)),
    size=nothing_or(items(whole(1, 100_000), least=2, most=2)),
    normalize=nothing_or(items(_NUMBERS, least=2, most=2)),
    classes=nothing_or(items(text(1000))),
    optional=("channels", "size", "normalize", "classes"),
    others=anything,
)
_THREAT = nothing_or(table(anything, most=100))
_DESCRIBED = ("name", "num_classes", "channels", "size", "normalize")


class HubModel(
    nn.Module,
    PyTorchModelHubMixin,
    library_name="sparring",
    tags=["adversarial-robustness"],
    pipeline_tag="image-classification",
):
    """A built-in network from pixels in [0, 1] to logits, with the keys of the network itself in its state_dict."""

    def __init__(self, model: Mapping[str, Any], threat: Mapping[str, Any] | None = None) -> None:
        """Build the network that config.json describes.

        Args:
            model: its name, num_classes, channels, size, normalize and the names of its classes.
            threat: the norm and eps that it was trained for.
        """
        super().__init__()
        if wrong := _MODEL(model):
            raise UserError(
                f"config.json describes no network of Sparring: {wrong.replace('it has', 'its model has')}."
            )
        if wrong := _THREAT(threat):
            raise UserError(f"config.json is damaged: threat: {wrong}. Download it again.")
        described = {key: model[key] for key in _DESCRIBED if model.get(key) is not None}
        name, normalize = described.pop("name"), described.pop("normalize", None)
        size = tuple(described.pop("size", (32, 32)))
        self.network = models.build(
            name, size=size, normalize=normalize and tuple(normalize), pretrained=False, **described
        )
        names: Sequence[str] = model.get("classes") or ()
        self.classes = tuple(names)
        self.threat = dict(threat or {})

    def forward(self, x: Tensor) -> Tensor:
        """The logits, (N, num_classes), of pixels in [0, 1]."""
        logits: Tensor = self.network(x)
        return logits

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The state_dict of the network: `sparring.load_model` reads the same file."""
        return self.network.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load a state_dict of the network."""
        return self.network.load_state_dict(state_dict, strict=strict, assign=assign)
