"""What a user may ask for is TorchElastic's: the same names, values and defaults."""

from __future__ import annotations

import copy
import pickle

import pytest

from tenax.numa.binding import AffinityMode, NumaOptions


def test_the_modes_are_the_words_of_the_command_line() -> None:
    """Every mode is its own string, so a flag's value is a mode."""
    assert [mode.value for mode in AffinityMode] == ["node", "socket", "exclusive", "core-complex"]
    assert AffinityMode("core-complex") is AffinityMode.CORE_COMPLEX
    assert str.__eq__(AffinityMode.NODE, "node")


def test_options_are_a_value() -> None:
    """Options compare by content, cannot be changed, and survive the way into another process."""
    options = NumaOptions(AffinityMode.NODE)
    assert options == NumaOptions(affinity_mode=AffinityMode.NODE, should_fall_back_if_binding_fails=False)
    assert options != NumaOptions(AffinityMode.NODE, should_fall_back_if_binding_fails=True)
    assert hash(options) == hash(copy.deepcopy(options))
    assert pickle.loads(pickle.dumps(options)) == options
    with pytest.raises(AttributeError):
        options.affinity_mode = AffinityMode.SOCKET  # type: ignore[misc]
