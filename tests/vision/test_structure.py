"""The masses of attention matrices: by hand, by brute force, and those of a model's own matrices."""

from itertools import combinations

import numpy as np
import pytest
import torch
from scipy.stats import wasserstein_distance
from torch.nn.functional import scaled_dot_product_attention

pytest.importorskip("transformers", reason="transformers is not installed")

import dense
import levattention as la
from levattention.integrations.huggingface import use_lev_attention
from levattention.residuals import Cluster
from levattention.vision.layout import Layout, layout
from levattention.vision.observe import observing
from levattention.vision.structure import BINS, COARSE, KINDS, Structure, histogram, masses, spread, structure
from tiny_models import PREPARE, some_images, tiny_vit


def line_of_three():
    """A class token and three patches in a row, near within 1: 1-2-3."""
    return Layout(depth=1, heads=1, h=1, w=3, prefix=1).grid(1).near(torch.arange(4), torch.arange(4))


def test_masses_by_hand():
    """Tokens c, 1, 2, 3; near: c to itself, 1-2, 2-3. In sixteenths, every number below is added up by eye."""
    attention = torch.tensor([[4, 6, 1, 5], [9, 4, 2, 1], [8, 1, 3, 4], [2, 10, 1, 3]]) / 16
    near = line_of_three()
    assert near.int().tolist() == [[1, 0, 0, 0], [0, 1, 1, 0], [0, 1, 1, 1], [0, 0, 1, 1]]
    found = masses(attention, near, top=2)
    sixteenths = {name: (getattr(found, name) * 16).tolist() for name in ("top", "local", "covered", "nonlocal_mass")}
    assert sixteenths["top"] == [11, 13, 12, 13]
    assert sixteenths["local"] == [4, 6, 8, 4]
    # W: c gets 9 + 8 + 2, patch 1 gets 6 + 10, patch 2 gets 1, patch 3 gets 5 + 1. Important: c and 1.
    assert sixteenths["nonlocal_mass"] == [19, 16, 1, 6]
    assert found.important.tolist() == [True, True, False, False]
    assert sixteenths["covered"] == [4 + 6, 4 + 2 + 9, 1 + 3 + 4 + 8, 1 + 3 + 2 + 10]


@pytest.mark.parametrize(("h", "w", "prefix", "radius", "top"), [(14, 14, 1, 3, 32), (3, 5, 0, 1, 4), (2, 2, 3, 0, 7)])
def test_matrices_of_one_kind(h, w, prefix, radius, top):
    """Each query sees itself; all see one token; all see all alike."""
    n = prefix + h * w
    here = torch.arange(n)
    near = Layout(1, 1, h, w, prefix).grid(radius).near(here, here)
    own = masses(torch.eye(n), near, top)
    assert torch.stack([own.top, own.local, own.covered]).eq(1).all()
    assert own.nonlocal_mass.eq(0).all()
    sink = n // 2
    drawn = masses(torch.eye(n)[sink].expand(n, n), near, top)
    assert drawn.important[sink]
    assert drawn.covered.eq(1).all()
    assert drawn.nonlocal_mass.tolist() == [float((~near[:, sink]).sum()) if j == sink else 0.0 for j in range(n)]
    assert drawn.local.tolist() == near[:, sink].double().tolist()
    even = masses(torch.full((n, n), 1 / n), near, top)
    torch.testing.assert_close(even.top, torch.full((n,), top / n, dtype=torch.float64), rtol=1e-6, atol=0)
    torch.testing.assert_close(even.local, near.double().sum(-1) / n, rtol=1e-6, atol=0)


def brute_force(attention, h, w, prefix, radius, top):
    """The definitions of section 5.1, entry by entry."""
    n = len(attention)

    def near(i, j):
        if i < prefix or j < prefix:
            return i == j
        (y, x), (v, u) = divmod(i - prefix, w), divmod(j - prefix, w)
        return abs(y - v) + abs(x - u) <= radius

    received = [sum(attention[i][j] for i in range(n) if not near(i, j)) for j in range(n)]
    important = set(sorted(range(n), key=lambda j: -received[j])[:top])
    return {
        "top": [sum(sorted(row, reverse=True)[:top]) for row in attention],
        "local": [sum(row[j] for j in range(n) if near(i, j)) for i, row in enumerate(attention)],
        "covered": [sum(row[j] for j in range(n) if near(i, j) or j in important) for i, row in enumerate(attention)],
        "nonlocal_mass": received,
    }


@pytest.mark.parametrize("seed", range(4))
def test_masses_entry_by_entry(seed, generator):
    h, w, prefix, radius, top = [(4, 3, 1, 2, 5), (1, 9, 0, 3, 3), (3, 3, 2, 1, 11), (5, 2, 1, 9, 1)][seed]
    n = prefix + h * w
    here = torch.arange(n)
    attention = (torch.randn(2, 3, n, n, generator=generator, dtype=torch.float64) * 3).softmax(-1)
    found = masses(attention, Layout(1, 1, h, w, prefix).grid(radius).near(here, here), top)
    for i in range(2):
        for j in range(3):
            for name, want in brute_force(attention[i, j].tolist(), h, w, prefix, radius, top).items():
                np.testing.assert_allclose(getattr(found, name)[i, j], want, rtol=1e-12)


def test_masses_say_what_does_not_fit():
    near = torch.ones(4, 4, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"attention: expected .* got \(4, 3\), \(4, 4\)"):
        masses(torch.ones(4, 3), near, 2)
    with pytest.raises(ValueError, match="top: expected an integer between 1 and n = 4, got 5"):
        masses(torch.ones(4, 4), near, 5)


def test_histograms_count_every_query():
    assert histogram(torch.tensor([0.0, 0.004, 0.5, 0.999, 1.0, 1.0 + 1e-6]))[[0, 50, 99]].tolist() == [2, 1, 3]


def test_mean_distance_over_pairs(generator):
    values = torch.randn(3, 6, 4, generator=generator)
    pairs = [(values[:, i] - values[:, j]).abs().double() for i, j in combinations(range(6), 2)]
    torch.testing.assert_close(spread(values), torch.stack(pairs).mean(0))


def test_distances_between_images_and_heads_are_scipys(generator):
    shape = (len(KINDS), 2, 3, 4)
    values = torch.rand(*shape, 37, generator=generator) ** torch.tensor([1.0, 4.0, 9.0]).view(1, 1, 3, 1, 1)
    place = Layout(depth=2, heads=3, h=6, w=6, prefix=1)
    nothing = torch.zeros(1)
    found = Structure(place, 3, 2, histogram(values), *[nothing] * 4, (nothing, nothing), nothing)
    bins = (np.arange(BINS) + 0.5) / BINS
    counts = histogram(values).double().numpy()

    def mean(pairs):
        shown = [
            (
                wasserstein_distance(bins, bins, a, b),
                np.abs(a.reshape(COARSE, -1).sum(1) - b.reshape(COARSE, -1).sum(1)).sum() / 2 / 37,
            )
            for a, b in pairs
        ]
        return np.mean(shown, axis=0)

    distances = found.distances()
    for kind, layer, head in [(0, 0, 0), (1, 1, 2), (2, 0, 1)]:
        want = mean(combinations(counts[kind, layer, head], 2))
        got = [distances["images"][i][kind, layer, head] for i in range(2)]
        np.testing.assert_allclose(got, want, rtol=1e-10)
    want = np.mean([mean(combinations(counts[1, :, :, image].reshape(6, BINS), 2)) for image in range(4)], axis=0)
    np.testing.assert_allclose([distances["heads"][i][1] for i in range(2)], want, rtol=1e-10)
    np.testing.assert_allclose(found.at_least(0.5)[1, 1, 2], (values[1, 1, 2] >= 0.5).double().mean())


def test_a_model_is_seen_as_it_is():
    """The matrices are transformers' own; the logits stay; the model is left as it was."""
    model, images = tiny_vit(), some_images(3)
    pixels = PREPARE(images.pixels)
    seen = {}
    with torch.no_grad():
        want = model(pixel_values=pixels).logits
        before = model.config._attn_implementation
        with observing(model, lambda layer, weights, q, k: seen.update({layer: weights})):
            got = model(pixel_values=pixels).logits
        assert model.config._attn_implementation == before
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
        model.set_attn_implementation("eager")
        for layer, weights in enumerate(model(pixel_values=pixels, output_attentions=True).attentions):
            torch.testing.assert_close(seen[layer], weights)
    assert not any(hasattr(module, "_observer") for module in model.modules())


def test_a_model_under_levattention_is_seen_through_its_keys():
    model, images = tiny_vit(), some_images(2)
    pixels = PREPARE(images.pixels)
    window = la.Grid(6, 6, 1, prefix=1)
    use_lev_attention(model, top_k=5, window=window, layers={1: {"scorer": la.scorers.Norm(), "window": 0}})
    seen = {}
    with torch.no_grad():
        want = model(pixel_values=pixels).logits
        with observing(model, lambda *told: seen.update({told[0]: told[1:]})):
            got = model(pixel_values=pixels).logits
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(model(pixel_values=pixels).logits, want)
    near = window.near(torch.arange(37), torch.arange(37))
    for layer, window_seen in ((0, near), (1, torch.zeros_like(near))):
        weights, queries, keys = seen[layer]
        for image in range(2):
            for head in range(2):
                rows = keys[image, head].double()
                scores = rows.square().sum(-1) if layer else dense.leverage(rows, 4 * 2.0**-23)
                allowed = window_seen.clone()
                allowed[:, dense.best(scores, 5)] = True
                one = scaled_dot_product_attention(
                    queries[image, head], keys[image, head], torch.eye(37), attn_mask=allowed
                )
                torch.testing.assert_close(weights[image, head], one, rtol=1e-4, atol=1e-6)
    use_lev_attention(model, top_k=5, residual=Cluster())
    with pytest.raises(ValueError, match="Cluster attends to slots that are no keys"), observing(model, print):
        pass


def test_structure_of_a_model_is_that_of_its_matrices():
    """Batches of any size give what transformers' matrices give, image by image."""
    model, images = tiny_vit(), some_images(5)
    found = structure(model, images, PREPARE, top=4, radius=2, batch=2, examples=3)
    place = layout(model)
    assert (place.depth, place.heads, place.h, place.w, place.prefix) == (2, 2, 6, 6, 1)
    near = place.grid(2).near(torch.arange(37), torch.arange(37))
    model.set_attn_implementation("eager")
    keys = []
    for layer in model.vit.layers:
        layer.attention.k_proj.register_forward_hook(lambda module, inputs, out: keys.append(out))
    with torch.no_grad():
        matrices = model(pixel_values=PREPARE(images.pixels), output_attentions=True).attentions
    for layer in range(2):
        want = masses(matrices[layer], near, 4)
        heads = keys[layer].unflatten(-1, (2, 8)).transpose(1, 2)
        chosen = la.universal_set(heads, k=4).mask(37)
        for i, kind in enumerate(KINDS):
            mass = getattr(want, kind)
            torch.testing.assert_close(found.means[i, layer], mass.mean((0, -1)), rtol=1e-4, atol=1e-6)
            # Rounding moves a mass over the edge of a bin, but no further.
            gap = (found.histograms[i, layer].transpose(0, 1) - histogram(mass)).cumsum(-1).abs().max()
            assert gap <= 1
        torch.testing.assert_close(found.nonlocal_mass[layer], want.nonlocal_mass.mean(0), rtol=1e-4, atol=1e-5)
        assert torch.equal(found.chosen[layer], chosen.sum(0))
        assert torch.equal(found.examples[1][:, layer], chosen[:3])
        both = (chosen & want.important).sum(-1).double().mean(0)
        torch.testing.assert_close(found.overlap[layer], both)
    assert found.histograms.sum(-1).eq(37).all()
    numbers = found.numbers()
    assert numbers["masses"]["top"]["mean"] == [
        [pytest.approx(float(x), abs=1e-6) for x in row] for row in found.means[0]
    ]
    assert numbers["masses"]["top"]["uniform"] == pytest.approx(4 / 37, abs=1e-6)
    assert numbers["important_in_universal_by_chance"] == pytest.approx(16 / 37)


def test_important_keys_under_levattention_are_those_of_full_attention():
    """The first layer's queries and keys do not depend on what is seen, so neither does the overlap."""
    model, images = tiny_vit(), some_images(4)
    full = structure(model, images, PREPARE, top=4)
    seen = structure(use_lev_attention(model, top_k=4), images, PREPARE, top=4)
    torch.testing.assert_close(seen.overlap[0], full.overlap[0])
    assert torch.equal(seen.chosen[0], full.chosen[0])
    assert seen.means[0, 0].mean() > full.means[0, 0].mean()
    # Four keys hold all there is.
    torch.testing.assert_close(seen.means[0], torch.ones(2, 2, dtype=torch.float64), rtol=1e-5, atol=0)
    assert seen.overlap[0].max() < 4


def test_one_image_has_no_distances():
    numbers = structure(tiny_vit(), some_images(1), PREPARE, top=4).numbers()
    assert numbers["masses"]["local"]["wasserstein_between_images"] is None
    assert numbers["masses"]["local"]["wasserstein_between_heads"] > 0


def test_structure_says_what_does_not_fit():
    with pytest.raises(ValueError, match="top: expected an integer between 1 and n = 37, got 38"):
        structure(tiny_vit(), some_images(1), PREPARE, top=38)
    with pytest.raises(ValueError, match="batch: expected at least one"):
        structure(tiny_vit(), some_images(1), PREPARE, batch=0)
    with pytest.raises(ValueError, match="model: expected a vision transformer"):
        layout(torch.nn.Linear(2, 2))
