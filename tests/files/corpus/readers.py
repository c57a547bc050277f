"""Every reader of files, with its cases."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from sparring.data import archives, cifar100, extra, idx, image_folder, npz, tiny_imagenet
from sparring.data.mat5 import read_mat
from sparring.errors import UserError
from sparring.report import evaluations, gather
from sparring.training import run_folder
from sparring.weights import load_model
from tests.files.corpus.archives import idx_cases, pickle_cases, tar_cases
from tests.files.corpus.arrays import mat_cases, npz_cases
from tests.files.corpus.cases import Case
from tests.files.corpus.checkpoints import safetensors_cases, torch_cases
from tests.files.corpus.images import image_cases, one_image_cases, tiny_imagenet_cases
from tests.files.corpus.records import hub_cases, result_cases, run_cases

Reader = Callable[[Path], object]
OFFICIAL = {"X": 73_257 * 32 * 32 * 3, "y": 73_257 * 8}  # bytes of SVHN's arrays


def read_svhn(path: Path) -> object:
    found = read_mat(path, OFFICIAL)
    if set(found) != {"X", "y"}:
        raise UserError("it lacks X or y.")
    return found


def report(folder: Path) -> object:
    """What a page says of a run."""
    run = gather.open_run(folder)
    return gather.rows_of(run), run.hardware


READERS: dict[str, tuple[Reader, Callable[[], Iterator[Case]]]] = {
    "checkpoints": (load_model, torch_cases),
    "safetensors": (load_model, safetensors_cases),
    "npz": (lambda path: npz.load_npz(path, room=2**50), npz_cases),
    "npz, mapped": (lambda path: npz.load_npz(path, room=0), npz_cases),
    "npz, extra": (lambda path: extra.load_extra(f"npz:{path}", classes=2), npz_cases),
    "mat": (read_svhn, mat_cases),
    "tar": (lambda path: archives.read_named(path, {"train", "test"}), tar_cases),
    "pickle": (cifar100.read_source, pickle_cases),
    "idx": (lambda path: idx.read_source("mnist", path), idx_cases),
    "images": (image_folder.load_folder, image_cases),
    "images, scaled": (lambda path: image_folder.load_folder(path, size=8), image_cases),
    "one image": (lambda path: image_folder.read_images([path], size=(8, 8), channels=3), one_image_cases),
    "tiny-imagenet": (tiny_imagenet.read_source, tiny_imagenet_cases),
    "run, opened": (run_folder.open_run, lambda: run_cases(run_folder.CONFIG)),
    "run, metrics": (run_folder.read_metrics, lambda: run_cases(run_folder.METRICS)),
    "run, environment": (run_folder.read_environment, lambda: run_cases(run_folder.ENVIRONMENT)),
    "run, reported": (report, run_cases),
    "run, loaded": (load_model, lambda: run_cases(run_folder.CONFIG)),
    "result": (evaluations.measured_of_file, result_cases),
    "hub": (load_model, hub_cases),
}
