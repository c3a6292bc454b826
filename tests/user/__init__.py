# SPDX-License-Identifier: Apache-2.0
"""Programs as their authors write them: right ones run, mistakes are refused with a way out."""
