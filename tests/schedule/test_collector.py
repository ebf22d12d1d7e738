"""The cyclic collector rests inside and is afterwards as it was."""

import gc

import pytest

from fourfold.schedule.collector import resting


@pytest.fixture(params=[True, False], ids=["on", "off"])
def before(request):
    was = gc.isenabled()
    (gc.enable if request.param else gc.disable)()
    yield request.param
    (gc.enable if was else gc.disable)()


def test_it_rests_and_comes_back(before):
    with resting():
        assert not gc.isenabled()
        with resting():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled() == before


def test_it_comes_back_after_an_error(before):
    @resting()
    def fail():
        assert not gc.isenabled()
        raise KeyError("lost")

    for _ in range(2):
        with pytest.raises(KeyError, match="lost"):
            fail()
        assert gc.isenabled() == before
