"""What a training step is fed: every image once an epoch, whatever the split over processes, and augmented as asked."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

pytest.importorskip("PIL", reason="pillow is not installed")

from PIL import Image

from levattention.vision import Augment, Preprocess, open_images
from levattention.vision.augment import inception_crop, random_crops
from levattention.vision.feed import Feed, Order, seeded
from levattention.vision.images import ArrayImages
from levattention.vision.randaug import OPERATIONS, rand_augment

CPU = torch.device("cpu")
PLAIN = Augment(flip=False)
SAME = Preprocess((0.0,), (1.0,), 4, 1)


def numbered(count, size=4):
    """Image i holds i everywhere but in its first row, which holds its column."""
    pixels = torch.arange(count, dtype=torch.uint8).view(-1, 1, 1, 1).repeat(1, 1, size, size)
    pixels[:, :, 0] = torch.arange(size, dtype=torch.uint8)
    return ArrayImages("numbered", pixels, torch.arange(count))


def test_every_image_comes_once_an_epoch():
    order = Order(10, 4, seed=3)
    run = torch.cat([order(step) for step in range(5)]).tolist()
    assert sorted(run[:10]) == sorted(run[10:]) == list(range(10))
    assert run[:10] != run[10:]
    assert Order(10, 4, seed=3)(3).tolist() == run[12:16]
    assert torch.cat([Order(10, 4, seed=4)(step) for step in range(3)]).tolist() != run[:12]


@pytest.mark.parametrize("augment", [PLAIN, Augment(flip=True), Augment(crop="inception")])
def test_a_feed_that_starts_later_goes_on_alike(augment):
    whole = list(Feed(numbered(10), SAME, augment, 4, 0, CPU)(0, 5))
    late = list(Feed(numbered(10), SAME, augment, 4, 0, CPU)(3, 5))
    for (images, labels, _), (again, named, _) in zip(whole[3:], late, strict=True):
        assert torch.equal(images, again)
        assert torch.equal(labels, named)
    assert all(images.shape == (4, 1, 4, 4) for images, _, _ in whole)
    if augment == PLAIN:
        assert all((images[:, 0, 1, 1] == labels).all() for images, labels, _ in whole)


def test_processes_share_a_batch():
    parts = [
        torch.cat([labels for _, labels, _ in Feed(numbered(10), SAME, PLAIN, 4, 0, CPU, share=(rank, 2))(0, 5)])
        for rank in range(2)
    ]
    whole = torch.cat([labels for _, labels, _ in Feed(numbered(10), SAME, PLAIN, 4, 0, CPU)(0, 5)])
    assert sorted(torch.cat(parts).tolist()) == sorted(whole.tolist())
    assert [len(part) for part in parts] == [10, 10]
    with pytest.raises(ValueError, match="expected a multiple of 3 processes, got 4"):
        Feed(numbered(10), SAME, PLAIN, 4, 0, CPU, share=(0, 3))


def test_files_are_fed_as_arrays_are(tmp_path):
    """The way by image files, with worker processes, gives what the way by memory gives."""
    images = numbered(6)
    for i in range(6):
        (tmp_path / "train" / "abcdef"[i]).mkdir(parents=True)
        Image.fromarray(images.pixels[i, 0].numpy()).save(tmp_path / "train" / "abcdef"[i] / "0.png")
    files = open_images(tmp_path, split="train")
    for workers in (0, 1):
        found = list(Feed(files, SAME, Augment(flip=True), 4, 5, CPU, workers=workers)(1, 4))
        wanted = list(Feed(images, SAME, Augment(flip=True), 4, 5, CPU)(1, 4))
        for (got, labels, _), (want, named, _) in zip(found, wanted, strict=True):
            assert torch.equal(labels, named)
            assert torch.equal(got, want)


def test_half_of_the_images_are_mirrored():
    """Of 2,000 images 1,000 ± 22.4; five standard deviations either way are missed with probability 6e-7."""
    images = torch.zeros(2000, 1, 2, 2, dtype=torch.uint8)
    images[..., 0] = 9
    flipped = Augment(flip=True).on_batch(images, 2, seeded(0))
    mirrored = flipped[:, 0, 0, 1] == 9
    assert 888 < int(mirrored.sum()) < 1112
    assert torch.equal(flipped[mirrored], images[mirrored].flip(-1))
    assert torch.equal(flipped[~mirrored], images[~mirrored])


def test_random_crops_are_cut_anywhere_from_the_image():
    """Each of 9 places is drawn 100 times in 900 on average, ± 9.4: none fewer than 50 times but with 1e-6."""
    image = torch.arange(36, dtype=torch.uint8).view(1, 1, 6, 6)
    crops = random_crops(image.expand(900, 1, 6, 6), 4, seeded(1))
    corners = crops[:, 0, 0, 0]
    for crop, corner in zip(crops, corners.tolist(), strict=True):
        top, left = divmod(corner, 6)
        assert torch.equal(crop[0], image[0, 0, top : top + 4, left : left + 4])
    places = corners.bincount(minlength=36).view(6, 6)[:3, :3]
    assert int(places.sum()) == 900
    assert int(places.min()) >= 50
    padded = Augment(crop="random", pad=1, flip=False).on_batch(image, 8, seeded(0))
    assert torch.equal(padded[..., 1:7, 1:7], image)
    assert int(padded.sum()) == int(image.sum())
    with pytest.raises(ValueError, match="expected sides of at least 7"):
        random_crops(image, 7, seeded(0))


def test_inception_crops_keep_to_their_areas_and_shapes(monkeypatch):
    """The stretches that are resized have 5 % to 100 % of the area and sides from 3:4 to 4:3, up to rounding."""
    cut = []
    whole = torch.nn.functional.interpolate

    def interpolate(image, **options):
        cut.append(image.shape[-2:])
        return whole(image, **options)

    monkeypatch.setattr("levattention.vision.augment.interpolate", interpolate)
    image = torch.full((3, 60, 80), 77, dtype=torch.uint8)
    for i in range(200):
        assert torch.equal(inception_crop(image, 16, seeded(i)), torch.full((3, 16, 16), 77, dtype=torch.uint8))
    area = np.array([h * w / 4800 for h, w in cut])
    ratio = np.array([w / h for h, w in cut])
    assert 0.045 < area.min() < 0.15
    assert 0.7 < area.max() <= 1
    assert 0.70 < ratio.min() < 0.80
    assert 1.25 < ratio.max() < 1.42


def test_mixup_mixes_a_batch_with_itself_moved_by_one():
    pixels, labels = torch.arange(4.0).view(4, 1, 1, 1) * 10, torch.tensor([0, 1, 2, 0])
    for seed in range(20):
        mixed, targets = Augment(mixup=0.2).mixed(pixels, labels, 3, seeded(seed))
        share = float(targets[1, 1])
        assert 0.5 <= share <= 1
        assert float(targets[1, 0]) == pytest.approx(1 - share, abs=1e-6)
        torch.testing.assert_close(
            mixed.flatten(), torch.tensor([30, 0, 10, 20]) * (1 - share) + share * pixels.flatten()
        )
    assert Augment().mixed(pixels, labels, 3, seeded(0))[1] is labels


def test_mixup_shares_are_of_beta():
    """E max(X, 1 − X) of Beta(0.2, 0.2), by quadrature, within five standard errors of 2,000 draws (6e-7)."""
    scipy_stats = pytest.importorskip("scipy.stats")
    beta = scipy_stats.beta(0.2, 0.2)
    mean, square = (beta.expect(lambda x, power=power: np.maximum(x, 1 - x) ** power) for power in (1, 2))
    pixels, labels = torch.zeros(2, 1), torch.tensor([0, 1])
    draws = [float(Augment(mixup=0.2).mixed(pixels, labels, 2, seeded(i))[1][0, 0]) for i in range(2000)]
    assert abs(np.mean(draws) - mean) < 5 * np.sqrt((square - mean**2) / 2000)


def test_randaugment_does_what_its_operations_say():
    rng = np.random.default_rng(0)
    image = Image.fromarray(rng.integers(0, 256, (20, 20, 3), np.uint8))
    pixels = np.asarray(image).astype(int)

    def done(name, share, draw=(0.0, 0.0)):
        return np.asarray(OPERATIONS[name](image.copy(), share, list(draw))).astype(int)

    assert np.array_equal(done("invert", 1.0), 255 - pixels)
    assert np.array_equal(done("posterize", 1.0), pixels // 16 * 16)
    assert np.array_equal(done("solarize", 0.5), np.where(pixels < 128, pixels, 255 - pixels))
    assert np.array_equal(done("solarize_add", 1.0), np.where(pixels < 128, pixels + 110, pixels).clip(0, 255))
    moved = done("translate_x", 0.05)
    assert np.array_equal(moved[:, :15], pixels[:, 5:])
    assert (moved[:, 15:] == 128).all()
    assert np.array_equal(done("translate_x", 0.05, (0.9, 0.0))[:, 5:], pixels[:, :15])
    assert np.array_equal(done("translate_y", 0.05)[:15], pixels[5:])
    cut = done("cutout", 0.1, (0.5, 0.5))
    assert (cut[6:14, 6:14] == 128).all()
    cut[6:14, 6:14] = pixels[6:14, 6:14]
    assert np.array_equal(cut, pixels)
    assert np.abs(done("brightness", 0.5) - pixels).max() <= 1
    assert np.abs(done("rotate", 0.0) - pixels).max() == 0
    stretched = done("autocontrast", 0.0)
    assert (stretched.min(), stretched.max()) == (0, 255)


def test_randaugment_draws_every_operation():
    """16 operations in 300 draws: each is missed with probability 16·(15/16)^300 < 1e-7 in all."""
    image = torch.randint(20, 200, (3, 40, 40), dtype=torch.uint8, generator=seeded(0))
    assert torch.equal(rand_augment(image, 0, 10, seeded(1)), image)
    found = [rand_augment(image, 1, 3, seeded(i)) for i in range(300)]
    assert torch.equal(found[0], rand_augment(image, 1, 3, seeded(0)))
    assert all(one.shape == image.shape and one.dtype == torch.uint8 for one in found)
    # Two signs for some of them, and a place for one.
    assert len({one.numpy().tobytes() for one in found}) >= len(OPERATIONS)
    with pytest.raises(ValueError, match=r"expected uint8 \(3, h, w\)"):
        rand_augment(image[:1], 1, 5, seeded(0))


def test_what_an_augmentation_takes():
    assert replace(PLAIN, crop="random").crop == "random"
    for wrong in ({"crop": "centre"}, {"mixup": -1.0}, {"randaug_magnitude": 11}):
        with pytest.raises(ValueError, match="expected"):
            Augment(**wrong)
