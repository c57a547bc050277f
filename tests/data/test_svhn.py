import numpy as np
import pytest
import torch
from PIL import Image
from scipy.io import savemat

from sparring.data import load, svhn
from sparring.data.fetch import fetch
from sparring.data.stored import sha256
from sparring.errors import UserError

COUNTS = {"train": (3, 9, 2, 2, 2, 2, 2, 2, 2, 1), "test": (2, 1, 1, 1, 1, 1, 1, 1, 1, 1)}


@pytest.fixture
def arrays(monkeypatch):
    rng = np.random.default_rng(0)
    arrays = {}
    for part, counts in COUNTS.items():
        arrays[f"x_{part}"] = rng.integers(0, 256, (sum(counts), 32, 32, 3), dtype=np.uint8)
        arrays[f"y_{part}"] = rng.permutation(np.repeat(np.arange(10, dtype=np.uint8), counts))
    monkeypatch.setattr(svhn, "COUNTS", COUNTS)
    monkeypatch.setattr(svhn, "REBUILT_SHA256", {key: sha256(arrays[key]) for key in ("x_train", "x_test")})
    return arrays


def write_mat(folder, arrays, **how):
    folder.mkdir()
    for part in ("train", "test"):
        y = arrays[f"y_{part}"].copy()
        y[y == 0] = 10
        savemat(folder / f"{part}_32x32.mat", {"X": arrays[f"x_{part}"].transpose(1, 2, 3, 0), "y": y[:, None]}, **how)
    return folder


def write_sheets(folder, arrays):
    """Sheets of four tiles per row, the images divided as by np.array_split."""
    folder.mkdir()
    np.savez(folder / "labels.npz", y_train=arrays["y_train"], y_test=arrays["y_test"])
    for part, sheets in svhn.SHEETS.items():
        for i, tiles in enumerate(np.array_split(arrays[f"x_{part}"], sheets)):
            rows = -(-len(tiles) // 4)
            sheet = np.zeros((rows * 32, 4 * 32, 3), dtype=np.uint8)
            for j, tile in enumerate(tiles):
                sheet[j // 4 * 32 : j // 4 * 32 + 32, j % 4 * 32 : j % 4 * 32 + 32] = tile
            Image.fromarray(sheet).save(folder / f"{part}_{i}.webp", lossless=True, quality=0)
    return folder


def check(data, arrays):
    assert torch.equal(data.train.x, torch.from_numpy(arrays["x_train"]).permute(0, 3, 1, 2))
    assert data.test.y.tolist() == arrays["y_test"].tolist()
    assert data.classes == tuple("0123456789")


@pytest.mark.parametrize("packed", [True, False])
def test_mat_files(arrays, tmp_path, packed):
    fetch("svhn", root=tmp_path, source=write_mat(tmp_path / "mat", arrays, do_compression=packed))
    data = load("svhn", root=tmp_path)
    check(data, arrays)
    assert data.note == "SVHN, from the official .mat files"


def test_sheets(arrays, tmp_path):
    fetch("svhn", root=tmp_path, source=write_sheets(tmp_path / "sheets", arrays))
    data = load("svhn", root=tmp_path)
    check(data, arrays)
    assert data.note == "SVHN, rebuilt from format 1"


def test_rebuilt_images_in_an_npz_are_identified_by_their_checksums(arrays, tmp_path, monkeypatch):
    np.savez(tmp_path / "a.npz", **arrays)
    fetch("svhn", root=tmp_path, source=tmp_path / "a.npz")
    check(load("svhn", root=tmp_path), arrays)
    assert load("svhn", root=tmp_path).note == "SVHN, rebuilt from format 1"
    monkeypatch.setattr(svhn, "REBUILT_SHA256", {"x_train": "0", "x_test": "0"})
    fetch("svhn", root=tmp_path, source=tmp_path / "a.npz")  # a given source replaces the file
    assert load("svhn", root=tmp_path).note == "SVHN, from a.npz"
    np.savez(tmp_path / "a.npz", **arrays, note=np.asarray("SVHN, by hand"))
    fetch("svhn", root=tmp_path, source=tmp_path / "a.npz")
    assert load("svhn", root=tmp_path).note == "SVHN, by hand"


def test_other_data_is_not_svhn(arrays, tmp_path):
    for changes, message in [
        ({"y_train": arrays["y_train"][::-1] * 0}, "labels are not SVHN's"),
        ({"x_test": arrays["x_test"][:3], "y_test": arrays["y_test"][:3]}, "use npz:PATH"),
        ({"y_test": arrays["y_test"] + 1}, "digit 0 has label 0"),
        ({"x_train": arrays["x_train"][:, :16]}, "use npz:PATH"),
    ]:
        np.savez(tmp_path / "a.npz", **(arrays | changes))
        with pytest.raises(UserError, match=message):
            svhn.read_source(tmp_path / "a.npz")


def test_damaged_sources(arrays, tmp_path):
    mat = write_mat(tmp_path / "mat", arrays)
    whole = (mat / "test_32x32.mat").read_bytes()
    for content in (whole[:5000], b"", b"\0" * 500):
        (mat / "test_32x32.mat").write_bytes(content)
        with pytest.raises(UserError, match=r"test_32x32.mat"):
            svhn.read_source(mat)
    sheets = write_sheets(tmp_path / "sheets", arrays)
    arrays["x_train"][0, 0, 0] ^= 255
    damaged = write_sheets(tmp_path / "damaged", arrays)
    with pytest.raises(UserError, match="sha256 of x_train"):
        svhn.read_source(damaged)
    (sheets / "train_3.webp").write_bytes(b"RIFF")
    with pytest.raises(UserError, match=r"train_3.webp cannot be read"):
        svhn.read_source(sheets)
    (sheets / "train_3.webp").unlink()
    with pytest.raises(UserError, match=r"train_3.webp cannot be read"):
        svhn.read_source(sheets)


def test_a_missing_or_misplaced_svhn_names_the_fix(tmp_path):
    with pytest.raises(UserError, match="sparring data fetch svhn"):
        load("svhn", root=tmp_path)
    with pytest.raises(UserError, match="no SVHN in"):
        fetch("svhn", root=tmp_path, source=tmp_path)
