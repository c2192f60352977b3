"""Sources of images: every kind gives the pixels and labels that were put in, and says what is wrong with it."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("PIL", reason="pillow is not installed")

from PIL import Image

from levattention.vision import open_images, pack_images
from levattention.vision.images import ArrayImages, FileImages, read_image

FOUND = [up / "shared" / "data" for up in Path(__file__).resolve().parents if (up / "shared" / "data").is_dir()]
real = pytest.mark.skipif(not FOUND, reason="no shared/data beside the checkout: CIFAR-10 sheets are missing")


def picture(value, size=(6, 4)):
    """An image of its own colour, with one corner that tells up from down and left from right."""
    pixels = np.full((size[1], size[0], 3), value, np.uint8)
    pixels[0, 0] = 255, 0, 7
    return pixels


def save(path, pixels):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)


def write_idx(path, array):
    data = struct.pack(">BBBB", 0, 0, 8, array.ndim) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)


@pytest.fixture
def classes(tmp_path):
    """train/ and val/ with cat, dog, owl; val has 3, 1 and 2 images."""
    for split, counts in (("train", (1, 1, 1)), ("val", (3, 1, 2))):
        for label, (name, count) in enumerate(zip(("cat", "dog", "owl"), counts, strict=True)):
            for i in range(count):
                save(tmp_path / split / name / f"{i}.png", picture(10 * label + i))
    return tmp_path


def test_class_folders(classes):
    images = open_images(classes)
    assert images.classes == ("cat", "dog", "owl")
    # A class at a time in turn, so that few images show many classes.
    assert images.labels.tolist() == [0, 1, 2, 0, 2, 0]
    assert [int(image[0, 1, 1]) for image, _ in images] == [0, 10, 20, 1, 21, 2]
    for image, label in images:
        assert image.shape == (3, 4, 6)
        assert image.dtype == torch.uint8
        assert image[:, 0, 0].tolist() == [255, 0, 7]
        assert isinstance(label, int)
    assert open_images(classes, count=2).labels.tolist() == [0, 1]
    assert len(open_images(classes, split="train")) == 3
    assert open_images(classes / "val").labels.tolist() == images.labels.tolist()


def test_class_folders_that_do_not_fit(classes):
    (classes / "val" / "dog" / "0.png").unlink()
    with pytest.raises(ValueError, match=r"1 of 3 classes have no images, first dog"):
        open_images(classes)
    (classes / "val" / "dog").rmdir()
    with pytest.raises(ValueError, match=r"1 of 3 classes have no images, first dog"):
        open_images(classes)
    save(classes / "val" / "yak" / "0.png", picture(1))
    with pytest.raises(ValueError, match=r"1 classes that .*train lacks, first yak"):
        open_images(classes)
    with pytest.raises(ValueError, match="expected train images in"):
        open_images(classes / "val", split="train")


def test_bad_images_are_named_and_counted_and_skipped_only_on_request(classes):
    whole = (classes / "val" / "cat" / "1.png").read_bytes()
    # A truncated file has a sound header; one of zeros has none.
    (classes / "val" / "cat" / "1.png").write_bytes(whole[: len(whole) - 30])
    (classes / "val" / "owl" / "0.png").write_bytes(bytes(100))
    with pytest.raises(ValueError, match=r"2 of 6 images cannot be read: .*owl.*0\.png, .*cat.*1\.png; --skip-bad"):
        open_images(classes)
    seen = []
    images = open_images(classes, skip_bad=True, advance=seen.append)
    assert images.labels.tolist() == [0, 1, 2, 0]
    assert [int(image[0, 1, 1]) for image, _ in images] == [0, 10, 21, 2]
    assert [Path(name).name for name in images.skipped] == ["0.png", "1.png"]
    assert sum(seen) == 6
    late = open_images(classes, check=False)
    assert len(late) == 6
    with pytest.raises(ValueError, match=r"0\.png: not a readable image"):
        late[2]


def test_labels_csv(tmp_path):
    for i in range(3):
        save(tmp_path / "images" / f"{i}.png", picture(i))
    (tmp_path / "labels.csv").write_text("file,label\nimages/2.png,7\nimages/0.png,999\nimages/1.png,0\n")
    images = open_images(tmp_path)
    assert images.labels.tolist() == [7, 999, 0]
    assert [int(image[0, 1, 1]) for image, _ in images] == [2, 0, 1]
    assert images.classes is None
    assert open_images(tmp_path, count=1).labels.tolist() == [7]
    with pytest.raises(ValueError, match="expected labels 0 to 9 for this model, got 999"):
        images.require_classes(10)
    assert images.require_classes(1000) is images
    with pytest.raises(ValueError, match="has no train images"):
        open_images(tmp_path, split="train")
    (tmp_path / "labels.csv").write_text("file,label\nimages/2.png,owl\n")
    with pytest.raises(ValueError, match=r"expected a class number for images/2\.png, got 'owl'"):
        open_images(tmp_path)
    (tmp_path / "labels.csv").write_text("file,label\nimages/2.png,1\nimages/9.png,1\n")
    with pytest.raises(ValueError, match=r"1 of 2 files are missing, first 9\.png"):
        open_images(tmp_path)


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_idx(tmp_path, suffix):
    pixels = np.random.default_rng(0).integers(0, 256, (12, 5, 4), np.uint8)
    labels = np.array([9, 2, 1, 1, 6, 1, 4, 6, 5, 7, 3, 8], np.uint8)
    write_idx(tmp_path / f"t10k-images-idx3-ubyte{suffix}", pixels)
    with pytest.raises(ValueError, match="expected t10k-labels-idx1-ubyte or"):
        open_images(tmp_path)
    write_idx(tmp_path / f"t10k-labels-idx1-ubyte{suffix}", labels)
    images = open_images(tmp_path)
    assert images.name == "Fashion-MNIST test"
    assert images.classes[9] == "Ankle boot"
    assert images.labels.tolist() == labels.tolist()
    assert np.array_equal(torch.stack([image for image, _ in images]).squeeze(1).numpy(), pixels)
    with pytest.raises(ValueError, match="expected train-images-idx3-ubyte"):
        open_images(tmp_path, split="train")
    # Other digits under the same file names have no clothes as classes.
    write_idx(tmp_path / f"t10k-labels-idx1-ubyte{suffix}", labels[::-1].copy())
    assert open_images(tmp_path).classes is None
    data = (tmp_path / f"t10k-images-idx3-ubyte{suffix}").read_bytes()
    (tmp_path / f"t10k-images-idx3-ubyte{suffix}").write_bytes(data[:-20])
    with pytest.raises(ValueError, match="idx file"):
        open_images(tmp_path)


def test_cifar_sheets(tmp_path):
    tiles = np.random.default_rng(0).integers(0, 256, (6, 32, 32, 3), np.uint8)
    sheet = np.concatenate([np.concatenate(list(row), 1) for row in tiles.reshape(2, 3, 32, 32, 3)], 0)
    save(tmp_path / "test_batch.png", sheet)
    with pytest.raises(ValueError, match=r"expected test_labels\.npy"):
        open_images(tmp_path)
    np.save(tmp_path / "test_labels.npy", np.array([3, 1, 4, 1, 5, 9], np.uint8))
    images = open_images(tmp_path)
    assert images.labels.tolist() == [3, 1, 4, 1, 5, 9]
    for (image, _), tile in zip(images, tiles, strict=True):
        assert np.array_equal(image.permute(1, 2, 0).numpy(), tile)
    assert len(open_images(tmp_path, count=4)) == 4
    with pytest.raises(ValueError, match=r"expected train_labels\.npy"):
        open_images(tmp_path, split="train")
    np.save(tmp_path / "test_labels.npy", np.zeros(5, np.uint8))
    with pytest.raises(ValueError, match="as many labels as tiles, got 5 for 6"):
        open_images(tmp_path)


@real
def test_real_cifar_sheets():
    """The first test images of CIFAR-10 are a cat and two ships; every class has 1,000 test images."""
    images = open_images(FOUND[0] / "cifar10")
    assert images.labels[:3].tolist() == [3, 8, 8]
    assert images.labels.bincount().tolist() == [1000] * 10
    assert images[9999][0].shape == (3, 32, 32)


@pytest.mark.parametrize("channels", [1, 3])
def test_packed_images_come_back_without_loss(tmp_path, channels):
    pixels = torch.randint(0, 256, (7, channels, 5, 4), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    images = ArrayImages("some images", pixels, torch.tensor([2, 0, 1, 1, 0, 2, 2]), ("a", "b c", "d"))
    pack_images(images, tmp_path / "packed.png", columns=3)
    back = open_images(tmp_path / "packed.png")
    assert (back.name, back.classes) == ("some images", ("a", "b c", "d"))
    assert torch.equal(back.labels, images.labels)
    assert torch.equal(back.pixels, pixels)
    assert len(open_images(tmp_path / "packed.png", count=2)) == 2
    save(tmp_path / "plain.png", picture(3))
    with pytest.raises(ValueError, match="expected a folder of images, or a sheet"):
        open_images(tmp_path / "plain.png")


def test_sources_of_no_known_kind(tmp_path):
    with pytest.raises(ValueError, match="there is nothing"):
        open_images(tmp_path / "no")
    with pytest.raises(ValueError, match=r"expected class folders, a labels\.csv, CIFAR-10 sheets or idx files"):
        open_images(tmp_path)
    with pytest.raises(ValueError, match="split: expected train or test, got 'trian'"):
        open_images(tmp_path, split="trian")
    with pytest.raises(ValueError, match="count: expected a positive"):
        open_images(tmp_path, count=0)
    with pytest.raises(ValueError, match="at least one image"):
        FileImages("none", [], [])


def test_labels_follow_the_names_of_the_classes():
    pixels = torch.zeros(4, 1, 2, 2, dtype=torch.uint8)
    images = ArrayImages("pets", pixels, torch.tensor([0, 1, 2, 1]), ("cat", "dog", "owl"))
    ordered = images.require_classes(3, ("owl", "cat", "dog"))
    assert ordered.labels.tolist() == [1, 2, 0, 2]
    assert ordered.classes == ("owl", "cat", "dog")
    assert images.labels.tolist() == [0, 1, 2, 1]
    assert images.require_classes(3, ("cat", "dog", "owl")) is images
    assert images.require_classes(3, None) is images
    with pytest.raises(ValueError, match="expected the model's classes, got others, such as owl"):
        images.require_classes(3, ("cat", "dog", "cow"))


def test_pictures_of_16_bits_and_pictures_too_large_to_open(tmp_path, monkeypatch):
    grey = np.arange(0, 65536, 4096, np.uint16).reshape(4, 4)
    Image.fromarray(grey).save(tmp_path / "deep.png")
    assert torch.equal(read_image(tmp_path / "deep.png"), torch.from_numpy(grey // 256).to(torch.uint8).expand(3, 4, 4))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 4)
    with pytest.raises(ValueError, match="exceeds limit"):
        read_image(tmp_path / "deep.png")
