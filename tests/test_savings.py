"""What default clocks take, by order, from iterations of the job and from the profile."""

import pytest

from perseus_ds.savings import DefaultClocks, Size, exponent


def test_an_order_takes_the_mean_of_its_own_iterations_without_stalls():
    found = DefaultClocks()
    for time_s in (1.0, 1.0, 1.1, 30.0, 1.1):
        found.add(0, time_s, 100 * time_s)
    default = found.of(0)
    assert default.is_measured
    assert default.time_s == pytest.approx(1.05), "a mean, since means are compared with it"
    assert default.energy_j == pytest.approx(105)
    assert default.power_w == pytest.approx(100)


def test_an_order_that_was_not_measured_is_predicted_and_scaled_like_those_that_were():
    found = DefaultClocks()
    assert found.of(0) is None
    found.predict(0, 1.0, 100.0)
    found.predict(1, 2.0, 200.0)
    assert (found.of(1).time_s, found.of(1).is_measured) == (2.0, False)
    for _ in range(4):
        found.add(0, 1.1, 130.0)
    assert found.of(0).is_measured
    assert found.of(1).time_s == pytest.approx(2.2)
    assert found.of(1).energy_j == pytest.approx(260)
    assert not found.of(1).is_measured


def test_if_energies_cannot_be_read_the_time_is_measured_and_the_energy_is_predicted():
    found = DefaultClocks()
    found.predict(0, 1.0, 100.0)
    for _ in range(4):
        found.add(0, 1.2, float("nan"))
    assert found.of(0).time_s == pytest.approx(1.2)
    assert (found.of(0).energy_j, found.of(0).is_measured) == (100.0, False)


def test_only_the_last_iterations_count():
    found = DefaultClocks()
    for time_s in [2.0] * 40 + [1.0] * 8:
        found.add(0, time_s, 100.0)
    assert found.of(0).time_s == 1.0


def test_the_relative_time_of_an_order_is_that_to_the_mean_of_the_last_iterations():
    found = DefaultClocks()
    assert found.relative_time(0) == 1.0
    found.predict(0, 1.0, 100.0)
    found.predict(1, 3.0, 300.0)
    for _ in range(50):
        found.count(0)
        found.count(1)
    assert found.relative_time(1) == pytest.approx(1.5)
    assert found.relative_time(2) == 1.0, "nothing is known of this order"


def test_measured_iterations_are_saved_and_restored():
    found, restored = DefaultClocks(), DefaultClocks()
    for energy_j in (100.0, 101.0, float("nan"), 102.0):
        found.add(3, 1.5, energy_j)
    restored.restore(found.state())
    assert restored.of(3) == found.of(3)
    restored.restore({"measured": "damaged"})
    assert restored.of(3) == found.of(3)


def test_a_prediction_is_refuted_if_default_clocks_certainly_take_another_time():
    found = DefaultClocks()
    found.predict(0, 1.0, 100.0)
    for time_s in (1.01, 1.011, 1.009, 1.01):
        found.add(0, time_s, 100.0)
    assert not found.refutes_prediction(0), "it is right within 2 %"
    for time_s in (1.2, 0.9, 1.3, 1.0, 1.2, 0.8, 1.1, 1.2):
        found.add(0, time_s, 100.0)
    assert not found.refutes_prediction(0), "times vary too much"
    for time_s in (1.05, 1.051, 1.049, 1.05, 1.05, 1.05, 1.05, 1.05):
        found.add(0, time_s, 100.0)
    assert found.refutes_prediction(0)


# Inputs of different lengths.


def size(tokens):
    return Size(tokens, tokens)


def of_two_lengths(*lengths):
    """Return default clocks of iterations of these lengths, of which the usual one takes 1 s and 100 J."""
    found = DefaultClocks()
    for length in lengths:
        found.add(0, length, 100 * length, size(1000 * length))
    return found


def test_an_iteration_is_compared_with_default_clocks_for_inputs_of_its_size():
    found = of_two_lengths(1.0, 1.25, 1.25, 1.0, 1.25)
    for length in (1.0, 1.1, 1.25):
        default = found.of(0, size(1000 * length))
        assert default.time_s == pytest.approx(length, rel=0.002)
        assert default.energy_j == pytest.approx(100 * length, rel=0.002)
    assert found.of(0).time_s == pytest.approx(found.of(0, size(1142)).time_s, rel=0.01), "that of the usual size"


def test_the_longest_pipeline_determines_the_time_and_the_mean_of_all_the_energy():
    found = DefaultClocks()
    for first, second in ((1.0, 1.0), (1.0, 1.25), (1.25, 1.0), (1.25, 1.25)):
        found.add(0, max(first, second), 50 * (first + second), Size.of([first, second]))
    assert found.of(0, Size.of([1.0, 1.25])).time_s == pytest.approx(1.25, rel=0.002)
    assert found.of(0, Size.of([1.0, 1.25])).energy_j == pytest.approx(112.5, rel=0.003)
    assert Size.of([1.0, 0.0]) is None, "the tokens of a pipeline are not known"


def test_times_that_do_not_depend_on_the_size_are_not_scaled():
    found = DefaultClocks()
    for tokens in (1000, 1250, 1250, 1000, 800):
        found.add(0, 1.0, 100.0, size(tokens))
    assert found.of(0, size(1500)).time_s == pytest.approx(1.0, rel=0.01)


def test_noise_is_not_taken_for_an_effect_of_sizes_that_hardly_differ():
    noisy = [(1000 + number, 1 + 0.005 * (-1) ** number) for number in range(8)]
    assert 0.8 < exponent([noisy]) < 1.2
    assert exponent([[(1000.0, 1.0), (2000.0, 4.0)], [(1000.0, 30.0), (2000.0, 120.0)]]) == pytest.approx(2, rel=0.01)
    assert exponent([]) == 1.0


def test_a_profile_of_shorter_inputs_is_not_refuted_by_longer_ones():
    found = of_two_lengths(1.25, 1.25, 1.0, 1.25, 1.25)
    found.predict(0, 1.0, 100.0, 1000.0)
    assert not found.refutes_prediction(0)
    assert found.time_factor(1250.0) == pytest.approx(1.25, rel=0.002)
    assert found.time_factor(0.0) == 1.0
    found.predict(0, 0.9, 90.0, 1000.0)
    assert found.refutes_prediction(0)


def test_another_order_is_predicted_for_inputs_of_the_same_size():
    found = of_two_lengths(1.0, 1.25, 1.25, 1.0)
    found.predict(0, 1.0, 100.0, 1000.0)
    found.predict(1, 2.0, 200.0, 1000.0)
    assert found.of(1, size(1250)).time_s == pytest.approx(2.5, rel=0.002)


def test_sizes_are_saved_and_restored():
    found, restored = of_two_lengths(1.0, 1.25, 1.25, 1.0), DefaultClocks()
    restored.restore(found.state())
    assert restored.of(0, size(1250)) == found.of(0, size(1250))
