"""The model card of an exported model: what it is, what was measured and what was not, and how to use it.

Only numbers that an evaluation left behind are in it, each with its n, eps and settings; AutoAttack comes first.
Markdown with the YAML front matter that model hubs read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from sparring import schedules
from sparring._version import __version__
from sparring.models import built_in
from sparring.weights.measured import public

_NAMED = 20  # classes named in the card; the rest are counted


def model_card(name: str, facts: Mapping[str, Any]) -> str:
    """The text of README.md for a model with these facts (`weights.facts` of its file)."""
    model, records = facts["model"], facts.get("measured", [])
    parts = [_front_matter(name, facts), f"# {name}", _what_it_is(model, facts), "## Measured", *_measured(records)]
    parts += ["## Not measured", "\n".join(f"- {line}" for line in _not_measured(records, facts))]
    use = _USE if built_in(model["name"]) else _USE_OWN
    parts += ["## Use", use.format(channels=model["channels"], height=model["size"][0], width=model["size"][1])]
    return "\n\n".join(parts) + "\n"


def _front_matter(name: str, facts: Mapping[str, Any]) -> str:
    lines = ["library_name: sparring", "pipeline_tag: image-classification", "tags:"]
    lines += [f"- {tag}" for tag in ("adversarial-robustness", "adversarial-training", "pytorch_model_hub_mixin")]
    records = facts.get("measured", [])
    if records:
        lines += ["model-index:", f"- name: {json.dumps(name)}", "  results:"]
    for record in records:
        data = json.dumps(record["data"])
        lines += [
            "  - task:",
            "      type: image-classification",
            "    dataset:",
            f"      name: {data}",
            f"      type: {data}",
            "    metrics:",
            "    - type: accuracy",
            f"      name: {json.dumps(_metric(record))}",
            f"      value: {100 * record['accuracy']:.2f}",
        ]
    return "\n".join(["---", *lines, "---"])


def _metric(record: Mapping[str, Any]) -> str:
    if not record["eps"]:
        return f"natural accuracy (%), n = {record['n']}"
    return f"{record['attack']} accuracy (%), {_radius(record)}, n = {record['n']}"


def _what_it_is(model: Mapping[str, Any], facts: Mapping[str, Any]) -> str:
    height, width = model["size"]
    said = [
        f"An image classifier from pixels in [0, 1] to {model['num_classes']} logits: `{model['name']}` for images of "
        f"{model['channels']}x{height}x{width}"
        + (", with its normalisation as the first layer." if model.get("normalize") else ", without normalisation.")
    ]
    how = [f"by the recipe `{facts['recipe']}`"] if facts.get("recipe") else []
    how += [f"on `{public(facts['data'])}`"] if isinstance(facts.get("data"), str) else []
    how += [f"for {facts['epoch']} epochs"] if facts.get("epoch") else []
    if how:
        said.append(f"Trained with Sparring {' '.join(how)}.")
    threat = facts.get("threat")
    said.append(f"Trained against {_radius(threat)}." if threat else "The threat it was trained for is not recorded.")
    classes = model.get("classes") or []
    if classes:
        more = f" and {len(classes) - _NAMED} more" if len(classes) > _NAMED else ""
        said.append(f"Classes, in the order of the logits: {', '.join(classes[:_NAMED])}{more}.")
    return " ".join(said)


def _measured(records: Sequence[Mapping[str, Any]]) -> list[str]:
    if not records:
        return ["Nothing: no evaluation of these weights was found when they were exported."]
    rows = ["| attack | accuracy | n | radius | settings | protocol | data |", "|---|---|---|---|---|---|---|"]
    for record in records:
        spread = f" ± {100 * record['spread']:.2f}" if record["spread"] is not None else ""
        cells = [
            record["attack"],
            f"{100 * record['accuracy']:.2f} %{spread}",
            f"{record['n']}",
            _radius(record) if record["eps"] else "",
            _settings(record),
            ", ".join(record["protocols"]),
            record["data"],
        ]
        rows.append(f"| {' | '.join(cells)} |")
    said = ["\n".join(rows)]
    where = sorted(
        {f"{record['device']}, torch {record['torch']}, Sparring {record['sparring']}" for record in records}
    )
    said.append(f"Measured on {'; '.join(where)}. Verdicts are fp32, at the final iterate, in eval mode.")
    commands = list(dict.fromkeys(record["command"] for record in records if record["command"]))
    if commands:
        said.append("\n".join(["Commands, where MODEL is this folder:", "", "```bash", *commands, "```"]))
    doubts = sorted({doubt for record in records for doubt in record["doubts"]})
    if doubts:
        said.append(f"Doubts that the evaluation raised: {', '.join(doubts)} (`sparring evaluate --explain NAME`).")
    return said


def _settings(record: Mapping[str, Any]) -> str:
    if not record["eps"]:
        return ""
    steps = "1 step" if record["steps"] == 1 else f"{record['steps']} steps"
    words = [f"{steps} of {schedules.pixels(record['step_size'])}"] if record["steps"] else []
    words += [str(word) for word in (record["loss"], record["start"]) if word]
    words += [f"per image, over {', '.join(record['over'])}"] if record["over"] else []
    words += [f"{record['restarts']} restarts"] if record["restarts"] > 1 else []
    words += [f"gradients in {record['precision']}"] if record["precision"] != "fp32" else []
    return ", ".join(words)


def _not_measured(records: Sequence[Mapping[str, Any]], facts: Mapping[str, Any]) -> list[str]:
    lines = []
    if not any(record["attack"] == "autoattack" for record in records):
        lines.append("AutoAttack. Accuracies under PGD alone are upper bounds, often by several points.")
    radii = sorted({_radius(record) for record in records if record["eps"]})
    threat = facts.get("threat")
    if threat and radii and _radius(threat) not in radii:
        lines.append(f"The threat it was trained for ({_radius(threat)}).")
    lines.append(f"Other norms and radii than {' and '.join(radii)}." if radii else "Any accuracy under attack.")
    return [*lines, "Natural corruptions, other data, calibration, fairness between classes."]


def _radius(threat: Mapping[str, Any]) -> str:
    return f"{ {'linf': 'Linf', 'l2': 'L2'}.get(threat['norm'], threat['norm']) } {schedules.pixels(threat['eps'])}"


_WRITTEN = (
    f"Written by Sparring {__version__}. The weights are safetensors: loading them runs no code from this folder."
)
_USE = f"""\
```python
import sparring

model = sparring.load_model("PATH/TO/THIS/FOLDER")
logits = model(x)  # x: (n, {{channels}}, {{height}}, {{width}}), pixels in [0, 1]
model.classes  # the names, in the order of the logits
```

`sparring predict FOLDER IMAGE` scales image files as training did. With huggingface_hub, a repository's name works too:

```python
from sparring.weights.hub import HubModel

model = HubModel.from_pretrained("PATH/TO/THIS/FOLDER").eval()
```

{_WRITTEN}"""
_USE_OWN = f"""\
The network is its author's own, and this folder holds its weights alone. With the module, or what makes it, at hand:

```python
import sparring

model = sparring.load_model("PATH/TO/THIS/FOLDER", model=net)
logits = model(x)  # x: (n, {{channels}}, {{height}}, {{width}}), pixels in [0, 1]
```

{_WRITTEN}"""
