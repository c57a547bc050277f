"""Train on a folder of your own images, one subfolder per class, then measure and use the model.

The script draws the images itself: discs, squares and crosses. For yours, skip `draw` and give the path of your folder.

    python examples/own_images.py                # draws images into a temporary folder
    python examples/own_images.py photos         # or takes yours: photos/cat/1.jpg, photos/dog/1.jpg, ...
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

import sparring
from sparring.cli import main as command

EPS = 16 / 255
EPOCHS = 6
EACH = 120  # images per class
SIZE = 12  # height and width; images of another size are scaled and cropped to it


def draw(folder: Path) -> Path:
    """Write PNG images of three classes, with noise, at random places and in random colours."""
    chance = np.random.default_rng(0)
    for name in ("cross", "disc", "square"):
        (folder / name).mkdir(parents=True)
        for number in range(EACH):
            noise = chance.integers(0, 60, (SIZE, SIZE, 3), dtype=np.uint8)
            image = Image.fromarray(noise)
            pen, colour = ImageDraw.Draw(image), tuple(int(level) for level in chance.integers(120, 256, 3))
            left, top = (int(place) for place in chance.integers(0, 4, 2))
            box = (left, top, left + 7, top + 7)
            if name == "disc":
                pen.ellipse(box, outline=colour, width=2)
            elif name == "square":
                pen.rectangle(box, outline=colour, width=2)
            else:
                pen.line(box, fill=colour, width=2)
                pen.line((left, top + 7, left + 7, top), fill=colour, width=2)
            image.save(folder / name / f"{number}.png")
    return folder


def main(images: Path, run: Path) -> sparring.evaluation.Result:
    """Train on the folder, evaluate on its test images, and predict one file."""
    # A fixed part of every class is kept as test images, unless the folder has train/ and test/.
    source = f"folder:{images}?size={SIZE}"
    model = sparring.train(
        "fat-digits",  # a recipe for small images; what differs is given here
        run,
        data=source,
        objective=sparring.FAT(eps=EPS, step_size="eps/4", steps=5, tau=1),
        epochs=EPOCHS,
        normalize=True,
        augment="flip",
        validation=60,
    )
    result = sparring.evaluate(model, source, protocol="quick", eps=EPS)
    for attack in result:
        print(f"{attack.name:10} {100 * attack.accuracy:5.1f} %   of {attack.n} test images")
    # The same from a shell: sparring predict RUN IMAGE. It scales an image as training did.
    command(["predict", str(run), str(next(images.rglob("*.[pj][np]g")))])
    return result


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as spare:
        given = Path(sys.argv[1]) if len(sys.argv) > 1 else draw(Path(spare) / "shapes")
        main(given, Path(spare) / "run")
