"""A wish to stop."""

import os
import signal
import subprocess
import sys
import threading

import pytest

from fourfold.training.stop import Stop, ended_in_words


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


# ---- SIGTERM while nobody listens yet

KILL = "os.kill(os.getpid(), signal.SIGTERM)"
ENDED = "stopped at once by SIGTERM\n"


def ended(*lines: str, **environment: str) -> tuple[int, str]:
    """How a process of these lines ended, and what it said."""
    program = "\n".join(["import os, signal", "from fourfold.training.stop import Stop, ended_in_words", *lines])
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=os.environ | environment)
    return done.returncode, done.stderr


def test_before_anything_listens_sigterm_ends_at_once_in_words_and_by_the_signal():
    assert ended("with ended_in_words():", f" {KILL}", " print('late')") == (-signal.SIGTERM, ENDED)


def test_under_torchrun_one_rank_says_so_for_all():
    assert ended("with ended_in_words():", f" {KILL}", RANK="0") == (-signal.SIGTERM, ENDED)
    assert ended("with ended_in_words():", f" {KILL}", RANK="1") == (-signal.SIGTERM, "")


def test_a_forked_child_that_its_parent_ends_says_nothing():
    child = ["with ended_in_words():", " child = os.fork()", " if child == 0:", f"  {KILL}"]
    assert ended(*child, " os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) + 15)") == (0, "")


def test_the_second_sigterm_is_the_systems_own_and_needs_no_python():
    """Python's handlers wait for a backend's call to return, which it may never do."""
    with ended_in_words():
        before = signal.getsignal(signal.SIGTERM)
        with Stop(tells=False) as stop:
            assert not stop()
        assert signal.getsignal(signal.SIGTERM) is before
        with Stop(tells=False) as stop:
            os.kill(os.getpid(), signal.SIGTERM)
            assert stop()
            assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_another_programs_handler_stays():
    heard = []
    before = signal.signal(signal.SIGTERM, lambda *_: heard.append(1))
    try:
        with ended_in_words():
            os.kill(os.getpid(), signal.SIGTERM)
        with Stop(tells=False):
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)
        assert heard == [1, 1]
    finally:
        signal.signal(signal.SIGTERM, before)
