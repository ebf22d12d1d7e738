"""A wish to stop."""

import os
import signal
import threading

import pytest

from fourfold.training.stop import Stop


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_is_a_wish(number):
    before = signal.getsignal(number)
    with Stop() as stop:
        assert not stop()
        os.kill(os.getpid(), number)
        assert stop()
        assert stop.asked == number
    assert signal.getsignal(number) is before


@pytest.mark.parametrize("tells", [True, False])
def test_the_first_signal_is_answered_at_once(tells, capfd):
    with Stop(tells=tells):
        os.kill(os.getpid(), signal.SIGTERM)
        told = capfd.readouterr().err
    assert told == ("stopping after this step; once more to end at once\n" if tells else "")


@pytest.fixture
def interruptible():
    """A shell starts jobs in the background deaf to SIGINT, and Python then leaves it so."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_the_second_signal_is_not_caught(interruptible):
    with Stop() as stop, pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
        assert stop()
        os.kill(os.getpid(), signal.SIGINT)


def test_in_another_thread_it_only_holds_the_wish():
    seen = []

    def body() -> None:
        with Stop() as stop:
            seen.append(stop())

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert seen == [False]
