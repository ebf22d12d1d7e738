"""Forecast a plan, search plans, explain the choice: before a single device is touched."""

from fourfold.planner.subject import Subject as Subject
