from __future__ import annotations

import faulthandler
import os
import time

import pytest
import torch

from fourfold.planner.isolate import IsolationError, isolated


def test_any_callable_and_its_result():
    there = torch.arange(3)
    assert isolated(lambda: {"sum": int(there.sum()), "pid": os.getpid()})["sum"] == 3
    assert isolated(os.getpid) != os.getpid()


def test_autograd_runs_there():
    (torch.ones(2, requires_grad=True) * 2).sum().backward()
    x = torch.ones(300, 300, requires_grad=True)
    (x @ x).sum().backward()

    def work():
        y = torch.ones(300, 300, requires_grad=True)
        (y @ y).sum().backward()
        assert y.grad is not None
        return float(y.grad.sum())

    assert isolated(work) == 2 * 300**3


def test_an_error_is_told():
    def fails():
        raise ValueError("no such layer")

    with pytest.raises(IsolationError, match="ValueError: no such layer"):
        isolated(fails)


def test_an_abort_there_does_not_abort_here():
    def aborts():
        faulthandler.disable()  # pytest's would print the stack of this intended end
        os.abort()

    with pytest.raises(IsolationError, match="SIGABRT"):
        isolated(aborts)


def test_an_exit_without_a_result_is_told():
    with pytest.raises(IsolationError, match="status 3"):
        isolated(lambda: os._exit(3))


def test_what_never_ends_is_ended():
    with pytest.raises(IsolationError, match=r"no result after 0\.2 s"):
        isolated(lambda: time.sleep(60), seconds=0.2)
