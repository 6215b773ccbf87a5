from __future__ import annotations

import pytest
import torch

from pdecay.lab.data import shakespeare
from pdecay.lab.data.sources import Images
from pdecay.lab.data.streams import ImageStream, TextStream, derive


@pytest.fixture
def images() -> Images:
    """Random images with their numbers as labels."""
    random = torch.Generator().manual_seed(0)
    x = torch.randint(256, (50, 3, 6, 5), generator=random, dtype=torch.uint8)
    labels = torch.arange(50)
    return Images((x[:40], labels[:40]), (x[40:47], labels[:7]), (x[47:], labels[:3]))


@pytest.fixture
def text() -> shakespeare.Text:
    return shakespeare.encode("".join(chr(97 + i * i % 23) for i in range(1000)))


def same(one, other) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_batch_depends_on_seed_and_step_only(images, text):
    def streams():
        return ImageStream(images, size=16, pad=2, flip=True), TextStream(text, size=4, block=10)

    for stream, fresh in zip(streams(), streams(), strict=True):
        walked = [stream.batch(3, step) for step in range(10)]
        for step in (7, 2, 9, 0):  # in any order, from a new stream
            assert same(fresh.batch(3, step), walked[step])
        assert not same(stream.batch(4, 0), walked[0])
        assert not same(stream.batch(3, 1), walked[0])


def test_batch_does_not_use_global_generator(images, text):
    before = torch.get_rng_state()
    ImageStream(images, size=16, pad=2, flip=True).batch(0, 0)
    TextStream(text, size=4, block=10).batch(0, 0)
    assert torch.equal(torch.get_rng_state(), before)


def test_epoch_has_every_image_once_in_new_order(images):
    stream = ImageStream(images, size=16)
    assert stream.steps_per_epoch == 3
    epochs = [[stream.batch(0, 3 * epoch + k)[1] for k in range(3)] for epoch in range(2)]
    assert [len(labels) for labels in epochs[0]] == [16, 16, 8]
    first, second = (torch.cat(labels).tolist() for labels in epochs)
    assert sorted(first) == sorted(second) == list(range(40))
    assert first != second


def test_images_are_standardised_by_channel(images):
    x = torch.cat([ImageStream(images, size=8).batch(0, step)[0] for step in range(5)])
    torch.testing.assert_close(x.mean(dim=(0, 2, 3)), torch.zeros(3), atol=1e-5, rtol=0)
    torch.testing.assert_close(x.std(dim=(0, 2, 3)), torch.ones(3), atol=1e-3, rtol=0)


def test_evaluation_splits_are_standardised_and_not_augmented(images):
    stream = ImageStream(images, size=8, pad=2, flip=True)
    train = images.train[0].float()
    mean = train.mean((0, 2, 3), keepdim=True)
    deviation = train.std((0, 2, 3), keepdim=True, correction=0)
    for batches, (pixels, labels) in (
        (stream.validation(), images.validation),
        (stream.test(), images.test),
    ):
        ((x, y),) = batches
        assert torch.equal(y, labels)
        expected = (pixels.float() - mean) / deviation
        torch.testing.assert_close(x, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("pad", [0, 1, 4])
@pytest.mark.parametrize("flip", [False, True])
def test_augmented_image_is_crop_of_padded_image(images, pad, flip):
    stream = ImageStream(images, size=40, pad=pad, flip=flip)
    random = torch.Generator().manual_seed(0)
    augmented = stream._augment(images.train[0], random)
    padded = torch.nn.functional.pad(images.train[0], [pad] * 4)
    seen = set()
    for image, whole in zip(augmented, padded, strict=True):
        matches = [
            (top, left, mirrored)
            for top in range(2 * pad + 1)
            for left in range(2 * pad + 1)
            for mirrored in (False, True)
            if torch.equal(
                image.flip(-1) if mirrored else image, whole[:, top : top + 6, left : left + 5]
            )
        ]
        assert matches
        seen.update(matches)
    assert {mirrored for *_, mirrored in seen} == ({False, True} if flip else {False})
    if pad:
        assert len(seen) > 5


def test_targets_are_the_next_characters(text):
    stream = TextStream(text, size=4, block=10)
    inputs, targets = stream.batch(0, 0)
    assert inputs.shape == targets.shape == (4, 10)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert text.decode(inputs[0]) in text.decode(text.train)


def test_evaluation_splits_use_each_character_once(text):
    stream = TextStream(text, size=4, block=10)
    for split, tokens in ((stream.validation, text.validation), (stream.test, text.test)):
        inputs = torch.cat([inputs for inputs, _ in split()])
        targets = torch.cat([targets for _, targets in split()])
        assert torch.equal(inputs.flatten(), tokens[:40])
        assert torch.equal(targets.flatten(), tokens[1:41])


def test_text_shorter_than_an_excerpt_is_refused(text):
    with pytest.raises(ValueError, match="too short for excerpts of 100"):
        TextStream(text, size=4, block=100)


def test_derived_seeds_differ():
    seeds = {
        derive(seed, stream, step) for seed in range(5) for stream in range(3) for step in (0, 1)
    }
    assert len(seeds) == 30
    with pytest.raises(ValueError, match="seed must be >= 0, got -1"):
        derive(-1)
