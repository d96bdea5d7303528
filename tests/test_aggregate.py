"""Updates of many devices: what is refused, clipped or left out, and the noise with its accountant."""

from __future__ import annotations

import math

import numpy as np
import pytest

from edgeft.errors import ConfigError, DataError
from edgeft.federated import aggregate
from edgeft.federated.aggregate import Received
from edgeft.federated.privacy import Privacy

SIZE = 4000
SIGNAL = np.random.default_rng(9).standard_normal(SIZE).astype(np.float32)


def honest(count: int, spread: float = 0.5) -> list[Received]:
    """Devices that agree about a direction, each with its own deviation."""
    random = np.random.default_rng(3)
    every = [SIGNAL + spread * random.standard_normal(SIZE).astype(np.float32) for _ in range(count)]
    return [Received(f"device-{number}", vector.astype(np.float32), 10 + number) for number, vector in enumerate(every)]


def cosine(vector: np.ndarray) -> float:
    return float(vector @ SIGNAL / np.linalg.norm(vector) / np.linalg.norm(SIGNAL))


def test_the_mean_is_weighted_by_rows() -> None:
    updates = [Received("a", np.float32([1, 0]), 30), Received("b", np.float32([0, 2]), 10)]
    combined, said = aggregate.combine(updates, "mean")
    np.testing.assert_allclose(combined, [0.75, 0.5])
    assert not said
    np.testing.assert_allclose(aggregate.combine(updates, "mean", by_rows=False)[0], [0.5, 1.0])


def test_no_device_outweighs_the_others_by_claiming_rows() -> None:
    updates = [Received(str(n), np.zeros(1, np.float32), 20) for n in range(7)]
    updates.append(Received("liar", np.ones(1, np.float32), 1 << 40))
    assert aggregate.combine(updates, "mean")[0][0] == pytest.approx(200 / 340)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_not_finite_are_refused(bad: float) -> None:
    vector = SIGNAL.copy()
    vector[7] = bad
    with pytest.raises(DataError, match="NaN or infinite"):
        aggregate.check(Received("a", vector, 5))


@pytest.mark.parametrize("rows", [0, -3])
def test_a_device_without_rows_is_refused(rows: int) -> None:
    with pytest.raises(DataError, match="rows"):
        aggregate.check(Received("a", SIGNAL, rows))


@pytest.mark.parametrize("count", [2, 3, 8])
def test_an_update_a_hundred_times_too_large_is_clipped_and_named(count: int) -> None:
    updates = honest(count)
    updates[0] = Received("huge", updates[0].vector * 100, 10)
    kept, said, usual = aggregate.clip_large(updates, 0.0)
    assert len(said) == 1
    assert said[0].startswith("huge: ")
    assert "clipped" in said[0]
    assert np.linalg.norm(kept[0].vector) == pytest.approx(aggregate.LIMIT * usual, rel=1e-4)
    assert all(one is other for one, other in zip(kept[1:], updates[1:], strict=True))


def test_alone_a_device_is_measured_by_the_round_before() -> None:
    lone = [Received("huge", SIGNAL * 100, 10)]
    kept, said, _ = aggregate.clip_large(lone, float(np.linalg.norm(SIGNAL)))
    assert said
    assert np.linalg.norm(kept[0].vector) < 10 * np.linalg.norm(SIGNAL)
    assert not aggregate.clip_large(lone, 0.0)[1]  # of the first round nothing is known


@pytest.mark.parametrize(("rule", "least"), [("mean", 0.8), ("trimmed", 0.95), ("krum", 0.97)])
def test_one_poisoned_device_among_eight_does_not_turn_the_update(rule: str, least: float) -> None:
    """Its sign flipped, ten times as large. A plain mean would point the other way."""
    updates = honest(8)
    updates[5] = Received("poisoned", -10 * updates[5].vector, 15)
    assert cosine(aggregate.weighted_mean([one.vector for one in updates], np.ones(8))) < 0
    kept, _, _ = aggregate.clip_large(updates, 0.0)
    combined, said = aggregate.combine(kept, rule)
    assert cosine(combined) > least
    assert np.linalg.norm(combined) > 0.3 * np.linalg.norm(SIGNAL)
    if rule == "krum":
        assert any(line.startswith("poisoned: left out") for line in said)


def test_krum_finds_a_poisoned_device_of_usual_size() -> None:
    updates = honest(8)
    updates[2] = Received("poisoned", -updates[2].vector, 12)
    assert 2 not in aggregate.krum([one.vector for one in updates])


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_few_devices_are_all_used(count: int) -> None:
    assert aggregate.krum([one.vector for one in honest(count)]) == list(range(count))
    for rule in aggregate.RULES:
        assert cosine(aggregate.combine(honest(count), rule)[0]) > 0.8


def test_the_trimmed_mean_is_that_of_sorted_columns() -> None:
    vectors = [one.vector for one in honest(10)]
    wanted = np.sort(np.stack(vectors), 0)[2:8].mean(0)
    np.testing.assert_allclose(aggregate.trimmed_mean(vectors), wanted, rtol=1e-6)


# ---------------------------------------------------------------- noise


def test_noise_of_all_devices_sums_to_the_multiple_of_the_clip() -> None:
    privacy = Privacy(epsilon=8, delta=1e-5, clip=0.5, noise=2.0)
    random = np.random.default_rng(1)
    total = sum(privacy.protect(np.zeros(SIZE, np.float32), 4, random).astype(np.float64) for _ in range(4))
    assert np.std(total) == pytest.approx(2.0 * 0.5, rel=0.05)
    assert privacy.noise_of(4, 4) == pytest.approx(2.0)
    assert privacy.noise_of(9, 4) == pytest.approx(3.0)


def test_a_device_clips_before_it_adds_noise() -> None:
    silent = Privacy(epsilon=8, delta=1e-5, clip=0.5, noise=1e-12)
    assert np.linalg.norm(silent.protect(SIGNAL * 50, 4)) == pytest.approx(0.5, rel=1e-4)
    small = (SIGNAL / np.linalg.norm(SIGNAL) * 0.1).astype(np.float32)
    np.testing.assert_allclose(silent.protect(small, 4), small, atol=1e-6)


def test_the_noise_is_another_one_each_time() -> None:
    privacy = Privacy(epsilon=8, delta=1e-5, noise=1.0)
    assert not np.array_equal(privacy.protect(SIGNAL, 4), privacy.protect(SIGNAL, 4))


def test_with_noise_only_a_gross_update_is_refused() -> None:
    updates = honest(4)
    updates[0] = Received("large", updates[0].vector * 50, 10)
    updates[1] = Received("gross", updates[1].vector * 5000, 10)
    kept, said = aggregate.refuse_gross(updates)
    assert [one.name for one in kept] == ["large", "device-2", "device-3"]
    assert said[0].startswith("gross: ")


@pytest.mark.slow
def test_the_accountant_composes_rounds() -> None:
    """Calibrated for ten rounds, ten rounds spend the budget and an eleventh exceeds it."""
    pytest.importorskip("opacus")
    privacy = Privacy.parse("epsilon=8,delta=1e-5").calibrated(10)
    spent = [privacy.spent([privacy.noise] * count) for count in (0, 1, 10, 11)]
    assert spent[0] == 0 < spent[1] < spent[2]
    assert 7.9 < spent[2] <= 8 < spent[3]
    # Renyi: alpha rounds / (2 noise²) + log(1/delta) / (alpha - 1) at the best alpha bounds it from above
    alphas = np.linspace(1.01, 200, 20000)
    bound = min(alphas * 10 / (2 * privacy.noise**2) + math.log(1e5) / (alphas - 1))
    assert spent[2] <= bound < spent[2] * 1.25
    assert privacy.spent([2 * privacy.noise] * 10) < spent[2]


def test_without_opacus_the_hint_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "opacus", None)
    monkeypatch.setitem(__import__("sys").modules, "opacus.accountants", None)
    with pytest.raises(ConfigError) as error:
        Privacy(8, 1e-5, noise=1.0).spent([1.0])
    assert "edgeft[federated]" in error.value.hint


@pytest.mark.parametrize(
    "text", ["", "epsilon=8", "delta=1e-5", "epsilon=8,delta=2", "epsilon=-1,delta=1e-5", "epsilon=nan,delta=1e-5"]
)
def test_a_budget_that_says_nothing_is_an_error_with_a_hint(text: str) -> None:
    with pytest.raises(ConfigError) as error:
        Privacy.parse(text)
    assert "epsilon=8,delta=1e-5" in error.value.hint
