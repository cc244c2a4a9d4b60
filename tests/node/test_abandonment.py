"""The time that a process may survive SIGKILL: its sources and invalid values."""

from __future__ import annotations

import pytest

from tenax._node.job import abandon_s_from

pytestmark = pytest.mark.unit

NAME = "TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT"


@pytest.mark.parametrize(
    ("given", "variable", "seconds"),
    [
        (None, None, 10.0),
        (None, "", 10.0),
        (None, "2.5", 2.5),
        (7, "2.5", 7),
        (None, "0", 10.0),
        (None, "-1", 10.0),
        (0, "2.5", 2.5),
        (-1.0, None, 10.0),
    ],
)
def test_the_argument_then_the_variable_then_ten_seconds(
    given: float | None, variable: str | None, seconds: float
) -> None:
    """As in TorchElastic, 0 and less count as not given."""
    assert abandon_s_from({} if variable is None else {NAME: variable}, given) == seconds


@pytest.mark.parametrize("variable", ["soon", "nan", "inf", "1,5"])
def test_an_invalid_number_is_rejected(variable: str) -> None:
    with pytest.raises(ValueError, match=f"{NAME} is {variable!r}; expected a number of seconds"):
        abandon_s_from({NAME: variable})
