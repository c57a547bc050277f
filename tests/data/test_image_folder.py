import shutil

import numpy as np
import pytest
import torch
from PIL import Image

from sparring.data import image_folder as module
from sparring.data import load
from sparring.errors import UserError


def image(path, *, size=(6, 5), mode="RGB", value=None, **options):
    """An image of (height, width) whose pixels depend on its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(abs(hash(path.name)) % 2**32)
    shape = (*size, 3) if mode in ("RGB", "RGBA") else size
    pixels = rng.integers(0, 256, shape, dtype=np.uint8) if value is None else np.full(shape, value, np.uint8)
    Image.fromarray(pixels).convert(mode).save(path, **options)
    return pixels


def fill(top, classes=("cat", "dog"), count=5, **options):
    return {(name, i): image(top / name / f"{i}.png", **options) for name in classes for i in range(count)}


def test_classes_are_folders_and_a_fifth_is_test_data(tmp_path):
    pixels = fill(tmp_path, count=5)
    (tmp_path / "readme.txt").write_text("not a class")
    (tmp_path / ".hidden").mkdir()
    (tmp_path / "cat" / ".DS_Store").write_bytes(b"x")
    (tmp_path / "cat" / ".0.png").write_bytes(b"x")
    (tmp_path / "cat" / "notes.txt").write_text("x")
    data = load(f"folder:{tmp_path}")
    assert (data.name, data.classes, data.channels, data.size) == (tmp_path.name, ("cat", "dog"), 3, (6, 5))
    assert data.train.y.tolist() == [0] * 4 + [1] * 4 and data.test.y.tolist() == [0, 1]
    assert torch.equal(data.test.x[0].permute(1, 2, 0), torch.from_numpy(pixels["cat", 2]))
    assert torch.equal(data.train.x[4].permute(1, 2, 0), torch.from_numpy(pixels["dog", 0]))
    assert "a fifth of every class" in data.note
    assert torch.equal(load(f"folder:{tmp_path}").train.x, data.train.x)


def test_train_and_test_folders(tmp_path):
    fill(tmp_path / "train", count=3)
    pixels = fill(tmp_path / "test", classes=("dog",), count=2)
    fill(tmp_path / "val", count=1)
    data = load(f"folder:{tmp_path}")
    assert len(data.train) == 6 and data.test.y.tolist() == [1, 1]
    assert torch.equal(data.test.x[1].permute(1, 2, 0), torch.from_numpy(pixels["dog", 1]))
    assert data.note == f"images from {tmp_path.name}; not used: val"


def test_a_class_may_be_called_train(tmp_path):
    fill(tmp_path, classes=("plane", "train"))
    assert load(f"folder:{tmp_path}").classes == ("plane", "train")


def test_formats_and_links(tmp_path):
    for i, suffix in enumerate(["png", "jpg", "JPEG", "bmp", "webp", "gif"]):
        image(tmp_path / "a" / f"{i}.{suffix}")
    image(tmp_path / "elsewhere.png", value=7)
    (tmp_path / "b").mkdir()
    for name in ("1.png", "2.png"):
        (tmp_path / "b" / name).symlink_to(tmp_path / "elsewhere.png")
    data = load(f"folder:{tmp_path}")
    assert len(data.train) + len(data.test) == 8 and data.train.x[-1].eq(7).all()


def test_images_are_grey_only_if_all_are(tmp_path):
    pixels = fill(tmp_path, mode="L")
    image(tmp_path / "dog" / "9.png", mode="1")
    data = load(f"folder:{tmp_path}")
    assert data.channels == 1 and torch.equal(data.train.x[0, 0], torch.from_numpy(pixels["cat", 0]))
    image(tmp_path / "dog" / "8.png", mode="RGBA")
    data = load(f"folder:{tmp_path}")
    assert data.channels == 3 and torch.equal(data.train.x[0, 2], torch.from_numpy(pixels["cat", 0]))


@pytest.mark.parametrize("orientation", [5, 6, 7, 8])
def test_exif_rotation_is_applied(tmp_path, orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation  # rotated by 90 degrees, and perhaps mirrored
    fill(tmp_path, size=(6, 4), exif=exif)
    assert load(f"folder:{tmp_path}").size == (4, 6)


@pytest.mark.parametrize("orientation", [0, 9, 255])
def test_an_invalid_exif_orientation_is_ignored(tmp_path, orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    pixels = fill(tmp_path, size=(6, 4), exif=exif)
    data = load(f"folder:{tmp_path}")
    assert data.size == (6, 4) and torch.equal(data.train.x[0].permute(1, 2, 0), torch.from_numpy(pixels["cat", 0]))


def test_mixed_sizes_need_a_size(tmp_path):
    fill(tmp_path, value=200)
    image(tmp_path / "cat" / "big.png", size=(40, 30), value=200)
    with pytest.raises(UserError, match=r"6x5 \(10\), 40x30 \(1\).*folder:.*\?size=32"):
        load(f"folder:{tmp_path}")
    data = load(f"folder:{tmp_path}?size=8")
    assert data.size == (8, 8) and data.train.x.eq(200).all()
    assert "8x8" in data.note


def test_size_crops_the_centre(tmp_path):
    fill(tmp_path)
    wide = np.zeros((8, 24, 3), np.uint8)
    wide[:, 8:16] = 255
    Image.fromarray(wide).save(tmp_path / "cat" / "0.png")
    assert load(f"folder:{tmp_path}?size=8").train.x[0].eq(255).all()


def test_bad_files_are_named_and_counted(tmp_path):
    fill(tmp_path, count=10)
    whole = (tmp_path / "dog" / "9.png").read_bytes()
    (tmp_path / "dog" / "9.png").write_bytes(whole[: len(whole) // 2])  # damaged after its header
    with pytest.raises(UserError, match=r"^1 file cannot be used: .*dog/9.png"):
        load(f"folder:{tmp_path}")
    for i in range(7):
        (tmp_path / "cat" / f"{i}.png").write_bytes(b"not an image" * i)
    (tmp_path / "dog" / "gone.png").symlink_to(tmp_path / "nowhere.png")
    with pytest.raises(UserError, match=r"^9 files cannot be used: .*cat/0.png \(not an image\).*and 4 more"):
        load(f"folder:{tmp_path}")


def test_sixteen_bit_images_are_refused(tmp_path):
    fill(tmp_path)
    Image.fromarray(np.full((6, 5), 40_000, np.uint16)).save(tmp_path / "cat" / "deep.png")
    with pytest.raises(UserError, match=r"cat/deep.png \(pixels of type I;16"):
        load(f"folder:{tmp_path}")


@pytest.mark.parametrize("limit", [20, 10])  # Pillow warns over its limit and raises over twice that
def test_a_decompression_bomb_is_named(tmp_path, monkeypatch, limit):
    fill(tmp_path, size=(3, 3))
    image(tmp_path / "dog" / "bomb.png", size=(5, 5))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", limit)
    with pytest.raises(UserError, match=r"dog/bomb.png \(too many pixels"):
        load(f"folder:{tmp_path}?size=3")


def test_many_files_show_a_progress_bar(tmp_path, monkeypatch, capsys):
    fill(tmp_path)
    monkeypatch.setattr(module, "_BAR_FROM", 3)
    assert len(load(f"folder:{tmp_path}").train) == 8
    assert capsys.readouterr().out == ""


def test_unusable_layouts_are_refused(tmp_path):
    with pytest.raises(UserError, match="no such folder"):
        load(f"folder:{tmp_path / 'none'}")
    with pytest.raises(UserError, match="0 class folders"):
        load(f"folder:{tmp_path}")
    fill(tmp_path, classes=("cat",))
    with pytest.raises(UserError, match="1 class folder; two or more"):
        load(f"folder:{tmp_path}")
    (tmp_path / "dog" / "deeper").mkdir(parents=True)
    with pytest.raises(UserError, match=r"class folder .*dog has no images"):
        load(f"folder:{tmp_path}")
    image(tmp_path / "dog" / "0.png")
    for i in range(1, 5):
        (tmp_path / "cat" / f"{i}.png").unlink()
    with pytest.raises(UserError, match="none can be test data"):
        load(f"folder:{tmp_path}")


def test_test_folders_that_do_not_match_are_refused(tmp_path):
    fill(tmp_path / "train")
    (tmp_path / "test").mkdir()
    with pytest.raises(UserError, match="holds no class folders"):
        load(f"folder:{tmp_path}")
    fill(tmp_path / "test", classes=("bird",))
    with pytest.raises(UserError, match="a class 'bird'"):
        load(f"folder:{tmp_path}")


def test_transparent_pixels_become_white(tmp_path):
    fill(tmp_path, count=3)
    for i in range(3):
        pixels = np.zeros((6, 5, 4), np.uint8)
        pixels[2, 2] = (10, 20, 30, 255)
        Image.fromarray(pixels).save(tmp_path / "cat" / f"{i}.png")
    Image.fromarray(np.zeros((6, 5), np.uint8)).convert("P").save(tmp_path / "cat" / "3.png", transparency=0)
    data = load(f"folder:{tmp_path}")
    cat = data.train.x[0]
    assert cat[:, 2, 2].tolist() == [10, 20, 30] and cat.eq(255).sum() == 6 * 5 * 3 - 3
    assert data.train.x[data.train.y == 0][-1].eq(255).all()


def test_the_first_test_images_are_in_class_proportions(tmp_path):
    for part in ("train", "test"):
        fill(tmp_path / part, classes=("a", "b", "c"), count=4)
    assert load(f"folder:{tmp_path}").test.y.tolist() == [0, 1, 2] * 4
    assert not load(f"folder:{tmp_path}").carved and load(f"folder:{tmp_path / 'test'}").carved


def test_unused_files_are_reported(tmp_path):
    fill(tmp_path, count=3)
    for name in ("1.heic", "2.HEIC", "scan", "Thumbs.db", "desktop.ini", ".hidden"):
        (tmp_path / "cat" / name).write_bytes(b"x")
    image(tmp_path / "dog" / "more" / "9.png")
    note = load(f"folder:{tmp_path}").note
    assert note.endswith("; not used: 2 x .heic, 1 x file without a suffix, 1 x folder inside a class")
    for part, count in (("train", 3), ("test", 2)):
        fill(tmp_path / "parts" / part, count=count)
        (tmp_path / "parts" / part / "dog" / "a.txt").write_text("x")
    assert load(f"folder:{tmp_path / 'parts'}").note.endswith("; not used: 2 x .txt")
    shutil.rmtree(tmp_path / "parts" / "test")
    assert load(f"folder:{tmp_path / 'parts'}").carved
    shutil.rmtree(tmp_path / "parts")
    image(tmp_path / "fox" / "deeper" / "1.png")
    with pytest.raises(UserError, match=r"fox has no images directly in it .*Are they in .*deeper\? Move them up"):
        load(f"folder:{tmp_path}")


def test_images_too_large_for_the_networks_are_refused_before_reading(tmp_path):
    fill(tmp_path, count=2, size=(4, 513), value=1)
    with pytest.raises(UserError, match=r"4x513 are too large for these networks.*\?size=64"):
        load(f"folder:{tmp_path}")
    assert load(f"folder:{tmp_path}?size=8").size == (8, 8)


def test_a_file_instead_of_a_folder_is_refused(tmp_path):
    (tmp_path / "a.png").write_bytes(b"x")
    with pytest.raises(UserError, match=r"a\.png is a file\. Give the folder"):
        load(f"folder:{tmp_path / 'a.png'}")


def test_files_are_read_as_the_folder_is(tmp_path):
    """In any order, grey or coloured as asked, with the same scaling and cropping."""
    fill(tmp_path, count=2, size=(9, 12))
    folder = load(f"folder:{tmp_path}?size=8")
    files = [tmp_path / "dog" / "1.png", tmp_path / "cat" / "0.png"]
    read = module.read_images(files, size=(8, 8), channels=3)
    assert read.shape == (2, 3, 8, 8) and read.dtype == torch.uint8 and not torch.equal(read[0], read[1])
    known = [each for split in (folder.train, folder.test) for each in split.x]
    assert all(any(torch.equal(each, other) for other in known) for each in read)
    assert module.read_images(files, size=(4, 6), channels=1).shape == (2, 1, 4, 6)
    with pytest.raises(UserError, match=r"2 files cannot be used: .*none.png.*; .*other.png"):
        module.read_images([*files, tmp_path / "none.png", tmp_path / "other.png"], size=(8, 8), channels=3)
    with pytest.raises(UserError, match="not 4"):
        module.read_images(files, size=(8, 8), channels=4)
