"""Proof and diagnosis: a plan beside one plain process, and what this machine is."""

from fourfold.verify.diagnosis import Diagnosis as Diagnosis
from fourfold.verify.diagnosis import Finding as Finding
from fourfold.verify.doctor import cluster_file as cluster_file
from fourfold.verify.doctor import doctor as doctor
