# SPDX-License-Identifier: Apache-2.0
"""Public names of correlated noise: the families, the best of each, and workloads."""

from dualdp.plan.correlated.optimise import optimise as optimise
from dualdp.plan.correlated.strategies import Strategy as Strategy
from dualdp.plan.correlated.strategies import band as band
from dualdp.plan.correlated.strategies import bisr as bisr
from dualdp.plan.correlated.strategies import blt as blt
from dualdp.plan.correlated.strategies import identity as identity
from dualdp.plan.correlated.strategies import lambda_cgd as lambda_cgd
from dualdp.plan.correlated.strategies import square_root as square_root
from dualdp.plan.correlated.strategies import window as window
from dualdp.plan.correlated.strategies import workload as workload
