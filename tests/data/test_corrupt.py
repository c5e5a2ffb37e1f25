import numpy as np
import pytest

from jaxfl.data import corrupt_clients, salt_and_pepper

GRAY = np.full((40, 20, 20, 1), 100, np.uint8)


@pytest.mark.parametrize("density", [0.0, 0.1, 0.5, 1.0])
def test_density_is_the_fraction_of_black_and_white(density):
    noisy = salt_and_pepper(GRAY, np.arange(40), density, seed=0)
    margin = 5 * np.sqrt(0.25 / GRAY.size)
    assert set(np.unique(noisy)) <= {0, 100, 255}
    for value in (0, 255):
        share = (noisy == value).mean()
        assert abs(share - density / 2) < margin
    assert density not in (0, 1) or (noisy != 100).mean() == density


def test_only_the_rows_of_a_copy_change():
    before = GRAY.copy()
    noisy = salt_and_pepper(before, np.array([3, 17]), 0.5, seed=0)
    assert (before == 100).all()
    assert np.flatnonzero((noisy != 100).any((1, 2, 3))).tolist() == [3, 17]
    assert not np.array_equal(noisy[3], noisy[17])


def test_seeds_decide():
    rows = np.arange(40)
    one, same, other = (salt_and_pepper(GRAY, rows, 0.5, seed=seed) for seed in (1, 1, 2))
    assert np.array_equal(one, same)
    assert (one == other).mean() < 0.5


def test_colour_pixels_change_together_and_flat_values_alone():
    colour = salt_and_pepper(np.full((10, 16, 16, 3), 100, np.uint8), np.arange(10), 0.5, seed=0)
    assert (colour == colour[..., :1]).all()
    flat = salt_and_pepper(np.full((10, 48), 100, np.uint8), np.arange(10), 0.5, seed=0)
    assert np.unique(flat).tolist() == [0, 100, 255]


def test_floating_inputs_go_to_the_extremes_of_all_inputs():
    inputs = np.linspace(-2, 3, 600, dtype=np.float32).reshape(6, 10, 10, 1)
    noisy = salt_and_pepper(inputs, np.array([2]), 1.0, seed=0)
    assert noisy.dtype == np.float32
    assert np.unique(noisy[2]).tolist() == [-2, 3]


def test_clients_without_examples_corrupt_nothing():
    nothing = np.zeros((0, 8, 8, 1), np.float32)
    assert corrupt_clients(nothing, [np.zeros(0, int)], [0.5], seed=0).shape == nothing.shape


def test_clients_in_any_order_and_company():
    lists = [np.array([5, 1, 30]), np.array([2]), np.array([], int), np.array([7, 8])]
    densities = [0.5, 0.2, 0.9, 0.0]
    noisy = corrupt_clients(GRAY, lists, densities, seed=4)
    assert np.array_equal(noisy, corrupt_clients(GRAY, lists[::-1], densities[::-1], seed=4))
    alone = salt_and_pepper(GRAY, np.array([30]), 0.5, seed=4)
    assert np.array_equal(noisy[30], alone[30])
    assert (noisy[[7, 8]] == 100).all()
    assert (noisy[2] != 100).mean() < (noisy[5] != 100).mean()


def test_higher_density_keeps_what_the_lower_corrupts():
    low, high = (salt_and_pepper(GRAY, np.arange(40), density, seed=0) for density in (0.2, 0.6))
    assert np.array_equal(high[low != 100], low[low != 100])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: salt_and_pepper(GRAY, np.array([0]), 1.1, seed=0), "density must be .* got 1.1"),
        (
            lambda: salt_and_pepper(GRAY, np.array([0]), float("nan"), seed=0),
            "density must be .* got nan",
        ),
        (lambda: salt_and_pepper(GRAY, np.array([40]), 0.1, seed=0), "40"),
        (lambda: salt_and_pepper(GRAY, np.array([-1]), 0.1, seed=0), "-1"),
        (lambda: salt_and_pepper(GRAY, np.array([0]), 0.1, seed=-1), "seed must be .* got -1"),
        (
            lambda: corrupt_clients(GRAY, [np.array([0])], [0.1, 0.2], seed=0),
            r"densities must have one .* got \[0.1, 0.2\]",
        ),
        (
            lambda: corrupt_clients(GRAY, [np.array([0]), np.array([0])], [0.1, 0.2], seed=0),
            "twice",
        ),
    ],
)
def test_wrong_arguments_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
