"""How long a process may survive SIGKILL: who says it, and what is no number."""

from __future__ import annotations

import pytest

from tenax._node.abandonment import abandon_s_from

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
    """TorchElastic takes 0 and less for "do not": clusters that say so have not asked for a time."""
    assert abandon_s_from({} if variable is None else {NAME: variable}, given) == seconds


@pytest.mark.parametrize("variable", ["soon", "nan", "inf", "1,5"])
def test_what_is_no_number_is_refused(variable: str) -> None:
    with pytest.raises(ValueError, match=f"{NAME} is {variable!r}; expected a number of seconds"):
        abandon_s_from({NAME: variable})
