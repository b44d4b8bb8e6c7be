import statistics

import pytest

from nexus_ablate.measure.history import final_means, onsets, spike_score, spike_scores


def rows(values, name):
    return [{"step": 10 * i, "tokens": 640 * i, name: value} for i, value in enumerate(values)]


def test_an_onset_is_the_first_time_at_the_threshold_and_absent_where_it_never_came():
    seen = rows([0.0, 0.09, None, 0.1, 0.05, 0.4], "attn/sink_rate")
    assert onsets(seen) == {"attn/sink_rate": {"step": 30, "tokens": 1920}}
    assert onsets(rows([0.0, 0.05], "attn/sink_rate")) == {}
    assert onsets([]) == {}


def test_a_spike_is_seen_once_and_a_smooth_curve_has_none():
    calm = [3 - 0.001 * i + 0.01 * (-1) ** i for i in range(400)]
    assert spike_score(calm) == 0
    spiked = [*calm[:300], 5.0, *calm[301:]]
    assert spike_score(spiked) == pytest.approx(1 / (400 - 128))


def test_a_fall_is_no_spike():
    calm = [2 + 0.01 * (-1) ** i for i in range(400)]
    fallen = [*calm[:300], 0.0, *calm[301:]]
    assert spike_score(fallen) == 0


def test_the_score_is_the_definition_written_out():
    values = [((7919 * i) % 1009) / 1009 + (3.0 if i % 97 == 0 else 0) for i in range(300)]
    expected = [
        v > statistics.fmean(values[i - 32 : i]) + 2 * statistics.pstdev(values[i - 32 : i])
        for i, v in enumerate(values)
        if i >= 32
    ]
    assert spike_score(values, window=32, deviations=2) == sum(expected) / len(expected) > 0


def test_final_means_are_over_what_was_logged_in_the_last_tenth_of_the_steps():
    seen = [
        {"step": step, "grad_norm/global": float(step), "grad_norm/first_over_last": None}
        for step in range(10, 201, 10)
    ]
    means = final_means([*seen[:-1], {"step": 195, "act/resid/rms": 1.0}, seen[-1]], 200)
    assert means == {"grad_norm/global": 195}
    assert final_means(seen[-1:], 200) == {"grad_norm/global": 200}
    assert final_means([{"step": 0, "val/loss": 5.0}], 0) == {}


def test_too_few_values_have_no_score():
    assert spike_score([1.0] * 128) is None
    assert spike_score([1.0] * 129) == 0
    assert spike_scores(rows([3.0] * 60, "train/loss"), warmup=0) == {}


def test_warm_up_is_left_out():
    noisy = [100.0 if i % 2 else 3.0 for i in range(50)] + [3 + 0.01 * (-1) ** i for i in range(200)]
    noisy[200] = 4.0
    with_warmup = spike_scores(rows(noisy, "train/loss"), warmup=-1)["spike_score/train/loss"]
    without = spike_scores(rows(noisy, "train/loss"), warmup=499)["spike_score/train/loss"]
    assert without == pytest.approx(1 / (200 - 128))
    assert with_warmup != without
