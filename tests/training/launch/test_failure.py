"""Which failure is the cause, and how it is told."""

import pytest

from fourfold.training import failure
from fourfold.training.data import CorpusError
from fourfold.training.failure import Failure
from fourfold.wire import WireError


def test_the_first_failure_that_is_no_consequence_is_the_cause():
    lost = Failure(0, 4, "connection closed", when=1.0, consequence=True)
    cause = Failure(2, 4, "wrong", when=2.0)
    later = Failure(1, 4, "wrong too", when=3.0)
    assert failure.cause([later, cause, lost]) == cause
    assert failure.cause([lost]) == lost
    assert failure.cause([]) is None


@pytest.mark.parametrize(
    "message", ["Connection closed by peer [127.0.0.1]:53022", "writev: Broken pipe", "Connection reset by peer"]
)
def test_a_lost_connection_is_a_consequence_even_when_wrapped(message):
    inner = RuntimeError(message)
    outer = WireError("all_reduce 7 failed")
    outer.__cause__ = inner
    assert failure.of_exception(outer, 1, 3, None).consequence
    assert not failure.of_exception(RuntimeError("the model is wrong"), 1, 3, None).consequence


def test_our_own_errors_are_told_in_their_words_and_others_with_their_type():
    mistake = failure.of_exception(CorpusError("data: the corpus\n is empty"), 0, None, None)
    assert mistake.mistake
    assert str(mistake) == "rank 0, before the first step: data: the corpus is empty"
    defect = failure.of_exception(ValueError("shape"), 3, 7, None)
    assert not defect.mistake
    assert str(defect) == "rank 3, step 7: ValueError: shape"


def test_an_abort_is_told_by_the_backends_last_words(tmp_path):
    output = tmp_path / "stderr.log"
    output.write_text(
        "noise\nterminate called\n  what():  [enforce fail] op.preamble.length <= op.nbytes\n*** trailer\n"
    )
    told = failure.of_exit(-6, 1, 2, output)
    assert told.reason.startswith("aborted (SIGABRT), mostly inside the communication backend: what():  [enforce fail]")
    assert failure.of_exit(3, 1, 2, None).reason == "ended with exit code 3"
    assert "out of memory" in failure.of_exit(-9, 1, 2, output).reason


def test_a_failure_goes_through_its_file(tmp_path):
    try:
        raise RuntimeError("deep inside")
    except RuntimeError as error:
        written = failure.write(failure.of_exception(error, 1, 5, None), tmp_path, error)
    assert failure.read(tmp_path) == [written]
    assert "deep inside" in (tmp_path / "1.traceback.txt").read_text()
    assert str(written).endswith("1.traceback.txt)")
