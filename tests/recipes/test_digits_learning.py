"""Short runs with loose bounds: the loop improves the student, and the same loop with one thing broken does not."""

from __future__ import annotations

import pytest

from recipes.digits.controls import control

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

OPTIONS = ["--num-rollout", "100", "--student-ema-decay", "0.9"]


def test_the_student_improves() -> None:
    before, after = control("real", 1, OPTIONS)
    assert after["fd"] < 0.5 * before["fd"]


@pytest.mark.parametrize("kind", ["flipped", "frozen"])
def test_negative_controls_do_not_improve_the_student(kind: str) -> None:
    before, after = control(kind, 1, OPTIONS)
    assert after["fd"] > 0.95 * before["fd"]
