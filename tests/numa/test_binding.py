"""The options of NUMA bindings have TorchElastic's names, values and defaults."""

from __future__ import annotations

import copy
import pickle

import pytest

from tenax.numa.binding import AffinityMode, NumaOptions


def test_every_mode_is_a_value_of_the_flag() -> None:
    """Every mode equals its string."""
    assert [mode.value for mode in AffinityMode] == ["node", "socket", "exclusive", "core-complex"]
    assert AffinityMode("core-complex") is AffinityMode.CORE_COMPLEX
    assert str.__eq__(AffinityMode.NODE, "node")


def test_options_compare_by_value_and_can_be_pickled() -> None:
    """And cannot be changed."""
    options = NumaOptions(AffinityMode.NODE)
    assert options == NumaOptions(affinity_mode=AffinityMode.NODE, should_fall_back_if_binding_fails=False)
    assert options != NumaOptions(AffinityMode.NODE, should_fall_back_if_binding_fails=True)
    assert hash(options) == hash(copy.deepcopy(options))
    assert pickle.loads(pickle.dumps(options)) == options
    with pytest.raises(AttributeError):
        options.affinity_mode = AffinityMode.SOCKET  # type: ignore[misc]
