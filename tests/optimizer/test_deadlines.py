from perseus_ds.optimizer.exact.deadlines import Tangent, refine


def test_a_step_in_the_curve_is_not_searched_for_beyond_what_tells_two_times_apart():
    asked = []

    def at(time_s):
        asked.append(time_s)
        return Tangent(time_s, 2.0 if time_s < 1.3 else 1.0, 0.0)

    found = refine(at(1.0), at(2.0), at, 10_000)
    assert 20 < len(found) == len(set(asked)) < 50
